"""A service plan deployed on Ray Serve, monitored, and replanned when workers fail or the request rate changes.

Without `address` Ray starts here with one logical resource a worker; the nodes of a Ray cluster must have these (`ray start --resources
'{"worker:edge": 1}'`). Every deployment of the plan is a separate application, so that a new plan starts next to the old one, the ingress
switches to it between two requests, and only then the deployments that it drops end.
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
_HALF = 0.5  # share of a machine's resource, so that an old replica and its successor fit on it


@dataclass(frozen=True, slots=True)
class How:
    """`time_scale`: emulate all workers by the profile's seconds times this; 0: no emulation. `queue_size`: requests that may wait at a
    replica, and as many for a deployment. `address`: of a Ray cluster, "" starts one here. `replans`: whether to replan. `emulates_links`:
    whether links are emulated with the workers."""

    port: int = 8000
    slower: float = 0.0
    queue: int = 100
    address: str = ""
    follow: bool = True
    planning_s: float = 20.0
    links: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """A change of plan: its reason, seconds until the plan was found and until it ran."""

    why: str
    placed: Placed
    planned_s: float
    seconds: float


@dataclass
class Server:
    """A served workflow. After `start`, requests go to `url`; `stop` ends everything that was started."""

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
    _number: int = 0  # number of the plan that the ingress should have
    _table: dict[str, Any] = field(default_factory=dict)
    _weights: str = ""  # folder of published weights

    @property
    def places(self) -> tuple[Place, ...]:
        """The current deployments."""
        return tuple(self._places.values())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.how.port}/"

    def start(self) -> None:
        """Start Ray, all deployments and the ingress.

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
        """Start the new deployments of a plan, switch the ingress to it, and end the deployments that it drops."""
        _, serve = ray_and_serve()
        places = {p.name: p for p in places_of(self.workflow, machines, placed)}
        new = [p for name, p in places.items() if name not in self._places]
        if new:
            serve.run_many([serve.RunTarget(self._application(p), name=p.name, route_prefix=None) for p in new])
        self._enter(placed, machines)
        dropped = set(self._places) - set(places)
        self._places, self.placed = places, placed
        self._drained(dropped)
        for name in dropped:
            serve.delete(name)

    def _drained(self, names: set[str]) -> None:
        """Wait until no request is in flight to these deployments."""
        deadline = time.monotonic() + DRAIN_S * (self.how.slower or 1.0)
        while names and time.monotonic() < deadline and any(self.stats()["under_way"].get(name) for name in names):
            time.sleep(LOOK_S)

    def _application(self, p: Place) -> Any:
        _, serve = ray_and_serve()
        op = self.workflow.operator(p.operator)
        worker = self.machines.worker(p.worker)
        options = {
            "batch": p.batch, "wait_s": p.wait_s * (self.how.slower or 1.0), "threads": worker.threads, "slower": self.how.slower,
            "elsewhere": bool(self.how.address),
            "weights": str(Path(self._weights, quote(f"{p.operator}.{p.variant}", safe=""))),
        }  # fmt: skip
        # Requests wait at the replica: Ray's router retries those that it holds back after pauses, in which a replica would idle.
        deployment = serve.deployment(
            Replica, name="Replica", num_replicas=p.replicas, max_ongoing_requests=p.batch + self.how.queue,
            max_queued_requests=self.how.queue,
            ray_actor_options={"num_cpus": 0, "resources": {f"worker:{p.worker}": _HALF}},
            health_check_period_s=2.0, health_check_timeout_s=10.0, graceful_shutdown_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        return deployment.bind(op, op.variant(p.variant), self.workflow.folder, p.worker, options)

    def _enter(self, placed: Placed, machines: Machines) -> None:
        _, serve = ray_and_serve()
        self._number += 1
        self._table = table_of(self.workflow, machines, placed, self.how.slower * self.how.links) | {"number": self._number}
        if self._number > 1:  # deploying it again would restart it
            self._entrance().turn_to.remote(self._table).result(timeout_s=20)
            return
        deployment = serve.deployment(
            Entrance, name="Entrance", num_replicas=1, max_ongoing_requests=10_000,
            ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},  # on the head node, which receives requests
            graceful_shutdown_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        serve.run(deployment.bind(self.how.queue, self.how.slower > 0, self._table), name=ENTRANCE, route_prefix="/")

    def _entrance(self) -> Any:
        _, serve = ray_and_serve()
        return serve.get_deployment_handle("Entrance", ENTRANCE)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the ingress, see `Ingress.stats`."""
        stats: dict[str, Any] = self._entrance().stats.remote().result(timeout_s=20)
        return stats

    def pid_of(self, worker: str) -> int:
        """Return the id of a replica process of a worker."""
        _, serve = ray_and_serve()
        name = next(p.name for p in self._places.values() if p.worker == worker)
        return int(serve.get_deployment_handle("Replica", name).pid.remote().result(timeout_s=20))

    def addresses(self, operator: str) -> list[tuple[str, int]]:
        """Return the addresses at which the replicas of an operator receive new weights, for `engine.publish`.

        Raises:
            UsageError: no such operator, or its variant is no model.
        """
        _, serve = ray_and_serve()
        places = [p for p in self.places if p.operator == operator]
        if not places:
            raise UsageError(f"{operator} is not served here; {', '.join(sorted({p.operator for p in self.places}))} are")
        addresses: list[tuple[str, int]] = []
        for p in places:
            of_replicas: set[tuple[str, int]] = set()
            deadline = time.monotonic() + DRAIN_S
            while len(of_replicas) < p.replicas and time.monotonic() < deadline:
                address = serve.get_deployment_handle("Replica", p.name).address.remote().result(timeout_s=DRAIN_S)
                if address is None:
                    raise UsageError(f"{operator} {p.variant} is no model whose weights can change; give it model = ..., not a call")
                of_replicas.add(tuple(address))
            addresses += sorted(of_replicas)
        return addresses

    def kill(self, worker: str) -> None:
        """Kill a worker's process, as the failure of a machine does; for load trials."""
        os.kill(self.pid_of(worker), signal.SIGKILL)

    def _follow(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                stats = self.stats()
                if stats["number"] != self._number:  # the ingress was restarted, with the first plan
                    self._entrance().turn_to.remote(self._table).result(timeout_s=20)
            except Exception as error:  # Ray restarts the ingress
                self.trouble = f"the ingress does not answer: {type(error).__name__}"
                continue
            self.look(stats)

    def look(self, stats: dict[str, Any]) -> None:
        """Replan if a worker has failed or the request rate is outside the plan's range."""
        begun = time.monotonic()
        scale = self.how.slower or 1.0
        self._rates = self._rates.with_count(begun, stats["counts"].get("arrived", 0))
        short_rate, long_rate = (None if (rate := self._rates.over(window)) is None else rate * scale for window in (WINDOW_S, LONG_S))
        demand = wanted(self.placed.ask, long_rate if short_rate is None else short_rate, long_rate)
        newly_failed = {actor: worker for actor, worker in stats["lost"].items() if actor not in self._lost}
        if not newly_failed and demand == self.placed.ask:
            return
        self._lost |= newly_failed
        why = f"{', '.join(sorted(set(newly_failed.values())))} failed" if newly_failed else f"{demand.rate:.3g} requests/s"
        machines = without(self.machines, self._lost)
        try:
            plan = place(self.workflow, machines, demand, self.how.planning_s)
        except Infeasible as error:
            plan, self.trouble = None, str(error)
        planned_s = time.monotonic() - begun
        if plan is None:
            self.trouble = self.trouble or f"{why}: no plan does {demand.rate:.3g} requests/s on the remaining machines; the old one stays"
            self._rates = Rates()
            return
        self.trouble = ""
        self._turn_to(plan, machines)
        self._rates = Rates()
        self.changes.append(Change(why, plan, planned_s, time.monotonic() - begun))

    def stop(self) -> None:
        """End everything that was started, after answering requests in flight."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.join(timeout=60)
        ray, serve = ray_and_serve()
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self._weights, ignore_errors=True)


def ray_and_serve() -> tuple[Any, Any]:
    """Import Ray and Ray Serve. Raises `UsageError` if they are not installed."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise UsageError(f"weft serve run needs Ray Serve ({error}); install it with pip install 'weft[serve]'") from error
    return ray, serve


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"port {port} is taken ({error.strerror}); give another with --port") from None


def refuse_elsewhere(machines: Machines, placed: Placed, how: How) -> None:
    """Raise `UsageError` if a plan uses machines that are not here, and there is neither a Ray cluster nor emulation."""
    if how.address or how.slower:
        return
    used = {s.worker for c in placed.choices for s in c.shares}
    away = [f"{w.name} ({w.device})" for w in machines.workers if w.name in used and w.device != "here"]
    if away:
        raise UsageError(
            f"the plan has {', '.join(away)}, not this machine: give --address of a Ray cluster that has them, or --emulate to run it here "
            "with their speeds"
        )
