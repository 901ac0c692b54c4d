"""One call of an operator: shardwise's rule held against brute force.

In: a call from `truth`. Out: a `Finding`: which cuts the rule offers, which of them are wrong, and which right ones it does not offer.

A cut that the rule offers is wrong if the operator as shardwise lowers it (kernels and collectives included) differs from the whole in
values or
gradients, or, where it needs no kernel, if torch's own validation refuses it. Right cuts are enumerated: every way to hold each input whole
or in pieces of one dimension, and each output whole, in pieces or as summands. Inputs that are summands are not enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.verify.rules import truth
from bench.verify.rules.truth import Call
from shardwise.ops import Rule, record_of, rule_of
from shardwise.plan.ir.placement import D, Placement
from tests.support import rule_cases as pieces

MOST_INPUTS = 4  # of more, as of a list of tensors, cuts are not enumerated
RANKS = truth.RANKS

Cut = tuple[tuple[str, ...], tuple[str, ...]]  # a word for each input and each output: R, S0, S1, ..., P


@dataclass(frozen=True, slots=True)
class Finding:
    """`lacks`: right cuts that the rule does not offer. `ruled`: whether there is a rule at all."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    ruled: bool
    offers: int
    wrong: tuple[str, ...] = ()
    lacks: tuple[Cut, ...] = ()


def held_against_truth(call: Call, enumerate_cuts: bool = True) -> Finding | None:
    """None for a call that says nothing: writes in place, generators, outputs that are no dense tensors or differ from call to call."""
    case = _case(call)
    if case is None:
        return None
    target, shapes = call[0], tuple(tuple(t.shape) for t in case.tensors.values())
    try:
        rule = rule_of(case.op, case.graph.tensors)
    except Exception as error:  # there may be no rule, but to ask for one is no fault
        return Finding(target, shapes, True, 0, (f"{target} {shapes}: its rule raises {type(error).__name__}: {error}",))
    choices = pieces.choices(case, RANKS) if rule is not None else []
    wrong = list(pieces.check(case, (RANKS,))) if choices else []
    offered: list[tuple[tuple[str | None, ...], tuple[str, ...]]] = []
    for choice in choices:
        needs = dict(zip(case.op.inputs, choice.input_placements, strict=True))
        inputs, outputs = tuple(_word(needs.get(name)) for name in case.tensors), tuple(str(form) for form in choice.output_placements)
        offered.append((inputs, outputs))
        if rule is not None and choice.label not in rule.kernels and not _adds_a_bias(case, rule, choice.label):
            said = truth.refuted(call, _in_order(call, case, [word or "R" for word in inputs]), outputs)
            if said:
                wrong.append(f"{target} {shapes} cut by {choice.label}: {said}")
    lacks = [cut for cut in _right(call, case) if not any(_covers(cut, offer) for offer in offered)] if enumerate_cuts else []
    return Finding(target, shapes, rule is not None, len(choices), tuple(wrong), tuple(lacks))


def _word(form: Placement | None) -> str | None:
    return None if form is None else "R" if form is D else str(form)


def _covers(cut: Cut, offer: tuple[tuple[str | None, ...], tuple[str, ...]]) -> bool:
    """Whether the rule offers it. An input whose values are not read (None) may lie in any way."""
    return cut[1] == offer[1] and all(asked in (None, word) for word, asked in zip(cut[0], offer[0], strict=True))


def _adds_a_bias(case: pieces.Case, rule: Rule, label: str) -> bool:
    """Whether summands come with a bias, which shardwise adds once: the operator on pieces would add it on every rank."""
    return record_of(case.op).product.bias is not None and all(label not in labels for labels in rule.outputs)


def _in_order(call: Call, case: pieces.Case, words: Sequence[str]) -> list[str]:
    """A word for each tensor argument; one that stands twice among them is one value of the graph."""
    of = dict(zip(case.tensors, words, strict=True))
    return [next(of[name] for name, t in case.tensors.items() if t is tensor) for tensor in truth.tensors_of(call)]


def _right(call: Call, case: pieces.Case) -> list[Cut]:
    """Every right cut over two ranks, by trying: what an operator makes of pieces, and how that can be put together."""
    tensors = list(case.tensors.values())
    if len(tensors) > MOST_INPUTS:
        return []
    whole = truth.outputs_of(call)
    ways = [["R", *(f"S{d}" for d, n in enumerate(t.shape) if n % RANKS == 0)] for t in tensors]
    found: list[Cut] = []
    for words in product(*ways):
        if set(words) == {"R"}:
            continue
        parts = [{id(t): _part(t, word, rank) for t, word in zip(tensors, words, strict=True)} for rank in range(RANKS)]
        try:
            made = [truth.outputs_of(truth.with_tensors(call, part)) for part in parts]
        except (RuntimeError, IndexError, ValueError):
            continue
        if any(len(m) != len(whole) for m in made):
            continue
        together = [_together(*outs) for outs in zip(whole, *made, strict=True)]
        inputs = _in_order(call, case, words)
        found += [(words, outputs) for outputs in product(*together) if not truth.wrong(call, inputs, outputs)]
    return found


def _part(tensor: Tensor, word: str, rank: int) -> Tensor:
    return tensor if word == "R" else tensor.chunk(RANKS, int(word[1:]))[rank].contiguous()


def _together(whole: Tensor, *made: Tensor) -> list[str]:
    """The placements in which what ranks made is the whole."""

    def same(x: Tensor) -> bool:
        return x.shape == whole.shape and torch.allclose(x, whole, atol=1e-9, rtol=1e-9, equal_nan=True)

    words = ["R"] if all(map(same, made)) else []
    if whole.dtype is not torch.bool and all(m.shape == whole.shape for m in made) and same(torch.stack(made).sum(0, dtype=whole.dtype)):
        words.append("P")
    for dim, size in enumerate(whole.shape):
        if all(m.dim() == whole.dim() and m.shape[dim] * RANKS == size for m in made):
            joined = [*whole.shape]
            joined[dim] = size // RANKS
            if all(list(m.shape) == joined for m in made) and same(torch.cat(made, dim)):
                words.append(f"S{dim}")
    return words


def _case(call: Call) -> pieces.Case | None:
    target, args, kwargs = call
    if truth.writes_operand(call):
        return None
    if not all(map(_known, (*args, *kwargs.values()))) or not truth.tensors_of(call):
        return None
    if any(0 in t.shape for t in truth.tensors_of(call)):
        return None
    try:
        case = pieces.case(target, *args, **kwargs)
        once, again = truth.outputs_of(call), truth.outputs_of(call)
    except Exception:  # what the operator makes is no tensor, or its arguments are none that a graph holds
        return None
    if any(y.layout is not torch.strided or y.dtype is torch.uint64 for y in once):
        return None
    if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(once, again, strict=True)):
        return None
    return replace(case, constants=frozenset(name for name, t in case.tensors.items() if not _differentiable(call, t)))


def _differentiable(call: Call, tensor: Tensor) -> bool:
    """Whether torch makes a gradient for this argument."""
    if not tensor.is_floating_point():
        return False
    mine = {id(t): t.detach().clone() for t in truth.tensors_of(call)}
    mine[id(tensor)].requires_grad_()
    try:
        outs = [y for y in truth.outputs_of(truth.with_tensors(call, mine)) if y.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])
    except RuntimeError:
        return False
    return bool(outs)


def _known(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return all(map(_known, arg)) and not any(isinstance(item, list | tuple) for item in arg)
    return arg is None or isinstance(arg, Tensor | torch.dtype | bool | int | float | str)
