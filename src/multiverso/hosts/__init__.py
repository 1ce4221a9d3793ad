"""One job on several hosts: copies of the tables that the nodes keep near each other, and who decides what."""
