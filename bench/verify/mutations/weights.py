"""Breaks weights of sums and bounds of slices: every product, quotient, mean and interpolation of `lower` and `run` that comes to a
floating-point number, and every part of a tensor that is taken there by a slice or `narrow`.

In: a module. Out: the same functions, whose code has a call around each of these. Numbers that are no floats (sizes, indices) stay.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.verify.mutations.collectives import INSTRUMENT, ROOT, function_of
from bench.verify.mutations.target import SCALED, SHIFTED, Active, Mutation

FOLDERS = ("lower", "run")
METHODS = ("mul", "mul_", "div", "div_", "mean", "lerp_", "true_divide")
HOOK, SLICE_HOOK, NARROW_HOOK = "_mutated_weight", "_mutated_slice", "_mutated_narrow"
# The serial reference runs through these as well, or is written in terms of them.
SHARED = ("run/verify/serial", "run/uncaptured/eager_draws", "lower/float64_mode", "run/prove", *INSTRUMENT)


class _Wrap(ast.NodeTransformer):
    """Puts `HOOK(site, value, in_place)` around each weight."""

    def __init__(self, module: str) -> None:
        self._module, self._path = module, list[str]()
        self.sites: list[str] = []
        self.slice_sites: list[str] = []

    def _inside(self, node: Any) -> Any:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _inside

    def _around(self, node: ast.expr, shown: ast.AST, in_place: bool = False) -> ast.Call:
        return ast.Call(ast.Name(HOOK, ast.Load()), [self._name_site(shown, self.sites), node, ast.Constant(in_place)], [])

    def _name_site(self, shown: ast.AST, sites: list[str]) -> ast.Constant:
        site = f"{self._module}.{'.'.join(self._path)}: {' '.join(ast.unparse(shown).split())}"
        if site in sites:
            site += f" ({sum(one.startswith(site) for one in sites) + 1})"
        sites.append(site)
        return ast.Constant(site)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        shown = ast.parse(ast.unparse(node), mode="eval").body
        self.generic_visit(node)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not self._path or not isinstance(node.ctx, ast.Load) or not any(isinstance(item, ast.Slice) for item in items):
            return node
        index = [_slice_object(item) if isinstance(item, ast.Slice) else item for item in items]
        whole = ast.Tuple(index, ast.Load()) if isinstance(node.slice, ast.Tuple) else index[0]
        return ast.Call(ast.Name(SLICE_HOOK, ast.Load()), [self._name_site(shown, self.slice_sites), node.value, whole], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        shown = ast.parse(ast.unparse(node), mode="eval").body
        self.generic_visit(node)
        return self._around(node, shown) if self._path and isinstance(node.op, ast.Mult | ast.Div) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        shown = ast.parse(ast.unparse(node)).body[0]
        self.generic_visit(node)
        if self._path and isinstance(node.op, ast.Mult | ast.Div):
            node.value = self._around(node.value, shown)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        shown = ast.parse(ast.unparse(node), mode="eval").body
        self.generic_visit(node)
        if self._path and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            return self._around(node, shown, node.func.attr.endswith("_"))
        if self._path and isinstance(node.func, ast.Attribute) and node.func.attr == "narrow" and len(node.args) == 3:
            arguments = [self._name_site(shown, self.slice_sites), node.func.value, *node.args]
            return ast.Call(ast.Name(NARROW_HOOK, ast.Load()), arguments, [])
        return node


def _slice_object(node: ast.Slice) -> ast.Call:
    return ast.Call(ast.Name("slice", ast.Load()), [part or ast.Constant(None) for part in (node.lower, node.upper, node.step)], [])


def install(active: Active) -> None:
    """Put the calls around the weights of every module of `lower` and `run` that is loaded, of those that matter; for good."""
    for module, code_of in prepared().values():
        module.__dict__[HOOK] = functools.partial(_weigh, active)
        module.__dict__[SLICE_HOOK] = functools.partial(_slice, active)
        module.__dict__[NARROW_HOOK] = functools.partial(_narrow, active)
        for function, code in code_of:
            function.__code__ = code


@functools.cache
def prepared() -> dict[str, tuple[ModuleType, list[tuple[FunctionType, CodeType]]]]:
    """By file: the module, and its functions with the code that has the calls. Made once, before ranks are forked."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        path = file.removeprefix(ROOT).removesuffix(".py")
        if not (name.startswith("shardwise.") and path.split("/")[0] in FOLDERS and file.endswith(".py")) or path.startswith(SHARED):
            continue
        wrap = _Wrap(path)
        tree = ast.fix_missing_locations(wrap.visit(ast.parse(Path(file).read_text(encoding="utf-8"))))
        made: dict[tuple[str, int], CodeType] = {}
        if wrap.sites or wrap.slice_sites:
            _collect(compile(tree, file, "exec"), made)
        pairs = []
        for function in _functions(module):
            code = made.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                pairs.append((function, code))
        found[path] = module, pairs
    return found


def _collect(code: CodeType, found: dict[tuple[str, int], CodeType]) -> None:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found[inner.co_qualname, inner.co_firstlineno] = inner
            _collect(inner, found)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """All functions that are written in a module, those of its classes too."""
    seen: set[int] = set()

    def of(value: Any) -> Iterator[FunctionType]:
        for name in ("__func__", "fget", "fset", "func", "__wrapped__"):
            inner = getattr(value, name, None) if not isinstance(value, type | ModuleType | Tensor) else None
            if isinstance(inner, FunctionType) and inner is not value:
                yield from of(inner)
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and id(value) not in seen:
            seen.add(id(value))
            yield value
        elif isinstance(value, type) and value.__module__ == module.__name__ and id(value) not in seen:
            seen.add(id(value))
            for one in list(vars(value).values()):
                yield from of(one)

    for value in list(vars(module).values()):
        yield from of(value)


def _weigh(active: Active, site: str, value: Any, in_place: bool) -> Any:
    if isinstance(value, Tensor):
        counts = value.is_floating_point() or value.is_complex()
    else:
        counts = isinstance(value, float)
    if not counts or not active.hit(Mutation(site, "weight", SCALED)):
        return value
    if in_place:
        with torch.no_grad():
            value.mul_(1 + active.off)
        return value
    return value * (1 + active.off)


def _slice(active: Active, site: str, value: Any, index: Any) -> Any:
    """Return `value[index]`, or what lies one element further where there is one: of a tensor, along the first dimension that is cut."""
    if isinstance(value, Tensor) and value.dim():
        items = index if isinstance(index, tuple) else (index,)
        shifted = _shift_items(tuple(value.shape), items)
        if shifted is not None and active.hit(Mutation(site, "slice", SHIFTED)):
            return value[shifted]
    return value[index]


def _shift_items(shape: tuple[int, ...], items: tuple[Any, ...]) -> tuple[Any, ...] | None:
    dim = 0
    for k, item in enumerate(items):
        if item is None:
            continue
        if item is Ellipsis:
            dim = len(shape) - sum(other is not None for other in items[k + 1 :])
            continue
        if isinstance(item, Tensor):
            return None
        if isinstance(item, slice):
            start, stop, step = item.indices(shape[dim])
            if step == 1 and 0 < stop - start < shape[dim]:
                by = 1 if stop < shape[dim] else -1
                return (*items[:k], slice(start + by, stop + by), *items[k + 1 :])
        dim += 1
    return None


def _narrow(active: Active, site: str, value: Any, dim: int, start: int, length: int) -> Any:
    if 0 < length < value.shape[dim] and active.hit(Mutation(site, "slice", SHIFTED)):
        start += 1 if start + length < value.shape[dim] else -1
    return value.narrow(dim, start, length)


def static_sites() -> list[str]:
    """Every function of `lower` and `run` that calls a collective, from the syntax trees: `run/engine.Engine._mean_of: all_reduce`."""
    from bench.verify.mutations.collectives import OPERATIONS

    found: dict[str, None] = {}
    for folder in FOLDERS:
        for file in sorted(Path(ROOT, folder).rglob("*.py")):
            module = str(file).removeprefix(ROOT).removesuffix(".py")
            if module in INSTRUMENT:
                continue
            for qualname, node in _calls(ast.parse(file.read_text(encoding="utf-8")), ()):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
                if name in OPERATIONS and name != "irecv":  # a message is broken where it is sent
                    found[f"{module}.{function_of(qualname)}: {name}"] = None
    return list(found)


def _calls(node: ast.AST, path: tuple[str, ...], inside: bool = False) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            # What is inside a function belongs to it, as in `function_of`.
            yield from _calls(child, path if inside else (*path, child.name), inside or isinstance(child, ast.FunctionDef))
            continue
        if isinstance(child, ast.Call):
            yield ".".join(path), child
        yield from _calls(child, path, inside)
