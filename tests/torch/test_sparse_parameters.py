"""Sparse embeddings of ordinary models: exchanged by rows, with the results of exchanging all of them."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import multiverso as mv
from multiverso.launch.rehearsing import hosts_here
from multiverso.runtime import Node, Session
from multiverso.torch import ParamManager, SharedOptimizer

# torch's own, about the gradients of sparse embeddings
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
ROWS, DIM = 4096, 8  # the least that is exchanged by rows


def tables_by_rows(manager: ParamManager) -> list[Any]:
    return [table for name, table in manager.saved_tables().items() if name.endswith("rows")]


@pytest.fixture
def session() -> Iterator[Session]:
    with Node(1) as node, Session(node.address, timeout_seconds=30) as made:
        yield weakref.proxy(made)


class Net(nn.Module):
    def __init__(self, rows: int = ROWS, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bags = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=sparse)
        self.words = nn.Embedding(rows, DIM, sparse=sparse, padding_idx=0)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Any) -> Any:
        return self.out(self.bags(ids) * self.words(ids[:, 0]))


def batch(step: int) -> Any:
    # few different rows, so that many come again in later steps
    return torch.randint(0, 60, (16, 3), generator=torch.Generator().manual_seed(step)) * 67


def train(model: Any, optimizer: Any, steps: range, after: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(batch(step)) - 1).square().mean().backward()
        optimizer.step()
        if after:
            after()


def values(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 3},
        {"whole_every": 4},
        {"rule": mv.rules.downpour(fetch=3, push=1)},
        {"rule": mv.rules.downpour(fetch=4, push=2), "whole_every": 3},
    ],
    ids=["plain", "every third", "often whole", "downpour", "downpour, often whole"],
)
def test_one_worker_gets_what_whole_exchanges_give(options: dict[str, Any], session: Session) -> None:
    results = []
    for how in ({"whole_every": 1}, {}):
        model = Net()
        manager = ParamManager(model, session=session, **{**options, **how})
        assert len(tables_by_rows(manager)) == (0 if how else 2)
        train(model, torch.optim.SGD(model.parameters(), lr=0.02), range(17), manager.step)
        while_training = values(model)
        manager.sync_all_param()
        results.append((while_training, values(model), manager.state_dict()))
    for whole, by_rows in zip(*results, strict=True):
        for name, value in whole.items():
            torch.testing.assert_close(by_rows[name], value, rtol=1e-6, atol=1e-7)


def test_adagrad_s_rows_are_those_of_a_model_alone(session: Session) -> None:
    alone, shared = Net(), Net()
    train(alone, torch.optim.Adagrad(alone.parameters(), lr=0.3), range(12))
    optimizer = SharedOptimizer(torch.optim.Adagrad(shared.parameters(), lr=0.3), shared, session=session)
    train(shared, optimizer, range(12))
    assert not any(group.whole for group in optimizer.manager._sparse)
    for mine, other in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("staleness", [None, 2])
def test_what_two_workers_change_adds_up_exactly(staleness: int | None, hosts: int) -> None:
    """Whole numbers: each looking up of a row moves it by one, whoever does it and whenever it is exchanged."""
    results: list[Any] = [None, None]

    def work(node: Node, me: int) -> None:
        options = {} if staleness is None else {"staleness": staleness}
        with Session(node.address, me, timeout_seconds=60, **options) as session:
            words = nn.Embedding(ROWS, DIM, sparse=True)
            nn.init.zeros_(words.weight)
            optimizer = SharedOptimizer(
                torch.optim.SGD(words.parameters(), lr=1),
                words,
                whole_every=7,
                every=1 + me if staleness is None else 2,
                session=session,
            )
            for step in range(30):
                optimizer.zero_grad()
                words(batch(2 * step + me)).sum().backward()
                optimizer.step()
            optimizer.manager.sync_all_param()
            session.barrier()
            optimizer.manager.sync_all_param()
            results[me] = words.weight.detach().clone()
            session.barrier()

    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(2))] * 2 if hosts == 1 else stack.enter_context(hosts_here((1, 1)))[1]
        threads = [threading.Thread(target=work, args=(nodes[me], me)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
    expected = torch.zeros(ROWS)
    for step in range(60):
        expected -= torch.bincount(batch(step).reshape(-1), minlength=ROWS)
    for weight in results:
        assert torch.equal(weight, expected[:, None].expand(ROWS, DIM))


def test_a_forward_reads_what_others_have_pushed_since(session: Session) -> None:
    """And reads a row once between two exchanges."""
    words = nn.Embedding(ROWS, DIM, sparse=True)
    manager = ParamManager(words, session=session)
    rows = manager._shared.by_rows[0]
    assert rows is not None
    ids = torch.tensor([5, 9, 5])
    before = words(ids).detach().clone()
    rows.table.add(np.ones((1, DIM)), row_ids=[5])  # another worker
    assert torch.equal(words(ids), before)  # as of the last exchange
    manager.step()
    torch.testing.assert_close(words(ids), before + torch.tensor([[1.0], [0.0], [1.0]]))
    with pytest.raises(IndexError):
        words(torch.tensor([ROWS]))


def test_what_changes_other_rows_is_exchanged_whole(session: Session) -> None:
    """Momentum goes on moving rows that nobody reads; a weight that is used otherwise has a dense gradient."""
    results = []
    for how in (1, 100):
        model = Net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = SharedOptimizer(plain, model, whole_every=how, session=session)
        train(model, optimizer, range(8))
        results.append(optimizer.manager.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value)
    words = nn.Embedding(ROWS, DIM, sparse=True)
    start = words.weight.detach().clone()
    optimizer = SharedOptimizer(torch.optim.SGD(words.parameters(), lr=1), words, session=session)
    words.weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.manager.state_dict()["weight"], start - 1)


def test_what_is_not_exchanged_by_rows(session: Session) -> None:
    tied = Net()
    tied.register_parameter("again", tied.words.weight)  # used we do not know how
    assert len(tables_by_rows(ParamManager(tied, session=session))) == 1
    for model, options in (
        (Net(sparse=False), {}),
        (Net(rows=100 * 67), {"overlap": True}),
        (Net().bfloat16(), {}),
        (Net(rows=ROWS - 1), {}),
    ):
        assert not tables_by_rows(ParamManager(model, session=session, **options))  # type: ignore[arg-type]
    for rule in ("easgd", mv.rules.downpour(fetch=2, push=3)):
        assert not tables_by_rows(ParamManager(Net(), rule=rule, session=session))
    with pytest.raises(ValueError, match="whole_every"):
        ParamManager(Net(), whole_every=0, session=session)


def test_in_a_synchronous_job_all_workers_have_equal_bits() -> None:
    results: list[Any] = [None, None]

    def work(node: Node, me: int) -> None:
        with Session(node.address, me, sync=True, timeout_seconds=60) as session:
            model = Net()
            optimizer = SharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
            for step in range(5):
                optimizer.zero_grad()
                model(batch(2 * step + me)).square().mean().backward()
                optimizer.step()
            results[me] = values(model)

    with Node(2) as node:
        threads = [threading.Thread(target=work, args=(node, me)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_loaded_again_goes_on_bit_by_bit(every: int, session: Session, tmp_path: Path) -> None:
    model = Net()
    optimizer = SharedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model, every=every, session=session)
    train(model, optimizer, range(4))
    optimizer.manager.save(tmp_path / "saved", {"optimizer": optimizer.state_dict()})
    train(model, optimizer, range(4, 9))
    expected = values(model), optimizer.manager.state_dict()
    own = optimizer.manager.load(tmp_path / "saved")
    assert own is not None
    optimizer.load_state_dict(own["optimizer"])
    train(model, optimizer, range(4, 9))
    for before, after in zip(expected, (values(model), optimizer.manager.state_dict()), strict=True):
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_exceptions_between_any_two_steps_lose_nothing(session: Session) -> None:
    """Wherever a table's operation raises, the same call again finishes: nothing is pushed twice or not at all."""
    words = nn.Embedding(ROWS, DIM, sparse=True)
    nn.init.zeros_(words.weight)
    manager = ParamManager(words, session=session)
    optimizer = torch.optim.SGD(words.parameters(), lr=1)
    table = tables_by_rows(manager)[0]
    failures = 0

    def again(what: Any) -> Any:
        nonlocal failures
        while True:
            try:
                return what()
            except KeyboardInterrupt:
                failures += 1

    for name in ("add", "snapshot"):
        raising = [True]
        method = getattr(table, name)

        def fails(*args: Any, raising: Any = raising, method: Any = method, **kwargs: Any) -> Any:
            raising[0] = not raising[0]
            if not raising[0]:
                raise KeyboardInterrupt
            return method(*args, **kwargs)

        setattr(table, name, fails)
    counts = torch.zeros(ROWS)
    for step in range(6):
        optimizer.zero_grad()
        again(lambda step=step: words(batch(step))).sum().backward()
        optimizer.step()
        counts -= torch.bincount(batch(step).reshape(-1), minlength=ROWS)
        again(manager.step)
    assert failures >= 8
    assert torch.equal(torch.from_numpy(table.get()), counts[:, None].expand(ROWS, DIM))


def test_copies_of_a_model_stand_alone_and_it_outlives_the_job() -> None:
    with Node(1) as node:
        with Session(node.address) as session:
            model = Net()
            manager = ParamManager(model, session=session)
            twin = copy.deepcopy(model)
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            for table in tables_by_rows(manager):
                table.add(np.ones((ROWS, DIM)))
            manager.step()
            assert torch.equal(twin(batch(0)), loaded(batch(0)))
            assert not torch.equal(model(batch(0)), twin(batch(0)))
        assert model(batch(1)).shape == (16, 1)
