"""The page of a real job, over HTTP: who may see it, what it tells, what stays of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_support import Launched, parsed, run, script, start

from multiverso.launch.local import _as_told
from multiverso.launch.results import JobResult
from multiverso.launch.signals import TOLD, Signals
from multiverso.launch.watched import Watch
from multiverso.page.address import new_file
from multiverso.page.document import document
from multiverso.page.feed import Feed, read_file
from multiverso.page.metrics import metrics_of
from multiverso.watching.slowest import slowest
from multiverso.watching.snapshot import Link, Snapshot

ROOT = Path(__file__).resolve().parents[2]
SLOW = "worker 1 is the slowest: the others spend"
# both have come, and been seen
ALL_HERE = """import os, sys, time
import multiverso as mv
mv.init()
mv.barrier()
time.sleep(1)
"""
FAILING = f"""{ALL_HERE}while not os.path.exists("seen"):
    time.sleep(0.01)
if mv.worker_id() == 1:
    raise ValueError
"""
WORKER: dict[str, Any] = {"id": 0, "pid": 1, "host": "", "program": "train.py", "state": "alive", "waiting_for": ""}
WORKER |= {"incarnation": 0, "needs": [], "resident_bytes": 0, "checkpoint": 0, "step": 1, "values": {}, "adds": 1.0}
WORKER |= {f"{what}_seconds": 0.0 for what in ("waiting", "waited", "cost", "cpu")}
WORKER |= dict.fromkeys(("gets", "exchanges", "bytes", "staleness"), 0.0)
FACTS: dict[str, Any] = {"at": 1.0, "address": "a", "host": "", "workers_num": 1, "up_seconds": 1.0, "memory_bytes": 0}
FACTS |= {"checkpoint": 0, "tables": [], "links": [], "waited_for": {}, "workers": [WORKER]}


def last_of_failing(job: Launched, cwd: Path) -> dict[str, Any]:
    """The last message of a job of FAILING on two hosts, which goes on once its workers have been seen."""
    messages = job.messages()
    for message in messages:
        if message["now"] and [worker["state"] for worker in message["now"]["workers"]] == ["alive", "alive"]:
            break
    (cwd / "seen").touch()
    *_, last = messages
    return last


def test_a_job_is_shown_while_it_runs_and_from_its_file_afterwards(tmp_path: Path) -> None:
    command = ("run", "-n", 2, "--page", "--history", "run.jsonl", script(tmp_path))
    with Launched(*command, cwd=tmp_path, fresh=True) as job:
        assert "2 workers on this host; page: http://127.0.0.1:" in job.first_line
        messages = job.messages()
        message = first = next(messages)
        assert first["whole"] is True
        while message["now"] is None or SLOW not in message["verdict"] or not message["now"]["workers"][0]["values"]:
            message = next(messages)
        # what is said in the end is of all the time
        while (found := slowest(None, now := msgspec.convert(message["now"], Snapshot))) is None or found.share < 0.1:
            message = next(messages)
        assert now.program == "train.py"
        assert [worker.state for worker in now.workers] == ["alive", "alive"]
        assert now.workers[0].values["loss"] is not None
        assert "round of weights" in now.waited_for
        # the same, for Prometheus
        status, text, headers = job.get("/metrics", Authorization=f"Bearer {job.token}")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        metrics = parsed(text)
        assert metrics["multiverso_up"] == 1
        assert metrics['multiverso_worker_adds_total{worker="0"}'] > 0
        assert metrics['multiverso_worker_cost_seconds_total{worker="1"}'] > 0
        # the end
        assert job.process.stdin is not None
        code, _, said = job.end()
        *_, last = messages
        assert code == 0
        assert "over" in said or "ran for" in said
        assert (last["now"]["over"], last["now"]["well"]) == ("all workers have finished", True)
        assert re.search(
            rf"multiverso: 2 workers ran for [\d.:]+( s)?; {SLOW} .*; waited for, over all workers: round of weights",
            said,
        )
    again = run("page", "run.jsonl", "--export", "run.html", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    text = (tmp_path / "run.html").read_text()
    assert "all workers have finished" in text
    assert not re.search(r"(src|href)=\"?(https?:)?//", text), "it asks nobody for anything"
    with Launched("page", "run.jsonl", cwd=tmp_path) as page:
        message = next(page.messages())
        assert message["now"]["over"] == "all workers have finished"
        assert message["points"]
        told = [event["text"] for event in message["events"]]
        assert told[0].endswith("joined")  # both, or one before the other
        assert "all workers have finished" in told
        os.killpg(page.process.pid, signal.SIGINT)
        assert page.end()[0] == 0


def test_a_job_that_runs_already_is_followed_to_its_end(tmp_path: Path) -> None:
    text = """
import sys
import multiverso as mv
mv.init()
mv.ArrayTableHandler(10, name="weights").add([1.0] * 10)
print("up", flush=True)
sys.stdin.readline()
mv.shutdown()
"""
    command = ("run", "-n", 1, script(tmp_path, text, "running.py"))
    with start(*command, cwd=tmp_path, fresh=True, stdin=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0] up\n"
        with Launched("page", "running.py", "--history", "run.jsonl", cwd=tmp_path) as page:
            messages = page.messages()
            while (message := next(messages))["now"] is None:
                pass
            assert [table["name"] for table in message["now"]["tables"]] == ["weights"]
            job.communicate("\n", timeout=100)
            while not message["now"]["over"]:
                message = next(messages)
            assert message["now"]["over"] == "its node has ended"
            assert message["verdict"].startswith("1 worker ran for")
            assert page.get("/")[0] == 200, "it stays, to be looked at"
            os.killpg(page.process.pid, signal.SIGINT)
            assert page.end()[0] == 0
    assert job.returncode == 0
    assert '"over":"its node has ended"' in (tmp_path / "run.jsonl").read_text().splitlines()[-1]


def test_who_does_not_know_the_token_gets_nothing(tmp_path: Path) -> None:
    with Launched("run", "-n", 1, "--page", script(tmp_path), cwd=tmp_path) as job:
        for path in ("/", "/events", "/metrics", "/nothing"):
            for wrong in ("", "x", job.token[:-1], job.token + "x", "é"):
                status, text, _ = job.get(path, token=wrong.encode().hex() if wrong == "é" else wrong)
                assert (status, "token" in text) == (403, True)
            assert job.get(path, Authorization="Bearer wrong")[0] == 403
            assert job.get(path, Authorization=job.token)[0] == 403, "a scheme is needed"
        status, text, headers = job.get("/")
        assert status == 200
        assert job.token not in text
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "server" not in headers
        assert job.get("/nothing")[0] == 404
        assert job.get("/", Authorization=f"token {job.token}")[0] == 200
        command = Path(f"/proc/{job.process.pid}/cmdline").read_text()
        commands = [path.read_text() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not any(job.token in one for one in [command, *commands]), "others see a process's arguments"
        assert job.end()[0] == 0


def test_scrapes_hold_while_workers_are_killed_and_replaced(tmp_path: Path) -> None:
    text = """
import time
import multiverso as mv
mv.init(on_lost="continue")
table = mv.ArrayTableHandler(10, name="weights")
while True:
    table.add([1.0] * 10)
    time.sleep(0.001)
"""
    options = ("-n", 2, "--page", "--history", "run.jsonl", "--on-failure", "continue", "--replace", 100)
    with Launched("run", *options, script(tmp_path, text), cwd=tmp_path) as job:
        messages, kills, anew = job.messages(), 0, 0
        for message in messages:
            if message["now"] is None:
                continue
            workers = message["now"]["workers"]
            anew = max(worker["incarnation"] for worker in workers)
            if kills == 5 and anew >= 5:
                break
            victim = workers[1] if len(workers) > 1 else None
            if victim and victim["state"] == "alive" and victim["incarnation"] == kills < 5:
                os.kill(victim["pid"], signal.SIGKILL)
                kills += 1
                metrics = parsed(job.get("/metrics")[1])
                assert metrics["multiverso_up"] == 1
                assert 'multiverso_worker_adds_total{worker="0"}' in metrics
        events = next(job.messages())["events"]
        assert sum("has taken the place" in event["text"] for event in events) == 5
        assert sum(event["bad"] for event in events) == 5
        os.kill(job.process.pid, signal.SIGINT)
        assert job.end()[0] == 130
    last = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert (last["over"], last["well"]) == ("ended by a signal", None), "whoever ends a job has not failed"


def test_a_job_that_is_started_again_stays_on_its_page(tmp_path: Path) -> None:
    text = """
import os, sys, time
import multiverso as mv
mv.init()
mv.ArrayTableHandler(10).add([1.0] * 10)
time.sleep(1.0)  # longer than from one look to the next
sys.exit(int(os.environ["MULTIVERSO_RESTARTS"]) < 1)
"""
    with Launched("run", "-n", 1, "--page", "--max-restarts", 1, script(tmp_path, text), cwd=tmp_path) as job:
        *_, last = job.messages()
        assert last["now"]["restarts"] == 1
        assert last["now"]["over"] == "all workers have finished"
        assert job.end()[0] == 0


def test_a_job_that_fails_has_not_ended_well(tmp_path: Path) -> None:
    text = "import multiverso as mv, sys\nmv.init()\nsys.stdin.readline()\nraise ValueError('the reason')\n"
    with Launched("run", "-n", 1, "--page", script(tmp_path, text), cwd=tmp_path) as job:
        messages = job.messages()
        while next(messages)["now"] is None:
            pass
        assert job.process.stdin is not None
        job.process.stdin.write("\n")
        job.process.stdin.flush()
        *_, last = messages
        assert last["now"]["well"] is False
        assert re.fullmatch(
            r"worker 0 \(pid \d+\) failed with exit code 1: ValueError: the reason", last["now"]["over"]
        )
        assert last["events"][-1]["bad"]
        assert job.end()[0] == 1


@pytest.mark.parametrize("meanwhile", ["mv.barrier()", "time.sleep(1000)", "mv.shutdown()"])
def test_of_several_hosts_the_worker_that_failed_first_is_named(meanwhile: str, tmp_path: Path) -> None:
    """The first host's launcher knows its own workers only, which fail because another one has, or are ended."""
    text = f"{FAILING}{meanwhile}\n"
    with Launched("run", "-n", 2, "--hosts", 2, "--page", script(tmp_path, text), cwd=tmp_path) as job:
        last = last_of_failing(job, tmp_path)
        assert re.fullmatch(r"worker 1 \(pid \d+ on host-1\) was lost first", last["now"]["over"])
        assert last["now"]["well"] is False
        innocent = "left" if "shutdown" in meanwhile else "ended"
        assert [worker["state"] for worker in last["now"]["workers"]] == [innocent, "failed"]
        assert job.end()[0] == 1


def test_on_several_hosts_the_others_finish_without_one_that_failed(tmp_path: Path) -> None:
    options = ("-n", 2, "--hosts", 2, "--on-failure", "continue", "--page")
    with Launched("run", *options, script(tmp_path, f"{FAILING}mv.shutdown()\n"), cwd=tmp_path) as job:
        last = last_of_failing(job, tmp_path)
        words = r"the others have finished; worker 1 \(pid \d+ on host-1\) was lost first"
        assert re.fullmatch(words, last["now"]["over"])
        assert last["now"]["well"] is True
        assert [worker["state"] for worker in last["now"]["workers"]] == ["left", "lost"]
        assert job.end()[0] == 0


def test_who_or_what_ends_a_job_on_several_hosts_is_not_a_worker(tmp_path: Path) -> None:
    with Launched("run", "-n", 2, "--hosts", 2, "--page", script(tmp_path), cwd=tmp_path) as job:
        messages = job.messages()
        for message in messages:
            if message["now"] and all(worker["step"] for worker in message["now"]["workers"]):
                os.kill(job.process.pid, signal.SIGINT)
                break
        *_, last = messages
        assert (last["now"]["over"], last["now"]["well"]) == ("ended by a signal", None)
        assert [worker["state"] for worker in last["now"]["workers"]] == ["ended", "ended"]
        assert job.end()[0] == 130
    signals, ended = Signals(), JobResult("signal", 143, None, None, (), 1.0)
    signals.number = TOLD["timeout"]
    assert str(_as_told(ended, signals, is_doubtful=False)) == "it took longer than it may"


def test_nobody_is_alive_in_a_job_that_was_ended() -> None:
    """Of another host's workers the first one may not have heard any more."""
    workers = [
        WORKER | {"id": number, "state": state} for number, state in enumerate(("alive", "lost", "left", "free"))
    ]
    with closing(Watch(None, print)) as watch:
        watch.history.add(msgspec.convert({**FACTS, "workers": workers}, Snapshot))
        watch.end(JobResult("signal", 130, None, None, (), 1.0), None, "ended by a signal", None, stops=True)
        assert watch.history.now is not None
        assert [worker.state for worker in watch.history.now.workers] == ["ended", "ended", "left", "free"]


def test_on_several_hosts_a_file_goes_on_where_the_job_is_started_again(tmp_path: Path) -> None:
    """The first host's launcher is another one then: it refused the file, as it was there already."""
    text = f"{ALL_HERE}sys.exit(mv.worker_id() == 1 and int(os.environ['MULTIVERSO_RESTARTS']) < 1)\n"
    options = ("-n", 2, "--hosts", 2, "--max-restarts", 1, "--page", "--history", "run.jsonl")
    done = run("run", *options, script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    feed = Feed()
    read_file(tmp_path / "run.jsonl", feed.add)
    assert feed.history.now is not None
    assert (feed.history.now.restarts, feed.history.now.over) == (1, "all workers have finished")
    assert "the job was started again" in [event.text for event in feed.history.events]


def test_other_hosts_do_not_wait_for_one_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("{}\n")
    options = ("-n", 2, "--hosts", 2, "--on-failure", "continue", "--page", "--history", "there.jsonl")
    done = run("run", *options, script(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "multiverso: host-0: --history there.jsonl: this file is there already" in done.stderr
    assert "cannot be reached" not in done.stderr, "they tried for a minute"


def test_of_a_program_that_never_joins_the_end_says_so(tmp_path: Path) -> None:
    words = "no worker has called multiverso.init(), so there is nothing to show"
    text = "import sys\nsys.stdin.readline()\n"
    with Launched("run", "-n", 1, "--page", "--history", "run.jsonl", script(tmp_path, text), cwd=tmp_path) as job:
        messages = job.messages()
        assert next(messages)["now"] is None
        assert job.process.stdin is not None
        job.process.stdin.write("\n")
        job.process.stdin.flush()
        *_, last = messages
        assert (last["now"]["over"], last["now"]["workers"]) == ("all workers have finished", [])
        assert last["verdict"] == words
        code, _, said = job.end()
        assert (code, f"multiverso: {words}.\n" in said) == (0, True)
    assert run("page", "run.jsonl", "--export", "run.html", cwd=tmp_path).returncode == 0
    assert words in (tmp_path / "run.html").read_text()
    path = tmp_path / "run.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])  # as its launcher's death leaves it
    done = run("page", "run.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "no worker had called multiverso.init() by its end" in done.stderr


def test_a_page_that_is_killed_is_told_of_and_the_job_continues(tmp_path: Path) -> None:
    with Launched("run", "-n", 1, "--page", "--history", "run.jsonl", script(tmp_path), cwd=tmp_path) as job:
        for message in job.messages():
            if message["now"] and message["now"]["workers"]:
                break
        (page,) = [
            int(pid)
            for pid in Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
            if "multiverso.page\0" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(page, signal.SIGKILL)
        assert job.process.stderr is not None
        assert job.process.stderr.readline() == (
            f"multiverso: the page's process (pid {page}) was killed by SIGKILL, and run.jsonl ends here; the job "
            "continues, and `multiverso page` serves another page of it.\n"
        )
        code, _, said = job.end()
        assert (code, said.count("page's process")) == (0, 0), "it is said once"


def test_a_file_says_that_the_network_was_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with new_file(path) as file:
        written = Feed(file)
        for look in range(60):
            link = Link("host-1", "connected", 1, 0.0, 0.0, busy_seconds=0.45 * look)
            written.add(msgspec.convert(FACTS | {"at": look / 2, "up_seconds": look / 2, "links": [link]}, Snapshot))
        assert written.history.now is not None
        written.add(msgspec.structs.replace(written.history.now, over="all workers have finished", well=True))
    feed = Feed()
    read_file(path, feed.add)
    message = json.loads(feed.everything())
    assert message["network"] == "the network is the limit: the connection to host-1 is busy 90% of the time"
    assert [point[2]["host-1"][4] for point in message["points"][:3]] == [0.0, 0.45, 0.9]


def test_what_makes_no_sense_is_refused_before_anything_begins(tmp_path: Path) -> None:
    script(tmp_path, "print('began')")
    (tmp_path / "there.jsonl").write_text("{}\n")
    for arguments, words in (
        (("run", "--history", "x.jsonl", "train.py"), "add --page"),
        (("run", "--page", "--history", "there.jsonl", "train.py"), "this file is there already"),
        (("run", "--page", "--history", "nowhere/x.jsonl", "train.py"), "No such file"),
        (("run", "--page", "--history", "run.txt", "train.py"), "a job's past is a .jsonl file"),
        (("page", "there.jsonl"), "is not a job's past"),
        (("page", "absent.jsonl"), "No such file"),
        (("page", "no-such-job"), "no"),
        (("page", "--export", "x.html"), "give the .jsonl file"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_a_file_whose_writer_was_killed_is_shown_without_its_last_line(tmp_path: Path) -> None:
    with Launched("run", "-n", 1, "--page", "--history", "run.jsonl", script(tmp_path), cwd=tmp_path) as job:
        for message in job.messages():
            if message["now"] and message["now"]["workers"]:
                break
        assert job.end()[0] == 0
    path = tmp_path / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert run("page", "run.jsonl", "--export", "cut.html", cwd=tmp_path).returncode == 0
    done = run("page", "run.jsonl", "--export", "nowhere/cut.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "multiverso: nowhere/cut.html: No such file or directory\n")
    path.write_bytes(path.read_bytes().replace(b'"at":', b'"at":x', 1))
    done = run("page", "run.jsonl", "--export", "bad.html", cwd=tmp_path)
    assert (done.returncode, "run.jsonl, line 2" in done.stderr) == (2, True)


def test_names_that_others_choose_do_no_harm() -> None:
    evil = '</script><script>alert(1)</script>"\\\n'
    worker = WORKER | {"host": evil, "program": evil, "values": {evil: 2.5}}
    now = msgspec.convert(FACTS | {"workers": [worker], "waited_for": {evil: 1.0}}, Snapshot)
    metrics = parsed(metrics_of(now))
    assert any(name.startswith("multiverso_worker_logged{") and value == 2.5 for name, value in metrics.items())
    feed = Feed()
    feed.add(now)
    assert feed.saved().count("<script") == document().count("<script")
    assert parsed(metrics_of(None)) == {"multiverso_up": 0}


def test_the_first_host_of_several_shows_all_of_them(tmp_path: Path) -> None:
    with Launched("run", "--hosts", 2, "-n", 2, "--page", script(tmp_path), cwd=tmp_path) as job:
        assert "multiverso: 2 workers on host-0, host-1; page: http" in job.first_line
        for message in job.messages():
            if message["now"] and SLOW in message["verdict"]:
                workers = message["now"]["workers"]
                if all(worker["step"] and worker["resident_bytes"] > 1_000_000 for worker in workers):
                    break
        assert [worker["host"] for worker in workers] == ["host-0", "host-1"]
        assert [link["host"] for link in message["now"]["links"]] == ["host-1"]
        metrics = parsed(job.get("/metrics")[1])
        assert metrics['multiverso_link_connected{to="host-1"}'] == 1
        assert metrics['multiverso_link_bytes_sent_total{to="host-1"}'] > 0
        assert metrics['multiverso_worker_adds_total{worker="1",host="host-1"}'] > 0
        os.kill(job.process.pid, signal.SIGINT)
        job.end()


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    text = (ROOT / "docs/how-to/grafana.json").read_text()
    asked = set(re.findall(r"multiverso_[a-z_]+", text))
    made = set(re.findall(r'"([a-z_]+)": "', (ROOT / "src/multiverso/page/metrics.py").read_text()))
    plain = {"multiverso_up", "multiverso_workers", "multiverso_worker_logged", "multiverso_table_rows"}
    known = {f"multiverso_{kind}_{name}{end}" for name in made for kind in ("worker", "link") for end in ("", "_total")}
    assert len(asked) > 8
    assert asked <= known | plain
