"""Configurations: what is read is what was meant, and every mistake is named with its line and the nearest right word."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.plan_file import parse_plan
from shardwise.train import toml
from shardwise.train.config import SECTIONS, TrainingConfig
from shardwise.train.training_task import sequence_length_of

GOOD = """# a comment
[model]
name = "gpt-10m"

[data]
sequence = 128   # tokens

[train]
steps = 50
learning_rate = 1e-3
betas = [0.9, 0.95]
"""


def test_defaults_and_values() -> None:
    config = TrainingConfig.parse(GOOD)
    assert (config.model.name, config.data.sequence, config.train.steps) == ("gpt-10m", 128, 50)
    assert config.train.betas == (0.9, 0.95)
    assert config.data.paths == ()
    assert TrainingConfig.parse(GOOD, changes=["text=/a/b"]).data.paths == ("/a/b",)
    assert TrainingConfig.parse(GOOD, changes=['text=["a", "b"]']).data.paths == ("a", "b")


def test_tokens_of_a_sample_are_asked_of_named_models_with_text_alone() -> None:
    assert sequence_length_of(TrainingConfig.parse(GOOD)) == 128
    assert sequence_length_of(TrainingConfig.parse(GOOD, changes=['data.source="synthetic"'])) is None
    for own in ("mine.py:make", "folder/mine.py"):
        assert sequence_length_of(TrainingConfig.parse(GOOD.replace("gpt-10m", own))) is None


def test_the_folder_is_named_after_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    assert TrainingConfig.read(tmp_path / "mine.toml").run.folder == "runs/mine"
    assert TrainingConfig.read(tmp_path / "mine.toml", ["run.folder=elsewhere"]).run.folder == "elsewhere"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 50", "stesp = 50", "where, line 9: unknown key train.stesp; did you mean steps?"),
        ("steps = 50", "sequence = 50", "where, line 9: unknown key train.sequence; it belongs to [data]"),
        ("[train]", "[trian]", "where, line 8: unknown section [trian]; did you mean train?"),
        ("steps = 50", 'steps = "50"', 'where, line 9: train.steps = "50": expected a whole number'),
        ("steps = 50", "steps = 50.5", "where, line 9: train.steps = 50.5: expected a whole number"),
        ("steps = 50", "steps = 0", "where, line 9: train.steps = 0: expected a value greater than or equal to 1"),
        ("steps = 50", "steps = true", "where, line 9: train.steps = true: expected a whole number"),
        ("steps = 50", "steps = 1979-05-27", "dates and times"),
        ("learning_rate = 1e-3", "learning_rate = inf", "where, line 10: train.learning_rate = Infinity: expected a number"),
        ("betas = [0.9, 0.95]", "betas = [0.9]", "where, line 11: train.betas"),
        ("betas = [0.9, 0.95]", "betas = [0.9, 1.5]", "betas = [0.9, 1.5]; each is at least 0 and below 1"),
        ("steps = 50", 'schedule = "cosin"', 'where, line 9: [train] schedule = "cosin" is unknown (did you mean cosine?); known: '),
        ("steps = 50", "min_learning_rate = 1.0", "where, line 9: [train] min_learning_rate = 1 is above learning_rate = 0.001"),
        ('name = "gpt-10m"', "", "model.name is missing"),
        ('[model]\nname = "gpt-10m"', "", "model is missing; give [model] name"),
        ("sequence = 128", "sequence = ", "where is not TOML: Invalid value (at line 6"),
        ("[model]", "plan = 3\n[model]", "where, line 2: plan = 3: expected a section"),
    ],
)  # fmt: skip
def test_every_mistake_is_named_with_its_line(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        TrainingConfig.parse(GOOD.replace(old, new), "where")
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "section", "key", "value"),
    [
        ("steps=100", "train", "steps", 100),
        ("train.steps=100", "train", "steps", 100),
        ("learning_rate=1", "train", "learning_rate", 1.0),
        ("name=hf:config.json", "model", "name", "hf:config.json"),
        ("name=10", "model", "name", "10"),
        ('name="quoted"', "model", "name", "quoted"),
        ("layout=data=2 tensor=2", "plan", "layout", "data=2 tensor=2"),
        ('plan.constrain=["tensor<=8"]', "plan", "constrain", ("tensor<=8",)),
        ("resume=false", "run", "resume", False),
        ("prompt=", "run", "prompt", ""),
        ("betas=[0.8, 0.9]", "train", "betas", (0.8, 0.9)),
    ],
)
def test_words_win_over_the_file(change: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(TrainingConfig.parse(GOOD, changes=[change]), section), key) == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("steps", "'steps' is not key=value"),
        ("stesp=1", "stesp=1: unknown key stesp; did you mean steps?"),
        ("train.stesp=1", "did you mean train.steps?"),
        ("train.lr=1", "train.lr=1: unknown key train.lr; did you mean train.learning_rate?"),
        ("lr=1", "lr=1: unknown key lr; did you mean learning_rate?"),
        ("batch_size=1", "did you mean batch?"),
        ("train.sequnce=1", "unknown key train.sequnce"),
        ("seed=1", "seed could be data.seed or train.seed; write which"),
        ("steps=many", 'steps=many: train.steps = "many": expected a whole number'),
        ("steps=1\nbatch = 2", "expected a whole number"),
        ("min_learning_rate=2", "min_learning_rate = 2 is above learning_rate = 0.001"),
        ("layout=data=2", "are two plans"),
    ],
)
def test_wrong_words(change: str, says: str) -> None:
    text = GOOD + '[plan]\nfile = "p.toml"\n' if "two plans" in says else GOOD
    with pytest.raises(ConfigError) as caught:
        TrainingConfig.parse(text, changes=[change])
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        TrainingConfig.read(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        TrainingConfig.read(tmp_path / "binary.toml")


@settings(deadline=None)
@given(st.text(), st.floats(min_value=1e-300, max_value=1e300), st.integers(1, 2**60), st.lists(st.text(), max_size=3), st.booleans())
def test_what_is_written_is_read_back(text: str, number: float, count: int, words: list[str], flag: bool) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text + "".join(words)):
        return  # no such text in a UTF-8 file
    config = TrainingConfig.parse(GOOD)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"prompt": text, "resume": flag}),
            "train": config.train.model_copy(update={"learning_rate": number, "steps": count}),
            "plan": config.plan.model_copy(update={"constrain": tuple(words)}),
        }
    )
    assert TrainingConfig.parse(config.dump()) == config


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    with suppress(ConfigError):
        TrainingConfig.parse(text)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@settings(deadline=None)
@given(st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_value_of_any_key_is_taken_or_refused_by_name(value: object) -> None:
    for section, key in (("train", "steps"), ("train", "betas"), ("data", "text"), ("plan", "layout")):
        change, refused = f"{section}.{key}={json.dumps(value)}", ""
        try:
            TrainingConfig.parse(GOOD, changes=[change])
        except ConfigError as error:
            refused = str(error)
        assert not refused or key in refused


def test_lines_of_inline_tables_and_dotted_keys() -> None:
    text = "model = {name = 3}\ntrain.steps = 4\n"
    assert (toml.line_of(text, ("model", "name")), toml.line_of(text, ("train", "steps")), toml.line_of(text, ("run",))) == (1, 2, 0)


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainingConfig.parse(GOOD).train.steps = 3  # type: ignore[misc]


def test_every_key_is_in_the_documentation_with_its_default() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+\.\w+)` \| (.*?) \|", text, re.MULTILINE))
    fields = {f"{name}.{key}": field.default for name, section in SECTIONS.items() for key, field in section.model_fields.items()}
    assert list(rows) == list(fields)
    for key, said in rows.items():
        if re.fullmatch(r"[-\d.e]+|`\".*\"`|true|\[.*\]", said):
            value = tomllib.loads(f"x = {said.strip('`')}")["x"]
            assert (tuple(value) if isinstance(value, list) else value) == fields[key], key


def test_the_example_is_a_configuration() -> None:
    config = TrainingConfig.read(Path(__file__).parents[3] / "examples" / "gpt_text.toml")
    assert config.train.batch * config.data.sequence * config.train.steps > 200_000


@pytest.mark.parametrize("text", ["[train]\nsteps = " + "9" * 5000, ".".join("a" * 50_000) + " = 1", "x = " + "[" * 5000])
def test_numbers_and_keys_beyond_all_bounds_end_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        TrainingConfig.parse(text)
    with pytest.raises(ConfigError):
        parse_plan(text)
