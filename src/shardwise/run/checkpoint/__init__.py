"""Sharded checkpoints: save shards of tensors to a committed folder, and load any shards from it, under any layout (resharding)."""

from shardwise.run.checkpoint.agreement import RankAgreement, SingleRank, broadcast_from_first
from shardwise.run.checkpoint.background import BackgroundSaver, SaveTiming, host_copy_bytes
from shardwise.run.checkpoint.folder import (
    FolderRemoved,
    SavedCheckpoint,
    WriterReplaced,
    claim_folder,
    committed_checkpoints,
    read_manifest,
    size_of,
)
from shardwise.run.checkpoint.load import (
    check_same_model,
    fill_shards,
    inspect_checkpoint,
    latest_good,
    load,
    open_checkpoint,
    read_full,
    verify,
)
from shardwise.run.checkpoint.region import BlockRegion, TensorBox
from shardwise.run.checkpoint.save import save
from shardwise.run.checkpoint.state_shard import StateShard, full_shard
from shardwise.run.checkpoint.tensorfile import write_tensors

__all__ = [
    "BackgroundSaver",
    "BlockRegion",
    "FolderRemoved",
    "RankAgreement",
    "SaveTiming",
    "SavedCheckpoint",
    "SingleRank",
    "StateShard",
    "TensorBox",
    "WriterReplaced",
    "broadcast_from_first",
    "check_same_model",
    "claim_folder",
    "committed_checkpoints",
    "fill_shards",
    "full_shard",
    "host_copy_bytes",
    "inspect_checkpoint",
    "latest_good",
    "load",
    "open_checkpoint",
    "read_full",
    "read_manifest",
    "save",
    "size_of",
    "verify",
    "write_tensors",
]  # fmt: skip
