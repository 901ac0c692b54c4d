"""scripts/pictures trackers: what TensorBoard and MLflow show of a run of `shardwise train`, as pictures of their own pages.

In: nothing. Out: docs/pictures/tensorboard.png and mlflow.png, of servers that run on loopback while Chromium loads their pages. Weights &
Biases has no page without its server, and no picture.
"""

from __future__ import annotations

import argparse
import html
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
RUN = """
[model]
name = "gpt-tiny:vocabulary=256"

[train]
steps = 60
evaluate_every = 20

[run]
folder = "runs/tracked"
trackers = ["tensorboard", "mlflow"]
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --hide-scrollbars"
READY_S, LOADING_S = 300.0, 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/pictures trackers", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/pictures"), metavar="DIR", help="where the run and what it tells lie")
    work = parser.parse_args(arguments).work.absolute()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("scripts/pictures trackers: needs Chromium: apt install chromium", file=sys.stderr)
        return 1
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "tracked.toml").write_text(RUN)
    store = f"sqlite:///{work / 'mlflow.db'}"
    told = os.environ | {"MLFLOW_TRACKING_URI": store, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "shardwise", "train", "tracked.toml"], cwd=work, env=told, check=True)
    with _served("tensorboard.main", "--logdir", "runs/tracked/tensorboard", work=work) as port:
        _picture(browser, f"http://127.0.0.1:{port}/?tagFilter=loss#timeseries", PICTURES / "tensorboard.png", work)
    run = (work / "runs" / "tracked" / "mlflow.run").read_text()
    query = f'runs=["{run}"]&metric="loss"&experiments=["0"]&plot_metric_keys=["loss","eval_loss"]'
    frames = ("--x-frame-options", "NONE")  # for the page that waits
    with _served("mlflow", "server", "--backend-store-uri", store, "--workers", "1", *frames, work=work) as port:
        _picture(browser, f"http://127.0.0.1:{port}/#/metric?{quote(query, safe='=&')}", PICTURES / "mlflow.png", work)
    return 0


@contextmanager
def _served(module: str, *words: str, work: Path) -> Iterator[int]:
    """A block in which a library's server answers at a port of this machine's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", module, *words, "--host", "127.0.0.1", "--port", str(port)]
    with (
        open(work / f"{module}.log", "w") as log,
        subprocess.Popen(command, cwd=work, stdout=log, stderr=log, start_new_session=True) as server,
    ):
        try:
            late = time.monotonic() + READY_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > late:
                    raise SystemExit(f"{module} does not answer: see {log.name}")
                time.sleep(0.5)
            yield port
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # with the workers that MLflow starts


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def _picture(browser: str, url: str, into: Path, work: Path) -> None:
    """A page as it is after a while: in a frame beside an image that comes late, before which a browser takes no picture."""

    class Late(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                time.sleep(LOADING_S)
            self.send_response(200 if self.path == "/" else 404)
            self.end_headers()
            if self.path == "/":
                style = "position:fixed;inset:0;border:0;width:100%;height:100%"
                self.wfile.write(f'<iframe src="{html.escape(url)}" style="{style}"></iframe><img src="/late">'.encode())

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        words = ["--force-device-scale-factor=1", "--window-size=1100,720", f"--screenshot={into}"]
        page = f"http://127.0.0.1:{pages.server_port}/"
        subprocess.run([browser, *QUIET.split(), f"--user-data-dir={work / 'browser'}", *words, page], check=True, timeout=300)
        pages.shutdown()
    print(f"{into.relative_to(ROOT)}: {into.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
