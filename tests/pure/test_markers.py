"""The marker `long`: such tests are left out as a rule, and run by `scripts/test --all`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("arguments", "passed"), [((), 1), (("-m", ""), 2)])
def test_long_tests_are_left_out_but_where_all_are_asked_for(arguments: tuple[str, ...], passed: int, tmp_path: Path) -> None:
    """`scripts/test --all` gives pytest `-m ""`."""
    script = (ROOT / "scripts" / "test").read_text()
    assert "marks=\n" in script
    assert '-m "$marks"' in script
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\n\ndef test_short(): pass\n\n\n@pytest.mark.long\ndef test_of_hours(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "test_two.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout
