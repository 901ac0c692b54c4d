"""Machines that are network namespaces: what crosses a link arrives whole and in order, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.common.namespaces import Link, Network, refused

_TAKES = """
import hashlib, socket
taken, _ = socket.create_server(("0.0.0.0", 5000)).accept() if print("ready", flush=True) is None else ()
print(hashlib.sha256(b"".join(iter(lambda: taken.recv(65536), b""))).hexdigest())
"""
_SENDS = """
import hashlib, socket, sys
data = b"".join(bytes([i % 256]) * 997 for i in range(300))
with socket.create_connection((sys.argv[1], 5000)) as there:
    there.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""


def test_what_crosses_a_link_arrives_and_nothing_is_left() -> None:
    if why := refused():
        pytest.skip(why)
    network = Network({"server": Link(5e6, 0.01), "edge": Link(1e9, 0.0)})
    with network:
        for source in ("", "edge"):  # by way of the hub
            taking = subprocess.Popen(network.inside("server", sys.executable, "-c", _TAKES), stdout=subprocess.PIPE, text=True)
            assert taking.stdout is not None
            assert taking.stdout.readline() == "ready\n"
            command = network.inside(source, sys.executable, "-c", _SENDS, network.address("server"))
            sent = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert taking.communicate(timeout=30)[0] == sent
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.prefix not in left
