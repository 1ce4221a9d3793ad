"""Stands between the launcher and a worker for a few milliseconds: ties the worker's life to the launcher's.

Run as a script by its path in an isolated interpreter, so that it costs no import, and because code between
fork and exec is not safe in a process that has threads.

Arguments: the launcher's pid, the cores to run on ("0,2" or "-"), the worker's command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for SIGKILL when the launcher's thread ends, then becomes the worker."""
    parent, cores, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the request
        os._exit(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # A Python parent, or a shell's background job, leaves these ignored, and exec would pass that on.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"multiverso: cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    main()
