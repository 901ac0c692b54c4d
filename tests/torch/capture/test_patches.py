"""The table of patches: each file says what it is for, does it, and is needed still by the torch that runs here."""

from __future__ import annotations

import ast
import contextlib
import re
import tomllib
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_capture import equal_to_eager
from test_untraceable import Model, X, averages, hooked, moved_weights, new_parameter, numpy_random, reversed_gradient, through_data
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.capture import patching
from shardwise.capture.fakes import FakeMode, fake_mode
from shardwise.capture.patches import PATCHES
from shardwise.errors import ModelError
from shardwise.model.graph import Graph
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.zoo.resolve import resolve

ROOT = Path(__file__).parents[3]
FOLDER = Path(shardwise.__file__).parent / "capture" / "patches"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "patch"))
FIELDS = re.compile(r"\A.+?\n\nTorch: .+?\nWanted: .+?\nTest: (?P<test>\S+)\nUntil: (?P<until>\S.*)\n?\Z", re.DOTALL)
OLDEST = "2.11"  # that shardwise runs with


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("+")[0].split(".")[:2]))


def fields(path: Path) -> re.Match[str]:
    found = FIELDS.match(ast.get_docstring(ast.parse(path.read_text())) or "")
    assert found, f"{path.name}: its docstring is a sentence, then Torch, Wanted, Test and Until"
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_patch_says_what_it_is_for_and_by_which_test(path: Path) -> None:
    file, _, name = fields(path)["test"].partition("::")
    assert (ROOT / file).is_file(), file
    assert not name or f"def {name}(" in (ROOT / file).read_text(), name
    assert sum(import_module(f"shardwise.capture.patches.{path.stem}").PATCH is patch for patch in PATCHES) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_patch_goes_when_the_oldest_torch_needs_it_no_more(path: Path) -> None:
    until = fields(path)["until"]
    assert until == "not known" or version(until) > version(OLDEST), f"no torch that shardwise runs with needs {path.name}: it goes"


def test_the_oldest_torch_is_that_of_the_package() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert next(line for line in needed if line.startswith("torch")).startswith(f"torch>={OLDEST},")


def graph_of(forward: Callable[[Any, Tensor], Tensor]) -> Graph:
    return ModelSource.from_model(lambda: Model(forward)).capture((X.float(),), None, None).graph


def words(forward: Callable[[Any, Tensor], Tensor]) -> set[str]:
    return {op.target.split(".")[1] for op in graph_of(forward).operators}


def refused(forward: Callable[[Any, Tensor], Tensor], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        graph_of(forward)


def exported(model: nn.Module, *given: Any) -> Any:
    with patching.patched_for_export():
        return torch.export.export(model, given, strict=False)


def acts_in_backward() -> None:
    refused(hooked, "registers a hook on a tensor")


def affine_grid() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        grid = F.affine_grid(model.layer(x)[:, :1, None] * torch.eye(2, 3), [len(x), 1, 2, 2], align_corners=False)
        return grid.square().sum()

    assert "affine_grid_generator" not in words(forward)


def assertions() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        torch._assert((x.abs() < 9).all(), "large")
        torch._check(x.long().max().item() < 9)
        return model.layer(x).sum()  # type: ignore[no-any-return]

    assert words(forward) == {"linear", "sum"}


def autograd_functions() -> None:
    equal_to_eager(Model(reversed_gradient).double(), (X.clone(),))


def bincount() -> None:
    assert "bincount" not in words(lambda model, x: (model.layer(x)[0, :4] * torch.bincount((x[:, 0] > 0).long(), minlength=4)).sum())


def casts() -> None:
    equal_to_eager(Model(lambda model, x: model.layer.to(torch.float32)(x).sum()), (X.float(),))


def causal_masks() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            mask = x.new_zeros(4, 4).masked_fill(x[0, 0, :4] > 9, 1.0)
            return self.body(x, mask=mask).square().sum()  # type: ignore[no-any-return]

    ModelSource.from_model(Attends).capture((torch.ones(2, 4, 6),), None, None)


def class_losses() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        column, labels = x[:, 0], (x[:, 1] > 0).long()
        return F.cross_entropy(model.layer(x)[column > 0], labels[column > 0])

    equal_to_eager(Model(forward).double(), (X.clone(),))


def complex_parameters() -> None:
    graph = (
        ModelSource.from_model(lambda: nn.Linear(6, 5, dtype=torch.complex64))
        .capture((X.cfloat(),), lambda y, _: y.abs().sum(), None)
        .graph
    )
    assert {v.tensor.dtype for v in graph.parameters} == {"float32"}


def contiguous() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.layer(x).sum() + x[:, 1:].contiguous().sum()  # type: ignore[no-any-return]

    source = ModelSource.from_model(lambda: Model(forward))
    one, more = ([op.target for op in source.capture((X.float(),), None, samples).graph.operators] for samples in (1, 3))
    assert one == more
    assert "aten.contiguous.default" in one


def covariance() -> None:
    equal_to_eager(Model(lambda model, x: torch.cov(model.layer(x)).sum() + torch.corrcoef(model.layer(x)).sum()).double(), (X.clone(),))


def ctc() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        lengths = (x[:, 0] > 0).long() + 1
        return F.ctc_loss(model.layer(x).log_softmax(-1)[:, None].expand(8, 8, 5), lengths[:, None].expand(8, 2), lengths + 6, lengths)

    assert "ctc_loss" in words(forward)


def cuda_driver() -> None:
    with patching.patched_for_export():
        assert FakeMode.avoid_device_init is type(fake_mode()).avoid_device_init


def tensor_data() -> None:
    equal_to_eager(Model(through_data).double(), (X.clone(),))


def distributions() -> None:
    traces = []

    def forward(model: Any, x: Tensor) -> Tensor:
        traces.append(1)
        return torch.distributions.Normal(model.layer(x), 1.0).log_prob(x[:, :5]).sum()

    graph_of(forward)
    assert len(traces) == 1, "it would be traced again for each thing that is checked"


def embedding_bag() -> None:
    bags = torch.arange(16).view(8, 2) % 5
    assert "embedding" in words(lambda model, x: F.embedding_bag(bags, model.layer.weight, mode="sum").sum() + x.sum())


def experts() -> None:
    pytest.importorskip("transformers.integrations.moe")
    model = resolve(f"hf:{ROOT / 'tests' / 'torch' / 'hf_experts' / 'mixtral.json'}")
    graph = ModelSource.from_model(model.make).capture(model.batch(2), model.loss, None).graph
    assert any(op.target.startswith("shardwise.of_experts") for op in graph.operators)


def float64_numbers() -> None:
    captured = ModelSource.from_model(lambda: Model(lambda model, x: (model.layer(x) * torch.tensor(0.1)).sum())).capture(
        (X.float(),), None, None
    )
    assert [c.item() for c in captured.constants.values()] == [0.1]


def foreach() -> None:
    equal_to_eager(Model(moved_weights).double(), (X.clone(),))


def foreign_parameters() -> None:
    other = nn.Parameter(torch.ones(5))
    refused(lambda model, x: (model.layer(x) * other).sum(), "none of the model's")


def gaussian_nll() -> None:
    equal_to_eager(Model(lambda model, x: F.gaussian_nll_loss(x[:, :5], model.layer(x), F.softplus(model.layer(x)))).double(), (X.clone(),))


def generators() -> None:
    words(lambda model, x: torch.bernoulli(model.layer(x).sigmoid(), generator=torch.default_generator).sum() + model.layer(x).sum())
    own = torch.Generator()
    refused(lambda model, x: model.layer(x).sum() * torch.rand(1, generator=own), "torch.Generator of its own")


def lstm_states() -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 4)

        def forward(self, x: Tensor) -> Any:
            return self.lstm(x)[1]

    states = list(exported(States(), torch.ones(3, 2, 6)).graph.nodes)[-1].args[0]
    assert [node.meta["val"].shape for node in states] == [(1, 2, 4), (1, 2, 4)]


def masked_rows() -> None:
    equal_to_eager(Model(lambda model, x: model.layer(x)[x[:, 0] > 0].square().mean()).double(), (X.clone(),))


def silenced_logs() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        warnings.warn("said", stacklevel=1)
        return model.layer(x).sum()  # type: ignore[no-any-return]

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exported(Model(forward), X.float())
    assert not [str(warning.message) for warning in seen if "said" in str(warning.message)]


def row_per_sample() -> None:
    assert "gather" in words(lambda model, x: model.layer(x)[torch.arange(len(x)), x[:, :5].argmax(-1)].sum())


def python_randomness() -> None:
    refused(numpy_random, "draws from Python's or numpy's random numbers")


def recorded_lines() -> None:
    program = exported(Model(lambda model, x: model.layer(x).sum()), X.float())
    assert not any(node.stack_trace for node in program.graph.nodes if node.op == "call_function")


def replaced_state() -> None:
    equal_to_eager(Model(averages).double(), (X.clone(),))
    refused(new_parameter, "puts a new parameter in the place of layer.weight")


def value_checks() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        assert x.max() < 9
        return model.layer(x).sum()  # type: ignore[no-any-return]

    assert words(forward) == {"linear", "sum"}


def values_of_constants() -> None:
    equal_to_eager(Model(lambda model, x: model.layer(x).sum() * (2 if torch.arange(3).sum() == 3 else 1)).double(), (X.clone(),))


CASES: dict[str, Callable[[], None]] = {path.stem: globals()[path.stem] for path in FILES}
SINCE = {"recorded_lines": "2.12"}  # torch that can do what the patch asks of it


@pytest.mark.parametrize("name", CASES)
def test_what_is_wanted_is_so(name: str) -> None:
    if version(torch.__version__) >= version(SINCE.get(name, OLDEST)):
        CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_torch_does_not_do_it_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does, the patch can go; its docstring says with which version."""
    until = fields(FOLDER / f"{name}.py")["until"]
    does = until != "not known" and version(torch.__version__) >= version(until)
    patch = import_module(f"shardwise.capture.patches.{name}").PATCH
    monkeypatch.setattr(patching, "PATCHES", tuple(other for other in PATCHES if other is not patch))
    with contextlib.nullcontext() if does else pytest.raises((AssertionError, ModelError, RuntimeError, pytest.fail.Exception)):
        CASES[name]()
