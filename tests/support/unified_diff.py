"""Applies a unified diff, strictly: each line that it keeps or removes must stand where its hunk says."""

from __future__ import annotations

import re


def apply_diff(text: str, diff: str) -> str:
    """Return `text` after `diff`. Raises ValueError where a line of the diff is not the text's."""
    old, new = text.splitlines(), list[str]()
    at = 0
    for line in diff.splitlines():
        if hunk := re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@", line):
            start = int(hunk[1]) - 1
            if start < at:
                raise ValueError(f"hunks overlap: {line}")
            new += old[at:start]
            at = start
            if len(new) != int(hunk[2]) - 1:
                raise ValueError(f"lines are counted otherwise: {line}")
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            if at >= len(old) or old[at] != line[1:]:
                raise ValueError(f"line {at + 1} is not {line[1:]!r}")
            new += [old[at]] if line.startswith(" ") else []
            at += 1
    return "\n".join([*new, *old[at:]]) + "\n"
