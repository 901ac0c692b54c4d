"""Every private name of torch that shardwise uses still exists, and does what `world/private.py` needs of it."""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shardwise
from shardwise.audit.record import private as audit_private
from shardwise.capture import fakes
from shardwise.capture.patching import patched_for_export
from shardwise.world import private, private_optimizers, symmetric_memory

# `model` may not import `world`, and keeps what it needs of torch's tracing in an adapter of its own; an audit's recorder runs without
# shardwise.
ADAPTERS = {
    "world/private.py": private, "capture/fakes.py": fakes, "audit/record/private.py": audit_private,
    "world/private_optimizers.py": private_optimizers, "world/symmetric_memory.py": symmetric_memory,
}  # fmt: skip
LISTED = [(file, owner, name) for file, adapter in ADAPTERS.items() for owner, name in adapter.NAMES]


@pytest.mark.parametrize(("file", "owner", "name"), LISTED, ids=[name for *_, name in LISTED])
def test_the_name_is_where_it_was(file: str, owner: object, name: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {owner}.{name}; adapt shardwise/{file}"


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_every_name_that_is_used_is_listed(adapter: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(adapter))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "._" in (node.module or "")]
    used |= {alias.name for node in imported for alias in node.names}
    listed = {name for _, name in adapter.NAMES}
    assert used - listed <= {"_devices", "_timeout", "_threads"}, "list them in NAMES"


def test_what_the_adapters_are_for_works() -> None:
    with fakes.fake_mode() as mode:
        x = torch.ones(3, 4)
    assert isinstance(x, fakes.Fake)
    fakes.clear_fake_tensor_memo(mode)
    assert fakes.tree_map(lambda n: n + 1, {"a": (1, [2])}) == {"a": (2, [3])}
    assert isinstance(torch.nn.BatchNorm2d(2), private.BatchNorm)
    assert not isinstance(torch.nn.GroupNorm(1, 2), private.BatchNorm)
    seen: list[str] = []

    class Watch(private.DispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        torch.ones(2).add(1)
    assert "aten.add.Tensor" in seen


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_a_step_of_an_optimizer_is_torchs_without_a_record(kind: type[torch.optim.Optimizer]) -> None:
    """Bit for bit the same updates and calls of hooks; the record is in torch's own step alone."""
    torch.manual_seed(0)
    start, gradient, found = torch.randn(5), torch.randn(5), []
    for is_torchs in (True, False):
        parameter, calls = torch.nn.Parameter(start.clone()), list[str]()
        optimizer: Any = kind([parameter], lr=0.1)  # type: ignore[call-arg]
        before = optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        after = optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        step = optimizer.step if is_torchs else private_optimizers.optimizer_step(optimizer)
        parameter.grad = gradient
        with torch.no_grad(), torch.profiler.profile() as profile:
            step()
            before.remove()
            after.remove()
            step()
        assert any("Optimizer.step" in event.key for event in profile.key_averages()) == is_torchs
        found.append((parameter.detach(), calls))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], start)
    assert found[0][1] == found[1][1] == ["before", "after"]


def test_a_trace_records_lines_of_code_only_where_torch_cannot_leave_them_out() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def lines() -> list[str]:
        program = torch.export.export(Twice(), (torch.ones(2),), strict=False)
        return [node.stack_trace for node in program.graph.nodes if node.op == "call_function" and node.stack_trace]

    before = getattr(torch.fx.config, fakes.NO_STACK_TRACES, None)
    with patched_for_export():
        assert bool(lines()) is (before is None)
        if before is not None:
            setattr(torch.fx.config, fakes.NO_STACK_TRACES, False)
        assert lines()
    assert getattr(torch.fx.config, fakes.NO_STACK_TRACES, None) is before


LSTMS: list[dict[str, Any]] = [{}, {"num_layers": 2}, {"proj_size": 4}, {"num_layers": 2, "bidirectional": True, "proj_size": 4}]


@pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:LSTM with projections")
@pytest.mark.parametrize("options", LSTMS, ids=str)
def test_states_of_a_traced_lstm_have_the_shapes_that_they_have_when_it_runs(options: dict[str, Any]) -> None:
    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(16, 8, **options)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out, (h, c) = self.lstm(x)
            return out, h, c

    model, x = States(), torch.randn(3, 2, 16)
    with patched_for_export():
        (made,) = list(torch.export.export(model, (x,), strict=False).graph.nodes)[-1].args
    assert [node.meta["val"].shape for node in made] == [y.shape for y in model(x)]


def test_the_end_of_a_backward_pass_is_told() -> None:
    order: list[str] = []
    w = torch.ones(2, requires_grad=True)
    w.register_hook(lambda grad: private.after_backward(lambda: order.append("after")))  # type: ignore[no-untyped-call]
    (w * 2).sum().backward()
    order.append("returned")
    assert order == ["after", "returned"]


@pytest.mark.parametrize("few", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_tells_what_rows_sum_to_and_takes_the_sum_over_more_keys(few: int, causal: bool) -> None:
    """What `lower/kernels/attention_blocks.py` asks of it: the logarithm of each row's sum of weights, 0 where a row sees nothing, also
    of fewer
    heads of keys; and gradients of a row whose sum and result are those over more keys: here as many again, whose values are zero."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 6, 8, dtype=torch.float64, generator=generator) for heads in (4, few, few, 4))
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[2] = not causal
    mask = None if causal else torch.zeros(6, 6, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    out, total = private.fused_attention(q, k, v, mask, causal, 0.3)
    k_all, v_all = (x.repeat_interleave(4 // few, 1) for x in (k, v))
    scores = (q @ k_all.mT * 0.3).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else hidden, -torch.inf)
    sees = ~hidden.all(-1)
    assert torch.allclose(total[..., sees], scores.logsumexp(-1)[..., sees])
    assert not total[..., ~sees].any()
    assert torch.allclose(out, scores.softmax(-1).nan_to_num() @ v_all)
    weights = (scores - total.unsqueeze(-1)).exp() / 2
    of_scores = weights * (grad @ v_all.mT - (grad * out / 2).sum(-1, keepdim=True))
    found = private.fused_attention_backward(grad, (q, k, v), out / 2, total + math.log(2), mask, causal, 0.3)
    wants = (of_scores @ k_all * 0.3, of_scores.mT @ q * 0.3, weights.mT @ grad)
    for one, want in zip(found, wants, strict=True):
        assert torch.allclose(one, want.unflatten(1, (one.shape[1], -1)).sum(2))


@pytest.mark.parametrize("few", [4, 2])
def test_fused_attention_of_gpus_takes_what_it_is_given(few: int) -> None:
    """Shapes and arguments alone, on a device without memory: what they compute tests/gpu asks."""
    q, k, v = (torch.empty(2, heads, 64, 32, dtype=torch.bfloat16, device="meta") for heads in (4, few, few))
    out, total = private.fused_attention(q, k, v, None, True, 0.3)
    assert (out.shape, total.shape, total.dtype) == (q.shape, q.shape[:-1], torch.float32)
    assert [x.shape for x in private.fused_attention_backward(q, (q, k, v), out, total, None, True, 0.3)] == [x.shape for x in (q, k, v)]


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
            operator = ast.unparse(node).startswith("torch.ops.")  # operators keep their names, which graphs hold too
            if isinstance(root, ast.Name) and root.id in ("torch", "dist", "F", "nn", "fx") and not operator:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_")}
    return found


def test_no_other_file_uses_private_names() -> None:
    root = Path(shardwise.__file__).parent
    files = [path for path in root.rglob("*.py") if path.relative_to(root).as_posix() not in ADAPTERS]
    wrong = {str(path.relative_to(root)): names for path in files if (names := private_names(path.read_text()))}
    assert not wrong, f"private names of torch go through {' or '.join(ADAPTERS)}: {wrong}"


def test_the_search_finds_private_names() -> None:
    assert private_names("import torch\ntorch._C.x\nfrom torch._dynamo import y\ntorch.nn.Linear") == {"torch._C", "_dynamo"}


def test_one_process_groups_work() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        group = private.gloo_process_group(private.prefix_store("x", private.file_store(f"{folder}/store", 1)), 0, 1, 10.0, "127.0.0.1")
        x = torch.ones(3)
        private.all_reduce(group, x, torch.distributed.ReduceOp.SUM).wait()
        private.broadcast(group, x, 0).wait()
        out = torch.empty(3)
        private.all_gather(group, out, x).wait()
        private.all_to_all(group, out, x, [3], [3]).wait()
        assert torch.equal(out, torch.ones(3))
