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
from collections.abc import Callable
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[3]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)
# Loads each page in frames of a desktop's and a phone's width, and writes what a reader cannot read there.
MEASURE = """<!doctype html><body><script>
function faults(view, page, width) {
  const page_ = view.document, found = [], say = text => found.push(`${page} at ${width}: ${text}`);
  const over = page_.documentElement.scrollWidth - width;
  if (over > 1) say(`${over} px too wide`);
  for (const cell of page_.querySelectorAll("article td, article th")) {
    const texts = page_.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let text; text = texts.nextNode();) for (const word of text.data.matchAll(/[A-Za-z]{2,14}/g)) {
      const range = page_.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) say(`the word ${word[0]} of a table is broken`);
    }
  }
  for (const image of page_.querySelectorAll("article img")) {
    const box = image.getBoundingClientRect();
    if (!image.naturalWidth || box.left < 0 || box.right > width + 1) say(`the picture ${image.getAttribute("src")} is cut off or missing`);
  }
  for (const title of page_.querySelectorAll("article h1, article h2, article h3")) {
    if (title.scrollWidth > title.clientWidth + 1) say(`the title ${title.textContent} is cut off`);
  }
  return [...new Set(found)];
}
async function measured(page, width) {
  const frame = Object.assign(document.createElement("iframe"), {src: page, width, height: 900});
  document.body.append(frame);
  await new Promise(loaded => frame.onload = loaded);
  const found = faults(frame.contentWindow, page, width);
  frame.remove();
  return found;
}
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of [1280, 390]) found.push(...await measured(page, width));
  document.body.innerHTML = `<pre>${found.join("\\n")}</pre><p>done</p>`;
})();
</script></body>"""


PAGES = ("layouts", "parallelisms", "planning", "training", "configuration", "schedules", "learn", "commands")
NO_BROWSER = pytest.mark.skipif(BROWSER is None, reason="no browser: apt install chromium, or chromium-headless-shell")
BROKEN = {
    "wide": ("<div style='width: 2000px'>wide</div>", "16"),
    "letters": (
        "<table><td style='width: 1em; word-break: break-all'><p style='width: 1em'>parallelism",
        "the word parallelism of a table is",
    ),
    "title": ("<h1 style='width: 5em; overflow: hidden; white-space: nowrap'>A title that is longer than its place", "the title A title"),
    "picture": ("<img src='nothing.svg'>", "the picture nothing.svg is cut off or missing"),
}


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
    done = _build(made / "html", "-W", "--keep-going")
    assert done.returncode == 0, done.stderr[-4000:]
    return made / "html"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_site_is_built_and_its_tutorials_ran(site: Path) -> None:
    assert (site / "api.html").read_text().count('class="py function"') >= 10
    assert "largest difference:" in (site / "tutorials" / "own-loop.html").read_text()
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        link = re.search(rf'href="\.\./(_downloads/[^"]*{page.stem}\.ipynb)"', (site / "tutorials" / f"{page.stem}.html").read_text())
        assert link, page.stem
        assert nbformat.read(site / link[1], as_version=4).cells


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_first_notebook_runs_and_shows_a_gain(tmp_path: Path) -> None:
    """Its cells in a kernel of their own, as somebody runs them who downloaded it."""
    text = (ROOT / "docs" / "tutorials" / "own-loop.md").read_text()
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```$", text, re.M | re.S)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    said = "".join(output.get("text", "") for cell in book.cells for output in cell.outputs)
    match = re.search(r"largest difference: (\S+)", said)
    assert match
    assert float(match[1]) < 1e-12
    gains = [float(gain) for gain in re.findall(r"([\d.]+) times as fast", said)]
    assert gains[0] == 1
    assert gains == sorted(gains)
    assert gains[-1] > 3
    pictures = [output for cell in book.cells[-2:] for output in cell.outputs if "text/html" in output.get("data", {})]
    assert len(pictures) == 2


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def _build(target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build the site; options: of sphinx."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *options,
        "-q",
        "-b",
        "html",
        "-d",
        str(target.parent / "trees"),
        str(ROOT / "docs"),
        str(target),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)


def _faults(folder: Path, pages: list[str], profile: Path) -> list[str]:
    """What a browser finds in pages of a folder, a line each."""
    (folder / "measure.html").write_text(MEASURE.replace("PAGES", str(pages)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [*QUIET.split(), f"--user-data-dir={profile}", "--virtual-time-budget=600000", "--timeout=600000", "--dump-dom"]
        address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        done = subprocess.run([str(BROWSER), *options, address], capture_output=True, text=True, timeout=900, check=True)
        server.shutdown()
    match = re.search(r"<pre>(.*?)</pre><p>done</p>", done.stdout, re.S)
    assert match, done.stdout[-2000:] + done.stderr[-2000:]
    return match[1].splitlines()


@pytest.fixture(scope="module")
def few_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pages of the site, without the others and without running tutorials."""
    target = tmp_path_factory.mktemp("few") / "html"
    others = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").glob("*.md") if p.stem not in (*PAGES, "index")]
    left_out = ",".join([*others, "_build", "benchmarks", "decisions", "project", "tutorials", "migrate", "howto"])
    done = _build(target, "-D", "nb_execution_mode=off", "-D", f"exclude_patterns={left_out}")
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def test_definitions_are_lists_and_wide_tables_scroll(few_pages: Path) -> None:
    """Without a browser: what its test would see, of the text of the pages."""
    pages = {name: (few_pages / f"{name}.html").read_text() for name in PAGES}
    for name in PAGES:
        source = (ROOT / "docs" / f"{name}.md").read_text()
        terms = len(re.findall(r"^[^\s:|].*\n: +\S", source, re.M))
        assert pages[name].count("<dt>") == terms, name
        assert '<meta name="viewport" content="width=device-width' in pages[name]
        assert "<p>: " not in pages[name]
        assert pages[name].count('<div class="table-wrapper') == pages[name].count("<table")
    assert pages["layouts"].count("<dt>") > 10


@NO_BROWSER
@pytest.mark.timeout(600)
def test_eight_pages_can_be_read_on_a_desktop_and_a_phone(few_pages: Path, tmp_path: Path) -> None:
    assert _faults(few_pages, [f"{name}.html" for name in PAGES], tmp_path) == []


@NO_BROWSER
@pytest.mark.timeout(600)
def test_broken_twins_are_found(tmp_path: Path) -> None:
    for name, (body, _) in BROKEN.items():
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><body><article>{body}</article></body>")
    found = _faults(tmp_path, [f"{name}.html" for name in BROKEN], tmp_path / "profile")
    for name, (_, fault) in BROKEN.items():
        assert any(line.startswith(f"{name}.html at 390: {fault}") for line in found), (name, found)


@pytest.mark.long
@pytest.mark.timeout(1800)
@NO_BROWSER
def test_every_page_can_be_read_on_a_desktop_and_a_phone(site: Path, tmp_path: Path) -> None:
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html") if "_modules" not in page.parts)
    assert _faults(site, pages, tmp_path) == []
