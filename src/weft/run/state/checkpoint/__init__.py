"""Sharded checkpoints: save shards of tensors to a committed folder, and load any shards from it, under any layout (resharding)."""

from weft.run.state.checkpoint.beside import Beside, Written, copy_bytes
from weft.run.state.checkpoint.folder import Removed, Replaced, Saved, claim, committed, read_manifest, size_of
from weft.run.state.checkpoint.load import fill, inspect, latest_good, load, match, opened, read_full, verify
from weft.run.state.checkpoint.piece import Piece, full_piece
from weft.run.state.checkpoint.region import Box, Region
from weft.run.state.checkpoint.save import save
from weft.run.state.checkpoint.tensorfile import write_tensors
from weft.run.state.checkpoint.together import Alone, Together, from_first

__all__ = [
    "Alone",
    "Beside",
    "Box",
    "Piece",
    "Region",
    "Removed",
    "Replaced",
    "Saved",
    "Together",
    "Written",
    "claim",
    "committed",
    "copy_bytes",
    "fill",
    "from_first",
    "full_piece",
    "inspect",
    "latest_good",
    "load",
    "match",
    "opened",
    "read_full",
    "read_manifest",
    "save",
    "size_of",
    "verify",
    "write_tensors",
]  # fmt: skip
