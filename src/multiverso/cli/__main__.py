"""`python -m multiverso.cli`."""

from multiverso.cli.main import main

main()
