"""What crosses between meshes: each element once, and every receiver has its block in the end. Against enumeration of elements."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import Shard
from shardwise.plan.ir.resharding import Box, ReshardEndpoint, Resharding, plan_resharding
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import layout_microbatch_sizes

Element = tuple[int, ...]


def elements(box: Box) -> set[Element]:
    return set(product(*(range(start, stop) for start, stop in box)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], ReshardEndpoint, ReshardEndpoint]:
    """A tensor of up to three dimensions between two arrangements of 1 to 8 ranks a stage, as many in both or not."""
    both = (draw(st.sampled_from([1, 2, 4, 6, 8])), draw(st.sampled_from([1, 2, 3, 4, 6, 8])))
    begins = (0, both[0], sum(both)) if both[0] != both[1] else ()
    shape = tuple(draw(st.lists(st.sampled_from([8, 12, 24]), min_size=1, max_size=3)))

    def side(stage: int) -> ReshardEndpoint:
        ranks = both[stage]
        data = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
        mesh = Mesh((("pipeline", 2), ("data", data), ("tensor", ranks // data)), begins)
        dims = [None, *range(len(shape))]
        forms = {}
        for axis in ("data", "tensor"):
            dim = draw(st.sampled_from(dims))
            if dim is not None and shape[dim] % (mesh.size("data") * mesh.size("tensor")) == 0:
                forms[axis] = Shard(dim)
        return ReshardEndpoint(mesh, stage, forms)

    return shape, side(0), side(1)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_each_element_crosses_once_and_all_arrive(case: tuple[tuple[int, ...], ReshardEndpoint, ReshardEndpoint]) -> None:
    shape, source, target = case
    found = plan_resharding(shape, source, target)
    divides = all(_divides(target, shape, rank) for rank in target.ranks)
    if divides:
        assert found.num_elements == prod(shape)
    got: dict[int, set[Element]] = {rank: set() for rank in target.ranks}
    for piece in found.transfers:
        assert elements(piece.box) <= elements(source.box(piece.sender, shape)), "nobody sends what it does not have"
        mine = elements(piece.box)
        assert not mine & got[piece.receiver], "nothing comes twice"
        got[piece.receiver] |= mine
    for rank in target.ranks:
        assert got[rank] == elements(found.received_boxes[rank])
        joined = set().union(*(got[peer] for peer in found.peers.get(rank, (rank,))))
        assert joined == elements(target.box(rank, shape))
        peers = found.peers.get(rank, (rank,))
        starts = [found.received_boxes[peer][found.gather_dims.get(rank, 0)][0] for peer in peers]
        assert starts == sorted(starts), "gathered in the order of the ranks"


def _divides(side: ReshardEndpoint, shape: tuple[int, ...], rank: int) -> bool:
    """Whether the block of `rank` divides among the ranks that have the same."""
    box = side.box(rank, shape)
    alike = sum(side.box(other, shape) == box for other in side.ranks)
    return any((stop - start) % alike == 0 for start, stop in box)


def test_sends_are_shared_among_replicas() -> None:
    """Four ranks that hold the same send a quarter each."""
    mesh = Mesh((("pipeline", 2), ("data", 1), ("tensor", 4)))
    other = Mesh((("pipeline", 2), ("data", 4), ("tensor", 1)))
    found = plan_resharding((8, 6), ReshardEndpoint(mesh, 0, {}), ReshardEndpoint(other, 1, {"data": Shard(0)}))
    assert sorted(p.sender for p in found.transfers) == [0, 1, 2, 3]
    assert all(p.box[0][1] - p.box[0][0] == 2 for p in found.transfers)


def test_whole_blocks_to_every_replica_cross_as_often_as_there_are_replicas() -> None:
    """The broken twin of the gather: what does not divide goes whole to each, and the count says so."""
    mesh = Mesh((("pipeline", 2), ("data", 1), ("tensor", 4)))
    found: Resharding = plan_resharding((3, 5), ReshardEndpoint(mesh, 0, {}), ReshardEndpoint(mesh, 1, {}))
    assert found.num_elements == 4 * 15
    assert not found.peers


def test_layouts_of_each_stage() -> None:
    layout = Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=2")
    assert str(layout) == "data=4 tensor=1 pipeline=2 microbatches=2 inner=4x1/2x2"
    assert Layout.parse(str(layout)) == layout
    assert (layout.num_ranks, layout.replicas) == (8, 4)
    assert [str(layout.of_stage(s)) for s in (0, 1)] == [
        "data=4 tensor=1 pipeline=2 microbatches=2",
        "data=2 tensor=2 pipeline=2 microbatches=2",
    ]
    assert layout.mesh_of(5).coordinates(5) == {"pipeline": 1, "data": 0, "tensor": 1}
    assert layout.mesh_of(5).group(5, "data") == (5, 7)
    assert str(Layout.parse("pipeline=2 inner=2x2/2x2")) == "data=2 tensor=2 pipeline=2"


def test_stages_of_unlike_numbers_of_ranks() -> None:
    """Ranks count through the stages; each is a mesh of its own, whose every rank it finds again by its coordinates."""
    layout = Layout.parse("pipeline=3 inner=2x2/1x2/3x1 microbatches=2")
    assert str(layout) == "data=2 tensor=2 pipeline=3 microbatches=2 inner=2x2/1x2/3x1"
    assert Layout.parse(str(layout)) == layout
    assert (layout.num_ranks, layout.replicas, layout.begins) == (9, 3, (0, 4, 6, 9))
    assert [layout.stage_rank_range(place) for place in range(3)] == [(0, 4), (4, 6), (6, 9)]
    found = [layout.mesh_of(rank).coordinates(rank) for rank in range(9)]
    want = [(0, d, t) for d in range(2) for t in range(2)] + [(1, 0, t) for t in range(2)] + [(2, d, 0) for d in range(3)]
    assert [tuple(at[axis] for axis in ("pipeline", "data", "tensor")) for at in found] == want
    for rank, at in enumerate(found):
        mesh = layout.mesh_of(rank)
        assert mesh.num_ranks == 9
        assert mesh.rank_at(at) == rank
        assert mesh.stage_ranks(at["pipeline"]) == mesh.group(rank, *mesh.stage_axes)
    assert [layout.of_stage(s).num_ranks for s in range(3)] == [9] * 3
    with pytest.raises(LayoutError, match="rank 3 is of stage 0, which has more ranks than"):
        layout.of_stage(1).mesh.coordinates(3)
    shared = Layout.parse("pipeline=2 inner=2x1/1x1 spatial=2x2")
    assert (shared.num_ranks, shared.begins) == (12, (0, 8, 12))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pipeline=2 inner=4x1/2", "'2' is not data x tensor of a stage"),
        ("pipeline=2 inner=4x1/2x3 schedule=zb-v microbatches=2", "schedule=zb-v with stages .* use schedule=sequential or"),
        ("pipeline=2 inner=2x1/1x1 staleness=1", "staleness=1 with stages .* use staleness=0, or leave inner out"),
        ("pipeline=2 inner=2x1/1x1 servers=1", "servers=1 with stages .* use servers=0, or leave inner out"),
        ("pipeline=3 inner=4x1/2x2", "arranges 2 stages, and pipeline=3"),
        ("data=2 pipeline=2 inner=4x1/2x2", "begins with 4x1, and data=2 tensor=1; leave those out"),
        ("data=4 pipeline=2 inner=4x1/2x2 shares=3/2/2/1", "shares=3/2/2/1 with stages that are arranged differently .* use shares="),
        ("pipeline=2 inner=4x1/2x2 microbatches=2 schedule=zb-v", "schedule=zb-v with stages .* use schedule=sequential or"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(text)


def test_every_replica_of_every_stage_has_a_sample() -> None:
    layout = Layout.parse("pipeline=2 inner=4x1/2x2")
    assert layout_microbatch_sizes(6, layout) == (6,)
    with pytest.raises(Infeasible, match="a batch of 3 samples has 0 for each of data=4, which are too few"):
        layout_microbatch_sizes(3, layout)
