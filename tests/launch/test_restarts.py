"""`multiverso run --max-restarts`: what is started again, how often, and what is not."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_support import Running, command, multiverso, script

from multiverso.launch.restart_policy import Ended, Starts
from multiverso.launch.results import JobResult
from multiverso.launch.signals import Signals

FAILS = """
import os, sys
restarts, resume = os.environ["MULTIVERSO_RESTARTS"], os.environ.get("MULTIVERSO_RESUME")
print("start", restarts, resume, flush=True)
if int(restarts) < int(sys.argv[1]) and os.environ["MULTIVERSO_WORKER_ID"] == "1":
    sys.exit(3)
"""


def test_a_job_that_fails_is_started_again_until_it_succeeds(tmp_path: Path) -> None:
    job = script(tmp_path, FAILS)
    logs = tmp_path / "logs"
    done = multiverso("run", "-n", 2, "--max-restarts", 3, "--resume", "--log-dir", logs, job, 2)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith("multiverso")]
    again = [line.replace(" in 0.5 s", "") for line in said if "started again" in line]
    # without a pause if the second start took 10 seconds
    assert again == [f"multiverso: the job is started again ({number} of at most 3 times)." for number in (1, 2)]
    assert sum("failed with exit code 3" in line for line in said) == 2
    assert (logs / "worker-1.log").read_text() == "".join(f"start {n} 1\n" for n in range(3))


def test_the_last_start_decides_and_a_program_reads_of_each(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 2, "--max-restarts", 1, "--json", script(tmp_path, FAILS), 9)
    assert done.returncode == 3
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [event for event in events if event["event"] in ("restart", "summary")]
    assert [event["event"] for event in ends] == ["summary", "restart", "summary"]
    assert (ends[1]["number"], ends[1]["most"]) == (1, 1)
    assert [event["exit_code"] for event in ends[::2]] == [3, 3]
    written = [event["text"] for event in events if (event.get("stream"), event.get("worker")) == ("stdout", 1)]
    assert written == ["start 0 None", "start 1 None"]


def test_ctrl_c_ends_a_job_for_good(tmp_path: Path) -> None:
    job = script(tmp_path, "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.02)")
    running = Running(command("run", "--max-restarts", 5, job))
    running.lines(1)
    running.send(signal.SIGINT)
    code, _, err = running.end()
    assert code == 130
    assert "started again" not in err
    assert multiverso("run", "--max-restarts", "-1", job).returncode == 2


def result(reason: str, code: int) -> JobResult:
    return JobResult(reason, code, None, None, (), 1.0)  # type: ignore[arg-type]


def sent(signals: Signals, number: int) -> None:
    with signals:
        signal.raise_signal(number)
    signals.put_back()


@pytest.mark.parametrize(
    ("reason", "code", "again"),
    [
        ("failed", 1, True),
        ("finished", 1, True),
        ("finished", 0, False),
        ("signal", 130, False),
        ("timeout", 124, False),
    ],
)
def test_what_is_started_again(reason: str, code: int, again: bool) -> None:
    def number_of(starts: Starts, between: Callable[[], None] = lambda: None) -> int:
        """Returns how many there are where each ends like this."""
        ends: list[Ended] = []

        def start() -> Ended:
            ends.append(Ended(result(reason, code), code, lambda: None))
            return ends[-1]

        assert starts.run(start, between) is ends[-1]
        return len(ends)

    assert number_of(Starts(2, None, Signals())) == (3 if again else 1)
    asked = Starts(2, None, Signals())
    assert number_of(asked, lambda: sent(asked.signals, signal.SIGTERM)) == (2 if again else 1)
    assert number_of(asked) == 1
    assert number_of(Starts(2, 1e-9, Signals())) == 1


def test_a_signal_between_two_starts_reaches_the_next_one() -> None:
    signals, received = Signals(), []
    sent(signals, signal.SIGUSR1)
    signals.pass_to(received.append)
    signals.pass_to(None)
    assert received == []
    sent(signals, signal.SIGINT)
    signals.pass_to(received.append)
    assert received == [signal.SIGINT]
