"""`shardwise collectives compare|draw`: time collective algorithms (all-reduce, all-gather, ...) on a cluster's links, or draw one's
steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import UsageError
from shardwise.model.gc_pause import gc_paused

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster
    from shardwise.cost.network.collectives import GroupHops
    from shardwise.plan.ir.program import Program, Value
    from shardwise.report.canvas import Picture as Drawing
    from shardwise.report.collectives import Arrow
    from shardwise.simulate.messages import TimedMessage, Traffic

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Compare and draw collective algorithms.")
MAX_SIMULATED_RANKS = 64  # most ranks whose programs are simulated message by message: a ring has 2n(n-1) of them
MAX_RANKS_WITHOUT_CLOSED_FORM = 256  # where there is no closed form: some 20 s of CPU time; messages are quadratic in the ranks
MAX_CLOSED_FORM_RANKS = 1 << 20  # closed forms list the trees' parents and children of each rank, in 5 s and 400 MB
DEFAULT_LATENCY_S, DEFAULT_BYTE_S = 10e-6, 1 / 25e9  # of a link without a cluster: latency, and seconds of a byte
SIZES = tuple(4**k * 1024 for k in range(1, 11))  # 4 KiB to 1 GiB
Collective = Annotated[
    str, typer.Option("--collective", metavar="NAME", help="all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, halo.")
]


Picture = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the picture: .svg, or .png with matplotlib.")]


@app.command()
def compare(
    ranks: Annotated[int, typer.Option("--ranks", min=2, metavar="N", help="Ranks that take part.")] = 8,
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Of the tensor, for example 1GB or 4KiB.")] = "64MiB",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="C", help="Whose links: a catalogue name with a count, or a TOML file.")
    ] = "",
    collective: Collective = "all_reduce",
    target: Picture = None,
    as_json: options.Json = False,
) -> None:
    """Compare all algorithms on the same links: what each moves, in how many steps, how evenly, and how long it takes.

    Up to 64 ranks all of it is counted on the programs themselves; all-reduce of more (16,384 and beyond) by closed forms that are held
    against the programs. Without a cluster the links are equal: 25 GB/s, 10 us. What it costs to add is not in these times.

    \b
    Example:
      shardwise collectives compare --ranks 64 --bytes 1GB --cluster 8xdgx-a100-80 -o picture.svg
    """
    with open_output(as_json) as out, gc_paused():
        from shardwise.units import parse_bytes  # here: the command starts fast

        total = parse_bytes(size)
        if total < 1:
            raise UsageError(f"--bytes {size}: a tensor has a byte or more")
        if target is not None:
            from shardwise.report.canvas import check_suffix  # here: the command starts fast

            check_suffix(target)
        if ranks > MAX_CLOSED_FORM_RANKS:
            raise UsageError(f"--ranks {ranks}: at most {MAX_CLOSED_FORM_RANKS} ranks are compared; use {MAX_CLOSED_FORM_RANKS} or fewer")
        machines = _parse_machines(cluster, ranks)
        rows, times = (_compare_by_closed_form if collective == "all_reduce" and ranks > MAX_SIMULATED_RANKS else _compare_by_simulation)(
            collective, machines, ranks, total
        )
        best = {at: min(((name, row[i]) for name, row in times.items()), key=lambda item: item[1]) for i, at in enumerate(SIZES)}
        library = _library_times_s(collective, machines, ranks)
        _show_comparison(out, collective, ranks, total, machines, rows, best, library)
        if target is not None:
            _draw_times(collective, machines, ranks, times, library).write(target)
            out.text(f"picture: {target}")
        out.answer({
            "collective": collective, "ranks": ranks, "bytes": total, "cluster": machines.name if machines else "",
            "algorithms": sorted(rows, key=lambda row: row["time_s"]),
            "best": [
                {"bytes": at, "algorithm": name, "time_s": seconds, "library_s": library[i] if library else None}
                for i, (at, (name, seconds)) in enumerate(best.items())
            ],
            "picture": str(target) if target is not None else "",
        })  # fmt: skip


DrawnName = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="An algorithm, for example ring; or a file of actions, as for check.", show_default=False)
]
DrawnRanks = Annotated[
    int | None, typer.Option("--ranks", min=1, max=64, metavar="N", help="Ranks that take part; by default 4.", show_default=False)
]


@app.command()
def draw(
    name: DrawnName,
    ranks: DrawnRanks = None,
    collective: Collective = "all_reduce",
    target: Picture = None,
    as_json: options.Json = False,
) -> None:
    """Show an algorithm's steps, proven: who sends which piece to whom; + where it is added.

    \b
    Example:
      shardwise collectives draw ring --ranks 4 -o picture.svg
      shardwise collectives draw examples/two_rings.txt
    """
    with open_output(as_json) as out, gc_paused():
        from shardwise.plan.ir.check import check  # here: the command starts fast
        from shardwise.plan.ir.program import Recv
        from shardwise.simulate.messages import Wire, deliver_messages, num_steps

        if target is not None:
            from shardwise.report.canvas import check_suffix  # here: the command starts fast

            check_suffix(target)
        collective, program = _program_to_draw(collective, name, ranks)
        check(program)
        added: dict[tuple[int, int, Value], list[bool]] = {}  # of each receive, in order: whether it reduces
        for rank, row in enumerate(program.actions):
            for action in row:
                if isinstance(action, Recv):
                    added.setdefault((action.source, rank, action.value), []).append(action.add)
        traffic = deliver_messages(program, lambda _: 0.0, lambda *_: Wire(0.0, 0.0, (), 1.0))
        steps: dict[int, list[str]] = {}
        arrows: list[Arrow] = []
        for m in sorted(traffic.messages, key=lambda m: (m.began_s, m.source)):
            flags = [added[m.source, m.target, value].pop(0) for value in m.values]
            sign = "+" if all(flags) else ""
            names = " ".join(map(str, m.values)) if len(m.values) < 4 else f"{m.values[0]} ... {m.values[-1]}"
            steps.setdefault(round(m.began_s) + 1, []).append(f"{m.source} -{sign}> {m.target}  {names}")
            if target is not None:
                arrows.append(_arrow_of(m, all(flags)))
        headline = f"{collective} by {name} of {program.num_ranks} ranks: {num_steps(program)} steps, {len(traffic.messages)} messages"
        out.text(f"{headline}, proven")
        for step, lines in steps.items():
            out.text(f"step {step}")
            for line in lines:
                out.text(f"  {line}")
        if target is not None:
            from shardwise.report.collectives import steps_picture  # here: the command starts fast

            steps_picture(headline, program.num_ranks, arrows).write(target)
            out.text(f"picture: {target}")
        out.answer({
            "collective": collective, "algorithm": name, "ranks": program.num_ranks, "proven": True, "steps": num_steps(program),
            "messages": len(traffic.messages), "actions": str(program).splitlines()[1:],
            "picture": str(target) if target is not None else "",
        })  # fmt: skip


def _program_to_draw(collective: str, name: str, ranks: int | None) -> tuple[str, Program]:
    """Return (collective, program) of an algorithm by name, or of a file, which says its collective and its ranks itself."""
    from shardwise.collectives import build  # here: the command starts fast
    from shardwise.plan.ir.custom_collective import is_collective_file

    if not is_collective_file(name):
        return collective, build(collective, name, _level_sizes(name, None, ranks or 4))
    if ranks is not None:
        raise UsageError(f"{name} is a file, which says its ranks itself; leave --ranks out")
    from shardwise.cli.check import read_collective  # here: the command starts fast

    return read_collective(Path(name))


def _arrow_of(message: TimedMessage, added: bool) -> Arrow:
    from shardwise.report.collectives import Arrow  # here: the command starts fast

    pieces = [",".join(map(str, value.index)) for value in message.values]
    words = " ".join(pieces) if len(pieces) < 4 else f"{pieces[0]} .. {pieces[-1]}"
    return Arrow(message.source, message.target, message.began_s, message.ended_s, added, words)


def _parse_machines(cluster: str, ranks: int) -> Cluster | None:
    """Parse the cluster, if any. Raises UsageError where it has fewer devices than ranks."""
    if not cluster:
        return None
    from shardwise.cluster.cluster import Cluster  # here: the command starts fast

    machines = Cluster.parse(cluster)
    if machines.num_devices < ranks:
        raise UsageError(f"--ranks {ranks}: {machines.name} has {machines.num_devices} devices; name more machines")
    return machines


def _level_sizes(name: str, machines: Cluster | None, ranks: int) -> int | tuple[int, ...]:
    """Return (ranks of a node, nodes) for hierarchical algorithms, near to a square without nodes; else the number of ranks."""
    from shardwise.collectives import NESTED  # here: the command starts fast

    if name not in NESTED:
        return ranks
    inside = machines.node_size if machines is not None and len(machines.levels) > 1 else 0
    if not inside or ranks % inside:
        inside = max(d for d in range(1, ranks + 1) if ranks % d == 0 and d * d <= ranks)
    return inside, ranks // inside


def _build_programs(collective: str, machines: Cluster | None, ranks: int) -> dict[str, Program]:
    from shardwise.collectives import ALGORITHMS, build  # here: the command starts fast

    if collective not in ALGORITHMS:
        build(collective, "", ranks)  # raises, with the known collectives
    if len(ALGORITHMS[collective]) == 1:
        (only,) = ALGORITHMS[collective]
        raise UsageError(
            f"{collective} has one algorithm, so there is nothing to compare; shardwise collectives draw {only} --collective {collective}"
        )
    programs = {}
    for name in ALGORITHMS[collective]:
        try:
            programs[name] = build(collective, name, _level_sizes(name, machines, ranks))
        except UsageError:
            continue  # a power of two only
    return programs


def _simulate_traffic(program: Program, total: float, machines: Cluster | None) -> Traffic:
    from shardwise.simulate.messages import Wire, deliver_messages  # here: the command starts fast
    from shardwise.simulate.wires import cluster_wires

    piece_bytes = total / len(program.boundary_values)
    between = cluster_wires(machines) if machines is not None else lambda *_: Wire(DEFAULT_LATENCY_S, DEFAULT_BYTE_S)
    return deliver_messages(program, lambda _: piece_bytes, between)


Comparison = tuple[list[dict[str, Any]], dict[str, list[float]]]  # one row per algorithm, and its seconds for each of SIZES


def _compare_by_simulation(collective: str, machines: Cluster | None, ranks: int, total: float) -> Comparison:
    """Time each algorithm by simulating its program message by message."""
    from shardwise.simulate.messages import num_steps  # here: the command starts fast

    if ranks > MAX_RANKS_WITHOUT_CLOSED_FORM:
        raise UsageError(
            f"--ranks {ranks}: only all_reduce has closed forms; programs of more than {MAX_RANKS_WITHOUT_CLOSED_FORM} ranks are not "
            f"compared, "
            "a ring of them has 2n(n-1) messages"
        )
    rows, times = [], {}
    for name, program in _build_programs(collective, machines, ranks).items():
        traffic = _simulate_traffic(program, total, machines)
        rows.append({
            "algorithm": name, "time_s": traffic.seconds, "latency_s": _simulate_traffic(program, 0.0, machines).seconds,
            "total_bytes": traffic.total_bytes, "mean_bytes": traffic.total_bytes / ranks, "busiest_bytes": max(traffic.sent_bytes),
            "steps": num_steps(program), "messages": len(traffic.messages), "balance": traffic.balance,
        })  # fmt: skip
        times[name] = [_simulate_traffic(program, at, machines).seconds for at in SIZES]
    return rows, times


def _compare_by_closed_form(collective: str, machines: Cluster | None, ranks: int, total: float) -> Comparison:
    """Time each all-reduce algorithm by its closed form."""
    from shardwise.cost.network.collectives import CLOSED_FORMS, all_reduce_s  # here: the command starts fast
    from shardwise.cost.network.traffic import all_reduce_traffic

    rows, times = [], {}
    for name in CLOSED_FORMS:
        inside = _level_sizes(name, machines, ranks)
        ways = _group_links(machines, ranks, inside[0] if isinstance(inside, tuple) else 0)
        if name == "hierarchical" and ranks % ways.inside:
            continue  # the last node is not full
        about = all_reduce_traffic(name, ranks, ways.inside)
        rows.append({
            "algorithm": name, "time_s": all_reduce_s(name, total, ways), "latency_s": all_reduce_s(name, 0.0, ways),
            "total_bytes": about.total * total, "mean_bytes": about.total * total / ranks, "busiest_bytes": about.busiest * total,
            "steps": about.steps, "messages": about.messages, "balance": about.balance,
        })  # fmt: skip
        times[name] = [all_reduce_s(name, at, ways) for at in SIZES]
    return rows, times


def _group_links(machines: Cluster | None, ranks: int, inside: int) -> GroupHops:
    """Return the links of a group of the first `ranks` ranks, without the cost of the additions, which the simulation leaves out too."""
    from dataclasses import replace  # here: the command starts fast

    from shardwise.cost.network.collectives import GroupHops, Hop, hops_of
    from shardwise.cost.network.network import RankGroup

    if machines is None:
        hop = Hop(DEFAULT_LATENCY_S, DEFAULT_BYTE_S)
        return GroupHops(hop, hop, inside, ranks // inside) if inside else GroupHops(hop, hop, ranks)
    times = hops_of(machines, RankGroup(ranks))
    return replace(times, near=replace(times.near, add_byte_s=0.0, addition=()), far=replace(times.far, add_byte_s=0.0, addition=()))


def _library_times_s(collective: str, machines: Cluster | None, ranks: int) -> list[float]:
    """Seconds of the communication library's own algorithm for each of SIZES; empty where they are unknown."""
    from shardwise.cost.network.network import FACTORS, RankGroup, collective_s  # here: the command starts fast

    if machines is None or collective not in FACTORS:
        return []
    return [collective_s(machines, collective, at, RankGroup(ranks)) for at in SIZES]


def _draw_times(collective: str, machines: Cluster | None, ranks: int, times: dict[str, list[float]], library: list[float]) -> Drawing:
    from shardwise.report.collectives import times_picture  # here: the command starts fast

    lines = {name: list(zip(SIZES, row, strict=True)) for name, row in times.items()}
    if library:
        lines["the library's own"] = list(zip(SIZES, library, strict=True))
    where = machines.name if machines is not None else "equal links of 25 GB/s and 10 us"
    return times_picture(f"{collective} over {ranks:,} ranks, {where}", lines, "the library's own")


def _show_comparison(
    out: CommandOutput, collective: str, ranks: int, total: float, machines: Cluster | None, rows: list[dict[str, Any]],
    best: dict[int, tuple[str, float]], library: list[float],
) -> None:  # fmt: skip
    from shardwise.report.tables import TextTable  # here: the command starts fast
    from shardwise.units import format_bytes, format_seconds

    where = machines.name if machines is not None else "equal links of 25 GB/s and 10 us"
    out.table(TextTable(
        f"{collective} of {format_bytes(total)} over {ranks} ranks, {where}",
        ("algorithm", "time", "latency", "bytes in all", "a rank", "the busiest", "steps", "messages", "busiest / mean"),
        tuple(
            (row["algorithm"], format_seconds(row["time_s"]), format_seconds(row["latency_s"]), format_bytes(row["total_bytes"]),
             format_bytes(row["mean_bytes"]), format_bytes(row["busiest_bytes"]), str(row["steps"]), str(row["messages"]),
             f"{row['balance']:.2f}")
            for row in sorted(rows, key=lambda row: row["time_s"])
        ),
        right=(1, 2, 3, 4, 5, 6, 7, 8),
    ))  # fmt: skip
    out.table(TextTable(
        "the fastest by size", ("bytes", "algorithm", "time", *(("the library's own",) if library else ())),
        tuple(
            (format_bytes(at), name, format_seconds(seconds), *((format_seconds(library[i]),) if library else ()))
            for i, (at, (name, seconds)) in enumerate(best.items())
        ),
        right=(0, 2, 3),
    ))  # fmt: skip
