"""vLLM follows a publication: the tokens of each version are transformers', and what cannot be loaded changes nothing.

`make vllm` installs vLLM into an environment of its own and runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multiverso as mv
import tiny_llama
from multiverso.errors import SnapshotError, WaitTimeoutError
from multiverso.vllm import Follower
from tiny_llama import tokens

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB
SECONDS = 60.0
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of step 0, as transformers saves it."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama.model(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    """A sampler in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        made = tiny_llama.sampler(str(folder))
        assert tokens(made)[0] == tiny_llama.greedy(tiny_llama.model(0))
        yield made


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"of-test-{os.urandom(8).hex()}"


@contextmanager
def trainer(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that publishes what it is asked for."""
    command = [sys.executable, tiny_llama.__file__, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], step: int) -> int:
    """Has the trainer publish a step, and returns the version."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{step}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_tokens_of_each_version_are_those_of_transformers(llm: Any, name: str) -> None:
    with trainer(name) as process, Follower(llm, name, timeout_seconds=SECONDS) as follower:
        seen = set()
        for step in range(1, 31):
            version = ask(process, step)
            assert follower.update() == version == step
            answer, versions = tokens(llm)
            assert answer == tiny_llama.greedy(tiny_llama.model(step))
            assert versions == [str(version)]
            seen.add(tuple(answer))
        assert len(seen) > 25, "they do differ"
        assert follower.update() == 30, "there is no other yet, and nothing is loaded"


def test_a_killed_trainer_leaves_the_version_before_and_the_next_one_is_followed(llm: Any, name: str) -> None:
    with Follower(llm, name, timeout_seconds=SECONDS) as follower:
        with trainer(name) as process:
            assert process.stdin is not None
            process.stdin.write("on\n")  # as quickly as it can
            process.stdin.flush()
            for _ in range(3):
                version = follower.update(follower.version)
            process.kill()
            process.wait()
        last = follower.update()
        assert last >= version
        with pytest.raises(
            WaitTimeoutError, match=rf"newer than {last}: the newest is {last}, and its publisher is gone"
        ):
            follower.update(last, timeout_seconds=0.5)
        assert tokens(llm) == (tiny_llama.greedy(tiny_llama.model(last)), [str(last)])
        with trainer(name) as process:
            ask(process, 1000)
            assert follower.update(last) > last
            assert tokens(llm)[0] == tiny_llama.greedy(tiny_llama.model(1000))


def test_what_does_not_fit_is_refused_and_the_version_before_goes_on(llm: Any, name: str) -> None:
    fits = tiny_llama.model(7).state_dict()
    lacking = {key: value for key, value in fits.items() if key != "model.layers.1.input_layernorm.weight"}
    wrong = {
        "of other shapes": tiny_llama.model(8, intermediate=256).state_dict(),
        "without a tensor": lacking,
        "with one more": {**fits, "model.layers.2.input_layernorm.weight": torch.zeros(128)},
        "a shape at the end": {**fits, "lm_head.weight": torch.zeros(500, 128)},
    }
    with Follower(llm, name, timeout_seconds=SECONDS) as follower:
        with mv.Publication(name, like=fits) as publication:
            publication.publish(fits)
            before = follower.update()
        answer = tiny_llama.greedy(tiny_llama.model(7))
        for newest, (what, tensors) in enumerate(wrong.items(), before):
            with mv.Publication(name, like=tensors) as publication:
                publication.publish(tensors)
                said = rf"cannot be loaded into LlamaForCausalLM .*; its weights are those of version {before}"
                with pytest.raises(SnapshotError, match=said):
                    follower.update(newest)
                assert tokens(llm) == (answer, [str(before)]), what
        with mv.Publication(name, like=fits) as publication:
            publication.publish(tiny_llama.model(9))
            assert follower.update(before + len(wrong)) > before
            assert tokens(llm)[0] == tiny_llama.greedy(tiny_llama.model(9))


def test_it_is_told_what_is_missing(llm: Any, name: str) -> None:
    with pytest.raises(WaitTimeoutError, match="nobody of this user publishes it"), Follower(llm, name) as follower:
        follower.update(timeout_seconds=0.1)
    llm.start_weight_update()
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine first"):
        llm.update_weights({"update_info": {}})


def test_a_sampler_of_several_workers_is_refused_in_words() -> None:
    from multiverso.vllm.engine import Engine, Source

    engine = Engine.__new__(Engine)
    engine.parallel_config = SimpleNamespace(world_size=2)
    with pytest.raises(RuntimeError, match=r"of 2 workers \(tensor_parallel_size, .*several samplers of one worker"):
        engine.init_transfer_engine(Source("any"))


def test_vllms_own_calls_load_the_newest(llm: Any, name: str) -> None:
    model = tiny_llama.model(3)
    with mv.Publication(name, like=model) as publication:
        publication.publish(model)
        llm.init_weight_transfer_engine({"init_info": {"publication": name}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {}})
        llm.finish_weight_update("three")
        llm.reset_prefix_cache()
        assert tokens(llm) == (tiny_llama.greedy(model), ["three"])
        llm.shutdown_weight_transfer_engine()


def test_a_sampler_in_processes_of_its_own_follows(folder: Path, name: str) -> None:
    program = Path(__file__).with_name("in_processes.py")
    env = {**os.environ, "PYTHONPATH": str(Path(tiny_llama.__file__).parent), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, str(program), str(folder), name]
    with open(folder / "log", "w+") as log:  # a file: vLLM's processes may end a little later
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, timeout=280, check=False)
        log.seek(0)
        said = log.read()
    assert re.findall(r"^(?:equal|other) .*$", said, re.M) == [f"equal ['{n}']" for n in range(1, 6)], said[-3000:]
