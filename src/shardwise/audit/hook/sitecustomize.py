"""Start the audit's recorder as soon as a script has imported torch.

Python imports this file before the script. An environment's own sitecustomize, which this one hides, is found and run from here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_RECORDER = "_shardwise_audit"


def _install_recorder(torch: ModuleType) -> None:
    file = os.path.join(os.path.dirname(_FOLDER), "record", "__init__.py")
    spec = importlib.util.spec_from_file_location(_RECORDER, file, submodule_search_locations=[os.path.dirname(file)])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_RECORDER] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install_recorder(dict(os.environ))


def _watch_engine(engine: ModuleType) -> None:
    sys.modules[_RECORDER].watch_engine(engine)


class _ImportWatch:
    """Finder that lets the others find a module, and calls a function once the module has been executed."""

    def __init__(self) -> None:
        self._left = {"torch": _install_recorder, "shardwise.run.engine": _watch_engine}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return the other finders' spec, with a loader that calls our function; None for every other name."""
        function = self._left.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


if os.environ.get("SHARDWISE_AUDIT_FOLDER"):
    sys.meta_path.insert(0, _ImportWatch())
    _hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != _FOLDER])
    if _hidden and _hidden.loader:
        _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
