"""How a process finds its job: from its environment, or by meeting the job's other hosts."""
