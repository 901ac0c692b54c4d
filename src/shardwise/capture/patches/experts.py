"""Mixtures of experts of `transformers` (`ExpertsInterface`).

Torch: grouped matmuls have no sharding rule, and a loop over the experts with tokens is data-dependent.
Wanted: `shardwise.capture.experts` for every configured implementation: all compute the same. Not the library's own expert parallelism.
Test: tests/torch/model/test_experts.py::test_experts_of_the_library_are_captured_with_the_work_of_those_that_are_chosen
Until: not known
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.capture.experts import experts_forward
from shardwise.capture.fakes import patched_attribute
from shardwise.capture.patches.patch import Patch, Trace

_MODULE = "transformers.integrations.moe"


def _select_forward(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    def forward(experts: Any, *args: Any, **kwargs: Any) -> Any:
        return (default if getattr(experts, "_is_expert_parallel", False) else experts_forward)(experts, *args, **kwargs)

    return forward


@contextmanager
def _replacing_implementation(trace: Trace) -> Iterator[None]:
    interface = getattr(sys.modules.get(_MODULE), "ExpertsInterface", None)
    if interface is None:
        yield
        return
    with patched_attribute(interface, "get_interface", _select_forward):
        yield


PATCH = Patch(while_called=_replacing_implementation)
