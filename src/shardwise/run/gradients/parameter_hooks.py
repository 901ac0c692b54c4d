"""The user's hooks on parameters of a plain loop: `register_hook` and `register_post_accumulate_grad_hook`, also an optimizer's step.

They see the gradient of the whole batch. During backward a rank has its own part only, so hooks are called at the end of backward, when
gradients have been reduced, in the order in which gradients were accumulated; a captured graph may also read a weight after its gradient is
complete, so that a step in a hook waits on one process too. What a hook on the gradient returns replaces
this backward's gradient, and not what `.grad` had before.

Not covered: hooks on autograd nodes (`p.expand_as(p).grad_fn.next_functions`), which see this rank's part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.world import private

_ATTRIBUTE = "shardwise_hooks"  # of a parameter: its `GradientHookTables`
HookTable = dict[int, Callable[[Tensor], Any]]


class GradientHookTables:
    """The user's hooks on one parameter, by the ids of their handles. `watch`: called once, before the first hook is registered."""

    def __init__(self, watch: Callable[[], None] | None) -> None:
        self.on_gradient: HookTable = OrderedDict()
        self.after_accumulation: HookTable = OrderedDict()
        self._watch = watch

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a parameter that is saved leaves them out, as torch does with hooks

    def use_tables(self, on_gradient: HookTable | None, after_accumulation: HookTable | None) -> None:
        """Take over torch's tables of hooks that were registered before."""
        self.on_gradient = self.on_gradient if on_gradient is None else on_gradient
        self.after_accumulation = self.after_accumulation if after_accumulation is None else after_accumulation
        if on_gradient or after_accumulation:
            self._begin()

    def register(self, hook: Callable[[Tensor], Any], is_on_gradient: bool) -> RemovableHandle:
        """Register a hook; return its handle."""
        self._begin()
        table = self.on_gradient if is_on_gradient else self.after_accumulation
        handle = RemovableHandle(table)
        table[handle.id] = hook
        return handle

    def _begin(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch()


class ParameterHooks:
    """The user's hooks on the parameters of one model.

    `reduced`: names of parameters whose gradients are reduced at the end of backward. Of others they are complete in backward: hooks on the
    gradient are called there, and `queue` with the name when it has been accumulated, if there are hooks after it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], reduced: Collection[str], queue: Callable[[str], None]) -> None:
        patch_hook_registration()
        self._parameters, self._queue = parameters, queue
        self.are_any = False  # whether there have been hooks
        self._reduced = frozenset(reduced)
        self._tables = {name: GradientHookTables(partial(self._watch, name)) for name in parameters}
        self._earlier: dict[str, Tensor | None] = {}
        for name, tables in self._tables.items():
            setattr(parameters[name], _ATTRIBUTE, tables)

    def __bool__(self) -> bool:
        return self.are_any and any(tables.on_gradient or tables.after_accumulation for tables in self._tables.values())

    def changes(self, name: str) -> bool:
        """Return whether hooks may change a parameter's gradient, and must see this backward's alone."""
        return bool(self._tables[name].on_gradient)

    def set_aside(self, name: str) -> None:
        """Set aside what `.grad` has before this backward."""
        p = self._parameters[name]
        self._earlier[name], p.grad = p.grad, None

    def call(self, names: Iterable[str]) -> None:
        """Call the hooks of parameters whose gradients are complete."""
        with torch.no_grad():
            for name in [name for name in names if name in self._tables]:
                p, tables = self._parameters[name], self._tables[name]
                if name in self._earlier:
                    self._replace_gradient(p, tables, self._earlier.pop(name))
                for hook in list(tables.after_accumulation.values()):
                    hook(p)

    def _replace_gradient(self, p: nn.Parameter, tables: GradientHookTables, earlier: Tensor | None) -> None:
        if p.grad is not None:
            for hook in list(tables.on_gradient.values()):
                replaced = hook(p.grad)
                p.grad = p.grad if replaced is None else replaced
        with private.as_base_tensor():
            if earlier is not None:
                p.grad = earlier if p.grad is None else earlier.add_(p.grad)

    def _watch(self, name: str) -> None:
        """Note a parameter's first hook; where its gradient is complete in backward, hook it oneself."""
        self.are_any = True
        if name in self._reduced:
            return
        p, tables = self._parameters[name], self._tables[name]
        spec: Any = getattr(p, "spec", None)  # of a shard

        def call_on_gradient(grad: Tensor) -> Tensor:
            grad = grad if spec is None else spec.as_shard(grad)
            for hook in list(tables.on_gradient.values()):
                replaced = hook(grad)
                grad = grad if replaced is None else replaced
            return grad

        def queue(_: Tensor) -> None:
            if tables.after_accumulation:
                self._queue(name)

        with private.as_base_tensor():
            register_on_gradient(p, call_on_gradient)
            register_after_accumulation(p, queue)


def hook_tables_of(p: Tensor) -> GradientHookTables | None:
    """Return where hooks on a parameter of a divided model are registered; None for other tensors."""
    return getattr(p, _ATTRIBUTE, None)


register_on_gradient: Callable[..., Any] = Tensor.register_hook  # torch's own
register_after_accumulation: Callable[..., Any] = Tensor.register_post_accumulate_grad_hook


@cache
def patch_hook_registration() -> None:
    """Patch torch's registration of hooks, so that those on parameters of a divided model are called at the end of backward."""

    def patched(register: Callable[..., Any], is_on_gradient: bool) -> Callable[..., Any]:
        @wraps(register)
        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            with private.as_base_tensor():
                tables = hook_tables_of(self) if self.requires_grad else None
            return register(self, hook) if tables is None else tables.register(hook, is_on_gradient)

        return register_hook

    Tensor.register_hook = patched(register_on_gradient, True)  # type: ignore[method-assign]
    Tensor.register_post_accumulate_grad_hook = patched(register_after_accumulation, False)  # type: ignore[method-assign]
