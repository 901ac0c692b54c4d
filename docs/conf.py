"""The documentation site: the pages of this folder as they are, tutorials that are executed, the reference from docstrings."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import shardwise

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
PROJECT = {f"project/{page.lower()}": f"{page}.md" for page in ("README", "DESIGN", "CHANGELOG", "CONTRIBUTING")}

project, author, copyright = "shardwise", "shardwise contributors", "shardwise contributors, Apache-2.0"
version = release = shardwise.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "flowchart"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]  # `data=N` and below it `: N replicas`, as in layouts.md
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
nb_execution_mode = "cache"  # a tutorial runs again when its text has changed
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
add_module_names = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = f"shardwise {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*(?:\n[^\]\n]*)?)\]\((?P<path>(?![a-z]+:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def for_the_site(text: str, name: str) -> str:
    """The text of page `name` (`planning`, `project/readme`) with links that hold on the site: pages of the repository's root lie in
    `project/` here, and what is no page (an example, a licence) is named, not linked."""
    folder = "" if name in PROJECT else posixpath.join("docs", posixpath.dirname(name))
    pages = {file: docname for docname, file in PROJECT.items()}

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        if path in pages:
            to = f"/{pages[path]}.md"
        elif path.startswith("docs/") and (ROOT / path).is_file():
            to = path.removeprefix("docs")
        else:
            return f"{match['text']} (`{path}`)" if path not in match["text"] else match["text"]
        return f"[{match['text']}]({to}{match['anchor'] or ''})"

    text = _LINK.sub(rewritten, text)
    return text.replace("](docs/pictures/", "](/pictures/") if name in PROJECT else text


def _source_read(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = for_the_site((ROOT / PROJECT[name]).read_text() if name in PROJECT else source[0], name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _source_read)
