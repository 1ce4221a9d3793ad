"""A run that was saved, ended and resumed goes on bit by bit as one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multiverso as mv
from multiverso.testing.laws import Job, Raised, in_each, run_jobs
from multiverso.torch import ParamManager

STEPS, SAVED = 9, 4
RULES: dict[str, Any] = {
    "asgd": mv.rules.asgd(),
    "easgd": mv.rules.easgd(0.2),
    "downpour": mv.rules.downpour(fetch=3, push=1),
    "model averaging": mv.rules.model_averaging(),
    "local sgd": mv.rules.local_sgd(),
}
# name: rule, dtype, options of the manager
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{name: (rule, torch.float32, {}) for name, rule in RULES.items()},
    "every third step": (RULES["easgd"], torch.float32, {"every": 3}),
    "overlapped": (RULES["asgd"], torch.float32, {"overlap": True}),
    "overlapped, every third step": (RULES["easgd"], torch.float32, {"overlap": True, "every": 3}),
    "16 bits": (RULES["asgd"], torch.bfloat16, {}),
    "16 bits, overlapped": (RULES["local sgd"], torch.bfloat16, {"overlap": True}),
}


class Net(nn.Module):
    """Of everything something: statistics, counters, frozen parameters, a buffer that changes, channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.target = nn.Linear(2, 1).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        y = self.layers(self.conv(x).flatten(1))
        with torch.no_grad():  # a target network that follows, in this worker alone
            self.target.weight += 0.01 * self.layers[3].weight[:1, :2]
            self.seen += float(x.sum())
        return y - self.target(y)


class Run:
    """One worker's training."""

    def __init__(self, case: str, seed: int) -> None:
        rule, dtype, options = CASES[case]
        torch.manual_seed(seed)
        self.model = Net().to(dtype)
        self.manager = ParamManager(self.model, rule=rule, **options)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        torch.manual_seed(100 + mv.worker_id())
        self.dtype = dtype
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 2, 2, 2).to(self.dtype)).float().square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.manager.step()
            self.step += 1

    def own(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }

    def resume(self, own: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(own["optimizer"])
        self.schedule.load_state_dict(own["schedule"])
        torch.set_rng_state(own["random"])
        self.step = own["step"]

    def bits(self) -> list[bytes]:
        self.manager.flush()
        state = [*self.model.state_dict().values(), *self.manager.state_dict().values()]
        moments = [value for row in self.optimizer.state.values() for value in row.values()]
        return [tensor.detach().float().numpy().tobytes() for tensor in state + moments]


def all_cases(folder: str, what: str) -> dict[str, list[bytes]]:
    torch.set_num_threads(1)
    mv.init(sync=True)
    ended = {}
    for case in CASES if mv.workers_num() == 2 else RULES:
        place = Path(folder, case, str(mv.workers_num()))
        run = Run(case, seed=mv.worker_id() if what != "resumed" else 7)
        if what == "resumed":
            own = run.manager.load(place)
            assert own is not None
            run.resume(own)
            assert run.step == SAVED
        elif what == "saved":
            assert run.manager.load(place, missing_ok=True) is None
            run.train(2)
            run.manager.save(place, run.own())
            run.train(SAVED)
            run.manager.save(place, run.own())
            assert sorted(path.name for path in place.iterdir()) == ["generation-2", "manifest.json"]
        run.train(STEPS)
        ended[case] = run.bits()
    mv.shutdown()
    return ended


WORKERS = (1, 2, 4)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("saved"))
    runs = [(n, folder, what) for n in WORKERS for what in ("saved", "resumed")]
    results = in_each([*runs, (2, folder, "never saved")], all_cases, preload=("multiverso.torch",))
    return lambda workers, what: results(workers, folder, what)


@pytest.mark.parametrize(("case", "workers"), [(case, n) for case in CASES for n in WORKERS if n == 2 or case in RULES])
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_on(ended: Any, case: str, workers: int) -> None:
    saved, resumed = ended(workers, "saved"), ended(workers, "resumed")
    for me in range(workers):
        assert len(saved[me][case]) > 30
        assert resumed[me][case] == saved[me][case]
    assert workers == 1 or saved[0][case] != saved[1][case], "workers have something of their own"


def test_another_number_goes_on(tmp_path: Path) -> None:
    """One worker has saved, two go on; two have saved, and one goes on."""
    folder = str(tmp_path)
    numbers = ((0,), (0, 1), (0, 1), (0,))
    jobs = [Job(workers, (folder, "saved" if i % 2 == 0 else "other")) for i, workers in enumerate(numbers)]
    results = run_jobs(jobs, go_on_as_others, preload=("multiverso.torch",))
    for ended in results:
        for result in ended:
            assert not isinstance(result, Raised), result.text
    _, more, _, fewer = results
    assert [newcomer for newcomer, _ in more] == [False, True]
    assert fewer[0][0] is False


def go_on_as_others(folder: str, what: str) -> Any:
    """With every rule, and with what a manager may have under way when it saves."""
    torch.set_num_threads(1)
    mv.init(sync=True)
    ends = []
    for case in (*RULES, "overlapped, every third step", "16 bits, overlapped"):
        run = Run(case, seed=mv.worker_id())
        place = Path(folder, case, what)
        if what == "saved":
            run.train(SAVED)
            run.manager.save(place, run.own())
            continue
        place = Path(folder, case, "saved")
        own = run.manager.load(place)
        assert own is not None
        run.resume(own)
        if run.manager.newcomer:
            centre = run.manager.state_dict()
            for name, parameter in run.model.named_parameters():
                assert torch.equal(parameter.detach(), centre[name].to(parameter.dtype)), (case, name)
        run.train(STEPS)
        run.manager.flush()
        ends.append(b"".join(t.float().numpy().tobytes() for t in run.manager.state_dict().values()))
        newcomer = run.manager.newcomer
    mv.shutdown()
    return (newcomer, ends) if ends else None


@pytest.mark.parametrize("case", CASES)
def test_a_save_changes_nothing(ended: Any, case: str) -> None:
    for saved, never_saved in zip(ended(2, "saved"), ended(2, "never saved"), strict=True):
        assert saved[case] == never_saved[case]
