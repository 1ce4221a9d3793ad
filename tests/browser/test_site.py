"""The documentation in a real Chromium, light and dark: nothing of ours is hard to read or to reach (`make page`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from axe import violations
from chromium import Chromium
from documentation import build

PAGES = ("", "how-to/watching/", "reference/tables/", "gallery/", "how-to/jupyter/")
THEME = {  # the theme's own structure, which no style of ours changes
    "aria-dialog-name",  # its search is a dialog without a name
    "scrollable-region-focusable",  # its examples with long lines; Chromium lets the keyboard scroll them all the same
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_everybody_can_read_it(scheme: str, folder: Path) -> None:
    with Chromium() as browser:
        browser.look(1280, 900, dark=scheme == "slate")
        for page in PAGES:
            address = (folder / page / "index.html").as_uri()
            browser.open(address)
            browser.wait(f"location.href === '{address}' && document.readyState === 'complete'")
            browser.wait(f"document.body.dataset.mdColorScheme === '{scheme}'")
            serious = [one for one in violations(browser) if one[0] not in THEME and one[1] in ("serious", "critical")]
            assert serious == [], f"{page or 'the first page'}, {scheme}"
