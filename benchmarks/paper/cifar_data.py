"""CIFAR-10: downloaded, read and augmented."""

import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pooch
from command_line import UserError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
NUM_CLASSES = 10
FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
NUM_RECORDS, RECORD = 10_000, 1 + 3 * 32 * 32  # per file; a label, then red, green and blue planes


class Images(NamedTuple):
    """Images (n, 32, 32, 3) uint8 and labels (n,) int32."""

    images: np.ndarray
    labels: np.ndarray


def parse(name: str, content: bytes) -> Images:
    """Parses one file of the binary version."""
    if len(content) != NUM_RECORDS * RECORD:
        raise UserError(
            f"{name} must be {NUM_RECORDS:,} records of {RECORD:,} bytes,"
            f" got {len(content):,} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(NUM_RECORDS, RECORD)
    labels = records[:, 0].astype(np.int32)
    check_labels(name, labels)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images), labels)


def check_labels(name: str, labels: Any) -> None:
    """A larger label would make the loss NaN, and the loss ignores −1."""
    wrong = [label for label in np.unique(labels) if not 0 <= label < NUM_CLASSES]
    if wrong:
        raise UserError(f"{name} must have labels from 0 to {NUM_CLASSES - 1}, got {wrong[0]}")


def is_in(folder: Path) -> bool:
    """Whether a folder has the files or their archive; neither is checked."""
    return any((folder / name).exists() for name in (FILES[0], f"{FOLDER}/{FILES[0]}", ARCHIVE))


def load(folder: Path, md5: str = MD5) -> tuple[Images, Images]:
    """The training and the test images, from the files of the binary version or their archive."""
    for place in (folder / FOLDER, folder):
        if (place / FILES[0]).exists():
            contents = {name: (place / name).read_bytes() for name in FILES}
            break
    else:
        contents = read_archive(folder / ARCHIVE, md5)
    *train, test = [parse(name, contents[name]) for name in FILES]
    return Images(*(np.concatenate(arrays) for arrays in zip(*train, strict=True))), test


def read_archive(archive: Path, md5: str) -> dict[str, bytes]:
    """Checks the archive and reads its files.

    Nothing is unpacked to disk, where several processes might get in each other's way.
    """
    if not archive.exists():
        raise UserError(
            f"no CIFAR-10, binary version, in {archive.parent}: no {FOLDER}, no {ARCHIVE}"
        )
    found = pooch.file_hash(str(archive), "md5")
    if found != md5:
        raise UserError(f"{archive} must have the MD5 checksum {md5}, got {found}")
    try:
        with tarfile.open(archive) as tar:
            files = {name: tar.extractfile(f"{FOLDER}/{name}") for name in FILES}
            return {name: file.read() if file else b"" for name, file in files.items()}
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise UserError(f"{archive} is no archive of CIFAR-10, binary version: {error}") from error


def download(folder: Path, url: str = URL, md5: str = MD5) -> None:
    """Downloads the archive to a folder, where it appears only if complete and correct."""
    source = pooch.create(
        folder,
        base_url="",
        registry={ARCHIVE: f"md5:{md5}"},
        urls={ARCHIVE: url},
        retry_if_failed=4,
    )
    try:
        source.fetch(ARCHIVE, progressbar=True)
    except (OSError, ValueError) as error:  # of the network and the disk; of the checksum
        raise UserError(
            f"{url}: {error}. Run again, or fetch it by any other means and put it at"
            f" {folder / ARCHIVE}"
        ) from error


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Random flips, then random crops out of a black frame of 4 pixels; uint8 (b, 32, 32, 3)."""
    flip_key, crop_key = jax.random.split(key)
    flip = jax.random.bernoulli(flip_key, shape=(len(images), 1, 1, 1))
    images = jnp.where(flip, images[:, :, ::-1], images)
    framed = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 9)
    crop = lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), (32, 32, 3))
    return jax.vmap(crop)(framed, corners)


def normalize(images: jax.Array) -> jax.Array:
    """From 0…255 to −1…1."""
    return (images.astype(jnp.float32) / 255 - 0.5) / 0.5
