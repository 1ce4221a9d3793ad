"""A job as its node and its workers both see it: the control segment, what each worker waits for, the job's options."""
