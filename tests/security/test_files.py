"""Files and directories: what another user plants is not used, what is written is whole."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from security_support import OTHER, OURS, Person, needs_namespaces, needs_root

import multiverso as mv
from multiverso.checkpoints.manifests import read_generations
from multiverso.checkpoints.stores import Directory
from multiverso.checkpoints.trees import read_tree
from multiverso.errors import SnapshotError
from multiverso.files import opening as files
from multiverso.files import users
from multiverso.spec.table import TableSpec
from multiverso.tables import saving
from multiverso.tables.keyed import saving as keyed_saving
from multiverso.tables.keyed import snapshots as keyed_snapshots
from multiverso.tables.keyed.spec import KeyedSpec


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- a directory of our own --------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_directory_is_made_for_this_user_only_and_found_again(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = files.own_directory(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert _mode(made) == 0o700
    assert not _mode(tmp_path / "a") & 0o022
    assert files.own_directory(tmp_path / "a" / "b" / "c") == made


def test_one_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours").chmod(0o755)
    assert _mode(files.own_directory(tmp_path / "ours")) == 0o700


def _writable_by_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _writable_by_a_group(path: Path) -> None:
    path.mkdir()
    os.chown(path, -1, OTHER)
    path.chmod(0o770)


def _below_one_that_all_may_write_to(path: Path) -> None:
    path.mkdir()
    path.parent.chmod(0o777)


def _of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, OTHER, OTHER)


def _below_another_users(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path.parent, OTHER, OTHER)


@pytest.mark.parametrize(
    "plant",
    [
        _writable_by_all,
        _below_one_that_all_may_write_to,
        pytest.param(_writable_by_a_group, marks=needs_root),
        pytest.param(_of_another_user, marks=needs_root),
        pytest.param(_below_another_users, marks=needs_root),
    ],
)
def test_a_directory_that_another_user_could_fill_is_refused(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    place = tmp_path / "above" / "place"
    place.parent.mkdir()
    plant(place)
    with pytest.raises(PermissionError, match="not safe from other users") as caught:
        files.own_directory(place)
    assert caught.value.filename == str(place)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(OSError, match="link"):
        files.own_directory(tmp_path / "link")


def test_a_sticky_directory_above_is_no_danger(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert _mode(files.own_directory(tmp_path / "tmp" / "ours")) == 0o700


@needs_root
@needs_namespaces
def test_where_all_users_look_alike_another_ones_directory_is_still_refused(open_directory: Path) -> None:
    for name, owner in (("ours", OURS), ("others", OTHER)):
        (open_directory / name).mkdir()
        (open_directory / name).chmod(0o700 if name == "ours" else 0o755)
        os.chown(open_directory / name, owner, owner)
    text = """
from security_support import enter_unmapped_namespace
import multiverso as mv
from multiverso.files import opening as files, users
from multiverso.checkpoints.manifests import read_generations
from multiverso.checkpoints.stores import Directory
from multiverso.checkpoints.trees import read_tree
from multiverso.errors import SnapshotError
from multiverso.spec.table import TableSpec
from multiverso.tables import saving
from multiverso.tables.keyed import saving as keyed_saving
from multiverso.tables.keyed import snapshots as keyed_snapshots
from multiverso.tables.keyed.spec import KeyedSpec
become()
before = users.look_alike()
enter_unmapped_namespace()
say(before, users.look_alike(), os.geteuid())
for name in ("ours", "others"):
    try:
        say(str(files.own_directory(os.path.join(args[0], name))))
    except OSError as error:
        say(type(error).__name__, error.strerror)
"""
    with Person(text, str(open_directory), uid=OURS) as person:
        assert person.hear() == [False, True, 65534]
        assert person.hear() == [str(open_directory / "ours")]
        kind, why = person.hear()
        assert kind == "PermissionError"
        assert "another user" in why


def test_the_number_of_nobody_is_a_users_own_where_all_are_in_the_map(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/kernel/overflowuid").write_text(f"{os.geteuid()}\n")
    (tmp_path / "self/uid_map").write_text("         0          0 4294967295\n")
    assert not users.look_alike(tmp_path)
    (tmp_path / "self/uid_map").write_text("0 1000 1\n")
    assert users.look_alike(tmp_path)
    (tmp_path / "self/uid_map").unlink()
    assert users.look_alike(tmp_path)
    (tmp_path / "sys/kernel/overflowuid").write_text(f"{os.geteuid() + 1}\n")
    assert not users.look_alike(tmp_path)


# -- a file, whole or not at all ---------------------------------------------------------------------------------


def test_a_link_in_the_files_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a").symlink_to("victim")
    files.write_whole(tmp_path / "a", [b"new ", b"content"])
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "a").read_text() == "new content"
    assert not (tmp_path / "a").is_symlink()


def test_an_error_names_the_path_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as told:
        files.write_whole(tmp_path / "none" / "a", b"new")
    assert str(told.value) == f"[Errno 2] No such file or directory: '{tmp_path}/none/a'"


def test_names_that_a_link_waits_at_are_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "victim").write_text("precious")
    guessed = bytes(8)
    (tmp_path / f".a.{guessed.hex()}.tmp").symlink_to("victim")
    monkeypatch.setattr(os, "urandom", lambda size: guessed)
    with pytest.raises(FileExistsError):
        files.write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "a").exists()


def test_many_threads_write_one_path_and_every_reader_finds_one_content(tmp_path: Path) -> None:
    path, done = tmp_path / "a", threading.Event()
    contents = [bytes([i]) * (100_000 + i) for i in range(4)]
    files.write_whole(path, contents[0])
    errors: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(10):
                files.write_whole(path, (content[:50_000], content[50_000:]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    threading.Thread(target=lambda: ([t.join() for t in threads], done.set())).start()
    while not done.wait(0.001):
        assert path.read_bytes() in contents
    assert not errors
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["a"]


STOPS_IN_THE_MIDDLE = """
from multiverso.files import opening as files
def pieces():
    yield b"half"
    say("writing")
    sys.stdin.readline()
files.write_whole(args[0], pieces())
say("done")
"""


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with Person(STOPS_IN_THE_MIDDLE, str(path)) as dead, Person(STOPS_IN_THE_MIDDLE, str(path)) as alive:
        for person in (dead, alive):
            assert person.hear() == ["writing"]
        dead.process.send_signal(signal.SIGKILL)
        dead.process.wait()
        assert len(os.listdir(tmp_path)) == 2
        (tmp_path / f".b.{'0' * 16}.tmp").touch()  # another file's
        os.mkfifo(tmp_path / f".a.{'0' * 16}.tmp")  # opening it would wait for ever
        files.write_whole(path, b"ours")
        assert path.read_bytes() == b"ours"
        assert len([name for name in os.listdir(tmp_path) if name.startswith(".a.")]) == 1
        alive.tell()
        assert alive.hear() == ["done"]
    assert path.read_bytes() == b"half"
    assert sorted(os.listdir(tmp_path)) == [f".b.{'0' * 16}.tmp", "a"]


def test_a_file_that_is_there_can_be_left_alone(tmp_path: Path) -> None:
    files.write_whole(tmp_path / "a", b"first", replace=False)
    with pytest.raises(FileExistsError) as caught:
        files.write_whole(tmp_path / "a", b"second", replace=False)
    assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def pieces():  # type: ignore[no-untyped-def]
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_whole(tmp_path / "a", pieces())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["/", ".", "", "missing/a"])
def test_a_path_that_cannot_be_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError) as caught:
        files.write_whole(place, b"x")
    assert caught.value.filename == place


# -- a file of our own ------------------------------------------------------------------------------------------


def test_a_secret_comes_back(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write_whole(tmp_path / "secret", b"word", mode=0o600)
    finally:
        os.umask(before)
    assert _mode(tmp_path / "secret") == 0o600
    assert files.read_own(tmp_path / "secret") == b"word"
    with pytest.raises(OSError, match="more than 3 bytes"):
        files.read_own(tmp_path / "secret", 3)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_secret_that_others_may_read_or_write_is_none(tmp_path: Path, mode: int) -> None:
    (tmp_path / "secret").write_bytes(b"word")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(PermissionError, match="not safe from other users"):
        files.read_own(tmp_path / "secret")


@needs_root
def test_another_users_secret_is_none(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"word")
    (tmp_path / "secret").chmod(0o600)
    os.chown(tmp_path / "secret", OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
        files.read_own(tmp_path / "secret")


def test_a_link_a_pipe_or_a_directory_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "word").write_bytes(b"word")
    (tmp_path / "word").chmod(0o600)
    (tmp_path / "link").symlink_to("word")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(OSError):
            files.read_own(tmp_path / name)


# -- locks in directories to which others may write -----------------------------------------------------------------

SAVES = """
from multiverso.checkpoints.stores import Directory
place, seconds = args
become()
precious = os.path.join(place, "precious")
kept = []
end = time.monotonic() + seconds
rounds = 0
while time.monotonic() < end:
    try:
        kept.append(os.open(precious, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        os.write(kept[-1], b"precious")
    except FileExistsError:
        pass
    try:
        with Directory(__import__("pathlib").Path(place)).alone(job="job " * 4):
            rounds += 1
    except Exception:  # another one's lock seems to be there
        pass
say(rounds, sorted({os.pread(file, 100, 0).decode() for file in kept}))
"""

SWAPS = """
place, = args
libc = ctypes.CDLL(None)
become()
one, other = (os.path.join(place, name).encode() for name in (".lock", "precious"))
say("begun")
while True:
    libc.renameat2(-100, one, -100, other, 2)  # RENAME_EXCHANGE
"""


def test_a_lock_is_not_written_to_a_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("precious")
    (tmp_path / ".lock").chmod(0o600)
    with (tmp_path / ".lock").open() as precious:
        with Directory(tmp_path).alone(job="a job"):
            assert (tmp_path / ".lock").read_text() == "a job"
        assert precious.read() == "precious"
    assert not (tmp_path / ".lock").exists()


@needs_root
def test_a_stranger_who_swaps_files_has_nothing_of_ours_overwritten(open_directory: Path) -> None:
    """As long as MULTIVERSO_TEST_SECONDS says; a second is enough to see that the programs work."""
    seconds = float(os.environ.get("MULTIVERSO_TEST_SECONDS", "1"))
    place = open_directory / "shared"
    place.mkdir()
    place.chmod(0o777)
    with Person(SWAPS, str(place)) as stranger:
        assert stranger.hear() == ["begun"]
        with Person(SAVES, str(place), seconds, uid=OURS) as victim:
            rounds, contents = victim.hear()
        stranger.process.kill()
    assert rounds > 10
    assert contents == ["precious"]


def test_a_folder_of_a_save_that_is_replaced_by_a_link_leads_nowhere_else(tmp_path: Path) -> None:
    """Who may write to the directory may replace its folders: before a file is opened in one, and after."""
    precious, shared = tmp_path / "precious", tmp_path / "shared"
    for folder in (precious, shared):
        folder.mkdir()
    (precious / "worker-0.json").write_text("precious")
    store = Directory(shared)
    store.make("generation-1")
    with store.file("generation-1/worker-0.json") as path:
        (shared / "generation-1").rename(shared / "moved")
        (shared / "generation-1").symlink_to(precious)
        path.write_text("a part")
    assert (shared / "moved" / "worker-0.json").read_text() == "a part"
    for write in (
        lambda: store.write("generation-1/worker-0.json", b"a part"),
        lambda: store.folder("generation-1", make=False).__enter__(),
        lambda: store.folder("generation-1/worker-0").__enter__(),
        lambda: store.make("generation-1/new"),
    ):
        with pytest.raises(OSError, match="generation-1") as told:
            write()
        assert str(shared / "generation-1") in str(told.value.filename)
    for name in (str(tmp_path / "of others"), None):  # what a file of somebody else's is called stays
        with pytest.raises(OSError, match="no") as told, store.folder("moved", make=False):
            raise OSError(2, "no", name)
        assert told.value.filename == name
    with pytest.raises(FileNotFoundError) as told, store.folder("moved", make=False) as folder:
        (folder / "none").read_text()
    assert told.value.filename == str(shared / "moved" / "none")
    assert not store.link("generation-1/other.json", "moved/worker-0.json")
    (shared / "host-1-of-2").symlink_to(precious)
    with pytest.raises(SnapshotError, match="host-1-of-2"), keyed_snapshots.alone_in(shared / "host-1-of-2"):
        pass
    store.remove("generation-1")
    assert [path.name for path in precious.iterdir()] == ["worker-0.json"]
    assert (precious / "worker-0.json").read_text() == "precious"


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_plain_file_keeps_no_reader_waiting(tmp_path: Path, kind: str) -> None:
    for name in (".lock", "manifest.json", "snapshot-1.safetensors", "table.safetensors"):
        path = tmp_path / name
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    store = Directory(tmp_path)
    with store.alone(job="a job"):  # without a lock, as where nothing can be locked
        pass
    with pytest.raises(SnapshotError, match=r"plain file|directory"):
        read_generations(store)
    with pytest.raises(SnapshotError, match=r"plain file|directory"):
        keyed_snapshots.chain(tmp_path)
    with pytest.raises(SnapshotError, match=r"plain file|directory"):
        saving.load(tmp_path / "table.safetensors", TableSpec("array", 1, 4))
    with pytest.raises(SnapshotError, match=r"plain file|directory"):
        read_tree(tmp_path / "table.safetensors")
    keyed = KeyedSpec.of(2, "float32", 0.0, 0, mv.updaters.add(), None)
    with pytest.raises(SnapshotError, match=r"plain file|directory"):
        keyed_saving.load(tmp_path / "table.safetensors", keyed)


GENERATION = {"number": 1, "tables": ["table-0"], "common": {"0": ""}, "hashes": {}}
SNAPSHOT = {
    "number": 1, "parent": None, "file": "snapshot-1.safetensors", "sha256": "0" * 64, "table": "t",
    "generation": 1, "removals": 0, "keys": 0, "removed": 0, "nbytes": 0,
}  # fmt: skip
NOT_NUMBERS = ("1e999", "-1", "null", str(10**30), '"1"', "1.5", "[]")
NO_NAMES = (r'"a\u0000b"', r'"\ud800"', '"../../x"', '"/etc/passwd"', '""', "null", '"' + "x" * 5000 + '"')


def _records(record: dict[str, Any], numbers: tuple[str, ...], names: tuple[str, ...]) -> Iterator[str]:
    """Yields a record with one field after another replaced by what it cannot be."""
    for fields, wrong in ((numbers, NOT_NUMBERS), (names, NO_NAMES)):
        for field in fields:
            for value in wrong:
                yield json.dumps({**record, field: "@"}).replace('"@"', value)


MANIFESTS = [
    "[" * 200_000,
    "{" + '"a":{' * 100_000,
    *(
        f'{{"format": "multiverso checkpoint 2", "number": 1, "generations": [{record}]}}'
        for record in _records(GENERATION, ("number",), ())
    ),
    *(
        f'{{"format": "multiverso checkpoint 2", "number": 1, "generations": [{{"number": 1, "tables": [{name}], '
        '"common": {"0": ""}}]}'
        for name in NO_NAMES
    ),
    '{"format": "multiverso checkpoint 2", "number": 1, "generations": []}',
]


@pytest.mark.parametrize("text", MANIFESTS, ids=[text[-60:-2] for text in MANIFESTS])
def test_a_manifest_that_means_harm_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(SnapshotError):
        read_generations(Directory(tmp_path))


def test_manifests_of_snapshots_that_mean_harm_are_refused(tmp_path: Path) -> None:
    numbers = ("number", "generation", "removals", "keys", "removed", "nbytes")
    texts = [*_records(SNAPSHOT, numbers, ("file", "sha256"))]
    for record in texts:
        (tmp_path / "manifest.json").write_text(
            f'{{"format": "multiverso keyed snapshots 1", "snapshots": [{record}]}}'
        )
        with pytest.raises(SnapshotError):
            keyed_snapshots.chain(tmp_path)
    assert len(texts) == len(numbers) * len(NOT_NUMBERS) + 2 * len(NO_NAMES)


@pytest.mark.parametrize("ticks", ["-1", str(10**30), "x"])
def test_a_keyed_file_with_impossible_ticks_is_refused(tmp_path: Path, ticks: str) -> None:
    spec = KeyedSpec.of(2, "float32", 0.0, 0, mv.updaters.add(), None)
    header = {"format": "multiverso keyed table 1", "table": json.dumps(spec.as_message()), "ticks": ticks}
    arrays = {"keys": np.arange(1), "values": np.zeros((1, 2), "f4")}
    save_file(arrays, tmp_path / "keyed.safetensors", header)
    with pytest.raises(SnapshotError):
        keyed_saving.load(tmp_path / "keyed.safetensors", spec)
    save_file(arrays, tmp_path / "keyed.safetensors", {**header, "ticks": "3"})
    assert keyed_saving.load(tmp_path / "keyed.safetensors", spec).ticks == 3
