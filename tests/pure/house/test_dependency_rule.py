"""The house's rules that a syntax tree can show: which part may import which, where torch and the environment are allowed.

Each rule is a function from a file's text to complaints, so that every one has a broken twin below that it must refuse.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[3] / "src" / "shardwise"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
MOST_LINES = 500
MOST_OF_A_FUNCTION = 60
# Longer still, until they follow; of the simulators' loops, whose calls would cost time, no more than these lines.
LONGER_FUNCTIONS = {
    "cost/stages/base.py stage_base_cost": 108,
    "simulate/clock.py simulate": 71, "simulate/makespan.py makespan_s": 66, "simulate/messages.py deliver_messages": 68,
}  # fmt: skip

# part -> the parts that it may import besides itself; everything points left in the house's order.
BASE = {"errors", "units"}
DATA = BASE | {"plan"}
PRICED = DATA | {"ops", "model", "cluster", "schedules", "collectives", "simulate", "cost"}
RANKS = DATA | {"ops", "model", "capture", "schedules", "collectives", "world"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "callable": set(),
    "units": {"errors"},
    "plan": BASE | {"callable"},
    "ops": DATA,
    "model": DATA | {"ops"},
    "capture": DATA | {"ops", "model"},
    "cluster": DATA,
    "schedules": DATA,
    "collectives": DATA,
    "frameworks": DATA | {"schedules"},
    "cost": PRICED,
    "simulate": DATA | {"cluster", "callable"},
    "solve": PRICED,
    "report": PRICED | {"callable"},
    "serve": set(),
    "serve/placement": DATA | {"cluster"},
    "serve/deploy": PRICED | {"capture", "zoo", "serve/placement", "world"},
    "zoo": DATA | {"ops", "model", "capture"},
    "world": DATA,
    "lower": RANKS,
    "run": RANKS | {"lower"},
    "audit": BASE,
    "train": RANKS | {"lower", "run", "zoo"},
}
DIVIDED = ("serve",)  # rooms whose subrooms are parts of their own
# What is called from outside may import every room, and of each other only these: the command line calls the functions, never they it.
EVERYTHING: dict[str, set[str]] = {
    "api_loop": set(), "api": {"api_loop"}, "api_decode": {"api"}, "adapters": {"api_loop"}, "api_prove": {"api"},
    "cli": {"api", "api_loop_verify", "api_prove"}, "__main__": {"cli"}, "api_loop_verify": {"api_loop"},
    "__init__": {"api", "api_decode", "api_prove", "cli"},
}  # fmt: skip
# Measuring a machine with several ranks needs ranks, which compute as they do and run programs.
EXTRA = {f"cluster/probe/{name}.py": {"world"} for name in ("measure", "operators")} | {
    "cluster/probe/transfers.py": {"world", "collectives"}
}

# `Cluster.parse` is public: it finds clusters by name.
PUBLIC_CIRCLES = (("cluster/cluster.py", "cluster/find.py"),)

TORCH_PARTS = {"adapters", "audit", "capture", "serve/deploy", "zoo", "world", "lower", "run", "train"}
TORCH_FILES = {"cluster/probe/", "api.py", "api_decode.py", "api_loop.py", "api_loop_verify.py", "api_prove.py"}
ENVIRONMENT_FILES = (
    "cli/", "world/launch/launch", "world/launch/prepared_rank", "world/launch/fork_server", "world/launch/current", "capture/cache/store",
    "run/gradients/replica_watch", "world/fused_products", "api_loop_verify", "audit/record/", "audit/hook/",
)  # fmt: skip
# What unpickles, or is unpickled: none of these ever reads or writes a byte for shardwise.
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


parsed = lru_cache(maxsize=1)(ast.parse)  # all rules ask of one file after another


def part_of(file: str) -> str:
    """The part of the house that a file lies in: `plan/ir/mesh.py` is of `plan`, `units.py` of `units`."""
    first, _, rest = file.partition("/")
    return f"{first}/{rest.partition('/')[0]}" if first in DIVIDED and "/" in rest else first.removesuffix(".py")


def imported(tree: ast.AST, file: str) -> Iterator[str]:
    """Full names of all imported modules, inside functions and for type checkers only included."""
    package = ["shardwise", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            if module == "shardwise":
                yield from (f"shardwise.{alias.name}" for alias in node.names)


def wrong_imports(text: str, file: str) -> list[str]:
    part = part_of(file)
    allowed = {part} | (EVERYTHING[part] if part in EVERYTHING else ALLOWED[part]) | EXTRA.get(file, set())
    targets = {part_of("/".join([*name.split(".")[1:], ""])) for name in imported(parsed(text), file) if name.startswith("shardwise.")}
    if part in EVERYTHING:
        targets &= EVERYTHING.keys()
    return [f"{file} imports shardwise.{target}; {part} may import {', '.join(sorted(allowed))}" for target in sorted(targets - allowed)]


def wrong_torch(text: str, file: str) -> list[str]:
    names = {name.split(".")[0] for name in imported(parsed(text), file)}
    if "torch" not in names or part_of(file) in TORCH_PARTS or file.startswith(tuple(TORCH_FILES)):
        return []
    if part_of(file) == "cli" and not _at_the_top(parsed(text), "torch"):
        return []
    return [f"{file} imports torch; only {', '.join(sorted(TORCH_PARTS | TORCH_FILES))} may, and cli inside its functions"]


def wrong_pickle(text: str, file: str) -> list[str]:
    tree = parsed(text)
    found = [f"{file} imports {name}" for name in imported(tree, file) if name.split(".")[0] in PICKLING]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "torch" and node.attr in ("load", "save"):
                found.append(f"{file}:{node.lineno} uses torch.{node.attr}, which pickles")
            if node.attr.endswith(("_object", "_object_list")) and node.value.id in ("dist", "distributed"):
                found.append(f"{file}:{node.lineno} uses {node.attr}, which pickles")
    return found


def wrong_environment(text: str, file: str) -> list[str]:
    if file.startswith(ENVIRONMENT_FILES):
        return []
    return [
        f"{file}:{node.lineno} reads the environment; only {', '.join(ENVIRONMENT_FILES)} may, the rest takes arguments"
        for node in ast.walk(parsed(text))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.Attribute) and node.attr == "argv" and isinstance(node.value, ast.Name) and node.value.id == "sys")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"})
    ]


def wrong_kind(text: str, file: str) -> list[str]:
    """Who asks what kind a device is: its own file, and who shows it. All others ask `Cluster.kind` or `shardwise.cost.devices`."""
    if file.startswith(("cluster/", "cost/devices/")) or file == "report/cluster_tables.py":
        return []
    return [
        f"{file}:{node.lineno} asks for the kind of a device; ask a `Kind` or `Devices` by name for what follows from it"
        for node in ast.walk(parsed(text))
        if (isinstance(node, ast.Attribute) and node.attr == "kind" and ast.unparse(node.value).endswith("device"))
        or (isinstance(node, ast.Name) and node.id in ("Processors", "Gpus"))
        or (isinstance(node, ast.Attribute) and node.attr == "is_cpu")
    ]


def too_long(text: str, file: str) -> list[str]:
    lines = text.count("\n")
    return [f"{file} has {lines} lines; past {MOST_LINES} it is two files"] if lines > MOST_LINES else []


def too_long_functions(text: str, file: str) -> list[str]:
    functions = (n for n in ast.walk(parsed(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    lengths = [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in functions]
    allowed = {name: LONGER_FUNCTIONS.get(f"{file} {name}", MOST_OF_A_FUNCTION) for name, _ in lengths}
    return [f"{file}: {name} has {n} lines; past {allowed[name]} it is two functions" for name, n in lengths if n > allowed[name]]


def undescribed(text: str, file: str) -> list[str]:
    return [] if not text.strip() or ast.get_docstring(parsed(text)) else [f"{file} has no docstring: what goes in, what comes out"]


def circles(texts: Mapping[str, str]) -> list[str]:
    """Of files by name: where files of one folder, or its subfolders as wholes, need each other in a circle to be imported.

    What is imported inside a function or for type checkers only is not needed. A circle of files is one of the folder that has them all.
    """
    needs = {file: needed(parsed(text), file, texts) for file, text in texts.items()}
    found = []
    for folder in sorted({parent for file in texts for parent in PurePosixPath(file).parents}):
        edges: dict[str, set[str]] = {}
        for file in filter(lambda file: PurePosixPath(file).is_relative_to(folder), texts):
            beside = {child_of(folder, target) for target in needs[file] if PurePosixPath(target).is_relative_to(folder)}
            edges.setdefault(child_of(folder, file), set()).update(beside - {child_of(folder, file)})
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            found.append(f"in {folder}: {' is needed by '.join(error.args[1])}")
    return found


def child_of(folder: PurePosixPath, file: str) -> str:
    return PurePosixPath(file).relative_to(folder).parts[0]


def hidden_circles(texts: Mapping[str, str]) -> list[str]:
    """Circles of files, imports inside functions included; but for those of public names that DESIGN.md names."""
    edges = {file: needed(parsed(text), file, texts, inside_functions=True) for file, text in texts.items()}
    for file, target in PUBLIC_CIRCLES:
        edges.get(file, set()).discard(target)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" is needed by ".join(error.args[1])]
    return []


def needed(tree: ast.Module, file: str, files: Mapping[str, str], inside_functions: bool = False) -> set[str]:
    """Those of `files` that are imported when `file` is, or when its functions run, too."""
    package = ["shardwise", *file.split("/")[:-1]]
    names: list[str] = []
    for node in _run_at_any_time(tree.body) if inside_functions else _run_on_import(tree.body):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*(package[: len(package) - node.level + 1] if node.level else []), *([node.module] if node.module else [])]
            names += [".".join([*base, alias.name]) for alias in node.names]
    found: set[str] = set()
    for name in (name for name in names if name.startswith("shardwise.")):
        path = "/".join(name.split(".")[1:])
        behind = path.rpartition("/")[0]  # of what is a name inside a file
        places = [f"{path}.py", f"{path}/__init__.py", f"{behind}.py", f"{behind}/__init__.py"]
        found.update([place for place in places if place in files][:1])
    return found


def _run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _run_on_import(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _run_on_import(node.body)


def _run_at_any_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in _run_on_import(body):
        yield node
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, (ast.Import, ast.ImportFrom)))


def unexplained_imports(text: str, file: str) -> list[str]:
    """Imports inside functions without a comment that says why, at the first of those that stand together or above it."""
    lines, found = text.splitlines(), []
    for node in ast.walk(parsed(text)):
        for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            for before, each in zip((None, *body), body, strict=False):
                imports = (ast.Import, ast.ImportFrom)
                if isinstance(each, imports) and each.col_offset and not isinstance(before, imports):
                    guarded = isinstance(node, (ast.Try, ast.If)) and not node.col_offset  # optional, or for type checkers
                    said = [lines[each.lineno - 2].strip()[:1], *lines[each.lineno - 1 : each.end_lineno]]
                    if not guarded and not any("#" in line for line in said):
                        found.append(f"{file}:{each.lineno} {lines[each.lineno - 1].strip()}: say in a comment why it is not at the top")
    return found


def _at_the_top(tree: ast.Module, name: str) -> bool:
    """Whether importing the file imports `name`: not inside a function, and not for type checkers only."""
    for node in _run_on_import(tree.body):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == name for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == name:
            return True
    return False


Rule = Callable[[str, str], list[str]]
RULES: tuple[Rule, ...] = (
    wrong_imports, wrong_torch, wrong_pickle, wrong_environment, wrong_kind, too_long, too_long_functions, undescribed,
    unexplained_imports,
)  # fmt: skip


def test_every_file_keeps_every_rule() -> None:
    """One test of all rules: of several cases only the first would be short, and the others seldom run."""
    complaints: list[str] = []
    for file in FILES:
        text = (ROOT / file).read_text()
        complaints += [line for rule in RULES for line in rule(text, file)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(
    ("rule", "text", "file"),
    [
        (wrong_imports, "from shardwise.solve.search import search", "run/engine.py"),
        (wrong_imports, "def f():\n    import shardwise.run.engine", "report/page.py"),
        (wrong_imports, "from ..run import engine", "solve/search.py"),
        (wrong_imports, "from shardwise import cli", "plan/plan.py"),
        (wrong_imports, "from shardwise.cli.output import show_table", "api.py"),
        (wrong_imports, "def f():\n    from shardwise import cli", "api_loop.py"),
        (wrong_imports, "def f():\n    from shardwise.api import plan", "api_loop.py"),
        (wrong_imports, "from shardwise.world.launch.launch import launch", "cluster/cluster.py"),
        (wrong_imports, "from shardwise.world.launch.launch import launch", "cluster/probe/cache.py"),
        (wrong_torch, "import torch", "plan/ir/mesh.py"),
        (wrong_torch, "def f():\n    from torch import nn", "solve/search.py"),
        (wrong_torch, "import torch", "cli/plan.py"),
        (wrong_pickle, "import pickle", "run/checkpoint.py"),
        (wrong_pickle, "import torch\ntorch.load('x')", "run/checkpoint.py"),
        (wrong_pickle, "from torch import distributed as dist\ndist.all_gather_object([], 1)", "world/world.py"),
        (wrong_environment, "import os\nx = os.environ['RANK']", "run/engine.py"),
        (wrong_environment, "from os import getenv", "lower/local.py"),
        (wrong_environment, "import sys\nx = sys.argv", "train/config.py"),
        (wrong_kind, "def f(cluster):\n    return cluster.device.kind == 'cpu'", "solve/space.py"),
        (wrong_kind, "def f(pricer):\n    return isinstance(pricer.devices, Processors)", "cost/step.py"),
        (wrong_kind, "def f(cluster):\n    return cluster.is_cpu", "cli/train.py"),
        (too_long, "x = 1\n" * 501, "plan/ir/mesh.py"),
        (too_long_functions, "def f():\n" + "    x = 1\n" * 60, "run/engine.py"),
        (undescribed, "x = 1", "run/engine.py"),
        (unexplained_imports, "def f():\n    import json", "run/engine.py"),
        (unexplained_imports, "def f():\n    import json  # why\n    x = 1\n    from math import (\n        prod,\n    )", "run/engine.py"),
    ],
)
def test_a_broken_file_is_refused(rule: Rule, text: str, file: str) -> None:
    assert rule(text, file)


@pytest.mark.parametrize(
    ("rule", "text", "file"),
    [
        (wrong_imports, "from shardwise.plan.plan import Plan", "report/page.py"),
        (wrong_imports, "def f():\n    from shardwise import api", "cli/plan.py"),
        (wrong_imports, "from shardwise.world.launch.launch import launch", "cluster/probe/measure.py"),
        (wrong_torch, "def f():\n    import torch", "cli/plan.py"),
        (wrong_environment, "import os\nx = os.environ['RANK']", "world/launch/launch.py"),
        (unexplained_imports, "def f():\n    import json  # why\n    import math", "run/engine.py"),
        (unexplained_imports, "def f():\n    # why\n    from json import (\n        loads,\n    )", "run/engine.py"),
    ],
)
def test_a_right_file_passes(rule: Rule, text: str, file: str) -> None:
    assert not rule(text, file)


def test_no_import_inside_a_function_hides_a_circle() -> None:
    found = hidden_circles({file: (ROOT / file).read_text() for file in FILES})
    assert not found, "\n".join(found)
    assert hidden_circles({"run/a.py": "from shardwise.run.b import x", "run/b.py": "def f():\n    import shardwise.run.a"})


def test_the_order_of_the_parts_has_no_circle() -> None:
    placed: set[str] = set()
    left = {part: set(needs) for part, needs in (ALLOWED | EVERYTHING).items()}
    while left:
        ready = {part for part, needs in left.items() if needs - {part} <= placed}
        assert ready, f"these parts import each other in a circle: {sorted(left)}"
        placed |= ready
        left = {part: needs for part, needs in left.items() if part not in ready}


def test_no_room_has_a_circle_of_imports_inside() -> None:
    found = circles({file: (ROOT / file).read_text() for file in FILES})
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("texts", "where"),
    [
        ({"run/a.py": "from shardwise.run.b import x", "run/b.py": "from shardwise.run import a"}, "in run:"),
        ({"run/a.py": "from . import b", "run/b.py": "try:\n    import shardwise.run.a\nexcept ImportError:\n    pass"}, "in run:"),
        (
            {"run/a/b.py": "import shardwise.run.a.c", "run/a/c.py": "from . import d", "run/a/d.py": "import shardwise.run.a.b"},
            "in run/a:",
        ),
        # No file needs itself, but neither subroom can be read before the other.
        ({"run/a/b.py": "import shardwise.run.c.d", "run/c/d.py": "", "run/c/e.py": "import shardwise.run.a.b"}, "in run:"),
        ({"run/a/__init__.py": "from shardwise.run.a.b import x", "run/a/b.py": "from shardwise.run.a import y"}, "in run/a:"),
    ],
)
def test_a_circle_is_seen(texts: dict[str, str], where: str) -> None:
    (found,) = circles(texts)
    assert found.startswith(where)


@pytest.mark.parametrize(
    "later",
    [
        "def f():\n    import shardwise.run.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardwise.run.a import x",
        "from shardwise.run import c",
    ],
)
def test_what_importing_a_file_does_not_import_makes_no_circle(later: str) -> None:
    assert not circles({"run/a.py": "from shardwise.run.b import x", "run/b.py": later, "run/c.py": ""})


def test_every_part_has_its_place_in_the_order() -> None:
    unknown = {part_of(file) for file in FILES} - set(ALLOWED) - set(EVERYTHING)
    assert not unknown, f"parts without a place in the order: {sorted(unknown)}"
