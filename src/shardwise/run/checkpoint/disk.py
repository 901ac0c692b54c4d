"""Durable file operations of checkpoints (write, fsync, atomic rename), in one place so that their order can be reviewed.

In: paths and bytes. Out: files that are on disk when the call returns. POSIX only. Not modelled: disks that acknowledge fsync too early.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from shardwise import units
from shardwise.errors import CheckpointError

Buffer = bytes | memoryview


def write_file(path: Path, parts: Iterable[Buffer]) -> tuple[int, str]:
    """Write a new file and fsync it. Returns its size in bytes and its SHA-256.

    The digest is of the data passed in, so that it reveals corruption on the way to the disk too.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a small file by `data`, atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(temporary, [data])
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def open_regular(path: Path) -> int:
    """Open a regular file and return its descriptor; a link or anything else raises `CheckpointError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link; a checkpoint holds regular files only") from error
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file")
    return handle


def read_regular(path: Path) -> bytes:
    """Return the contents of a regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def sha256_of(path: Path) -> str:
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a folder that may be incomplete; what cannot be removed stays hidden, and is retried at the next save."""
    shutil.rmtree(path, ignore_errors=True)


def explain_os_error(error: OSError, folder: Path, need_bytes: int) -> str:
    """Describe an error of writing, with the numbers and the remedy."""
    what = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC if _no_inodes(folder):
            return f"{what}: no inodes are left on the disk of {folder}, whatever space it has; remove files there, or use another folder"
        case errno.ENOENT | errno.ESTALE:
            return f"{what}: {folder} was removed while it was written to, or its disk unmounted; leave it there until the run has ended"
        case errno.ENOSPC | errno.EDQUOT:
            try:
                free = units.format_bytes(shutil.disk_usage(folder).free)
            except OSError:
                free = "an unknown amount"
            need = f"this rank writes {units.format_bytes(need_bytes)}, " if need_bytes else ""
            return f"{what}: {need}{free} is free in {folder}; free space, keep fewer checkpoints or use another folder"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return f"{what}: {folder} cannot be written; use a folder that can"
        case errno.EIO:
            return f"{what}: the disk under {folder} fails; use another"
        case _:
            return f"{what} in {folder}"


def _no_inodes(folder: Path) -> bool:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return False
    return bool(stats.f_files) and not stats.f_favail
