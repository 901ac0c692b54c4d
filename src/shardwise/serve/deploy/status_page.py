"""Status of a running server as Prometheus metrics and as an HTML page, served on loopback."""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from shardwise.world.guard import LimitedClients

if TYPE_CHECKING:
    from shardwise.serve.deploy.server import Server

MAX_CLIENTS, CLIENT_LIMIT_S = 64, 10.0  # at a time, the oldest gives way; for a client to send more of its request
Figures = Mapping[str, Any]
_COUNTS = {
    "arrived": "came in", "answered": "were answered", "refused": "were refused by full queues", "failed": "failed",
    "sent again": "went to another worker",
}  # fmt: skip


def figures_of(server: Server) -> dict[str, Any]:
    """Return the figures of a server: its plan, its counts, its plan changes."""
    stats, plan = server.stats(), server.plan
    return {
        "name": server.workflow.name,
        "planned": {
            "rate": plan.demand.rate,
            "latency_s": plan.latency_s,
            "percentile": plan.demand.percentile,
            "price_per_hour": plan.price_per_hour,
            "accuracy": plan.accuracy,
        },
        "places": [
            [c.operator, c.variant, s.worker, s.machines, s.load, s.batch, s.utilisation] for c in plan.choices for s in c.shares
        ],
        "stats": stats,
        "changes": [[c.reason, c.planning_s, c.total_s] for c in server.changes],
        "trouble": server.problem,
    }  # fmt: skip


def format_prometheus(figures: Figures) -> str:
    """Format metrics in Prometheus's text format, version 0.0.4."""
    stats, planned = figures["stats"], figures["planned"]

    def lines() -> Iterator[str]:
        yield from (
            "# HELP shardwise_serve_requests_total Requests by what became of them.",
            "# TYPE shardwise_serve_requests_total counter",
        )
        for name in _COUNTS:
            yield f'shardwise_serve_requests_total{{state="{name.replace(" ", "_")}"}} {stats["counts"].get(name, 0)}'
        yield from (
            "# HELP shardwise_serve_computed_total Requests of operators by place.",
            "# TYPE shardwise_serve_computed_total counter",
        )
        for place, count in sorted(stats["loads"].items()):
            yield f"shardwise_serve_computed_total{{place={json.dumps(place)}}} {count}"
        yield from ("# HELP shardwise_serve_latency_seconds Of the answers of 30 seconds.", "# TYPE shardwise_serve_latency_seconds gauge")
        for quantile, seconds in stats["latency_s"].items():
            yield f'shardwise_serve_latency_seconds{{quantile="{quantile}"}} {seconds!r}'
        yield from (
            "# HELP shardwise_serve_traffic_dollars_total Paid for traffic.",
            "# TYPE shardwise_serve_traffic_dollars_total counter",
        )
        yield f"shardwise_serve_traffic_dollars_total {stats['dollars']!r}"
        yield from ("# HELP shardwise_serve_workers_lost_total Machines that went.", "# TYPE shardwise_serve_workers_lost_total counter")
        yield f"shardwise_serve_workers_lost_total {len(stats['lost'])}"
        yield from ("# HELP shardwise_serve_plans_total New plans.", "# TYPE shardwise_serve_plans_total counter")
        yield f"shardwise_serve_plans_total {len(figures['changes'])}"
        yield from ("# HELP shardwise_serve_planned What the plan says.", "# TYPE shardwise_serve_planned gauge")
        for name in ("rate", "latency_s", "price_per_hour", "accuracy"):
            yield f'shardwise_serve_planned{{what="{name}"}} {planned[name]!r}'

    return "\n".join(lines()) + "\n"


def format_page(figures: Figures) -> str:
    """Format the figures as an HTML page that reloads itself."""
    stats, planned = figures["stats"], figures["planned"]
    latencies = ", ".join(f"{float(q):.0%} within {s * 1000:.0f} ms" for q, s in stats["latency_s"].items()) or "no answers yet"
    counts = "".join(f"<li>{stats['counts'].get(name, 0)} {words}</li>" for name, words in _COUNTS.items())
    rows = "".join(
        f"<tr><td>{html.escape(op)}<td>{html.escape(variant)}<td>{machines:g} x {html.escape(worker)}"
        f"<td>{load:.3g}<td>{batch}<td>{busy:.0%}</tr>"
        for op, variant, worker, machines, load, batch, busy in figures["places"]
    )
    changes = "".join(f"<li>{html.escape(why)}: planned in {a:.2f} s, running after {b:.2f} s</li>" for why, a, b in figures["changes"])
    return f"""<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>{html.escape(figures["name"])}</title>
<style>body{{font:15px sans-serif;margin:2em;max-width:60em}}td,th{{padding:.2em 1em;text-align:left}}</style>
<h1>{html.escape(figures["name"])}</h1>
<p>Planned: {planned["rate"]:.4g} requests/s, accuracy {planned["accuracy"]:.4g}, ${planned["price_per_hour"]:.4f} an hour.
Latest 30 s: {latencies}.</p><p><b>{html.escape(figures["trouble"])}</b></p><ul>{counts}</ul>
<table><tr><th>operator<th>variant<th>workers<th>requests/s<th>batch<th>busy</tr>{rows}</table>
<h2>New plans</h2><ul>{changes or "<li>none</li>"}</ul><p><a href="metrics">metrics</a></p>
"""


def serve_page(figures: Callable[[], Figures], port: int) -> ThreadingHTTPServer:
    """Serve page and metrics on a port of loopback, 0 for any free one, until `shutdown`."""

    clients = LimitedClients(MAX_CLIENTS)

    class PageServer(ThreadingHTTPServer):
        daemon_threads = True

        def finish_request(self, request: Any, client_address: Any) -> None:
            with clients.serve_within_limit(request):
                super().finish_request(request, client_address)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Do nothing: the client has gone, or was too slow."""

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_LIMIT_S

        def do_GET(self) -> None:
            is_metrics = self.path.startswith("/metrics")
            try:
                text, status = (format_prometheus if is_metrics else format_page)(figures()), 200
            except Exception:  # Ray is restarting the ingress
                text, status = "the ingress does not answer now; try again\n", 503
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4" if is_metrics or status != 200 else "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            return

    server = PageServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
