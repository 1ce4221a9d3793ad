"""Tables whose rows live on one host each: where, what hosts say of them, and the copies of rows from elsewhere."""
