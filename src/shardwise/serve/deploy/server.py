"""A service plan deployed on Ray Serve, monitored, and replanned when workers fail or the request rate changes.

Without `address` Ray starts here, on loopback, with one logical resource a worker; the nodes of a Ray cluster must have these
(`ray start --resources '{"worker:edge": 1}'`). Every deployment of the plan is a separate application, so that a new plan starts next to
the old one, the ingress switches to it between two requests, and only then the deployments that it drops end.
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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardwise.errors import Infeasible, UsageError
from shardwise.serve.deploy.ingress import Ingress
from shardwise.serve.deploy.replica import OperatorReplica
from shardwise.serve.deploy.routing_table import Deployment, deployments_of, routing_table_of
from shardwise.serve.placement.assignment_milp import Demand, ServicePlan
from shardwise.serve.placement.service_planner import plan_service
from shardwise.serve.placement.workflow import Machines, Workflow
from shardwise.world.launch.current import configure_local_ray

MAX_RATE_RATIO, MIN_RATE_RATIO = 1.15, 0.6  # ratios of measured to planned rate beyond which a new plan is made
RATE_HEADROOM = 1.05  # planned rate over the measured one
SHORT_WINDOW_S, LONG_WINDOW_S = 20.0, 120.0  # windows over which a rise and a fall of the rate are measured
MIN_REQUESTS = 400  # fewest requests that a rate is measured from: Poisson arrivals, standard error 5 %


@dataclass(frozen=True)
class RequestRates:
    """Samples of the request counter: (seconds, number of requests so far)."""

    samples: tuple[tuple[float, int], ...] = ()

    def with_count(self, at_s: float, num_arrived: int) -> RequestRates:
        """Return the rates with one more sample, without those before the first request or (except one) before the long window."""
        samples = (*(sample for sample in self.samples if sample[1]), (at_s, num_arrived))
        while len(samples) > 2 and samples[1][0] <= at_s - LONG_WINDOW_S:
            samples = samples[1:]
        return RequestRates(samples)

    def rate_over(self, window_s: float) -> float | None:
        """Requests/s over the last `window_s` seconds; None if the window is not full or has too few requests."""
        if not self.samples:
            return None
        end, last = self.samples[-1]
        begin, first = next((sample for sample in reversed(self.samples) if sample[0] <= end - window_s), (end, last))
        return (last - first) / (end - begin) if last - first >= MIN_REQUESTS else None


def remaining_machines(machines: Machines, failed_workers: Mapping[str, str]) -> Machines:
    """Return the machines without failed ones. `failed_workers`: worker names by failed replica."""
    num_failed = Counter(failed_workers.values())
    workers = tuple(replace(w, count=w.count - num_failed[w.name]) for w in machines.workers if w.count > num_failed[w.name])
    names = {w.name for w in machines.workers} - {w.name for w in workers}
    return Machines(workers, tuple(link for link in machines.links if not {link.start, link.end} & names))


def updated_demand(demand: Demand, short_window_rate: float | None, long_window_rate: float | None) -> Demand:
    """Return the demand to plan for: unchanged, unless the short-window rate is above it or the long-window rate below it."""
    if short_window_rate is not None and short_window_rate > MAX_RATE_RATIO * demand.rate:
        return replace(demand, rate=RATE_HEADROOM * short_window_rate)
    if long_window_rate is not None and long_window_rate < MIN_RATE_RATIO * demand.rate:
        return replace(demand, rate=RATE_HEADROOM * long_window_rate)
    return demand


STORE_BYTES = 80_000_000
POLL_S, DRAIN_S = 0.25, 20.0
INGRESS = "entrance"
_RESOURCE_SHARE = 0.5  # share of a machine's resource, so that an old replica and its successor fit on it


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`time_scale`: emulate all workers by the profile's seconds times this; 0: no emulation. `queue_size`: requests that may wait at a
    replica, and as many for a deployment. `address`: of a Ray cluster, "" starts one here. `replans`: whether to replan. `emulates_links`:
    whether links are emulated with the workers."""

    port: int = 8000
    time_scale: float = 0.0
    queue_size: int = 100
    address: str = ""
    replans: bool = True
    planning_limit_s: float = 20.0
    emulates_links: bool = True


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change of plan: its reason, seconds until the plan was found and until it ran."""

    reason: str
    plan: ServicePlan
    planning_s: float
    total_s: float


@dataclass
class Server:
    """A served workflow. After `start`, requests go to `url`; `stop` ends everything that was started."""

    workflow: Workflow
    machines: Machines
    plan: ServicePlan
    options: ServeOptions = ServeOptions()
    changes: list[PlanChange] = field(default_factory=list)
    problem: str = ""
    _deployments: dict[str, Deployment] = field(default_factory=dict)
    _failed_workers: dict[str, str] = field(default_factory=dict)
    _rates: RequestRates = field(default_factory=RequestRates)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None
    _plan_number: int = 0  # number of the plan that the ingress should have
    _table: dict[str, Any] = field(default_factory=dict)
    _weights_folder: str = ""  # folder of published weights

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """The current deployments."""
        return tuple(self._deployments.values())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.options.port}/"

    def start(self) -> None:
        """Start Ray, all deployments and the ingress.

        Raises:
            UsageError: Ray is not installed, the port is taken, a worker is not here. RunError: a replica does not start.
        """
        if not self.options.address:
            configure_local_ray()
        ray, serve = import_ray_serve()
        refuse_remote_workers(self.machines, self.plan, self.options)
        deployments_of(self.workflow, self.machines, self.plan)
        _refuse_taken_port(self.options.port)
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        common: dict[str, Any] = {"configure_logging": False, "log_to_driver": False, "logging_level": "ERROR"}
        if self.options.address:
            ray.init(address=self.options.address, **common)
        else:
            resources = {f"worker:{w.name}": float(w.count) for w in self.machines.workers}
            ray.init(num_cpus=os.cpu_count() or 1, include_dashboard=False, object_store_memory=STORE_BYTES, resources=resources, **common)
        self._weights_folder = tempfile.mkdtemp(prefix="shardwise-serve-")
        try:
            quiet = {"log_level": "ERROR", "enable_access_log": False}
            serve.start(http_options={"host": "127.0.0.1", "port": self.options.port}, logging_config=quiet)
            self._switch_plan(self.plan, self.machines)
        except BaseException:
            self.stop()
            raise
        if self.options.replans:
            self._watcher = threading.Thread(target=self._watch_until_stopped, daemon=True)
            self._watcher.start()

    def _switch_plan(self, plan: ServicePlan, machines: Machines) -> None:
        """Start the new deployments of a plan, switch the ingress to it, and end the deployments that it drops."""
        _, serve = import_ray_serve()
        places = {p.name: p for p in deployments_of(self.workflow, machines, plan)}
        new = [p for name, p in places.items() if name not in self._deployments]
        if new:
            serve.run_many([serve.RunTarget(self._replica_application(p), name=p.name, route_prefix=None) for p in new])
        self._update_ingress(plan, machines)
        dropped = set(self._deployments) - set(places)
        self._deployments, self.plan = places, plan
        self._drain(dropped)
        for name in dropped:
            serve.delete(name)

    def _drain(self, names: set[str]) -> None:
        """Wait until no request is in flight to these deployments."""
        deadline = time.monotonic() + DRAIN_S * (self.options.time_scale or 1.0)
        while names and time.monotonic() < deadline and any(self.stats()["under_way"].get(name) for name in names):
            time.sleep(POLL_S)

    def _replica_application(self, deployment_plan: Deployment) -> Any:
        _, serve = import_ray_serve()
        op = self.workflow.operator(deployment_plan.operator)
        worker = self.machines.worker(deployment_plan.worker)
        options = {
            "batch": deployment_plan.batch, "wait_s": deployment_plan.wait_s * (self.options.time_scale or 1.0),
                "threads": worker.threads, "slower": self.options.time_scale,
            "elsewhere": bool(self.options.address),
            "weights": str(Path(self._weights_folder, quote(f"{deployment_plan.operator}.{deployment_plan.variant}", safe=""))),
        }  # fmt: skip
        # Requests wait at the replica: Ray's router retries those that it holds back after pauses, in which a replica would idle.
        deployment = serve.deployment(
            OperatorReplica, name="Replica", num_replicas=deployment_plan.replicas,
                max_ongoing_requests=deployment_plan.batch + self.options.queue_size,
            max_queued_requests=self.options.queue_size,
            ray_actor_options={"num_cpus": 0, "resources": {f"worker:{deployment_plan.worker}": _RESOURCE_SHARE}},
            health_check_period_s=2.0, health_check_timeout_s=10.0, graceful_shutdown_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        return deployment.bind(op, op.variant(deployment_plan.variant), self.workflow.folder, deployment_plan.worker, options)

    def _update_ingress(self, plan: ServicePlan, machines: Machines) -> None:
        _, serve = import_ray_serve()
        self._plan_number += 1
        self._table = routing_table_of(self.workflow, machines, plan, self.options.time_scale * self.options.emulates_links) | {
            "number": self._plan_number
        }
        if self._plan_number > 1:  # deploying it again would restart it
            self._ingress_handle().switch_plan.remote(self._table).result(timeout_s=20)
            return
        deployment = serve.deployment(
            Ingress, name="Entrance", num_replicas=1, max_ongoing_requests=10_000,
            ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},  # on the head node, which receives requests
            graceful_shutdown_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        serve.run(deployment.bind(self.options.queue_size, self.options.time_scale > 0, self._table), name=INGRESS, route_prefix="/")

    def _ingress_handle(self) -> Any:
        _, serve = import_ray_serve()
        return serve.get_deployment_handle("Entrance", INGRESS)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the ingress, see `Ingress.stats`."""
        stats: dict[str, Any] = self._ingress_handle().stats.remote().result(timeout_s=20)
        return stats

    def pid_of(self, worker: str) -> int:
        """Return the id of a replica process of a worker."""
        _, serve = import_ray_serve()
        name = next(p.name for p in self._deployments.values() if p.worker == worker)
        return int(serve.get_deployment_handle("Replica", name).pid.remote().result(timeout_s=20))

    def addresses(self, operator: str) -> list[tuple[str, int]]:
        """Return the addresses at which the replicas of an operator receive new weights, for `engine.publish`.

        Raises:
            UsageError: no such operator, or its variant is no model.
        """
        _, serve = import_ray_serve()
        places = [p for p in self.deployments if p.operator == operator]
        if not places:
            raise UsageError(f"{operator} is not served here; {', '.join(sorted({p.operator for p in self.deployments}))} are")
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

    def _watch_until_stopped(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                stats = self.stats()
                if stats["number"] != self._plan_number:  # the ingress was restarted, with the first plan
                    self._ingress_handle().switch_plan.remote(self._table).result(timeout_s=20)
            except Exception as error:  # Ray restarts the ingress
                self.problem = f"the ingress does not answer: {type(error).__name__}"
                continue
            self.replan_if_needed(stats)

    def replan_if_needed(self, stats: dict[str, Any]) -> None:
        """Replan if a worker has failed or the request rate is outside the plan's range."""
        begun = time.monotonic()
        scale = self.options.time_scale or 1.0
        self._rates = self._rates.with_count(begun, stats["counts"].get("arrived", 0))
        short_rate, long_rate = (
            None if (rate := self._rates.rate_over(window)) is None else rate * scale for window in (SHORT_WINDOW_S, LONG_WINDOW_S)
        )
        demand = updated_demand(self.plan.demand, long_rate if short_rate is None else short_rate, long_rate)
        newly_failed = {actor: worker for actor, worker in stats["lost"].items() if actor not in self._failed_workers}
        if not newly_failed and demand == self.plan.demand:
            return
        self._failed_workers |= newly_failed
        why = f"{', '.join(sorted(set(newly_failed.values())))} failed" if newly_failed else f"{demand.rate:.3g} requests/s"
        machines = remaining_machines(self.machines, self._failed_workers)
        try:
            plan = plan_service(self.workflow, machines, demand, self.options.planning_limit_s)
        except Infeasible as error:
            plan, self.problem = None, str(error)
        planned_s = time.monotonic() - begun
        if plan is None:
            self.problem = self.problem or f"{why}: no plan does {demand.rate:.3g} requests/s on the remaining machines; the old one stays"
            self._rates = RequestRates()
            return
        self.problem = ""
        self._switch_plan(plan, machines)
        self._rates = RequestRates()
        self.changes.append(PlanChange(why, plan, planned_s, time.monotonic() - begun))

    def stop(self) -> None:
        """End everything that was started, after answering requests in flight."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join(timeout=60)
        ray, serve = import_ray_serve()
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self._weights_folder, ignore_errors=True)


def import_ray_serve() -> tuple[Any, Any]:
    """Import Ray and Ray Serve. Raises `UsageError` if they are not installed."""
    try:
        import ray  # here: an extra
        from ray import serve
    except ImportError as error:
        raise UsageError(f"shardwise serve run needs Ray Serve ({error}); install it with pip install 'shardwise[serve]'") from error
    return ray, serve


def _refuse_taken_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"port {port} is taken ({error.strerror}); give another with --port") from None


def refuse_remote_workers(machines: Machines, plan: ServicePlan, options: ServeOptions) -> None:
    """Raise `UsageError` if a plan uses machines that are not here, and there is neither a Ray cluster nor emulation."""
    if options.address or options.time_scale:
        return
    used = {s.worker for c in plan.choices for s in c.shares}
    away = [f"{w.name} ({w.device})" for w in machines.workers if w.name in used and w.device != "here"]
    if away:
        raise UsageError(
            f"the plan has {', '.join(away)}, not this machine: give --address of a Ray cluster that has them, or --emulate to run it here "
            "with their speeds"
        )
