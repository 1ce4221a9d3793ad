"""A job as it is seen from outside: one record of a moment, what lies between two, and who holds the others up."""
