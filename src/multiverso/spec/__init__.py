"""What a table is: its sizes, modes and the states of its updater."""
