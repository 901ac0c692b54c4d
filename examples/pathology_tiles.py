"""How is a model trained whose activations do not fit? A ResNet learns to tell stained tissue in large tiles of a real histology image,
under a limit of memory a rank that is enforced; weft chooses the plan that fits.

    python examples/pathology_tiles.py --device-memory 1GiB --tile 512
    python examples/pathology_tiles.py --device-memory 300MiB --tile 512      # does not fit as it is: another plan
    python examples/pathology_tiles.py --device-memory 2GiB --tile 1024 --zoom 8 --batch 8

The image is scikit-image's: colon tissue, immunohistochemistry against FHL2 (brown, DAB) with haematoxylin (blue), 512 x 512. It is
enlarged, since a scanner's tiles are: `--zoom` 4 makes 2048 x 2048 of it. A tile's class is whether more of it is stained than of the
median tile; the stain is told apart by its absorption (Ruifrok and Johnston 2001). Tiles of the left three quarters train, the rest is
held out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import weft
from weft.errors import WeftError
from weft.plan.store import format_plan, parse_plan
from weft.units import format_bytes, parse_bytes
from weft.world.world import World
from weft.zoo.resolve import resolve

TRAIN = 0.75  # of the image's width


@dataclass(frozen=True)
class Options:
    """What is trained, on what, for how long."""

    model: str = "resnet-18"
    tile: int = 512
    zoom: int = 4
    batch: int = 4
    steps: int = 20
    ranks: int = 2
    device_memory: str = "1GiB"
    cluster: str = "here"
    learning_rate: float = 3e-4

    @property
    def named(self) -> str:
        return f"{self.model}{',' if ':' in self.model else ':'}image={self.tile},classes=2"


@dataclass(frozen=True)
class Slide:
    """The enlarged image, CHW, and how much each of its pixels is stained, HW."""

    pixels: Tensor
    stain: Tensor

    def tile(self, top: int, left: int, size: int) -> tuple[Tensor, float]:
        """Pixels of a tile, and its mean stain."""
        place = slice(top, top + size), slice(left, left + size)
        return self.pixels[:, *place], float(self.stain[place].mean())


def load(zoom: int) -> Slide:
    """The image that the package ships. Ends the program where there is no such package."""
    try:
        from skimage import color, data
    except ImportError:
        sys.exit("this example needs scikit-image, whose package ships the image: pip install 'weft[pathology]'")
    image = data.immunohistochemistry()
    stain = torch.from_numpy(color.rgb2hed(image)[..., 2]).float()
    pixels = torch.from_numpy(image).float().permute(2, 0, 1) / 255
    pixels = (pixels - pixels.mean((1, 2), keepdim=True)) / pixels.std((1, 2), keepdim=True)
    enlarged = F.interpolate(torch.cat([pixels, stain[None]])[None], scale_factor=zoom, mode="bilinear", align_corners=False)[0]
    return Slide(enlarged[:3].contiguous(), enlarged[3].contiguous())


class Tiles:
    """Tiles of a slide, drawn from its left part, or all of the rest; `median` is the stain above which a tile is of class 1."""

    def __init__(self, slide: Slide, size: int) -> None:
        self.slide, self.size = slide, size
        self.height, width = slide.stain.shape
        self.border = int(TRAIN * width)
        if size > min(self.border, self.height) or size > width - self.border:
            sys.exit(
                f"tiles of {size} pixels do not fit into {width - self.border} that are held out; use a smaller --tile or a larger --zoom"
            )
        self.width = width
        drawn = torch.Generator().manual_seed(1)
        self.median = float(torch.tensor([self._draw(drawn)[1] for _ in range(64)]).median())

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, float]:
        top = int(torch.randint(self.height - self.size + 1, (), generator=generator))
        left = int(torch.randint(self.border - self.size + 1, (), generator=generator))
        return self.slide.tile(top, left, self.size)

    def training(self, step: int, count: int) -> dict[str, Tensor]:
        """The batch of a step: the same on every rank, which takes its own part of it."""
        generator = torch.Generator().manual_seed(1000 + step)
        return self._batch([self._draw(generator) for _ in range(count)])

    def held_out(self, count: int) -> list[dict[str, Tensor]]:
        """All tiles of the right part, side by side, in batches of `count`."""
        tops = range(0, self.height - self.size + 1, max(1, self.size // 2))
        found = [self.slide.tile(top, self.width - self.size, self.size) for top in tops]
        return [self._batch(found[i : i + count]) for i in range(0, len(found) - count + 1, count)]

    def _batch(self, tiles: Sequence[tuple[Tensor, float]]) -> dict[str, Tensor]:
        labels = torch.tensor([int(stain > self.median) for _, stain in tiles])
        return {"pixels": torch.stack([pixels for pixels, _ in tiles]), "labels": labels}


def train(world: World, options: dict[str, Any], plan: str) -> dict[str, Any]:
    """What every rank runs."""
    given = Options(**options)
    tiles = Tiles(load(given.zoom), given.tile)
    subject = resolve(given.named)
    engine = weft.parallelize(
        subject.make,
        tiles.training(0, given.batch),
        loss=subject.loss,
        plan=parse_plan(plan),
        optimizer={"name": "adamw", "lr": given.learning_rate},
        seed=0,
        world=world,
        device_memory=given.device_memory,
    )
    losses = []
    for step in range(given.steps):
        result = engine.step(tiles.training(step, given.batch))
        losses.append(result.loss)
        if world.rank == 0:
            print(f"step {step + 1:3}  loss {result.loss:.3f}  {given.batch / result.step_time_s:.1f} tiles/s", flush=True)
    held = [engine.evaluate(batch) for batch in tiles.held_out(given.batch)]
    return {"losses": losses, "held_out": sum(held) / len(held) if held else None, "memory": engine.fullest_memory()}


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Choose a plan under the limit, train by it, and say what it took."""
    parser = argparse.ArgumentParser(description="train a ResNet on large tiles under a limit of memory", allow_abbrev=False)
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = Options(**vars(parser.parse_args(list(arguments))))
    tiles = Tiles(load(options.zoom), options.tile)
    subject = resolve(options.named)
    words = f"ranks={options.ranks} precision=float32"
    batch = tiles.training(0, options.batch)
    plan = weft.plan(
        subject.make, batch, loss=subject.loss, cluster=options.cluster, constraints=words, device_memory=options.device_memory
    )
    print(f"{options.named}, {options.batch} tiles a step, at most {format_bytes(parse_bytes(options.device_memory))} a rank")
    print(f"plan: {plan.layout}", flush=True)
    found: dict[str, Any] = weft.launch(train, options.ranks, asdict(options), format_plan(plan))[0]
    if found["memory"]:
        print(f"held at most {format_bytes(found['memory']['total'])} a rank")
    if found["held_out"] is not None:
        print(f"loss of held-out tiles {found['held_out']:.3f} (guessing: 0.693)")
    return {**found, "layout": str(plan.layout)}


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WeftError as error:
        sys.exit(f"weft: {error}")
