"""Embeddings over shared tables against PyTorch's own, with one worker and with two."""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import multiverso as mv
from multiverso.errors import ClosedError
from multiverso.launch.rehearsing import hosts_here
from multiverso.runtime import Node, Session
from multiverso.tables.keyed.saving import Content, Copied
from multiverso.torch import Embedding, EmbeddingBag

ROWS, DIM = 30, 4


@pytest.fixture
def session() -> Iterator[Session]:
    with Node(1) as node, Session(node.address, timeout_seconds=30) as made:
        yield weakref.proxy(made)  # pytest keeps what it has given to a test; this lets the memory go all the same


def start() -> Any:
    return np.random.default_rng(0).normal(size=(ROWS, DIM)).astype("f4")


def table_of(kind: str, session: Session, updater: Any = "sgd") -> Any:
    if kind == "matrix":
        return mv.MatrixTableHandler(ROWS, DIM, start(), updater=updater, session=session)
    table = mv.KeyedTable(DIM, updater=updater, session=session)
    states = [np.full((ROWS, DIM), state.initial, "f4") for state in table.spec.states]
    content = Content(np.arange(ROWS), np.concatenate([start(), *states], 1).view(np.uint8))
    with tempfile.TemporaryDirectory() as folder:
        Copied(table.spec, content).save(f"{folder}/table.safetensors")
        table.load(f"{folder}/table.safetensors")
    return table


def rows_of(table: Any) -> Any:
    return torch.from_numpy(table.get(np.arange(ROWS)))


@pytest.mark.parametrize("kind", ["matrix", "keyed"])
def test_gradients_of_two_hosts_add_up(kind: str) -> None:
    values: list[Any] = [None, None]

    def work(node: Node, me: int) -> None:
        with Session(node.address, me, timeout_seconds=60) as session:
            table: Any
            if kind == "matrix":
                table = mv.MatrixTableHandler(ROWS, DIM, updater="sgd", session=session)
            else:
                table = mv.KeyedTable(DIM, updater="sgd", session=session)
            layer = Embedding(table)
            for step in range(20):
                layer(torch.tensor([step, me, 29])).sum().backward()  # the gradient of a row is how often it is named
            session.barrier()
            values[me] = table.get(np.arange(ROWS))
            session.barrier()

    with hosts_here((1, 1)) as (_, nodes):
        threads = [threading.Thread(target=work, args=(nodes[me], me)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
    named = np.bincount([row for me in range(2) for step in range(20) for row in (step, me, 29)], minlength=ROWS)
    for value in values:
        assert np.array_equal(value, np.repeat(-named[:, None], DIM, axis=1))


@pytest.mark.parametrize("kind", ["matrix", "keyed"])
def test_it_trains_as_pytorch_s_own_does(kind: str, session: Session) -> None:
    """The same losses, step by step, with ids that are named many times in a batch."""
    table = table_of(kind, session)
    ours = Embedding(table, learning_rate=0.5, padding_idx=3)
    theirs = torch.nn.Embedding(ROWS, DIM, padding_idx=3)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(start()))
        theirs.weight[3] = 0
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    torch.manual_seed(1)
    for step in range(15):
        ids = torch.randint(0, ROWS, (5, 7))
        if step % 2:
            ours.prefetch(ids)
        losses = []
        for module in (ours, theirs):
            out = module(ids)
            assert out.shape == (5, 7, DIM)
            losses.append((out.sin() * torch.arange(DIM)).mean())
        torch.testing.assert_close(*losses)
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        optimizer.step()
    kept = torch.arange(ROWS) != 3
    torch.testing.assert_close(rows_of(table)[kept], theirs.weight.detach()[kept])
    assert torch.equal(rows_of(table)[3], torch.from_numpy(start()[3]))  # never trained
    assert not list(ours.parameters())


# torch's own, about the gradients of sparse embeddings
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("kind", ["matrix", "keyed"])
@pytest.mark.parametrize("name", ["adagrad", "rmsprop"])
def test_updaters_at_the_table_give_the_losses_of_pytorch_s_optimizers(name: str, kind: str, session: Session) -> None:
    updater = {"adagrad": mv.updaters.adagrad(0.2), "rmsprop": mv.updaters.rmsprop(0.02)}[name]
    ours = Embedding(table_of(kind, session, updater))
    theirs = torch.nn.Embedding(ROWS, DIM, sparse=name == "adagrad")
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(start()))
    optimizer: torch.optim.Optimizer
    if name == "adagrad":
        optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.2)
    else:  # rows without a gradient would lose some of their mean square: it gets all rows each time
        optimizer = torch.optim.RMSprop(theirs.parameters(), lr=0.02)
    torch.manual_seed(3)
    for _ in range(15):
        ids = torch.randint(0, ROWS, (40,)) if name == "adagrad" else torch.randperm(ROWS)
        losses = [(module(ids).sin() * torch.arange(DIM)).mean() for module in (ours, theirs)]
        torch.testing.assert_close(*losses)
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        optimizer.step()
    torch.testing.assert_close(rows_of(ours.table), theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_pytorch_s_own(mode: str, session: Session) -> None:
    table = table_of("matrix", session)
    ours = EmbeddingBag(table, mode=mode, learning_rate=0.1)
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode=mode)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(start()))
    torch.manual_seed(2)
    ids, offsets = torch.randint(0, ROWS, (20,)), torch.tensor([0, 4, 4, 15])
    weights = torch.rand(20) if mode == "sum" else None
    expected = theirs(ids, offsets, per_sample_weights=weights)
    got = ours(ids, offsets, per_sample_weights=weights)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(rows_of(table), (theirs.weight - 0.1 * theirs.weight.grad).detach())


def test_two_workers_train_one_table() -> None:
    """Each learns half of the targets; both read all of them."""
    results: list[Any] = [None, None]

    def work(node: Node, me: int) -> None:
        with Session(node.address, me, timeout_seconds=60) as session:
            module = Embedding(mv.KeyedTable(2, initial="normal", updater="sgd", session=session), learning_rate=0.5)
            ids = torch.arange(me, 40, 2)
            for _ in range(40):
                loss = (module(ids) - ids[:, None]).square().sum()
                loss.backward()
            session.barrier()
            results[me] = module.table.get(np.arange(40)).copy()
            session.barrier()

    with Node(2) as node:
        threads = [threading.Thread(target=work, args=(node, me)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for rows in results:
        np.testing.assert_allclose(rows, np.repeat(np.arange(40.0)[:, None], 2, axis=1), atol=1e-3)


def test_what_cannot_train_is_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="uphill"):
        Embedding(mv.KeyedTable(2, session=session))
    with pytest.raises(ValueError, match="floats"):
        Embedding(mv.KeyedTable(2, dtype="int64", updater="sgd", session=session))
    with pytest.raises(TypeError, match="KeyedTable"):
        Embedding(torch.nn.Embedding(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="learning rate"):
        Embedding(mv.KeyedTable(2, updater="sgd", session=session), learning_rate=0)
    with pytest.raises(ValueError, match="mode"):
        EmbeddingBag(mv.KeyedTable(2, updater="sgd", session=session), mode="min")


def test_a_prefetch_of_other_ids_or_of_a_closed_session_is_no_answer() -> None:
    with Node(1) as node:
        with Session(node.address) as session:
            module = Embedding(mv.KeyedTable(2, initial=1.0, updater="sgd", session=session))
            module.prefetch(torch.tensor([1, 2]))
            assert module(torch.tensor([[7]])).tolist() == [[[1.0, 1.0]]]
        module.prefetch(torch.tensor([1]))
        with pytest.raises(ClosedError):
            module(torch.tensor([1]))


def embed(steps: int) -> tuple[float, int]:
    """Trains an embedding until it has learned, at most for so many steps; returns the last loss and the count of rows.

    A worker sees its own adds once they have been home and back: how many steps it takes depends on the machine.
    """
    mv.init()
    torch.manual_seed(mv.worker_id())
    users = Embedding(mv.KeyedTable(8, initial="uniform", updater=mv.updaters.adagrad(0.1), cache_rows=200))
    score = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(score.parameters(), lr=0.1)
    ids = torch.arange(64) * 7919
    likes = (ids % 2).float()
    for _ in range(steps):
        users.prefetch(ids)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score(users(ids))[:, 0], likes)
        optimizer.zero_grad()
        if loss.item() < 0.3:
            break
        loss.backward()
        optimizer.step()
    mv.barrier()
    found = loss.item(), len(users.table)
    mv.shutdown()
    return found


def test_it_is_trained_by_processes_of_two_hosts() -> None:
    for loss, rows in mv.run(embed, workers=2, hosts=2, args=(100_000,), timeout_seconds=200):
        assert loss < 0.3
        assert rows == 64
