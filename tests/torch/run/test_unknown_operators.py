"""Operators without an exact form in proofs: random functions of their arguments, and gradients derived from the forward operator.

Each is held against the real operator: what a slice of it does alone, and whole numbers, which float64 computes exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.run.prove import ctc_rules, operator_trials, rank_threads
from shardwise.run.prove import prove as _rules  # noqa: F401 - registers the rules
from shardwise.run.prove.field_tensor import NotProvable, have_equal_numbers, random_numbers
from shardwise.run.prove.proof import Proof
from tests.support.whole_numbers import check_on_whole_numbers


@torch.library.custom_op("tests::softmax_of_rows", mutates_args=())
def softmax_of_rows(x: Tensor, lengths: Tensor) -> Tensor:
    """A function of each row and its length."""
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    return torch.where(inside, x, -torch.inf).softmax(1)


@torch.library.custom_op("tests::tanh_of_rows", mutates_args=())
def tanh_of_rows(x: Tensor) -> Tensor:
    """A function of each row that has a gradient."""
    return x.softmax(1).tanh()


@torch.library.custom_op("tests::tanh_of_rows_backward", mutates_args=())
def tanh_of_rows_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Its gradient."""
    share = x.softmax(1)
    of_share = grad * (1 - share.tanh() ** 2)
    return share * (of_share - (share * of_share).sum(1, True))


tanh_of_rows.register_fake(torch.empty_like)
tanh_of_rows_backward.register_fake(lambda grad, x: torch.empty_like(x))
tanh_of_rows.register_autograd(
    lambda ctx, grad: tanh_of_rows_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("tests::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """A function that mixes rows."""
    return x.tanh() - x.tanh().mean(0)


@torch.library.custom_op("tests::share", mutates_args=())
def share(x: Tensor) -> Tensor:
    """A function of each element and of the number of rows."""
    return x.tanh() / x.shape[0]


def test_a_slice_is_what_it_is_among_others() -> None:
    """So that ranks with some samples have the values of the serial run; twins: what a sample's value depends on beside the sample."""
    x, lengths = random_numbers((4, 3), "x", 0), torch.tensor([3, 1, 2, 2])
    whole = torch.ops.tests.softmax_of_rows(x, lengths)
    for start, stop in ((0, 2), (2, 4), (3, 4)):
        assert have_equal_numbers(whole[start:stop], torch.ops.tests.softmax_of_rows(x[start:stop], lengths[start:stop]))
    assert not have_equal_numbers(whole[:2], torch.ops.tests.softmax_of_rows(x[:2], lengths[2:]))
    assert not have_equal_numbers(whole, torch.ops.tests.softmax_of_rows(x * (1 + 1e-15), lengths))
    for mixes in (torch.ops.tests.centre, torch.ops.tests.share):
        assert not have_equal_numbers(mixes(x)[:2], mixes(x[:2]))
        assert have_equal_numbers(mixes(x)[:, :2], mixes(x[:, :2]))
    assert have_equal_numbers(torch.lgamma(x).t()[1:, :1].contiguous(), torch.lgamma(x.t()[1:, :1]))


def test_trials_find_what_belongs_together() -> None:
    def find(operator: Any, *args: Any) -> operator_trials.ResultStructure:
        call, _tensors = operator_trials.describe_call(operator, args, {})
        found = operator_trials.find_structures(call)[0]
        assert found is not None
        return found

    x = torch.randn(3, 2, 4)
    batched = find(torch.ops.aten._cdist_backward.default, torch.randn(3, 2, 5), x, torch.randn(3, 5, 4), 2.0, torch.rand(3, 2, 5))
    assert [dim.of_arguments for dim in batched.dims] == [(0, 0, 0, 0), (1, 1, None, 1), (None, 2, 2, None)]
    assert batched.linear_in == 0
    assert [dim.of_result for dim in find(torch.ops.aten.lgamma.default, x).dims] == [0, 1, 2]
    inverse = find(torch.ops.aten.linalg_inv_ex.default, torch.randn(3, 4, 4))
    assert [dim.of_arguments for dim in inverse.dims] == [(0,)]
    assert inverse.linear_in is None
    assert find(torch.ops.aten._fft_c2c.default, x + 0j, [2], 0, True).linear_in == 0


@pytest.mark.parametrize("call", [lambda x: torch.ops.aten.binomial(x, x), lambda x: x.resize_(3)])
def test_what_no_function_stands_for_is_refused(call: Callable[[Any], Any]) -> None:
    """Draws and writes."""
    with pytest.raises(NotProvable):
        call(random_numbers((3, 2), "x", 0))


def test_gradients_are_linear_in_what_arrives() -> None:
    """As sums of gradients over microbatches and ranks need; twin: one part twice."""
    x, y = random_numbers((2, 3, 4), "x", 0), random_numbers((2, 5, 4), "y", 0)
    gradients = [random_numbers((2, 3, 5), name, 0) for name in "gh"]
    distances = torch.ops.aten._cdist_forward(x, y, 2.0, None)
    first, second, both = (torch.ops.aten._cdist_backward(g, x, y, 2.0, distances) for g in (*gradients, gradients[0] + gradients[1]))
    assert have_equal_numbers(first + second, both)
    assert not have_equal_numbers(first + first, both)


WHOLE: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "hardshrink": ((3, 4), lambda x: functional.hardshrink(x, 3.0)),
    "softshrink": ((3, 4), lambda x: functional.softshrink(x, 3.0)),
    "margin between classes": ((3, 4), lambda x: functional.multi_margin_loss(x, torch.tensor([0, 2, 1]))),
    "nearest, exact": ((1, 2, 3, 4), lambda x: functional.interpolate(x, scale_factor=2, mode="nearest-exact")),
    "adaptive largest": ((2, 2, 5, 4), lambda x: functional.adaptive_max_pool2d(x, 2)),
    "product": ((3, 4), lambda x: x.prod(-1)),
    "products": ((3, 4), lambda x: x.cumprod(-1)),
    "median": ((3, 4), lambda x: x.median(-1)[0]),
    "third": ((3, 4), lambda x: x.kthvalue(3, -1)[0]),
    "largest so far": ((3, 4), lambda x: x.cummax(-1)[0]),
    "sum of sizes": ((3, 4), lambda x: x.norm(1, -1)),
    "largest size": ((3, 4), lambda x: x.norm(torch.inf, -1)),
    "Fourier": ((2, 4, 4), lambda x: torch.fft.rfft2(x).real * 2 + torch.fft.fft2(x).imag[..., :3]),
    "Fourier and back": ((3, 4), lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=4, norm="forward")),
    "matrix times vector": ((2, 4, 4), lambda x: x @ x[0, 0]),
    "bound at infinity": ((3, 4), lambda x: x.clamp(0.0, torch.inf)),
    "infinity nowhere": ((3, 4), lambda x: torch.where(x < 1000, x, torch.inf)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_operators_equal_torch_on_whole_numbers(name: str) -> None:
    check_on_whole_numbers(*WHOLE[name])


class Speech(nn.Module):
    """Convolutions with normalised weights, and the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3, padding=1), dim=2)
        self.up, self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 5)

    def forward(self, frames: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        x = functional.gelu(self.up(self.embed(frames).transpose(1, 2)))
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, labels, lengths, label_lengths, reduction="sum") / len(frames)


def speech_batch() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 5, (4, 3), generator=generator)
    return torch.randn(4, 4, 8, generator=generator), labels, torch.tensor([8, 7, 6, 8]), torch.tensor([3, 2, 3, 1])


def prove_speech(layouts: list[str], **options: Any) -> tuple[Proof, ...]:
    proofs = shardwise.prove(Speech, layouts, speech_batch(), max_error_probability=0.1, **options)
    assert isinstance(proofs, tuple)
    return proofs


def test_speech_is_proven_along_every_axis() -> None:
    for proof in prove_speech(["data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2", "data=2 microbatches=2"]):
        assert proof.ok, proof


def test_path_sums_are_torchs_losses() -> None:
    """In float64: losses, and gradients by scores; twin: labels of another sample."""
    _, labels, lengths, label_lengths = speech_batch()
    scores = torch.randn(8, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = functional.ctc_loss(scores.log_softmax(-1), labels, lengths, label_lengths, reduction="none")
    losses = ctc_rules.losses_of_sums(ctc_rules.sum_paths(scores.log_softmax(-1), labels, lengths, label_lengths, 0), False)
    gradients = [torch.autograd.grad(x.sum(), scores)[0] for x in (expected, losses)]
    assert torch.allclose(losses, expected, rtol=1e-12)
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)
    flat = torch.cat([row[:n] for row, n in zip(labels, label_lengths.tolist(), strict=True)])
    rows = ctc_rules.targets_in_rows(flat, label_lengths)
    own = [ctc_rules.sum_paths(scores.log_softmax(-1), x, lengths, label_lengths, 0) for x in (labels, rows)]
    assert torch.allclose(*own, rtol=1e-14)
    wrong = ctc_rules.losses_of_sums(ctc_rules.sum_paths(scores.log_softmax(-1), labels.flip(0), lengths, label_lengths, 0), False)
    assert not torch.allclose(wrong, expected, rtol=1e-3)


def test_a_sample_without_a_path_is_told_or_zero() -> None:
    scores = random_numbers((2, 1, 4), "scores", 0).log_softmax(-1)
    call = (scores, torch.tensor([[1, 2, 3]]), torch.tensor([2]), torch.tensor([3]), 0)
    with pytest.raises(NotProvable, match="infinite"):
        torch.ops.shardwise.ctc_loss(*call, False)
    loss: Any = torch.ops.shardwise.ctc_loss(*call, True)
    assert not loss.a.any()
    assert not torch.ops.shardwise.ctc_loss_backward(loss, *call, True).a.any()


@pytest.mark.parametrize("wrong", ["sum", "labels"])
def test_what_is_wrong_in_speech_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is off by rounding; labels of another sample on one rank."""
    name, module = ("add_up", rank_threads) if wrong == "sum" else ("targets_in_rows", ctc_rules)
    original, calls = getattr(module, name), list[int]()

    def off_once(first: Any, *rest: Any) -> Any:
        if wrong == "sum":
            return original(first) * (1 + 1e-15) if first[0].is_floating_point() else original(first)
        calls.append(1)
        return original(first, *rest).flip(0) if len(calls) == 1 else original(first, *rest)

    monkeypatch.setattr(module, name, off_once)
    (proof,) = prove_speech(["data=2"])
    assert not proof.ok


class Rows(nn.Module):
    """A layer, and an operator of the user's that torch composes of nothing."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.up, self.down, self.operator = nn.Linear(6, 4), nn.Linear(4, 3), operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operator(self.up(x))).square().mean()


@pytest.mark.parametrize("operator", [torch.ops.tests.tanh_of_rows, torch.special.i0e, torch.lgamma])
def test_operators_of_rows_are_proven(operator: Any) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    proofs = shardwise.prove(
        lambda: Rows(operator), ["data=2 zero=1", "tensor=2", "pipeline=2 microbatches=2"], batch, max_error_probability=0.1
    )
    assert isinstance(proofs, tuple)
    for proof in proofs:
        assert proof.ok, proof
        assert proof.unknown_operators
