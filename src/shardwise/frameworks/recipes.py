"""Python configurations as flat keys, from their syntax tree: nothing runs.

Followed are assignments to attributes (`cfg.model.tensor_model_parallel_size = 4`), keyword arguments of calls (nested calls become
nested keys), defaults of functions and dataclasses, and calls of other recipes, in this file or in a module beside it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError, did_you_mean

_MOST_DEPTH = 12  # of recipes that call one another
_UNKNOWN = object()


class RecipeModule:
    """A parsed file with its functions, constants and imports."""

    def __init__(self, text: str, path: Path) -> None:
        self.path = path
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise UsageError(f"{path} cannot be read: line {error.lineno}: {error.msg}") from None
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.constants: dict[str, Any] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for name in _names_assigned(node):
                    self.constants[name] = _value_of(node.value, self.constants)

    def find_function(self, name: str, depth: int = 0) -> tuple[RecipeModule, str] | None:
        """Return the module that defines a function, this one or one that it is imported from, and its name there; None elsewhere."""
        if name in self.functions:
            return self, name
        if depth > _MOST_DEPTH:
            return None
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and name in _names_assigned(node) and isinstance(node.value, ast.Name):
                return self.find_function(node.value.id, depth + 1)
        for inner in ast.walk(self.tree):
            if isinstance(inner, ast.ImportFrom):
                for alias in inner.names:
                    if alias.name not in ("*", name) and alias.asname != name:
                        continue
                    if (alias.name == "*" or (alias.asname or alias.name) == name) and (file := self._find_module(inner)):
                        module = RecipeModule(file.read_text(encoding="utf-8", errors="replace"), file)
                        if found := module.find_function(name if alias.name == "*" else alias.name, depth + 1):
                            return found
        return None

    def _find_module(self, node: ast.ImportFrom) -> Path | None:
        parts = (node.module or "").split(".") if node.module else []
        folders = [self.path.parents[node.level - 1]] if node.level else list(self.path.absolute().parents)
        for folder in folders:
            for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if parts and file.is_file() and file != self.path:
                    return file
        return None


def read_recipe(text: str, path: Path, name: str = "") -> dict[str, Any]:
    """Return the keys of a recipe: of the function `name`, or of the only one that configures something; of a script, of its calls.

    Raises:
        UsageError: several recipes and no name, or a name that is none of them.
    """
    module = RecipeModule(text, path)
    recipes = [function for function, node in module.functions.items() if _has_configuration(node)]
    if name and name not in module.functions and name not in module.classes:
        raise UsageError(f"{path} has no recipe {name}{did_you_mean(name, recipes)}; it has {', '.join(recipes) or 'none'}")
    is_module_level = any(not isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Expr) for node in module.tree.body)
    public = [function for function in recipes if not function.startswith("_")]
    if not name and len(public) > 1 and not _has_calls(module.tree):
        shown = ", ".join(public[:40])
        raise UsageError(f"{path} has {len(public)} recipes: name one with --recipe NAME: {shown}")
    keys: dict[str, Any] = {}
    chosen = name or (public[0] if len(public) == 1 else "")
    if chosen in module.functions:
        gpus = re.search(r"_(\d+)gpus?_", chosen)
        return {**_keys_of_function(module, chosen, 0), **({"nproc_per_node": int(gpus[1])} if gpus else {})}
    for class_name, node in module.classes.items():
        if not name or name == class_name:
            keys |= _keys_of_statements(module, node.body, {}, 0)
    if not name and is_module_level:
        keys |= _keys_of_statements(module, module.tree.body, {}, 0)
    for function in [] if name or _has_calls(module.tree) else public:
        keys |= _keys_of_function(module, function, 0)
    return keys | _keys_of_calls(module, module.tree)


def _has_calls(tree: ast.Module) -> bool:
    """Return whether a file is a script: it calls something, at the top or under `if __name__`."""
    return any(isinstance(node, ast.Expr | ast.If) and any(isinstance(n, ast.Call) for n in ast.walk(node)) for node in tree.body)


def _has_configuration(node: ast.FunctionDef) -> bool:
    """Return whether a function returns a configuration: it assigns attributes, or returns a call with keywords."""
    returns = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value is not None]
    has_attributes = any(isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) for inner in ast.walk(node))
    return bool(returns) and (has_attributes or any(isinstance(inner.value, ast.Call) and inner.value.keywords for inner in returns))


def _keys_of_function(module: RecipeModule, name: str, depth: int) -> dict[str, Any]:
    node = module.functions[name]
    local = dict(module.constants)
    arguments = [*node.args.posonlyargs, *node.args.args]
    defaults = dict(zip([a.arg for a in arguments[len(arguments) - len(node.args.defaults) :]], node.args.defaults, strict=True))
    defaults |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None}
    given = {key: value for key, default in defaults.items() if (value := _value_of(default, local)) is not _UNKNOWN}
    return {**given, **_keys_of_statements(module, node.body, {**local, **given}, depth)}


def _keys_of_statements(module: RecipeModule, body: list[ast.stmt], local: dict[str, Any], depth: int) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for node in _iterate_statements(body):
        if isinstance(node, ast.Return) and node.value is not None:
            keys |= _keys_of_value(module, "", node.value, local, depth)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                keys |= _keys_of_target(module, target, node.value, local, depth, keys)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            keys |= _keys_of_arguments(module, "", node.value, local, depth)
    return keys


def _keys_of_target(
    module: RecipeModule, target: ast.expr, value: ast.expr, local: dict[str, Any], depth: int, keys: dict[str, Any]
) -> dict[str, Any]:
    if isinstance(target, ast.Name):
        if (known := _value_of(value, local)) is not _UNKNOWN:
            local[target.id] = known
            return {target.id: known} if not target.id.startswith("_") else {}
        return _keys_of_value(module, "", value, local, depth)
    path = _path_of(target)
    if not path:
        return {}
    for key in [key for key in keys if key.startswith(path + ".") and isinstance(value, ast.Call)]:
        del keys[key]
    return _keys_of_value(module, path, value, local, depth)


def _keys_of_value(module: RecipeModule, path: str, value: ast.expr, local: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return the keys under `path` of an expression: a value, or a call's name and its keyword arguments."""
    known = _value_of(value, local)
    if known is not _UNKNOWN:
        return {path: known} if path else {}
    if isinstance(value, ast.List | ast.Tuple):  # of converters or callbacks: each under its own name
        calls = [item for item in value.elts if isinstance(item, ast.Call)]
        inner = {
            key: item for call in calls for key, item in _keys_of_value(module, f"{path}.{_path_of(call.func)}", call, local, depth).items()
        }
        return {path: ", ".join(_path_of(call.func) for call in calls), **inner} if path and calls else {}
    if not isinstance(value, ast.Call):
        return {}
    name = _path_of(value.func)
    keys: dict[str, Any] = {path: name} if path else {}
    if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call):
        keys |= _keys_of_value(module, path, value.func.value, local, depth)
    last = name.rpartition(".")[2]
    found = module.find_function(last)
    if found is not None and depth < _MOST_DEPTH:
        inner = _keys_of_function(found[0], found[1], depth + 1)
        keys |= {f"{path}.{key}" if path else key: item for key, item in inner.items()}
    return keys | _keys_of_arguments(module, path, value, local, depth)


def _keys_of_arguments(module: RecipeModule, path: str, call: ast.Call, local: dict[str, Any], depth: int) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for argument in call.args:
        if isinstance(argument, ast.Call):
            keys |= _keys_of_value(module, path, argument, local, depth)
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if texts and path:
        keys[f"{path}.{_path_of(call.func).rpartition('.')[2]}"] = texts[0]
    for keyword in call.keywords:
        if keyword.arg:
            keys |= _keys_of_value(module, f"{path}.{keyword.arg}" if path else keyword.arg, keyword.value, local, depth)
    return keys


def _keys_of_calls(module: RecipeModule, tree: ast.AST) -> dict[str, Any]:
    """Return the keywords of every call of a script that nothing else covers, under the called name."""
    keys: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.keywords:
            name = _path_of(node.func).rpartition(".")[2]
            for keyword in node.keywords:
                value = _value_of(keyword.value, module.constants)
                if keyword.arg and value is not _UNKNOWN:
                    keys[f"{name}.{keyword.arg}"] = value
    return keys


def _iterate_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order, those of `with` and of the first branch of `if __name__` included, others' conditions not."""
    for node in body:
        if isinstance(node, ast.With) or (isinstance(node, ast.If) and "__name__" in ast.dump(node.test)):
            yield from _iterate_statements(node.body)
        else:
            yield node


def _names_assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _path_of(node: ast.expr) -> str:
    """Return the dotted name of an expression without its first variable for attributes of it; the name itself for names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
        if len(parts) > 1 and isinstance(node.ctx, ast.Load) and node.id[:1].islower():
            parts.pop()
    return ".".join(reversed(parts))


def _value_of(node: ast.expr, local: dict[str, Any]) -> Any:
    """Return the value of a constant expression; `_UNKNOWN` for others."""
    if isinstance(node, ast.Name):
        return local.get(node.id, _UNKNOWN)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Add | ast.Sub):
        left, right = _value_of(node.left, local), _value_of(node.right, local)
        if not isinstance(left, int) or not isinstance(right, int) or (isinstance(node.op, ast.FloorDiv) and not right):
            return _UNKNOWN
        return {ast.Mult: left * right, ast.Add: left + right, ast.Sub: left - right}.get(type(node.op), left // (right or 1))
    if isinstance(node, ast.Attribute):
        return f"{_path_of(node)}" if _path_of(node).startswith(("torch.", "bfloat16", "float16", "float32")) else _UNKNOWN
    if isinstance(node, ast.Call) and _path_of(node.func) in ("int", "bool", "str") and len(node.args) == 1:
        return _value_of(node.args[0], local)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


_REGISTRIES = ("torchtitan/models/*/config_registry.py", "megatron/bridge/**/*recipes/**/*.py", "nemo/collections/llm/recipes/*.py")


def find_recipe(text: str) -> tuple[Path, str] | None:
    """Return file and function of a recipe named `FILE.py:NAME`, `package.module:NAME`, or `NAME` of an installed framework; None where
    there is none. Nothing is imported.
    """
    place, _, name = text.rpartition(":")
    if place.endswith(".py"):
        return (Path(place), name) if Path(place).is_file() else None
    folders = [Path(folder) for folder in sys.path if folder and Path(folder).is_dir()]
    if place:
        files = (folder / f"{place.replace('.', '/')}.py" for folder in folders)
        return next(((file, name) for file in files if file.is_file()), None)
    if not name.isidentifier():
        return None
    for folder in folders:
        for pattern in _REGISTRIES:
            for file in sorted(folder.glob(pattern)):
                if f"def {name}(" in file.read_text(encoding="utf-8", errors="replace"):
                    return file, name
    return None
