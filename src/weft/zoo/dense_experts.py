"""Mixtures of experts of Hugging Face models, computed so that every operator can be split and every dtype works.

In: tokens ND, the experts that each is sent to, and their weights. Out: ND. Every expert computes every token and a mask selects, as in
`zoo/moe.py`: E/top times the work of the library's grouped products, which have no float64 and no rule. A configuration that says
`"experts_implementation": "grouped_mm"` keeps those.

Shape letters: N tokens, D model, E experts, T experts of a token, F feed-forward.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

NAME = "weft_dense"


def register() -> str | None:
    """Make the implementation known to `transformers` and return its name there; None where it is too old to take one."""
    try:
        library = importlib.import_module("transformers.integrations.moe")
        library.ALL_EXPERTS_FUNCTIONS.register(NAME, dense_experts)
    except (ImportError, AttributeError):
        return None
    return NAME


def dense_experts(experts: Any, x_ND: Tensor, which_NT: Tensor, weight_NT: Tensor) -> Tensor:
    """The forward pass of a module of stacked experts; `experts` has what the library's own implementations read."""
    weight_NE = torch.zeros_like(weight_NT[:, :1]).expand(-1, experts.num_experts).scatter(1, which_NT, weight_NT)
    up_EDF, up_bias = (experts.gate_up_proj, "gate_up_proj_bias") if experts.has_gate else (experts.up_proj, "up_proj_bias")
    inner_ENF = _product(x_ND.expand(experts.num_experts, -1, -1), up_EDF, experts, up_bias)
    inner_ENF = experts._apply_gate(inner_ENF) if experts.has_gate else experts.act_fn(inner_ENF)
    y_END = _product(inner_ENF, experts.down_proj, experts, "down_proj_bias")
    if getattr(experts, "has_post_expert_norm", False):
        y_END = experts.post_expert_norm(y_END)
    return (y_END * weight_NE.t().unsqueeze(-1)).sum(0).to(x_ND.dtype)


def _product(x: Tensor, weight: Tensor, experts: Any, bias: str) -> Tensor:
    y = torch.bmm(x, weight if experts.is_transposed else weight.transpose(1, 2))
    return y + getattr(experts, bias).unsqueeze(1) if experts.has_bias else y
