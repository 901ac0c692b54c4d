"""The problem along an axis as an integer programme. In: `Tables`, a budget. Out: columns and rows, and how to read a solution.

Zheng et al. 2022 (Alpa), equation 1, in its tight flow form. s(v, q) is 1 for the choice q of operator kind v. A value is a flow of one
unit through the states of what is held of it: it enters in the form that its maker's choice makes (or in which it is stored), and
each reader in order takes it along an edge of the word that its choice reads, at the price of the moves that this needs. So a form is
moved to once, however many read it, and from the cheapest form that is there. The sums of the edges are the choices':

    sum over words   of x(t, state, word) = what enters the state
    sum over states  of x(t, state, word) = sum of s(v, q) over the choices q that read this word

x is continuous: with s fixed these are shortest paths. For one reader this is Alpa's R(v, u) with e(p, q) summed over choices of the
same form. States from which all that is still to be read costs the same are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.plan.ir.placement import D, Placement, is_shard
from tests.support.placements_oracle.budget import Budget, Term, state_of, terms
from tests.support.placements_oracle.tables import DEFERRED, INFINITE, SUMMED, Flow, Tables, Word

Terms = list[tuple[int, float]]  # (column, coefficient)


@dataclass
class Programme:
    """Columns between 0 and 1 (kept bytes: without limit) and rows, as they are added. Minimised."""

    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, Terms]] = field(default_factory=list)  # (least, most, terms)
    choices: list[list[int]] = field(default_factory=list)  # columns of every kind's choices
    stores: dict[str, list[tuple[Placement, int]]] = field(default_factory=dict)  # [flow's example] -> (form, column)
    bytes: Terms = field(default_factory=list)  # on one rank, of what the columns decide
    fixed_bytes: float = 0.0

    def column(self, cost: float = 0.0, upper: float = 1.0, whole: bool = False) -> int:
        self.costs.append(cost)
        self.uppers.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, least: float, most: float, terms: Iterable[tuple[int, float]]) -> None:
        self.rows.append((least, most, list(terms)))


def programme(tables: Tables, budget: Budget, ways: Mapping[str, int], divided: Mapping[str, int]) -> Programme:
    """The integer programme; its memory row is left to the solver, which also minimises it alone."""
    built = Programme()
    for kind in tables.kinds:
        columns = [built.column(choice.cost_s * len(kind.operators), whole=True) for choice in kind.choices]
        built.row(1.0, 1.0, [(column, 1.0) for column in columns])
        built.choices.append(columns)
    seen: set[str] = set()
    for flow in tables.flows:
        seen.update(flow.values)
        _flow(built, tables, budget, ways, flow)
    for value in tables.axis.state:
        if value not in seen:  # read by nothing, and whole
            built.fixed_bytes += state_of(tables, budget, value, ways).total
    for term in terms(tables, budget, ways, divided):
        _keep(built, term, tables.axis.n)
    return built


def _flow(built: Programme, tables: Tables, budget: Budget, ways: Mapping[str, int], flow: Flow) -> None:
    """One value's states and edges, layer by layer."""
    enters: dict[Placement, Terms] = {}
    if flow.source.kind >= 0:
        for column, form in zip(built.choices[flow.source.kind], flow.source.made, strict=True):
            enters.setdefault(form, []).append((column, 1.0))
    else:
        enters = _store(built, tables, budget, ways, flow)
    value, moves, many = flow.example, tables.moves, len(flow.values)
    forms = {*enters, *(form for use in flow.uses for word in use.words for form in word)}
    if len(forms) < 2:
        return
    later: list[tuple[Placement, ...]] = [()]
    for use in reversed(flow.uses):
        later.append(tuple(sorted({*later[-1], *(form for word in use.words for form in word)}, key=str)))
    later.reverse()

    def state(held: frozenset[Placement], t: int) -> tuple[object, ...]:
        """What every form that is still to be read costs from here, and what must still be read: all that the future depends on."""
        due = held & {SUMMED, DEFERRED}
        return (due, D in held if due else None, *(moves.read(value, held, (need,))[0] for need in later[t]))

    layer: dict[tuple[object, ...], tuple[frozenset[Placement], Terms]] = {}
    for form, inflow in enters.items():
        key = state(frozenset((form,)), 0)
        layer.setdefault(key, (frozenset((form,)), []))[1].extend(inflow)
    for t, use in enumerate(flow.uses):
        words: dict[Word, Terms] = {}
        for column, word in zip(built.choices[use.kind], use.words, strict=True):
            words.setdefault(word, []).append((column, -1.0))
        after: dict[tuple[object, ...], tuple[frozenset[Placement], Terms]] = {}
        for held, inflow in layer.values():
            edges: Terms = []
            for word, taken in words.items():
                cost, then = moves.read(value, held, word)
                if cost == INFINITE:
                    continue
                edge = built.column(cost * many, INFINITE)
                edges.append((edge, 1.0))
                taken.append((edge, 1.0))
                after.setdefault(state(then, t + 1), (then, []))[1].append((edge, 1.0))
            built.row(0.0, 0.0, [*edges, *((column, -by) for column, by in inflow)])
        for taken in words.values():
            built.row(0.0, 0.0, taken)
        layer = after
    lone = flow.source.kind < 0 or SUMMED in flow.source.made
    for held, inflow in layer.values():
        # Read as D alone, it is deferred; deferred, it is read as D.
        if lone and ((SUMMED in held and D in held) or (DEFERRED in held and D not in held)):
            built.row(0.0, 0.0, [(column, 1.0) for column, _ in inflow])


def _store(built: Programme, tables: Tables, budget: Budget, ways: Mapping[str, int], flow: Flow) -> dict[Placement, Terms]:
    """Columns for where a parameter or buffer lies (of a batch or constant: one column that is 1), their price and bytes."""
    value, many = flow.example, len(flow.values)
    possible = [(form, cost) for form, cost in zip(flow.source.forms, flow.source.store_s, strict=True) if cost < INFINITE]
    columns = [built.column(cost * many, whole=len(possible) > 1) for _, cost in possible]
    built.row(1.0, 1.0, [(column, 1.0) for column in columns])
    if value in tables.axis.state:
        built.stores[value] = [(form, column) for (form, _), column in zip(possible, columns, strict=True)]
        size = sum(state_of(tables, budget, v, ways).total for v in flow.values)
        built.bytes += [(column, size / (tables.axis.n if is_shard(form) else 1)) for form, column in built.stores[value]]
    return {form: [(column, 1.0)] for (form, _), column in zip(possible, columns, strict=True)}


def _keep(built: Programme, term: Term, n: int) -> None:
    """Bytes of one kept storage: cut where a keeper has it cut, whole where one has it whole; once each."""
    size = term.size_bytes * term.count
    for cut, by in ((False, 1.0), (True, 1.0 / n)):
        mine = []
        for keeper in term.keepers:
            columns = [column for column, is_cut in zip(built.choices[keeper.kind], keeper.cut, strict=True) if is_cut is cut]
            if columns:
                mine.append(columns)
        if len(mine) == 1:
            built.bytes += [(column, size * by) for column in mine[0]]
        elif mine:
            kept = built.column(0.0, INFINITE)
            built.bytes.append((kept, size * by))
            for columns in mine:
                built.row(0.0, INFINITE, [(kept, 1.0), *((column, -1.0) for column in columns)])
