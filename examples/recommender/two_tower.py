"""A two-tower recommender on generated clicks, whose items grow in number while it trains.

python examples/recommender/two_tower.py --alone                       # one process of PyTorch alone, sparse Adagrad
multiverso run -n 2 examples/recommender/two_tower.py --directory saved   # shared, killed and started again
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import multiverso as mv
import multiverso.torch as mvt
from multiverso.checkpoints import worker_folder
from multiverso.runtime.session.current import current

DIM, TRUE_DIM, BATCH, RATE = 16, 4, 256, 0.1
USERS, FIRST_ITEMS, NEW_ITEMS = 5_000, 500, 2  # items there are at first, and that come with each step


def clicks(step):
    """The step's samples: users, items and who clicked. The same for whoever asks."""
    random = np.random.default_rng([7, step])
    items = FIRST_ITEMS + NEW_ITEMS * step
    user, item = random.integers(USERS, size=BATCH), random.integers(items, size=BATCH)
    liking = (tastes(user, 1) * tastes(item, 2)).sum(1) * 2
    clicked = random.random(BATCH) < 1 / (1 + np.exp(-liking))
    return torch.from_numpy(user), torch.from_numpy(item), torch.from_numpy(clicked).float()


def tastes(ids, kind):
    """What nobody is told: where a user or an item lies."""
    mixed = (ids[:, None] * 2654435761 + np.arange(TRUE_DIM) * 40503 * kind + kind) % 65_537
    return np.sin(mixed.astype(np.float64))


class TwoTower(nn.Module):
    """A tower for users and one for items: a row by number, and a layer. The score is their product."""

    def __init__(self, users, items):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = users, items
        self.user, self.item = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, users, items):
        """Returns the logit of a click for each pair."""
        return (self.user(self.users(users)) * self.item(self.items(items))).sum(1)


def tables():
    """The rows of all users and items, which begin when they are first trained."""
    adagrad = mv.updaters.adagrad(RATE, initial=0.0, epsilon=1e-10)
    return [
        mv.KeyedTable(DIM, initial=("normal", 0.3), seed=seed, updater=adagrad, name=name)
        for seed, name in enumerate(("users", "items"))
    ]


def alone(steps):
    """The same model in PyTorch, with as many rows as there will be."""
    numbers = (USERS, FIRST_ITEMS + NEW_ITEMS * steps)
    rows = [torch.from_numpy(table.get(np.arange(n))) for table, n in zip(tables(), numbers, strict=True)]
    return TwoTower(*(nn.Embedding.from_pretrained(r, freeze=False, sparse=True) for r in rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of all workers together")
    parser.add_argument("--alone", action="store_true", help="one process, PyTorch alone")
    parser.add_argument("--directory", type=Path, help="save here, and go on from here")
    parser.add_argument("--save-every", type=int, default=500, help="steps of this worker between two saves")
    parser.add_argument("--json", type=Path, help="write the curve and the speed here")
    parser.add_argument("--picture", type=Path, help="draw the curve (matplotlib)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mv.init()
    if options.alone:
        model, keyed, optimizer = alone(options.steps), [], None
        optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    else:
        keyed = tables()
        model = TwoTower(*map(mvt.Embedding, keyed))
        optimizer = mvt.SharedOptimizer(torch.optim.Adagrad(model.parameters(), lr=RATE), model)

    def write(folder):
        for table in keyed:
            table.save(folder / f"{table.name}.safetensors")

    own = {"step": mv.worker_id(), "losses": []}  # worker i does the steps i, i + n, i + 2n, ...
    if options.directory and not options.alone:
        saved = optimizer.manager.load(options.directory, missing_ok=True)
        if saved is not None:
            optimizer.load_state_dict(saved.pop("optimizer"))
            own = saved
            found = worker_folder(current(), options.directory)
            if found is not None and mv.Counter("loaded").fetch_add() == 0:
                for table in keyed:
                    table.load(found[0] / f"{table.name}.safetensors")
        mv.barrier()

    began, first, done = time.perf_counter(), own["step"], 0
    mine = range(first, options.steps, mv.num_workers())
    for step in tqdm(mine, desc="two towers", disable=not mv.is_master_worker()):
        users, items, clicked = clicks(step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)
        optimizer.zero_grad()
        loss.backward()  # trains the rows
        optimizer.step()  # trains the layers
        own["losses"].append(loss.item())
        own["step"], done = step + mv.num_workers(), done + 1
        if options.directory and not options.alone and done % options.save_every == 0:
            optimizer.manager.save(options.directory, own | {"optimizer": optimizer.state_dict()}, files=write)
    mv.barrier()
    seconds = time.perf_counter() - began
    if mv.is_master_worker():
        curve = np.array(own["losses"])
        rows = [len(table) for table in keyed] or [len(layer.weight) for layer in (model.users, model.items)]
        speed = done * mv.num_workers() * BATCH / seconds
        print(
            f"loss {curve[:50].mean():.4f} -> {curve[-50:].mean():.4f}, {rows[0]:,} users, {rows[1]:,} items, "
            f"{speed:,.0f} samples/s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps({"losses": own["losses"], "samples_a_second": speed}))
        if options.picture:
            draw(options.picture, curve)
    mv.shutdown()


def draw(path, curve):
    """Draws the loss, averaged over 25 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    axes.plot(np.convolve(curve, np.ones(25) / 25, "valid"), color="tab:orange")
    axes.set(xlabel="steps", ylabel="log loss")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
