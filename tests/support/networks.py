"""Hosts and a network between them, on one machine: network namespaces joined by shaped links. In: how many hosts, a rate. Needs root.

Whatever ends this process, a guard that waits for the end of a pipe removes the namespaces and what still runs in them. Only rates are
shaped (token buckets on both ends of every link); latency is what the kernel's own links have, tens of microseconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

INTERFACE = "shardwise0"
SUBNET = "10.88.0"
# What Linux always has. One that paces by what it believes of the path (BBR) made one step in five 60 ms longer, where ranks send and wait.
CONTROL = "reno"
# Kills what runs in the namespaces and deletes them, once its standard input ends.
GUARD = """cat >/dev/null
for name in "$@"; do
    for one in 1 2 3; do
        pids=$(ip netns pids "$name" 2>/dev/null) && [ -n "$pids" ] && kill -9 $pids 2>/dev/null
    done
    ip netns delete "$name" 2>/dev/null
done
exit 0
"""


class NoNetworks(Exception):
    """Why network namespaces cannot be made here, and what would do."""


@dataclass
class Hosts:
    """`count` hosts, one network namespace each, all on one switch. A context manager."""

    count: int
    names: list[str] = field(default_factory=list)
    _guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        check_possible()
        own = [f"shardwise{os.getpid()}h{i}" for i in range(self.count)]
        switch = f"shardwise{os.getpid()}s"
        everything = [*own, *([switch] if self.count > 2 else [])]
        self._guard = subprocess.Popen(["sh", "-c", GUARD, "guard", *everything], stdin=subprocess.PIPE, start_new_session=True)
        self.names = own
        try:
            for name in everything:
                _call("ip", "netns", "add", name)
                _call("ip", "-n", name, "link", "set", "lo", "up")
            if self.count == 2:
                one, two = own
                _call("ip", "-n", one, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", two)
            else:
                _call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
                _call("ip", "-n", switch, "link", "set", "bridge0", "up")
                for i, name in enumerate(own):
                    _call("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", f"port{i}", "netns", switch)
                    _call("ip", "-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            for i, name in enumerate(own):
                _call("ip", "-n", name, "address", "add", f"{self.address(i)}/24", "dev", INTERFACE)
                _call("ip", "-n", name, "link", "set", INTERFACE, "up")
                _call(*self.command(i, ["sh", "-c", f"echo {CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"]))
        except BaseException:
            self.close()
            raise
        return self

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host + 1}"

    def shape(self, bits_per_s: float | None) -> None:
        """Let every host send at most so much; None: as fast as the kernel moves it."""
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True, check=False)
            if bits_per_s is not None:
                # What the bucket holds passes at once, and would make short messages look free: it is as small as its segments let it be.
                segment = 8192 if bits_per_s < 2e9 else 65536
                _call("ip", "-n", name, "link", "set", "dev", INTERFACE, "gso_max_size", str(segment))
                burst = max(2 * segment, int(bits_per_s / 8 / 4000))
                _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", f"{bits_per_s:.0f}bit",
                      "burst", str(burst), "latency", "200ms")  # fmt: skip

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """What runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def close(self) -> None:
        """Remove all of it; what still runs there is ended."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def __exit__(self, *_: object) -> None:
        self.close()


def check_possible() -> None:
    """Raise `NoNetworks` where this process cannot make network namespaces."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoNetworks(f"{' and '.join(missing)} not found; install iproute2, and have /usr/sbin in PATH")
    if os.geteuid() != 0:
        raise NoNetworks("emulated networks are network namespaces, which need root; run this as root (sudo), or in a container that is")


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworks(f"{' '.join(words)}: {done.stderr.strip() or f'exit {done.returncode}'}")
