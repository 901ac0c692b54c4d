"""Which tokens a step of a decoder computes: every token once and in order, pages that are free again, nobody waits for ever."""

from __future__ import annotations

import pytest

from shardwise.run.decode.decoder import ContinuousBatcher, DecodeSequence


@pytest.mark.parametrize(("rows", "pages", "size"), [(4, 12, 2), (1, 6, 4), (16, 7, 4)])
def test_every_token_is_computed_once_in_order_and_pages_are_free_again(rows: int, pages: int, size: int) -> None:
    queue = ContinuousBatcher(rows, pages, size)
    texts = [
        DecodeSequence(i, list(range(prompt)), prompt + more) for i, (prompt, more) in enumerate([(5, 3), (1, 1), (12, 8), (2, 20), (7, 2)])
    ]
    for text in texts:
        queue.add(text)
    computed: list[list[int]] = [[] for _ in texts]
    together, over = 0, []
    while parts := queue.next_chunks():
        assert sum(part.count for part in parts) <= rows
        held = [page for one in queue.running for page in one.pages]
        assert len(held) == len(set(held))
        assert sorted([*held, *queue.free_pages]) == list(range(pages))
        for part in parts:
            assert len(part.sequence.pages) * size >= part.first + part.count > (len(part.sequence.pages) - 1) * size
            computed[part.sequence.number] += range(part.first, part.first + part.count)
        together = max(together, len(parts))
        over += queue.record_tokens(parts, [99] * len(parts))
    assert [text.number for text in over] != [0, 1, 2, 3, 4] or rows == 1  # short ones leave before long ones
    assert together == 1 if rows == 1 else together >= 2
    for text, places in zip(texts, computed, strict=True):
        assert places == list(range(text.final_length - 1))  # the last token is nobody's reason
        assert len(text.tokens) == text.final_length
    assert sorted(queue.free_pages) == list(range(pages))


def test_a_text_may_stop_early() -> None:
    queue, text = ContinuousBatcher(4, 2, 4), DecodeSequence(0, [1], 8)
    queue.add(text)
    queue.record_tokens(queue.next_chunks(), [5], stop=5)
    assert text.tokens == [1, 5]
    assert queue.next_chunks() == []
