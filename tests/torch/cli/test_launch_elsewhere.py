"""`shardwise launch`: the same training over ssh, SLURM and Ray with stand-ins that run here, and the files for other systems."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shardwise.cli import run
from shardwise.cli.launchers import manifests, slurm
from shardwise.cli.launchers import ssh as over_ssh
from shardwise.cli.launchers.job import LaunchJob, parse_job
from shardwise.cli.output import JSON_VERSION
from shardwise.errors import ConfigError, RunError, UsageError

CONFIG = """
[model]
name = "gpt-tiny:vocabulary=256"
[data]
sequence = 16
text = "{text}"
[train]
steps = 2
batch = 4
evaluate_every = 0
[plan]
cluster = "here"
layout = "data=2"
[run]
folder = "{folder}"
"""

FAKE_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
echo "$1" >> "$(dirname "$0")/hosts"
[ "$1" = node9 ] && { sleep 1; exit 255; }
shift
exec /bin/sh -c "$1"
"""

# sbatch runs the script here; srun starts the tasks with SLURM's variables.
FAKE_SBATCH = """#!/bin/sh
shift
grep -q gpus-per-node "$1" && { echo "sbatch: error: Invalid generic resource (gres) specification" >&2; exit 1; }
cp "$1" "$(dirname "$0")/script"
SLURM_JOB_ID=41 SLURM_NTASKS=2 /bin/bash "$1" > "$(dirname "$0")/out" 2>&1
echo $? > "$(dirname "$0")/code"
echo 41
"""
FAKE_SRUN = """#!/bin/sh
while :; do case "$1" in --*) shift ;; *) break ;; esac; done
pids=
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i MASTER_ADDR=127.0.0.1 "$@" & pids="$pids $!"; done
code=0
for p in $pids; do wait $p || code=$?; done
exit $code
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("ssh", FAKE_SSH), ("sbatch", FAKE_SBATCH), ("srun", FAKE_SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text to train on, of some length. " * 400)
    file = tmp_path / "tiny.toml"
    file.write_text(CONFIG.format(text=tmp_path / "text.txt", folder=tmp_path / "run"))
    return file


def launched(*words: str, limit_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardwise", "launch", *words], capture_output=True, text=True, timeout=limit_s)


def steps_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def port() -> str:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.usefixtures("home")
def test_two_hosts_over_ssh_train_as_one_would(tools: Path, config: Path, tmp_path: Path) -> None:
    done = launched("--ssh", "node1,node2", "--address", "127.0.0.1", "--port", port(), "--json", "--", "train", str(config))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer == {"version": JSON_VERSION, "file": "", "ranks": 2, "run_folder": str(tmp_path / "run"), "exit_code": 0}
    assert sorted((tools / "hosts").read_text().split()) == ["node1", "node2"]
    assert len([row for row in steps_of(tmp_path) if "loss" in row]) >= 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2


@pytest.mark.usefixtures("home")
def test_slurm_gets_a_job_that_trains(tools: Path, config: Path, tmp_path: Path) -> None:
    done = launched("--slurm", "--option", "time=00:05:00", "--json", "--", "train", str(config))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"] == "41"
    assert (tools / "code").read_text().strip() == "0", (tools / "out").read_text()
    text = (tools / "script").read_text()
    assert "#SBATCH --time=00:05:00" in text
    assert f"#SBATCH --output={tmp_path}/run.slurm/%j.out" in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2


@pytest.mark.usefixtures("home")
def test_a_ray_cluster_trains(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    done = launched("--ray", "local", "--json", "--", "train", str(config))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2


def test_one_host_that_fails_ends_the_others(tools: Path, tmp_path: Path) -> None:
    """The other host's command would run for a minute; it ends when nobody holds its input."""
    code = "import sys\nif sys.argv[3] == '1':\n    sys.exit(4)\nsys.stdin.readline()\nsys.stdin.read()\n"
    (tmp_path / "shardwise.py").write_text(code)
    job = LaunchJob(("train", "x.toml"), 2, 1, folder=str(tmp_path), python=sys.executable)
    assert over_ssh.run(job, ["node1", "node2"]) == 4


def test_one_host_that_is_lost_does_not_end_the_others(tools: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They have the token, which is no word of a command, and end by themselves."""
    (tmp_path / "shardwise.py").write_text("import sys, time\nassert len(sys.stdin.readline()) == 33\ntime.sleep(2)\n")
    job = LaunchJob(("train", "x.toml"), 2, 1, folder=str(tmp_path), python=sys.executable)
    assert over_ssh.run(job, ["node1", "node9"]) == 0
    assert "host node9 is lost (exit code 255); the others go on" in capfd.readouterr().err
    assert over_ssh.run(LaunchJob(("train", "x.toml"), 1, 1, folder=str(tmp_path), python=sys.executable), ["node9"]) == 255


@pytest.mark.parametrize(("layout", "hosts", "word"), [("data=3", 2, "3 ranks"), ("data=2", 4, "2 ranks")])
def test_ranks_that_do_not_fit_the_hosts_are_refused(config: Path, layout: str, hosts: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_job(["train", str(config), f"plan.layout={layout}"], hosts, 0)


def test_a_plan_for_machines_that_are_not_there_is_refused(config: Path, tools: Path) -> None:
    words = ["train", str(config), "plan.cluster=8xdgx-h100", "plan.layout=data=64"]
    with pytest.raises(ConfigError, match="the job has 2 machines: give 8"):
        parse_job(words, 2, 0)
    assert parse_job(words, 0, 0).num_hosts == 8
    assert run(["launch", "--ssh", "node1,node2", "--", *words]) == 2
    assert not (tools / "hosts").exists()


def test_slurm_that_has_fewer_nodes_is_asked_first(tools: Path, config: Path) -> None:
    (tools / "sinfo").write_text("#!/bin/sh\necho 3\necho 1\n")
    (tools / "sinfo").chmod(stat.S_IRWXU)
    job = parse_job(["train", str(config), "plan.cluster=8xdgx-h100", "plan.layout=data=64"], 0, 0)
    with pytest.raises(ConfigError, match="8 nodes, and SLURM has 4"):
        slurm.check_nodes(job)


def test_what_sbatch_refuses_is_said(tools: Path, config: Path) -> None:
    job = parse_job(["train", str(config), "plan.cluster=dgx-h100", "plan.layout=data=8"], 0, 0)
    with pytest.raises(RunError, match="Invalid generic resource"):
        slurm.submit_job(job, Path(job.run_folder).parent / "job.sh")


def test_without_sbatch_the_remedy_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="write the script alone with -o"):
        slurm.submit_job(parse_job(["train", str(config)], 1, 0), Path("job.sh"))


@pytest.mark.parametrize("words", [[], ["plan", "x"], ["train"]])
def test_other_commands_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"train CONFIG\.toml"):
        parse_job(words, 1, 1)


@pytest.mark.parametrize("names", [["a", "a"], ["a", ""], ["-oProxyCommand=x", "b"], ["a"]])
def test_hosts_are_names_each_once(names: list[str], tools: Path) -> None:
    with pytest.raises(UsageError):
        over_ssh.run(LaunchJob(("train", "x"), 2, 1), names)


def test_a_plan_that_is_chosen_there_is_for_all_ranks(config: Path) -> None:
    job = parse_job(["train", str(config), "plan.layout=", 'plan.constrain=["tensor<=2", "ranks<=2"]'], 2, 3)
    assert job.num_ranks == 6
    assert job.words[-1] == 'plan.constrain=["tensor<=2", "ranks=6"]'


# The fields that these files use, as Kubernetes' API reference (batch/v1, v1) and SkyPilot's task reference have them; no others pass.
_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "workingDir": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "env": {"type": "array", "items": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["name"]}},
        "ports": {"type": "array", "items": {"type": "object", "properties": {"containerPort": {"type": "integer"}}}},
        "resources": {"type": "object"},
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    },
}
_POD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["containers", "restartPolicy"],
    "properties": {
        "subdomain": {"type": "string"},
        "restartPolicy": {"enum": ["Never", "OnFailure"]},
        "terminationGracePeriodSeconds": {"type": "integer"},
        "containers": {"type": "array", "items": _CONTAINER, "minItems": 1},
        "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    },
}
_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "batch/v1"},
        "kind": {"const": "Job"},
        "metadata": _METADATA,
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["template"],
            "properties": {
                "completionMode": {"enum": ["Indexed", "NonIndexed"]},
                "completions": {"type": "integer"},
                "parallelism": {"type": "integer"},
                "backoffLimit": {"type": "integer"},
                "template": {"type": "object", "additionalProperties": False, "properties": {"metadata": {"type": "object"}, "spec": _POD}},
            },
        },
    },
}
_TASK = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "workdir": {"type": "string"},
        "num_nodes": {"type": "integer", "minimum": 1},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"accelerators": {"type": "string", "pattern": "^[A-Za-z0-9-]+:[0-9]+$"}, "cpus": {"type": "string"}},
        },
        "envs": {"type": "object", "additionalProperties": {"type": "string"}},
        "secrets": {"type": "object", "additionalProperties": {"type": "string"}},
        "setup": {"type": "string"},
        "run": {"type": "string"},
    },
}


def test_a_kubernetes_job_has_a_pod_for_each_host(config: Path) -> None:
    job = parse_job(["train", str(config), "plan.cluster=2xdgx-h100", "plan.layout=data=16"], 0, 0)
    secret, service, batch = yaml.safe_load_all(manifests.kubernetes_manifest(job))
    jsonschema.validate(batch, _JOB)
    assert (service["kind"], service["spec"]["clusterIP"], service["metadata"]["name"]) == ("Service", "None", job.name)
    pod = batch["spec"]["template"]
    assert len(secret["stringData"]["token"]) == 32
    assert pod["spec"]["containers"][0]["env"][1]["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "token"}
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert (batch["spec"]["completions"], pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == (2, 8)
    command = pod["spec"]["containers"][0]["command"][-1]
    assert f"--address {job.name}-0.{job.name} " in command
    with pytest.raises(jsonschema.ValidationError):  # a key that Kubernetes does not have
        jsonschema.validate({**batch, "spec": {**batch["spec"], "replicas": 2}}, _JOB)


def test_a_skypilot_task_has_its_devices_by_its_own_names(config: Path) -> None:
    job = parse_job(["train", str(config), "plan.cluster=2xdgx-a100-80", "plan.layout=data=16"], 0, 0)
    task = yaml.safe_load(manifests.skypilot_task(job))
    jsonschema.validate(task, _TASK)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "A100-80GB:8")
    assert "$SKYPILOT_NODE_RANK" in task["run"]
    assert len(task["secrets"]["SHARDWISE_TOKEN"]) == 32
    assert "SHARDWISE_TOKEN" not in task["envs"]


@pytest.mark.parametrize("where", ["--kubernetes", "--skypilot", "--slurm"])
def test_the_token_is_in_no_file_that_others_can_read_nor_in_an_answer(
    where: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job"
    file.write_text("an old one that others can read")
    file.chmod(0o644)
    changes = ["plan.cluster=2xdgx-a100-80", "plan.layout=data=16"]
    assert run(["launch", where, "--json", "-o", str(file), "--", "train", str(config), *changes]) == 0
    said = capsys.readouterr()
    secret = set(re.findall(r"\b[0-9a-f]{32}\b", file.read_text()))
    assert bool(secret) == (where != "--slurm")  # its script draws one where it runs
    assert not any(token in said.out + said.err for token in secret)
    assert not secret or file.stat().st_mode & 0o777 == 0o600


def test_each_hosts_command_is_one_that_shardwise_takes(tmp_path: Path) -> None:
    """As a shell reads it: the ranks get every word as it was given."""
    (tmp_path / "shardwise.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    words = ("train", "a b.toml", 'plan.constrain=["ranks=2"]', "x=$HOME")
    job = LaunchJob(words, 2, 1, python=sys.executable, threads_per_rank=3)
    text = job.host_command("$INDEX", "10.0.0.1", ends_with_input=True)
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, env={"INDEX": "1", "PYTHONPATH": str(tmp_path)})
    where = "--host 1 --hosts 2 --ranks 1 --threads 3 --address 10.0.0.1 --port 29400 --held --"
    assert json.loads(done.stdout) == ["launch", *where.split(), *words]
