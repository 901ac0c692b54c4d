"""Data against counting: every sample once an epoch, in an order that no layout and no interruption changes."""

from __future__ import annotations

import math
import threading
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, Infeasible
from shardwise.plan.microbatches import microbatch_sizes
from shardwise.train import corpus
from shardwise.train.corpus import byte_frequency_loss, open_corpus
from shardwise.train.data import sources
from shardwise.train.data.loader import Loader, rows_of, shard
from shardwise.train.data.sample_order import permute_indices
from shardwise.train.data.sources import SyntheticSource, TextWindows


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute_indices(np.arange(size), size, key).tolist()) == list(range(size))


def test_permute_depends_on_the_key_and_not_on_who_asks() -> None:
    whole = permute_indices(np.arange(1000), 1000, 7)
    assert [int(permute_indices(np.asarray([i]), 1000, 7)[0]) for i in range(0, 1000, 97)] == whole[::97].tolist()
    assert (whole != permute_indices(np.arange(1000), 1000, 8)).mean() > 0.9
    assert abs(np.corrcoef(np.arange(1000), whole)[0, 1]) < 0.15


def numbered(size: int) -> np.ndarray:
    """Tokens from which a window's place can be told: the text of a counter in base 256, two tokens a number."""
    return np.frombuffer(b"".join(int(i).to_bytes(2, "big") for i in range(size // 2)), np.uint8)


def text(windows: int, batch: int = 4, sequence: int = 8, seed: int = 0) -> TextWindows:
    return TextWindows(numbered(windows * sequence + 2), sequence, batch, 0.1, seed)


def starts(inputs: torch.Tensor) -> list[int]:
    """Where in the text each row begins."""
    return [int(row[0]) * 256 + int(row[1]) for row in inputs]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.integers(1, 9), st.integers(0, 5))
def test_every_sample_comes_once_an_epoch_and_none_is_validated_on(windows: int, batch: int, seed: int) -> None:
    source = text(windows, batch, seed=seed)
    seen: list[int] = []
    for step in range(math.ceil(2 * source.num_samples / batch)):
        inputs, targets, *_ = source.train(step, range(batch))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen += starts(inputs)
    n = source.num_samples
    first, second = seen[:n], seen[n : 2 * n]
    assert len(set(first)) == n
    assert sorted(first) == sorted(second)
    validated = {s for i in range(source.num_validation) for s in starts(source.validation(i, range(batch))[0])}
    assert len(validated) == source.num_validation
    assert not validated & set(first)
    assert n + source.num_validation > windows - 64


def test_epochs_and_seeds_have_their_own_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        source = text(400, 1, seed=seed)
        return [starts(source.train(epoch * source.num_samples + i, [0])[0])[0] for i in range(source.num_samples)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 4]), st.integers(0, 50))
def test_the_samples_of_a_step_do_not_depend_on_the_layout(count: int, microbatches: int, step: int) -> None:
    source = text(500, batch=48)
    whole = source.train(step, range(48))[0]
    every = Counter()
    for index in range(count):
        rows = rows_of(48, index, count, microbatches)
        own = source.train(step, rows)[0]
        assert torch.equal(own, whole[rows])
        every.update(rows)
        # Microbatch m of this coordinate lies in microbatch m of the whole batch, which has the same samples in any layout.
        assert [row // (48 // microbatches) for row in rows] == sorted(
            m for m in range(microbatches) for _ in range(len(rows) // microbatches)
        )
    assert every == Counter(range(48))


def test_rows_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(Infeasible, match="11 samples does not divide into data=2 equal shares; use a multiple of 2 such as 10"):
        rows_of(11, 0, 2, 2)
    with pytest.raises(Infeasible, match="6 samples has 3 for each of data=2, which are too few for microbatches=4; use microbatches=3"):
        rows_of(6, 0, 2, 4)


Pair = namedtuple("Pair", "x y")


def test_shard_takes_rows_of_anything() -> None:
    where = SimpleNamespace(data_index=1, data_size=2, sizes_of=lambda samples: microbatch_sizes(samples, 2, 2))
    x = torch.arange(8)
    batches = [x, (x, x * 2), {"ids": x, "scale": torch.tensor(3.0), "flag": True}, Pair(x, [x])]
    a, b, c, d = shard(batches, where)
    mine = torch.tensor([2, 3, 6, 7])
    assert torch.equal(a, mine)
    assert torch.equal(b[1], mine * 2)
    assert torch.equal(c["ids"], mine)
    assert (float(c["scale"]), c["flag"]) == (3.0, True)
    assert isinstance(d, Pair)
    assert torch.equal(d.y[0], mine)
    assert next(iter(shard([torch.arange(9)], where))).tolist() == [3, 4, 7, 8]  # microbatches of 5 and 4
    uneven, few = shard([torch.arange(9), torch.arange(1)], SimpleNamespace(data_index=1, data_size=2))  # in a plain loop
    assert (uneven.tolist(), few.tolist()) == ([5, 6, 7, 8], [0])
    with pytest.raises(ConfigError, match="no tensor"):
        list(shard([{"a": 1}], where))


def test_shard_of_one_is_the_batch_itself() -> None:
    x = torch.arange(4)
    assert next(shard([x], SimpleNamespace(data_index=0, data_size=1))) is x


def test_synthetic_repeats_its_batch() -> None:
    source = SyntheticSource({"x": torch.arange(6)})
    assert source.train(5, [1, 2])["x"].tolist() == source.validation(0, [1, 2])["x"].tolist() == [1, 2]


def test_too_little_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 30 tokens, too few .* sequence = 20; use at least 41"):
        TextWindows(np.zeros(30, np.uint8), 20, 1)


# Corpora


def test_python_s_own_sources_are_text(tmp_path: Path) -> None:
    found = open_corpus((), tmp_path)
    tokens = found.tokens()[:]
    assert 2_000_000 < found.size <= corpus.PYTHON_LIMIT_BYTES
    assert b"def __init__(self" in tokens[:3_000_000].tobytes()
    assert found == open_corpus((), tmp_path)
    # A program's text: far from uniform, far from constant.
    assert 2.5 < byte_frequency_loss(tokens) < 4.5


def test_the_limit_leaves_out_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PYTHON_LIMIT_BYTES", 100_000)
    assert 0 < open_corpus((), tmp_path).size <= 100_000


def test_folders_are_read_in_sorted_order_without_what_is_no_text(tmp_path: Path) -> None:
    root = tmp_path / "text"
    (root / "b").mkdir(parents=True)
    (root / "b" / "two.txt").write_text("two")
    (root / "a.md").write_text("one\n")
    (root / "c.bin").write_bytes(b"\0\1")
    (root / ".hidden").write_text("hidden")
    (root / "link.txt").symlink_to(root / "a.md")
    found = open_corpus((str(root),), tmp_path / "run")
    assert found.tokens()[:].tobytes() == b"one\ntwo\n"
    both = open_corpus((str(root / "a.md"), str(root / "b")), tmp_path / "run")
    assert both.tokens()[:].tobytes() == b"one\ntwo\n"
    assert open_corpus((str(root / "*.md"), str(root / "[b]" / "*")), tmp_path / "run").digest == both.digest


def test_one_file_is_used_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "big.txt"
    file.write_bytes(bytes(range(256)) * 4)
    found = open_corpus((str(file),), tmp_path / "run")
    assert found.path == str(file)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["text.sums"]
    assert byte_frequency_loss(found.tokens()[:][:]) == pytest.approx(math.log(256))


def test_a_text_that_changed_is_noticed(tmp_path: Path) -> None:
    file, description = tmp_path / "t.txt", tmp_path / "corpus.json"
    file.write_text("hello world")
    assert corpus.describes_corpus(open_corpus((str(file),), tmp_path), description)
    corpus.save_description(open_corpus((str(file),), tmp_path), description)
    assert corpus.describes_corpus(open_corpus((str(file),), tmp_path), description)
    file.write_text("hello_world")
    assert not corpus.describes_corpus(open_corpus((str(file),), tmp_path), description)


@pytest.mark.parametrize(("make", "says"), [(None, "does not exist"), (b"", "is empty"), ("folder", "no text in")])
def test_no_text(tmp_path: Path, make: object, says: str) -> None:
    path = tmp_path / "t"
    if make == "folder":
        path.mkdir()
    elif make is not None:
        path.write_bytes(make)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says) as caught:
        open_corpus((str(path),), tmp_path)
    assert str(path) in str(caught.value)


# Loader


def test_a_loaders_threads_are_on_the_ranks_gpu_and_pin_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch's calls are stood in for, and a tensor that is elsewhere is one without values."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    with Loader(lambda step: (torch.zeros(1), torch.zeros(1, device="meta")), 0, 1, pin=True) as loader:
        ((pinned, elsewhere),) = loader
    assert devices == [3]
    assert pinned.tolist() == [1.0]
    assert elsewhere.device.type == "meta"


def test_loader_gives_every_step_in_order_and_ends_its_thread() -> None:
    with Loader(lambda step: torch.tensor([step]), 3, 40) as loader:
        assert [int(x) for x in loader] == list(range(3, 40))
    assert not [t for t in threading.enumerate() if t.name.startswith("shardwise-loader")]


def test_loader_stops_early() -> None:
    with Loader(lambda step: step, 0, 10**9) as loader:
        assert [next(loader), next(loader)] == [0, 1]
    assert not [t for t in threading.enumerate() if t.name.startswith("shardwise-loader")]


def test_loader_raises_where_the_batch_is_taken() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ConfigError("no such sample")
        return step

    with Loader(make, 0, 5) as loader:
        assert [next(loader), next(loader)] == [0, 1]
        with pytest.raises(ConfigError, match="no such sample"):
            next(loader)
        assert list(loader) == []


def test_take_of_all_rows_copies_nothing() -> None:
    x = torch.arange(3)
    assert sources.take_rows(x, range(3)) is x
