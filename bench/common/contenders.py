"""Who is measured: the table of contenders, in sets that are interleaved together.

A set fits into memory as a whole. `kind` decides which targets a set's rows answer; `pairs` which of shardwise's contenders each peer is
compared with (every peer of the set where it is not named).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.common.case import Case, Contender

CHOSEN, CHOSEN_FLOAT32 = "shardwise, its plan", "shardwise, its plan in float32"
ALONE = "shardwise data, no exchange"


def shardwise(
    name: str, layout: str = "", num_ranks: int = 2, precision: str = "float32", settings: str = "equal", **more: object
) -> Contender:
    """A contender of shardwise's: under a layout, or (without one) under the plan that shardwise chooses."""
    return Contender(
        name,
        "bench.common.shardwise_side",
        num_ranks,
        precision=precision,
        settings=settings,
        options={"layout": layout, **more},
        launcher=True,
    )


SINGLE = Contender("one process", "bench.peers.single", num_ranks=1, threads=2)
SINGLE_BF16 = Contender("one process, autocast", "bench.peers.single", 1, 2, "bfloat16", options={"autocast": True})
DDP = Contender("DDP", "bench.peers.ddp")
DDP_WRITTEN = Contender("DDP, as users write it", "bench.peers.ddp", settings="own", options={"plain": True})
DDP_ALONE = Contender("DDP, no exchange", "bench.peers.ddp", options={"exchange": False})
ZERO_OPTIMIZER = Contender("ZeroRedundancyOptimizer", "bench.peers.ddp", options={"zero": True})
DDP_BF16 = Contender("DDP, autocast", "bench.peers.ddp", precision="bfloat16", options={"autocast": True})
FSDP2 = Contender("FSDP2", "bench.peers.fsdp2")
GPIPE = Contender("torch GPipe", "bench.peers.pipelining", options={"schedule": "GPipe"})
BEST_SCHEDULE = "shardwise zb-v"  # the same memory as 1F1B on its fullest rank
ONE_F_ONE_B = Contender("torch 1F1B", "bench.peers.pipelining", options={"schedule": "1F1B"})
DTENSOR = Contender("DTensor", "bench.peers.dtensor")
DTENSOR_VOCABULARY = Contender("DTensor, vocabulary", "bench.peers.dtensor", options={"vocabulary": True})
ACCELERATE = Contender("Accelerate", "bench.peers.accelerate", needs=("accelerate",))
FABRIC = Contender("Lightning Fabric", "bench.peers.fabric", needs=("lightning_fabric",))
DEEPSPEED = Contender("DeepSpeed ZeRO-1", "bench.peers.deepspeed", needs=("deepspeed",))
MEGATRON_DATA = Contender("Megatron-Core DDP", "bench.peers.megatron", options={"tensor": 1}, needs=("megatron.core",))
MEGATRON = Contender("Megatron-Core", "bench.peers.megatron", options={"tensor": 2}, needs=("megatron.core",))
AXONN_DATA = Contender("AxoNN data", "bench.peers.axonn", options={"tensor": 1}, needs=("axonn",))
AXONN = Contender("AxoNN tensor", "bench.peers.axonn", options={"tensor": 2}, needs=("axonn",))


@dataclass(frozen=True, slots=True)
class Set:
    """Contenders that take turns. `pairs`: (shardwise's name, peer's name) of every row; names of skipped contenders leave no row."""

    kind: str
    contenders: tuple[Contender, ...]
    pairs: tuple[tuple[str, str], ...]


def _against(name: str, peers: tuple[Contender, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((name, peer.name) for peer in peers)


def _as_written(*peers: Contender) -> tuple[Contender, ...]:
    """The same as their users run them, without shardwise's allocator settings."""
    return tuple(replace(c, name=f"{c.name}, as written", settings="own") for c in peers)


def parts(whole: Set, most: int) -> list[Set]:
    """The set in pieces of at most `most` contenders, so that they fit into memory together; each with shardwise's that its peers need.

    Raises ValueError where not even one peer fits beside shardwise's.
    """
    by_name = {c.name: c for c in whole.contenders}
    partners: dict[str, tuple[str, ...]] = {}
    for name, peer in whole.pairs:
        partners[peer] = (*partners.get(peer, ()), name)
    pieces: list[tuple[tuple[str, ...], list[str]]] = []
    for peer, ours in sorted(partners.items(), key=lambda item: item[1]):
        if len(ours) >= most:
            raise ValueError(f"{most} contenders at a time leave no room for {peer} beside {', '.join(ours)}")
        if pieces and pieces[-1][0] == ours and len(ours) + len(pieces[-1][1]) < most:
            pieces[-1][1].append(peer)
        else:
            pieces.append((ours, [peer]))
    return [
        Set(whole.kind, tuple(by_name[n] for n in (*ours, *peers)), tuple((a, b) for a, b in whole.pairs if a in ours and b in peers))
        for ours, peers in pieces
    ]


def data_set() -> Set:
    replicas, sharded = shardwise("shardwise data", "data=2 threads=1"), shardwise("shardwise data, ZeRO-1", "data=2 zero=1 threads=1")
    plain = (DDP, ACCELERATE, FABRIC, MEGATRON_DATA, AXONN_DATA)
    zero = (FSDP2, DEEPSPEED)
    return Set("data", (replicas, sharded, *plain, *zero), _against(replicas.name, (*plain, *zero)) + _against(sharded.name, zero))


def exchange_set() -> Set:
    """Data parallelism beside itself with the exchange of gradients left out, which trains another model and is the limit; and ZeRO-1."""
    replicas, sharded = shardwise("shardwise data", "data=2 threads=1"), shardwise("shardwise data, ZeRO-1", "data=2 zero=1 threads=1")
    alone = shardwise(ALONE, "data=2 threads=1", exchange=False)
    pairs = (*_against(replicas.name, (alone, DDP, DDP_ALONE)), *_against(sharded.name, (ZERO_OPTIMIZER,)))
    return Set("exchange", (replicas, alone, sharded, DDP, DDP_ALONE, ZERO_OPTIMIZER), pairs)


def settings_set() -> Set:
    """shardwise's own plan beside DDP as its users write it, and beside itself with one of its settings left out at a time."""
    own = shardwise(CHOSEN, settings="own", precision="own")
    without = (
        shardwise(f"{CHOSEN}, without bfloat16", settings="own", constraints=["precision=float32"]),
        shardwise(f"{CHOSEN}, without allocator settings", settings="own", precision="own", allocator=False),
        shardwise(f"{CHOSEN}, over gloo", settings="own", precision="own", transport="gloo"),
        shardwise(f"{CHOSEN}, torch's own products", settings="own", constraints=["precision=float32"], products="highest"),
    )
    return Set("settings", (own, *without, DDP_WRITTEN), _against(own.name, (DDP_WRITTEN, *without)))


def pipeline_set(case: Case) -> Set:
    end = f"pipeline=2 microbatches={case.microbatches} threads=1"
    gpipe, one = shardwise("shardwise GPipe", f"{end} schedule=gpipe"), shardwise("shardwise 1F1B", f"{end} schedule=1f1b")
    best = shardwise(BEST_SCHEDULE, f"{end} schedule=zb-v")
    plain = _as_written(GPIPE, ONE_F_ONE_B)
    pairs = ((gpipe.name, GPIPE.name), (one.name, ONE_F_ONE_B.name), (gpipe.name, plain[0].name), (one.name, plain[1].name))
    beside = ((best.name, GPIPE.name), (best.name, ONE_F_ONE_B.name))
    return Set("pipeline", (gpipe, one, best, GPIPE, ONE_F_ONE_B, *plain), (*pairs, *beside))


def tensor_set() -> Set:
    ours = shardwise("shardwise tensor", "tensor=2 threads=1")
    peers = (DTENSOR, DTENSOR_VOCABULARY, MEGATRON, AXONN, *_as_written(DTENSOR))
    return Set("tensor", (ours, *peers), _against(ours.name, peers))


def chosen_set(fastest: tuple[Contender, ...]) -> Set:
    """shardwise's own plan, as users call it, beside the fastest peers of this run: given shardwise's allocator settings, and as users
    write them."""
    same = shardwise(CHOSEN_FLOAT32, settings="own", constraints=["precision=float32"])
    own = shardwise(CHOSEN, settings="own", precision="own")
    tuned = (SINGLE, *fastest)
    plain = _as_written(*tuned[:2])
    lower = (SINGLE_BF16, DDP_BF16)
    pairs = _against(same.name, (*tuned, *plain)) + _against(own.name, (*tuned, *plain, *lower))
    return Set("chosen", (same, own, *tuned, *plain, *lower), pairs)
