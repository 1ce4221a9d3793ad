"""The coordinator: who is there, tables that begin and end, barriers, losses."""
