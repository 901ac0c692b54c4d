"""The marker `long`: such tests are left out as a rule, and run by `scripts/test --all`; which ones, by how long they took."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import durations

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("arguments", "passed"), [((), 1), (("-m", ""), 2)])
def test_long_tests_are_left_out_but_where_all_are_asked_for(arguments: tuple[str, ...], passed: int, tmp_path: Path) -> None:
    """`scripts/test --all` gives pytest `-m ""`."""
    script = (ROOT / "scripts" / "test").read_text()
    assert "marks=\n" in script
    assert '-m "$marks"' in script
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_two.py").write_text("import pytest\n\n\ndef test_short(): pass\n\n\n@pytest.mark.long\ndef test_of_hours(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "test_two.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout


def test_what_is_long_follows_from_how_long_tests_took() -> None:
    took = {"t.py::a[1]": 0.2, "t.py::a[2]": 0.4, "t.py::a[3]": 0.05, "t.py::b": 4.0, "t.py::c": 8.0, "t.py::d[1]": 8.0, "t.py::d[2]": 4.0}
    assert durations.long_of(took) == {"t.py::a[2]": 0.4, "t.py::c": 8.0, "t.py::d[1]": 8.0}


def test_what_is_written_is_read_and_what_did_not_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    durations.write({"t.py::c": 8.0, "t.py::of words[a b]": 8.0}, path)
    durations.write({"t.py::c": 1.0, "t.py::e": 9.0}, path)
    assert durations.read(path) == {"t.py::e": 9.0, "t.py::of words[a b]": 8.0}


def test_no_line_names_a_test_that_is_gone() -> None:
    names = {tuple(test.split("[", 1)[0].split("::")) for test in durations.read()}
    assert names
    sources = {file: (ROOT / file).read_text() for file, _ in names}
    assert not [(file, name) for file, name in names if f"def {name}(" not in sources[file]]
