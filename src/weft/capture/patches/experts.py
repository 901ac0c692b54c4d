"""Mixtures of experts of `transformers` (`ExpertsInterface`).

Torch: grouped matmuls have no sharding rule, and a loop over the experts with tokens is data-dependent.
Wanted: `weft.capture.experts` for every configured implementation: all compute the same. Not the library's own expert parallelism.
Test: tests/torch/model/test_experts.py::test_experts_of_the_library_are_captured_with_the_work_of_those_that_are_chosen
Until: not known
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft.capture.experts import experts_forward
from weft.capture.fakes import put
from weft.capture.patches.patch import Patch, Trace

_MODULE = "transformers.integrations.moe"


def _chosen(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    def forward(experts: Any, *args: Any, **kwargs: Any) -> Any:
        return (default if getattr(experts, "_is_expert_parallel", False) else experts_forward)(experts, *args, **kwargs)

    return forward


@contextmanager
def _replaced(trace: Trace) -> Iterator[None]:
    interface = getattr(sys.modules.get(_MODULE), "ExpertsInterface", None)
    if interface is None:
        yield
        return
    with put(interface, "get_interface", _chosen):
        yield


PATCH = Patch(while_called=_replaced)
