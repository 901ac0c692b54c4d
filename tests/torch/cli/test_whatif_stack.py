"""`whatif stack=NAME`: a cluster priced with another efficiency set."""

from __future__ import annotations

import pytest

from shardwise.cli.changes import _with_efficiency_set, parse_changes
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import stack_of
from shardwise.cost.devices import devices_of
from shardwise.errors import UsageError
from shardwise.plan.layout import Layout


def test_the_word_names_a_set_of_gpus() -> None:
    assert [str(change) for change in parse_changes(["stack=serial"])] == ["stack=serial"]
    assert _with_efficiency_set(Cluster.parse("dgx-h100"), "eager").stack == "eager"
    with pytest.raises(UsageError, match="names an efficiency set of GPUs"):
        _with_efficiency_set(Cluster.parse("cpu-2"), "eager")


@pytest.mark.parametrize("stack", ["", "@serial"])
def test_bfloat16_is_autocast_over_float32_weights_with_and_without_overlap(stack: str) -> None:
    devices = devices_of(Cluster.parse(f"dgx-a100-80{stack}"))
    assert [devices.widths(Layout(precision=name)).weight for name in ("bfloat16", "bfloat16-mixed")] == [4.0, 2.0]
    foreign = devices_of(Cluster.parse("dgx-a100-80@a100-megatron"))
    assert foreign.widths(Layout(precision="bfloat16")).weight == 2.0  # what that software calls so


def test_sets_say_what_their_software_does() -> None:
    device = Cluster.parse("dgx-a100-80").device
    assert not stack_of(device, "a100-deepspeed-bf16").scatters_sends
    assert (stack_of(device, "serial").overlap, stack_of(device, "serial").zero_overlap) == (0, 0)
