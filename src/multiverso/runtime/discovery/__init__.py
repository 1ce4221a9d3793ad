"""Finds a process's job: from its environment, or by meeting the job's other hosts."""
