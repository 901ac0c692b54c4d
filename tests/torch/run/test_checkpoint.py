"""Checkpoints against closed forms: a tensor whose elements are their own flat indices is read back under any other layout."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import shardwise
from shardwise.errors import CheckpointError
from shardwise.run import checkpoint
from shardwise.run.checkpoint import BlockRegion, SingleRank, StateShard, full_shard
from shardwise.run.checkpoint.region import coverage_fault


class Ranks:
    """`Together` for threads: the maximum over a barrier, as the ranks of one run have it."""

    generation = 0

    def __init__(self, rank: int, num_ranks: int, barrier: threading.Barrier, board: list[list[int]]) -> None:
        self.rank, self.num_ranks, self._barrier, self._board = rank, num_ranks, barrier, board

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        self._board[self.rank] = list(values)
        self._barrier.wait(10)
        result = [max(column) for column in zip(*self._board, strict=True)]
        self._barrier.wait(10)
        return result


def on_ranks(num_ranks: int, fn: Callable[[Ranks], object]) -> list[object]:
    """Result or exception of `fn` on each of `num_ranks` ranks that run at once."""
    barrier, board = threading.Barrier(num_ranks), [[] for _ in range(num_ranks)]
    out: list[object] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            out[rank] = fn(Ranks(rank, num_ranks, barrier, board))
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return out


def indices(shape: Sequence[int]) -> Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).view(tuple(shape))


def block_of(tensor: Tensor, region: BlockRegion) -> Tensor:
    """What a rank that holds `region` of `tensor` has; the definition, by plain slicing."""
    block = tensor[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))]
    return block.reshape(-1)[region.flat[0] : region.flat[1]].clone() if region.flat else block.clone()


def piece_of(name: str, tensor: Tensor, region: BlockRegion, kind: str = "parameter", slot: str = "", owner: bool = True) -> StateShard:
    return StateShard(name, kind, region.global_shape, region.offsets, tensor, slot, owner, region.shape, region.flat)  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[BlockRegion]:
    """Regions that cover `shape` once: a grid of uneven blocks, each perhaps cut into flat ranges as ZeRO does."""
    regions = [BlockRegion(shape, (0,) * len(shape), shape)]
    for dim, extent in enumerate(shape):
        cuts = sorted(draw(st.sets(st.integers(0, extent), max_size=2)))
        edges = [0, *cuts, extent]
        regions = [
            BlockRegion(
                shape,
                (*r.offsets[:dim], a, *r.offsets[dim + 1 :]),
                (*r.shape[:dim], b - a, *r.shape[dim + 1 :]),
            )
            for r in regions
            for a, b in pairwise(edges)
        ]
    cut: list[BlockRegion] = []
    for r in regions:
        edges = [0, *sorted(draw(st.sets(st.integers(0, r.size), max_size=2))), r.size]
        if draw(st.booleans()):
            cut += [BlockRegion(shape, r.offsets, r.shape, (a, b)) for a, b in pairwise(edges)]
        else:
            cut.append(r)
    return cut


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.integers(0, prod(s)), st.integers(0, prod(s)))))
def test_boxes_of_a_flat_range_are_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, a, b = case
    start, stop = min(a, b), max(a, b)
    region = BlockRegion(shape, (0,) * len(shape), shape, (start, stop))
    whole_box, tensor, found = BlockRegion(shape, (0,) * len(shape), shape), indices(shape), []
    boxes = list(region.boxes())
    for box, begin in boxes:
        assert begin == len(found)
        found += tensor[next(whole_box.boxes())[0].index_of(box)].reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=60, deadline=None)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), layouts(s), layouts(s))))
def test_any_layout_to_any_layout(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple, list[BlockRegion], list[BlockRegion]]
) -> None:
    shape, before, after = case
    tensor, folder = indices(shape), tmp_path_factory.mktemp("any")
    checkpoint.save(folder, 1, [piece_of("w", block_of(tensor, r), r) for r in before])
    wanted = [piece_of("w", torch.full_like(block_of(tensor, r), -1), r) for r in after]
    checkpoint.load(folder, wanted)
    for piece, region in zip(wanted, after, strict=True):
        assert torch.equal(piece.tensor, block_of(tensor, region))


@settings(max_examples=60, deadline=None)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), layouts(s), st.randoms())))
def test_incomplete_and_overlapping_pieces_are_caught(case: tuple[tuple[int, ...], list[BlockRegion], object]) -> None:
    shape, regions, random = case
    assert coverage_fault(shape, regions) == ""
    full = [r for r in regions if r.size]
    victim = random.choice(full)  # type: ignore[attr-defined]
    assert coverage_fault(shape, [r for r in full if r != victim])
    assert coverage_fault(shape, [*full, victim])
    others = [r for r in full if r.size == victim.size and r != victim]
    if others:  # as many elements as there should be, one part twice and one part never
        assert "overlap" in coverage_fault(shape, [*(r for r in full if r != others[0]), victim])


def state(value: float, step: int = 0) -> list[StateShard]:
    gen = torch.Generator().manual_seed(int(value * 1000))
    weight, bias = torch.randn(6, 4, generator=gen), torch.randn(4, generator=gen)
    return [
        full_shard("layer.weight", "parameter", weight),
        full_shard("layer.bias", "parameter", bias),
        full_shard("norm.count", "buffer", torch.tensor(step)),
        full_shard("layer.weight", "optimizer", weight * 2, "exp_avg"),
        full_shard("layer.bias", "optimizer", bias.bfloat16(), "exp_avg"),
    ]


def blank(pieces: Sequence[StateShard]) -> list[StateShard]:
    return [
        StateShard(p.name, p.kind, p.global_shape, p.offsets, torch.zeros_like(p.tensor), p.slot, True, p.block, p.flat) for p in pieces
    ]


def equal(left: Sequence[StateShard], right: Sequence[StateShard]) -> bool:
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(left, right, strict=True))


def test_a_checkpoint_is_plain_safetensors_and_json(tmp_path: Path) -> None:
    pieces = state(1)
    path = checkpoint.save(tmp_path, 12, pieces, {"data": 3.25, "name": "gpt"})
    assert path.name == "step-00000012"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    with safe_open(str(path / "rank-00000.safetensors"), "pt") as file:
        assert torch.equal(file.get_tensor("layer.weight"), pieces[0].tensor)
        assert torch.equal(file.get_tensor("layer.bias:exp_avg"), pieces[4].tensor)
    wanted = blank(pieces)
    assert checkpoint.load(tmp_path, wanted) == {"data": 3.25, "name": "gpt", "step": 12}
    assert equal(wanted, pieces)
    seen = checkpoint.inspect_checkpoint(path)
    assert (seen["step"], seen["kinds"]["parameter"]) == (12, {"tensors": 2, "bytes": (24 + 4) * 4})
    assert dict(checkpoint.read_full(path)).keys() == {"layer.weight", "layer.bias", "norm.count"}


def test_ranks_write_their_parts_and_others_read_them(tmp_path: Path) -> None:
    weight, moment = indices((8, 6)), indices((8, 6)) + 100
    rows = [BlockRegion((8, 6), (2 * r, 0), (2, 6)) for r in range(4)]
    columns = [BlockRegion((8, 6), (0, 3 * c), (8, 3)) for c in range(2)]
    shards = [BlockRegion((8, 6), (0, 0), (8, 6), (16 * r, 16 * r + 16)) for r in range(3)]

    def write(ranks: Ranks) -> Path:
        own = rows[ranks.rank]
        replica = full_shard("bias", "parameter", torch.arange(3.0), is_owner=ranks.rank == 2)
        return checkpoint.save(
            tmp_path,
            5,
            [
                piece_of("w", block_of(weight, own), own),
                piece_of("w", block_of(moment, own), own, "optimizer", "exp_avg"),
                replica,
            ],
            {"rank": ranks.rank},
            ranks,
        )

    assert on_ranks(4, write) == [tmp_path / "step-00000005"] * 4

    def read(regions: list[BlockRegion]) -> Callable[[Ranks], bool]:
        def on_rank(ranks: Ranks) -> bool:
            region = regions[ranks.rank]
            wanted = [
                piece_of("w", torch.zeros_like(block_of(weight, region)), region),
                piece_of("w", torch.zeros_like(block_of(weight, region)), region, "optimizer", "exp_avg"),
                full_shard("bias", "parameter", torch.zeros(3)),
            ]
            extra = checkpoint.load(tmp_path, wanted, ranks)
            return extra == {"rank": 0, "step": 5} and all(
                torch.equal(p.tensor, t)
                for p, t in zip(wanted, (block_of(weight, region), block_of(moment, region), torch.arange(3.0)), strict=True)
            )

        return on_rank

    assert on_ranks(2, read(columns)) == [True, True]
    assert on_ranks(3, read(shards)) == [True, True, True]


def test_a_failure_of_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    def write(ranks: Ranks) -> Path:
        # Ranks 1 and 2 claim the same row: the tensor is not complete.
        region = BlockRegion((3, 2), (min(ranks.rank, 1), 0), (1, 2))
        return checkpoint.save(tmp_path, 1, [piece_of("w", torch.ones(1, 2), region)], ranks=ranks)

    errors = on_ranks(3, write)
    assert all(isinstance(e, CheckpointError) for e in errors)
    assert "w of [3, 2] is not complete" in str(errors[0])
    assert "overlap" in str(errors[0])
    assert "rank 0" in str(errors[1])
    assert list(tmp_path.iterdir()) == []


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path) -> None:
    from shardwise.run.checkpoint.folder import read_manifest
    from shardwise.run.checkpoint.tensorfile import TensorFileReader

    weight = indices((1000, 8))
    path = checkpoint.save(tmp_path, 1, [full_shard("w", "parameter", weight)])
    manifest, region = read_manifest(path), BlockRegion((1000, 8), (500, 0), (10, 4))
    with TensorFileReader(path, manifest.files) as reader:
        out = torch.zeros(region.size)
        assert reader.copy_shard(out, piece_of("w", out.view(10, 4), region), manifest.tensors[0]) == 40
        assert reader.read_bytes == 10 * 8 * 4
    assert torch.equal(out.view(10, 4), weight[500:510, :4])


# Another model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p[1:], "of its 5 tensors are not in this model (layer.weight)"),
        (lambda p: [*p, full_shard("head", "parameter", torch.zeros(2))], "1 tensors of this model are not in it (head)"),
        (lambda p: [full_shard("layer.weight", "parameter", torch.zeros(6, 5)), *p[1:]], "layer.weight is torch.float32 [6, 4] there and"),
        (lambda p: [full_shard("layer.weight", "parameter", torch.zeros(6, 4, dtype=torch.int64)), *p[1:]], "torch.int64 [6, 4] here"),
        (lambda p: p[:4], "(layer.bias:exp_avg)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_untouched(tmp_path: Path, change: Callable, says: str) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    wanted = change(blank(state(1)))
    with pytest.raises(CheckpointError, match="another model") as caught:
        checkpoint.load(tmp_path, wanted)
    assert says in str(caught.value)
    assert all(not p.tensor.any() for p in wanted)


def test_a_difference_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1))

    def read(ranks: Ranks) -> object:
        extra = [] if ranks.rank else [full_shard("x", "buffer", torch.ones(1))]
        return checkpoint.load(tmp_path, [*blank(state(1)), *extra], ranks)

    errors = on_ranks(2, read)
    assert all(isinstance(e, CheckpointError) and "another model" in str(e) for e in errors), errors


def test_weights_alone_load_and_floats_are_converted_with_a_warning(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    wanted = [full_shard(p.name, p.kind, p.tensor.double() if p.tensor.is_floating_point() else p.tensor) for p in blank(state(1))[:3]]
    said: list[str] = []
    checkpoint.load(tmp_path, wanted, warn=said.append)
    assert torch.equal(wanted[0].tensor, state(1)[0].tensor.double())
    assert len(said) == 1
    assert "converted" in said[0]


def test_random_state_is_restored_where_it_exists(tmp_path: Path) -> None:
    random = full_shard("cpu.0", "random", torch.arange(5, dtype=torch.uint8))
    checkpoint.save(tmp_path, 1, [*state(1), random])
    other = full_shard("cpu.7", "random", torch.zeros(5, dtype=torch.uint8))
    checkpoint.load(tmp_path, [*blank(state(1)), other])
    assert not other.tensor.any()
    same = blank([random])
    checkpoint.load(tmp_path, [*blank(state(1)), *same])
    assert equal(same, [random])


# Damage


def damage_each(path: Path) -> list[tuple[str, Callable[[], None]]]:
    data, manifest = path / "rank-00000.safetensors", path / "manifest.json"

    def flip(file: Path, at: int) -> Callable[[], None]:
        def do() -> None:
            content = bytearray(file.read_bytes())
            content[at] ^= 1
            file.write_bytes(content)

        return do

    size, manifest_size = data.stat().st_size, manifest.stat().st_size
    return [
        *[(f"bit of data byte {at}", flip(data, at)) for at in (0, 9, size // 2, size - 1)],
        *[(f"bit of manifest byte {at}", flip(manifest, at)) for at in range(0, manifest_size - 1, 37)],
        ("truncated data", lambda: os.truncate(data, size - 1)),
        ("truncated manifest", lambda: os.truncate(manifest, manifest_size // 2)),
        ("zeroed page", lambda: data.write_bytes(data.read_bytes()[:64] + bytes(size - 64))),
        ("longer data", lambda: data.write_bytes(data.read_bytes() + b"\0")),
        ("missing data", data.unlink),
        ("missing manifest", manifest.unlink),
        ("extra shard", lambda: (path / "rank-00001.safetensors").write_bytes(data.read_bytes())),
        ("link", lambda: (data.rename(path.parent / "elsewhere"), data.symlink_to(path.parent / "elsewhere"))),
        ("shard of another step", lambda: data.write_bytes((path.parent / "step-00000001" / data.name).read_bytes())),
    ]


def num_damages(folder: Path) -> int:
    return len(damage_each(checkpoint.save(folder, 2, state(2))))


def test_every_damage_is_caught_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for number in range(num_damages(tmp_path / "count")):
        folder = tmp_path / str(number)
        first, second = checkpoint.save(folder, 1, state(1)), checkpoint.save(folder, 2, state(2))
        what, do = damage_each(second)[number]
        do()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(second, blank(state(2)))
        assert str(second) in str(caught.value) or "no checkpoint" in str(caught.value), what
        said: list[str] = []
        assert checkpoint.latest_good(folder, warn=said.append) == first, what
        assert [str(second) in line for line in said] == [True], what
        wanted = blank(state(1))
        assert checkpoint.load(folder, wanted, warn=said.append)["step"] == 1
        assert equal(wanted, state(1)), what


def test_ranks_share_the_check_and_agree_on_what_is_good(tmp_path: Path) -> None:
    def write(step: int) -> Callable[[Ranks], Path]:
        def on_rank(ranks: Ranks) -> Path:
            region = BlockRegion((2, 3), (ranks.rank, 0), (1, 3))
            return checkpoint.save(tmp_path, step, [piece_of("w", torch.full((1, 3), float(step)), region)], ranks=ranks)

        return on_rank

    on_ranks(2, write(1))
    on_ranks(2, write(2))
    broken = tmp_path / "step-00000002" / "rank-00001.safetensors"
    content = bytearray(broken.read_bytes())
    content[-1] ^= 4
    broken.write_bytes(content)

    def read(ranks: Ranks) -> float:
        wanted = full_shard("w", "parameter", torch.zeros(2, 3))
        checkpoint.load(tmp_path, [wanted], ranks, warn=lambda _: None)
        return float(wanted.tensor.mean())

    assert on_ranks(2, read) == [1.0, 1.0]


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """A manifest that says something else, with a digest that fits: hostile, not damaged."""
    import hashlib

    body = json.loads((path / "manifest.json").read_text())["manifest"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (path / "manifest.json").write_text(json.dumps({"sha256": hashlib.sha256(text).hexdigest(), "manifest": body}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["files"][0].update(name="../elsewhere.safetensors"), "own folder"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "own folder"),
        (lambda m: m["files"][0].update(name=".."), "own folder"),
        (lambda m: m["files"][0].update(name="a/b.safetensors"), "own folder"),
        (lambda m: m["files"].append(dict(m["files"][0])), "twice"),
        (lambda m: m.update(version=2), "update shardwise"),
        (lambda m: m.update(format="zip"), "'zip'"),
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.update(step="1"), "step"),
        (lambda m: m["tensors"][0].update(dtype="O"), "dtype 'O'"),
        (lambda m: m["tensors"][0]["pieces"][0].update(begin=2**40), "no such bytes"),
        (lambda m: m["tensors"][0]["pieces"][0].update(file=9), "no such bytes"),
        (lambda m: m["tensors"][0]["pieces"][0].update(begin=-1), "begin"),
        (lambda m: m["tensors"][0]["pieces"].clear(), "not complete"),
        (lambda m: m["tensors"][-1].update(shape=[2**40, 2**40]), "not complete"),
        (lambda m: m["tensors"][-1].update(shape=[2]), "layer.weight: a block"),
        (lambda m: m["tensors"].append(m["tensors"][0]), "twice"),
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, change: Callable[[dict], None], says: str) -> None:
    path = checkpoint.save(tmp_path, 1, state(1))
    rewrite(path, lambda m: None)
    checkpoint.verify(path)
    rewrite(path, change)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(path)
    assert says in str(caught.value)


# Writers


def test_retention_keeps_the_newest_and_the_good_one(tmp_path: Path) -> None:
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    assert [saved.step for saved in checkpoint.committed_checkpoints(tmp_path)] == [4, 5]
    # A folder that was set back to step 2 of a longer run: what was just written is never the one to go.
    checkpoint.save(tmp_path, 2, state(2), keep=1)
    assert 2 in [saved.step for saved in checkpoint.committed_checkpoints(tmp_path)]
    assert not list(tmp_path.glob(".*"))


def test_a_step_saved_again_replaces_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, state(1))
    assert checkpoint.save(tmp_path, 3, state(2)).name == "step-00000003.1"
    wanted = blank(state(2))
    checkpoint.load(tmp_path, wanted)
    assert equal(wanted, state(2))


def test_a_replaced_writer_cannot_commit(tmp_path: Path) -> None:
    old = checkpoint.claim_folder(tmp_path)
    checkpoint.save(tmp_path, 1, state(1), token=old)
    new = checkpoint.claim_folder(tmp_path)
    with pytest.raises(CheckpointError, match=f"writer {old} .* replaced by writer {new}"):
        checkpoint.save(tmp_path, 2, state(2), token=old)
    checkpoint.save(tmp_path, 2, state(3), token=new)
    assert [saved.step for saved in checkpoint.committed_checkpoints(tmp_path)] == [1, 2]
    assert checkpoint.verify(tmp_path / "step-00000002").token == new


def test_extra_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="JSON"):
        checkpoint.save(tmp_path, 1, state(1), {"rng": object()})
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_load(tmp_path: Path) -> None:
    assert checkpoint.latest_good(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        checkpoint.load(tmp_path, state(1))


def test_wrong_pieces_cannot_be_built() -> None:
    for make in (
        lambda: StateShard("w", "weights", (2,), (0,), torch.zeros(2)),  # type: ignore[arg-type]
        lambda: StateShard("w", "parameter", (2,), (1,), torch.zeros(2)),
        lambda: StateShard("w", "parameter", (2, 2), (0, 0), torch.zeros(2)),
        lambda: StateShard("w", "parameter", (4,), (0,), torch.zeros(2), block=(4,), flat=(3, 5)),
        lambda: StateShard("w", "parameter", (4,), (0,), torch.zeros(2), block=(4,), flat=(0, 3)),
        lambda: StateShard("w", "parameter", (2,), (0,), torch.zeros(2, dtype=torch.complex128)),
    ):
        with pytest.raises(CheckpointError):
            make()


def test_one_process_is_a_group_of_one() -> None:
    assert SingleRank().all_reduce_max([3, 1]) == [3, 1]


class _Buffers(torch.nn.Module):
    """A buffer that nothing reads, one that is not saved, a tied weight, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("unread", torch.arange(3.0))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)) * self.mask).square().mean()


@pytest.mark.parametrize("deferred", [True, False])
def test_the_full_state_is_the_model_s_own(deferred: bool) -> None:
    """It loads strictly into the serial model: the same names, whatever of them a graph reads."""
    torch.manual_seed(0)
    serial = _Buffers()
    engine = shardwise.parallelize(_Buffers if deferred else copy.deepcopy(serial), (torch.randn(8, 4),), plan="data=1", seed=0)
    state = engine.full_state_dict()
    assert state is not None
    assert state.keys() == serial.state_dict().keys()
    for name, tensor in serial.state_dict().items():
        assert torch.equal(state[name], tensor), name
    serial.load_state_dict(state)
