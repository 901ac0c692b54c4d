"""One verification in a process of its own: `python -m tests.support.one_verification MODEL LAYOUT BATCH DEVICE` prints a line of JSON.

Ranks of a verification are forks of its process, and a process that has used CUDA cannot be forked any more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import shardwise

ROOT = Path(__file__).parents[2]


def verified(model: str, layout: str, batch: int, device: str) -> dict[str, Any]:
    """Whether a layout's ranks equal the serial run, and the worst relative differences. Raises RuntimeError where it does not run."""
    command = [sys.executable, "-m", "tests.support.one_verification", model, layout, str(batch), device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{model} {layout} on {device}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


if __name__ == "__main__":
    found = shardwise.verify(sys.argv[1], sys.argv[2], int(sys.argv[3]), device=sys.argv[4])
    print(json.dumps({"ok": found.ok, "worst": found.worst, "text": str(found)}))
