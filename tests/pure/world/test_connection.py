"""Names by which ranks meet: one for each connection, whatever it is for, and the same on all of its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UsageError
from shardwise.world.comm.connection import INTRA_HOST, Connection, SideConnection

ranks = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple)
aparts = st.builds(SideConnection, st.sampled_from((INTRA_HOST, "rail", "programs")), st.integers(1, 12), ranks)
lanes = st.builds(Connection, st.lists(aparts, max_size=3).map(tuple), st.none() | st.tuples(st.integers(0, 12), st.integers(0, 12)))


@given(lanes, lanes)
def test_two_lanes_never_meet(one: Connection, other: Connection) -> None:
    assert (str(one) == str(other)) == (one == other)


@given(lanes, aparts)
def test_what_is_apart_keeps_its_own_name_behind_the_outer_one(lane: Connection, outer: SideConnection) -> None:
    assert str(lane.within(outer)) == str(outer) + str(lane)
    assert lane.within(outer).is_intra_host == (outer.name == INTRA_HOST)
    assert not lane.within(outer).is_primary


def test_only_the_group_s_own_connection_has_no_name() -> None:
    assert Connection().is_primary
    assert str(Connection()) == ""
    assert not Connection(direction=(0, 1)).is_primary
    assert not Connection(direction=(0, 1)).is_intra_host


@pytest.mark.parametrize("name", ["", "box1", "box of 0,1/x"])
def test_a_name_that_could_be_read_as_another_s_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is a word, not"):
        SideConnection(name, 1, (0, 1))
