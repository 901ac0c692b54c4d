"""Other frameworks' configurations: layouts written as theirs (export), theirs read as layouts (import), by one table of keys each."""

from shardwise.frameworks.configurations import EXPORTED, FRAMEWORKS, find_framework, read_configuration
from shardwise.frameworks.mapping import (
    ExportedConfiguration,
    ExportRequest,
    Framework,
    ImportedConfiguration,
    LostKey,
    export_layout,
)

__all__ = [
    "EXPORTED",
    "FRAMEWORKS",
    "ExportRequest",
    "ExportedConfiguration",
    "Framework",
    "ImportedConfiguration",
    "LostKey",
    "export_layout",
    "find_framework",
    "read_configuration",
]
