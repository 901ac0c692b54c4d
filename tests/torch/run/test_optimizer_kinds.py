"""Optimizers and schedules by name against torch's own, parameter by parameter; those that look beyond an element are refused."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.errors import ConfigError, UsageError
from shardwise.run.state.optimizer import OptimizerSpec, traits_of
from shardwise.train.config import TrainingConfig, TrainSection
from shardwise.train.learning_rate import learning_rate
from shardwise.train.optimizers import optimizer_of

ELEMENTWISE = ["adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_updates_elements_is_taken(name: str) -> None:
    found = traits_of(OptimizerSpec(name))
    assert set(found.slots) | set(found.scalars) == set(_state_of(OptimizerSpec(name)))


def _state_of(spec: OptimizerSpec) -> dict[str, object]:
    p = torch.ones(3)
    p.grad = torch.ones(3)
    made = spec.build([(p, True)])
    made.step()
    return {name: x for name, x in made.state[p].items() if x is not None}


@pytest.mark.parametrize("name", ["muon", "adafactor", "lbfgs", "sparseadam"])
def test_one_that_looks_beyond_an_element_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"optimizer {name} cannot update pieces of parameters"):
        _ = OptimizerSpec(name).slots
    with pytest.raises(ConfigError, match=f"a.toml, line 5: .*optimizer {name} cannot update"):
        TrainingConfig.parse(f'[model]\nname = "gpt-tiny"\n\n[train]\noptimizer = "{name}"', "a.toml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ('optimizer = "adamm"', "optimizer 'adamm' is unknown .did you mean adam\\?"),
        ('optimizer = "adam"\noptimizer_options = {amsgrat = true}', "optimizer adam has no option 'amsgrat'; it has amsgrad"),
        ('optimizer = "adadelta"\nmomentum = 0.9', "optimizer adadelta has no momentum"),
        ('optimizer = "rprop"\nweight_decay = 0.1', "optimizer rprop has no weight decay"),
        ('schedule = "steplr"', 'schedule = "steplr" with schedule_options = {}: TypeError: .*step_size'),
        ('schedule = "stepl"', 'schedule = "stepl" is unknown .did you mean steplr\\?'),
        ('schedule = "ReduceLROnPlateau"', "follows from losses"),
        ('schedule = "greedy"', "follows from losses"),
        ('schedule = "cosine"\nschedule_options = {a = 1}', "has no schedule_options"),
        ('schedule = "steplr"\nmin_learning_rate = 1e-5', "min_learning_rate is for cosine, linear, constant"),
        ('schedule = "cycliclr"\nschedule_options = {base_lr = 0.1, max_lr = 1.0, cycle_momentum = true}', "cycle_momentum changes"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        TrainingConfig.parse(f'[model]\nname = "gpt-tiny"\n[train]\n{words}', "a.toml")
    assert f"a.toml, line {5 if says.startswith('min_learning') else 4}:" in str(caught.value)


def test_options_reach_the_optimizer_and_are_priced() -> None:
    section = TrainSection(optimizer="Adam", optimizer_options={"amsgrad": True}, betas=(0.8, 0.9))
    made = optimizer_of(section).build([(torch.zeros(2), True)])
    assert (type(made), made.defaults["amsgrad"], made.defaults["betas"]) == (torch.optim.Adam, True, (0.8, 0.9))
    state = [shardwise.plan("gpt-tiny", 4, cluster="1xcpu-2", layout="data=1", optimizer=optimizer_of(TrainSection(optimizer=name)))
             for name in ("adamw", "sgd", "adagrad")]  # fmt: skip
    kept = [plan.prediction.memory.optimizer for plan in state if plan.prediction]
    assert kept[1] == 0
    assert kept[0] == pytest.approx(2 * kept[2])


@pytest.mark.parametrize("layout", [None, "data=1"])
def test_an_engines_plan_counts_its_own_optimizer(layout: str | None) -> None:
    plan = shardwise.parallelize("gpt-tiny", 4, optimizer="sgd", plan=layout, cluster="1xcpu-2", seed=0).plan
    assert plan.prediction is not None
    assert plan.prediction.memory.optimizer == 0


def test_a_configuration_with_options_is_read_back() -> None:
    text = '[model]\nname = "gpt-tiny"\n[train]\noptimizer = "adam"\noptimizer_options = {amsgrad = true}\nschedule = "steplr"\n'
    config = TrainingConfig.parse(text + "schedule_options = {step_size = 3, gamma = 0.5}")
    assert TrainingConfig.parse(config.dump()) == config


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
        ("MultiStepLR", {"milestones": [2, 5]}),
        ("CosineAnnealingWarmRestarts", {"T_0": 4}),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 12}),
        ("PolynomialLR", {"total_iters": 8, "power": 2.0}),
    ],
)
def test_rates_are_those_of_torch(name: str, options: dict[str, object]) -> None:
    section = TrainSection(steps=12, learning_rate=0.5, schedule=name.lower(), schedule_options=options)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    more = {"cycle_momentum": False} if name == "OneCycleLR" else {}
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **options, **more)
    wanted = []
    for _ in range(12):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [learning_rate(step, section) for step in range(12)] == wanted
    assert learning_rate(7, section) == wanted[7]  # in any order
    warm = section.model_copy(update={"warmup_steps": 2})
    assert [learning_rate(step, warm) for step in range(4)] == [0.25, 0.5, *wanted[:2]]


def test_rates_are_those_of_transformers() -> None:
    library = pytest.importorskip("transformers.optimization")
    section = TrainSection(steps=10, warmup_steps=3, learning_rate=0.5, schedule="cosine_with_restarts", schedule_options={"num_cycles": 2})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedule = library.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 3, 10, 2)
    wanted = []
    for _ in range(10):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [learning_rate(step, section) for step in range(10)] == wanted
