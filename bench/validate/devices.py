"""Figures of devices from the tables that ai-dynamo/aiconfigurator measured. In: a checkout of it. Out: constants, curves, held-out errors.

    python -m bench.validate.devices CHECKOUT            # the constants, for `[stack.torch.on.*]` of the catalogue, and the errors
    python -m bench.validate.devices CHECKOUT --write    # src/shardwise/cluster/curves.toml and docs/benchmarks/devices.md as well

The tables are parquet files (`pip install pyarrow`), Apache-2.0; what is taken from them are the constants of two closed forms and
curves of NCCL, every second size of them. Held out: the weights' shapes, a fifth at a time; the same products in the table of another
framework; the sizes between those of a curve; and the curves of other devices on the same links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.validate.document import table
from bench.validate.fit import fit
from bench.validate.rows import Row
from shardwise.cluster.cluster import Cluster, Device, MeasuredTable
from shardwise.cost.calibration.efficiency import stack_of
from shardwise.cost.devices.kernels import LocalKernel
from shardwise.cost.network.network import FACTORS, RankGroup, collective_s
from shardwise.errors import UsageError

Column = NDArray[np.float64]
DATA = "aic-core/src/aiconfigurator_core/systems/data"
COMMIT = "095f58a51"
ROOT = Path(__file__).resolve().parents[2]
LEAST = 256  # sides of products, and positions of attention, that training has


@dataclass(frozen=True, slots=True)
class Measured:
    """Where a device's tables are: products as torch's linear runs them, attention by the kernel that is nearest to torch's, the same
    products as another framework measured them."""

    machine: str
    folder: str
    products: str
    attention: tuple[str, str]
    other: str


DEVICES = {
    "A100-80": Measured("dgx-a100-80", "a100_sxm", "sglang/0.5.10", ("sglang/0.5.10", "flash_attention"), "trtllm/1.0.0"),
    "H100": Measured("dgx-h100", "h100_sxm", "sglang/0.5.14", ("sglang/0.5.14", "fa3"), "trtllm/1.3.0rc20"),
    "H200": Measured("hgx-h200", "h200_sxm", "sglang/0.5.14", ("sglang/0.5.14", "fa3"), "trtllm/1.3.0rc20"),
    "B200": Measured("dgx-b200", "b200_sxm", "sglang/0.5.14", ("sglang/0.5.14", "trtllm_mha"), "trtllm/1.3.0rc20"),
    "B300": Measured("dgx-b300", "b300_sxm", "sglang/0.5.14", ("sglang/0.5.14", "trtllm_mha"), "trtllm/1.3.0rc20"),
    "GB200": Measured("gb200-nvl72", "gb200", "sglang/0.5.14", ("sglang/0.5.14", "trtllm_mha"), "trtllm/1.3.0rc20"),
    "GB300": Measured("gb300-nvl72", "gb300", "sglang/0.5.10", ("sglang/0.5.10", "trtllm_mha"), "trtllm/1.3.0rc20"),
}
PRODUCT = {"matmul": 0.8, "operands": 0.3, "product_s": 4e-6}
ATTENTION = {"attention_peak": 0.7, "attention_positions": 1000.0, "attention_head": 15.0, "begin_s": 2e-5}
# Of each link: the table that its curves are, and those that they are held against.
CURVES = {
    "nccl-nvlink4": ("h100_sxm/comm/nccl/2.29.2", ("h200_sxm/comm/nccl/2.29.2", "h100_sxm/comm/nccl/2.27.3")),
    "nccl-nvlink5": ("b200_sxm/comm/nccl/2.29.2", ("gb200/comm/nccl/2.29.2", "b300_sxm/comm/nccl/2.29.2", "gb300/comm/nccl/2.29.2")),
}
LINES = ("dgx-a100-80", "a100_sxm/comm/nccl/2.27.3")  # a machine of NVLink 3, and what it is held against
NAMES = {"alltoall": "all_to_all"}


def columns(root: Path, path: str) -> dict[str, NDArray[Any]]:
    """A table's columns. Raises `UsageError` where it, or what reads it, is missing."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("the tables are parquet files; `pip install pyarrow` reads them") from error
    file = root / DATA / path
    if not file.is_file():
        raise UsageError(f"{file} is missing; name a checkout of github.com/ai-dynamo/aiconfigurator")
    return {key: np.array(values) for key, values in parquet.read_table(file).to_pydict().items()}


@dataclass(frozen=True, slots=True)
class Products:
    """Sides of products of an input of m rows with weights of n rows, k deep, and their seconds."""

    m: Column
    n: Column
    k: Column
    seconds: Column

    @classmethod
    def read(cls, root: Path, where: Measured, framework: str) -> Products:
        t = columns(root, f"{where.folder}/gemm/{framework}/gemm_perf.parquet")
        m, n, k, ms = (t[key].astype(float) for key in ("m", "n", "k", "latency"))
        mine = (t["gemm_dtype"] == "bfloat16") & (np.minimum(np.minimum(m, n), k) >= LEAST) & (m % 8 == 0)
        return cls(m[mine], n[mine], k[mine], 1e-3 * ms[mine])

    def some(self, which: NDArray[np.bool_]) -> Products:
        return Products(self.m[which], self.n[which], self.k[which], self.seconds[which])

    def predicted(self, device: Device, found: Mapping[str, float]) -> Column:
        """As `LocalKernel` prices them, which a test holds this against."""
        moved = 2.0 * (self.m * self.k + self.k * self.n + self.m * self.n) / device.memory_bandwidth_bytes_per_s
        flops = 2.0 * self.m * self.n * self.k / device.peak("bfloat16")
        return flops / found["matmul"] + found["operands"] * moved + found["product_s"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of `heads` heads times samples, of `head` values each over `positions`, and its seconds."""

    heads: Column
    positions: Column
    head: Column
    seconds: Column

    @classmethod
    def read(cls, root: Path, where: Measured) -> Attention:
        framework, kernel = where.attention
        t = columns(root, f"{where.folder}/attention/{framework}/context_attention_perf.parquet")
        batch, heads, positions, head, ms = (t[key].astype(float) for key in ("batch_size", "num_heads", "isl", "head_dim", "latency"))
        mine = (t["kernel_source"] == kernel) & (t["attn_dtype"] == "bfloat16") & (t["kv_cache_dtype"] == "bfloat16")
        mine &= (positions >= LEAST) & (batch * heads >= 32) & (head <= 256) & (t["num_heads"] == t["num_key_value_heads"])
        if "window_size" in t:
            mine &= t["window_size"] == 0
        return cls((batch * heads)[mine], positions[mine], head[mine], 1e-3 * ms[mine])

    def some(self, which: NDArray[np.bool_]) -> Attention:
        return Attention(self.heads[which], self.positions[which], self.head[which], self.seconds[which])

    def predicted(self, device: Device, found: Mapping[str, float]) -> Column:
        """As `LocalKernel` prices them but for what begins one, which is a launch there."""
        flops = 0.5 * 4.0 * self.heads * self.positions**2 * self.head
        slower = (1 + found["attention_positions"] / self.positions) * (1 + found["attention_head"] / self.head)
        return flops * slower / (device.peak("bfloat16") * found["attention_peak"]) + found["begin_s"]


def fitted(rows: Products | Attention, device: Device, start: Mapping[str, float]) -> dict[str, float]:
    """The constants of `start` fitted to the logarithms of seconds."""
    bounds = {"matmul": (0.1, 1.0), "attention_peak": (0.05, 1.0), "attention_head": (1.0, 500.0)}
    return fit(lambda found: np.log(rows.predicted(device, found) / rows.seconds), start, limit=0.1, bounds=bounds)


def errors(rows: Products | Attention, device: Device, found: Mapping[str, float]) -> list[float]:
    return (rows.predicted(device, found) / rows.seconds - 1).tolist()


def held_out(rows: Products | Attention, device: Device, start: Mapping[str, float], groups: NDArray[np.intp]) -> list[float]:
    """Errors of each group as the others predict it."""
    found: list[float] = []
    for one in np.unique(groups):
        found += errors(rows.some(groups == one), device, fitted(rows.some(groups != one), device, start))
    return found


def fifths(*keys: Column) -> NDArray[np.intp]:
    """A fifth for each row; rows alike in all of `keys` are in one."""
    _, which = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    return np.random.default_rng(0).permutation(int(which.max()) + 1)[which] % 5


def of_device(root: Path, name: str) -> tuple[dict[str, float], list[Row]]:
    """A device's constants, and the errors of those that others than the held-out rows give."""
    where = DEVICES[name]
    device = Cluster.parse(where.machine).device
    products, attention = Products.read(root, where, where.products), Attention.read(root, where)
    found = {**fitted(products, device, PRODUCT), **fitted(attention, device, ATTENTION)}
    shapes = fifths(products.n, products.k)
    other = Products.read(root, where, where.other)
    rows = [
        Row.of(f"products, {name}", "frozen", frozen(products, device)),
        Row.of(f"products, {name}", "a fifth of the weights' shapes out", held_out(products, device, PRODUCT, shapes)),
        Row.of(f"products, {name}", f"frozen, as {where.other} measured them", frozen(other, device)),
        Row.of(f"attention forward, {name}", "fitted", errors(attention, device, found)),
        Row.of(f"attention forward, {name}", "a position count out", held_out(attention, device, ATTENTION, whole(attention.positions))),
    ]
    return found, rows


def frozen(products: Products, device: Device) -> list[float]:
    """Errors of the catalogue's own figures, without what a step's load takes, through the price of one kernel."""
    from dataclasses import replace

    stack = replace(stack_of(device), sustained=1.0)
    found = []
    for m, n, k, seconds in zip(products.m, products.n, products.k, products.seconds, strict=True):
        kernel = LocalKernel("linear", 2 * m * n * k, 4 * m * n * k, 1.0, 1.0, m, n, k)
        found.append(kernel.seconds(device, stack, "bfloat16")[1].forward / seconds - 1)
    return found


def whole(values: Column) -> NDArray[np.intp]:
    return values.astype(np.intp)


def curves(root: Path, path: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(bytes of the whole tensor, seconds) by collective and ranks, of 16-bit elements, ascending; the mean of what was measured twice."""
    t = columns(root, f"{path}/nccl_perf.parquet")
    found: dict[tuple[str, int], dict[float, list[float]]] = {}
    read = (t[key] for key in ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"))
    for name, dtype, ranks, count, ms in zip(*read, strict=True):
        if dtype == "half":
            collective = NAMES.get(str(name), str(name))
            # nccl-tests counts what one rank sends, of which it keeps its own piece.
            size = 2.0 * float(count) * (int(ranks) if collective == "all_to_all" else 1)
            found.setdefault((collective, int(ranks)), {}).setdefault(size, []).append(1e-3 * float(ms))
    return {key: [(size, sum(times) / len(times)) for size, times in sorted(one.items())] for key, one in sorted(found.items())}


def kept(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every second of them, the largest among them."""
    return list(points)[::-2][::-1]


def of_link(root: Path, name: str) -> tuple[dict[tuple[str, int], list[tuple[float, float]]], list[Row]]:
    """A link's curves, and their errors at the sizes between and on other devices."""
    path, others = CURVES[name]
    everything = curves(root, path)
    thin = {key: kept(points) for key, points in everything.items()}
    between = {key: [p for p in points if p not in thin[key]] for key, points in everything.items()}
    title = f"NCCL inside a node, {name}"
    rows = [Row.of(title, f"held against {other}", misses(thin, curves(root, other))) for other in others]
    return thin, [Row.of(title, "sizes between those of the curves", misses(thin, between)), *rows]


def of_lines(root: Path, machine: str, path: str) -> Row:
    """The errors of a machine whose links have no curves but the lines of a library, fitted to other measurements."""
    cluster = Cluster.parse(machine)
    found = [
        collective_s(cluster, collective, size, RankGroup(ranks)) / seconds - 1
        for (collective, ranks), points in curves(root, path).items() if collective in FACTORS
        for size, seconds in points
    ]  # fmt: skip
    return Row.of("NCCL inside a node, nccl (fitted to all-reduces alone)", f"held against {path}", found)


def misses(
    thin: Mapping[tuple[str, int], Sequence[tuple[float, float]]], measured: Mapping[tuple[str, int], Sequence[tuple[float, float]]]
) -> list[float]:
    found = []
    for (collective, ranks), points in measured.items():
        if (collective, ranks) in thin and collective in FACTORS:
            one = MeasuredTable(collective, ranks, tuple(thin[collective, ranks]))
            found += [one.seconds(size) / seconds - 1 for size, seconds in points]
    return found


def toml(every: Mapping[str, Mapping[tuple[str, int], Sequence[tuple[float, float]]]]) -> str:
    lines = [
        "# Seconds of NCCL's collectives inside a node, measured with nccl-tests: [bytes of the whole tensor, microseconds] by protocol,",
        "# collective and ranks. Written by `python -m bench.validate.devices CHECKOUT --write`.",
        f"# From github.com/ai-dynamo/aiconfigurator at {COMMIT}, {DATA}, every second size.",
        "# SPDX-FileCopyrightText: Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.",
        "# SPDX-License-Identifier: Apache-2.0",
    ]
    for name, by in every.items():
        lines += ["", f"[curve.{name}]", f'source = "{CURVES[name][0]}, half"']
        for collective in sorted({c for c, _ in by}):
            lines += ["", f"[curve.{name}.{collective}]"]
            for ranks in sorted(n for c, n in by if c == collective):
                points = ", ".join(f"[{size:.0f}, {1e6 * seconds:.4g}]" for size, seconds in by[collective, ranks])
                lines.append(f"{ranks} = [{points}]")
    return "\n".join(lines) + "\n"


HEAD = f"""# Figures of devices, and what was held out of them

Written by `python -m bench.validate.devices CHECKOUT --write` from the tables of [aiconfigurator](https://github.com/ai-dynamo/aiconfigurator)
(commit {COMMIT}, Apache-2.0, NVIDIA): products of bfloat16 of {LEAST} and more on every side, causal attention of {LEAST} positions and
more, NCCL inside a node. The catalogue has three constants of products and three of attention for each device (`[stack.torch.on.*]`), and
for NVLink 4 and 5 curves of four collectives at every second size (`curves.toml`). Errors are of the predicted against the measured time,
in percent of the measured. *frozen*: what the catalogue has, before what a training step's load takes (`sustained`, see [how true the
predictions are](../validation.md)).

"""

TAIL = """
What smooth forms miss are waves of tiles and the kernels that cuBLAS picks: the largest errors are of products that fill the device a
little more than once. B300's and GB300's tables of one version are one file there, so GB300's are of the version before. Tables of GB200
and GB300 have 2 and 4 ranks alone; among more, NVLink 5 has B200's 8, and beyond those as many bytes more through each port. GH200 is not
measured there: it has H100's figures. NVLink 3 of A100 keeps the lines that were fitted to all-reduces on another machine, since the sets
of Megatron-LM were fitted beside them: what they say is 10 to 25 % too long for large messages here and half too long for small ones.
Backward of attention, and products of other layouts than a linear layer's forward, are not in the tables.
"""


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.validate.devices", description=__doc__, formatter_class=plain)
    parser.add_argument("checkout", type=Path, help="of github.com/ai-dynamo/aiconfigurator")
    parser.add_argument("--write", action="store_true", help="write the curves and the page of errors")
    asked = parser.parse_args()
    rows: list[Row] = []
    show: Callable[[str], None] = print
    try:
        for name in DEVICES:
            found, mine = of_device(asked.checkout, name)
            rows += mine
            show(f"[stack.torch.on.{name}]\n" + "\n".join(f"{key} = {value:.4g}" for key, value in found.items()) + "\n")
        every = {}
        for name in CURVES:
            every[name], mine = of_link(asked.checkout, name)
            rows += mine
        rows.append(of_lines(asked.checkout, *LINES))
    except UsageError as error:
        print(f"bench.validate.devices: {error}", file=sys.stderr)
        return 2
    show(table(rows))
    if asked.write:
        (ROOT / "src/shardwise/cluster/curves.toml").write_text(toml(every))
        (ROOT / "docs/benchmarks/devices.md").write_text(HEAD + table(rows) + "\n" + TAIL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
