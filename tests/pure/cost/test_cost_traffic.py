"""What programs move, in closed form, against a count on the programs."""

from __future__ import annotations

import pytest

from shardwise.collectives import ALGORITHMS, build
from shardwise.cost.network.traffic import all_reduce_traffic
from shardwise.errors import UsageError
from shardwise.simulate.messages import Wire, deliver_messages, num_steps


@pytest.mark.parametrize("name", sorted(ALGORITHMS["all_reduce"]))
def test_closed_forms_are_what_programs_move(name: str) -> None:
    for n in range(2, 34):
        inside = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
        program = build("all_reduce", name, (inside, n // inside) if name == "hierarchical" else n)
        pieces = {value for held in program.wants for value in held}
        part = 1 / len(pieces)
        counted = deliver_messages(program, lambda _, part=part: part, lambda *_: Wire(0.0, 1.0))  # type: ignore[misc]
        found = all_reduce_traffic(name, n, inside)
        assert found.total == pytest.approx(counted.total_bytes), n
        assert found.busiest == pytest.approx(max(counted.sent_bytes)), n
        assert found.balance == pytest.approx(counted.balance), n
        if name == "double_tree":  # pieces that go the same way at the same time are one message
            assert found.messages / 2 < len(counted.messages) <= found.messages, n
        else:
            assert found.messages == len(counted.messages), n
        off = 0 if n & (n - 1) == 0 else 2
        if name == "double_tree":
            off = 6 if n > 2 else 13  # two ranks alone send most pieces in pairs
        assert abs(found.steps - num_steps(program)) <= off, n


def test_large_numbers_cost_nothing() -> None:
    assert all_reduce_traffic("ring", 16384).messages == 2 * 16384 * 16383
    assert all_reduce_traffic("tree", 16384).steps == 28
    assert all_reduce_traffic("double_tree", 16384).busiest == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "ranks", "said"), [("rnig", 4, "no closed form"), ("ring", 1, "2 or more"), ("hierarchical", 6, "nodes of 0")]
)
def test_bad_input(name: str, ranks: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        all_reduce_traffic(name, ranks)
