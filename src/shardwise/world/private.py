"""The only adapter for torch's private names. Everything else in shardwise uses public names, or these.

In: stores, ranks, tensors. Out: process groups and their operations. Each private name is used once, here;
`tests/torch/house/test_private.py` names one that torch removes. Process groups are created directly on a store, which needs only the
members, no global state of torch.distributed, and no common order in which all ranks create all groups.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed import distributed_c10d as c10d
from torch.utils import _python_dispatch as python_dispatch

_UNUSED_TAG = (1 << 30) - 1  # a tag that no message has
_MODULE = torch.nn.Module()
# (owner, attribute) of every private name used below, for the test.
NAMES: tuple[tuple[Any, str], ...] = (
    (c10d.ProcessGroupGloo, "_Options"),
    (c10d.ProcessGroupGloo, "create_device"),
    (c10d.ProcessGroupGloo, "create_default_device"),
    (c10d.ProcessGroupGloo, "_allgather_base"),
    (c10d.ProcessGroupGloo, "_reduce_scatter_base"),
    (c10d.ProcessGroupGloo, "alltoall_base"),
    (c10d.ProcessGroupGloo, "send"),
    (c10d.ProcessGroupGloo, "recv"),
    (c10d, "AllreduceOptions"),
    (c10d, "BroadcastOptions"),
    (c10d, "AllToAllOptions"),
    (c10d, "ReduceScatterOptions"),
    (c10d, "PrefixStore"),
    (c10d, "_get_default_store"),
    (dist.ProcessGroup, "_get_backend"),
    (dist, "FileStore"),
    (dist, "TCPStore"),
    (torch.autograd.Variable, "_execution_engine"),
    (torch.nn.modules.batchnorm, "_BatchNorm"),
    (torch.ops.aten.view.default, "_schema"),
    (torch, "_ops"),
    (torch.ops.aten.view.default, "_op"),
    (torch.utils, "_python_dispatch"),
    (torch, "_C"),
    (torch._C, "DisableTorchFunctionSubclass"),
    (torch._C, "_autograd"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_PreserveDispatchKeyGuard"),
    (torch._C, "_DisableTorchDispatch"),
    (torch._C, "_dispatch_tls_set_dispatch_key_excluded"),
    (torch._C._autograd, "_get_creation_meta"),
    (torch.Tensor, "_is_view"),
    *(
        (_MODULE, name)
        for name in (
            "_parameters",
            "_buffers",
            "_modules",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
            "_non_persistent_buffers_set",
        )
    ),
    (torch, "_decomp"),
    (torch._decomp, "decomposition_table"),
    (torch, "_foreach_copy_"),
    (torch, "_foreach_mul_"),
    (torch, "_foreach_norm"),
    (torch.Tensor, "_make_wrapper_subclass"),
    (torch.Tensor, "_base"),
    (torch.Tensor, "_backward_hooks"),
    (torch.Tensor, "_post_accumulate_grad_hooks"),
    (torch.Tensor, "_version"),
    (torch._C, "_storage_Use_Count"),
    (torch.UntypedStorage, "_cdata"),
    (torch, "_amp_foreach_non_finite_check_and_unscale_"),
    (torch, "_scaled_mm"),
    (python_dispatch, "TorchDispatchMode"),
    *(
        (torch.ops.aten, f"_scaled_dot_product_{name}")
        for name in ("flash_attention", "flash_attention_backward", "flash_attention_for_cpu", "flash_attention_for_cpu_backward")
    ),
)

# Context in which tensors of subclasses behave as torch's own: __torch_function__ of their class is skipped.
as_base_tensor = torch._C.DisableTorchFunctionSubclass
copy_tensors = torch._foreach_copy_  # copy_tensors(targets, sources)
scale_tensors = torch._foreach_mul_  # scale_tensors(targets, scalar)
make_wrapper = torch.Tensor._make_wrapper_subclass
DECOMPOSITIONS = decomposition_table  # the operators that torch composes of simpler ones
FOREACH_NORM = torch._foreach_norm.__name__
unscale = torch._amp_foreach_non_finite_check_and_unscale_

# A custom mode can rewrite casts and all other dispatched operators.
DispatchMode = python_dispatch.TorchDispatchMode


class UncompiledDispatchMode(python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode under which nothing is compiled, so that no operator needs to turn compilation off for its own call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


BatchNorm: type[torch.nn.Module] = torch.nn.modules.batchnorm._BatchNorm  # base class of all batch norms


def view_base(x: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself."""
    return x if x._base is None else x._base


def as_writable(x: Tensor) -> Tensor:
    """Return `x`, or a copy if autograd forbids in-place changes: a view that a custom autograd function made."""
    refused = x.requires_grad and x._is_view() and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT
    return x.clone() if refused else x


def storage_users(x: Tensor) -> int:
    """Return the number of tensors that share the memory of `x`, and a constant."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def version_of(x: Tensor) -> int:
    """Return the number of in-place writes of a tensor."""
    return x._version


def gloo_process_group(store: Any, rank: int, size: int, timeout_s: float, host: str) -> Any:
    """Return a gloo process group of `size` processes that share `store`; connections use the interface with address `host`.

    Without `host` torch's default interface: GLOO_SOCKET_IFNAME, or that of the host's name.
    """
    kind: Any = c10d.ProcessGroupGloo
    options = kind._Options()
    previous_threads = thread_ids()
    options._devices = [kind.create_device(hostname=host) if host else kind.create_default_device()]
    _schedule_as_batch(thread_ids() - previous_threads)  # a device's own thread, which only torch 2.13 names
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    return kind(store, rank, size, options)


def abandon_gloo_group(process_group: Any, size: int, rank: int) -> None:
    """Abort all waits in a gloo process group, in any thread, though its peers live or are stopped; they raise a LostPeer's error.

    gloo closes all connections of a group when one of its waits times out, so this starts a receive that must time out.
    """
    for peer in range(size):
        if peer == rank:
            continue
        try:
            process_group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return


def thread_ids() -> set[int]:
    """Return the Linux thread ids of this process; elsewhere none."""
    return {int(path.name) for path in Path("/proc/self/task").glob("*")}


def _schedule_as_batch(loops: set[int]) -> None:
    """Schedule gloo's event loops as batch threads, so that a message does not preempt a computing thread (Linux only).

    A loop that finds a connection locked by another thread spins. If it has preempted that thread, both wait for the next clock tick: an
    all-reduce of 64 KiB took 4 ms instead of 0.3 between hosts whose cores all compute.
    """
    for loop in loops if hasattr(os, "SCHED_BATCH") else ():
        with suppress(OSError):  # it has ended meanwhile, or may not be changed
            os.sched_setscheduler(loop, os.SCHED_BATCH, os.sched_param(0))


def nccl_process_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return an NCCL process group of `size` processes, each on its own GPU (the current device)."""
    kind: Any = c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return kind(store, rank, size, options)


def all_reduce(process_group: Any, x: Tensor, op: Any) -> Any:
    """Start an all-reduce of contiguous `x`, in place."""
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return process_group.allreduce([x], options)


def broadcast(process_group: Any, x: Tensor, source: int) -> Any:
    """Start a broadcast of contiguous `x` from member `source`, in place."""
    options = c10d.BroadcastOptions()
    options.rootRank = source
    return process_group.broadcast([x], options)


def all_gather(process_group: Any, out: Tensor, x: Tensor) -> Any:
    """Start gathering contiguous `x` of every member into contiguous `out`, member after member."""
    return process_group._allgather_base(out, x)


def reduce_scatter(process_group: Any, out: Tensor, x: Tensor, op: Any) -> Any:
    """Start reducing flat `x` over the members into flat `out`, this member's equal shard of it; `out` may lie in `x` at its place."""
    options = c10d.ReduceScatterOptions()
    options.reduceOp = op
    return process_group._reduce_scatter_base(out, x, options)


def all_to_all(process_group: Any, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int]) -> Any:
    """Start exchanging pieces of flat `x` (`sizes` elements to each member) into flat `out` (`out_sizes` from each)."""
    return process_group.alltoall_base(out, x, out_sizes, sizes, c10d.AllToAllOptions())


def send(process_group: Any, x: Tensor, target: int, tag: int) -> Any:
    """Start sending contiguous `x` to member `target`."""
    return process_group.send([x], target, tag)


def receive(process_group: Any, x: Tensor, source: int, tag: int) -> Any:
    """Start receiving into contiguous `x` from member `source`."""
    return process_group.recv([x], source, tag)


def prefix_store(prefix: str, store: Any) -> Any:
    """Return `store` with every key under `prefix`."""
    return c10d.PrefixStore(prefix, store)


def default_store() -> Any:
    """Return the store of the user's initialised process group."""
    stores: Any = c10d
    return stores._get_default_store()


def timeout_of(process_group: Any, device: torch.device) -> float:
    """Seconds of the group's collective timeout on this device; None: of the default group."""
    group: Any = process_group if process_group is not None else dist.group.WORLD
    return float(group._get_backend(device).options._timeout.total_seconds())


def file_store(path: str, num_ranks: int) -> Any:
    """Return a store in a file: it needs no port, and only users who may read the folder have access."""
    stores: Any = dist
    return stores.FileStore(path, num_ranks)


def tcp_store(host: str, port: int, num_ranks: int, timeout_s: float, listen_fd: int | None) -> Any:
    """Return the store at `host:port`; this process serves it on the bound socket `listen_fd`, if one is given."""
    stores: Any = dist
    timeout = timedelta(seconds=timeout_s)
    if listen_fd is None:
        return stores.TCPStore(host, port, num_ranks, is_master=False, timeout=timeout, wait_for_workers=False)
    return stores.TCPStore(host, port, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listen_fd)


def module_tables(module: torch.nn.Module) -> tuple[list[dict[str, Any]], list[dict[Any, Any]]]:
    """Return a module's tables of parameters and submodules, and of its forward and backward hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [module._parameters, module._modules], list(hooks)


def hooks_around_forward(module: torch.nn.Module) -> list[tuple[int, bool, Any, bool]]:
    """Return (number, runs before forward, hook, takes keyword arguments) of a module's forward hooks, in order."""
    before = [(i, True, hook, i in module._forward_pre_hooks_with_kwargs) for i, hook in module._forward_pre_hooks.items()]
    return before + [(i, False, hook, i in module._forward_hooks_with_kwargs) for i, hook in module._forward_hooks.items()]


def tensor_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return a module's tables of parameters and buffers."""
    return [module._parameters, module._buffers]


def submodules_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's table of submodules."""
    return module._modules


def direct_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and persistent buffers."""
    state = {key: x for key, x in module._buffers.items() if key not in module._non_persistent_buffers_set}
    return {key: x for key, x in {**module._parameters, **state}.items() if x is not None}


def take_gradient_hooks(p: Tensor) -> tuple[Any, Any]:
    """Remove a tensor's gradient hooks; return torch's tables of them (None if it had none): on the gradient, and after accumulation.

    Handles of hooks refer to these tables, so that they still remove them.
    """
    with as_base_tensor():
        tables = p._backward_hooks, p._post_accumulate_grad_hooks
        p._backward_hooks = None
        if tables[1] is not None:
            p._post_accumulate_grad_hooks = OrderedDict()  # None would leave them where they are called
    return tables


def has_gradient_hooks(x: Tensor) -> bool:
    """Return whether hooks may change a tensor's gradient."""
    with as_base_tensor():
        return bool(x._backward_hooks)


def set_gradient_hooks(p: Tensor, on_gradient: Any, after_accumulation: Any) -> None:
    """Give a tensor tables of gradient hooks, where they are not None."""
    with as_base_tensor():
        if on_gradient is not None:
            p._backward_hooks = on_gradient
        if after_accumulation is not None:
            p._post_accumulate_grad_hooks = after_accumulation


def after_backward(callback: Any) -> None:
    """Call `callback()` when the running backward pass has finished. Only from within a gradient hook."""
    variable: Any = torch.autograd.Variable
    variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


TORCH_BACKWARD = torch.autograd.backward  # torch's own, which others may replace
TRANSPARENT_BACKWARDS: set[Any] = {TORCH_BACKWARD}  # replacements too that do nothing for graphs without divided modules


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run backward from tensors with such gradients, of their shapes and dtypes, into `.grad`: `torch.autograd.backward`, without its
    checks, which take longer than a small operator. Where a recorder has replaced that, its replacement is called."""
    if torch.autograd.backward not in TRANSPARENT_BACKWARDS or any(x.is_cuda for x in roots):
        torch.autograd.backward(roots, gradients)
        return
    engine: Any = torch.autograd.Variable
    engine._execution_engine.run_backward(tuple(roots), tuple(gradients), False, False, (), True, True)


def run_backward_from(node: Any, output_number: int, gradient: Tensor) -> None:
    """Run backward from an output of an autograd node, with a gradient of its shape and dtype, into `.grad`."""
    edge = torch.autograd.graph.GradientEdge(node, output_number)
    if gradient.is_cuda:
        TORCH_BACKWARD((edge,), (gradient,))
        return
    engine: Any = torch.autograd.Variable
    engine._execution_engine.run_backward((edge,), (gradient,), False, False, (), True, True)


def is_operator(target: Any) -> bool:
    """Return whether a graph node's target is an operator of torch or of its dispatcher."""
    return isinstance(target, torch._ops.OpOverload)


def direct_call_of(operator: Any) -> Callable[..., Any] | None:
    """Return what calls an operator of torch as it does itself, without its frame of Python; None for objects of other kinds."""
    return operator._op if type(operator) is torch._ops.OpOverload else None


def makes_view(operator: Any) -> bool:
    """Return whether an operator of torch may return a view of its inputs."""
    return is_operator(operator) and any(result.alias_info is not None for result in operator._schema.returns)


def writes_or_aliases(operator: Any) -> bool:
    """Return whether an operator of torch may write its arguments, or return a view of them."""
    return any(x.alias_info is not None for x in (*operator._schema.arguments, *operator._schema.returns))


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments, in order."""
    return [x.name for x in operator._schema.arguments]


def required_arguments(operator: Any) -> list[str]:
    """Return the names of an operator's arguments that have no default."""
    return [x.name for x in operator._schema.arguments if not x.has_default_value()]


def result_names(operator: Any) -> list[str]:
    """Return the names of an operator's results, empty where they have none."""
    return [x.name for x in operator._schema.returns]


def returns_one_tensor(operator: Any) -> bool:
    """Return whether an operator's result is a tensor, not several or a list."""
    return [str(x.type) for x in operator._schema.returns] == ["Tensor"]


@contextmanager
def autograd_in_dispatch() -> Iterator[None]:
    """Let autograd record operators within a block, which the handler of an operator of a subclass runs below it."""
    keys = [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView]
    with torch._C._PreserveDispatchKeyGuard():
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def change_view(func: Any, x: Tensor, *args: Any) -> None:
    """Give a tensor of a subclass without memory the shape that an operator in place gives it (`transpose_`)."""
    with torch._C._DisableTorchDispatch():
        func(x, *args)


def has_fused_attention(q: Tensor, masked: bool) -> bool:
    """Return whether torch has a fused attention kernel for such queries that also returns each row's log-sum-exp."""
    if q.device.type == "cpu":
        return q.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and not masked and q.shape[-1] % 8 == 0


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention of queries [B, H, S, d] to keys and values of as many heads or fewer, and the log-sum-exp [B, H, S]."""
    if q.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        out, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, total


def scaled_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return a [M, K] @ b.T [K, N] in bfloat16, of 8-bit operands whose rows are scaled by `scale_a` [M, 1] and `scale_b` [N, 1]."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16)


def fused_attention_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, total: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values (`inputs`); `out` and the log-sum-exp `total` may cover more keys than these."""
    q, k, v = inputs
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_q, of_k, of_v = kernel(grad, q, k, v, out, total, 0.0, causal, attn_mask=mask, scale=scale)
        return of_q, of_k, of_v
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the unused dropout
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    of_q, of_k, of_v = kernel(grad, q, k, v, out, total, None, None, q.shape[-2], k.shape[-2], 0.0, causal, seed, seed[:0], scale=scale)
    return of_q, of_k, of_v
