"""On a machine with a GPU: one and several ranks on one card equal the serial run. Elsewhere every test is skipped with the reason."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.run.recovery import snapshots
from shardwise.run.recovery.fingerprints import fingerprint_of
from shardwise.run.recovery.snapshots import StateCopier
from shardwise.world import private
from tests.support.one_verification import verified

# Counting devices, unlike asking for CUDA, leaves this process free to fork.
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU; run it on a machine with an NVIDIA GPU")


LAYOUTS = ["data=1", "data=2", "data=2 zero=1", "tensor=2", "pipeline=2 microbatches=2", "context=2 attention=ring"]
LAYOUTS += ["tensor=2 sequence_parallel=on"]  # linear layers keep pieces of what they gather


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_on_one_card_equal_the_serial_run(layout: str) -> None:
    found = verified("gpt-tiny", layout, 4, "cuda")
    assert found["ok"], found["text"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("few", [4, 2])
def test_the_fused_kernel_tells_what_rows_sum_to_and_takes_the_sum_over_more_keys(causal: bool, few: int) -> None:
    """What ring attention asks of torch's flash attention: the logarithm of each row's sum, and gradients from one of a longer row."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 128, 64, device="cuda", generator=generator).bfloat16() for heads in (4, few, few, 4))
    assert private.has_fused_attention(q, masked=False)
    out, total = private.fused_attention(q, k, v, None, causal, 0.2)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(4 // few, 1) for x in wide[1:]]
    scores = wide[0] @ repeated[0].mT * 0.2
    if causal:
        scores = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    assert torch.allclose(total.double(), scores.logsumexp(-1), atol=1e-3)
    assert torch.allclose(out.double(), scores.softmax(-1) @ repeated[1], atol=2e-2)
    # As if other keys had weights of the same sum, and values of nothing.
    weights = (scores - (total.double().unsqueeze(-1) + math.log(2))).exp()
    want = torch.autograd.grad(weights @ repeated[1], wide, grad.double(), retain_graph=True)
    of_scores = weights * (grad.double() @ repeated[1].mT - (grad.double() * (out.double() / 2)).sum(-1, keepdim=True))
    found = private.fused_attention_backward(grad, (q, k, v), out / 2, total + math.log(2), None, causal, 0.2)
    assert torch.allclose(found[0].double(), of_scores.detach() @ repeated[0].detach() * 0.2, atol=5e-2)
    assert torch.allclose(found[2].double(), want[2], atol=5e-2)


def test_state_is_copied_on_a_stream_of_its_own_with_its_digest() -> None:
    sources = [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in (((64, 3), torch.float32), ((7,), torch.bfloat16))]
    copier, memory = StateCopier(torch.device("cuda")), torch.zeros(4096, dtype=torch.uint8)
    copier.pin_memory(memory)
    buffers = [torch.empty_like(x, device="cpu") for x in sources]
    entries = [snapshots.TensorBuffer(i, 0, buffer, x) for i, (buffer, x) in enumerate(zip(buffers, sources, strict=True))]
    sums = copier.copy_state(entries)
    for x, buffer, words_sum in zip(sources, buffers, sums, strict=True):
        assert torch.equal(x.cpu(), buffer)
        assert words_sum is None or words_sum == int(fingerprint_of(buffer))
    assert sums[0] is not None
