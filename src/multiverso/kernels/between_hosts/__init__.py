"""Kernels between hosts: `agreeing` for the copies of asynchronous tables, the others for rounds."""
