"""HiGHS on arrays, here or in a process of its own that ends by itself. In: a mixed integer programme as arrays. Out: `Answer`.

HiGHS 1.15 was seen never to return from presolve, past its own time limit, on programmes of a dozen columns; a thread that does not
return cannot be ended, and a process can. So what is solved with presolve runs apart: the process carries an alarm that ends it even
where the one that began it is gone. Where it did not answer, the same is solved there again without presolve, which keeps its limit.

This file imports nothing of shardwise's, since it is also the script that the process runs: arrays on standard input, arrays on standard
output (numpy's format, without pickle).
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

GRACE_S = 3.0  # beyond the time limit, before the process is ended: to start, and for what HiGHS does between looks at its clock
FOUND, IMPOSSIBLE, NOTHING = 0.0, 1.0, 2.0  # a feasible solution; there is none; none was found in time

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """`state` is FOUND, IMPOSSIBLE or NOTHING; `proven`: the gap asked for was reached."""

    state: float
    values: tuple[float, ...] = ()
    objective: float = 0.0
    bound: float = 0.0
    proven: bool = False


def solve_here(given: Arrays, limit_s: float, gap: float, gap_absolute: float, presolve: bool) -> Answer:
    """Minimise in this process.

    Args:
        given: costs, lower, upper, whole [columns]; least, most [rows]; start [rows + 1], index, value (the matrix by rows);
            known_index, known_value: columns of a solution to begin from.
    """
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(given["costs"]), len(given["least"])
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = given["costs"], given["lower"], given["upper"]
    lp.row_lower_, lp.row_upper_ = given["least"], given["most"]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = given["start"], given["index"], given["value"]
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[int(whole)] for whole in given["whole"]]
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {
        "output_flag": False, "presolve": "on" if presolve else "off", "threads": 1, "random_seed": 0, "time_limit": limit_s,
        "mip_rel_gap": gap, "mip_abs_gap": gap_absolute,
    }  # fmt: skip
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    if len(given["known_index"]):
        solver.setSolution(len(given["known_index"]), given["known_index"], given["known_value"])
    solver.run()
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Answer(IMPOSSIBLE)
    info = solver.getInfo()
    values = tuple(solver.getSolution().col_value)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible or not values:
        return Answer(NOTHING)
    proven = status == highspy.HighsModelStatus.kOptimal
    return Answer(FOUND, values, info.objective_function_value, info.mip_dual_bound, proven)


def solve_apart(given: Arrays, limit_s: float, gap: float, gap_absolute: float, script: str = __file__) -> Answer:
    """The same with presolve in a process that is ended `GRACE_S` after the limit; without presolve where that had to be.

    Raises:
        RuntimeError: the process failed otherwise, with its last words.
    """
    for presolve in (True, False):
        sent = io.BytesIO()
        np.savez(sent, options=np.array([limit_s, gap, gap_absolute, float(presolve)]), **given)
        # -P: modules beside this file must not stand for those that HiGHS and numpy import.
        with subprocess.Popen(
            [sys.executable, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                answered, said = process.communicate(sent.getvalue(), timeout=limit_s + GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            finally:
                process.kill()  # also where this process is interrupted; nothing happens to one that has ended
        if process.returncode == 0:
            with np.load(io.BytesIO(answered), allow_pickle=False) as found:
                state, objective, bound, proven = found["told"].tolist()
                return Answer(state, tuple(found["values"].tolist()), objective, bound, bool(proven))
        if process.returncode != -signal.SIGALRM:
            raise RuntimeError(f"the solver's process ended with {process.returncode}: {said.decode(errors='replace')[-2000:]}")
    return Answer(NOTHING)


def main() -> None:
    """What the process does."""
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as sent:
        given = {name: sent[name] for name in sent.files}
    limit_s, gap, gap_absolute, presolve = given.pop("options").tolist()
    if hasattr(signal, "alarm"):
        # The alarm's own action ends the process whatever it is doing, Python or not.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ceil(limit_s + GRACE_S))
    found = solve_here(given, limit_s, gap, gap_absolute, bool(presolve))
    answer = io.BytesIO()
    told = np.array([found.state, found.objective, found.bound, float(found.proven)])
    np.savez(answer, told=told, values=np.array(found.values, dtype=np.float64))
    sys.stdout.buffer.write(answer.getvalue())


if __name__ == "__main__":
    main()
