"""Every private name of torch that weft uses still exists, and does what `world/private.py` needs of it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import weft
from weft.world import private


@pytest.mark.parametrize(("owner", "name"), private.NAMES, ids=[name for _, name in private.NAMES])
def test_the_name_is_where_it_was(owner: object, name: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {owner}.{name}; adapt weft/world/private.py"


def test_every_name_that_is_used_is_listed() -> None:
    tree = ast.parse(inspect.getsource(private))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    listed = {name for _, name in private.NAMES}
    assert used - listed <= {"_devices", "_timeout", "_threads"}, "list them in NAMES"


def test_options_that_the_groups_are_made_with() -> None:
    options = torch.distributed.distributed_c10d.ProcessGroupGloo._Options()
    for name in ("_devices", "_timeout", "_threads"):
        assert hasattr(options, name), name


def private_names(text: str) -> set[str]:
    """Names of the form `torch...._x` in a file's text."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "dist", "F"):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_")}
    return found


def test_no_other_file_uses_private_names() -> None:
    """`model` may not import `world`, and keeps what it needs of torch's tracing in adapters of its own."""
    root = Path(weft.__file__).parent
    files = [path for path in root.rglob("*.py") if path.name != "private.py" and path.relative_to(root).parts[0] != "model"]
    wrong = {str(path.relative_to(root)): names for path in files if (names := private_names(path.read_text()))}
    assert not wrong, f"private names of torch go through weft/world/private.py: {wrong}"


def test_the_search_finds_private_names() -> None:
    assert private_names("import torch\ntorch._C.x\nfrom torch._dynamo import y\ntorch.nn.Linear") == {"torch._C", "_dynamo"}


def test_one_process_groups_work() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        group = private.gloo(private.prefixed("x", private.file_store(f"{folder}/store", 1)), 0, 1, 10.0, "127.0.0.1")
        x = torch.ones(3)
        private.all_reduce(group, x, torch.distributed.ReduceOp.SUM).wait()
        private.broadcast(group, x, 0).wait()
        out = torch.empty(3)
        private.all_gather(group, out, x).wait()
        private.all_to_all(group, out, x, [3], [3]).wait()
        assert torch.equal(out, torch.ones(3))
