"""The ingress of a served workflow, an HTTP deployment of Ray Serve: it routes each request through the operators by the plan's shares.

A request whose worker dies is sent to another; it fails only if none answers in time. Queues are bounded: beyond them a request is
refused at once (503). Ray Serve chooses among the replicas of a deployment and monitors them; the ingress chooses the deployment.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from shardwise.plan.ir.toml_text import parse_json
from shardwise.serve.deploy.dataflow import WeightedRouter, operators_on_items, requests_of
from shardwise.serve.placement.workflow import OperatorVariant, RequestSource, Workflow, WorkflowOperator

MAX_LATENCIES = 20_000  # number of last latencies
MAX_BODY_BYTES = 64 << 20  # of a request
RETRY_S = 60.0


class BadRequest(Exception):
    """A request that is wrong: the client is told why, with this status."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class QueuesFull(Exception):
    """All queues of an operator are full."""


class _DeploymentRemoved(Exception):
    """A deployment that the new plan no longer has."""


class _Routes:
    """Routes of one plan. A request uses the routes of its arrival."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        from ray import serve  # here: an extra

        ops = []
        self.table, self.handles, self.routers = table, dict[str, Any](), dict[str, WeightedRouter]()
        self.sizes: dict[str, float] = {}
        self.workers: dict[str, str] = {}
        for op in table["operators"]:
            ops.append(WorkflowOperator(op["name"], tuple((n, r) for n, r in op["inputs"]), (OperatorVariant("any", ()),)))
            self.routers[op["name"]] = WeightedRouter({p["name"]: max(p["load"], 1e-9) for p in op["places"]})
            for p in op["places"]:
                self.handles[p["name"]] = serve.get_deployment_handle("Replica", p["name"])
                self.sizes[p["name"]], self.workers[p["name"]] = p["output_bytes"], p["worker"]
        self.workflow = Workflow("served", tuple(RequestSource(n, size) for n, size in table["sources"].items()), tuple(ops))
        self.inner = operators_on_items(self.workflow)

    def link_cost(self, start: str, end: str) -> tuple[float, float, float]:
        price, latency, per_byte = self.table["links"].get(start, {}).get(end, (0.0, 0.0, 0.0))
        return price, latency, per_byte


class Ingress:
    """`queue`: requests that may wait for a deployment. `delays`: whether links are delayed. `table`: see `routing_table_of`."""

    def __init__(self, queue: int, delays: bool, table: Mapping[str, Any]) -> None:
        self._queue, self._delays = queue, delays
        self._counts: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)
        self._down: set[str] = set()
        self._removed: dict[str, asyncio.Event] = {}
        self._in_flight: Counter[str] = Counter()
        self._failed_workers: dict[str, str] = {}
        self._dollars = 0.0
        self._routes = _Routes(table)

    def switch_plan(self, table: Mapping[str, Any]) -> None:
        """Use a new plan for the requests from now on."""
        self._routes = _Routes(table)
        for place in self._down - set(self._routes.handles):
            if place in self._removed:
                self._removed[place].set()  # requests that wait there are sent elsewhere
        self._down.clear()

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import JSONResponse  # here: an extra

        begun = time.monotonic()
        self._counts["arrived"] += 1
        try:
            values = _parse_values(await _read_body(request), request.headers.get("content-type", ""), self._routes.table["sources"])
            answer = await self.answer(values)
        except BadRequest as error:
            self._counts["failed"] += 1
            return JSONResponse({"error": str(error)}, error.status)
        except QueuesFull as error:
            self._counts["refused"] += 1
            return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
        except Exception:
            self._counts["failed"] += 1
            number = secrets.token_hex(4)  # in the answer and in the log, which alone has the traceback
            logging.getLogger(__name__).exception("request %s failed", number)
            return JSONResponse({"error": f"the workflow failed; the server's log has the cause of request {number}"}, 500)
        self._counts["answered"] += 1
        self._latencies.append((time.time(), time.monotonic() - begun))
        return JSONResponse({"answer": _as_json(answer)})

    async def answer(self, values: Mapping[str, Any]) -> Any:
        """Compute the workflow's answer to a request, which has a value for each source."""
        routes = self._routes
        tasks: dict[str, asyncio.Task[tuple[Any, Any]]] = {}
        for op in routes.workflow.operators:
            tasks[op.name] = asyncio.ensure_future(self._run_operator(routes, op, values, tasks))
        try:
            done = [await tasks[name] for name in routes.table["sinks"]]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return done[0][0] if len(done) == 1 else {n: value for n, (value, _) in zip(routes.table["sinks"], done, strict=True)}

    async def _run_operator(
        self, routes: _Routes, op: WorkflowOperator, values: Mapping[str, Any], tasks: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Compute an operator and return (value, deployment that computed it); lists of both for an operator on items."""
        input_values: dict[str, Any] = {}
        starts: list[str] = []
        for name, _ in op.inputs:
            if name in tasks:
                input_values[name], place = await tasks[name]
                starts.append(place[0] if isinstance(place, list) else place)
            else:
                input_values[name] = values.get(name)
                starts.append(name)
        requests = _emulated_requests(op, routes.inner, input_values) or requests_of(op, routes.inner, input_values)
        results = await asyncio.gather(*(self._call(routes, op, request, starts) for request in requests))
        if op.name in routes.inner:
            return [value for value, _ in results], [place for _, place in results] or [starts[0]]
        return results[0]

    async def _call(self, routes: _Routes, op: WorkflowOperator, request: tuple[Any, ...], starts: list[str]) -> tuple[Any, str]:
        from ray.exceptions import RayActorError  # here: an extra
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        deadline = time.monotonic() + RETRY_S
        while True:
            current = self._routes if op.name in self._routes.routers else routes
            place = self._choose_deployment(current, op, starts)
            await self._cross_links(routes, starts, place)
            self._in_flight[place] += 1
            try:
                value = await self._await_answer(place, current.handles[place].remote(request))
                self._loads[place] += 1
                return value, place
            except BackPressureError as error:
                raise QueuesFull(f"{op.name} has {self._queue} requests waiting at {place}; send fewer, or plan for more") from error
            except (RayActorError, DeploymentUnavailableError, _DeploymentRemoved) as error:
                self._counts["sent again"] += 1
                self._down.add(place)
                actor = getattr(error, "actor_id", None)
                if actor and current.workers.get(place):
                    self._failed_workers.setdefault(str(actor), current.workers[place])
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
            finally:
                self._in_flight[place] -= 1

    async def _await_answer(self, place: str, response: Any) -> Any:
        """Wait for an answer. Raises `_DeploymentRemoved` if a new plan drops the deployment after its replica died."""

        async def answer() -> Any:
            return await response

        waiting = asyncio.ensure_future(answer())
        leaving = asyncio.ensure_future(self._removed.setdefault(place, asyncio.Event()).wait())
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                response.cancel()
                raise _DeploymentRemoved
            return waiting.result()
        finally:
            waiting.cancel()
            leaving.cancel()

    def _choose_deployment(self, routes: _Routes, op: WorkflowOperator, starts: list[str]) -> str:
        sizes = [routes.table["sources"].get(s, routes.sizes.get(s, 0.0)) for s in starts]
        shares = routes.routers[op.name]
        names = [p["name"] for entry in routes.table["operators"] if entry["name"] == op.name for p in entry["places"]]
        ends = list(zip(starts, sizes, strict=True))
        price = {n: sum(routes.link_cost(s, n)[0] * max(size, 1.0) for s, size in ends) for n in names}
        return shares.choose(price, self._down)

    async def _cross_links(self, routes: _Routes, starts: list[str], place: str) -> None:
        """Count the cost of messages that go up a tier, and wait for the emulated transfer time."""
        slowest = 0.0
        for start in starts:
            size = routes.table["sources"].get(start, routes.sizes.get(start, 0.0))
            price, latency, per_byte = routes.link_cost(start, place)
            if price < float("inf"):
                self._dollars += price * size
            slowest = max(slowest, latency + per_byte * size)
        if self._delays and slowest:
            await asyncio.sleep(slowest)

    def stats(self) -> dict[str, Any]:
        """Return counts since the start, recent latencies, and workers whose replicas died."""
        now = time.time()
        recent = [s for t, s in self._latencies if t > now - 30]
        return {
            "number": self._routes.table["number"],
            "time": now,
            "counts": dict(self._counts),
            "loads": dict(self._loads),
            "lost": dict(self._failed_workers),
            "under_way": dict(self._in_flight),
            "dollars": self._dollars,
            "latency_s": {str(q): float(np.quantile(recent, q)) for q in (0.5, 0.95, 0.99)} if recent else {},
        }

    def check_health(self) -> None:
        """Do nothing: a returning call shows Ray Serve that the process is alive."""


def _emulated_requests(op: WorkflowOperator, inner: frozenset[str], before: Mapping[str, Any]) -> list[tuple[Any, ...]] | None:
    """Return requests without values, as many as the plan counts; None if there are values."""
    if op.name not in inner or any(value is not None for value in before.values()):
        return None
    return [tuple(None for _ in op.inputs)] * max(1, round(max(ratio for _, ratio in op.inputs)))


async def _read_body(request: Any) -> bytes:
    """Read the body of a request. Raises BadRequest as soon as it has more than `MAX_BODY_BYTES`."""
    body = bytearray()
    async for data in request.stream():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"the request has more than {MAX_BODY_BYTES:,} bytes", 413)
    return bytes(body)


def _parse_values(body: bytes, kind: str, sources: Collection[str]) -> dict[str, Any]:
    """Parse a request's values by source: safetensors, or JSON with lists. Raises BadRequest for anything else."""
    if not body:
        return {}
    try:
        if "json" not in kind:
            from safetensors.numpy import load  # here: an extra

            values = dict(load(body))
        else:
            read = parse_json(body)
            if not isinstance(read, dict):
                raise BadRequest("the request is no JSON object with a value for each source")
            values = {name: np.asarray(value, np.float32) if isinstance(value, list) else value for name, value in read.items()}
    except BadRequest:
        raise
    except Exception as error:  # safetensors and numpy raise many kinds
        form = "JSON" if "json" in kind else "safetensors (or say content-type: application/json)"
        raise BadRequest(f"the request is no {form} that can be read, or a list in it is no array of numbers") from error
    if unknown := sorted(set(values) - set(sources)):
        raise BadRequest(f"the request has {', '.join(unknown)[:200]}, and the workflow's sources are {', '.join(sorted(sources))}")
    return values


def _as_json(value: Any) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _as_json(v) for k, v in value.items()}
    return [_as_json(v) for v in value] if isinstance(value, tuple | list) else value
