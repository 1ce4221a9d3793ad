"""Stands between the launcher and a host's launcher: starts it by ssh, and passes signals on as lines.

What ssh runs gets no signal of ours, and its own end tells the other side nothing at once. So standard input is the way
there: the first line is the host's roster, each later one a signal's number, and its end, whatever ended us, ends the
host's part of the job (see `place`).

Run as a script by its path in an isolated interpreter. Arguments: the command to run, ssh and all. The roster stands in
the environment.
"""

import os
import signal
import subprocess
import sys

FAILED = 255  # what ssh ends with when there is no connection, or no more
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def main() -> None:
    """Starts the command, and ends with its code."""
    roster = os.environ.pop("MULTIVERSO_ROSTER")
    # in a session of its own: what ends our group must not end ssh before it has passed that on
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    way = process.stdin.fileno()

    def send(text: str) -> None:
        try:
            os.write(way, text.encode())
        except OSError:
            pass  # it has ended, and so shall we

    for number in SIGNALS:
        signal.signal(number, lambda number, frame: send(f"{number}\n"))
    send(f"{roster}\n")
    code = process.wait()
    for number in SIGNALS:  # or one that comes while the interpreter ends would take the code's place
        signal.signal(number, signal.SIG_IGN)
    sys.exit(FAILED if code < 0 else code)  # where ssh is killed, the connection has ended as in other ways


if __name__ == "__main__":
    main()
