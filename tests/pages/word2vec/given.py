"""A folder of text, as the page takes it for given."""

from pathlib import Path

Path("corpus").mkdir()
Path("corpus/text.txt").write_text("a list is a sequence and a tuple is a sequence of names that a list has\n" * 50)
