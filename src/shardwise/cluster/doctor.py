"""Checks of this machine's environment, each with its finding and, if it fails, a remedy.

Read-only: starts no processes and changes nothing. Not checked: a firewall between hosts, disks of other hosts.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

MIN_OPEN_FILES = 1024
MIN_SHARED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `needed`: shardwise does not run without it; the others only cost speed or a feature."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def check_machine() -> tuple[Check, ...]:
    """Run every check, the needed ones first.

    >>> check_machine()[0].name
    'python'
    """
    checks = (
        _check_python(),
        *_check_packages(),
        _check_loopback(),
        _check_shared_memory(),
        _check_congestion_control(),
        _check_open_files(),
        *_check_hardware(),
        _check_allocator(),
        _check_compiler(),
    )
    return (*checks, _check_transformers())


def _check_python() -> Check:
    version = ".".join(str(n) for n in sys.version_info[:3])
    return Check("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")


def _check_packages() -> list[Check]:
    """Check shardwise's requirements against the installed packages; only lower and upper bounds of plain numbers are compared."""
    checks = []
    try:
        wanted = [r for r in requires("shardwise") or () if "extra ==" not in r]
    except PackageNotFoundError:
        return [Check("shardwise", False, "not installed", "pip install . in shardwise's folder")]
    for text in wanted:
        name = text.split(";")[0].strip()
        name_end = next((i for i, c in enumerate(name) if c in "<>=!~ "), len(name))
        name, bounds = name[:name_end], name[name_end:]
        try:
            have = version(name)
        except PackageNotFoundError:
            checks.append(Check(name, False, "not installed", f"pip install '{name}{bounds}'"))
            continue
        ok = all(_satisfies_bound(have, bound.strip()) for bound in bounds.split(",") if bound.strip())
        checks.append(Check(name, ok, f"{have} (wanted {bounds})" if not ok else have, f"pip install '{name}{bounds}'"))
    return checks


def _satisfies_bound(have: str, bound: str) -> bool:
    digits = bound.lstrip("<>=!~")
    a, b = (tuple(int(part) for part in v.split("+")[0].split(".") if part.isdigit()) for v in (have, digits))
    relation = bound[: len(bound) - len(digits)]
    length = max(len(a), len(b))
    a, b = a + (0,) * (length - len(a)), b + (0,) * (length - len(b))
    return {">=": a >= b, "<": a < b, "<=": a <= b, ">": a > b, "==": a == b, "!=": a != b}.get(relation, True)


def _check_loopback() -> Check:
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=2):
                pass
    except OSError as error:
        return Check("loopback", False, str(error), "ranks communicate over 127.0.0.1; bring the loopback interface up (ip link set lo up)")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return Check("host name", False, f"{name} does not resolve", f"add `127.0.0.1 {name}` to /etc/hosts", needed=False)
    return Check("loopback", True, f"127.0.0.1 answers, {name} resolves")


def _check_shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("shared memory", False, "no /dev/shm", "ranks will communicate through sockets, which is slower", needed=False)
    ok = free >= MIN_SHARED_BYTES
    free_words = f"{free / 2**20:.0f} MiB free in /dev/shm"
    return Check("shared memory", ok, free_words, "start the container with --shm-size=1g or more", needed=False)


def _check_congestion_control(control: Path = Path("/proc/sys/net/ipv4/tcp_congestion_control")) -> Check:
    """Check TCP congestion control between hosts: BBR made one step in five of two hosts' ranks 60 ms longer (`scripts/bench planned`)."""
    try:
        control_name = control.read_text().strip()
    except OSError:
        return Check("congestion control", True, "not known on this system", needed=False)
    remedy = "between hosts without NCCL: sysctl -w net.ipv4.tcp_congestion_control=cubic (or reno); it stalls ranks that send and wait"
    return Check("congestion control", not control_name.startswith("bbr"), control_name, remedy, needed=False)


def _check_open_files() -> Check:
    try:
        import resource  # here: POSIX has it
    except ImportError:
        return Check("open files", True, "no limit is known on this system", needed=False)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    ok = limit >= MIN_OPEN_FILES or limit == resource.RLIM_INFINITY
    return Check("open files", ok, f"at most {limit}", f"ulimit -n {MIN_OPEN_FILES}", needed=False)


def _check_hardware() -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        return []
    from shardwise.cluster.probe import machine  # here: it needs torch

    able = machine.torch_capabilities()
    memory = machine.memory_bytes()
    return [
        Check("cores", True, f"{machine.num_cores()} usable of {os.cpu_count()}", needed=False),
        Check("memory", memory >= 2 << 30, f"{memory / 2**30:.1f} GiB", "training needs at least 2 GiB", needed=False),
        Check("gloo", able["gloo"], "available" if able["gloo"] else "missing", "install a torch built with distributed support"),
        Check("GPUs", True, f"{able['gpus']}: {able['gpu']}" if able["gpus"] else "none; training runs on processors", needed=False),
        Check("nccl", bool(able["nccl"] or not able["gpus"]), "available" if able["nccl"] else "missing", "install a CUDA torch", False),
        Check(
            "bfloat16", machine.has_bfloat16(), "in hardware" if machine.has_bfloat16() else "emulated, so float32 is faster",
            "nothing to do: plans use float32 here", needed=False,
        ),
    ]  # fmt: skip


def _check_allocator() -> Check:
    library, number = platform.libc_ver()
    if library != "glibc":
        return Check("allocator", False, f"{library or 'not glibc'}: the system reclaims freed tensors", "use glibc", needed=False)
    return Check("allocator", True, f"glibc {number}: ranks keep the memory of freed tensors", needed=False)


def _check_compiler() -> Check:
    path = shutil.which("g++") or shutil.which("clang++")
    return Check("C++ compiler", path is not None, path or "none", "install g++; torch.compile on processors needs it", needed=False)


def _check_transformers() -> Check:
    try:
        return Check("transformers", True, version("transformers"), needed=False)
    except PackageNotFoundError:
        return Check("transformers", False, "not installed", "pip install 'shardwise[hf]' for hf: models", needed=False)


def check_writable(path: Path) -> Check:
    """Check whether runs can be stored in `path` (it, or the nearest existing folder above)."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    ok = os.access(folder, os.W_OK)
    return Check("run folder", ok, f"{folder} is {'writable' if ok else 'read-only'}", "choose another folder for runs")
