"""MODEL as users write it: names, arguments, files of their own, Hugging Face configurations, and everything that can be wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.capture.capture import call_with_loss
from shardwise.errors import ModelError, UsageError
from shardwise.zoo import hugging_face
from shardwise.zoo.names import find
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIGS = sorted((Path(__file__).parents[1] / "hf").glob("*.json"))


def step(resolved: object, batch: object = None) -> torch.Tensor:
    torch.manual_seed(0)
    batch = resolved.example() if batch is None else batch
    value = call_with_loss(resolved.make(), batch, resolved.loss)
    value.backward()
    assert torch.isfinite(value)
    return value.detach()


def test_a_size() -> None:
    resolved = resolve("gpt-tiny")
    assert (resolved.name, resolved.default_batch) == ("gpt-tiny", 8)
    assert {k: list(v.shape) for k, v in resolved.batch(4).items()} == {"input_ids": [4, 32], "labels": [4, 32]}
    step(resolved)


def test_batch_and_sequence() -> None:
    resolved = resolve("gpt-tiny", batch=3, sequence=16)
    assert list(resolved.example()["input_ids"].shape) == [3, 16]
    assert resolved.make().positions.weight.shape[0] == 16


def test_a_family_and_a_size_with_arguments() -> None:
    config = find("gpt:layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=51200")[1]
    assert config == find("gpt-175b")[1]
    assert find("gpt-39b:layers=4, tied=false")[1].num_parameters < find("gpt-39b")[1].num_parameters
    assert find("resnet:blocks=3x4x23x3")[1] == find("resnet-101")[1]
    assert find("wide-resnet:base=320,width=16")[1] == find("wide-resnet-6.8b")[1]
    assert find("llama:theta=10000")[1].theta == 1e4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpt-10n", "model gpt-10n is unknown; did you mean gpt-10m"),
        ("resnet50", "did you mean .*resnet-50"),
        ("zzz", "known: .*bert.*wide-resnet"),
        ("", "unknown"),
        ("gpt:layres=3", "gpt has no argument layres; did you mean layers"),
        ("gpt:qqq=3", "known: dropout, heads, hidden"),
        ("gpt:layers", "must be key=value"),
        ("gpt:layers=", "must be key=value"),
        ("gpt:layers=3,", "must be key=value"),
        ("gpt:layers=3,layers=4", "twice"),
        ("gpt:layers=three", "layers = three must be a whole number"),
        ("gpt:layers=3.5", "whole number"),
        ("gpt:tied=maybe", "true or false"),
        ("llama:theta=big", "a number"),
        ("resnet:blocks=3-4", "3x4x6x3"),
    ],
)
def test_wrong_names_name_the_nearest(text: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        resolve(text)


@pytest.mark.parametrize(("batch", "sequence", "said"), [(0, None, "--batch 0"), (-3, None, "--batch -3"), (None, 0, "--sequence 0")])
def test_wrong_counts(batch: int | None, sequence: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve("gpt-tiny", batch, sequence)


def test_a_sequence_for_images() -> None:
    with pytest.raises(ModelError, match="has no sequence"):
        resolve("resnet-18", sequence=4)


def test_an_empty_batch() -> None:
    with pytest.raises(ModelError, match="at least 1"):
        resolve("gpt-tiny").batch(0)


# Files of the user's own


def written(folder: Path, text: str, name: str = "model.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("import torch\nfrom torch import nn\n" + text)
    return str(folder / name)


@pytest.mark.parametrize(("file", "inputs"), [("own_model.py", ["x"]), ("mixer.py", [0, 1])])
def test_the_examples(file: str, inputs: list[object]) -> None:
    resolved = resolve(f"{EXAMPLES / file}:make")
    batch = resolved.example()
    assert list(batch if isinstance(batch, dict) else range(len(batch))) == inputs
    assert resolved.default_batch == 16
    step(resolved)
    fewer = resolve(f"{EXAMPLES / file}:make", batch=4)
    assert [len(v) for v in (fewer.example().values() if isinstance(batch, dict) else fewer.example())] == [4] * len(inputs)
    step(fewer)


def test_what_a_factory_may_return(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
class Own(nn.Linear):
    def forward(self, x): return super().forward(x).mean()
def alone(): return Own(4, 2)
def pair(): return Own(4, 2), (torch.randn(6, 4),)
def tensor(): return Own(4, 2), torch.randn(6, 4)
def triple(): return nn.Linear(4, 2), {"input": torch.randn(6, 4)}, lambda output, batch: output.sum()
Factory = Own(4, 2).__class__.__init__  # not called
""",
    )
    alone = resolve(f"{file}:alone")
    assert isinstance(alone.make(), torch.nn.Linear)
    with pytest.raises(ModelError, match="a module without a batch; return"):
        alone.batch(2)
    for name in ("pair", "tensor", "triple"):
        resolved = resolve(f"{file}:{name}")
        assert resolved.default_batch == 6
        assert (resolved.loss is None) == (name != "triple")
        step(resolved)


def test_a_model_is_built_only_when_it_is_asked_for(tmp_path: Path) -> None:
    """400 GB are resolved, batch and loss included, without being allocated."""
    file = written(tmp_path, "def make(): return nn.Linear(100_000, 1_000_000), {'input': torch.ones(2, 100_000)}, lambda o, b: o.sum()\n")
    resolved = resolve(f"{file}:make")
    assert resolved.example()["input"].sum() == 200_000
    with torch.device("meta"):
        assert resolved.make().weight.shape == (1_000_000, 100_000)


def test_an_unseeded_batch_is_the_same_on_every_rank_and_no_random_state_is_used_up(tmp_path: Path) -> None:
    file = written(tmp_path, "def make(): return nn.Linear(4, 2), (torch.randn(6, 4),)\n")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = resolve(f"{file}:make").example()[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(resolve(f"{file}:make").example()[0], first)
    assert first.std() > 0


def test_only_tensors_with_samples_are_cut(tmp_path: Path) -> None:
    batch = "{'x': torch.zeros(6, 4), 'scale': torch.ones(3), 'n': 5, 'y': [torch.ones(6)]}"
    file = written(tmp_path, f"def make(): return nn.Identity(), {batch}\n")
    batch = resolve(f"{file}:make", batch=2).example()
    assert (len(batch["x"]), len(batch["scale"]), batch["n"], len(batch["y"][0])) == (2, 3, 5, 2)


def test_a_loss_may_hold_tensors_and_its_own_model(tmp_path: Path) -> None:
    """What was made without memory beside the model is real when the loss is called, for each model its own."""
    file = written(
        tmp_path,
        """
def weighted():
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, 4.0))
    return nn.Linear(4, 3), (torch.ones(6, 4),), lambda o, b: criterion(o, torch.arange(6) % 3)
def penalised():
    model = nn.Linear(4, 3)
    return model, (torch.ones(6, 4),), lambda o, b: sum(p.abs().sum() for p in model.parameters())
def held():
    model = nn.Linear(4, 3)
    weight = model.weight
    return model, (torch.ones(6, 4),), lambda o, b: o.mean() + weight.abs().sum()
def learned():
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = nn.Parameter(torch.ones(3))
        def forward(self, output, batch):
            return (output - self.centre).square().mean()
    return nn.Linear(4, 3), (torch.ones(6, 4),), Centre()
""",
    )
    resolved = resolve(f"{file}:weighted")
    output = torch.randn(6, 3)
    want = torch.nn.functional.cross_entropy(output, torch.arange(6) % 3, weight=torch.arange(1.0, 4.0))
    assert torch.equal(resolved.loss(output, None), want)
    resolved = resolve(f"{file}:penalised")
    first, second = resolved.make(), resolved.make()
    for model in (first, second):
        value = call_with_loss(model, resolved.example(), resolved.loss)
        assert value == sum(p.abs().sum() for p in model.parameters())
    assert not torch.equal(first.weight, second.weight)
    with pytest.raises(ModelError, match="holds the model's parameter weight itself; let it read the parameter from the model"):
        resolve(f"{file}:held")
    with pytest.raises(ModelError, match="has a parameter of its own, centre of Centre, which would not be trained"):
        resolve(f"{file}:learned")


def test_a_named_tuple_stays_one(tmp_path: Path) -> None:
    text = "from collections import namedtuple\nPair = namedtuple('Pair', 'x y')\n"
    file = written(tmp_path, text + "def make(): return nn.Identity(), Pair(torch.zeros(6, 4), torch.ones(6))\n")
    batch = resolve(f"{file}:make", batch=2).example()
    assert (type(batch).__name__, len(batch.x), len(batch.y)) == ("Pair", 2, 2)


def test_siblings_are_imported_and_nothing_stays_on_the_path(tmp_path: Path) -> None:
    """Two folders with a sibling of one name each get their own; a factory may import when it is called."""
    path = list(sys.path)
    for folder, width in (("one", 3), ("two", 5)):
        written(tmp_path / folder, f"WIDTH = {width}\n", "shardwise_test_sibling.py")
        written(tmp_path / folder, f"HEIGHT = {width}\n", "shardwise_test_split_backward.py")
        text = "from shardwise_test_sibling import WIDTH\ndef make():\n    from shardwise_test_split_backward import HEIGHT\n"
        text += "    return nn.Linear(WIDTH, HEIGHT)\n"
        file = written(tmp_path / folder, text)
        assert resolve(f"{file}:make").make().weight.shape == (width, width)
    assert sys.path == path
    assert "model" not in sys.modules


def test_a_sibling_does_not_take_the_place_of_what_can_be_imported(tmp_path: Path) -> None:
    written(tmp_path, "", "json.py")
    file = written(tmp_path, "def make(): return nn.Linear(2, 2)\n")
    resolve(f"{file}:make")
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("text", "factory", "said"),
    [
        ("def make(): return 3\n", "make", "returns int; return a torch.nn.Module"),
        ("def make(): return nn.ReLU(), (), None, 4\n", "make", r"returns \(ReLU, tuple, NoneType, int\)"),
        ("def make(): return nn.ReLU(), 7\n", "make", "a batch of type int"),
        ("def make(): return nn.ReLU(), (torch.ones(2),), 7\n", "make", "a loss of type int"),
        ("def make(): return nn.ReLU(), {'n': 3}\n", "make", "samples in dimension 0"),
        (
            "import numpy\ndef make(): return nn.ReLU(), (numpy.ones(3),)\n",
            "make",
            r"it holds ndarray; make tensors of it",
        ),
        ("def make(): return nn.LazyLinear(3)\n", "make", "lazy layers have no sizes before they are called"),
        ("def make(): raise RuntimeError('no luck')\n", "make", "raises RuntimeError: no luck"),
        ("def make(n): return nn.ReLU()\n", "make", "takes no arguments"),
        ("def make(): return nn.ReLU()\n", "mak", "no function mak; did you mean make"),
        ("def make(): return nn.ReLU()\nx = 3\n", "x", "no function x"),
        ("def make(): return nn.ReLU()\n", "", "names no factory; use .*:NAME, with one of make"),
        ("import shardwise_no_such_module\n", "make", "ModuleNotFoundError"),
        ("def make(:\n", "make", "line 3: SyntaxError"),
        ("def make(): raise RuntimeError('no\\n luck')\n", "make", "raises RuntimeError: no luck; "),
        ("def make(): raise SystemExit(7)\n", "make", "raises SystemExit: 7; .* belongs under if __name__"),
        ("raise SystemExit(7)\n", "make", "cannot be loaded: SystemExit: 7"),
        ("def make(): return nn.ReLU(), (torch.ones(0, 2),)\n", "make", "returns a batch of 0 samples"),
        ("def make(): return nn.ReLU(), (torch.ones(2, 2),)\n", "make", "makes a batch of 2 samples, 4 were requested"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, factory: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ModelError, match=said):
        resolve(f"{file}:{factory}" if factory else file, batch=4)


def test_a_missing_file_and_a_sequence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file nowhere\.py"):
        resolve("nowhere.py:make")
    with pytest.raises(ModelError, match="its factory makes the batch"):
        resolve(f"{EXAMPLES / 'own_model.py'}:make", sequence=3)


# Hugging Face


@pytest.fixture(scope="module")
def transformers() -> object:
    return pytest.importorskip("transformers", reason="shardwise[hf] is not installed")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_runs_a_step_in_float64(transformers: object, config: Path) -> None:
    resolved = resolve(f"hf:{config}")
    batch = {k: v.double() if v.is_floating_point() else v for k, v in resolved.batch(2).items()}
    torch.manual_seed(0)
    model = resolved.make().double()
    assert model.training
    value = call_with_loss(model, batch, resolved.loss)
    value.backward()
    # The library itself takes the logits of text to float32 for the loss.
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.dtype != torch.float64] == []


@pytest.mark.parametrize(
    ("file", "expected"),
    [("t5", "T5ForConditionalGeneration"), ("vit", "ViTForImageClassification"), ("bert", "BertForMaskedLM"), ("gpt2", "GPT2LMHeadModel")],
)
def test_a_class_by_name_or_by_the_usual_head(transformers: object, tmp_path: Path, file: str, expected: str) -> None:
    values = json.loads((CONFIGS[0].parent / f"{file}.json").read_text())
    values.pop("architectures", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert type(resolve(f"hf:{path}").make()).__name__ == expected
    assert type(resolve(f"hf:{tmp_path}").make()).__name__ == expected


def test_classifiers_of_text(transformers: object, tmp_path: Path) -> None:
    values = json.loads((CONFIGS[0].parent / "bert.json").read_text())
    for name, shape in (("BertForSequenceClassification", [4]), ("BertForTokenClassification", [4, 32])):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**values, "architectures": [name], "num_labels": 3}))
        resolved = resolve(f"hf:{path}", batch=4)
        assert list(resolved.example()["labels"].shape) == shape
        step(resolved)


def test_sequence_of_a_configuration(transformers: object, tmp_path: Path) -> None:
    file = CONFIGS[0].parent / "gpt2.json"
    assert resolve(f"hf:{file}", sequence=16).batch(2)["input_ids"].shape == (2, 16)
    with pytest.raises(ModelError, match="--sequence 33 is more than the 32 positions"):
        resolve(f"hf:{file}", sequence=33)
    with pytest.raises(ModelError, match="a model of images"):
        resolve(f"hf:{CONFIGS[0].parent / 'vit.json'}", sequence=33)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "xlnet", "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8, "vocab_size": 16}))
    assert resolve(f"hf:{path}", sequence=33).batch(2)["input_ids"].shape == (2, 33)  # it says -1 positions, which is no limit


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("{", "is no JSON"),
        ("[]", 'no "model_type"'),
        ("{}", 'no "model_type"'),
        ('{"model_type": "gtp2"}', "did you mean gpt2"),
        ('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModle"]}', "did you mean GPT2LMHeadModel"),
        ('{"model_type": "gpt2", "architectures": ["GPT2Model"]}', "cannot make up what GPT2Model learns"),
        ('{"model_type": "whisper"}', "no head that shardwise can feed"),
        ('{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}', "takes input_features"),
    ],
)
def test_configurations_that_are_wrong(transformers: object, tmp_path: Path, values: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(values)
    with pytest.raises(ModelError, match=said):
        resolve(f"hf:{path}")


def test_a_configuration_of_which_no_model_can_be_made(transformers: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_embd": 10, "n_head": 3, "n_layer": 1}')
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel cannot be made of this configuration: ValueError: .* divisible by num_heads"):
        resolve(f"hf:{path}").make()


def test_a_missing_configuration(transformers: object) -> None:
    with pytest.raises(ModelError, match=r"no file nowhere\.json; MODEL is hf:path/to/config.json, or hf:FOLDER"):
        resolve("hf:nowhere.json")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(hugging_face.importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"install shardwise\[hf\]"):
        resolve(f"hf:{CONFIGS[0]}")


def test_planning_in_python_asks_for_shapes_alone() -> None:
    """A batch of values took the memory and the time of a real one, though no plan reads any."""

    def batch(size: int) -> tuple[torch.Tensor, ...]:
        raise AssertionError(f"{size} samples with values")

    model = ResolvedModel(
        "net", lambda: torch.nn.Linear(4, 2), batch, lambda y, _: y.sum(), 8, empty_batch=lambda size: (torch.empty(size, 4),)
    )
    assert shardwise.plan(model, cluster="1xcpu-2", layout="data=2").batch_size == 8
    assert shardwise.plan(model, 4, cluster="1xcpu-2", layout="data=2").batch_size == 4
