"""The documentation site: links that hold there, and pages that fit a desktop's window and a phone's."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)
# Loads each page in a frame of a window's width, and writes which are wider than it: a reader would have to scroll sideways.
MEASURE = """<!doctype html><body><script>
async function measured(page, width) {
  const frame = Object.assign(document.createElement("iframe"), {src: page, width, height: 900});
  document.body.append(frame);
  await new Promise(loaded => frame.onload = loaded);
  const over = frame.contentDocument.documentElement.scrollWidth - width;
  frame.remove();
  return over > 1 ? [`${page} at ${width} is ${over} px too wide`] : [];
}
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of [1280, 390]) found.push(...await measured(page, width));
  document.body.innerHTML = `<pre>${found.join("\\n")}</pre><p>done</p>`;
})();
</script></body>"""


@pytest.fixture(scope="module")
def for_the_site() -> Callable[[str, str], str]:
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[str, str], str] = module.for_the_site
    return found


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("project/readme", "[plans](docs/planning.md#why)", "[plans](/planning.md#why)"),
        ("project/readme", "[parts](DESIGN.md)", "[parts](/project/design.md)"),
        ("project/readme", "![page](docs/pictures/report.png)", "![page](/pictures/report.png)"),
        ("project/contributing", "the [License](LICENSE)", "the License (`LICENSE`)"),
        ("benchmarks/plan", "[what](../planning.md)", "[what](/planning.md)"),
        ("planning", "[`examples/clusters`](../examples/clusters)", "`examples/clusters`"),
        ("planning", "[torch](https://pytorch.org)", "[torch](https://pytorch.org)"),
    ],
)
def test_links_hold_on_the_site(for_the_site: Callable[[str, str], str], page: str, text: str, shown: str) -> None:
    assert for_the_site(text, page) == shown


def test_the_reference_has_every_public_name() -> None:
    import shardwise

    page = (ROOT / "docs" / "api.md").read_text()
    homes = {shardwise._HOMES[name].partition(":")[2] or name for name in shardwise._HOMES} | {"plan", "simulate", "report", "errors"}
    assert {name for name in homes if not re.search(rf"\.{name}$", page, re.M)} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        str(made / "trees"),
        str(ROOT / "docs"),
        str(made / "html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return made / "html"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_site_is_built_and_its_tutorials_ran(site: Path) -> None:
    assert (site / "api.html").read_text().count('class="py function"') >= 10
    assert "largest difference:" in (site / "tutorials" / "own-loop.html").read_text()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _too_wide(site: Path, address: str, pages: list[str], folder: Path) -> str:
    (site / "measure.html").write_text(MEASURE.replace("PAGES", str(pages)))
    command = [str(BROWSER), *QUIET.split(), f"--user-data-dir={folder}", "--virtual-time-budget=600000", "--timeout=600000", "--dump-dom"]
    done = subprocess.run([*command, f"{address}/measure.html"], capture_output=True, text=True, timeout=900, check=True)
    match = re.search(r"<pre>(.*?)</pre><p>done</p>", done.stdout, re.S)
    assert match, done.stdout[-2000:] + done.stderr[-2000:]
    return match[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(BROWSER is None, reason="no browser: apt install chromium")
def test_no_page_is_wider_than_a_desktop_or_a_phone(site: Path, address: str, tmp_path: Path) -> None:
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html") if "_modules" not in page.parts)
    assert _too_wide(site, address, pages, tmp_path) == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(BROWSER is None, reason="no browser: apt install chromium")
def test_broken_twin_a_wide_page_is_found(site: Path, address: str, tmp_path: Path) -> None:
    (site / "wide.html").write_text("<!doctype html><body><div style='width: 2000px'>wide</div></body>")
    try:
        assert "wide.html at 390 is" in _too_wide(site, address, ["wide.html"], tmp_path)
    finally:
        (site / "wide.html").unlink()
