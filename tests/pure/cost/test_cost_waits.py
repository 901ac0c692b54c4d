"""What ranks of processors wait for one another inside layers, by what the probe measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.errors import ConfigError
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt


def test_ranks_that_meet_inside_layers_wait_and_others_do_not() -> None:
    """A tenth of the compute where tensor ranks or gathered weights meet; nothing where only gradients are summed, or on one rank."""
    cores = Cluster.parse("1xcpu-2")
    speed = cores.speed(2)
    graph = gpt(4)
    for words, part in (("tensor=2", 0.1), ("data=2 zero=3", 0.1), ("data=2 zero=1", 0.0), ("data=1", 0.0)):
        found = []
        for share in (0.0, 0.1):
            known = (replace(speed, waits=share), replace(cores.speed(1), waits=0.0))
            pricer = Pricer(graph, replace(cores, speeds=known), 8)
            (cost,) = pricer.stages(Layout.parse(words + " threads=1"))
            found.append(cost)
        bare, waiting = found
        assert waiting.compute == bare.compute
        more = waiting.collectives.total - bare.collectives.total
        assert more == pytest.approx(part * bare.compute.total, abs=1e-12)


def test_a_share_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"waits = -0\.1"):
        replace(Cluster.parse("1xcpu-2").speed(1), waits=-0.1)
