"""How is a model trained on images of which one does not fit? A ResNet learns to tell stained tissue in tiles of 2,048 and 4,096 pixels of
a slide, under a limit of memory a rank that is enforced; shardwise chooses the plan that fits, and says what does not.

    python examples/pathology_tiles.py --tile 2048 --device-memory 280MiB
    python examples/pathology_tiles.py --tile 4096 --batch 1 --device-memory 900MiB --steps 10
    python examples/pathology_tiles.py --slide biopsy.tif --tile 4096      # a scanner's own file, where its tiles are not JPEG

The slide is a pyramidal TIFF, as scanners write it: squares of 256 pixels, at full size and at a half, a quarter, ... of it. A step reads
the squares that its tiles lie in. Its pixels are real, its arrangement is not: scikit-image ships 512 x 512 pixels of colon tissue
(immunohistochemistry against FHL2, brown, with haematoxylin, blue), and the first run writes a slide of mirrored squares of it, more or
less stained from region to region. A tile's class is whether more of it is stained than of the median tile; the stain is told apart by its
absorption (Ruifrok and Johnston 2001). Tiles of the left three quarters train, the rest is held out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardwise
from shardwise.errors import Infeasible, ShardwiseError
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.units import format_bytes, parse_bytes
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

TRAIN = 0.75  # of the slide's width
SQUARE = 256  # pixels of a square of the file
LEVELS = 5  # sizes that the file has; of the smallest a pixel is 16 of the slide
ALONE = "tensor=1 spatial=1 offload=none"  # what is left: to divide samples and layers, and to compute again


@dataclass(frozen=True)
class Options:
    """What is trained, on what, for how long. `slide`: written where there is none, four tiles wide and two high."""

    model: str = "resnet-18:base=16"
    tile: int = 2048
    slide: str = ""
    batch: int = 2
    steps: int = 20
    ranks: int = 4
    device_memory: str = "280MiB"
    cluster: str = "here"
    constrain: str = ""
    learning_rate: float = 1e-3

    @property
    def named(self) -> str:
        return f"{self.model}{',' if ':' in self.model else ':'}image={self.tile},classes=2"

    @property
    def file(self) -> Path:
        return Path(self.slide or f"runs/slide-{4 * self.tile}.tif")


def package(name: str) -> Any:
    """A package that shardwise does not need. Ends the program where it is missing."""
    try:
        return __import__(name, fromlist=["data"])
    except ImportError:
        sys.exit(f"this example needs {name.partition('.')[0]}: pip install 'shardwise[pathology]'")


def write(path: Path, width: int, height: int) -> None:
    """A slide of `width` x `height` pixels. Nothing of its size is ever in memory."""
    tifffile, tissue = package("tifffile"), package("skimage.data").immunohistochemistry()
    starts = range(0, tissue.shape[0] - SQUARE + 1, 64)
    real = [tissue[i : i + SQUARE, j : j + SQUARE] for i in starts for j in starts]
    real.sort(key=lambda square: stain(square).mean())
    rng = np.random.default_rng(0)
    down, across = -(-height // SQUARE), -(-width // SQUARE)
    coarse = rng.random((-(-down // 8) + 1, -(-across // 8) + 1))  # how much is stained, by regions of 8 squares
    region = np.kron(coarse, np.ones((8, 8)))[:down, :across]
    which = np.clip((region + rng.normal(0, 0.1, region.shape)) * len(real), 0, len(real) - 1).astype(int)
    flips = rng.integers(0, 4, which.shape)

    def squares(level: int) -> Iterator[Any]:
        """Those of the file at one size, row by row: each shows 4 ** level of the slide's."""
        n = 1 << level
        small = [square.reshape(SQUARE // n, n, SQUARE // n, n, 3).mean((1, 3)).astype(np.uint8) for square in real]
        for top in range(0, down, n):
            for left in range(0, across, n):
                out = np.zeros((SQUARE, SQUARE, 3), np.uint8)
                for i, j in np.ndindex(min(n, down - top), min(n, across - left)):
                    piece, flip, size = small[which[top + i, left + j]], flips[top + i, left + j], SQUARE // n
                    out[i * size : (i + 1) * size, j * size : (j + 1) * size] = piece[:: 1 - flip % 2 * 2, :: 1 - flip // 2 * 2]
                yield out

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with tifffile.TiffWriter(unfinished, bigtiff=True) as tif:
        for level in range(LEVELS):
            more = {"subifds": LEVELS - 1} if level == 0 else {"subfiletype": 1}
            shape = (-(-height // (1 << level)), -(-width // (1 << level)), 3)
            tif.write(
                squares(level), shape=shape, dtype="uint8", tile=(SQUARE, SQUARE), photometric="rgb", compression="zlib",
                compressionargs={"level": 1}, **more,
            )  # fmt: skip
    unfinished.rename(path)


def stain(pixels: Any) -> Any:
    """How much each pixel absorbs of what the brown stain absorbs, HW of HWC."""
    return package("skimage.color").rgb2hed(pixels)[..., 2]


class Slide:
    """A pyramidal TIFF, of which only what is asked for is read."""

    def __init__(self, path: Path) -> None:
        self._file = package("tifffile").TiffFile(path)
        self.pages = [level.keyframe for level in self._file.series[0].levels]
        self.height, self.width = self.pages[0].shape[:2]
        self.squares_read = 0

    def read(self, top: int, left: int, height: int, width: int, level: int = 0) -> Any:
        """HWC of a part at one of the sizes, in its pixels."""
        page = self.pages[level]
        rows, columns = page.tilelength, page.tilewidth
        out = np.empty((height, width, 3), np.uint8)
        for i in range(top // rows, -(-(top + height) // rows)):
            for j in range(left // columns, -(-(left + width) // columns)):
                index = i * -(-page.shape[1] // columns) + j
                self._file.filehandle.seek(page.dataoffsets[index])
                square = page.decode(self._file.filehandle.read(page.databytecounts[index]), index)[0][0]
                self.squares_read += 1
                first, last = max(top, i * rows), min(top + height, (i + 1) * rows)
                begin, end = max(left, j * columns), min(left + width, (j + 1) * columns)
                out[first - top : last - top, begin - left : end - left] = square[
                    first - i * rows : last - i * rows, begin - j * columns : end - j * columns
                ]
        return out

    @cached_property
    def smallest(self) -> tuple[int, Any, Tensor, Tensor]:
        """What the whole slide is summed up from, its smallest size: how many of its pixels one shows, its stain, mean and deviation."""
        page = self.pages[-1]
        pixels = self.read(0, 0, *page.shape[:2], level=len(self.pages) - 1)
        colours = torch.from_numpy(pixels).float() / 255
        return round(self.height / page.shape[0]), stain(pixels), colours.mean((0, 1)), colours.std((0, 1))


class Tiles:
    """Tiles of a slide, drawn from its left part, or all of the rest; `median` is the stain above which a tile is of class 1."""

    def __init__(self, slide: Slide, size: int) -> None:
        self.slide, self.size = slide, size
        self.border = int(TRAIN * slide.width)
        if size > min(self.border, slide.height) or size > slide.width - self.border:
            sys.exit(f"tiles of {size} pixels do not fit into {slide.width - self.border} that are held out; use a larger slide")
        drawn = torch.Generator().manual_seed(1)
        self.median = float(np.median([self._stain(*self._draw(drawn)) for _ in range(64)]))

    def _draw(self, generator: torch.Generator) -> tuple[int, int]:
        top = int(torch.randint(self.slide.height - self.size + 1, (), generator=generator))
        return top, int(torch.randint(self.border - self.size + 1, (), generator=generator))

    def _stain(self, top: int, left: int) -> float:
        shown, stained, *_ = self.slide.smallest
        return float(stained[top // shown : -(-(top + self.size) // shown), left // shown : -(-(left + self.size) // shown)].mean())

    def training(self, step: int, count: int) -> dict[str, Tensor]:
        """The batch of a step: the same on every rank, which takes its own part of it."""
        generator = torch.Generator().manual_seed(1000 + step)
        return self._batch([self._draw(generator) for _ in range(count)])

    def held_out(self, count: int) -> Iterator[dict[str, Tensor]]:
        """All tiles of the right part, side by side, in batches of `count`."""
        places = [(top, self.slide.width - self.size) for top in range(0, self.slide.height - self.size + 1, max(1, self.size // 2))]
        return (self._batch(places[i : i + count]) for i in range(0, len(places) - count + 1, count))

    def _batch(self, places: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        *_, mean, deviation = self.slide.smallest
        pixels = [(torch.from_numpy(self.slide.read(*at, self.size, self.size)) / 255 - mean) / deviation for at in places]
        labels = torch.tensor([int(self._stain(*at) > self.median) for at in places])
        return {"pixels": torch.stack([x.permute(2, 0, 1) for x in pixels]).contiguous(), "labels": labels}


def train(world: World, options: dict[str, Any], plan: str) -> dict[str, Any]:
    """What every rank runs."""
    given = Options(**options)
    tiles = Tiles(Slide(given.file), given.tile)
    subject = resolve(given.named)
    engine = shardwise.parallelize(
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
            print(f"step {step + 1:3}  loss {result.loss:.3f}  {result.step_time_s:.1f} s", flush=True)
    held = [engine.evaluate(batch) for batch in tiles.held_out(given.batch)]
    return {"losses": losses, "held_out": sum(held) / len(held) if held else None, "memory": engine.peak_memory_over_ranks()}


def plan_of(options: Options, batch: dict[str, Tensor], constraints: str = "") -> Any:
    """The plan that shardwise chooses.

    Raises:
        Infeasible: nothing fits.
    """
    subject = resolve(options.named)
    words = f"ranks={options.ranks} precision=float32 {options.constrain} {constraints}"
    return shardwise.plan(
        subject.make, batch, loss=subject.loss, cluster=options.cluster, constraints=words, device_memory=options.device_memory
    )


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Choose a plan under the limit, train by it, and say what it took."""
    parser = argparse.ArgumentParser(description="train a ResNet on large tiles under a limit of memory", allow_abbrev=False)
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = Options(**vars(parser.parse_args(list(arguments))))
    if not options.slide and not options.file.exists():
        print(f"writing {options.file}", flush=True)
        write(options.file, 4 * options.tile, 2 * options.tile)
    batch = Tiles(Slide(options.file), options.tile).training(0, options.batch)
    print(f"{options.named}, {options.batch} tiles a step, at most {format_bytes(parse_bytes(options.device_memory))} a rank")
    try:
        alone = str(plan_of(options, batch, ALONE).layout)
    except Infeasible as error:
        alone = f"nothing fits ({error})"
    print(f"by samples, layers and recomputation alone: {alone}")
    plan = plan_of(options, batch)
    print(f"plan: {plan.layout}", flush=True)
    found: dict[str, Any] = shardwise.launch(train, options.ranks, asdict(replace(options, slide=str(options.file))), format_plan(plan))[0]
    if found["memory"]:
        print(f"held at most {format_bytes(found['memory']['total'])} a rank")
    if found["held_out"] is not None:
        print(f"loss of held-out tiles {found['held_out']:.3f} (guessing: 0.693)")
    return {**found, "layout": str(plan.layout), "alone": alone}


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ShardwiseError as error:
        sys.exit(f"shardwise: {error}")
