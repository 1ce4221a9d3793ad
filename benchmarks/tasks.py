"""What benchmarks train: softmax regression, a convolutional network and a character-level transformer, on real data.

The data come with scikit-learn (8 x 8 images of digits) and with Python (the text of ``help()``'s topics).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from straggler import gradient, load

CONTEXT = 32  # characters
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        weights: where it begins, flat: float32.
        rate: a learning rate for plain SGD.
        gradient: of the mean loss of a minibatch that is drawn, at some weights.
        score: validation loss, and the part that is right, at some weights.
    """

    weights: Array
    rate: float
    gradient: Callable[[Array, np.random.Generator], Array]
    score: Callable[[Array], tuple[float, float]]


def softmax(seed: int) -> Task:
    """Softmax regression on digits, in NumPy."""
    images, labels, held, held_labels = load(seed)

    def slope(weights: Array, drawn: np.random.Generator) -> Array:
        batch = drawn.choice(len(labels), 16)
        return gradient(weights.reshape(-1, 10), images[batch], labels[batch]).reshape(-1)

    def score(weights: Array) -> tuple[float, float]:
        scores = held @ weights.reshape(-1, 10)
        scores -= scores.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), held_labels]
        return float(losses.mean()), float((scores.argmax(axis=1) == held_labels).mean())

    return Task(np.zeros(images.shape[1] * 10, np.float32), 0.05, slope, score)


def convolution(seed: int) -> Task:
    """A convolutional network of 4,500 numbers on digits."""
    import torch
    from torch import nn

    images, labels, held, held_labels = (torch.from_numpy(np.asarray(array)) for array in load(seed))
    pictures, held_pictures = (each[:, :64].reshape(-1, 1, 8, 8) for each in (images, held))

    def draw(drawn: np.random.Generator) -> tuple[Any, Any]:
        batch = torch.from_numpy(drawn.choice(len(labels), 16))
        return pictures[batch], labels[batch]

    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10),
    )  # fmt: skip
    return _of(model, 0.03, draw, (held_pictures, held_labels))


def text(seed: int, width: int = 32, layers: int = 1, batch: int = 8) -> Task:
    """A transformer that is to say the next character, from the CONTEXT before it."""
    train, held = characters()

    def draw(drawn: np.random.Generator) -> tuple[Any, Any]:
        return windows(train, drawn.integers(len(train) - CONTEXT - 1, size=batch))

    return _of(transformer(seed, width, layers), 0.1, draw, windows(held, np.arange(0, len(held) - CONTEXT - 1, 97)))


def characters() -> tuple[Array, Array]:
    """Returns the numbers of a text's characters: nine tenths to train on, and the rest."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(whole)))}
    numbers = np.array([alphabet[character] for character in whole], np.int64)
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:]


def windows(numbers: Array, starts: Array) -> tuple[Any, Any]:
    """Returns CONTEXT characters from each start on, and for each the one that follows it: tensors."""
    import torch

    places = starts[:, None] + np.arange(CONTEXT)
    return torch.from_numpy(numbers[places]), torch.from_numpy(numbers[places + 1]).reshape(-1)


def transformer(seed: int, width: int, layers: int) -> Any:
    """Returns a causal transformer for `windows`: scores of all characters, a row for each place."""
    import torch
    from torch import nn

    class Transformer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.characters, self.places = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.scores = nn.Linear(width, 128)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

        def forward(self, numbers: Any) -> Any:
            hidden = self.characters(numbers) + self.places.weight
            return self.scores(self.layers(hidden, self.mask, is_causal=True)).reshape(-1, 128)

    torch.manual_seed(seed)
    return Transformer()


def _of(model: Any, rate: float, draw: Callable[[np.random.Generator], tuple[Any, Any]], held: tuple[Any, Any]) -> Task:
    import torch
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    torch.set_num_threads(1)
    parameters = list(model.parameters())

    def set_to(weights: Array) -> None:
        vector_to_parameters(torch.from_numpy(weights.astype(np.float32)), parameters)

    def slope(weights: Array, drawn: np.random.Generator) -> Array:
        set_to(weights)
        inputs, targets = draw(drawn)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        found: Array = parameters_to_vector(torch.autograd.grad(loss, parameters)).numpy()
        return found

    def score(weights: Array) -> tuple[float, float]:
        set_to(weights)
        with torch.no_grad():
            scores = model(held[0])
        loss = torch.nn.functional.cross_entropy(scores, held[1])
        return float(loss), float((scores.argmax(1) == held[1]).float().mean())

    return Task(parameters_to_vector(parameters).detach().numpy().copy(), rate, slope, score)


TASKS = {make.__name__: make for make in (softmax, convolution, text)}
