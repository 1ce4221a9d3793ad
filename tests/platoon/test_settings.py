"""Hosts and devices: arguments, environment, files, and their order."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from platoon import configparser, devices
from platoon.channel import Controller, Worker
from platoon.util import PlatoonError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working directory of their own, and no setting from outside."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    for name in ("PLATOON_DEVICES", "PLATOON_HOSTS", "PLATOONRC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def settings(path: Path, devices_of: str, hosts: str = "first") -> None:
    path.write_text(f"[platoon]\nhosts = {hosts}\n\n[devices]\nfirst = {devices_of}\n")


def test_nothing_set_is_a_key_error(places: Path) -> None:
    with pytest.raises(KeyError):
        configparser.fetch_devices_for_host("first")
    with pytest.raises(KeyError):
        configparser.fetch_hosts()


def test_the_order_of_priority(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for step in (
        lambda: settings(places / "home" / ".platoonrc", "cuda0"),
        lambda: settings(places / "work" / ".platoonrc", "cuda1"),
        lambda: (
            settings(places / "a.conf", "cuda2"),
            settings(places / "b.conf", "cuda3"),
            monkeypatch.setenv("PLATOONRC", f"{places}/b.conf:{places}/a.conf"),
        ),
        lambda: monkeypatch.setenv("PLATOONRC", f"{places}/a.conf:{places}/b.conf"),
        lambda: monkeypatch.setenv("PLATOON_DEVICES", "cuda4,cuda5"),
    ):
        step()
        seen.append(configparser.fetch_devices_for_host("first"))
    assert seen == [["cuda0"], ["cuda1"], ["cuda2"], ["cuda3"], ["cuda4", "cuda5"]]


def test_lists_may_go_on_over_lines_and_use_variables(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ann")
    (places / "work" / ".platoonrc").write_text(
        "[platoon]\nhosts : one\n        two, %(USER)s\n[devices]\none = cuda0\n      cuda1, cuda2\n"
    )
    assert configparser.fetch_hosts() == ["one", "two", "ann"]
    assert configparser.fetch_devices_for_host("one") == ["cuda0", "cuda1", "cuda2"]


def test_a_value_that_is_no_format_string_is_taken_as_it_is(places: Path) -> None:
    (places / "work" / ".platoonrc").write_text("[platoon]\nhosts = 100%host\n")
    assert configparser.fetch_hosts() == ["100%host"]


def test_hosts_from_the_environment_win(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(places / "work" / ".platoonrc", "cpu")
    monkeypatch.setenv("PLATOON_HOSTS", "lisa1,ceylon")
    assert configparser.fetch_hosts() == ["lisa1", "ceylon"]


def test_a_broken_file_is_named(places: Path) -> None:
    (places / "work" / ".platoonrc").write_text("hosts = nowhere\n")
    with pytest.raises(PlatoonError, match=r"\.platoonrc"):
        configparser.fetch_hosts()


def test_devices_given_beat_configured_ones_beat_all_gpus(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert devices.find_devices() == ["cuda0", "cuda1"]
    (places / "work" / ".platoonrc").write_text(f"[devices]\n{socket.gethostname()} = cpu, cpu\n")
    assert Controller.get_workers_devices([]) == ["cpu", "cpu"]
    assert devices.find_devices(["gpu1"]) == ["gpu1"]


def test_no_device_says_what_to_do(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlatoonError, match="-D cpu cpu"):
        devices.find_devices()
    with pytest.raises(PlatoonError, match="'tpu'"):
        devices.find_devices(["tpu"])


def test_a_process_sees_its_own_gpu_as_the_only_one() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3,5", "THEANO_FLAGS": "floatX=float32"}
    added = devices.device_environment("gpu1", environment)
    assert added["CUDA_VISIBLE_DEVICES"] == "5"
    assert added["THEANO_FLAGS"] == "floatX=float32,device=cuda0"
    assert devices.device_environment("cuda", environment)["CUDA_VISIBLE_DEVICES"] == "3"
    cpu = devices.device_environment("cpu", {})
    assert (cpu["CUDA_VISIBLE_DEVICES"], cpu["THEANO_FLAGS"]) == ("", "device=cpu")
    with pytest.raises(PlatoonError, match="only 2 GPUs"):
        devices.device_environment("cuda2", environment)


def test_default_parsers() -> None:
    args = Controller.default_parser().parse_args(
        ["lstm", "logs", "--single", "-D", "cpu", "cpu", "--data-hwm", "3", "-w=--rate 0.1"]
    )
    given = Controller.default_arguments(args)
    assert given == {
        "control_port": None,
        "data_port": None,
        "data_hwm": 3,
        "devices": ["cpu", "cpu"],
        "experiment_name": "lstm",
        "log_directory": "logs",
        "worker_args": "--rate 0.1",
        "multi": False,
    }
    worker = Worker.default_arguments(Worker.default_parser().parse_args(["--control-port", "5600"]))
    assert worker == {"control_port": 5600, "data_port": None, "data_hwm": 10, "socket_timeout": 300_000}
