"""Pictures of what a terminal and a notebook show while a real job runs, for docs/pictures.

python scripts/screens.py            # both; or: top, notebook

`top` is what `multiverso top` draws on a terminal, with its colours, as SVG. `notebook` is a notebook that is run,
converted to HTML by nbconvert and photographed in Chromium: it wants chromium, nbconvert and nbclient.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
MULTIVERSO = (sys.executable, "-m", "multiverso.cli")
COLUMNS, LINES = 156, 10
SEEN_SECONDS = 12.0  # until the bars of operations a second are full
COLOURS = {"31": "#f66", "32": "#6c6", "33": "#fc6"}

JOB = """
import math, time
import numpy as np
import multiverso as mv

mv.init(sync=True)
weights = mv.ArrayTableHandler(1_000_000, name="weights")
for step in range(10_000):
    time.sleep(0.8 if mv.worker_id() == 2 else 0.1)  # worker 2 is slow
    weights.add(np.full(1_000_000, 1e-3, "float32"))
    weights.get()
    mv.log(loss=2.3 * math.exp(-step / 20), step=step)
mv.shutdown()
"""

CELLS = (
    """import multiverso as mv


def train(rate):
    import time

    import numpy as np

    mv.init()
    table = mv.ArrayTableHandler(8, name="weights")
    truth = np.arange(1.0, 9.0)
    random = np.random.default_rng(mv.worker_id())
    for step in range(500):
        x = random.normal(size=8)
        wrong = table.get() - truth
        table.add(-rate * (x @ wrong) * x)
        mv.log(loss=float(wrong @ wrong))
        time.sleep(0.02)  # as if a step took longer
    mv.barrier()
    print("largest error:", abs(table.get() - truth).max().round(2))
    return table.get()""",
    """results = mv.run(train, workers=2, args=(0.006,))
results[0].round(1)""",
    """results = mv.run(train, workers=2, args=(0.006,), page=True)""",
)


# -- a terminal --------------------------------------------------------------------------------------------------------


def top() -> None:
    """Draws what `multiverso top` shows of a job of four workers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(JOB)
        command = [*MULTIVERSO, "run", "-n", "4", "train.py"]
        job = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(3.0)  # so that the job has its workers
            text = terminal([*MULTIVERSO, "top", "--job", "train.py"])
        finally:
            job.send_signal(signal.SIGINT)
            job.wait()
    whole = re.findall(r"\x1b\[H(.*?)\x1b\[J", text, re.S)[-5:]
    screen = max(whole, key=lambda screen: screen.count("round"))  # one in which workers wait
    lines = [line.rstrip("\r").replace("\x1b[K", "") for line in screen.splitlines()]
    assert any("train.py" in line for line in lines), text
    (PICTURES / "top.svg").write_text(drawn(["$ multiverso top", *lines]))


def terminal(command: list[str]) -> str:
    """All that a program writes to a terminal of its own in some seconds."""
    process, descriptor = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm"
        os.execv(command[0], command)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    text, end, told = b"", time.monotonic() + SEEN_SECONDS, False
    while True:
        try:
            block = os.read(descriptor, 1 << 16)
        except OSError:  # it has ended
            break
        if not told:
            text += block
        if time.monotonic() > end and not told:
            os.write(descriptor, b"q")
            told = True
    os.waitpid(process, 0)
    return text.decode()


def drawn(lines: list[str]) -> str:
    """A terminal's lines, with their colours, as SVG."""
    width, height = 8 * COLUMNS, 19 * len(lines) + 22
    parts = []
    for number, line in enumerate(lines):
        spans, style, column = [], "", 0
        for code, text in re.findall(r"(?:\x1b\[([\d;]*)m)?([^\x1b]*)", line):
            if code:
                styles = {"1": ' font-weight="bold"', "2": ' fill="#999"'}
                style = "" if code == "0" else styles.get(code, f' fill="{COLOURS.get(code, "#ddd")}"')
            spans += [
                f'<tspan x="{10 + 8 * (column + word.start())}"{style}>{html.escape(word[0])}</tspan>'
                for word in re.finditer(r"\S+(?: \S+)*", text)  # each column where it stands, whatever the font
            ]
            column += len(text)
        parts.append(f'<text y="{25 + 19 * number}">{"".join(spans)}</text>')
    style = 'font-family="ui-monospace, \'DejaVu Sans Mono\', Menlo, Consolas, monospace" font-size="13.2" fill="#ddd"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style} role="img">'
    ground = f'<rect width="{width}" height="{height}" rx="6" fill="#1e1e1e"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


# -- a notebook --------------------------------------------------------------------------------------------------------


def notebook() -> None:
    """Runs a notebook and photographs it: two cells with what they print, and one with the page."""
    import nbclient
    import nbconvert
    import nbformat

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from chromium import Chromium

    book: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=120).execute()
    text, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(book)
    with tempfile.TemporaryDirectory() as folder, Chromium() as chromium:
        path = Path(folder, "notebook.html")
        path.write_text(re.sub(r'<script[^>]*src="https?:[^>]*></script>', "", text))
        chromium.look(1000, 800)
        chromium.open(path.as_uri())
        frame = "document.querySelector('iframe').contentDocument"
        chromium.wait(f"{frame}.querySelectorAll('#charts canvas').length >= 4")
        for name, shown in (("run", (0, 1)), ("page", (2,))):
            cells = "[...document.querySelectorAll('.jp-Cell')]"
            hide = f"cell.style.display = {list(shown)}.includes(n) ? '' : 'none'"
            chromium.value(f"{cells}.forEach((cell, n) => {{ {hide} }})")
            title = f"{frame}.getElementById('charts-title').getBoundingClientRect().top"
            chromium.value(f"document.querySelector('iframe').contentWindow.scrollBy(0, {title} - 20)")
            height = chromium.value(f"Math.ceil(Math.max(...{cells}.map(c => c.getBoundingClientRect().bottom))) + 10")
            chromium.look(1000, height)
            time.sleep(1.0)  # the charts follow the new size
            chromium.picture(PICTURES / f"notebook-{name}.png", whole=False)


def main() -> None:
    for name in sys.argv[1:] or ("top", "notebook"):
        {"top": top, "notebook": notebook}[name]()


if __name__ == "__main__":
    main()
