"""The training configuration: `CONFIG.toml` plus `key=value` overrides, parsed into validated frozen sections.

A mistake is a `ConfigError` that names the file, the line, the key and the nearest known one. Not supported: includes, variables.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator

from shardwise.errors import ConfigError, UsageError
from shardwise.plan.ir.toml_text import parse_document
from shardwise.plan.plan import Plan
from shardwise.train import toml
from shardwise.units import parse_bytes


class _ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_ConfigSection):
    """`name`: a zoo name, `hf:config.json` or `file.py:factory`, as on the command line."""

    name: str = Field(min_length=1)


class DataSection(_ConfigSection):
    """The data to train on. `text`: a file, a folder or several; by default the Python installation's own sources. `path` is the same for
    the other sources: for "datasets" a folder or a name, with `subset` and `split`; for "images" class folders or tar shards, with those of
    `validation`; for "table" csv or parquet files, whose columns `features` are the inputs.

    `source = "synthetic"` repeats the batch that comes with the model, whatever the model is.

    `tokenizer`: "bytes", "model" (the folder of an `hf:` model) or a folder of a tokenizer. `packing`: "windows" over the concatenated
    documents; whole "documents", several a sample, each with its own positions and attention; or "none", one a sample. "auto" is
    windows for text and none for instruction data. `format` of the records: text, a prompt and its completion, or messages.
    """

    source: Literal["text", "jsonl", "csv", "parquet", "webdataset", "datasets", "images", "table", "synthetic"] = "text"
    text: str | tuple[str, ...] = ()
    path: str | tuple[str, ...] = ()
    tokenizer: str = Field(default="bytes", min_length=1)
    sequence: int = Field(default=256, ge=1)
    packing: Literal["auto", "windows", "documents", "none"] = "auto"
    format: Literal["auto", "text", "instruction", "messages"] = "auto"
    text_column: str = "text"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    messages_column: str = "messages"
    subset: str = ""
    split: str = "train"
    streaming: bool = False
    validation: str | tuple[str, ...] = ()
    augment: Literal["none", "flip", "crop"] = "none"
    mean: tuple[FiniteFloat, ...] = ()
    std: tuple[FiniteFloat, ...] = ()
    features: tuple[str, ...] = ()
    label_column: str = "label"
    scale: bool = True
    preprocess: Literal["cpu", "device"] = "cpu"
    validation_fraction: FiniteFloat = Field(default=0.05, gt=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _check_source_keys(self) -> DataSection:
        if self.text and (self.path or self.source != "text"):
            raise ValueError(f'text is for source = "text" alone; with source = "{self.source}" the data is path')
        for key in ("validation", "augment", "mean", "std"):
            if self.source != "images" and getattr(self, key) not in ((), "none"):
                raise ValueError(f'{key} is for source = "images", and this is source = "{self.source}"; leave it out')
        if any(value <= 0 for value in self.std):
            raise ValueError(f"std = {list(self.std)}; each is above 0")
        return self

    @property
    def key(self) -> str:
        """The configuration key that names the data, for messages."""
        return "data.text" if self.source == "text" and not self.path else "data.path"

    @property
    def paths(self) -> tuple[str, ...]:
        """`text` or `path` as a tuple; empty for the default."""
        named = self.text or self.path
        return (named,) if isinstance(named, str) else named

    @property
    def validation_paths(self) -> tuple[str, ...]:
        """`validation` as a tuple."""
        return (self.validation,) if isinstance(self.validation, str) else self.validation

    @property
    def is_text(self) -> bool:
        """Return whether the data are tokens."""
        return self.source not in ("images", "table", "synthetic")

    @property
    def uses_raw_bytes(self) -> bool:
        """Return whether the tokens are the raw bytes of the files."""
        return self.source == "text" and self.tokenizer == "bytes" and self.packing in ("auto", "windows")


def _integer_or_auto(key: str, value: object, minimum: int = 0) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
        raise ValueError(f'{key} = {json.dumps(value)}: expected a whole number of at least {minimum}, or "auto"')
    return value


CLOSED_FORM_SCHEDULES = ("cosine", "linear", "constant")  # schedules that `learning_rate` computes in closed form


class TrainSection(_ConfigSection):
    """The training hyperparameters. Every `*_every` is in steps, 0 for only at the end. `batch` counts samples of all ranks a step.

    `checkpoint_every = "auto"` minimises the sum of saving time and time lost to failures (`shardwise.train.checkpoint_saver`).

    `optimizer` is any of `torch.optim` that updates each element independently; `schedule` "cosine", "linear", "constant", or any of
    `torch.optim.lr_scheduler` or `transformers` that is a function of the step; their `_options` are constructor arguments.

    `within_s` above 0 reduces the number of steps if the plan predicts that `steps` of them take longer (`steps_under`).
    """

    steps: int = Field(default=1000, ge=1)
    within_s: FiniteFloat = Field(default=0.0, ge=0)
    batch: int = Field(default=8, ge=1)
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] = {}
    learning_rate: FiniteFloat = Field(default=1e-3, gt=0)
    min_learning_rate: FiniteFloat = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: str = "cosine"
    schedule_options: dict[str, Any] = {}
    weight_decay: FiniteFloat = Field(default=0.0, ge=0)
    decay: Literal["all", "matrices"] = "matrices"
    betas: tuple[FiniteFloat, FiniteFloat] = (0.9, 0.95)
    momentum: FiniteFloat = Field(default=0.0, ge=0, lt=1)
    clip: FiniteFloat = Field(default=1.0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    evaluate_every: int = Field(default=0, ge=0)
    evaluate_batches: int = Field(default=8, ge=1)
    checkpoint_every: Annotated[int | Literal["auto"], Field(union_mode="left_to_right")] = "auto"
    keep: int = Field(default=2, ge=1)

    @field_validator("checkpoint_every", mode="before")
    @classmethod
    def _steps_or_auto(cls, value: object) -> object:
        return _integer_or_auto("checkpoint_every", value)

    @model_validator(mode="after")
    def _check_values(self) -> TrainSection:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate:g} is above learning_rate = {self.learning_rate:g}; lower it to at most that"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)}; each is at least 0 and below 1")
        try:  # imported here because these modules need torch, and only for other than the default kinds
            if self.optimizer not in ("adamw", "sgd") or self.optimizer_options:
                importlib.import_module("shardwise.train.optimizers").check_optimizer(self)
            if self.schedule not in CLOSED_FORM_SCHEDULES or self.schedule_options:
                importlib.import_module("shardwise.train.learning_rate").check_schedule(self)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    def steps_under(self, plan: Plan) -> int:
        """Return the run's number of steps under `plan`: `steps`, or those predicted to take `within_s`, at least one.

        >>> from shardwise.plan.layout import Layout
        >>> from shardwise.plan.plan import MemoryBreakdown, Prediction
        >>> slow = Plan(Layout(), "gpt-10m", "here", 4, prediction=Prediction(0.5, 0, 0, MemoryBreakdown()))
        >>> [TrainSection(steps=300, within_s=s).steps_under(slow) for s in (0, 1000, 90, 0.1)]
        [300, 300, 180, 1]
        """
        if not self.within_s or plan.prediction is None or plan.prediction.step_time_s <= 0:
            return self.steps
        return max(1, min(self.steps, int(self.within_s / plan.prediction.step_time_s)))


class PlanSection(_ConfigSection):
    """Where the plan comes from: `layout` by hand, a `file` that `shardwise plan` wrote, or (neither) shardwise's own choice for `cluster`.

    `ranks` limits the choice to that many, `constrain` as `--constrain` does. `device_memory` ("2GiB") limits a rank's tensors.
    `trials` of the plans predicted to be fastest are measured for some steps on this machine, and the fastest is chosen; "auto" does so if
    predictions are close and the run is long against the trials (`shardwise.train.trials.num_worthwhile_trials`).
    """

    layout: str = ""
    file: str = ""
    cluster: str = "here"
    ranks: int = Field(default=0, ge=0)
    constrain: tuple[str, ...] = ()
    device_memory: str = ""
    trials: Annotated[int | Literal["auto"], Field(union_mode="left_to_right")] = "auto"

    @model_validator(mode="after")
    def _check_device_memory(self) -> PlanSection:
        try:
            parse_bytes(self.device_memory or 0)
        except UsageError as error:
            raise ValueError(f"device_memory: {error}") from error
        return self

    @property
    def num_trials(self) -> int:
        """Number of trials in ranks that were started elsewhere: `trials`, or 0 for "auto"."""
        return 0 if self.trials == "auto" else self.trials

    @field_validator("trials", mode="before")
    @classmethod
    def _check_trials(cls, value: object) -> object:
        return _integer_or_auto("trials", value)

    @model_validator(mode="after")
    def _check_single_plan(self) -> PlanSection:
        if self.layout and self.file:
            raise ValueError(f'layout = "{self.layout}" and file = "{self.file}" are two plans; give one of them')
        return self


class RunSection(_ConfigSection):
    """`folder`: by default `runs/` and the configuration's name. `sample`: number of tokens to generate at the end.

    On each rank `workers` threads prefetch batches. A rank that takes longer for a step than `hang_after_s` and ten median steps is
    reported. With `protect = "memory"` each rank's state has two snapshots in persistent memory, if they fit: a failed rank is replaced
    without losing a step. With several hosts, shards that only one host has are copied to its neighbour every `copy_every` steps; "auto":
    as often as takes 2 % of the time at most. `spares`: number of ranks, started elsewhere, that wait to replace failed ones.
    With `save = "async"` checkpoints are written during training, if a copy of the state fits in memory.
    `trackers` receive every row of `metrics.jsonl` (`shardwise.train.trackers`). With `prove` the plan is proven before ranks start.
    """

    folder: str = ""
    resume: bool = True
    workers: int = Field(default=2, ge=1)
    hang_after_s: FiniteFloat = Field(default=5.0, gt=0)
    protect: Literal["memory", "none"] = "memory"
    copy_every: Annotated[int | Literal["auto"], Field(union_mode="left_to_right")] = "auto"
    spares: int = Field(default=0, ge=0)
    save: Literal["async", "sync"] = "async"
    sample: int = Field(default=300, ge=0)
    prompt: str = "def "
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    prove: bool = False

    @field_validator("copy_every", mode="before")
    @classmethod
    def _steps_or_auto(cls, value: object) -> object:
        return _integer_or_auto("copy_every", value, minimum=1)


class TrainingConfig(_ConfigSection):
    """A whole configuration; `TrainingConfig.read` makes it.

    >>> TrainingConfig.parse('[model]\\nname = "gpt-10m"\\n[train]\\nsteps = 20', changes=["batch=4"]).train.batch
    4
    """

    model: ModelSection
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    plan: PlanSection = PlanSection()
    run: RunSection = RunSection()

    @classmethod
    def read(cls, path: Path | str, changes: Sequence[str] = ()) -> TrainingConfig:
        """Read a file; `changes` are `key=value` overrides. Without `run.folder` it is `runs/` and the file's stem.

        Raises:
            ConfigError: no such file; not TOML; an unknown key; a wrong type or value.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; give a configuration such as examples/gpt_text.toml") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text: byte {error.start} is not UTF-8") from error
        config = cls.parse(text, str(path), changes)
        if config.run.folder:
            return config
        run = config.run.model_copy(update={"folder": str(Path("runs") / path.stem)})
        return config.model_copy(update={"run": run})

    @classmethod
    def parse(cls, text: str, where: str = "configuration", changes: Sequence[str] = ()) -> TrainingConfig:
        """Parse text as `read` does; `where` is named in errors."""
        tree = parse_document(text, where)
        origins: dict[tuple[str, ...], str] = {}
        for change in changes:
            key, value = _parse_change(change)
            section = tree.setdefault(key[0], {})
            if not isinstance(section, dict):
                raise ConfigError(f"{where}: {key[0]} is a section: write [{key[0]}] above its keys")
            section[key[1]] = value
            origins[key] = change
        try:
            # As JSON, since strict validation accepts a JSON array for a tuple, and no other conversion.
            return cls.model_validate_json(json.dumps(tree))
        except ValidationError as error:
            raise ConfigError(_explain_error(error, text, where, origins)) from error
        except TypeError as error:
            raise ConfigError(f"{where}: dates and times mean nothing here: {error}") from error

    def dump(self) -> str:
        """Return TOML with every key, defaults included; `parse` reads it back to an equal configuration."""
        return toml.dump(self.model_dump())


SECTIONS: dict[str, type[_ConfigSection]] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "plan": PlanSection,
    "run": RunSection,
}


# Names of keys in other programs.
KEY_ALIASES = {
    "lr": "learning_rate", "min_lr": "min_learning_rate", "wd": "weight_decay", "warmup": "warmup_steps", "batch_size": "batch",
    "max_steps": "steps", "num_steps": "steps", "iterations": "steps", "grad_clip": "clip", "max_grad_norm": "clip",
    "optim": "optimizer", "eval_every": "evaluate_every", "save_every": "checkpoint_every", "seq_len": "sequence",
    "block_size": "sequence", "max_length": "sequence", "data_files": "path", "dataset": "path", "name": "subset", "num_workers": "workers",
}  # fmt: skip


def _all_keys() -> list[str]:
    return [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]


def _suggest_key(name: str, names: Sequence[str]) -> str:
    """`; did you mean X?` for a key, with its section. Only the key is compared if the section is known."""
    section, dot, key = name.rpartition(".")
    at = section + dot if section in SECTIONS else ""
    word = key if at else name
    other = KEY_ALIASES.get(key)
    if other is not None and at + other in names:
        return f"; did you mean {at + other}?"
    return toml.suggest_nearest(word, [k.removeprefix(at) for k in names if k.startswith(at)]).replace("mean ", f"mean {at}")


def _parse_change(word: str) -> tuple[tuple[str, str], Any]:
    """Parse `train.steps=100`, or `steps=100` if only one section has that key, into (section, key) and value."""
    name, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r} is not key=value; for example train.steps=100")
    keys = [full_key for full_key in _all_keys() if name in (full_key, full_key.partition(".")[2])]
    if not keys:
        raise ConfigError(f"{word}: unknown key {name}{_suggest_key(name, [*_all_keys(), *(k.partition('.')[2] for k in _all_keys())])}")
    if len(keys) > 1:
        raise ConfigError(f"{word}: {name} could be {' or '.join(keys)}; write which")
    section, _, key = keys[0].partition(".")
    return (section, key), toml.parse_value(text, is_text=SECTIONS[section].model_fields[key].annotation is str)


def _explain_error(error: ValidationError, text: str, where: str, origins: dict[tuple[str, ...], str]) -> str:
    """Describe the first mistake, with its line, the expected value and the nearest key."""
    first = error.errors()[0]
    path = tuple(part for part in map(str, first["loc"]) if not part.isdigit())[:2]
    if first["type"] == "value_error" and len(path) == 1:  # of a section: its message may begin with the key
        key = str(first["ctx"]["error"]).partition(" ")[0]
        path = (*path, key) if key in SECTIONS[path[0]].model_fields else path
    line = toml.line_of(text, path)
    place = origins.get(path) or (f"{where}, line {line}" if line else where)
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        if len(path) == 1:
            return f"{place}: unknown section [{name}]{toml.suggest_nearest(name, list(SECTIONS))}; known: {', '.join(SECTIONS)}"
        names = list(SECTIONS[path[0]].model_fields)
        other = [section for section, fields in SECTIONS.items() if path[1] in fields.model_fields]
        hint = f"; it belongs to [{other[0]}]" if other else _suggest_key(path[1], names)
        return f"{place}: unknown key {name}{hint}; [{path[0]}] knows {', '.join(names)}"
    if first["type"] == "missing":
        return f"{place}: {name} is missing" + ('; give [model] name = "gpt-10m"' if path[0] == "model" else "")
    if first["type"] == "value_error":
        return f"{place}: [{path[0]}] {first['ctx']['error']}"
    value = first["input"]
    return f"{place}: {name} = {json.dumps(value, default=str)}: {_describe_expected(first)}"


def _describe_expected(error: Any) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "int_type" | "int_from_float":
            return "expected a whole number, for example 8"
        case "float_type" | "finite_number":
            return "expected a number, for example 1e-3"
        case "string_type":
            return 'expected text in quotes, for example "name"'
        case "bool_type":
            return "expected true or false"
        case "tuple_type":
            return "expected a list in [ ]"
        case "model_type" | "model_attributes_type":
            return "expected a section: [name], then its keys"
        case "literal_error":
            value = error["input"]
            choices = [word.strip(" '") for word in context["expected"].replace(" or ", ", ").split(",")]
            return f"expected one of {', '.join(choices)}{toml.suggest_nearest(value, choices) if isinstance(value, str) else ''}"
        case _:
            return str(error["msg"]).replace("Input should be", "expected a value").replace("Value should", "expected to")
