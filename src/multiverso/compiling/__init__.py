"""What kernels are written in, and how they become object code that is kept on this machine."""
