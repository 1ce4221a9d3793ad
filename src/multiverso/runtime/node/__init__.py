"""The node: who is in the job and alive, whose memory is where, and what it answers."""
