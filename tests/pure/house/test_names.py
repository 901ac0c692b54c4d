"""What names and docstrings are, counted over the whole tree: each count may only fall. Lower a limit when the tree is better than it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "src" / "shardwise"
VERBS = frozenset(
    "build capture check compare compile dump find format join launch load lower main measure parse plan predict price propagate prove "
    "read refuse report run save search send shard simulate split train verify write".split()
)
PARTICIPLE = re.compile(
    r"[a-z]+(ed|en)$|^(kept|found|made|given|told|held|cut|put|left|sent|drawn|shown|apart|together|beside|behind|again|like)$"
)
FIRST_WORDS = frozenset("What Of Whether Those As Where How Which All Who So By That Whose Until Behind Beside".split())
LIMITS = {
    "class names in several modules": 0,
    "functions of one word that is no common verb": 51,
    "functions that are a participle": 1,
    "docstrings that begin with What, Of, ...": 0,
    "tuples splatted into named parameters": 0,
}


def count_names(modules: Mapping[str, ast.Module]) -> dict[str, int]:
    """Count per kind, over modules by name."""
    classes: dict[str, set[str]] = defaultdict(set)
    one_word = participles = docstrings = 0
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name.strip("_")].add(module)
            if isinstance(node, ast.FunctionDef):
                name = node.name.strip("_")
                one_word += "_" not in name and name not in VERBS
                participles += "_" not in name and bool(PARTICIPLE.match(name))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__") and (text := ast.get_docstring(node)):
                docstrings += (re.findall(r"[A-Za-z']+", text) or [""])[0] in FIRST_WORDS
    several = sum(len(found) > 1 for found in classes.values())
    return dict(zip(LIMITS, (several, one_word, participles, docstrings, len(find_splats(modules))), strict=True))


def find_splats(modules: Mapping[str, ast.Module]) -> list[str]:
    """Return calls of our own functions and classes that spread a tuple made elsewhere over named parameters."""
    variadic: dict[tuple[str, str], bool] = {}
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                variadic[module, node.name] = node.args.vararg is not None
            if isinstance(node, ast.ClassDef):
                made = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
                variadic[module, node.name] = bool(made and made[0].args.vararg)
    found = []
    for module, tree in modules.items():
        names = {node.name: (module, node.name) for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            assert isinstance(call.func, ast.Name)
            if variadic.get(names.get(call.func.id, ("", ""))) is False:
                spread = [a for a in call.args if isinstance(a, ast.Starred) and isinstance(a.value, (ast.Name, ast.Attribute))]
                found += [f"{module}:{call.lineno} {ast.unparse(call)[:80]}" for _ in spread[:1]]
    return found


def tree_of(files: Iterable[Path]) -> dict[str, ast.Module]:
    """Parse files of the package, by module name."""
    parts = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): ast.parse(path.read_text()) for path, p in parts.items()}


@pytest.fixture(scope="module")
def package() -> dict[str, ast.Module]:
    return tree_of(ROOT.rglob("*.py"))


@pytest.mark.parametrize("kind", LIMITS)
def test_names_get_no_worse(kind: str, package: dict[str, ast.Module]) -> None:
    assert count_names(package)[kind] <= LIMITS[kind], "\n".join(find_splats(package)) if "splatted" in kind else kind


def test_each_kind_of_bad_name_is_counted() -> None:
    bad = {
        "a": ast.parse('class Run: ...\ndef told(x): "What it is."\ndef _apart(x, y): ...\nhow = 1, 2\n_apart(*how)\n'),
        "b": ast.parse('class _Run: ...\ndef read_file(path): "Read a file."\n'),
    }
    assert list(count_names(bad).values()) == [1, 2, 2, 1, 1]
