"""What axe-core says about the page that a browser shows. `make page` fetches it, and says where it is."""

from __future__ import annotations

import os
from pathlib import Path

from chromium import Chromium

_RUN = """axe.run().then((found) => found.violations.map((rule) =>
  [rule.id, rule.impact, rule.nodes.map((node) => `${node.html.slice(0, 120)}: ${node.failureSummary}`)]))"""


def violations(browser: Chromium) -> list[tuple[str, str, list[str]]]:
    """Returns for each rule that is broken its name, how bad that is, and where: its impact is minor to critical."""
    browser.value(Path(os.environ["MULTIVERSO_AXE"]).read_text() + "; 0")
    return [(rule, impact, nodes) for rule, impact, nodes in browser.value(_RUN)]
