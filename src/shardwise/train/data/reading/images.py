"""An index of image files and their classes, from class folders or tar shards (webdataset); images are read by number.

A folder has a folder for each class, whose names in sorted order are the labels 0, 1, ... (torchvision's ImageFolder). A shard has an image
and its class id (`.cls`) under the same name. The index is `files.txt`, a name a line, and `images.bin`, four int64 an image: number of the
file, offset in it, size, label. Decoding is in `train/data/reading/pixels`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError, RunError
from shardwise.train.data.reading.files import CHECKSUM_BYTES, NUM_READERS, checksum_of, evenly_spaced, replace_file, walk_files
from shardwise.train.data.reading.records import decode_member, list_members

Numbers = npt.NDArray[np.int64]
MAX_CLASSES = 1 << 24
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
FILES, INDEX, SUMS = "files.txt", "images.bin", "images.sums"


@dataclass(frozen=True)
class ImageSet:
    """`num_train` images come first, then those of `data.validation`. `classes`: their names; numbers for tar shards."""

    num_train: int
    num_validation: int
    classes: tuple[str, ...]
    digest: str


def write_index(train: Sequence[str], validation: Sequence[str], folder: Path) -> ImageSet:
    """Find all images and write their index to a folder.

    Raises:
        ConfigError: no images, files outside of class folders, validation classes missing in training, unreadable files.
    """
    files, rows, classes = _list_images(train, "data.path")
    validation_files, validation_rows, validation_classes = _list_images(validation, "data.validation") if validation else ([], [], classes)
    if set(validation_classes) - set(classes):
        strange = ", ".join(sorted(set(validation_classes) - set(classes))[:3])
        raise ConfigError(f"data.validation has classes that data.path has not: {strange}; the names of class folders must agree")
    label = {i: classes.index(name) for i, name in enumerate(validation_classes)}
    rows += [(number + len(files), start, size, label[k]) for number, start, size, k in validation_rows]
    files += validation_files
    index = np.asarray(rows, np.int64).reshape(-1, 4)
    names = [_listed_name(file) for file in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((FILES, "".join(f"{name}\n" for name in names).encode()), (INDEX, index.tobytes())):
            temporary = folder / f".{name}.new"
            temporary.write_bytes(content)
            os.replace(temporary, folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; use a run.folder with room for it") from error
    return ImageSet(len(index) - len(validation_rows), len(validation_rows), tuple(classes), digest_of_images(folder))


def _listed_name(file: Path) -> str:
    """Return a file's path as a line of the index. Raises ConfigError for a name that is no line of text."""
    name = str(file.resolve())
    try:
        if len(name.encode().splitlines()) == 1 == len(name.splitlines()):
            return name
    except UnicodeEncodeError:
        pass
    raise ConfigError(f"the image {name!r}: its name has a line break or bytes that are not UTF-8; rename it")


def _list_images(paths: Sequence[str], key: str) -> tuple[list[Path], list[tuple[int, int, int, int]], list[str]]:
    """Return the files, (file number, offset, size, label) of every image, and the class names."""
    roots = [Path(path) for path in paths]
    for root in roots:
        if not root.exists():
            raise ConfigError(f"{key}: {root} does not exist; name a folder with a folder of images for each class, or tar shards")
    try:
        shards = [file for root in roots for file in (walk_files(root) if root.is_dir() else [root]) if file.suffix == ".tar"]
        return _list_tar_shards(shards, key) if shards else _list_class_folders(roots, key)
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename} cannot be read: {error.strerror}; make it readable, or leave it out") from error


def _list_class_folders(roots: Sequence[Path], key: str) -> tuple[list[Path], list[tuple[int, int, int, int]], list[str]]:
    entries = [entry for root in roots if root.is_dir() for entry in root.iterdir()]
    classes = sorted({entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")})
    files: list[Path] = []
    rows: list[tuple[int, int, int, int]] = []
    for root in roots:
        for label, name in enumerate(classes):
            for file in walk_files(root / name) if (root / name).is_dir() else ():
                if file.suffix.lower() in ENDINGS:
                    rows.append((len(files), 0, file.stat().st_size, label))
                    files.append(file)
    if not files:
        raise ConfigError(
            f"{key}: no images ({', '.join(ENDINGS)}) in class folders of {', '.join(map(str, roots))}; an image's class is the folder "
            'that it lies in, as in photos/cat/1.jpg for path = "photos"'
        )
    return files, rows, classes


def _list_tar_shards(shards: Sequence[Path], key: str) -> tuple[list[Path], list[tuple[int, int, int, int]], list[str]]:
    rows = []
    for number, file in enumerate(shards):
        with open(file, "rb") as data:
            for name, group in list_members(file):
                images = [m for m in group if f".{m.name.rpartition('.')[2]}" in ENDINGS]
                labels = [m for m in group if m.name == "cls"]
                if not images:
                    continue
                if not labels:
                    raise ConfigError(f"{file}, {name}: no number of its class beside it ({name}.cls); write one, or leave the image out")
                data.seek(labels[0].start)
                label = int(decode_member("cls", data.read(labels[0].size), f"{file}, {name}"))
                if not 0 <= label < MAX_CLASSES:
                    raise ConfigError(
                        f"{key}: {file}, {name}.cls has class {label}; classes are numbered from 0, to {MAX_CLASSES:,} at most"
                    )
                rows.append((number, images[0].start, images[0].size, label))
    if not rows:
        raise ConfigError(f"{key}: no images ({', '.join(ENDINGS)}) in {', '.join(map(str, shards))}; write them beside .cls files")
    return list(shards), rows, [str(i) for i in range(max(row[3] for row in rows) + 1)]


def digest_of_images(folder: Path) -> str:
    """Return the digest of index, file names and images, whose checksums are written to the folder; above 16 GiB, of evenly spaced
    images. Raises ConfigError for an unreadable file."""
    images = ImageFiles(folder)
    count = len(images.index)
    chosen = evenly_spaced(count, int(images.index[:, 2].sum()))
    sums = bytearray(CHECKSUM_BYTES * count)
    try:
        with ThreadPoolExecutor(NUM_READERS) as readers:
            for number, content_sum in zip(chosen, readers.map(images.checksum, chosen), strict=True):
                sums[CHECKSUM_BYTES * number : CHECKSUM_BYTES * (number + 1)] = content_sum
        replace_file(folder / SUMS, sums)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; use a run.folder with room for it") from error
    return images.digest_with(bytes(sums))


class ImageFiles:
    """The images of an index: bytes and labels by number. With the `digest` of the images, everything read is checked against it."""

    def __init__(self, folder: Path, digest: str = "") -> None:
        try:
            self.files = (folder / FILES).read_text(encoding="utf-8").splitlines()
            self.index: Numbers = np.frombuffer((folder / INDEX).read_bytes(), np.int64).reshape(-1, 4)
            self._sums = (folder / SUMS).read_bytes() if digest else b""
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; remove {folder} to have the data found again") from error
        except ValueError as error:
            raise ConfigError(f"{folder} is damaged; remove it to have the data found again") from error
        if digest and self.digest_with(self._sums) != digest:
            raise ConfigError(f"the index of images in {folder} is not what this run wrote; remove it to have the data found again")

    def digest_with(self, sums: bytes) -> str:
        """Return the digest of the index and of images with these checksums."""
        return hashlib.sha256(self.index.tobytes() + "\0".join(self.files).encode() + sums).hexdigest()

    def checksum(self, number: int) -> bytes:
        """Return the checksum of an image; zeros if it has changed since it was indexed."""
        try:
            return checksum_of(next(self.read([number]))[0])
        except RunError:
            return bytes(CHECKSUM_BYTES)

    def labels(self, numbers: Numbers) -> Numbers:
        """Return the labels of images."""
        labels: Numbers = self.index[numbers, 3]
        return labels

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[bytes, str]]:
        """Yield (content, file name) of images. Raises RunError if one has changed since it was indexed."""
        for number in numbers:
            file, start, size, _ = self.index[number].tolist()
            where = self.files[file]
            try:
                with open(where, "rb") as data:
                    data.seek(start)
                    content = data.read(size)
                    grown = not start and os.fstat(data.fileno()).st_size != size and not where.endswith(".tar")
            except OSError as error:
                raise RunError(f"the image {where} cannot be read any more: {error.strerror}; put it back and run again") from error
            if len(content) < size or grown:
                raise RunError(f"the image {where} has changed while it was trained on; restore it and run the same command")
            expected = self._sums[CHECKSUM_BYTES * number : CHECKSUM_BYTES * (number + 1)]
            if any(expected) and expected != checksum_of(content):
                raise RunError(
                    f"the image {where} (bytes {start:,} to {start + size:,}) has changed since this run began; restore it and run the "
                    "same command"
                )
            yield content, where
