"""Images in folders of their classes: found, decoded, augmented and batched by grain."""

import contextlib
import hashlib
import io
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
from command_line import UserError
from PIL import Image, UnidentifiedImageError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green and blue, from 0 to 1
SUFFIXES = {".jpeg", ".jpg", ".png"}
FORMATS = ("JPEG", "PNG")  # of the content; other formats may start programs (EPS: Ghostscript)
MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK"}  # of 8 bits or fewer, as Pillow has them
WAITS = (0.1, 1.0, 5.0)  # seconds, before a file that cannot be read is tried again
NUM_REPORTED = 10  # files that are left out; further ones are only counted


class Files(NamedTuple):
    """Image files, which are read on demand."""

    paths: list[Path]
    labels: np.ndarray  # (n,) int32, indices into `classes`
    classes: list[str]
    left_out: dict[Path, str]  # files that this process could not decode, and why


def entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """The entries of a folder in the order of their names, without hidden ones.

    An entry knows its type. To ask the disk about each of a million files takes minutes.
    """
    with os.scandir(folder) as found:
        visible = (entry for entry in found if not entry.name.startswith("."))
        result = sorted(visible, key=lambda entry: entry.name)
    for entry in result:
        if not (entry.is_file() or entry.is_dir()):  # reading from a pipe would not end
            raise UserError(f"{entry.path} must be a file, a folder or a link to one, got neither")
    return result


def find(folder: Path, classes: list[str] | None = None) -> Files:
    """The images in the folders of their classes, all in the order of names."""
    if not folder.is_dir():
        raise UserError(f"--data-dir must have a folder {folder.name}, got none at {folder}")
    found = [entry.name for entry in entries(folder) if entry.is_dir()]
    if not found:
        raise UserError(f"{folder} must have a folder of images for each class, got none")
    if classes is None:
        classes = found
    for problem, names in (("no", set(classes) - set(found)), ("also", set(found) - set(classes))):
        if names:
            raise UserError(f"{folder} must have the training classes, got {problem} {min(names)}")
    paths, labels = [], []
    for label, name in enumerate(classes):
        suffix = lambda entry: os.path.splitext(entry.name)[1].lower()
        of_class = [entry for entry in entries(folder / name) if suffix(entry) in SUFFIXES]
        if not of_class:
            raise UserError(f"{folder / name} must have images ({', '.join(sorted(SUFFIXES))})")
        for entry in of_class:
            if entry.is_dir():
                raise UserError(f"{entry.path} must be a file, got a folder")
            paths.append(Path(entry.path))
        labels += [label] * len(of_class)
    return Files(paths, np.array(labels, np.int32), classes, {})


def digest(*parts: Files) -> str:
    """A digest of all names, and of the size of the first file of each class.

    It tells one set of images from another. All sizes would be slow to read from a network disk.
    """
    result = hashlib.sha256()
    for part in parts:
        for path in part.paths:
            result.update(os.fsencode(f"{path.parent.name}/{path.name}\n"))
        for first in np.unique(part.labels, return_index=True)[1]:
            result.update(f"{part.paths[first].lstat().st_size}\n".encode())
    return result.hexdigest()


def random_crop(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A random box of 8 to 100 % of the area, from 3:4 to 4:3, as of RandomResizedCrop.

    If ten boxes do not fit, the largest such box in the middle. The result is left, upper, right
    and lower.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, upper = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(left), int(upper), int(left) + w, int(upper) + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def decode(content: bytes, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """An image (size, size, 3) uint8: cropped and flipped at random, or with no `rng` the middle.

    That is the middle 7/8 of an image whose shorter side is 8/7 of `size`: of 256 at 224. Alpha is
    dropped and EXIF orientation is ignored, both as in torchvision.
    """
    try:
        file = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"must be a JPEG or PNG, got {content[:12]} at its start") from None
    with file:
        width, height = file.size
        # Pillow warns of these, and raises for twice as many.
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(
                f"must have at most {Image.MAX_IMAGE_PIXELS:,} pixels, got {width}×{height}"
            )
        if rng is None:
            side = min(width, height) * 7 / 8
            left, upper = (width - side) / 2, (height - side) / 2
            box, flip = (left, upper, left + side, upper + side), False
        else:
            box, flip = random_crop(width, height, rng), rng.random() < 0.5
        # JPEGs are decoded at a half, a quarter or an eighth where that is still large enough.
        wanted = (width * size / (box[2] - box[0]), height * size / (box[3] - box[1]))
        drafted = file.draft("RGB", (math.ceil(wanted[0]), math.ceil(wanted[1])))
        _, (_, _, across, down) = drafted or (None, (0, 0, width, height))  # what they are now
        across, down = across / width, down / height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        image = to_rgb(file).resize((size, size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image)
    return pixels[:, ::-1] if flip else pixels


def to_rgb(image: Image.Image) -> Image.Image:
    """The same with 8 bits a channel, without alpha."""
    if image.mode == "I;16":  # a gray PNG of 16 bits; `convert` clips at 255 instead of scaling
        image = Image.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode not in MODES:
        raise ValueError(f"the mode must be one of {', '.join(sorted(MODES))}, got {image.mode}")
    image.info.pop("transparency", None)  # `convert` warns of some kinds
    return image if image.mode == "RGB" else image.convert("RGB")


class Reader:
    """Reads and decodes images in a given order: a source of records for grain."""

    def __init__(
        self, files: Files, size: int, order: np.ndarray, places: np.ndarray, seed: Any
    ) -> None:
        """`order` has indices of images, −1 for a black one; without a seed the crop is central.

        Crop and flip depend on the seed and on the place in the whole order, and on nothing else.
        """
        self.files, self.size, self.order, self.places = files, size, order, places
        self.seed = seed
        self.lock, self.has_failed = threading.Lock(), False

    def __len__(self) -> int:
        """The number of images in the order."""
        return len(self.order)

    def __getitem__(self, k: Any) -> dict[str, Any]:
        """An image and its label, which is −1 for an index of −1 and for a broken file."""
        index = int(self.order[k])
        if index >= 0:
            seeds = None if self.seed is None else (*self.seed, int(self.places[k]))
            rng = None if seeds is None else np.random.default_rng(seeds)
            path = self.files.paths[index]
            content = self.read(path)  # not in `try`: if this fails the image may still be good
            try:
                image = decode(content, self.size, rng)
            except MemoryError:  # the size of images is limited, so this machine has too little
                raise
            except Exception as error:
                # A decoder may raise anything for a broken file. A mistake in `decode` itself would
                # leave out all files, which `check_left_out` does not allow.
                self.leave_out(path, error)
            else:
                return {"images": image, "labels": self.files.labels[index]}
        return {
            "images": np.zeros((self.size, self.size, 3), np.uint8),
            "labels": np.int32(-1),
        }

    def read(self, path: Path) -> bytes:
        """The content of a file, after some attempts: a network disk may come back.

        After the first final failure no thread waits any more, so that all end soon.
        """
        for wait in WAITS:
            with contextlib.suppress(OSError):
                return path.read_bytes()
            if not self.has_failed:
                time.sleep(wait)
        try:
            return path.read_bytes()
        except OSError as error:  # an error after opening does not name the file
            self.has_failed = True
            raise OSError(error.errno, error.strerror, str(path)) from error

    def leave_out(self, path: Path, error: Exception) -> None:
        """Records a broken file, and warns of the first ones."""
        left_out, reason = self.files.left_out, f"{type(error).__name__}: {error}"
        with self.lock:
            if path in left_out:
                return
            left_out[path] = reason
            number = len(left_out)
        if number <= NUM_REPORTED:
            warnings.warn(f"{path} is left out: {reason}", stacklevel=1)
        elif number == NUM_REPORTED + 1:
            warnings.warn("more files are left out; metrics.jsonl has their number", stacklevel=1)


def batches(
    files: Files, order: np.ndarray, batch: int, size: int, seed: Any, num_threads: int
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of each batch: an equal part for each process, in their order."""
    part = batch // jax.process_count()
    places = np.arange(len(order)).reshape(-1, jax.process_count(), part)[:, jax.process_index()]
    reader = Reader(files, size, order[places.ravel()], places.ravel(), seed)
    ahead = max(4 * part, num_threads)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=ahead)
    records = grain.MapDataset.source(reader).to_iter_dataset(options)  # pyright: ignore[reportArgumentType]
    return iter(records.batch(part))


def check_left_out(files: Files, part: str, num: int, total: int, max_left_out: float) -> None:
    """Raises if too many are left out. `num` counts those of all processes, so that all stop."""
    if num > max_left_out * total:
        examples = (f"{path}: {reason}" for path, reason in files.left_out.items())
        raise UserError(
            f"--data-dir must have at most {100 * max_left_out:.3g} % of {part} images that cannot"
            f" be decoded (--max-left-out), got {num:,} of {total:,} ({100 * num / total:.3g} %),"
            f" such as {next(examples, 'those that another process reports')}"
        )


def normalize(images: jax.Array) -> jax.Array:
    """From 0…255 to a mean of about 0 and a standard deviation of about 1."""
    return (images.astype(jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)
