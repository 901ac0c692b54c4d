"""Decoders divided over ranks: tokens equal to the serial model's, bytes of keys and values by their closed form, pages, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import Infeasible, UsageError
from shardwise.lower.kernels import paged
from shardwise.run.decode.decoder import Paging
from shardwise.world.world import World
from shardwise.zoo.gpt import generate
from tests.support.decoding_models import HEADS, KEYS, LAYERS, MODELS, VOCABULARY, WIDTH, loss

LONGEST, PAGING = 30, Paging(size=4, rows=8, sequences=3)
PAGES = 8 * 3  # of 4 tokens, for three sequences of 30


def _prompts() -> list[list[int]]:
    ids = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[:7], ids[7:10], ids[10:27], ids[27:28], ids[28:40]]  # one is longer than a step has rows


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def _serial(name: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        out = model(ids)
        return out if isinstance(out, torch.Tensor) else out.logits

    return [generate(logits_of, torch.tensor([p]), num_tokens, sequence=64, temperature=0.0)[0].tolist() for p in prompts]


def _generated(world: World, name: str, layout: str, temperature: float = 0.0) -> tuple[list[list[int]], int, str]:
    """Tokens, bytes of keys and values on this rank, and why none are kept."""
    how: dict[str, Any] = {"longest": LONGEST, "paging": PAGING, "world": world, "plan": f"{layout} precision=float64"}
    made = shardwise.decoder(MODELS[name], _batch(), loss=loss, seed=0, **how)
    return made.generate(_prompts(), 10, temperature=temperature, seed=3), made.cache_bytes, made.recomputes


@pytest.mark.parametrize(
    ("name", "layout", "num_ranks", "heads", "layers"),
    [
        ("own", "data=1", 1, HEADS, LAYERS),
        ("own", "tensor=2", 2, HEADS // 2, LAYERS),
        ("own", "tensor=2 pipeline=2 microbatches=2", 4, HEADS // 2, LAYERS // 2),
        ("gpt2", "pipeline=2 microbatches=2", 2, HEADS, LAYERS // 2),
        ("gpt2", "tensor=2", 2, HEADS // 2, LAYERS),
        ("llama", "tensor=2", 2, KEYS // 2, LAYERS),
        ("llama", "tensor=4", 4, 1, LAYERS),
        ("mixtral", "data=2 expert=2", 2, KEYS, LAYERS),
        ("mixtral", "tensor=2", 2, KEYS // 2, LAYERS),
    ],
)
def test_tokens_equal_the_serial_models(
    ranks: Callable[..., list[Any]], name: str, layout: str, num_ranks: int, heads: int, layers: int
) -> None:
    wanted = _serial(name, _prompts(), 10)
    for tokens, size, recomputes in ranks(_generated, num_ranks, name, layout):
        assert recomputes == ""
        assert tokens == wanted
        assert size == 2 * layers * PAGES * 4 * heads * WIDTH * 8  # keys and values, float64


@pytest.mark.parametrize(("name", "why"), [("windowed", "not the causal one"), ("averaging", "tokens before")])
def test_what_is_no_causal_decoder_computes_every_sequence_anew(ranks: Callable[..., list[Any]], name: str, why: str) -> None:
    wanted = _serial(name, _prompts(), 10)
    for tokens, size, recomputes in ranks(_generated, 2, name, "tensor=2"):
        assert why in recomputes
        assert tokens == wanted
        assert size == 0


def _trained(world: World, layout: str) -> tuple[list[list[int]], list[list[int]], dict[str, torch.Tensor] | None]:
    """What an engine's decoder says before and after a step, and the weights behind it."""
    engine = shardwise.parallelize(
        MODELS["own"], _batch(), loss=loss, plan=f"{layout} precision=float64", optimizer="sgd", seed=0, world=world
    )
    decoder = shardwise.decoder(engine, _batch(), longest=LONGEST, paging=PAGING)
    before = decoder.generate(_prompts(), 10)
    engine.step(_batch(), lr=5.0)
    return before, decoder.generate(_prompts(), 10), engine.full_state_dict()


def test_an_engines_decoder_has_the_weights_that_train(ranks: Callable[..., list[Any]]) -> None:
    before, after, state = ranks(_trained, 2, "data=2 zero=3")[0]
    assert before == _serial("own", _prompts(), 10)
    torch.manual_seed(0)
    model = MODELS["own"]().double()
    model.load_state_dict(state)
    assert after == [generate(model, torch.tensor([p]), 10, sequence=64, temperature=0.0)[0].tolist() for p in _prompts()]
    assert after != before


def test_what_is_drawn_does_not_depend_on_the_layout_and_what_cannot_be_is_refused() -> None:
    how: dict[str, Any] = {"loss": loss, "seed": 0, "plan": "data=1 precision=float64"}
    one = shardwise.decoder(MODELS["own"], _batch(), longest=LONGEST, paging=PAGING, **how)
    other = shardwise.decoder(MODELS["own"], _batch(), longest=LONGEST, paging=Paging(size=2, rows=3, pages=15), **how)
    drawn = one.generate(_prompts(), 10, temperature=0.9, seed=3)
    assert drawn == other.generate(_prompts(), 10, temperature=0.9, seed=3) != one.generate(_prompts(), 10)
    stop = drawn[0][9]
    assert one.generate(_prompts()[:1], 10, temperature=0.9, seed=3, stop=stop)[0] == drawn[0][: drawn[0].index(stop, 7) + 1]
    for prompt, count in (([], 1), ([1] * 30, 1)):
        with pytest.raises(UsageError, match="the longest sequence of this decoder has 30"):
            one.generate([prompt], count)
    with pytest.raises(UsageError, match="pages hold 30"):
        shardwise.decoder(MODELS["own"], _batch(), longest=40, paging=Paging(size=2, pages=15), **how).generate([[1] * 31], 1)
    with pytest.raises(Infeasible, match="leave zero out"):
        shardwise.decoder(MODELS["own"], _batch(), longest=LONGEST, plan="data=1 zero=1", loss=loss)


def test_broken_twin_a_page_too_far_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that lie one token off their place: what is computed in both ways before anything is generated differs."""
    begin = paged.PagedCache.start_step

    def off(self: Any, runs: Any, device: Any) -> None:
        begin(self, runs, device)
        self.row_slots = (self.row_slots + 1) % (self.num_pages * self.page_size)

    monkeypatch.setattr(paged.PagedCache, "start_step", off)
    made = shardwise.decoder(MODELS["own"], _batch(), loss=loss, longest=LONGEST, paging=PAGING, plan="data=1 precision=float64")
    assert made.recomputes
    assert made.generate(_prompts(), 10) == _serial("own", _prompts(), 10)
