"""One worker's training, without multiverso or with it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import data
import models
import numpy as np
import torch
import torch.nn.functional as F
from plan import MODES, Configuration, Settings, parse_rule

import multiverso as mv


@dataclass(frozen=True)
class Epoch:
    """What the master saw of an epoch."""

    number: int
    seconds: float  # of training, all workers together; validation and loading are not in it
    loss: float  # of the master's last minibatch
    accuracy: float  # of the shared model on the validation images


def train(settings: Settings, configuration: Configuration, images: data.Images) -> list[Epoch]:
    """Trains from the start and returns the epochs, in the master; the others return nothing.

    As the originals did: the workers divide the data equally and an epoch is all of them going through it once,
    with a barrier at its end; loading is not counted, and nobody begins with a trained model.
    """
    if configuration.used:
        mv.init(**MODES[configuration.mode])
    me = mv.worker_id() if configuration.used else 0
    device = torch.device("cuda", me % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # where there are no GPUs, a core stands for one
    torch.manual_seed(settings.seed)  # the same in all, and without multiverso: the same initial model

    def make() -> torch.nn.Module:
        return models.resnet(images.train.shape[1], images.classes, settings.depth, settings.width).to(device)

    model = make()
    optimizer = torch.optim.SGD(
        model.parameters(), settings.rate, settings.momentum, weight_decay=settings.decay, nesterov=True
    )
    manager = None
    if configuration.used:
        from multiverso.torch import ParamManager

        manager = ParamManager(model, every=configuration.every, rule=parse_rule(configuration.rule))
    judge = make() if me == 0 else None
    source, labels = torch.from_numpy(images.train), torch.from_numpy(images.train_labels)
    epochs = []
    for number in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(number)
        rows = _rows(len(labels), number, settings.seed, configuration)
        shifts = np.random.default_rng([settings.seed, number, me])
        if manager:
            mv.barrier()
        began = time.perf_counter()
        model.train()
        loss = torch.zeros(())
        for start in range(0, len(rows) - settings.batch + 1, settings.batch):
            batch = torch.from_numpy(rows[start : start + settings.batch])
            x = _moved(source[batch], images, shifts).to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), labels[batch].to(device))
            loss.backward()
            optimizer.step()
            if manager:
                manager.step()
        if manager:
            manager.sync_all_param()  # what the last minibatches have changed
            mv.barrier()
        seconds = time.perf_counter() - began
        if judge is not None:
            judge.load_state_dict(manager.state_dict() if manager else model.state_dict())
            accuracy = _accuracy(judge, images, device)
            epochs.append(Epoch(number, seconds, loss.item(), accuracy))
            print(
                f"{configuration.code}: epoch {number + 1} of {settings.epochs}, {seconds:.2f} s, "
                f"loss {loss.item():.3f}, validation accuracy {accuracy:.2%}",
                flush=True,
            )
    return epochs


def _rows(number: int, epoch: int, seed: int, configuration: Configuration) -> np.ndarray:
    if configuration.used:
        return mv.shard(number, epoch=epoch, seed=seed)
    return np.random.default_rng([seed, epoch]).permutation(number)


def _moved(batch: torch.Tensor, images: data.Images, random: np.random.Generator) -> torch.Tensor:
    """Shifts, and where that makes sense mirrors, each image at random."""
    pad, side = images.padding, batch.shape[-1]
    padded = F.pad(batch, (pad, pad, pad, pad))
    across, down = (torch.from_numpy(random.integers(0, 2 * pad + 1, len(batch))) for _ in range(2))
    columns = across[:, None] + torch.arange(side)
    if images.flip:
        mirrored = torch.from_numpy(random.integers(0, 2, len(batch)).astype(bool))
        columns[mirrored] = columns[mirrored].flip(1)
    rows = (down[:, None] + torch.arange(side))[:, :, None]
    number = torch.arange(len(batch))[:, None, None]
    return padded[number, :, rows, columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def _accuracy(model: torch.nn.Module, images: data.Images, device: torch.device | str) -> float:
    model.eval()
    right = 0
    for start in range(0, len(images.validation_labels), 1000):
        guess = model(torch.from_numpy(images.validation[start : start + 1000]).to(device)).argmax(1).cpu().numpy()
        right += int((guess == images.validation_labels[start : start + 1000]).sum())
    return right / len(images.validation_labels)
