"""`python -m multiverso`."""

from multiverso.cli import main

main()
