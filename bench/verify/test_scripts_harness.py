"""`scripts/validate scripts` on a script made here: the original, the changed one on ranks, and wrong changes, which must be seen."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from bench.verify.scripts.__main__ import compared, difference, run
from bench.verify.scripts.case import Case, cases, changed, texts

SCRIPT = """\
import torch
from parts import net, rows
torch.manual_seed(3)
model = net()
loader = torch.utils.data.DataLoader(rows(), 4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
print(torch.nn.functional.mse_loss(model(x), y).item())
"""
BESIDE = """\
import torch
from torch import nn
def net(): return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 1))
def rows(): return [(x, x.sum().view(1)) for x in torch.randn(10, 3)]
"""
DIVIDED = {"1+": "import shardwise", "5+": "model = shardwise.auto_parallelize(model, loader, plan='{plan}')"}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    (tmp_path / "there" / "examples").mkdir(parents=True)
    (tmp_path / "there" / "examples" / "train.py").write_text(SCRIPT)
    (tmp_path / "there" / "examples" / "parts.py").write_text(BESIDE)
    digest = hashlib.sha256(SCRIPT.encode()).hexdigest()[:16]
    return Case("tiny", "somebody/there", "0", "examples/train.py", digest, "", {"train.py": DIVIDED}, beside=("parts.py",))


def test_a_right_change_is_equal_and_a_wrong_one_is_not(case: Case, tmp_path: Path) -> None:
    files, work = texts(case, tmp_path), tmp_path / "work"
    wanted, _ = run(case, files, 0, work)
    assert len(wanted) == 4  # three losses, and one in evaluation
    found, why = run(case, files, 2, work)
    assert difference(found, wanted) <= 1e-9, why
    wrong = replace(case, name="wrong", lines={"train.py": {**DIVIDED, "7": "for x, y in shardwise.shard(loader):"}})  # a rank's own losses
    found, why = run(wrong, files, 2, work)
    assert difference(found, wanted) > 1e-3, why


@pytest.mark.long
@pytest.mark.parametrize(("lines", "told"), [
    ({}, "equal"),
    ({"10": "    optimizer.step(); optimizer.step()"}, "differences"),  # another training
    ({"7": "for x, y in list(loader)[:2]:"}, "differences"),  # fewer
    ({"12+": "raise RuntimeError('no more')"}, "failed"),
])  # fmt: skip
def test_a_row_says_what_was_found(case: Case, tmp_path: Path, lines: dict[str, str], told: str) -> None:
    row = compared(replace(case, lines={"train.py": {**DIVIDED, **lines}}), tmp_path, tmp_path / "work")
    assert row["equal"] == (told == "equal"), row
    assert row[told] or told == "differences"
    assert (max(row["differences"].values(), default=0.0) > 1e-3) == (told == "differences")


def test_another_script_than_the_numbered_one_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lines are numbered as of"):
        texts(replace(case, digest="0"), tmp_path)


def test_the_table_is_whole() -> None:
    for one in cases().values():
        assert one.num_lines, one.name
        assert len(one.commit) == 40
        assert all(changed("\n" * 2000, lines, plan="data=1") for lines in one.lines.values())
