"""`shardwise verify --loop`: a user's script against itself, serially; a script that is not right is told by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.api_loop_verify import verify_loop
from shardwise.errors import UsageError

SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F, shardwise
torch.manual_seed(0)
data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(4)]
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
stem, net = nn.Linear(6, 6), shardwise.auto_parallelize(net, (data[0][0],), plan="data=2 zero=3")
optimizer = torch.optim.AdamW([*stem.parameters(), *net.parameters()], 1e-2)
for x, y in shardwise.shard(data):
    optimizer.zero_grad()
    F.cross_entropy(net(stem(x)), y, reduction="{reduction}").backward()
    optimizer.step()
"""


def test_compares_a_script_with_itself(tmp_path: Path) -> None:
    """The loss must be a mean over this rank's samples; a sum counts half, and the gradients show it."""
    results = {}
    for reduction in ("mean", "sum"):
        script = tmp_path / f"{reduction}.py"
        script.write_text(SCRIPT.format(reduction=reduction))
        results[reduction] = verify_loop(f"{script} --some argument", num_ranks=2, steps=3)
    assert results["mean"].ok, results["mean"].first_difference
    assert results["mean"].worst.keys() == {"losses", "gradients", "weights", "optimizer state", "buffers"}
    assert results["mean"].steps == 3
    assert not results["sum"].ok
    assert "step 1" in str(results["sum"].first_difference)


MATRICES = """
import torch, torch.nn as nn, torch.nn.functional as F, shardwise
torch.manual_seed(0)
data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(3)]
net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
shardwise.auto_parallelize(net, (data[0][0],), plan="data=2 zero=3")
optimizer, seen = torch.optim.Muon(net.parameters(), 1e-2), []
optimizer.register_step_post_hook(lambda *_: seen.append(1))
for number, (x, y) in enumerate(shardwise.shard(data)):
    assert len(seen) == number, seen
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
"""


def test_an_optimizer_of_full_matrices_makes_one_step(tmp_path: Path) -> None:
    """Its step on shards has a step for each matrix inside, which hooks do not see."""
    (tmp_path / "script.py").write_text(MATRICES)
    result = verify_loop(str(tmp_path / "script.py"), num_ranks=2, steps=3)
    assert result.ok, result.first_difference
    assert result.steps == 3


def test_refuses_what_is_no_script() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.py is not a file"):
        verify_loop("nowhere.py")
