"""The copies of asynchronous tables, kept near each other: chunks, differences, codecs, rules."""
