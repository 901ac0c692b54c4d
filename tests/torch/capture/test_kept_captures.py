"""Captures that are kept on disk: what is found again equals what was captured, and whatever a capture depends on misses."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.capture.cache import cached_capture, serialization
from shardwise.capture.cache.fingerprint import NotFingerprintable, fingerprint
from shardwise.capture.cache.store import CaptureStore
from shardwise.capture.capture import CapturedGraph, _equal_captures
from shardwise.errors import ModelError
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.zoo.names import FAMILIES
from shardwise.zoo.resolve import resolve

SOURCE = """
import os
import torch
from torch import nn
import torch.nn.functional as F

SCALE = 2.0
TABLE = {"act": "gelu"}

def helper(x):
    return x * SCALE

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.outer = nn.Linear(width, 2)
        self.slope = 0.5
    def forward(self, x):
        return self.outer(helper(getattr(F, TABLE["act"])(self.inner(x)))) * self.slope
"""
Pair = namedtuple("Pair", "first second")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "captures"
    sys.modules.pop("kept_net", None)


def module_of(folder: Path, text: str = SOURCE) -> ModuleType:
    """The module of a user's file, as it is now."""
    file = folder / "kept_net.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("kept_net", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["kept_net"] = made
    exec(compile(text, str(file), "exec"), made.__dict__)  # never from a file of bytecode that is as old as the text
    return made


def digest(net: nn.Module, more: object = None) -> str:
    return fingerprint(net, None, more)


def test_the_second_start_traces_nothing_and_gets_the_same(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = module_of(tmp_path).Net, (torch.randn(4, 4),)
    first = ModelSource.from_model(net).capture(batch, None, 4, outputs=True)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr("shardwise.run.rank_model.model_source.capture", lambda *_, **__: pytest.fail("it was traced again"))
    again = ModelSource.from_model(module_of(tmp_path).Net).capture(batch, None, 4, outputs=True)
    assert again.graph == first.graph
    assert _equal_captures(again, first)
    assert again.structure.shape == first.structure.shape


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* self.slope", "+ self.slope"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("return x * SCALE", "return x / SCALE"),
        ('"gelu"', '"relu"'),
        ("self.slope = 0.5", "self.slope = 0.25"),
        ("width=8", "width=6"),
        ("return x * SCALE", "return x * SCALE  # a remark"),
    ],
)
def test_a_changed_line_misses(cache: Path, tmp_path: Path, old: str, new: str) -> None:
    before = digest(module_of(tmp_path).Net())
    assert digest(module_of(tmp_path).Net()) == before
    assert old in SOURCE
    assert digest(module_of(tmp_path, SOURCE.replace(old, new)).Net()) != before


def test_a_changed_line_is_traced_again(cache: Path, tmp_path: Path) -> None:
    batch = (torch.randn(4, 4),)
    ModelSource.from_model(module_of(tmp_path).Net).capture(batch, None, 4, outputs=True)
    changed = ModelSource.from_model(module_of(tmp_path, SOURCE.replace("* self.slope", "+ self.slope")).Net).capture(
        batch, None, 4, outputs=True
    )
    assert changed.graph.operators[-1].target.startswith("aten.add")
    assert len(list(cache.iterdir())) == 2


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "an attribute": lambda net: setattr(net, "slope", 1.0),
    "a list": lambda net: setattr(net, "sizes", [1, 2]),
    "frozen": lambda net: net.inner.weight.requires_grad_(False),
    "tied": lambda net: setattr(net.outer, "bias", nn.Parameter(net.inner.bias[:2].detach())),
    "a hook": lambda net: net.inner.register_forward_hook(lambda *_: None),
    "dtype": lambda net: net.double(),
    "another class": lambda net: setattr(net, "outer", nn.Bilinear(8, 8, 2)),
    "global default": lambda net: torch.set_default_dtype(torch.float64),
    "replaced function": lambda net: setattr(net, "forward", lambda x: net.inner(x)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_misses(cache: Path, tmp_path: Path, change: str) -> None:
    made = module_of(tmp_path).Net
    before = digest(made())
    net = made()
    try:
        CHANGES[change](net)
        if change == "tied":  # by shape alone a copy of a bias is a bias
            assert digest(net) == before
            net.outer.bias = net.inner.bias
        assert digest(net) != before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_the_zoo_is_kept(family: str) -> None:
    """Their code has slots, ellipses and other things that a user's code has, too."""
    resolved = resolve(family)
    with torch.device("meta"):
        model = resolved.make()
    assert len(fingerprint(model, resolved.loss, None)) == 64


SLOTTED = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True, slots=True)
class Sizes:
    width: int = 4
    def half(self):
        return self.width // 2

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.sizes = Sizes(width)
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x)[..., : self.sizes.half()]
"""


def test_a_configuration_with_slots_counts_by_its_values_and_its_code(tmp_path: Path) -> None:
    net = module_of(tmp_path, SLOTTED).Net
    assert fingerprint(net(), None, None) == fingerprint(net(), None, None) != fingerprint(net(2), None, None)
    other = module_of(tmp_path, SLOTTED.replace("// 2", "// 4")).Net
    assert fingerprint(other(), None, None) != fingerprint(net(), None, None)


def test_a_function_of_torch_that_the_user_replaces_misses(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SOURCE.replace('getattr(F, TABLE["act"])', "F.gelu")
    before = digest(module_of(tmp_path, text).Net())
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x + 1)
    assert digest(module_of(tmp_path, text).Net()) != before


@pytest.mark.parametrize(
    "line",
    ["x = x * float(os.environ.get('A', '1'))", "x = x * float(open('/dev/null').read() or 1)", "import not_there_yet", "exec('x = 1')"],
)
def test_what_cannot_be_told_is_not_kept(cache: Path, tmp_path: Path, line: str) -> None:
    text = SOURCE.replace("def forward(self, x):\n", f"def forward(self, x):\n        {line}\n")
    with pytest.raises(NotFingerprintable):
        digest(module_of(tmp_path, text).Net())


def test_values_of_tensors_that_are_no_parameters_count(cache: Path, tmp_path: Path) -> None:
    made = module_of(tmp_path).Net
    one, other = made(), made()
    one.mask, other.mask = torch.ones(3), torch.zeros(3)
    assert digest(one) != digest(other)


@pytest.mark.parametrize("asked", [(torch.randn(4, 4),), (torch.randn(8, 4),), (torch.randn(4, 4).double(),)])
def test_another_batch_is_another_capture(cache: Path, asked: Any) -> None:
    made: list[int] = []

    def make() -> CapturedGraph:
        made.append(1)
        return ModelSource(net, None)._capture(given, None, 4, True)

    net, given = nn.Linear(4, 2), (torch.randn(4, 4),)
    cached_capture(net, None, given, 1, make)
    cached_capture(net, None, given, 1, make)
    assert len(made) == 1
    given = asked
    net = net.to(asked[0].dtype)
    cached_capture(net, None, given, 1, make)
    same = asked[0].shape == (4, 4) and asked[0].dtype is torch.float32
    assert len(made) == (1 if same else 2)


def test_spoilt_bytes_are_not_read(cache: Path, tmp_path: Path) -> None:
    net, batch = module_of(tmp_path).Net, (torch.randn(4, 4),)
    first = ModelSource.from_model(net).capture(batch, None, 4, outputs=True)
    (file,) = cache.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    assert CaptureStore(cache).read(file.name) is None
    assert ModelSource.from_model(net).capture(batch, None, 4, outputs=True).graph == first.graph
    assert CaptureStore(cache).read(file.name) is not None  # written anew


def test_old_files_make_room(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path / "captures", max_bytes=4000)
    for i in range(8):
        store.write(str(i), bytes(900))
        os.utime(store.folder / str(i), (i, i))
    assert sum(about.st_size for _, about in store.files()) <= 4000 + 932
    assert (store.folder / "7").exists()
    assert not (store.folder / "0").exists()
    store.write("large", bytes(2000))  # of which few would fit
    assert not (store.folder / "large").exists()
    assert store.clear() == len(list(store.folder.iterdir())) or not list(store.folder.iterdir())


def test_off_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "off")
    assert CaptureStore.from_environment() is None


@pytest.mark.parametrize("structure", [Pair(torch.ones(2), None), {"a": [torch.ones(1), 2.5]}, (1, "x", float("inf"))])
def test_outputs_of_other_classes_come_back(structure: Any) -> None:
    captured = ModelSource(nn.Linear(4, 2), None)._capture((torch.randn(4, 4),), None, 4, True)
    data = serialization.dump(replace(captured, structure=structure))
    assert data is not None
    again = serialization.load(data)
    assert again is not None
    assert type(again.structure) is type(structure)
    assert repr(again.structure).count("tensor") == repr(structure).count("tensor")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return _Doubled.apply(self.inner(x))  # type: ignore[no-any-return]


def test_functions_of_the_users_own_are_not_written(cache: Path) -> None:
    assert ModelSource.from_model(_Own).capture((torch.randn(4, 4),), None, 4, outputs=True).graph.operators
    assert not cache.exists()


class _Unsorted:
    """Attributes that have no order."""

    def __init__(self) -> None:
        vars(self).update({"one": 1, 2: 2})  # type: ignore[dict-item]


def test_what_cannot_be_looked_at_is_captured_as_without_a_folder(cache: Path) -> None:
    net = nn.Linear(4, 2)
    net.table = _Unsorted()  # type: ignore[assignment]
    assert ModelSource.from_model(net).capture((torch.randn(4, 4),), None, 4, outputs=True).graph.operators
    assert not cache.exists()


def test_a_sparse_buffer_is_refused_by_the_capture_and_nothing_before(cache: Path) -> None:
    net = nn.Linear(4, 2)
    net.register_buffer("table", torch.eye(4).to_sparse_csr())
    with pytest.raises(ModelError, match="make it dense"):
        ModelSource.from_model(net).capture((torch.randn(4, 4),), None, 4, outputs=True)
