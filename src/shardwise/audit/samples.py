"""What the ranks read beside what the serial run reads: samples, targets and dropout masks of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from shardwise.audit.difference import RunDifference
from shardwise.audit.pages import Pages, RecordedPage

_CLOSE_SQUARES, _CLOSE_SUMS = 1e-3, 1e-2  # relative; bfloat16 rounds each element by 4e-3
Key = tuple[str, tuple[int, ...]]  # dtype and shape of a row


def pages_of_step(ranks: Pages, step: int) -> dict[int, RecordedPage]:
    """Return the page of every rank that has recorded the step."""
    return {rank: pages[step] for rank, pages in ranks.items() if step < len(pages)}


def rows_of(page: RecordedPage) -> dict[Key, list[str]]:
    """Return the digests of the rows that a page's root modules were given, by dtype and shape."""
    rows: dict[Key, list[str]] = {}
    for call in page.inputs:
        for t in call:
            rows.setdefault((t["dtype"], tuple(t["row"])), []).extend(t["digests"])
    return rows


def compare_samples(serial: list[RecordedPage], ranks: Pages, step: int) -> tuple[RunDifference | None, str]:
    """Compare the samples of a step. Returns the difference, and how the samples lie on the ranks."""
    expected, pages = rows_of(serial[step]), pages_of_step(ranks, step)
    read: dict[Key, dict[int, list[str]]] = {}
    for rank, page in pages.items():
        for key, rows in rows_of(page).items():
            read.setdefault(key, {})[rank] = rows
    for key, rows in expected.items():
        if key not in read:
            return None, _describe_other_division(serial[step], pages, key[0])
        missing = set(rows) - {row for held in read[key].values() for row in held}
        missing -= _find_close_rows(missing, _sums_of([serial[step]], key), _sums_of(pages.values(), key))
        if missing:
            return _name_missing_samples(serial, ranks, step, read[key], (len(missing), len(set(rows)))), ""
    held = [all(set(rows) <= set(by_rank) for by_rank in read[key].values()) for key, rows in expected.items()]
    return None, "every rank reads all samples" if held and all(held) else "the samples are divided over the ranks"


def _sums_of(pages: Iterable[RecordedPage], key: Key) -> dict[str, list[float]]:
    """Return the sum and the sum of squares of every row of a kind, by its digest; empty where rows are no numbers."""
    calls = [t for page in pages for call in page.inputs for t in call if (t["dtype"], tuple(t["row"])) == key]
    return {digest: sums for t in calls for digest, sums in zip(t["digests"], t["sums"], strict=False)}


def _find_close_rows(rows: set[str], expected: dict[str, list[float]], read: dict[str, list[float]]) -> set[str]:
    """Return the rows that some rank has but for rounding: features of a frozen model, computed in batches of another size."""

    def is_close(a: list[float], b: list[float]) -> bool:
        return abs(a[1] - b[1]) <= _CLOSE_SQUARES * b[1] and abs(a[0] - b[0]) <= _CLOSE_SUMS * b[1] ** 0.5

    return {row for row in rows if row in expected and any(is_close(sums, expected[row]) for sums in read.values())}


def _describe_other_division(serial: RecordedPage, pages: dict[int, RecordedPage], dtype: str) -> str:
    def total_of(page: RecordedPage) -> int:
        return sum(int(t["sum"]) for call in page.inputs for t in call if t["dtype"] == dtype)

    whole = sum(map(total_of, pages.values())) - total_of(serial)
    return f"{'every sample is divided over the ranks' if whole % 2**64 == 0 else 'inputs are divided in a way that was not followed'}"


def _name_missing_samples(
    serial: list[RecordedPage], ranks: Pages, step: int, read: dict[int, list[str]], counts: tuple[int, int]
) -> RunDifference:
    text = f"{counts[0]} of the {counts[1]} samples of the serial batch are on no rank"
    same = [(a, b) for a in read for b in read if a < b and set(read[a]) & set(read[b])]
    if same:
        text += f"; ranks {same[0][0]} and {same[0][1]} read the same samples (no distributed sampler, or one without the rank?)"
    now = pages_of_step(ranks, step)
    for earlier in range(step):
        before = pages_of_step(ranks, earlier)
        if all(r in before and before[r].inputs == p.inputs for r, p in now.items()) and serial[earlier].inputs != serial[step].inputs:
            text += f"; every rank reads its samples of step {earlier} again, in the same order (sampler.set_epoch not called?)"
            break
    wrong = {rank for pair in same for rank in pair} or set(read)
    return RunDifference("data", text, step, ranks=tuple(sorted(wrong)))


def compare_targets(serial: RecordedPage, pages: dict[int, RecordedPage], step: int) -> RunDifference | None:
    """Explain wrong gradients by samples that count several times, or by targets that are not those of the serial batch."""
    for key, rows in rows_of(serial).items():
        read = Counter(row for page in pages.values() for row in rows_of(page).get(key, ()))
        times = {read[row] / n for row, n in Counter(rows).items()}
        if len(times) > 1 and min(times) > 0:
            return RunDifference("data", f"some samples count {max(times):g} times where others count {min(times):g} times", step)
    sums = [sum(int(t["sum"]) for t in page.targets) % 2**64 for page in pages.values()]
    expected = sum(int(t["sum"]) for t in serial.targets) % 2**64
    is_divided = sum(t["elements"] for p in pages.values() for t in p.targets) == sum(t["elements"] for t in serial.targets)
    if serial.targets and is_divided and sum(sums) % 2**64 != expected:
        return RunDifference("data", "the samples agree, but the targets of the loss are not those of the serial batch", step)
    return None


def compare_masks(serial: RecordedPage, pages: dict[int, RecordedPage], step: int) -> tuple[RunDifference | None, str]:
    """Compare dropout masks between ranks. Returns the difference, and a note."""
    note, rows = "", {row for held in rows_of(serial).values() for row in held}
    for a, b in ((a, b) for a in pages for b in pages if a < b):
        read_a, read_b = ({row for held in rows_of(pages[r]).values() for row in held} & rows for r in (a, b))
        is_replica = not read_a or not read_b or read_a == read_b
        for i, (x, y) in enumerate(zip(pages[a].masks, pages[b].masks, strict=False)):
            if x["elements"] != y["elements"] or (x["mask"] == y["mask"]) == (x["input"] == y["input"]):
                continue
            where = f"dropout call {i + 1}: ranks {a} and {b}"
            if x["input"] == y["input"]:
                return RunDifference(
                    "dropout", f"{where} hold the same values but draw different masks: replicas drift apart", step, ranks=(a, b)
                ), note
            if is_replica:
                text = f"{where} hold different values but draw the same mask: their generators are in the same state"
                return RunDifference("dropout", text, step, ranks=(a, b)), note
            note = note or f"{where} read different samples but draw the same mask: the masks are correlated"
    return None, note


def explain_counts(serial: RecordedPage, pages: dict[int, RecordedPage]) -> str:
    """Explain wrong gradients by means over unequal numbers of targets, of ranks or of micro-batches; empty where they are equal."""
    counts = {rank: page.targets for rank, page in pages.items()}
    if not any(counts.values()) or any(t["reduction"] != "mean" for targets in counts.values() for t in targets):
        return ""
    per_rank = [sum(t["counted"] for t in targets) for targets in counts.values() if targets]
    micro = [[t["counted"] for t in targets] for targets in counts.values() if len(targets) > 1]
    if any(len(set(m)) > 1 for m in micro):
        return f"each micro-batch takes the mean over its own targets, {' and '.join(map(str, micro[0]))} of them"
    if len(set(per_rank)) < 2:
        return ""
    text = f"each rank takes the mean over its own targets, {' and '.join(map(str, per_rank))} of them"
    losses = [(sum(t["counted"] for t in page.targets), mean(page.losses)) for page in pages.values() if page.losses and page.targets]
    if losses and serial.losses:
        weighted = sum(n * x for n, x in losses) / max(1, sum(n for n, _ in losses))
        text += (
            f": the plain mean of the losses is {mean(x for _, x in losses):.6f}, weighted {weighted:.6f}, serial {mean(serial.losses):.6f}"
        )
    return text
