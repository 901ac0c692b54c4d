"""Compressed gradients against the same algorithm in numpy over all ranks, the conservation of what is not sent, and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.cost.memory.memory import PACKING
from shardwise.plan.ir.compression import Compression
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES
from shardwise.run.gradients.compressed import CompressedBucket, add_message, encode
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.world import Group, World

BLOCK = 512
STEPS = 4


class Tied(torch.nn.Module):
    """Its first weights are read again at the end, so that of two stages both have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(33, 71)
        self.middle = torch.nn.ModuleList([torch.nn.Linear(71, 71) for _ in range(3)])
        self.last = torch.nn.Linear(33, 71, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return x @ self.last.weight


def _plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(33, 71), torch.nn.Tanh(), torch.nn.Linear(71, 3))


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - 1).square().mean()


def _batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor]:
    return (torch.randn(12, 33, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype),)


def _dtype(layout: str) -> torch.dtype:
    return torch.float64 if "float64" in layout else torch.float32


def _run(world: World, layout: str, tied: bool, steps: int = STEPS, forgets: bool = False) -> dict[str, Any]:
    """Steps under a layout. By bucket: its gradients before the exchange and after, step by step, its members and what was not sent."""
    bytes_of: Counter[str] = Counter()
    for name, counted in (("all_reduce", 0), ("reduce_scatter_into", 1), ("all_gather_into", 0), ("exchange_into", 1)):
        real = getattr(Group, name)

        def wrapped(self: Group, *args: Any, real: Any = real, name: str = name, counted: int = counted, **kwargs: Any) -> Any:
            if args[counted].dtype is torch.uint8 and args[counted].numel() > 1:
                bytes_of[name] += args[counted].nbytes
            return real(self, *args, **kwargs)

        setattr(Group, name, wrapped)
    make, batch = (Tied if tied else _plain), _batch(0, _dtype(layout))
    plan = shardwise.plan(make(), batch, loss=_loss, layout=layout)
    plan = replace(plan, bucket_bytes=6000 if tied else 0)  # several buckets under way, or one
    engine = shardwise.parallelize(make, batch, loss=_loss, plan=plan, seed=0, world=world)
    gradients = engine.gradients
    found: dict[int, dict[str, Any]] = {}
    for k in gradients.compressed:
        number, bucket = gradients.ordered_buckets[k]
        found[k] = {"ranks": gradients._reduction_groups[number].ranks, "names": bucket.names, "before": [], "after": []}
    for step in range(steps):
        gradients.uncompressed = {}
        bytes_of.clear()
        engine.forward_backward(_batch(step, _dtype(layout)))
        sent = dict(bytes_of)
        engine.gradients.gather()
        for k, one in gradients.compressed.items():
            found[k]["before"].append(gradients.uncompressed[k])
            found[k]["after"].append(one.flat_gradients.clone())
            if forgets:
                for x in one.residuals.values():
                    x.zero_()
        engine.update()
    for k, one in gradients.compressed.items():
        found[k]["rests"] = {name: x.clone() for name, x in one.residuals.items()}
    return {"buckets": list(found.values()), "sent": sent}


def _narrow(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(x.dtype)


def _through(kind: str, x: np.ndarray) -> np.ndarray:
    """What arrives of `x`."""
    word, _, fraction = kind.partition(":")
    out = np.zeros_like(x)
    if word == "bfloat16":
        return _narrow(x)
    if word == "topk":
        chosen = np.argsort(-np.abs(x), kind="stable")[: int(np.ceil(float(fraction) * len(x)))]
        out[chosen] = x[chosen]
        return out
    for start in range(0, len(x), BLOCK):
        part = x[start : start + BLOCK]
        scale = (np.abs(part).max() / part.dtype.type(127)).astype(np.float32)
        by = part.dtype.type(scale if scale > 0 else 1)
        out[start : start + BLOCK] = np.clip(np.rint(part / by), -127, 127) * part.dtype.type(scale)
    return out


class OverHosts:
    """The same of ranks that are hosts' in turn, `inside` each: a host's sum first, piece by piece, and then the pieces between hosts."""

    def __init__(self, kind: str, num: int, zero: int, inside: int) -> None:
        self.hosts = [range(h, h + inside) for h in range(0, num, inside)]
        self.zero, self.rails = zero, [Reference(kind, len(self.hosts), zero) for _ in range(inside)]

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        sums = []
        for host in self.hosts:
            total = gradients[host[0]]
            for rank in host[1:]:
                total = total + gradients[rank]
            sums.append(total)
        if not self.zero:
            pieces = [np.array_split(total, len(self.rails)) for total in sums]
            return np.concatenate([rail.step([p[j] for p in pieces]) for j, rail in enumerate(self.rails)])
        out = np.zeros_like(sums[0]).reshape(len(gradients), -1)
        for j, rail in enumerate(self.rails):
            own = [host[j] for host in self.hosts]
            out[own] = rail.step([s.reshape(out.shape)[own].reshape(-1) for s in sums]).reshape(len(own), -1)
        return out.reshape(-1)


class Reference:
    """One bucket's exchange over all ranks, in one process."""

    def __init__(self, kind: str, num: int, zero: int) -> None:
        self.kind, self.num, self.zero = kind, num, zero
        self.rests: list[Any] = [0.0] * num
        self.rests_of_sums: list[Any] = [0.0] * num

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        keeps = self.kind != "bfloat16"
        size = len(gradients[0])
        whole = self.kind.startswith("topk") and not self.zero
        length = size if whole else -(-size // self.num)
        pieces = 1 if whole else self.num
        padded = [np.pad(g, (0, pieces * length - size)) for g in gradients]
        arrived = []
        for i, g in enumerate(padded):
            wants = g + self.rests[i] if keeps else g
            sent = np.concatenate([_through(self.kind, wants[p * length : (p + 1) * length]) for p in range(pieces)])
            self.rests[i] = wants - sent
            arrived.append(sent)
        total = np.zeros_like(arrived[0])
        for sent in arrived:
            total = total + sent
        if whole or self.zero:
            return total[:size]
        out = []
        for p in range(pieces):
            part = total[p * length : (p + 1) * length]
            wants = part + self.rests_of_sums[p] if keeps else part
            sent = _through(self.kind, wants)
            self.rests_of_sums[p] = wants - sent
            out.append(sent)
        return np.concatenate(out)[:size]


def _by_group(results: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[int, dict[str, Any]]]:
    """Buckets by the ranks that share them and what they hold, then by rank."""
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for rank, result in enumerate(results):
        for bucket in result["buckets"]:
            numbers = {key: [x.numpy() for x in bucket[key]] for key in ("before", "after")}
            rests = {name: x.numpy() for name, x in bucket["rests"].items()}
            found.setdefault((bucket["ranks"], bucket["names"]), {})[rank] = {**numbers, "rests": rests}
    return found


CASES = [
    ("data=2 compress=int8", False),
    ("data=3 compress=int8 microbatches=2", False),
    ("data=3 compress=bfloat16", False),
    ("data=3 compress=topk:0.03", False),
    ("data=3 zero=1 compress=int8", False),
    ("data=2 zero=1 compress=topk:0.1 precision=float64", False),
    ("data=2 zero=1 compress=bfloat16", False),
    ("data=2 pipeline=2 microbatches=2 compress=int8 precision=float64", True),
    ("data=2 tensor=2 compress=topk:0.05", True),
]


@pytest.mark.parametrize(("layout", "tied"), CASES, ids=[case[0] for case in CASES])
def test_it_is_the_same_algorithm_in_one_process(ranks: Callable[..., list[Any]], layout: str, tied: bool) -> None:
    """Bit for bit: sums are made in the members' order."""
    parsed = Layout.parse(layout)
    _same(ranks(_run, parsed.num_ranks, layout, tied), parsed, tied)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
@pytest.mark.parametrize("layout", ["data=3 compress=int8", "data=2 pipeline=2 microbatches=2 compress=bfloat16"])
def test_every_transport_gives_the_same(ranks: Callable[..., list[Any]], layout: str, transport: str) -> None:
    parsed = Layout.parse(layout)
    _same(ranks(_run, parsed.num_ranks, layout, True, env={"SHARDWISE_TRANSPORT": transport}), parsed, True)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ("data=4 compress=int8 microbatches=2", False),
        ("data=4 compress=topk:0.05", False),
        ("data=4 zero=1 compress=int8", False),
        ("data=4 zero=1 compress=bfloat16", False),
        ("data=2 pipeline=2 microbatches=2 compress=int8", True),
    ],
)
def test_a_host_sums_before_it_compresses(ranks: Callable[..., list[Any]], layout: str, tied: bool) -> None:
    """Ranks two by two on emulated hosts: bit for bit what one process makes of it; and the broken twin, in which each compresses."""
    parsed, env = Layout.parse(layout), {"SHARDWISE_TRANSPORT": "boxes=2"}
    results = ranks(_run, 4, layout, tied, env=env)
    _same(results, parsed, tied, 2)
    if not tied:
        with pytest.raises(AssertionError):
            _same(results, parsed, tied)


def test_unequal_hosts_compress_each_rank(ranks: Callable[..., list[Any]]) -> None:
    parsed = Layout.parse("data=3 compress=int8")
    _same(ranks(_run, 3, str(parsed), False, env={"SHARDWISE_TRANSPORT": "boxes=2,1"}), parsed, False)


def test_the_network_carries_a_host_once(ranks: Callable[..., list[Any]]) -> None:
    """Of two hosts of two ranks: half of the bucket's bytes, there and back, where each rank sent all of it."""
    size = 33 * 71 + 71 + 71 * 3 + 3
    half = -(-size // 2)
    piece = -(-half // 2)
    want = 2 * (piece + 4 * -(-piece // BLOCK))
    sent = ranks(_sent, 4, ["data=4 compress=int8"], env={"SHARDWISE_TRANSPORT": "boxes=2"})[0][0]
    assert sent == {"exchange_into": want, "all_gather_into": want}


def _same(results: list[dict[str, Any]], parsed: Layout, tied: bool, inside: int = 1) -> None:
    groups = _by_group(results)
    assert len(groups) > 2 * tied
    assert any(len(members) > 2 for members, _ in groups) or not tied or parsed.pipeline == 1
    for (members, _), by_rank in groups.items():
        assert set(by_rank) == set(members)
        nested = inside > 1 and len(members) > 2
        what = (parsed.compress, len(members), parsed.zero)
        reference = OverHosts(*what, inside) if nested else Reference(*what)
        for step in range(STEPS):
            want = reference.step([by_rank[r]["before"][step] for r in members])
            for r in members:
                np.testing.assert_array_equal(by_rank[r]["after"][step], want)
        differ = [by_rank[members[0]]["before"][0], by_rank[members[-1]]["before"][0]]
        assert not np.array_equal(*differ)


def _off(results: list[dict[str, Any]], steps: int) -> float:
    """How far what was sent and what was not are from all gradients, relative to them."""
    worst = 0.0
    for (members, _), by_rank in _by_group(results).items():
        given = sum(by_rank[r]["before"][step].astype(np.float64) for r in members for step in range(steps))
        size = len(given)
        arrived = sum(by_rank[members[0]]["after"][step].astype(np.float64) for step in range(steps))
        kept = sum(by_rank[r]["rests"]["rest"][:size].astype(np.float64) for r in members)
        if "rest_of_sum" in by_rank[members[0]]["rests"]:
            kept = kept + np.concatenate([by_rank[r]["rests"]["rest_of_sum"] for r in members])[:size]
        worst = max(worst, float(np.abs(arrived + kept - given).max() / np.abs(given).max()))
    return worst


@pytest.mark.parametrize("compress", ["int8", "topk:0.02"])
@pytest.mark.parametrize("zero", [0, 1])
def test_nothing_is_lost(ranks: Callable[..., list[Any]], compress: str, zero: int) -> None:
    """What was sent in all steps and what still waits are all gradients; a twin that forgets the rests is told apart."""
    layout = f"data=3 zero={zero} compress={compress} precision=float64"
    assert _off(ranks(_run, 3, layout, False, 6), 6) < 1e-14
    assert _off(ranks(_run, 3, layout, False, 6, True), 6) > 1e-4


def _poisoned(world: World, layout: str, bad: float) -> list[list[bool]]:
    """[step] -> of every bucket, whether all that arrived is finite; rank 0's second batch is not, and that step is not applied."""
    engine = shardwise.parallelize(_plain, _batch(0, torch.float32), loss=_loss, plan=layout, seed=0, world=world)
    found = []
    for step in range(4):
        (x,) = _batch(step, torch.float32)
        if step == 1:
            x[0, 5] = bad
        engine.forward_backward((x,))
        engine.gradients.gather()
        every = engine.gradients.compressed.values()
        found.append([bool(one.flat_gradients.isfinite().all()) for one in every])
        assert all(x.isfinite().all() for one in every for x in one.residuals.values())
        if all(found[-1]):
            engine.update()
    weights = torch.cat([p.flatten() for p in engine.rank_model.parameters.values()])
    assert weights.isfinite().all()
    return found


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("compress", ["bfloat16", "int8", "topk:0.02"])
def test_what_is_not_finite_is_seen_once(ranks: Callable[..., list[Any]], compress: str, bad: float) -> None:
    """In its own step, by everyone, and in none that follows."""
    for found in ranks(_poisoned, 2, f"data=2 compress={compress}", bad):
        assert [all(step) for step in found] == [True, False, True, True]


@pytest.mark.parametrize("compress", ["int8", "topk:0.02"])
def test_only_what_is_finite_is_kept(compress: str) -> None:
    """Of any vector with something in it that is no number or infinite; what is kept elsewhere is what did not arrive."""
    how = Compression.parse(compress)
    for where in ([3], [0, 511], [700], list(range(600, 700)), list(range(1024))):
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = torch.randn(1024, generator=torch.Generator().manual_seed(len(where)), dtype=torch.float64)
            x[where] = bad
            rest, out = x.clone(), torch.zeros_like(x)
            add_message(how, encode(how, rest), out)
            assert rest.isfinite().all()
            assert not out.isfinite().all()
            arrived = out.isfinite() & x.isfinite()
            torch.testing.assert_close((rest + out)[arrived], x[arrived], rtol=1e-14, atol=1e-14)


def _sent(world: World, layouts: list[str]) -> list[dict[str, int]]:
    return [_run(world, layout, False, 1)["sent"] for layout in layouts]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bytes(ranks: Callable[..., list[Any]], num_ranks: int) -> None:
    """Of int8 one an element and four a block, both ways; of bfloat16 two; of top-k eight for each that is chosen, to everyone."""
    size = 33 * 71 + 71 + 71 * 3 + 3
    piece = -(-size // num_ranks)
    of_int8 = num_ranks * (piece + 4 * -(-piece // BLOCK))
    chosen = 8 * int(np.ceil(0.01 * size))
    want = {
        "compress=int8": {"exchange_into": of_int8, "all_gather_into": of_int8},
        "compress=bfloat16": {"exchange_into": 2 * num_ranks * piece, "all_gather_into": 2 * num_ranks * piece},
        "compress=topk": {"all_gather_into": num_ranks * chosen},
        "zero=1 compress=int8": {"exchange_into": of_int8},
        "zero=1 compress=topk": {"exchange_into": num_ranks * 8 * int(np.ceil(0.01 * piece))},
        "compress=none": {},
    }
    layouts = [f"data={num_ranks} {layout}" for layout in want]
    for result in ranks(_sent, num_ranks, layouts):
        assert dict(zip(want, result, strict=True)) == want


def _losses(world: World, layout: str) -> list[float]:
    engine = shardwise.parallelize(
        _plain, _batch(0, torch.float32), loss=_loss, plan=layout, seed=0, world=world, optimizer={"name": "sgd", "lr": 0.05}
    )
    return [engine.step(_batch(step % 3, torch.float32)).loss for step in range(60)]


def test_training_ends_where_it_would_have(ranks: Callable[..., list[Any]]) -> None:
    """After 60 steps the loss is within a few percent of its whole descent of where it would be uncompressed."""
    plain = ranks(_losses, 2, "data=2")[0]
    descent = plain[0] - plain[-1]
    assert descent > 0.5 * plain[0]
    for compress, within in (("bfloat16", 0.001), ("int8", 0.001), ("topk:0.1", 0.05)):
        found = ranks(_losses, 2, f"data=2 compress={compress}")
        assert found[0] == found[1]
        assert abs(found[0][-1] - plain[-1]) < within * descent, compress
        assert found[0] != plain


def _resumed(world: World, layout: str, then: str, folder: str, forgets: bool = False) -> tuple[list[float], list[float]]:
    """Losses of steps 4 to 6 without an interruption, and after one, under another layout or the same."""

    def new(layout: str) -> Any:
        return shardwise.parallelize(_plain, _batch(0, torch.float32), loss=_loss, plan=layout, seed=0, world=world)

    engine = new(layout)
    for step in range(3):
        engine.step(_batch(step, torch.float32))
    engine.save(folder)
    straight = [engine.step(_batch(step, torch.float32)).loss for step in range(3, 6)]
    again = new(then)
    for step in range(2):  # of another run: what it keeps back must go
        again.step(_batch(90 + step, torch.float32))
    again.load(folder)
    if forgets:
        for one in again.gradients.compressed.values():
            for x in one.residuals.values():
                x.zero_()
    return straight, [again.step(_batch(step, torch.float32)).loss for step in range(3, 6)]


@pytest.mark.parametrize("compress", ["int8", "topk:0.05"])
def test_a_checkpoint_holds_what_was_not_sent(ranks: Callable[..., list[Any]], tmp_path: Path, compress: str) -> None:
    """The same layout goes on bit for bit; without what was kept it does not, and another layout goes on without it."""
    layout = f"data=2 compress={compress}"
    for straight, again in ranks(_resumed, 2, layout, layout, str(tmp_path / "same")):
        assert straight == again
    straight, again = ranks(_resumed, 2, layout, layout, str(tmp_path / "twin"), True)[0]
    assert straight != again
    for then in ("data=2 zero=1", f"data=2 zero=1 compress={compress}"):
        straight, again = ranks(_resumed, 2, layout, then, str(tmp_path / then.replace(" ", "")))[0]
        assert again[0] == pytest.approx(straight[0], rel=1e-6)
        assert again == pytest.approx(straight, rel=0.05)


def _verified(world: World, layout: str, tied: bool, spoil: str = "") -> list[Any] | None:
    """What verification says; `spoil`: of one rank the exchange, or a gradient before it."""
    if spoil == "exchange" and world.rank == 1:
        real = CompressedBucket.finish

        def shifted(self: CompressedBucket) -> None:
            real(self)
            self.flat_gradients[3] += 1e-3

        CompressedBucket.finish = shifted  # type: ignore[method-assign]
    make, batch = (Tied if tied else _plain), _batch(0, torch.float32)
    plan = shardwise.plan(make(), batch, loss=_loss, layout=f"{layout} precision=float64")
    options = Options(steps=3, sabotage={"0.weight": 1.001} if spoil == "gradient" else None)
    found = verify_on_rank(world, plan, make, batch, _loss, options=options)
    return None if found is None else [found.ok, str(found), sorted(found.worst)]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ("data=2 compress=int8", False),
        ("data=3 zero=1 compress=topk:0.05", False),
        ("data=2 zero=1 compress=bfloat16", False),
        ("data=2 pipeline=2 microbatches=2 compress=topk:0.1", True),
    ],
)
def test_verification_says_what_it_compares(ranks: Callable[..., list[Any]], layout: str, tied: bool) -> None:
    """Sums before they are compressed, the exchange, and weights after an update with what an emulation of it gives."""
    ok, said, kinds = ranks(_verified, Layout.parse(layout).num_ranks, layout, tied)[0]
    assert ok, said
    assert kinds == ["exchange", "gradients", "input_gradients", "loss", "optimizer", "weights"]


@pytest.mark.parametrize("layout", ["data=4 compress=int8", "data=4 zero=1 compress=topk:0.05"])
def test_verification_knows_hosts(ranks: Callable[..., list[Any]], layout: str) -> None:
    ok, said, kinds = ranks(_verified, 4, layout, False, env={"SHARDWISE_TRANSPORT": "boxes=2"})[0]
    assert ok, said
    assert kinds == ["exchange", "gradients", "input_gradients", "loss", "optimizer", "weights"]


@pytest.mark.parametrize(("spoil", "names"), [("exchange", "what arrived"), ("gradient", "gradients of 0.weight")])
def test_verification_finds_what_is_wrong(ranks: Callable[..., list[Any]], spoil: str, names: str) -> None:
    ok, said, _ = ranks(_verified, 2, "data=2 compress=int8", False, spoil)[0]
    assert not ok
    assert names in said


def _buckets(world: World, layout: str, bucket_bytes: int) -> tuple[list[list[int]], list[float]]:
    """Elements of each bucket's message and losses, where a plan says how large a bucket is."""
    model = _plain()
    plan = replace(shardwise.plan(model, _batch(0, torch.float32), loss=_loss, layout=layout), bucket_bytes=bucket_bytes)
    engine = shardwise.parallelize(_plain, _batch(0, torch.float32), loss=_loss, plan=plan, seed=0, world=world)
    losses = [engine.step(_batch(step, torch.float32)).loss for step in range(3)]
    return [[b.stop - b.start for b in group.buckets] for group in engine.rank_model.groups], losses


def test_the_build_uses_the_plans_buckets(ranks: Callable[..., list[Any]]) -> None:
    """A bucket ends with the parameter that fills it; whatever their size, the losses are the same."""
    layout = "data=2"
    (usual, losses), _ = ranks(_buckets, 2, layout, 0)
    assert usual == [[33 * 71 + 71 + 71 * 3 + 3]]
    (small, same), _ = ranks(_buckets, 2, layout, 400)
    assert sum(map(sum, small)) == sum(map(sum, usual))
    assert all(sorted(sizes) == [71 + 33 * 71, 213 + 3] or len(sizes) > 1 for sizes in small)
    assert same == losses


def _held(world: World, layout: str) -> list[float]:
    """Bytes of gradients at the peak, and the parameters' own."""
    engine = shardwise.parallelize(_plain, _batch(0, torch.float32), loss=_loss, plan=layout, seed=0, world=world)
    engine.step(_batch(0, torch.float32))
    peak = engine.peak_memory()
    assert peak is not None
    return [peak.gradients, 4.0 * engine.num_parameters]


@pytest.mark.parametrize(("words", "times"), [("none", 1.0), ("bfloat16", 1.0), ("topk", 2.0), ("int8", 2.5), ("int8 zero=1", 2.0)])
def test_what_is_kept_is_counted_as_gradients(ranks: Callable[..., list[Any]], words: str, times: float) -> None:
    """As much again as the gradients, and with int8 this rank's half of the sums; a padded element at most besides."""
    for held, parameters in ranks(_held, 2, f"data=2 compress={words}"):
        assert held == pytest.approx(times * parameters, abs=3 * 64)


def _packing(world: World, layout: str) -> float:
    """Bytes of buffers at the peak, of a model whose gradients fill a bucket."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(900, 900) for _ in range(9)])

    batch = (torch.randn(2, 900, generator=torch.Generator().manual_seed(0)),)
    engine = shardwise.parallelize(make, batch, loss=_loss, plan=layout, seed=0, world=world)
    engine.step(batch)
    peak = engine.peak_memory()
    assert peak is not None
    return peak.total - peak.gradients


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "topk"])
def test_packing_takes_the_memory_that_is_predicted(ranks: Callable[..., list[Any]], kind: str) -> None:
    """Beside what is kept: so many times a bucket, within half a bucket."""
    bucket = min(BUCKET_BYTES, 4 * 8 * (900 * 900 + 900))
    more = ranks(_packing, 2, f"data=2 compress={kind}")[0] - ranks(_packing, 2, "data=2")[0]
    assert more / bucket == pytest.approx(PACKING[kind], abs=0.6)
