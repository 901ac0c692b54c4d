"""A plan deployed on Ray Serve, watched, and planned anew. In: workflow, machines, plan. Out: a running server.

Embedded, Ray starts here with one logical resource a worker; elsewhere a cluster's nodes have these (`ray start --resources
'{"worker:edge": 1}'`). Every place of the plan is an application of its own, so that a new plan starts beside the old one, the entrance
turns to it between two requests, and only then what it no longer has ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.deploy.control import LONG_S, WINDOW_S, Rates, wanted, without
from weft.deploy.entrance import Entrance
from weft.deploy.replica import Replica
from weft.deploy.table import Place, places_of, table_of
from weft.errors import Infeasible, UsageError
from weft.serve.assign import Placed
from weft.serve.place import place
from weft.serve.workflow import Machines, Workflow

STORE_BYTES = 80_000_000
LOOK_S, DRAIN_S = 0.25, 20.0
ENTRANCE = "entrance"
_HALF = 0.5  # of a machine's resource, so that an old replica and its successor fit on it


@dataclass(frozen=True, slots=True)
class How:
    """`slower`: emulate all workers, by the profile's seconds times this; 0 computes as fast as it goes. `queue`: requests that may wait
    at a replica, and as many for a place. `address`: of a Ray cluster, "" starts one here. `follow`: whether to plan anew. `links`: whether
    links are emulated with the workers; else they take the time that they take."""

    port: int = 8000
    slower: float = 0.0
    queue: int = 100
    address: str = ""
    follow: bool = True
    planning_s: float = 20.0
    links: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """A new plan: `why`, seconds until it was found and until it ran."""

    why: str
    placed: Placed
    planned_s: float
    seconds: float


@dataclass
class Server:
    """One deployment. `start`, then requests go to `url`; `stop` ends all that was started."""

    workflow: Workflow
    machines: Machines
    placed: Placed
    how: How = How()
    changes: list[Change] = field(default_factory=list)
    trouble: str = ""
    _places: dict[str, Place] = field(default_factory=dict)
    _lost: dict[str, str] = field(default_factory=dict)
    _rates: Rates = field(default_factory=Rates)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _watch: threading.Thread | None = None
    _number: int = 0  # of the plan that the entrance is to have
    _table: dict[str, Any] = field(default_factory=dict)
    _weights: str = ""  # folder of the weights that were published

    @property
    def places(self) -> tuple[Place, ...]:
        """What is deployed."""
        return tuple(self._places.values())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.how.port}/"

    def start(self) -> None:
        """Start Ray, all places and the entrance.

        Raises:
            UsageError: Ray is not installed, the port is taken, a worker is not here. RunError: a replica does not start.
        """
        ray, serve = ray_and_serve()
        refuse_elsewhere(self.machines, self.placed, self.how)
        places_of(self.workflow, self.machines, self.placed)
        _refuse_taken(self.how.port)
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        common: dict[str, Any] = {"configure_logging": False, "log_to_driver": False, "logging_level": "ERROR"}
        if self.how.address:
            ray.init(address=self.how.address, **common)
        else:
            resources = {f"worker:{w.name}": float(w.count) for w in self.machines.workers}
            ray.init(num_cpus=os.cpu_count() or 1, include_dashboard=False, object_store_memory=STORE_BYTES, resources=resources, **common)
        self._weights = tempfile.mkdtemp(prefix="weft-serve-")
        try:
            quiet = {"log_level": "ERROR", "enable_access_log": False}
            serve.start(http_options={"host": "127.0.0.1", "port": self.how.port}, logging_config=quiet)
            self._turn_to(self.placed, self.machines)
        except BaseException:
            self.stop()
            raise
        if self.how.follow:
            self._watch = threading.Thread(target=self._follow, daemon=True)
            self._watch.start()

    def _turn_to(self, placed: Placed, machines: Machines) -> None:
        """Start what a plan has and is not there, let the entrance use it, end what it does not have."""
        _, serve = ray_and_serve()
        places = {p.name: p for p in places_of(self.workflow, machines, placed)}
        new = [p for name, p in places.items() if name not in self._places]
        if new:
            serve.run_many([serve.RunTarget(self._application(p), name=p.name, route_prefix=None) for p in new])
        self._enter(placed, machines)
        gone = set(self._places) - set(places)
        self._places, self.placed = places, placed
        self._drained(gone)
        for name in gone:
            serve.delete(name)

    def _drained(self, names: set[str]) -> None:
        """Wait until no request is on its way to these places any more."""
        until = time.monotonic() + DRAIN_S * (self.how.slower or 1.0)
        while names and time.monotonic() < until and any(self.stats()["under_way"].get(name) for name in names):
            time.sleep(LOOK_S)

    def _application(self, p: Place) -> Any:
        _, serve = ray_and_serve()
        op = self.workflow.operator(p.operator)
        worker = self.machines.worker(p.worker)
        how = {
            "batch": p.batch, "wait_s": p.wait_s * (self.how.slower or 1.0), "threads": worker.threads, "slower": self.how.slower,
            "elsewhere": bool(self.how.address),
            "weights": str(Path(self._weights, quote(f"{p.operator}.{p.variant}", safe=""))),
        }  # fmt: skip
        # Requests wait at the replica: those that Ray's router keeps back it offers again after pauses, in which a replica would idle.
        deployment = serve.deployment(
            Replica, name="Replica", num_replicas=p.replicas, max_ongoing_requests=p.batch + self.how.queue,
            max_queued_requests=self.how.queue,
            ray_actor_options={"num_cpus": 0, "resources": {f"worker:{p.worker}": _HALF}},
            health_check_period_s=2.0, health_check_timeout_s=10.0, graceful_shutdown_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        return deployment.bind(op, op.variant(p.variant), self.workflow.folder, p.worker, how)

    def _enter(self, placed: Placed, machines: Machines) -> None:
        _, serve = ray_and_serve()
        self._number += 1
        self._table = table_of(self.workflow, machines, placed, self.how.slower * self.how.links) | {"number": self._number}
        if self._number > 1:  # Ray Serve would start it anew
            self._entrance().turn_to.remote(self._table).result(timeout_s=20)
            return
        deployment = serve.deployment(
            Entrance, name="Entrance", num_replicas=1, max_ongoing_requests=10_000,
            ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},  # where requests come in
            graceful_shutdown_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        serve.run(deployment.bind(self.how.queue, self.how.slower > 0, self._table), name=ENTRANCE, route_prefix="/")

    def _entrance(self) -> Any:
        _, serve = ray_and_serve()
        return serve.get_deployment_handle("Entrance", ENTRANCE)

    def stats(self) -> dict[str, Any]:
        """Counts of the entrance, see `Entrance.stats`."""
        stats: dict[str, Any] = self._entrance().stats.remote().result(timeout_s=20)
        return stats

    def pid_of(self, worker: str) -> int:
        """Of a process that runs on a worker."""
        _, serve = ray_and_serve()
        name = next(p.name for p in self._places.values() if p.worker == worker)
        return int(serve.get_deployment_handle("Replica", name).pid.remote().result(timeout_s=20))

    def addresses(self, operator: str) -> list[tuple[str, int]]:
        """Where the replicas of an operator take new weights, for `engine.publish`.

        Raises:
            UsageError: no such operator, or one whose variant is no model.
        """
        _, serve = ray_and_serve()
        places = [p for p in self.places if p.operator == operator]
        if not places:
            raise UsageError(f"{operator} is not served here; {', '.join(sorted({p.operator for p in self.places}))} are")
        every: list[tuple[str, int]] = []
        for p in places:
            mine: set[tuple[str, int]] = set()
            until = time.monotonic() + DRAIN_S
            while len(mine) < p.replicas and time.monotonic() < until:
                address = serve.get_deployment_handle("Replica", p.name).address.remote().result(timeout_s=DRAIN_S)
                if address is None:
                    raise UsageError(f"{operator} {p.variant} is no model whose weights can change; give it model = ..., not a call")
                mine.add(tuple(address))
            every += sorted(mine)
        return every

    def kill(self, worker: str) -> None:
        """End a worker's process at once, as a machine that goes: for trials."""
        os.kill(self.pid_of(worker), signal.SIGKILL)

    def _follow(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                stats = self.stats()
                if stats["number"] != self._number:  # it was started again, with the first plan
                    self._entrance().turn_to.remote(self._table).result(timeout_s=20)
            except Exception as error:  # Ray starts the entrance again
                self.trouble = f"the entrance does not answer: {type(error).__name__}"
                continue
            self.look(stats)

    def look(self, stats: dict[str, Any]) -> None:
        """Plan anew where a worker has gone or the rate has left the plan's."""
        begun = time.monotonic()
        scale = self.how.slower or 1.0
        self._rates = self._rates.with_count(begun, stats["counts"].get("arrived", 0))
        lately, long = (None if (rate := self._rates.over(window)) is None else rate * scale for window in (WINDOW_S, LONG_S))
        ask = wanted(self.placed.ask, long if lately is None else lately, long)
        new = {actor: worker for actor, worker in stats["lost"].items() if actor not in self._lost}
        if not new and ask == self.placed.ask:
            return
        self._lost |= new
        why = f"{', '.join(sorted(set(new.values())))} went" if new else f"{ask.rate:.3g} requests/s"
        left = without(self.machines, self._lost)
        try:
            placed = place(self.workflow, left, ask, self.how.planning_s)
        except Infeasible as error:
            placed, self.trouble = None, str(error)
        planned_s = time.monotonic() - begun
        if placed is None:
            self.trouble = self.trouble or f"{why}: no plan does {ask.rate:.3g} requests/s with what is left; what runs goes on"
            self._rates = Rates()
            return
        self.trouble = ""
        self._turn_to(placed, left)
        self._rates = Rates()
        self.changes.append(Change(why, placed, planned_s, time.monotonic() - begun))

    def stop(self) -> None:
        """End everything that was started; requests under way are answered first."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.join(timeout=60)
        ray, serve = ray_and_serve()
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self._weights, ignore_errors=True)


def ray_and_serve() -> tuple[Any, Any]:
    """Ray and Ray Serve. Raises `UsageError` where they are not installed."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise UsageError(f"weft serve run needs Ray Serve ({error}); install it with pip install 'weft[serve]'") from error
    return ray, serve


def _refuse_taken(port: int) -> None:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"port {port} is taken ({error.strerror}); give another with --port") from None


def refuse_elsewhere(machines: Machines, placed: Placed, how: How) -> None:
    """Raise where a plan is of machines that are not here and nobody says how to get to them."""
    if how.address or how.slower:
        return
    used = {s.worker for c in placed.choices for s in c.shares}
    away = [f"{w.name} ({w.device})" for w in machines.workers if w.name in used and w.device != "here"]
    if away:
        raise UsageError(
            f"the plan has {', '.join(away)}, not this machine: give --address of a Ray cluster that has them, or --emulate to run it here "
            "with their speeds"
        )

