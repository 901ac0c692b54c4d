"""bench.validate.devices: its closed forms against the price of one kernel, its fits against constants that made the rows, what it holds
out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.validate.devices import ATTENTION, PRODUCT, Attention, Products, columns, errors, fifths, fitted, held_out, kept, misses
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import stack_of
from shardwise.cost.devices.kernels import LocalKernel
from shardwise.errors import UsageError

DEVICE = Cluster.parse("dgx-h100").device
CONSTANTS = {"matmul": 0.6, "operands": 0.4, "product_s": 5e-6}
SLOW = {"attention_peak": 0.5, "attention_positions": 900.0, "attention_head": 20.0, "begin_s": 1e-5}


def products() -> Products:
    m, n, k = (x.reshape(-1).astype(float) for x in np.meshgrid([512, 4096, 16384], [512, 1024, 4096, 12288], [512, 2048, 8192]))
    rows = Products(m, n, k, m)
    return replace(rows, seconds=rows.predicted(DEVICE, CONSTANTS))


def attention() -> Attention:
    heads, positions, head = (x.reshape(-1).astype(float) for x in np.meshgrid([32, 256], [256, 1024, 4096, 16384], [64, 128, 256]))
    rows = Attention(heads, positions, head, heads)
    return replace(rows, seconds=rows.predicted(DEVICE, SLOW))


def test_products_are_what_a_kernel_is_priced_at() -> None:
    rows, stack = products(), replace(stack_of(DEVICE), sustained=1.0, **CONSTANTS)
    for m, n, k, seconds in zip(rows.m, rows.n, rows.k, rows.seconds, strict=True):
        kernel = LocalKernel("linear", 2 * m * n * k, 4 * m * n * k, 1.0, 1.0, m, n, k)
        assert kernel.seconds(DEVICE, stack, "bfloat16")[1].forward == pytest.approx(seconds)


def test_attention_is_what_a_kernel_is_priced_at() -> None:
    rows = attention()
    constants = {key: value for key, value in SLOW.items() if key != "begin_s"}
    stack = replace(stack_of(DEVICE), attention="fused", **constants)
    for heads, positions, head, seconds in zip(rows.heads, rows.positions, rows.head, rows.seconds, strict=True):
        scores = heads * positions**2
        kernel = LocalKernel(
            "attention", 4 * scores * head, 10 * scores * head, 0.0, 1.0, scores=scores, heads=heads, visible_fraction=0.5, head_size=head
        )
        assert kernel.seconds(DEVICE, stack, "bfloat16")[1].forward == pytest.approx(seconds - SLOW["begin_s"])


def test_fits_find_the_constants_that_made_the_rows() -> None:
    assert fitted(products(), DEVICE, PRODUCT) == pytest.approx(CONSTANTS, rel=0.01)
    assert fitted(attention(), DEVICE, ATTENTION) == pytest.approx(SLOW, rel=0.02)


def test_rows_of_one_shape_are_held_out_together() -> None:
    rows = products()
    groups = fifths(rows.n, rows.k)
    for n, k in {(n, k) for n, k in zip(rows.n, rows.k, strict=True)}:
        assert len(set(groups[(rows.n == n) & (rows.k == k)])) == 1
    assert max(map(abs, held_out(rows, DEVICE, PRODUCT, groups))) < 0.01
    # One that others do not predict is seen.
    odd = replace(rows, seconds=np.where((rows.n == 512) & (rows.k == 512), 2 * rows.seconds, rows.seconds))
    assert min(errors(odd.some((rows.n == 512) & (rows.k == 512)), DEVICE, CONSTANTS)) == pytest.approx(-0.5)


def test_a_curve_keeps_every_second_size_and_its_largest() -> None:
    points = [(float(2**k), 1e-6 * (10 + 2**k)) for k in range(1, 8)]
    assert [size for size, _ in kept(points)] == [2.0, 8.0, 32.0, 128.0]
    assert [size for size, _ in kept(points[1:])] == [8.0, 32.0, 128.0]
    one = {("all_gather", 8): kept(points)}
    assert max(map(abs, misses(one, one))) == pytest.approx(0.0, abs=1e-12)
    assert 0 < max(map(abs, misses(one, {("all_gather", 8): points}))) < 0.1
    assert misses(one, {("all_gather", 4): points}) == []


def test_a_checkout_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip install pyarrow|name a checkout"):
        columns(tmp_path, "h100_sxm/gemm/x/gemm_perf.parquet")
