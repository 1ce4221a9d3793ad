"""The page in a real Chromium: what its user sees, hears and can do without a mouse. Wants chromium: `make page`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from page_support import Launched, script

from axe import violations
from chromium import Chromium
from multiverso.page.feed import Feed
from multiverso.watching.snapshot import Link, Published, Snapshot

VERDICT = "document.getElementById('verdict').textContent"
CONTINUES = """
import time
import multiverso as mv

mv.init(on_lost="continue")
table = mv.ArrayTableHandler(100, name="weights")
step = 0
while True:
    time.sleep(0.2 if mv.worker_id() == 1 else 0.01)
    table.add(table.get() * 0 + 1)
    mv.log(loss=1 / (1 + step), step=step)
    step += 1
    mv.barrier()
"""


HOSTS = """
import numpy as np
import multiverso as mv

mv.init()
table, users = mv.ArrayTableHandler(100, name="weights"), mv.KeyedTable(8, name="users", cache_rows=100)
step = 0
while True:  # thousands of steps a second
    table.add(table.get() * 0 + 1)
    mv.log(loss=1 / (1 + step), step=step)
    step += 1
    if step % 100 == 0:
        users.add(np.ones((50, 8)), np.arange(step % 5000, step % 5000 + 50))
"""


@pytest.fixture
def browser() -> Iterator[Chromium]:
    with Chromium() as chromium:
        chromium.look(1280, 900)
        yield chromium


def test_a_slow_worker_is_named_and_a_killed_one_is_seen(tmp_path: Path, browser: Chromium) -> None:
    options = ("-n", 3, "--page", "--on-failure", "continue")
    with Launched("run", *options, script(tmp_path, CONTINUES), cwd=tmp_path) as job:
        browser.open(job.address)
        browser.wait(f"{VERDICT}.startsWith('Worker 1 is the slowest: the others spend')")
        browser.wait("document.querySelectorAll('#charts canvas').length >= 4")
        tree = browser.tree()
        roles = {role for role, _ in tree}
        assert {"main", "banner", "heading", "table", "columnheader", "rowheader", "status", "log", "region"} <= roles
        headings = [name for role, name in tree if role == "heading"]
        assert headings[:5] == ["train.py", "Workers", "Who waits for whom", "Over time", "What happened"]
        images = [name for role, name in tree if role == "image"]
        assert all(images), "each picture has a name"
        assert any(name.startswith("Chart by worker: loss; now") for name in images)
        assert next(name for role, name in tree if role == "button") == "Save as one file"
        # it asks nobody but its own server for anything, and nothing went wrong
        assert all(url.startswith(job.address.partition("?")[0]) for url in browser.requests)
        assert browser.errors == []
        # without a mouse: to the head of the column of costs, and there the return key
        costs = "document.activeElement.textContent === 'costs others'"
        for _ in range(30):
            if browser.value(costs):
                break
            for kind in ("keyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        assert browser.value(costs)
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)
        browser.wait("document.querySelector('th[aria-sort=descending]').textContent === 'costs others'")
        browser.wait("document.querySelector('#workers tbody tr th').textContent === '1'")
        # a worker is killed
        victim = browser.value("multiverso.state.now.workers[2].pid")
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        browser.wait("document.querySelector('#events li.bad')?.textContent.includes('worker 2')")
        print(f"a killed worker was shown after {time.monotonic() - killed:.2f} s")
        browser.wait("document.querySelector('#workers .state-lost')")
        # what is saved shows the same, without a server
        saved = tmp_path / "saved.html"
        saved.write_text(browser.value("multiverso.saved()"))
        os.killpg(job.process.pid, signal.SIGINT)
        browser.wait(f"{VERDICT}.startsWith('The job is over')")
        assert job.end()[0] == 130
        browser.open(saved.as_uri())
        browser.wait("document.querySelectorAll('#charts canvas').length >= 4")
        assert browser.value("document.querySelector('#events li.bad').textContent.includes('worker 2')")
        assert browser.value("document.getElementById('save').hidden")


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_has_failed_looks_as_one(code: int, tmp_path: Path, browser: Chromium) -> None:
    text = f"import sys\nimport multiverso as mv\nmv.init()\nsys.stdin.readline()\nmv.shutdown()\nsys.exit({code})\n"
    with Launched("run", "-n", 1, "--page", script(tmp_path, text), cwd=tmp_path) as job:
        browser.open(job.address)
        browser.wait(f"{VERDICT}.startsWith('One worker is running')")
        assert job.process.stdin is not None
        job.process.stdin.write("\n")
        job.process.stdin.flush()
        browser.wait(f"{VERDICT}.startsWith('The job is over')")
        is_bad = "document.getElementById('verdict').className === 'bad'"
        assert browser.value(is_bad) == bool(code)
        colour = "getComputedStyle(document.getElementById('verdict')).borderLeftColor"
        assert browser.value(colour) == ("rgb(179, 38, 30)" if code else "rgb(11, 107, 58)")
        assert ("failed with exit code 3" in browser.value(VERDICT)) == bool(code)
        for dark in (False, True):
            browser.look(1280, 900, dark=dark)
            assert violations(browser) == []
        browser.picture(Path(os.environ.get("MULTIVERSO_PICTURES", tmp_path)) / f"page-over-{code}.png")
        assert job.end()[0] == code


def test_a_quick_job_on_two_hosts_shows_the_way_between_them(tmp_path: Path, browser: Chromium) -> None:
    folder = Path(os.environ.get("MULTIVERSO_PICTURES", tmp_path))
    folder.mkdir(exist_ok=True)
    with Launched("run", "-n", 4, "--hosts", 2, "--page", script(tmp_path, HOSTS), cwd=tmp_path) as job:
        browser.open(job.address)
        browser.wait("document.querySelector('#links tbody')?.textContent.includes('connected')")
        browser.wait("Math.max(...multiverso.state.now.workers.map((worker) => worker.step)) > 5000")
        browser.wait("multiverso.state.points.length > 20")
        figures = browser.value("[...document.querySelectorAll('#charts figure')].map((one) => one.textContent)")
        for title in ("bytes a second to and from other hosts", "round trip to other hosts", "rows of keyed tables"):
            assert any(text.startswith(title) for text in figures), figures
        assert any("to host-1" in text and "from host-1" in text for text in figures), "a legend of its own"
        assert browser.value("multiverso.state.events.filter((event) => event.bad).length") == 0
        assert violations(browser) == []
        assert browser.errors == []
        browser.look(1280, browser.value("document.documentElement.scrollHeight"))
        browser.picture(folder / "page-hosts.png")
        saved = tmp_path / "saved.html"
        saved.write_text(browser.value("multiverso.saved()"))
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.end()[0] == 130
    browser.open(saved.as_uri())
    browser.wait(
        "/^\\d+%$/.test(document.querySelector('#links tbody tr').children[4].textContent)"
    )  # busy, in a file, too


@pytest.mark.parametrize("workers", [4, 64])
def test_it_fits_a_phone_and_a_screen_light_and_dark(workers: int, tmp_path: Path, browser: Chromium) -> None:
    """Pictures of it are left in the folder that MULTIVERSO_PICTURES names, for somebody to look at."""
    folder = Path(os.environ.get("MULTIVERSO_PICTURES", tmp_path))
    folder.mkdir(exist_ok=True)
    command = [sys.executable, Path(__file__).with_name("many_workers.py"), str(workers)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with job, ExitStack() as stack:
        stack.callback(job.kill)
        assert job.stdout is not None
        page = stack.enter_context(Launched("page", job.stdout.readline().strip(), cwd=tmp_path))
        for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
            browser.look(width, 900, dark=dark, mobile=width < 1000)
            browser.open(page.address)
            browser.wait(f"{VERDICT}.startsWith('Worker 2 is the slowest')")
            browser.wait("multiverso.state.points.length > 20")
            browser.wait("document.querySelectorAll('#workers tbody tr').length > 3")
            assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is beyond the edge"
            if name == "phone":  # where it is seen that a table goes on beyond its edge
                browser.wait("document.getElementById('workers').parentElement.classList.contains('after')")
            assert violations(browser) == []
            browser.look(width, browser.value("document.documentElement.scrollHeight"), dark=dark, mobile=width < 1000)
            browser.wait("document.querySelectorAll('#edges line').length >= 3")
            browser.wait("document.querySelectorAll('#nodes .needed').length === 1")
            browser.picture(folder / f"page-{workers}-{name}.png")
        assert browser.errors == []
        job.communicate("", timeout=60)
        browser.wait(f"{VERDICT}.startsWith('The job is over')")


def test_what_went_wrong_is_said_first_and_numbers_have_fitting_units(tmp_path: Path, browser: Chromium) -> None:
    """A lost worker was not in the first line; half a minute was 30000 ms; once a job was over, costs were too high."""

    def worker(number: int, look: int) -> dict[str, object]:
        counts = {"waited_seconds": 0.25 * look * (number > 0), "cost_seconds": 0.5 * look * (number == 0)}
        counts |= dict.fromkeys(("adds", "gets", "exchanges", "bytes", "staleness", "cpu_seconds"), 0.0)
        lost = {"state": "lost" if number == 3 and look > 20 else "alive", "waiting_for": "barrier 2" if number else ""}
        return (
            {"id": number, "pid": 7 + number, "program": "train.py", "host": "host-0", "incarnation": 0}
            | {
                "waiting_seconds": 0.5,
                "needs": [0],
                "resident_bytes": 1 << 20,
                "checkpoint": 0,
                "step": None,
                "values": {},
            }
            | counts
            | lost
        )

    feed = Feed()
    for look in range(60):
        link = Link("host-1", "connected", 2, 0.0, 0.0, behind_seconds=12.3, round_trip_seconds=0.2)
        published = Published("policy", 7, None, 2, 0, 1 << 20, "host-0", 3 << 20, oldest_version=5, oldest_pid=99)
        facts = {"at": look / 2, "up_seconds": look / 2, "address": "a", "host": "host-0", "workers_num": 3}
        facts |= {"memory_bytes": 0, "checkpoint": 0, "tables": [], "links": [link], "waited_for": {}}
        facts |= {"publications": [published]}
        feed.add(msgspec.convert(facts | {"workers": [worker(number, look) for number in (0, 1, 3)]}, Snapshot))
    path = tmp_path / "page.html"
    path.write_text(feed.saved())
    browser.open(path.as_uri())
    browser.wait("document.querySelectorAll('#charts canvas').length >= 4")
    said = browser.value(VERDICT)
    assert said.startswith("Worker 3 was lost. Worker 0 is the slowest: ")
    assert said.endswith(" waiting for it, in the last 10 seconds.")
    cells = browser.value("[...document.querySelectorAll('#publications tbody td')].map((cell) => cell.textContent)")
    assert cells == ["host-0", "7", "", "2", "process 99: version 5", "0", "3.1 MB", "1.0 MB"]
    heads = browser.value("[...document.querySelectorAll('#workers thead th')].map((cell) => cell.textContent)")
    assert "stale, on its host" in heads
    assert browser.value("document.getElementById('verdict').className") == "slow"
    cells = browser.value("[...document.querySelectorAll('#links tbody tr > *')].map((cell) => cell.textContent)")
    assert cells[5:] == ["200 ms", "12 s", "once"]
    figures = browser.value("[...document.querySelectorAll('#charts figcaption')].map((one) => one.textContent)")
    assert any(text.endswith("now 12 s") for text in figures), figures
    assert any(text.endswith("now 0% to 50% over workers") for text in figures), "not over time"
    assert feed.history.now is not None
    feed.add(msgspec.structs.replace(feed.history.now, at=30.0, up_seconds=30.0, over="ended by a signal", well=False))
    path.write_text(feed.saved())
    browser.open(path.as_uri())
    browser.wait(f"{VERDICT}.startsWith('The job is over')")
    browser.wait("document.querySelector('#workers tbody td:nth-child(5)')?.textContent")
    assert browser.value("document.querySelector('#workers tbody td:nth-child(5)').textContent") in ("49%", "48%")
