"""`scripts/bench preprocess`: data prepared on the processor and on a GPU: pandas and cuDF, scikit-learn and cuML, Pillow and DALI.

Each pair makes the same of the same data, which is compared; where a library is not installed, its row says so. The device's libraries are
slow at their first call and faster later, so a first round of each is left out.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from bench.common.document import command, header, load, terminal, versions
from shardwise.errors import ConfigError
from shardwise.train.data.reading import pixels, tables

Work = Callable[[], np.ndarray[Any, Any]]
ROWS, COLUMNS = 200_000, 16


@dataclass(frozen=True)
class Outcome:
    """`ratio` is the device's advantage: the processor's time over the device's, 0 where it was not measured; `why` says why not."""

    case: str
    shardwise: float
    peer: float
    peer_name: str
    ratio: float
    unit: str = "s"
    difference: float = 0.0
    why: str = ""


def cases(folder: Path, device: bool, rows: int) -> dict[str, tuple[str, str, Callable[[], Work]]]:
    """(what the processor has, what the device has, what prepares the work) of each case."""
    values = np.random.default_rng(0).normal(size=(rows, COLUMNS)).astype(np.float32)
    file = folder / "table.csv"
    if not file.exists():
        np.savetxt(file, values, delimiter=",", fmt="%.6g", header=",".join(f"c{i}" for i in range(COLUMNS)), comments="")

    def ours() -> tables.TableReader:
        return tables.cudf_table_reader() if device else tables.pandas_table_reader()

    def reading() -> Work:
        made = ours()
        return lambda: tables.stack_columns(made.read(file), [f"c{i}" for i in range(COLUMNS)], file)

    def scaling() -> Work:
        made = ours()
        return lambda: made.standardize(values, values)

    def images() -> Work:
        prepare = pixels.preparer_of("device" if device else "cpu")
        contents = photographs(16)
        form = pixels.PixelForm(3, 224, 224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        crops = [pixels.Crop(0.1, 0.2, 0.8, 0.9, bool(i % 2)) for i in range(16)]
        return lambda: prepare(contents, ["image"] * 16, crops, form).cpu().numpy()

    return {
        f"read a csv of {rows:,} rows": ("pandas", "cuDF", reading),
        f"scale {rows:,} rows": ("scikit-learn", "cuML", scaling),
        "16 photographs": ("Pillow", "DALI", images),
    }


def photographs(count: int) -> list[bytes]:
    """JPEG files of 500 x 500 pixels."""
    from PIL import Image

    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        out = io.BytesIO()
        coarse = draw.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(coarse).resize((500, 500), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
        found.append(out.getvalue())
    return found


def timed(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(folder: Path, rounds: int, rows: int) -> list[Outcome]:
    """Every case on both, in rounds that take turns."""
    found = []
    on_device = cases(folder, True, rows)
    for case, (name, peer, prepare) in cases(folder, False, rows).items():
        try:
            here = prepare()
        except ConfigError as error:
            found.append(Outcome(case, 0.0, 0.0, f"{name}, {peer}", 0.0, why=f"not installed: {error}"))
            continue
        first = here()
        try:
            there = on_device[case][2]()
        except ConfigError:
            seconds = median(timed(here) for _ in range(rounds))
            found.append(Outcome(case, seconds, 0.0, peer, 0.0, why=f"{peer} is not installed"))
            continue
        difference = float(np.abs(there() - first).max())
        pairs = [(timed(here), timed(there)) for _ in range(rounds)]
        ratio = median(a / b for a, b in pairs)
        found.append(Outcome(case, median(a for a, _ in pairs), median(b for _, b in pairs), peer, ratio, difference=difference))
    return found


def table(found: Sequence[Outcome]) -> Table:
    """Outcomes for people."""
    out = Table(title="On the processor and on a GPU", title_justify="left")
    for name in ("case", "processor, ms", "device", "device, ms", "ratio", "largest difference"):
        out.add_column(name, justify="left" if name in ("case", "device") else "right")
    for f in found:
        measured = ("", "", f.why) if f.why else (f"{1000 * f.peer:.1f}", f"{f.ratio:.2f}", f"{f.difference:.1e}")
        out.add_row(f.case, f"{1000 * f.shardwise:.1f}" if f.shardwise else "", f.peer_name, *measured)
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench preprocess", description="the processor beside a GPU", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and rows to FILE")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rows", type=int, default=ROWS, help="of the table")
    given = p.parse_args(list(arguments))
    about = header(command("preprocess", arguments), versions(("pandas", "scikit-learn", "pillow", "cudf", "cuml")), load=load())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given.rounds, given.rows)
    terminal().print(table(found))
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": [asdict(f) for f in found]}, indent=1) + "\n")
    return 0
