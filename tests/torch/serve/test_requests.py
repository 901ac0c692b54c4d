"""Requests of strangers: what is wrong with them is the client's (4xx) and tells nothing of the process; what fails inside is a number."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from shardwise.serve.deploy import ingress, status_page
from shardwise.serve.deploy.ingress import Ingress, QueuesFull
from shardwise.serve.deploy.load_generator import encode_request


class Request:
    """A request as Ray Serve hands it on, in chunks of 64 KiB, of which `num_read` were asked for."""

    def __init__(self, body: bytes, kind: str) -> None:
        self.headers, self._body, self.num_read = {"content-type": kind}, body, 0

    async def stream(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 1 << 16):
            self.num_read += 1
            yield self._body[at : at + (1 << 16)]


def entrance(answer: Any) -> Ingress:
    """An ingress whose workflow has a source x and gives this answer, or raises it."""
    made = Ingress.__new__(Ingress)
    made._counts, made._latencies = Counter(), deque()
    made._routes = SimpleNamespace(table={"sources": {"x": 4.0}})  # type: ignore[assignment]

    async def compute(values: Mapping[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer(values)

    made.answer = compute  # type: ignore[method-assign]
    return made


def asked(made: Ingress, request: Request) -> tuple[int, dict[str, Any]]:
    response = asyncio.run(made(request))
    return response.status_code, json.loads(bytes(response.body))


BAD = [
    (b"{", "application/json"), (b"[1]", "application/json"), (b"3", "application/json"), (b"[" * 100_000, "application/json"),
    (b'{"x": ["a"]}', "application/json"), (b'{"x": [[1], [1, 2]]}', "application/json"), (b"\xff", "application/json"),
    (b'{"y": [1]}', "application/json"), (b'{"x": ' + b"1" * 5000 + b"}", "application/json"), (b"garbage", ""), (b"\xff" * 64, ""),
    (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "application/x-safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind"), BAD, ids=range(len(BAD)))
def test_a_wrong_request_is_the_clients_error(body: bytes, kind: str) -> None:
    status, answer = asked(entrance(lambda values: 1), Request(body, kind))
    assert status == 400
    assert not any(word in answer["error"] for word in ("Error", "Traceback", ".py", "line "))


def test_good_requests_are_answered() -> None:
    made = entrance(lambda values: values["x"] * 2)
    assert asked(made, Request(b'{"x": [1, 2]}', "application/json")) == (200, {"answer": [2, 4]})
    assert asked(made, Request(encode_request({"x": np.ones(2, np.float32)}), "application/x-safetensors")) == (200, {"answer": [2, 2]})


def test_a_body_has_a_limit_and_is_not_read_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "MAX_BODY_BYTES", 1 << 20)
    request = Request(bytes(1 << 24), "")
    assert asked(entrance(lambda values: 1), request)[0] == 413
    assert request.num_read == 17


def test_what_fails_inside_is_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    status, answer = asked(entrance(RuntimeError("the password is swordfish")), Request(b'{"x": [1]}', "application/json"))
    assert status == 500
    assert "swordfish" not in json.dumps(answer)
    assert "RuntimeError" not in json.dumps(answer)
    number = answer["error"].split()[-1]
    assert number in caplog.text
    assert "swordfish" in caplog.text
    assert asked(entrance(QueuesFull("net has 3 requests waiting")), Request(b'{"x": [1]}', "application/json"))[0] == 503


def test_the_page_tells_nothing_of_the_process_and_serves_beside_the_silent() -> None:
    def figures() -> Any:
        raise RuntimeError("the password is swordfish")

    page = status_page.serve_page(figures, 0)
    silent = [socket.create_connection(page.server_address[:2]) for _ in range(2 * status_page.MAX_CLIENTS)]
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{page.server_address[1]}/", timeout=20)
        assert caught.value.code == 503
        assert "swordfish" not in caught.value.read().decode()
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b""  # the oldest gave way
    finally:
        for connection in silent:
            connection.close()
        page.shutdown()
        page.server_close()
