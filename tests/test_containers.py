"""The Dockerfiles on the page are ones that `make containers` can follow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
specification = importlib.util.spec_from_file_location("containers", ROOT / "scripts" / "containers.py")
assert specification is not None
assert specification.loader is not None
containers = importlib.util.module_from_spec(specification)
sys.modules["containers"] = containers  # where dataclasses looks for it
specification.loader.exec_module(containers)


def test_each_dockerfile_of_the_page_is_followed_by_make_containers() -> None:
    (plain,), (first, small) = containers.dockerfiles(containers.PAGE.read_text())
    assert (plain.image, first.image, first.name, small.image) == (
        "python:3.13-slim",
        "debian:bookworm-slim",
        "build",
        "scratch",
    )
    words = {word for stage in (plain, first, small) for word, _ in stage.instructions}
    assert words == {"COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert small.instructions[-1] == ("CMD", '["run", "-n", "4", "/train.py"]')
    (download,) = [rest for _, rest in first.instructions if "download" in rest]
    assert "libcrypt1 python3.11-minimal" in download, "lines that go on are one"


def test_copy_follows_dockers_rules(tmp_path: Path) -> None:
    context, image = tmp_path / "context", tmp_path / "image"
    (context / "dist").mkdir(parents=True)
    (context / "dist" / "a.whl").write_text("12345")
    (context / "train.py").write_text("123")
    for words in ("dist/*.whl /tmp/", "train.py /", "train.py /opt/other.py", "/dist /all"):
        containers.copy(context, words.split(), image)
    found = {str(path.relative_to(image)) for path in image.rglob("*") if path.is_file()}
    assert found == {"tmp/a.whl", "train.py", "opt/other.py", "all/a.whl"}
    (image / "again").hardlink_to(image / "train.py")
    assert containers.size(image) == 5 + 3 + 3 + 5, "a file with two names counts once"
