"""The pages of `docs/migrate`: the diff applies to the original script, and the result prints on two ranks what that prints on one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.unified_diff import apply_diff

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "migrate"
QUICK, SLOW = ("ddp", "fsdp2", "deepspeed", "megatron"), ("accelerate", "lightning")
STAND_INS = ROOT / "tests" / "support" / "stand_ins"
TOLERANCE = 1.01e-4  # float32 in another order, printed with four digits


def scripts_of(page: str) -> tuple[str, str]:
    """The original script of a page, and what its diff makes of it."""
    text = (PAGES / f"{page}.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, re.S | re.M)
    (original,) = re.findall(r"^```py\n(.*?)^```", text, re.S | re.M)
    return original, apply_diff(original, diff)


def run_all(pages: tuple[str, ...], folder: Path, ranks: int) -> dict[str, list[float]]:
    """The losses that each page's script prints: the originals on one process, the migrated ones on several."""
    kind = "original" if ranks == 1 else "migrated"
    (folder / kind).mkdir()
    for page in pages:
        (folder / kind / f"{page}.py").write_text(scripts_of(page)[kind == "migrated"])
    runner = [str(ROOT / "tests" / "support" / "run_scripts.py"), f"{kind}.json", *(f"{kind}/{page}.py" for page in pages)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    missing = any(importlib.util.find_spec(name) is None for name in ("deepspeed", "megatron"))
    paths = [str(ROOT / "src"), *([str(STAND_INS)] if missing and ranks == 1 else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *runner], cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    printed = json.loads((folder / f"{kind}.json").read_text())
    return {page: [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)$", printed[page], re.M)] for page in pages}


def differences(original: list[float], migrated: list[float]) -> list[str]:
    if len(original) != 3 or len(migrated) != 3:
        return [f"{len(original)} and {len(migrated)} epochs were printed, not 3"]
    return [f"epoch {i}: {a} and {b}" for i, (a, b) in enumerate(zip(original, migrated, strict=True)) if abs(a - b) > TOLERANCE]


def compare(pages: tuple[str, ...], folder: Path) -> dict[str, list[float]]:
    original, migrated = run_all(pages, folder, 1), run_all(pages, folder, 2)
    assert {page: differences(original[page], migrated[page]) for page in pages} == {page: [] for page in pages}
    assert all(losses[0] > losses[-1] for losses in original.values())  # they train
    return migrated


def test_migrated_scripts_print_what_the_originals_print(tmp_path: Path) -> None:
    migrated = compare(QUICK, tmp_path)
    (shown,) = re.findall(r"^```console\n\$ torchrun --nproc-per-node 2 train.py\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert differences([float(loss) for loss in re.findall(r"loss ([\d.]+)$", shown, re.M)], migrated["ddp"]) == []


@pytest.mark.long
def test_migrated_scripts_of_libraries_print_what_the_originals_print(tmp_path: Path) -> None:
    compare(SLOW, tmp_path)


def test_every_page_has_an_original_and_a_diff_that_applies() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == sorted(QUICK + SLOW)
    for page in QUICK + SLOW:
        original, migrated = scripts_of(page)
        compile(original, page, "exec")
        compile(migrated, page, "exec")
        assert "shardwise" in migrated
        assert "shardwise" not in original


def test_the_readme_has_the_diff_of_the_page() -> None:
    def diffs(path: Path) -> list[str]:
        return re.findall(r"^```diff\n(.*?)^```", path.read_text(), re.S | re.M)

    assert diffs(ROOT / "README.md") == diffs(PAGES / "ddp.md")


def test_broken_twins_other_losses_and_a_diff_of_another_script_are_found() -> None:
    assert differences([2.0, 1.5, 1.0], [2.0, 1.5, 1.1]) == ["epoch 2: 1.0 and 1.1"]
    assert differences([2.0, 1.5, 1.0], [2.0]) == ["3 and 1 epochs were printed, not 3"]
    original, _ = scripts_of("ddp")
    diff = re.findall(r"^```diff\n(.*?)^```", (PAGES / "ddp.md").read_text(), re.S | re.M)[0]
    with pytest.raises(ValueError, match="is not"):
        apply_diff(original.replace("import torch.distributed as dist", "import torch.distributed"), diff)
    with pytest.raises(ValueError, match="counted"):
        apply_diff(original, diff.replace("+20,", "+21,").replace("+18,", "+19,"))
