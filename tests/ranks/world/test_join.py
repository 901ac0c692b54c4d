"""Joining under torchrun's and SLURM's variables, with plain subprocesses: no launcher of shardwise takes part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardwise.errors import RunError, UsageError
from shardwise.world.launch.join import agent_of, join
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.started import first_host
from shardwise.world.recorder import process_state
from tests.support.processes import gone

CODE = """
import os, sys, torch
from shardwise.world.launch.join import join
world = join(os.environ, "cpu")
x = torch.tensor([float(world.rank + 1)])
world.world_group.all_reduce(x)
print(world.rank, world.num_ranks, world.local_rank, world.generation, float(x))
world.world_group.barrier()
"""


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    return number


def start(env: Mapping[str, str]) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "TORCHELASTIC", "PMI", "OMPI"))}
    return subprocess.Popen(
        [sys.executable, "-c", CODE], env={**kept, **env, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def torchrun(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "none",
    }


def slurm(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(num_ranks),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": "77",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }


def open_mpi(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Of mpirun inside a SLURM job, whose batch script all ranks inherit."""
    names = {"RANK": rank, "SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": num_ranks}
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_RESTART_COUNT": "2"}
    return slurm | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}


def hydra(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    names = {"PMI_RANK": rank, "PMI_SIZE": num_ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": num_ranks, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize("variables", [torchrun, slurm, open_mpi, hydra])
def test_ranks_join_by_their_variables(variables: Callable[[int, int, int], dict[str, str]], port: int) -> None:
    processes = [start(variables(rank, 2, port)) for rank in range(2)]
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert out == f"{rank} 2 {rank} 2 3.0\n", err


def test_ranks_that_have_one_token_meet_and_others_do_not(port: int) -> None:
    def one(rank: int, token: str) -> subprocess.Popen[str]:
        return start({**torchrun(rank, 2, port), "SHARDWISE_TOKEN": token})

    first, stranger = one(0, "the same on all ranks"), one(1, "another on this rank")
    _, err = stranger.communicate(timeout=120)  # first waits: the store is there all the while
    assert f"127.0.0.1:{port} does not have this rank's SHARDWISE_TOKEN" in err
    second = one(1, "the same on all ranks")
    for rank, process in enumerate((first, second)):
        out, err = process.communicate(timeout=120)
        assert out == f"{rank} 2 {rank} 2 3.0\n", err


def test_a_rank_without_the_token_reaches_nothing(port: int) -> None:
    guarded = start({**torchrun(0, 2, port), "SHARDWISE_TOKEN": "the same on all ranks"})
    try:
        while guarded.poll() is None and not addresses(port):
            pass
        with socket.create_connection(("127.0.0.1", port), 60) as stranger:
            assert len(stranger.recv(64)) == 32  # a random number to answer, and no store
            stranger.sendall(bytes(64))
            assert stranger.recv(64) == b""
    finally:
        guarded.kill()
        guarded.communicate()


def test_a_token_that_could_be_guessed_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match="SHARDWISE_TOKEN has 4 characters"):
        join({**torchrun(1, 2, port), "SHARDWISE_TOKEN": "1234"}, "cpu")


def test_a_store_that_others_reach_is_not_served_without_a_token(port: int) -> None:
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no address beyond loopback")
    open_to_all = {**torchrun(0, 2, port), "MASTER_ADDR": address}
    with pytest.raises(UsageError, match=f"rank 0 would serve the ranks' store on {address}, port {port}"):
        join(open_to_all, "cpu")
    first, second = (start({**torchrun(n, 2, port), "MASTER_ADDR": address, "SHARDWISE_TOKEN": "none"}) for n in range(2))
    for rank, process in enumerate((first, second)):
        out, err = process.communicate(timeout=120)
        assert out == f"{rank} 2 {rank} 2 3.0\n", err


def test_the_store_listens_on_the_given_address_only(port: int) -> None:
    """TCPStore by itself listens on every interface, and asks nobody who they are."""
    process = start(torchrun(0, 2, port))
    try:
        listening = set()
        while process.poll() is None and not listening:
            listening = addresses(port)
        assert listening == {"0100007F"}, process.communicate() if process.poll() is not None else listening
    finally:
        process.kill()
        process.communicate()


def addresses(port: int) -> set[str]:
    """Local addresses (in the kernel's hexadecimal) that listen on `port`."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.add(local.rpartition(":")[0])
    return found


def test_a_port_in_use_is_one_error_with_a_remedy(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; set MASTER_PORT to a free port"):
            join(torchrun(0, 2, port), "cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT is missing"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0; ports are 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; ports are 1 to 65535"),
        ({"RANK": "²"}, "RANK is '²'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0; a run has 1 rank or more"),
        ({"RANK": "5"}, "RANK is 5 and WORLD_SIZE 2"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is missing"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR no.such.host.invalid has no address"),
    ],
)
def test_wrong_variables_are_named(port: int, change: dict[str, str | None], said: str) -> None:
    env = {name: value for name, value in {**torchrun(0, 2, port), **change}.items() if value is not None}
    with pytest.raises(UsageError, match=said):
        join(env, "cpu")


def test_ranks_of_mpirun_on_several_hosts_are_told_what_they_need() -> None:
    with pytest.raises(UsageError, match="SHARDWISE_TRANSPORT=mpi"):
        join({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "cpu")


def test_no_variables_are_a_world_of_one(launcher: Launcher) -> None:
    assert join({}, "cpu").num_ranks == 1
    assert join({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "3"}, "cpu").generation == 3


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node[007-010,12],login1", "node007"),
        ("gpu-[3,5]", "gpu-3"),
        ("r[1-2]n.lan,x", "r1n.lan"),
        ("n1,n[2-3]", "n1"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_an_empty_node_list_is_an_error() -> None:
    with pytest.raises(UsageError, match="names no host"):
        first_host("")


AGENT = """
import os, subprocess, sys, time
code, rest = sys.argv[1], dict(pair.split("=", 1) for pair in sys.argv[2:])
for rank in "01":
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **rest, "RANK": rank, "LOCAL_RANK": rank})
time.sleep(120)
"""
LASTING = """
import os, time
from shardwise.world.launch.join import join
world = join(os.environ, "cpu")
world.world_group.barrier()
os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, beside the other worker
time.sleep(120)
"""


def test_workers_end_with_the_agent_that_started_them(port: int) -> None:
    given = [f"{name}={value}" for name, value in torchrun(0, 2, port).items()]
    agent = subprocess.Popen([sys.executable, "-c", AGENT, LASTING, *given], stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        workers = {int(agent.stdout.readline()) for _ in range(2)}
        assert {agent_of(pid) for pid in workers} == {agent.pid}
    finally:
        agent.kill()
        agent.wait()
    assert not gone(lambda: {pid for pid in workers if process_state(pid) not in ("", "Z")})
