"""Network namespaces of Linux as machines, with links of a given speed and delay between them. In: names, links. Out: a network, torn down.

A hub has a link to each of the others. What goes out from the hub takes a link's bandwidth (the kernel's token bucket, `tc tbf`) and then
its delay, which a process adds that passes packets from one end to the other (TUN devices), since few kernels have `netem`; what comes back
does so at once. Needs root, `ip` and `tc`; nothing outside of the namespaces is changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

HUB = "10.77.0.1"
_TUNSETIFF, _TUN, _NO_HEAD = 0x400454CA, 0x0001, 0x1000
MTU = 9000


@dataclass(frozen=True, slots=True)
class Link:
    """From the hub: bytes a second, and seconds that each takes besides."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass
class Network:
    """`links`: of the machines beside the hub, by name. Used as a context."""

    links: Mapping[str, Link]
    prefix: str = field(default_factory=lambda: f"shardwise{os.getpid()}")
    _relays: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def space(self, name: str) -> str:
        """The namespace of a machine; of the hub for an empty name."""
        return f"{self.prefix}-{name or 'hub'}"

    def address(self, name: str) -> str:
        """Of a machine."""
        return f"10.77.{1 + list(self.links).index(name)}.2" if name else HUB

    def inside(self, name: str, *command: str) -> list[str]:
        """A command as it is run on a machine."""
        return ["ip", "netns", "exec", self.space(name), *command]

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        run("ip", "netns", "add", self.space(""))
        run(*self.inside("", "ip", "link", "set", "lo", "up"))
        run(*self.inside("", "ip", "address", "add", f"{HUB}/32", "dev", "lo"))
        run(*self.inside("", "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
        for name, link in self.links.items():
            run("ip", "netns", "add", self.space(name))
            run(*self.inside(name, "ip", "link", "set", "lo", "up"))
            relay = subprocess.Popen(
                [sys.executable, "-m", "bench.common.namespaces", str(link.latency_s), self.space(""), self.space(name), f"to-{name}"[:15]],
                stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self._relays.append(relay)
            assert relay.stdout is not None
            if relay.stdout.readline() != b"ready\n":
                raise OSError(f"no link to {name} could be made")
            near, far = f"to-{name}"[:15], "to-hub"
            run(*self.inside("", "ip", "link", "set", near, "mtu", str(MTU), "up"))
            run(*self.inside("", "ip", "route", "add", f"{self.address(name)}/32", "dev", near, "src", HUB))
            run(*self.inside(name, "ip", "address", "add", f"{self.address(name)}/32", "dev", far))
            run(*self.inside(name, "ip", "link", "set", far, "mtu", str(MTU), "up"))
            run(*self.inside(name, "ip", "route", "add", "default", "dev", far, "src", self.address(name)))
            rate = f"{8 * link.bandwidth_bytes_per_s:.0f}bit"
            run(*self.inside("", "tc", "qdisc", "add", "dev", near, "root", "tbf", "rate", rate, "burst", "32kb", "limit", "16mb"))

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            relay.terminate()
            relay.wait()
        for name in ("", *self.links):
            subprocess.run(["ip", "netns", "delete", self.space(name)], check=False, capture_output=True)


def refused() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "network namespaces need root on Linux"
    try:
        with Network({"a": Link(1e6, 0.001)}):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        return f"{error}: {said.decode(errors='replace').strip()}"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def device(name: str, space: str) -> int:
    """A TUN device in a namespace, and its end of packets."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEAD))
    run("ip", "link", "set", name, "netns", space)
    return end


def relay(latency_s: float, near: int, far: int) -> None:
    """Pass packets on, those of `near` after `latency_s`, until the process ends."""
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([near, far], [], [], left)
        for end in ready:
            with contextlib.suppress(BlockingIOError, OSError):
                packet = os.read(end, MTU + 64)
                if end == near and latency_s:
                    waiting.append((time.monotonic() + latency_s, packet))
                else:
                    os.write(far if end == near else near, packet)
        while waiting and waiting[0][0] <= time.monotonic():
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(far, waiting.popleft()[1])


def main(latency_s: str, hub: str, other: str, name: str) -> None:
    """One link's process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    unique = f"w{os.getpid()}"
    near = device(unique, hub)
    run("ip", "netns", "exec", hub, "ip", "link", "set", unique, "name", name)
    far = device(unique, other)
    run("ip", "netns", "exec", other, "ip", "link", "set", unique, "name", "to-hub")
    print("ready", flush=True)
    relay(float(latency_s), near, far)


if __name__ == "__main__":
    main(*sys.argv[1:])
