"""Images in folders of their classes: found, decoded, augmented and batched by
grain.
"""

import hashlib
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
from command_line import UserError
from PIL import Image

MEAN, STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of red, green and blue, from 0 to 1
SUFFIXES = (".jpeg", ".jpg", ".png")


class Files(NamedTuple):
    """Image files, which are read on demand."""

    paths: list[Path]
    labels: np.ndarray  # (n,) int32, indices into `classes`
    classes: list[str]


def find(folder: Path, classes: list[str] | None = None) -> Files:
    """The images in the folders of their classes, all in the order of names."""
    found = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not found or (classes or found) != found:
        raise UserError(
            f"{folder} must have a folder for each class, got {len(found)} folders"
        )
    paths, labels = [], []
    for label, name in enumerate(found):
        names = sorted(
            name for name in os.listdir(folder / name)
        )  # without a look at each file
        names = [
            n for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")
        ]
        if not names:
            raise UserError(f"{folder / name} must have images ({', '.join(SUFFIXES)})")
        paths += [folder / name / file for file in names]
        labels += [label] * len(names)
    return Files(paths, np.array(labels, np.int32), found)


def digest(*parts: Files) -> str:
    """A digest of all names, which tells one set of images from another."""
    names = (
        f"{path.parent.name}/{path.name}\n" for part in parts for path in part.paths
    )
    return hashlib.sha256(os.fsencode("".join(names))).hexdigest()


def random_crop(
    width: int, height: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """A random box of 8 to 100 % of the area, from 3:4 to 4:3, as of RandomResizedCrop.

    If ten boxes do not fit, the largest such box in the middle. The result is left,
    upper, right and lower.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, upper = (
                rng.integers(0, width - w + 1),
                rng.integers(0, height - h + 1),
            )
            return int(left), int(upper), int(left) + w, int(upper) + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def decode(content: bytes, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """An image (size, size, 3) uint8: cropped and flipped at random, or with no `rng`
    the middle.

    That is the middle 7/8 of an image whose shorter side is 8/7 of `size`: of 256 at
    224. Alpha is dropped and EXIF orientation is ignored, both as in torchvision.
    """
    with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as file:
        width, height = file.size
        if rng is None:
            side = min(width, height) * 7 / 8
            left, upper = (width - side) / 2, (height - side) / 2
            box, flip = (left, upper, left + side, upper + side), False
        else:
            box, flip = random_crop(width, height, rng), rng.random() < 0.5
        # JPEGs are decoded at a half, a quarter or an eighth where that is still large
        # enough.
        wanted = (width * size / (box[2] - box[0]), height * size / (box[3] - box[1]))
        drafted = file.draft("RGB", (math.ceil(wanted[0]), math.ceil(wanted[1])))
        _, (_, _, across, down) = drafted or (
            None,
            (0, 0, width, height),
        )  # what they are now
        across, down = across / width, down / height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        image = file.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image)
    return pixels[:, ::-1] if flip else pixels


def batches(
    files: Files, order: np.ndarray, batch: int, size: int, seed: Any, num_threads: int
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of each batch: an equal part for each process, in their
    order.

    `order` has indices of images, −1 for a black one, which is labelled −1. Crop and
    flip depend on the seed and on the place in the whole order, and on nothing else;
    without a seed the crop is central.
    """
    part = batch // jax.process_count()
    places = np.arange(len(order)).reshape(-1, jax.process_count(), part)
    places = places[:, jax.process_index()].ravel()

    def read(k: int) -> dict[str, Any]:
        place = int(places[k])
        index = int(order[place])
        if index < 0:
            return {
                "images": np.zeros((size, size, 3), np.uint8),
                "labels": np.int32(-1),
            }
        rng = seed and np.random.default_rng((*seed, place))
        path = files.paths[index]
        try:
            image = decode(path.read_bytes(), size, rng)
        except Exception as error:  # a decoder may raise anything for a broken file
            raise UserError(f"{path} cannot be decoded: {error}") from error
        return {"images": image, "labels": files.labels[index]}

    ahead = max(4 * part, num_threads)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=ahead)
    records = grain.MapDataset.range(len(places)).map(read).to_iter_dataset(options)
    return iter(records.batch(part))


def normalize(images: jax.Array) -> jax.Array:
    """From 0…255 to a mean of about 0 and a standard deviation of about 1."""
    return (images.astype(jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)
