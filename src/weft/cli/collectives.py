"""`weft collectives compare|draw`: how ranks combine what they have. In: sizes, a cluster. Out: tables, steps, numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import options
from weft.cli.output import Output, output
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster
    from weft.plan.program import Program, Value
    from weft.simulate.messages import Traffic

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Compare and draw collective algorithms.")
MOST_RANKS = 512  # a ring has 2n(n-1) messages
SIZES = tuple(4**k * 1024 for k in range(1, 11))  # 4 KiB to 1 GiB
Collective = Annotated[
    str, typer.Option("--collective", metavar="NAME", help="all_reduce, reduce_scatter, all_gather, broadcast, all_to_all.")
]


@app.command()
def compare(
    ranks: Annotated[int, typer.Option("--ranks", min=2, metavar="N", help="Ranks that take part.")] = 8,
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Of the tensor, for example 1GB or 4KiB.")] = "64MiB",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="C", help="Whose links: a catalogue name with a count, or a TOML file.")
    ] = "",
    collective: Collective = "all_reduce",
    as_json: options.Json = False,
) -> None:
    """Every algorithm on the same links: what it moves, in how many steps, how evenly, and how long it takes.

    All of it is counted on the programs themselves. Without a cluster the links are equal: 25 GB/s, 10 us.

    \b
    Example:
      weft collectives compare --ranks 64 --bytes 1GB --cluster 8xdgx-a100-80
    """
    with output(as_json) as out:
        from weft.units import parse_bytes

        total = parse_bytes(size)
        if total < 1:
            raise UsageError(f"--bytes {size}: a tensor has a byte or more")
        machines = _machines(cluster, ranks)
        known = _programs(collective, machines, ranks)
        rows = [_row(name, program, total, machines) for name, program in known.items()]
        best = {at: _best(known, at, machines) for at in SIZES}
        _show(out, collective, ranks, total, machines, rows, best)
        out.answer({
            "collective": collective, "ranks": ranks, "bytes": total, "cluster": machines.name if machines else "",
            "algorithms": sorted(rows, key=lambda row: row["time_s"]),
            "best": [{"bytes": at, "algorithm": name, "time_s": seconds} for at, (name, seconds) in best.items()],
        })  # fmt: skip


@app.command()
def draw(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An algorithm, for example ring.", show_default=False)],
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=64, metavar="N", help="Ranks that take part.")] = 4,
    collective: Collective = "all_reduce",
    as_json: options.Json = False,
) -> None:
    """Show an algorithm's steps, proven: who sends which piece to whom; + where it is added.

    \b
    Example:
      weft collectives draw ring --ranks 4
    """
    with output(as_json) as out:
        from weft.collectives import build
        from weft.plan.check import check
        from weft.plan.program import Recv
        from weft.simulate.messages import Wire, deliver, num_steps

        program = build(collective, name, _levels(name, None, ranks))
        check(program)
        added: dict[tuple[int, int, Value], list[bool]] = {}  # of each receive, in order
        for rank, row in enumerate(program.actions):
            for action in row:
                if isinstance(action, Recv):
                    added.setdefault((action.source, rank, action.value), []).append(action.add)
        traffic = deliver(program, lambda _: 0.0, lambda *_: Wire(0.0, 0.0, (), 1.0))
        steps: dict[int, list[str]] = {}
        for m in sorted(traffic.messages, key=lambda m: (m.began_s, m.source)):
            flags = [added[m.source, m.target, value].pop(0) for value in m.values]
            sign = "+" if all(flags) else ""
            names = " ".join(map(str, m.values)) if len(m.values) < 4 else f"{m.values[0]} ... {m.values[-1]}"
            steps.setdefault(round(m.began_s) + 1, []).append(f"{m.source} -{sign}> {m.target}  {names}")
        out.text(
            f"{collective} by {name} of {program.num_ranks} ranks: {num_steps(program)} steps, {len(traffic.messages)} messages, proven"
        )
        for step, lines in steps.items():
            out.text(f"step {step}")
            for line in lines:
                out.text(f"  {line}")
        out.answer({
            "collective": collective, "algorithm": name, "ranks": program.num_ranks, "proven": True, "steps": num_steps(program),
            "messages": len(traffic.messages), "actions": str(program).splitlines()[1:],
        })  # fmt: skip


def _machines(cluster: str, ranks: int) -> Cluster | None:
    """The cluster, where one is named. Raises UsageError where it has fewer devices than ranks, or those are too many."""
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: programs of more than {MOST_RANKS} ranks are not compared, a ring of them has 2n(n-1) messages")
    if not cluster:
        return None
    from weft.cluster.cluster import Cluster

    found = Cluster.parse(cluster)
    if found.num_devices < ranks:
        raise UsageError(f"--ranks {ranks}: {found.name} has {found.num_devices} devices; name more machines")
    return found


def _levels(name: str, machines: Cluster | None, ranks: int) -> int | tuple[int, ...]:
    """Sizes of the levels for algorithms that nest: ranks of a node, and nodes; near to a square where there are none."""
    from weft.collectives import NESTED

    if name not in NESTED:
        return ranks
    inside = machines.node_size if machines is not None and len(machines.levels) > 1 else 0
    if not inside or ranks % inside:
        inside = max(d for d in range(1, ranks + 1) if ranks % d == 0 and d * d <= ranks)
    return inside, ranks // inside


def _programs(collective: str, machines: Cluster | None, ranks: int) -> dict[str, Program]:
    from weft.collectives import ALGORITHMS, build

    if collective not in ALGORITHMS or collective == "halo":
        build(collective, "", ranks)  # says what is known
    found = {}
    for name in ALGORITHMS[collective]:
        try:
            found[name] = build(collective, name, _levels(name, machines, ranks))
        except UsageError:
            continue  # a power of two only
    return found


def _traffic(program: Program, total: float, machines: Cluster | None) -> Traffic:
    from weft.simulate.messages import Wire, deliver
    from weft.simulate.wires import wires

    pieces = {value for held in (*program.given, *program.wants) for value in held}
    whole = total / len(pieces)
    between = wires(machines) if machines is not None else lambda *_: Wire(10e-6, 1 / 25e9)
    return deliver(program, lambda _: whole, between)


def _row(name: str, program: Program, total: float, machines: Cluster | None) -> dict[str, Any]:
    from weft.simulate.messages import num_steps

    found = _traffic(program, total, machines)
    return {
        "algorithm": name, "time_s": found.seconds, "total_bytes": found.total_bytes, "busiest_bytes": max(found.sent_bytes),
        "steps": num_steps(program), "messages": len(found.messages), "balance": found.balance,
    }  # fmt: skip


def _best(known: dict[str, Program], at: float, machines: Cluster | None) -> tuple[str, float]:
    times = {name: _traffic(program, at, machines).seconds for name, program in known.items()}
    name = min(times, key=times.__getitem__)
    return name, times[name]


def _show(
    out: Output, collective: str, ranks: int, total: float, machines: Cluster | None, rows: list[dict[str, Any]],
    best: dict[int, tuple[str, float]],
) -> None:  # fmt: skip
    from weft.report.tables import Table
    from weft.units import format_bytes, format_seconds

    where = machines.name if machines is not None else "equal links of 25 GB/s and 10 us"
    out.table(Table(
        f"{collective} of {format_bytes(total)} over {ranks} ranks, {where}",
        ("algorithm", "time", "bytes in all", "from the busiest rank", "steps", "messages", "busiest / mean"),
        tuple(
            (row["algorithm"], format_seconds(row["time_s"]), format_bytes(row["total_bytes"]), format_bytes(row["busiest_bytes"]),
             str(row["steps"]), str(row["messages"]), f"{row['balance']:.2f}")
            for row in sorted(rows, key=lambda row: row["time_s"])
        ),
        right=(1, 2, 3, 4, 5, 6),
    ))  # fmt: skip
    out.table(Table(
        "the fastest by size", ("bytes", "algorithm", "time"),
        tuple((format_bytes(at), name, format_seconds(seconds)) for at, (name, seconds) in best.items()),
        right=(0, 2),
    ))  # fmt: skip
