"""Vehicle tracking over clips of four frames: detector, re-identification, tracker. Clips are drawn here: textured squares on noise.

Nothing is trained: detectors look for blocks of high energy at one scale or another, re-identification compares textures by few or many
numbers, so that variants really differ in speed and accuracy. `shardwise serve profile examples/serve/tracking.toml` measures both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

T, SIDE, OBJECTS, PATCH = 4, 128, 4, 8  # frames, pixels, vehicles, pixels of one


class Detector(nn.Module):
    """Clips [B, T, S, S] -> centres [B, T, K, 2] in pixels, crops [B, T, K, P, P]. `scale`: pixels that one position of the search has."""

    def __init__(self, scale: int, filters: int) -> None:
        super().__init__()
        self.scale = scale
        generator = torch.Generator().manual_seed(0)
        bank = torch.randn(filters, 1, 5, 5, generator=generator)
        self.bank = nn.Parameter(bank - bank.mean((2, 3), keepdim=True))

    def forward(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        B, frames, side, _ = clips.shape
        images = clips.reshape(B * frames, 1, side, side)
        energy = F.conv2d(F.avg_pool2d(images, self.scale), self.bank, padding=2).square().mean(1, keepdim=True)
        window = PATCH // self.scale
        block = F.avg_pool2d(energy, window, 1)  # position i covers pixels scale*i ... scale*i + PATCH
        peaks = torch.where(F.max_pool2d(block, 2 * (window // 2) + 1, 1, window // 2) == block, block, torch.zeros_like(block))
        place = peaks.flatten(1).topk(OBJECTS, 1).indices
        rows = torch.div(place, block.shape[-1], rounding_mode="floor") * self.scale
        columns = (place % block.shape[-1]) * self.scale
        offset = torch.arange(PATCH)
        pixels = (rows[..., None, None] + offset[:, None]) * side + columns[..., None, None] + offset
        crops = images.flatten(1).gather(1, pixels.flatten(1)).reshape(B, frames, OBJECTS, PATCH, PATCH)
        centres = torch.stack((rows, columns), -1).reshape(B, frames, OBJECTS, 2) + PATCH / 2
        return centres.to(clips.dtype), crops


class Identity(nn.Module):
    """Centres [B, K, 2] and crops [B, K, P, P] of a frame -> numbers [B, K, D] that are alike for one vehicle in several frames."""

    def __init__(self, features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(features, 1, 3, 3, generator=generator) / 3)
        self.second = nn.Parameter(torch.randn(features, features, 3, 3, generator=generator) / (3 * features**0.5))

    def forward(self, centres: Tensor, crops: Tensor) -> Tensor:
        B, K = crops.shape[:2]
        x = crops.reshape(B * K, 1, PATCH, PATCH)
        x = F.conv2d(torch.relu(F.conv2d(x - x.mean((2, 3), keepdim=True), self.first, padding=1)), self.second, padding=1)
        return F.normalize(F.adaptive_avg_pool2d(x.abs(), 2).flatten(1), dim=1).reshape(B, K, -1)


def track(detections: tuple[np.ndarray, np.ndarray], identities: list[np.ndarray]) -> np.ndarray:
    """Centres of the first frame's vehicles in every frame, [K, T, 2]: the nearest in looks, and among like ones in place, comes first."""
    centres = np.asarray(detections[0], dtype=float)
    tracks, known = [centres[0]], np.asarray(identities[0])
    for frame in range(1, len(centres)):
        looks = 1 - known @ np.asarray(identities[frame]).T
        far = np.linalg.norm(tracks[-1][:, None] - centres[frame][None], axis=-1) / SIDE
        cost, here = 4 * looks + far, np.empty_like(tracks[-1])
        for _ in range(OBJECTS):
            i, j = np.unravel_index(np.argmin(cost), cost.shape)
            here[i] = centres[frame][j]
            cost[i], cost[:, j] = np.inf, np.inf
        tracks.append(here)
    return np.stack(tracks, 1)


def clips(count: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Clips [N, T, S, S] and where their vehicles are, [N, K, T, 2]."""
    rng = np.random.default_rng(seed)
    images = 0.25 * rng.standard_normal((count, T, SIDE, SIDE)).astype(np.float32)
    truth = np.zeros((count, OBJECTS, T, 2), np.float32)
    for n in range(count):
        lanes = rng.permutation(SIDE // (2 * PATCH))[:OBJECTS] * 2 * PATCH  # a lane each, so that none covers another
        for k in range(OBJECTS):
            texture = rng.standard_normal((PATCH, PATCH)).astype(np.float32) * rng.uniform(0.7, 1.3)
            start, speed = rng.integers(0, SIDE - PATCH), rng.integers(-28, 29)
            for t in range(T):
                row, column = lanes[k] + rng.integers(0, PATCH), int(np.clip(start + speed * t, 0, SIDE - PATCH))
                images[n, t, row : row + PATCH, column : column + PATCH] += texture
                truth[n, k, t] = row + PATCH / 2, column + PATCH / 2
    return images, truth


def labelled() -> tuple[list[dict[str, np.ndarray]], list[np.ndarray]]:
    """What accuracy is measured on."""
    images, truth = clips()
    return [{"camera": image} for image in images], list(truth)


def score(answers: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """Per cent of vehicles and later frames in which the track that began at a vehicle is still at it, to half its size."""
    right = []
    for tracks, vehicles in zip(answers, truth, strict=True):
        for vehicle in vehicles:
            mine = tracks[np.argmin(np.linalg.norm(tracks[:, 0] - vehicle[0], axis=-1))]
            right.append(np.linalg.norm(mine - vehicle, axis=-1)[1:] <= PATCH / 2)
    return 100 * float(np.mean(right))


def _example(module: nn.Module, *inputs: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return module.eval(), inputs


def coarse() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _example(Detector(2, 4), torch.zeros(8, T, SIDE, SIDE))


def half() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _example(Detector(2, 16), torch.zeros(8, T, SIDE, SIDE))


def fine() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _example(Detector(1, 16), torch.zeros(8, T, SIDE, SIDE))


def few() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _example(Identity(2), torch.zeros(8, OBJECTS, 2), torch.zeros(8, OBJECTS, PATCH, PATCH))


def many() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _example(Identity(64), torch.zeros(8, OBJECTS, 2), torch.zeros(8, OBJECTS, PATCH, PATCH))
