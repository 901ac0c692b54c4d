"""scripts/validate: prints an error per table, writes docs/validation.md and, where asked, the rows as JSON.

Other checks against what is not shardwise's code are commands of their own: scripts/validate rules (factor rules beside brute force),
scripts/validate mutations (everything in the runtime broken once, which verify must see), scripts/validate scripts (public training
scripts beside themselves on ranks).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

from bench.validate import bubbles, collectives, document, layer, sharded, single_node
from shardwise.errors import ShardwiseError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "rules": "bench.verify.rules.__main__", "mutations": "bench.verify.mutations.__main__", "published": "bench.validate.published",
    "scripts": "bench.verify.scripts.__main__", "silicon": "bench.validate.silicon",
    "training": "bench.validate.training", "blind": "bench.validate.blind",
}  # fmt: skip
PARTS = {"collectives": collectives, "layer": layer, "bubbles": bubbles, "single_node": single_node, "sharded": sharded}


def main() -> int:
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        return int(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="scripts/validate", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "validation", metavar="DIR", help="folder of the measured tables"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, as JSON")
    parser.add_argument("--only", choices=PARTS, action="append", help="only these tables; nothing is written to docs then")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them, for the catalogue")
    asked = parser.parse_args()
    began = time.perf_counter()
    chosen = {name: PARTS[name] for name in asked.only or PARTS}
    try:
        if asked.fit:
            print("\n".join(part.refit(asked.data) for name, part in chosen.items() if name != "bubbles"))
            return 0
        rows = [row for part in chosen.values() for row in part.rows(asked.data)]
    except ShardwiseError as error:
        print(f"scripts/validate: {error}", file=sys.stderr)
        return 2
    print(document.table(rows))
    print(f"\n{time.perf_counter() - began:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps([row.record() for row in rows], indent=1) + "\n")
    if not asked.only:
        document.write(ROOT / "docs" / "validation.md", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
