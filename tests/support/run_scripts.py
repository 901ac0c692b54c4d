"""`python run_scripts.py OUT.json a.py b.py ...`: runs scripts one after the other in this process, each in a folder of its own, and writes
what each printed (rank 0's). Several scripts share one start of the ranks that way."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path


def run_scripts(out: Path, scripts: list[Path]) -> None:
    printed: dict[str, str] = {}
    for script in scripts:
        folder = out.parent / f"{out.stem}-{script.stem}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            runpy.run_path(str(script), run_name="__main__")
        printed[script.stem] = text.getvalue()
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(printed))


if __name__ == "__main__":
    run_scripts(Path(sys.argv[1]).resolve(), [Path(word).resolve() for word in sys.argv[2:]])
