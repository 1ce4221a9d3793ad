"""`multiverso.run(..., page=True)`: in a real kernel's cell, and where there is none."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

CELL = """
import time
import multiverso as mv

def train():
    mv.init()
    table = mv.ArrayTableHandler(5, name="weights")
    for step in range(20):
        table.add([1.0] * 5)
        mv.log(loss=1.0 / (1 + step))
        time.sleep(0.08)
    mv.barrier()
    return float(table.get()[0])

print(mv.run(train, workers=2, page=True))
"""


def test_a_cell_shows_the_page_and_keeps_it(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).with_name("run_cell.py")]
    done = subprocess.run(command, input=CELL, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    (live,) = [content["data"]["text/html"] for kind, content in shown if kind == "display_data"]
    (kept,) = [content["data"]["text/html"] for kind, content in shown if kind == "update_display_data"]
    assert re.search(r'<iframe title="The page of the job" src="http://127\.0\.0\.1:\d+/\?token=[\w-]+"', live)
    assert "srcdoc=" in kept
    page = html.unescape(kept)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    now = json.loads(found[1])["now"]
    assert [table["name"] for table in now["tables"]] == ["weights"]
    assert now["over"] == "all workers have finished", "what was looked at last comes before that"
    assert "".join(content["text"] for kind, content in shown if kind == "stream") == "[40.0, 40.0]\n"


def test_without_a_notebook_the_address_is_printed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(CELL.replace("print(mv.run", "if __name__ == '__main__':\n    print(mv.run"))
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert re.search(r"multiverso: the page is at http://127\.0\.0\.1:\d+/\?token=[\w-]+\n", done.stderr)
    assert done.stdout == "[40.0, 40.0]\n"
