"""Follows the Dockerfiles of docs/how-to/containers.md without Docker, and runs what they start; says how large it is.

python scripts/containers.py [WHEEL]

WHEEL is made first if none is given, in some minutes. Each image is a folder in build/containers: what FROM names is a
Debian that debootstrap makes once, with Debian's own Python in the place of an image with Python. RUN, ENTRYPOINT and
CMD run there under chroot, with mounts and processes of their own, and train.py is the README's. Wants root,
debootstrap, and a linker (binutils) for the wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "containers.md"
DEBIAN = "bookworm"
_PYTHON = (  # what an image with Python has: pip that installs beside the system's packages
    "apt-get update && apt-get install --yes --no-install-recommends python3-pip &&"
    " rm /usr/lib/python3*/EXTERNALLY-MANAGED && rm -r /var/lib/apt/lists/*"
)
# As Docker does it: /proc, /dev and the names of hosts come from outside; so do the certificates that pip believes.
_ENTER = """
root=$1; shift
mkdir -p "$root/proc" "$root/dev"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
if [ -d "$root/etc" ]; then
    for file in /etc/resolv.conf /etc/hosts; do touch "$root$file"; mount --bind "$file" "$root$file"; done
fi
if [ -d "$root/mnt" ]; then mount --bind /etc/ssl/certs "$root/mnt"; fi
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive PIP_CERT=/mnt/ca-certificates.crt chroot "$root" "$@"
"""


@dataclass(frozen=True)
class Stage:
    """A FROM with what follows it: each instruction's name, and the rest of its lines as one."""

    image: str
    name: str
    instructions: list[tuple[str, str]]


def dockerfiles(markdown: str) -> list[list[Stage]]:
    """Returns the stages of each Dockerfile on a page."""
    return [list(_stages(block)) for block in re.findall(r"^```dockerfile\n(.*?)^```$", markdown, re.M | re.S)]


def _stages(text: str) -> Iterator[Stage]:
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    words = [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]
    begins = [place for place, (word, _) in enumerate(words) if word == "FROM"]
    for begin, end in zip(begins, [*begins[1:], len(words)], strict=True):
        image, _, name = words[begin][1].partition(" AS ")
        yield Stage(image, name, words[begin + 1 : end])


def inside(root: Path, *command: str) -> None:
    """Runs a command in an image; its mounts and processes end with it."""
    alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
    subprocess.run([*alone, "sh", "-ec", _ENTER, "sh", root, *command], check=True, stdout=sys.stderr)


def copy(sources: Path, words: list[str], image: Path) -> None:
    """Does what COPY does: files go to a name or into a folder, of a folder all that is in it."""
    *names, to = words
    target = image / to.lstrip("/")
    for source in [found for name in names for found in sorted(sources.glob(name.lstrip("/")))]:
        (target if to.endswith("/") or source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", f"{source}/." if source.is_dir() else source, target], check=True)


def size(root: Path) -> int:
    """Returns the bytes of all files of an image."""
    found = (os.lstat(Path(folder, name)) for folder, _, names in os.walk(root) for name in names)
    return sum({(one.st_dev, one.st_ino): one.st_size for one in found}.values())


def base(image: str, folder: Path) -> Path | None:
    """Returns the folder of what a FROM names, made where it is not there yet; None for an empty one."""
    if image == "scratch":
        return None
    root = folder / ("python" if image.startswith("python:") else "debian")
    if root.exists():
        return root
    making = root.with_suffix(".making")  # so that what was interrupted is not taken for whole
    shutil.rmtree(making, ignore_errors=True)
    if root.name == "debian":
        subprocess.run(["debootstrap", "--variant=minbase", DEBIAN, making], check=True, stdout=sys.stderr)
    else:
        subprocess.run(["cp", "-a", base(f"debian:{DEBIAN}", folder) or "", making], check=True)
        inside(making, "sh", "-c", _PYTHON)
    return making.rename(root)


def build(stages: list[Stage], context: Path, folder: Path) -> tuple[Path, list[str], int]:
    """Follows a Dockerfile; returns the last image, what it starts, and the bytes of what it began with."""
    images: dict[str, Path] = {}
    for number, stage in enumerate(stages):
        image = images[stage.name] = folder / f"stage-{number}"
        shutil.rmtree(image, ignore_errors=True)
        begin = base(stage.image, folder)
        image.mkdir()
        if begin is not None:
            subprocess.run(["cp", "-a", f"{begin}/.", image], check=True)
        starts: dict[str, list[str]] = {}
        place = "/"
        for word, rest in stage.instructions:
            if word in ("ENTRYPOINT", "CMD"):
                starts[word] = json.loads(rest)
            else:
                place = _follow(word, rest, place, image, images, context)
    return image, starts.get("ENTRYPOINT", []) + starts["CMD"], size(begin) if begin else 0


def _follow(word: str, rest: str, place: str, image: Path, images: Mapping[str, Path], context: Path) -> str:
    """Does what an instruction says; returns the folder for those that follow."""
    if word == "WORKDIR":
        (image / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        return rest
    if word == "RUN":
        inside(image, "/bin/sh", "-c", f"cd {place} && {rest}")
    elif word == "COPY":
        begin, _, others = rest.partition(" ")
        other = begin.partition("--from=")[2]
        copy(images[other] if other else context, (others if other else rest).split(), image)
    else:
        raise SystemExit(f"{word} {rest}: this script does not know it.")
    return place


def main() -> None:
    folder = ROOT / "build" / "containers"
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("make containers: wants root, and debootstrap (apt-get install debootstrap)")
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    (context / "dist").mkdir(parents=True)
    if len(sys.argv) > 1:
        shutil.copy(sys.argv[1], context / "dist")
    else:
        kernels = {**os.environ, "MULTIVERSO_BUILD_KERNELS": "1"}
        command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", context / "dist")
        subprocess.run(command, cwd=ROOT, env=kernels, check=True, stdout=sys.stderr)
    (program,) = re.findall(r'```python title="train.py"\n(.*?)```', (ROOT / "README.md").read_text(), re.S)
    (context / "train.py").write_text(program)
    for number, stages in enumerate(dockerfiles(PAGE.read_text()), 1):
        image, starts, begun = build(stages, context, folder)
        bytes_ = size(image)
        began = time.perf_counter()
        inside(image, *starts)
        seconds = time.perf_counter() - began
        print(
            f"Dockerfile {number} from {stages[-1].image}: {' '.join(starts)} took {seconds:.1f} s;"
            f" {bytes_ / 1e6:.0f} MB, {(bytes_ - begun) / 1e6:.0f} MB of them by its own lines"
        )


if __name__ == "__main__":
    main()
