"""Visual question answering: a picture of coloured shapes and a spoken question come in, an answer goes out. Both are made here.

Each quarter of a picture may hold a ring, square or cross in red, green or blue. A question is two words, a tone each: what is asked
(colour, shape, how many) and of which quarter. The models are trained for some seconds where this file is imported first; their weights are
kept in the folder for temporary files. `shardwise serve profile examples/serve/answers.toml` measures their speed and accuracy.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import resnet

SIDE, QUARTERS, KINDS = 48, 4, 3  # pixels; kinds of shapes, and of colours
SAMPLES, RATE_HZ, WORD = 1600, 4000, 600  # of a waveform, samples of a word
COLOURS = np.array([[1.0, 0.4, 0.4], [0.4, 1.0, 0.4], [0.4, 0.4, 1.0]], np.float32)
WHAT_HZ, WHERE_HZ = np.array([400.0, 440.0, 490.0]), np.array([700.0, 760.0, 830.0, 910.0, 1000.0])  # the last: of the whole picture
QUESTIONS = 2 * QUARTERS + 1  # a quarter's colour, a quarter's shape, how many; answers: a colour, a shape, one to four


def pictures(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [N, 3, S, S] and what their quarters hold, [N, 4, 2]: colour and shape from 1 on, 0 for nothing."""
    holds = rng.integers(1, KINDS + 1, (count, QUARTERS, 2)) * (rng.random((count, QUARTERS, 1)) < 0.7)
    holds[holds.sum((1, 2)) == 0] = 1
    images = 0.4 * rng.standard_normal((count, 3, SIDE, SIDE)).astype(np.float32)
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    for quarter in range(QUARTERS):
        centre = (np.array(divmod(quarter, 2)) * SIDE / 2 + SIDE / 4 + rng.uniform(-3, 3, (count, 2))).astype(np.float32)
        size = rng.uniform(6, 9, (count, 1, 1)).astype(np.float32)
        y, x = (rows - centre[:, :1, None]) / size, (columns - centre[:, 1:, None]) / size
        ring, square = abs(x**2 + y**2 - 0.7) < 0.3, np.maximum(abs(x), abs(y)) < 0.9
        cross = square & (np.minimum(abs(x), abs(y)) < 0.3)
        colour, shape = holds[:, quarter, 0], holds[:, quarter, 1]
        mask = np.select([shape[:, None, None] == kind for kind in range(1, KINDS + 1)], [ring, square, cross], False)
        light = rng.uniform(0.5, 1, (count, 1)).astype(np.float32)
        images += (COLOURS[colour - 1] * light)[:, :, None, None] * mask[:, None]
    return images, holds


def spoken(questions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Waveforms [N, samples] of questions [N]."""
    count, time = len(questions), np.arange(WORD) / RATE_HZ
    what = np.minimum(questions // QUARTERS, 2)
    where = np.where(what == 2, QUARTERS, questions % QUARTERS)
    waves = 2.0 * rng.standard_normal((count, SAMPLES)).astype(np.float32)
    for word, pitch in enumerate((WHAT_HZ[what], WHERE_HZ[where])):
        voice = pitch * rng.uniform(0.98, 1.02, count)
        tone = np.hanning(WORD) * np.sin(2 * np.pi * (voice[:, None] * time + rng.random((count, 1))))
        start = word * SAMPLES // 2 + rng.integers(0, SAMPLES // 2 - WORD, count)
        np.put_along_axis(waves, at := start[:, None] + np.arange(WORD), np.take_along_axis(waves, at, 1) + tone, 1)
    return waves


class Looking(nn.Module):
    """Pictures [B, 3, S, S] -> scores [B, 4, 2, 4] of what each quarter holds: colour, shape. A small ResNet, averaged over quarters."""

    def __init__(self, blocks: tuple[int, ...], base: int) -> None:
        super().__init__()
        self.body = resnet.ResNet(resnet.ResNetConfig(blocks=blocks, bottleneck=False, base=base, image=SIDE, classes=2 * (KINDS + 1)))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.body.layers(self.body.stem(pixels))
        x = F.adaptive_avg_pool2d(x, 2).flatten(2).transpose(1, 2)
        scores: Tensor = self.body.head(x)
        return scores.reshape(len(pixels), QUARTERS, 2, KINDS + 1)


class Listening(nn.Module):
    """Waveforms [B, samples] -> scores [B, 9] of questions. Energies of `tones` by windows of so many samples, then convolutions."""

    def __init__(self, tones: int, window: int, hidden: int) -> None:
        super().__init__()
        turns = torch.linspace(350, 1050, tones)[:, None] * torch.arange(window) / RATE_HZ * 2 * torch.pi
        bank = torch.cat((turns.sin(), turns.cos())) * torch.hann_window(window) / window**0.5
        self.bank = nn.Parameter(bank[:, None])
        self.convs = nn.Sequential(
            nn.Conv1d(tones, hidden, 5, 2, 2), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Conv1d(hidden, hidden, 5, 2, 2), nn.ReLU()
        )
        self.head = nn.Linear(4 * hidden, QUESTIONS)

    def forward(self, waves: Tensor) -> Tensor:
        swings = F.conv1d(waves[:, None], self.bank, stride=32)
        energy = torch.log(swings.square().reshape(len(waves), 2, -1, swings.shape[-1]).sum(1) + 0.1)
        scores: Tensor = self.head(F.adaptive_avg_pool1d(self.convs(energy), 4).flatten(1))
        return scores


class Answering(nn.Module):
    """Scores of quarters [B, 4, 2, 4] and of questions [B, 9] -> how likely each answer is, [B, 10]: colours, shapes, one to four."""

    def forward(self, holds: Tensor, asked: Tensor) -> Tensor:
        holds, asked = holds.softmax(-1), asked.softmax(-1)
        colour = (asked[:, :QUARTERS, None] * holds[:, :, 0, 1:]).sum(1)
        shape = (asked[:, QUARTERS:-1, None] * holds[:, :, 1, 1:]).sum(1)
        number = [torch.ones_like(asked[:, 0])]
        for quarter in range(QUARTERS):
            empty = holds[:, quarter, :, 0].mean(1)
            none, one = [n * empty for n in number], [n * (1 - empty) for n in number]
            number = [none[0], *(a + b for a, b in zip(none[1:], one[:-1], strict=True)), one[-1]]
        return torch.cat((colour, shape, asked[:, -1:] * torch.stack(number[1:], 1)), 1)


Draw = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]  # inputs and targets
Net = tuple[Callable[[], nn.Module], int]  # what makes it, steps of training
LOOKING: dict[str, Net] = {
    "resnet4": (lambda: Looking((1,), 8), 60),
    "resnet6": (lambda: Looking((1, 1), 12), 60),
    "resnet10": (lambda: Looking((2, 2), 16), 60),
}
LISTENING: dict[str, Net] = {"short": (lambda: Listening(16, 80, 8), 80), "long": (lambda: Listening(64, 320, 48), 80)}


def _trained() -> dict[str, dict[str, Tensor]]:
    """Weights by model, from one seed; those of this very file are trained once and kept."""
    text = Path(__file__).read_bytes() + torch.__version__.encode()
    kept = Path(tempfile.gettempdir()) / f"shardwise-answers-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:12]}.pt"
    if kept.exists():
        return dict(torch.load(kept, weights_only=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in the same order, whatever is set
    with torch.random.fork_rng(devices=[]):
        weights = {name: _fitted(*net, lambda rng: pictures(32, rng)) for name, net in LOOKING.items()}
        weights |= {name: _fitted(*net, _listen) for name, net in LISTENING.items()}
    torch.set_num_threads(threads)
    torch.save(weights, half := kept.with_suffix(f".{os.getpid()}"))
    half.replace(kept)
    return weights


def _listen(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    questions = rng.integers(0, QUESTIONS, 64)
    return spoken(questions, rng), questions


def _fitted(make: Callable[[], nn.Module], steps: int, draw: Draw) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net, rng = make(), np.random.default_rng(1)
    optimiser = torch.optim.Adam(net.parameters())
    slower = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.008, total_steps=steps)
    for _ in range(steps):
        inputs, targets = map(torch.from_numpy, draw(rng))
        optimiser.zero_grad()
        F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten()).backward()
        optimiser.step()
        slower.step()
    return dict(net.state_dict())


WEIGHTS = _trained()


def labelled(count: int = 400) -> tuple[list[dict[str, np.ndarray]], list[int]]:
    """What accuracy is measured on: questions of quarters that hold something, and the number of the right answer."""
    rng = np.random.default_rng(0)
    images, holds = pictures(count, rng)
    what, where = rng.integers(0, 3, count), np.array([rng.choice(np.flatnonzero(one[:, 0])) for one in holds])
    waves = spoken(np.where(what == 2, QUESTIONS - 1, what * QUARTERS + where), rng)
    seen = holds[np.arange(count), where, np.minimum(what, 1)] - 1 + KINDS * what
    right = np.where(what == 2, 2 * KINDS + (holds[:, :, 0] > 0).sum(1) - 1, seen)
    return [{"camera": image, "microphone": wave} for image, wave in zip(images, waves, strict=True)], right.tolist()


def _model(name: str, example: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    net = (LOOKING | LISTENING)[name][0]()
    net.load_state_dict(WEIGHTS[name])
    return net.eval(), (example,)


def resnet4() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _model("resnet4", torch.zeros(8, 3, SIDE, SIDE))


def resnet6() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _model("resnet6", torch.zeros(8, 3, SIDE, SIDE))


def resnet10() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _model("resnet10", torch.zeros(8, 3, SIDE, SIDE))


def short() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _model("short", torch.zeros(8, SAMPLES))


def long() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _model("long", torch.zeros(8, SAMPLES))


def answering() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Answering(), (torch.zeros(8, QUARTERS, 2, KINDS + 1), torch.zeros(8, QUESTIONS))
