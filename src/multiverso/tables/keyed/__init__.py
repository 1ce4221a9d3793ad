"""Tables of rows by key: `table` is what a user holds, the others are its parts."""
