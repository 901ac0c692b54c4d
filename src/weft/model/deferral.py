"""Where gradients are summed along an axis: at the parameter, once, where operators that all ranks run alike hand summands on. In: a graph,
the choices of its operators along one axis. Out: the same forms and needs, in which such operators are read and made as "+".
"""

from __future__ import annotations

from collections.abc import Set

from weft.model.graph import Graph
from weft.model.sharding import Form


def defer(
    graph: Graph,
    axis: str,
    grads: Set[str],
    ops: dict[str, dict[str, str]],
    forms: dict[str, dict[str, Form]],
    needs: dict[str, list[dict[str, Form | None]]],
) -> None:
    """Let gradient summands travel backward through replicated operators, so that they are summed once, at the parameter.

    A replicated operator whose results are needed only as "+" passes summands on: its own inputs become "+". Over `data` a piece
    and a share count as well: what is cut from "+" hands back a summand without a collective, where cutting "R" would need one.
    """
    def passes(needed: set[Form | None]) -> bool:
        return all(form == "+" or (axis == "data" and form is not None and form[0] in "SP") for form in needed)

    uses: dict[str, set[Form | None]] = {}
    final = {graph.loss, *graph.outputs}
    for op in reversed(graph.operators):
        made = [value for value in op.outputs if value in grads]
        linear = op.function is None or op.function.linear
        silent = linear and all(passes(uses.get(v, set())) and v not in final and forms[v][axis] == "R" for v in made)
        if ops[op.name][axis] == "" and silent and any(v in uses for v in made):
            for value in made:
                forms[value][axis] = "+"
            for value, row in zip(op.inputs, needs[op.name], strict=True):
                if row[axis] == "R" and value in grads:
                    row[axis] = "+"
        for value, row in zip(op.inputs, needs[op.name], strict=True):
            if row[axis] is not None:
                uses.setdefault(value, set()).add(row[axis])
