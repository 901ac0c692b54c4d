"""Objects of `--json`: each has its version and keeps to its schema in docs/json; the page of verbs is what the parsers say."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise.cli.output import JSON_VERSION
from tests.support import command_pages, json_schemas


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    made = tmp_path_factory.mktemp("answers")
    json_schemas.prepare_folder(made)
    json_schemas.answer_of(json_schemas.COMMANDS["plan"][0], made)
    return made


def schema_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((json_schemas.FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", json_schemas.COMMANDS)
def test_answers_keep_to_their_schema(name: str, folder: Path) -> None:
    for number, command in enumerate(json_schemas.COMMANDS[name]):
        answer = json_schemas.answer_of(command, folder, number)
        assert answer["version"] == JSON_VERSION
        assert ("error" in answer) == (name == "error")
        jsonschema.validate(answer, schema_of(name))
        for key in schema_of(name)["required"]:  # a key that goes away is noticed
            less = copy.deepcopy(answer)
            del less[key]
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(less, schema_of(name))


def test_every_schema_has_a_version_and_a_command() -> None:
    files = {file.stem for file in json_schemas.FOLDER.glob("*.json")}
    assert files == set(json_schemas.COMMANDS)
    for name in files:
        jsonschema.Draft202012Validator.check_schema(schema_of(name))
        assert schema_of(name)["properties"]["version"] == {"const": JSON_VERSION}
        assert "version" in schema_of(name)["required"]


def test_the_page_of_verbs_is_what_the_parsers_say() -> None:
    assert command_pages.PAGE.read_text() == command_pages.page()


@pytest.mark.parametrize(
    ("words", "completed"),
    [("pl", "plan"), ("plan gpt-3", "gpt-39b"), ("plan gpt-10m --cluster 8xdgx-h", "8xdgx-h100"), ("plan gpt-10m --obj", "--objective")],
)
def test_the_shell_completes(words: str, completed: str) -> None:
    line = f"shardwise {words}"
    variables = {"_SHARDWISE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "shardwise"], env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert completed in done.stdout.split()
