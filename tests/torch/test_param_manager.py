"""Modules of every kind: what is shared, what stays, what is refused, and that training is not disturbed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import multiverso as mv
from multiverso.errors import ClosedError, DtypeMismatchError, NotInitializedError, TableMismatchError
from multiverso.runtime import Node, Session
from multiverso.testing.laws import Job, call, unless_raised, when_asked
from multiverso.torch import ParamManager, SharedOptimizer

SECONDS = 100


def table_of(manager: ParamManager) -> Any:
    """Its parameters' table: the first of those that are saved."""
    return next(iter(manager.saved_tables().values()))


@pytest.fixture
def alone() -> Iterator[None]:
    mv.init()
    yield
    mv.shutdown()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def batch(step: int) -> Any:
    return torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: int, after: Any = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if after:
            after()


def same(a: nn.Module, b: nn.Module) -> bool:
    rows = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in rows)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_worker_trains_as_if_nothing_were_shared(alone: None, kind: Any, overlap: bool) -> None:
    plain, shared = network(), network()
    options = {"lr": 0.05, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.05}
    mine = kind(shared.parameters(), **options)
    train(shared, mine, 2)  # the optimizer has state before the module is shared
    manager = ParamManager(shared, overlap=overlap)
    train(shared, mine, 5, manager.step)
    manager.flush()
    other = kind(plain.parameters(), **options)
    train(plain, other, 2)
    train(plain, other, 5)
    for a, b in zip(plain.state_dict().values(), shared.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)  # a + (b - a) is b but for its last bit


def test_parameters_become_views_of_one_memory(alone: None) -> None:
    model = network()
    identities = [id(p) for p in model.parameters()]
    ParamManager(model)
    assert [id(p) for p in model.parameters()] == identities
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())


def test_a_shared_module_is_copied_and_saved_as_any_other(alone: None, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = network()
    manager = ParamManager(model)
    copied = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, manager.sync_all_param)
    assert not same(copied, model)
    fresh = network(1)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert same(fresh, copied)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same(fresh, copied)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight  # one parameter with two names
        self.third.weight.data = self.first.weight.data  # two parameters on one memory


def test_tied_parameters_are_shared_once_and_stay_tied(alone: None) -> None:
    model = Tied()
    manager = ParamManager(model)
    with torch.no_grad():
        model.first.weight.fill_(1)
    manager.sync_all_param()
    with torch.no_grad():
        model.third.weight += 1
    manager.sync_all_param()
    manager.sync_all_param()
    for layer in (model.first, model.second, model.third):
        assert (layer.weight == 2).all()
    assert sum(mv.stats()["tables"][key]["exchanges"] for key in mv.stats()["tables"]) == 3


def test_parameters_that_overlap_are_refused(alone: None) -> None:
    memory = torch.zeros(10)
    model = nn.ParameterList([nn.Parameter(memory[:6]), nn.Parameter(memory[4:])])
    with pytest.raises(ValueError, match="0 and 1 share a part"):
        ParamManager(model)
    whole = nn.ParameterList([nn.Parameter(memory[:5]), nn.Parameter(memory[5:])])
    manager = ParamManager(whole)  # one memory, side by side: fine
    with torch.no_grad():
        memory += 1
    manager.sync_all_param()
    assert (memory == 1).all(), "parameters that others look at are left where they are"


def frozen_work() -> Any:
    mv.init()
    me = mv.worker_id()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in model.parameters():
        nn.init.constant_(p, me + 1)
    model[0].requires_grad_(False)
    model.register_buffer("mask", torch.tensor([me, float("-inf")]))
    model.register_buffer("narrow", torch.full((3,), me + 1, dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(me))
    manager = ParamManager(model)
    begun = {name: value.float().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    manager.sync_all_param()
    mv.barrier()
    manager.sync_all_param()
    ended = {name: value.float().clone() for name, value in model.state_dict().items()}
    tables = [table["bytes"] for table in mv.stats()["tables"].values()]
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight was frozen"):
        manager.sync_all_param()
    return begun, ended, len(tables)


def test_frozen_parameters_and_buffers_begin_alike_and_integers_stay() -> None:
    for me, (begun, after, _) in enumerate(ended(frozen_work)):
        assert all((begun[name] == 1).all() for name in begun if "weight" in name or name == "narrow")
        assert begun["mask"].tolist() == after["mask"].tolist() == [0, float("-inf")]
        assert begun["count"] == after["count"] == me
        assert (after["0.weight"] == 2).all(), "frozen: this worker's alone"
        assert (after["1.weight"] == 3).all(), "trained: both workers'"


@pytest.mark.parametrize("change", ["add", "replace parameter", "replace module", "inside"])
def test_a_module_that_has_changed_is_refused(alone: None, change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    manager = ParamManager(model)
    if change == "add":
        model.append(nn.Linear(2, 1))
    elif change == "replace parameter":
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
    elif change == "replace module":
        model[0] = nn.Linear(2, 2)
    else:
        model[1].append(nn.Linear(2, 1))
    with torch.no_grad():
        model[1][0].weight.fill_(5)
    version = table_of(manager).version
    with pytest.raises(RuntimeError, match="came later"):
        manager.sync_all_param()
    assert table_of(manager).version == version, "nothing was exchanged"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_module_that_was_converted_is_refused(alone: None, overlap: bool) -> None:
    model = nn.Linear(2, 2)
    manager = ParamManager(model, overlap=overlap)
    model.half()
    with pytest.raises(RuntimeError, match="move or convert the module first"):
        manager.sync_all_param()


def test_a_parameter_that_was_pointed_elsewhere_is_still_shared(alone: None) -> None:
    model = nn.Linear(2, 2, bias=False)
    manager = ParamManager(model)
    elsewhere = torch.full((2, 2), 3.0)
    model.weight.data = elsewhere
    manager.sync_all_param()
    elsewhere += 1
    manager.sync_all_param()
    np.testing.assert_array_equal(table_of(manager).get(), 4)


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (lambda: nn.LazyLinear(2), ValueError, "weight has no memory yet"),
        (lambda: nn.Linear(2, 2, device="meta"), ValueError, "weight has no memory yet"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), DtypeMismatchError, "complex64"),
        (lambda: nn.ParameterList([nn.Parameter(torch.eye(2).to_sparse())]), TypeError, "dense"),
        (nn.ReLU, ValueError, "parameters and buffers; this ReLU has none"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_any_table_is_made(
    alone: None, module: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ParamManager(module())
    assert mv.stats()["tables"] == {}


def test_a_rule_that_the_mode_does_not_know_is_refused_before_any_table_is_made(alone: None) -> None:
    with pytest.raises(ValueError, match="model averaging"):
        ParamManager(nn.Linear(2, 2), rule=mv.rules.model_averaging())
    assert mv.stats()["tables"] == {}


def test_without_init() -> None:
    with pytest.raises((NotInitializedError, ClosedError)):  # the latter after another test's shutdown()
        ParamManager(nn.Linear(2, 2))


def test_other_memory_formats_and_recurrent_layers(alone: None) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.lstm = nn.LSTM(3, 5)

    model = Both()
    strides = model.conv.weight.stride()
    before = model.conv.weight.detach().clone()
    manager = ParamManager(model)
    assert model.conv.weight.stride() == strides
    assert torch.equal(model.conv.weight, before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(optimizer)
    out, _ = model.lstm(torch.ones(2, 1, 3))
    (out.sum() + model.conv(torch.ones(1, 3, 5, 5)).sum()).backward()
    optimizer.step()
    assert not torch.equal(model.conv.weight, before)
    table = table_of(manager).get()
    np.testing.assert_array_equal(
        np.sort(table), np.sort(torch.cat([p.detach().flatten() for p in model.parameters()]))
    )


def small_changes(dtype: Any) -> Any:
    mv.init()
    model = nn.Linear(4, 1, bias=False).to(dtype)
    nn.init.constant_(model.weight, 1.0 if mv.is_master_worker() else 9.0)
    manager = ParamManager(model)
    for _ in range(16):
        with torch.no_grad():
            model.weight += torch.finfo(dtype).eps  # one step of the dtype
        manager.sync_all_param()
    mv.barrier()
    manager.sync_all_param()
    for _ in range(3):
        manager.sync_all_param()  # no training: no change
    mv.barrier()
    return (model.weight.dtype, model.weight.detach().float().numpy(), table_of(manager).get())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_roundings_of_16_bits_are_not_pushed(dtype: Any) -> None:
    results = ended(small_changes, dtype)
    for kept, weight, table in results:
        assert kept == dtype
        np.testing.assert_array_equal(table, results[0][2])
        np.testing.assert_array_equal(weight, torch.from_numpy(table).to(dtype).float().numpy().reshape(1, 4))
        eps = torch.finfo(dtype).eps
        assert (np.abs(table - (1 + 32 * eps)) <= 2 * eps).all(), (table, eps)


@pytest.mark.parametrize("theirs", [["critic", "actor"], ["actor", "target"], ["actor", "critic"]])
def test_parameters_of_the_same_shapes_and_other_names_are_refused(theirs: list[str]) -> None:
    with Node(2) as node:

        def share(worker_id: int) -> str:
            names = theirs if worker_id else ["actor", "critic"]
            with Session(node.address, worker_id, timeout_seconds=SECONDS) as session:
                try:
                    ParamManager(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}), session=session)
                except TableMismatchError as error:
                    return str(error)
                return "shared"

        with ThreadPoolExecutor(2) as pool:
            said = [*pool.map(share, range(2))]
    if theirs == ["actor", "critic"]:
        assert said == ["shared", "shared"]
    else:
        assert all(text.count("by the names") == 2 for text in said), said


def overlapped(steps: int, sync: bool, fragments: int) -> Any:
    mv.init(sync=sync)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False).double())
    for p in model.parameters():
        nn.init.constant_(p, mv.worker_id())
    manager = ParamManager(model, overlap=True, every=2, fragments=fragments)
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p += mv.worker_id() + 1
        manager.step()
    manager.finish()  # what is left, the odd step included
    return [p.detach().numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("fragments", [1, 2])
def test_overlapped_exchanges_lose_nothing(sync: bool, fragments: int) -> None:
    for values in ended(overlapped, 9, sync, fragments):
        assert [value.dtype.name for value in values] == ["float32", "float64"]
        for value in values:
            np.testing.assert_array_equal(value, 9 * 3)


def landing(overlap: int, every: int, fragments: int, saved: str | None) -> list[float]:
    mv.init(sync=True)
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    manager = ParamManager(model, overlap=overlap, every=every, fragments=fragments)
    seen = []
    for step in range(1, 13):
        with torch.no_grad():
            model.weight += mv.worker_id()
        manager.step()
        seen.append(float(model.weight.sum()))
        if saved and step == 5:  # while an exchange is on its way
            manager.save(saved)
            manager.load(saved)
    mv.barrier()
    return seen


# how much worker 0 has from the other at which step, by `overlap` and `fragments`
LANDS: dict[tuple[int, int], dict[int, int]] = {
    (1, 1): {5: 16, 9: 16},
    (3, 1): {7: 16, 11: 16},
    (9, 1): {8: 16, 12: 16},
    (1, 2): {3: 4, 5: 8, 7: 8, 9: 8, 11: 8},
    (2, 2): {4: 4, 6: 8, 8: 8, 10: 8, 12: 8},
}
FOLDER = tempfile.TemporaryDirectory()


def landings(overlap: int, fragments: int, saves: bool) -> Any:
    return landing, overlap, 4, fragments, f"{FOLDER.name}/{overlap}-{fragments}" if saves else None


@pytest.mark.parametrize(("overlap", "fragments"), LANDS)
@pytest.mark.parametrize("saves", [False, True])
def test_an_exchange_is_applied_so_many_steps_after_it_was_begun(overlap: int, fragments: int, saves: bool) -> None:
    seen, lands = ended(*landings(overlap, fragments, saves)), LANDS[overlap, fragments]
    expected = [float(sum(value for at, value in lands.items() if at <= step)) for step in range(1, 13)]
    assert seen[0] == expected, "worker 0 learns nothing itself"
    assert seen[1] == [4.0 * step for step in range(1, 13)], "and has nothing for worker 1"


def test_overlapped_steps_are_counted_while_an_exchange_runs(alone: None) -> None:
    manager = ParamManager(nn.Linear(2, 2), overlap=True, every=2)
    table = table_of(manager)
    exchange = table.exchange
    may_end, number = threading.Semaphore(0), 0

    def slow(*arguments: Any, **options: Any) -> None:
        nonlocal number
        assert may_end.acquire(timeout=SECONDS)
        number += 1
        exchange(*arguments, **options)

    table.exchange = slow
    due = []
    for _ in range(8):
        if due[-2:] == [True, False]:
            may_end.release()  # the exchange that began two steps ago lands in this step
        due.append(manager.step())
    may_end.release()
    manager.flush()
    assert due == [False, True] * 4
    assert number == 4


def test_an_overlapped_exchange_that_failed_raises_at_the_next_step() -> None:
    mv.init()
    model = nn.Linear(2, 2)
    manager = ParamManager(model, overlap=True, every=2)
    faulty = table_of(manager)
    exchange = faulty.exchange
    faulty.exchange = lambda *_, **__: 1 / 0
    assert [manager.step(), manager.step()] == [False, True]
    with pytest.raises(ZeroDivisionError):
        manager.flush()
    faulty.exchange = exchange
    assert [manager.step(), manager.step()] == [True, False], "the next step takes up what has failed"
    manager.flush()
    mv.shutdown()


def test_every_by_steps_and_by_time(alone: None) -> None:
    manager = ParamManager(nn.Linear(2, 2), every=3)
    assert [manager.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert not ParamManager(nn.Linear(2, 2), every=timedelta(hours=1)).step()
    with pytest.raises(ValueError, match="every"):
        ParamManager(nn.Linear(2, 2), every=0)


def test_a_hook_exchanges_after_each_step_until_it_is_removed(alone: None) -> None:
    model = network()
    manager = ParamManager(model)
    table = table_of(manager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = manager.attach(optimizer)
    before = table.version
    train(model, optimizer, 3)
    assert table.version == before + 3
    handle.remove()
    train(model, optimizer, 3)
    assert table.version == before + 3


def test_the_wrapper_is_an_optimizer_like_any_other(alone: None) -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = SharedOptimizer(plain, model, every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    table = table_of(optimizer.manager)
    before = table.version
    train(model, optimizer, 4, scheduler.step)
    assert table.version == before + 2
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert plain.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1 / 16
    other = torch.optim.SGD(network().parameters(), lr=1.0, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1 / 16
    optimizer.load_state_dict(other.state_dict())
    assert len(optimizer.state) == len(list(model.parameters()))
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert loss == 3
    with pytest.raises(TypeError, match="every"):
        SharedOptimizer(plain, optimizer.manager, every=3)
    with pytest.raises(TypeError, match="belongs to this process"):
        copy.deepcopy(optimizer)


def test_swapped_arguments_and_strangers_are_refused_in_words(alone: None) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match=r"the optimizer comes first.*got Linear and Adam"):
        SharedOptimizer(model, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trains 2 parameters and none of them is one of the 2 of this Linear"):
        SharedOptimizer(torch.optim.Adam(other.parameters()), model)
    with pytest.raises(TypeError, match="got Adam: give it the module"):
        ParamManager(optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shares a torch\.nn\.Module; got list"):
        SharedOptimizer(optimizer, list(model.parameters()))  # type: ignore[arg-type]
    assert mv.stats()["tables"] == {}


def test_rules_by_name(alone: None) -> None:
    model = nn.Linear(2, 2)
    manager = ParamManager(model, rule="easgd")
    before = table_of(manager).get()
    with torch.no_grad():
        model.weight += 1
        model.bias += 1
    manager.sync_all_param()
    np.testing.assert_allclose(table_of(manager).get(), before + 0.9, rtol=1e-5)  # 0.9 by the number of workers
    made = dict(mv.stats()["tables"])
    for rule, error, words in (
        ("eagsd", ValueError, "no rule is named 'eagsd'; there are asgd, easgd"),
        (mv.rules.easgd, TypeError, "the function easgd itself: call it"),
        (0.3, TypeError, "takes a rule such as.*got 0.3"),
    ):
        with pytest.raises(error, match=words):
            ParamManager(model, rule=rule)  # type: ignore[arg-type]
    assert mv.stats()["tables"].keys() == made.keys()


def test_a_parts_checkpoint_has_the_parts_size(alone: None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(2, 2))
    manager = ParamManager(model)
    torch.save(manager.state_dict(model[1]), tmp_path / "part")
    torch.save(manager.state_dict(), tmp_path / "all")
    assert (tmp_path / "part").stat().st_size < 5_000
    assert (tmp_path / "all").stat().st_size < 400_000
    loaded = torch.load(tmp_path / "part")
    assert all(torch.equal(loaded[name], value) for name, value in model[1].state_dict().items())


def test_statistics_by_name(alone: None) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("average", torch.ones(3))
    manager = ParamManager(model, statistics=["average"])
    assert list(manager.saved_tables()) == ["table-0-parameters", "table-1-statistics"]
    with pytest.raises(ValueError, match="typo"):
        ParamManager(model, statistics=["typo"])


def test_batch_normalisation_in_place(alone: None) -> None:
    model = network()
    manager = ParamManager(model)
    first, *others = (parameter.untyped_storage().data_ptr() for parameter in model.parameters())
    assert set(others) == {first}, "all lie in one memory, which is exchanged where it is"
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, manager.sync_all_param)
    assert model[1].num_batches_tracked == 3
    assert (model[1].running_var > 0).all()


def by_rule(sync: bool, rule: Any) -> Any:
    mv.init(sync=sync)
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(mv.worker_id()))
    manager = ParamManager(model, rule=rule)
    with torch.no_grad():
        model.weight += mv.worker_id() * 2
    manager.sync_all_param()
    return model.weight.detach().numpy().copy()


def test_other_rules() -> None:
    np.testing.assert_array_equal(ended(by_rule, True, mv.rules.model_averaging()), np.ones((2, 2, 2)))
    first, second = ended(by_rule, False, mv.rules.easgd(0.5))
    assert (second == 1).all(), "half-way to the centre"
    assert np.isin(first, [0, 0.5]).all(), "by who came first"


# One job after the other, in the same two processes.
LOADS = ("whole", "part", "not at all")


def loaded_after(how: str) -> Any:
    """What a worker is told who loads a state after it has made the manager, whole or of a part."""
    mv.init()
    model = network()
    manager = ParamManager(model)
    state = {name: torch.full_like(value, 5.0) for name, value in model.state_dict().items()}
    if how == "whole":
        model.load_state_dict(state)
    elif how == "part":
        model[0].load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]})
    told = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manager.sync_all_param()
        told.append([str(each.message) for each in caught])
    fresh = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # with what stands for the manager's hooks
    fresh.load_state_dict(state)
    return told


def two_managers(sync: bool) -> Any:
    """A wrapped optimizer beside a manager of one's own: what the loop of a newcomer does."""
    mv.init(sync=sync)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SharedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    manager = ParamManager(model)
    model.weight.grad = -torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="a newer manager") as refused:
        optimizer.step()
    assert "SharedOptimizer has made one" in str(refused.value)
    for _ in range(2):
        manager.sync_all_param()
        mv.barrier()
    return model.weight.item()


JOBS = [
    (frozen_work,),
    *((small_changes, dtype) for dtype in (torch.bfloat16, torch.float16)),
    *((overlapped, 9, sync, fragments) for sync in (False, True) for fragments in (1, 2)),
    *(landings(*how, saves) for how in LANDS for saves in (False, True)),
    (by_rule, True, mv.rules.model_averaging()),
    (by_rule, False, mv.rules.easgd(0.5)),
    *((loaded_after, how) for how in LOADS),
    *((two_managers, sync) for sync in (False, True)),
]
results_of = when_asked([Job((0, 1), job) for job in JOBS], call, preload=("multiverso.torch",))


def ended(*job: Any) -> list[Any]:
    """What both workers return from one of the jobs."""
    return unless_raised(results_of(JOBS.index(job)))


@pytest.mark.parametrize("sync", [False, True])
def test_a_parameter_is_exchanged_by_its_newest_manager_alone(sync: bool) -> None:
    assert ended(two_managers, sync) == [2.0, 2.0], "each worker's step of 1 counts once"


def test_what_two_modules_share_is_exchanged_by_the_newest_manager_alone(alone: None, tmp_path: Path) -> None:
    trunk = nn.Linear(2, 2)
    actor, critic = nn.Sequential(trunk, nn.Linear(2, 3)), nn.Sequential(trunk, nn.Linear(2, 1))
    of_actor, of_other = ParamManager(actor), ParamManager(network())
    of_actor.save(tmp_path / "actor")
    of_critic = ParamManager(critic)
    for refused in (of_actor.sync_all_param, of_actor.step, lambda: of_actor.save(tmp_path / "later")):
        with pytest.raises(RuntimeError, match="models share a part"):
            refused()
    with pytest.raises(RuntimeError, match="models share a part"):
        of_actor.load(tmp_path / "actor")
    of_critic.sync_all_param()
    of_other.sync_all_param()
    assert of_actor.state_dict().keys() == actor.state_dict().keys()


@pytest.mark.parametrize("how", LOADS)
def test_a_state_that_is_loaded_after_making_the_manager_is_warned_about_once(how: str) -> None:
    for first, second in ended(loaded_after, how):
        assert len(first) == (how != "not at all")
        assert not second
        assert all("adds up if every worker loads" in each for each in first)


def test_the_missing_framework_is_named() -> None:
    program = "import sys; sys.modules['torch'] = None; import multiverso.torch"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert 'pip install "multiverso[torch]"' in result.stderr
    assert "ImportError" in result.stderr
