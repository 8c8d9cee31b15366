"""CIFAR-10: downloaded, read and augmented."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pooch

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
TRAIN, TEST = [f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]
RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue planes

Images = tuple[Any, Any]  # (n, 32, 32, 3) uint8, and labels (n,) int32


def read(folder: Path, names: list[str]) -> Images:
    """The images of some files of the binary version; downloaded if they are not
    there.
    """
    place = next(
        (p for p in (folder, folder / FOLDER) if (p / names[0]).exists()), None
    )
    if place is None:
        unpack = pooch.Untar(
            [f"{FOLDER}/{name}" for name in TRAIN + TEST], extract_dir="."
        )
        pooch.retrieve(
            URL, f"md5:{MD5}", "cifar-10.tar.gz", folder, unpack, progressbar=True
        )
        place = folder / FOLDER
    files = [np.fromfile(place / name, np.uint8).reshape(-1, RECORD) for name in names]
    records = np.concatenate(files)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].astype(np.int32)


def crop(image: jax.Array, corner: jax.Array) -> jax.Array:
    """A part of 32×32 of an image, with its upper left corner."""
    return jax.lax.dynamic_slice(image, (*corner, 0), (32, 32, 3))


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Random flips, then random crops out of a black frame of 4 pixels; uint8 (b, 32,
    32, 3).
    """
    flip_key, crop_key = jax.random.split(key)
    flip = jax.random.bernoulli(flip_key, shape=(len(images), 1, 1, 1))
    images = jnp.where(flip, images[:, :, ::-1], images)
    framed = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 9)
    return jax.vmap(crop)(framed, corners)


def normalize(images: Any) -> jax.Array:
    """From 0…255 to −1…1."""
    return (jnp.asarray(images, jnp.float32) / 255 - 0.5) / 0.5
