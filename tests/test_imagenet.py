"""The ImageNet example: reading, the network, BatchNorm by groups, and that it may be stopped."""

import contextlib
import errno
import functools
import io
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import cifar10
import imagenet
import jax
import jax.numpy as jnp
import numpy as np
import optax
import photographs
import pytest
from flax import nnx
from helpers import (
    assert_apart_by_rounding,
    free_address,
    host_devices,
    last_checkpoint,
    metrics,
    noisy_optimizers,
    num_epochs,
    x64,
)
from jax.sharding import Mesh
from PIL import EpsImagePlugin, Image
from sklearn.datasets import load_sample_images
from tqdm import tqdm

SCRIPT = Path(imagenet.__file__)
SMALL = ["--model", "small", "--image-size", "32", "--batch", "16", "--batch-norm-group", "4"]
SMALL += ["--threads", "2", "--learning-rate", "0.1"]


@pytest.fixture(autouse=True)
def _standard_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):  # what users have
        yield


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    photographs.write_tree(folder, 12, 7, (40, 40), (90, 90))
    return folder


# ------------------------------------------------------------------------------------------- data


def test_find(tree: Path, tmp_path: Path) -> None:
    files = imagenet.find(tree / "train")
    assert files.classes == ["a temple", "flower", "upside down"]
    assert [path.name for path in files.paths[:3]] == ["0.jpg", "1.JPEG", "10.jpg"]
    np.testing.assert_array_equal(files.labels, np.repeat([0, 1, 2], 12))
    with pytest.raises(ValueError, match=r"--data-dir must have a folder test, got none at"):
        imagenet.find(tree / "test")
    with pytest.raises(ValueError, match="val must have the training classes, got no cat"):
        imagenet.find(tree / "val", ["a temple", "cat", "flower", "upside down"])
    with pytest.raises(ValueError, match="val must have the training classes, got also flower"):
        imagenet.find(tree / "val", ["a temple", "upside down"])
    (tmp_path / ".ipynb_checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"must have a folder of images for each class, got none"):
        imagenet.find(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "README.txt").write_text("no image")
    (tmp_path / "one" / "._0.jpg").write_text("what a Mac puts beside 0.jpg")
    with pytest.raises(ValueError, match=r"one must have images \(.jpeg, .jpg, .png\)"):
        imagenet.find(tmp_path)


def test_find_what_is_no_file(tree: Path, tmp_path: Path) -> None:
    """Each would hang the reader or be missed; links to files and folders are as good as these."""
    (tmp_path / "one").symlink_to(tree / "train" / "flower")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "0.PNG").symlink_to(tree / "train" / "flower" / "0.jpg")
    assert len(imagenet.find(tmp_path).paths) == 13
    odd = tmp_path / "two" / "x.jpg"
    odd.mkdir()
    with pytest.raises(ValueError, match=r"x\.jpg must be a file, got a folder"):
        imagenet.find(tmp_path)
    odd.rmdir()
    for place in (odd, tmp_path / "three"):
        for make in (os.mkfifo, lambda path: path.symlink_to("nowhere")):
            make(place)
            with pytest.raises(ValueError, match=rf"{place} must be a file, a folder or a link to"):
                imagenet.find(tmp_path)
            place.unlink()
    odd.symlink_to(odd)
    with pytest.raises(OSError, match=r"symbolic links: .*x\.jpg"):
        imagenet.find(tmp_path)


def test_photographs(tmp_path: Path) -> None:
    photographs.main([str(tmp_path)])
    training = imagenet.find(tmp_path / "train")
    assert len(training.paths) == 3 * 256
    assert len(imagenet.find(tmp_path / "val", training.classes).paths) == 3 * 32
    with Image.open(training.paths[0]) as image:
        assert image.size == (500, 375)


def test_digest(tree: Path, tmp_path: Path) -> None:
    files = imagenet.find(tree / "val")
    assert imagenet.digest(files) == imagenet.digest(imagenet.find(tree / "val"))
    assert imagenet.digest(files) != imagenet.digest(imagenet.find(tree / "train"))
    paths = [tmp_path / os.fsdecode(b"\xe9t\xe9.jpg"), *files.paths[1:]]  # no UTF-8
    with contextlib.suppress(OSError):  # where there is no such name
        paths[0].symlink_to("nowhere")
        assert imagenet.digest(files) != imagenet.digest(files._replace(paths=paths))


def test_random_crop() -> None:
    """8 to 100 % of the area, from 3:4 to 4:3, anywhere; ten tries, then the middle."""
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet.random_crop(400, 400, rng) for _ in range(4_000)])
    left, upper, right, lower = boxes.T
    assert boxes.min() == 0
    assert boxes.max() == 400
    area, ratio = (right - left) * (lower - upper) / 400**2, (right - left) / (lower - upper)
    assert 0.079 < area.min() < 0.09
    assert 0.95 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76  # sides are whole numbers
    assert 1.31 < ratio.max() < 1.35
    small = area < 0.4  # these always fit, and are uniform
    assert abs(np.mean(area[small]) - 0.24) < 0.01
    assert abs(np.log(ratio[small]).mean()) < 0.02
    assert abs(((left + right) / 2)[small].mean() - 200) < 6
    # 20:1 fits no shape: the middle of 4:3, as high as the image.
    assert imagenet.random_crop(2_000, 100, rng) == (933, 0, 1066, 100)
    assert imagenet.random_crop(100, 2_000, rng) == (0, 933, 100, 1066)


def test_decode_the_middle(tmp_path: Path) -> None:
    """As `resize(256)` of the shorter side, then the middle 224, but in one go."""
    photograph = Image.fromarray(load_sample_images().images[0])
    photograph.save(tmp_path / "it.png")
    found = imagenet.decode((tmp_path / "it.png").read_bytes(), 224, None).astype(float)
    width, height = photograph.size
    resized = photograph.resize((round(256 * width / height), 256), Image.Resampling.BILINEAR)
    left = (resized.width - 224) // 2
    expected = np.asarray(resized.crop((left, 16, left + 224, 240)), float)
    assert np.abs(found - expected).mean() < 4
    # A JPEG, decoded at a fraction of its size, is the same to what compression loses.
    photograph = photograph.crop((0, 0, 501, 377))  # no fraction of which is whole
    photograph.save(tmp_path / "it.png")
    photograph.save(tmp_path / "it.jpg", quality=95)
    for size in (32, 224):
        of_png, of_jpg = (
            imagenet.decode((tmp_path / name).read_bytes(), size, None).astype(float)
            for name in ("it.png", "it.jpg")
        )
        error = lambda shift: np.abs(of_png - np.roll(of_jpg, shift, 1)).mean()  # noqa: B023
        assert error(0) < 6
        assert 2 * error(0) < error(1)


def test_decode_at_random(tree: Path) -> None:
    content = imagenet.find(tree / "train").paths[0].read_bytes()
    decode = lambda seed: imagenet.decode(content, 32, np.random.default_rng(seed))
    np.testing.assert_array_equal(decode(1), decode(1))
    images = [decode(seed) for seed in range(20)]
    assert len({image.tobytes() for image in images}) == 20
    assert all(image.shape == (32, 32, 3) and image.dtype == np.uint8 for image in images)


def saved(image: Image.Image, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **kwargs)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1"])
def test_decode_of_other_modes(mode: str) -> None:
    """ImageNet has grey and CMYK files, and a PNG that is called JPEG."""
    image = Image.fromarray(load_sample_images().images[1][:60, :80])
    format = "JPEG" if mode in ("L", "CMYK") else "PNG"
    pixels = imagenet.decode(saved(image.convert(mode), format=format), 24, None)
    assert pixels.shape == (24, 24, 3)
    near = imagenet.decode(saved(image, format="PNG"), 24, None).mean(2)
    assert np.corrcoef(near.ravel(), pixels.mean(2).ravel())[0, 1] > 0.7


@pytest.mark.parametrize(("mode", "transparency"), [("RGB", (9, 9, 9)), ("P", b"\0"), ("L", 7)])
def test_decode_drops_alpha(mode: str, transparency: Any) -> None:
    image = Image.fromarray(load_sample_images().images[1][:60, :80]).convert(mode)
    files = [saved(image, format="PNG")]
    files.append(saved(image, format="PNG", transparency=transparency))
    if mode != "P":
        image.putalpha(7)
        files.append(saved(image, format="PNG"))
    first, *others = (imagenet.decode(file, 24, None) for file in files)
    for other in others:
        np.testing.assert_array_equal(first, other)


def png(size: tuple[int, int], bits: int, color: int, rows: bytes) -> bytes:
    """Width and height, and the colour type of the specification."""
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", *size, bits, color, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )


@pytest.mark.parametrize(("channels", "color"), [(1, 0), (2, 4), (3, 2), (4, 6)])
def test_decode_of_sixteen_bits(channels: int, color: int) -> None:
    """PNG scales linearly, 65535 to 255, so that 257 × an image of 8 bits is the same image."""
    photograph = load_sample_images().images[1][:60, :80]
    pixels = np.concatenate([photograph, photograph[:, :, :1] // 2], 2)[:, :, :channels]
    images = []
    for bits, values in ((8, pixels), (16, pixels.astype(">u2") * np.array(257, ">u2"))):
        rows = b"".join(b"\0" + row.tobytes() for row in values.astype(f">u{bits // 8}"))
        images.append(imagenet.decode(png((80, 60), bits, color, rows), 24, None))
    assert np.ptp(images[0]) > 50
    np.testing.assert_array_equal(*images)


def test_decode_rounds_sixteen_bits() -> None:
    for value in (0, 128, 129, 32_767, 65_406, 65_407, 65_535):
        rows = 8 * (b"\0" + 8 * struct.pack(">H", value))
        pixels = imagenet.decode(png((8, 8), 16, 0, rows), 4, None)
        np.testing.assert_array_equal(pixels, round(value / 257))


def test_decode_refuses_unknown_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "FORMATS", ("TIFF",))
    for mode in ("F", "I"):  # of values that may go from anywhere to anywhere
        content = saved(Image.new(mode, (9, 9)), format="TIFF")
        with pytest.raises(ValueError, match=rf"the mode must be one of 1, CMYK, .*, got {mode}"):
            imagenet.decode(content, 4, None)


def test_decode_takes_the_first_picture_as_it_is_stored() -> None:
    """Phones put two into a JPEG, and tell by EXIF how to turn it."""
    image = Image.fromarray(load_sample_images().images[1][:60, :80])
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90°
    files = [saved(image, format="JPEG"), saved(image, format="JPEG", exif=exif)]
    other = Image.new("RGB", (80, 60))
    files.append(saved(image, format="MPO", save_all=True, append_images=[other]))
    assert b"MPF" in files[2]
    pixels = [imagenet.decode(file, 24, None) for file in files]
    np.testing.assert_array_equal(pixels[0], pixels[1])
    np.testing.assert_array_equal(pixels[0], pixels[2])


def read(files: Any, order: Any, batch: int, **kwargs: Any) -> list[Any]:
    given = {"size": 16, "seed": (0, 1), "num_threads": 3, **kwargs}
    return list(imagenet.batches(files, np.array(order), batch, **given))


def test_batches_do_not_depend_on_processes_or_threads(tree: Path, monkeypatch: Any) -> None:
    files = imagenet.find(tree / "train")
    order = np.random.default_rng(0).permutation(36)[:32]
    whole = read(files, order, 8)
    assert [len(batch["labels"]) for batch in whole] == [8] * 4
    np.testing.assert_array_equal(
        np.concatenate([batch["labels"] for batch in whole]), files.labels[order]
    )
    one_thread = read(files, order, 8, num_threads=1)
    chex.assert_trees_all_equal(one_thread, whole)
    other_epoch = read(files, order, 8, seed=(0, 2))
    assert not np.array_equal(other_epoch[0]["images"], whole[0]["images"])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(read(files, order, 8))
    for batch, *halves in zip(whole, *parts, strict=True):
        together = jax.tree.map(lambda *values: np.concatenate(values), *halves)
        chex.assert_trees_all_equal(together, batch)


DDS = b"DDS " + (124).to_bytes(4, "little") + bytes(120)  # for which Pillow has no code


@pytest.mark.parametrize("content", ["cut", b"", b"<html>", b"\xff\xd8\xff\xe0", DDS])
def test_a_broken_file_does_not_count(content: Any, tree: Path, tmp_path: Path) -> None:
    files = imagenet.find(tree / "train")
    path = tmp_path / "broken.jpg"
    path.write_bytes(files.paths[1].read_bytes()[:700] if content == "cut" else content)
    files = files._replace(paths=[path, *files.paths[1:]])
    with pytest.warns(UserWarning, match=r"broken.jpg is left out: "):
        (batch,) = read(files, [3, 0, 5, -1], 4)
    np.testing.assert_array_equal(batch["labels"], [0, -1, 0, -1])
    assert batch["images"][0].any()
    assert not batch["images"][1].any()


def written(folder: Path, contents: list[bytes]) -> imagenet.Files:
    """Images of one class."""
    paths = [folder / f"{i}.jpg" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return imagenet.Files(paths, np.zeros(len(paths), np.int32), ["it"], {})


def test_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Pillow's formats that are neither JPEG nor PNG are no images, whatever their names.

    For an EPS Pillow would start Ghostscript.
    """
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **_: started.append(a))
    Image.init()
    contents = {}
    for name in Image.SAVE:
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            contents[name] = saved(Image.new("RGB", (64, 64), (9, 9, 9)), format=name)
    assert len(contents) > 15
    assert contents["EPS"].startswith(b"%!PS")
    files = written(tmp_path, list(contents.values()))
    order = range(len(contents))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (batch,) = read(files, order, len(order))
    decoded = {name for name, label in zip(contents, batch["labels"], strict=True) if label == 0}
    assert decoded <= {"JPEG", "PNG", "MPO"}
    assert all("must be a JPEG or PNG, got b" in reason for reason in files.left_out.values())
    assert not started


def test_large_images(tmp_path: Path) -> None:
    """One pixel more than Pillow's limit is as bad as twice the limit."""
    limit = Image.MAX_IMAGE_PIXELS
    sizes = [(limit + 1, 1), (30_000, 30_000), (2**31 - 1, 2**31 - 1)]
    files = written(tmp_path, [png(size, 8, 0, b"") for size in sizes])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        (batch,) = read(files, [0, 1, 2], 3)
    assert (batch["labels"] == -1).all()
    first, *others = (files.left_out[path] for path in files.paths)
    assert first == "ValueError: must have at most 89,478,485 pixels, got 89478486×1"
    assert all(other.startswith("DecompressionBombError") for other in others)


def test_too_little_memory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says nothing about the image."""

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(imagenet, "decode", fail)
    with pytest.raises(MemoryError):
        read(imagenet.find(tree / "train"), [0, 1], 2)


def test_any_damage(tmp_path: Path) -> None:
    """Files with some bytes changed, added, lost or cut off decode, or are left out."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(load_sample_images().images[1][:40, :50])
    originals = [
        saved(image, format="JPEG"),
        saved(image, format="JPEG", progressive=True),
        saved(image.convert("CMYK"), format="JPEG"),
        saved(image, format="PNG"),
        saved(image.convert("P"), format="PNG", transparency=bytes(256)),
        saved(Image.fromarray(np.asarray(image)[:, :, 0] * np.uint16(257)), format="PNG"),
    ]
    contents = []
    for i in range(300):
        content = bytearray(originals[i % len(originals)])
        for _ in range(rng.integers(1, 4)):
            at = min(rng.integers(len(content)), rng.integers(len(content)))  # headers, above all
            how = rng.integers(4)
            if how == 0:
                del content[at : at + rng.integers(1, 50)]
            else:
                end = at + (rng.integers(1, 5) if how == 1 else 0)
                content[at:end] = rng.bytes(rng.integers(1, 5))
        contents.append(bytes(content[: rng.integers(len(content))] if i % 5 == 0 else content))
    files = written(tmp_path, contents)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = read(files, range(300), 50)
    num_left_out = sum(int((batch["labels"] < 0).sum()) for batch in batches)
    assert num_left_out == len(files.left_out)
    assert 0 < num_left_out < 300


def test_first_warnings(tree: Path, tmp_path: Path) -> None:
    """Ten files are named, once each, and no more."""
    files = written(tmp_path, 30 * [b""])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read(files, [*range(30), *range(30)], 20)
    texts = [str(warning.message) for warning in found]
    assert (
        sum("is left out: ValueError: must be a JPEG or PNG, got b''" in text for text in texts)
        == 10
    )
    assert len(set(texts)) == len(texts) == 11
    assert texts.count("more files are left out; metrics.jsonl has their number") == 1
    assert len(files.left_out) == 30


# ------------------------------------------------------------------------- files that go and come


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "WAITS", (0.01, 0.01, 0.01))


@pytest.mark.usefixtures("_short_waits")
def test_data_gone_for_a_moment(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """No image is taken for broken."""
    files = imagenet.find(tree / "train")
    moved = tmp_path / "moved.jpg"
    content = files.paths[1].read_bytes()
    files.paths[1] = tmp_path / "1.jpg"
    moved.write_bytes(content)
    sleep = time.sleep

    def back(seconds: float) -> None:
        if seconds == 0.01 and moved.exists():
            moved.rename(files.paths[1])
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", back)
    (batch,) = read(files, [1, 0], 2)
    np.testing.assert_array_equal(batch["labels"], [0, 0])
    assert batch["images"][0].any()


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE])
def test_files_that_cannot_be_read(number: int, tree: Path, monkeypatch: Any) -> None:
    """An error that names the file, after some attempts; also for one that breaks off."""
    files = imagenet.find(tree / "train")
    read_bytes, attempts = Path.read_bytes, []

    def fail(path: Path) -> bytes:
        if path != files.paths[5]:
            return read_bytes(path)
        attempts.append(path)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match=rf"{os.strerror(number)}: .*/{files.paths[5].name}") as error:
        read(files, [1, 5, 0, 2], 2)
    assert error.value.errno == number
    assert len(attempts) == 4
    assert not files.left_out


def test_the_first_file_that_cannot_be_read_ends_all(tree: Path, monkeypatch: Any) -> None:
    """A process ends after its threads, and each of them has a queue of files to try."""
    files = imagenet.find(tree / "train")
    files = files._replace(paths=[path.with_suffix(".gone") for path in files.paths])
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    reader = imagenet.Reader(files, 16, np.arange(36), np.arange(36), (0, 1))
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(reader.__getitem__, k) for k in range(36)]
    assert all(isinstance(future.exception(), FileNotFoundError) for future in futures)
    assert len(imagenet.WAITS) <= len(waits) <= 2 * len(imagenet.WAITS)


def test_normalize() -> None:
    black_and_white = jnp.array([[0, 0, 0], [255, 255, 255]], jnp.uint8)
    expected = [[-2.1179, -2.0357, -1.8044], [2.2489, 2.4286, 2.64]]  # as everywhere in PyTorch
    np.testing.assert_allclose(imagenet.normalize(black_and_white), expected, atol=1e-4)


# ------------------------------------------------------------------------------------ the network


def test_resnet50() -> None:
    make = lambda: imagenet.MODELS["resnet50"](num_classes=1_000, rngs=nnx.Rngs(0))
    params = nnx.state(nnx.eval_shape(make), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 25_557_032  # torchvision's
    forward = lambda x: make()(x)
    assert jax.eval_shape(forward, jnp.zeros((2, 224, 224, 3))).shape == (2, 1_000)
    body = lambda x: (model := make()).blocks(nnx.max_pool(model.stem(x), (2, 2), (2, 2)))
    assert jax.eval_shape(body, jnp.zeros((2, 224, 224, 3))).shape == (2, 7, 7, 2_048)


def config(**kwargs: Any) -> Any:
    fields = {
        "optimizer": "spa-gradual",
        "seed": 0,
        "model": "small",
        "bfloat16": False,
        "epochs": 100,
        "batch": 16,
        "learning_rate": 0.1,
        "averaging": 0.1,
        "weight_decay": 1e-4,
        "track": False,
        "batch_norm_group": 4,
        "image_size": 32,
    }
    return imagenet.Config(**{**fields, **kwargs})


def make_model(key: Any, dtype: Any = jnp.float32) -> nnx.Module:
    return imagenet.ResNet((1,), 4, num_classes=3, dtype=dtype, rngs=nnx.Rngs(key))


def make_steps(group: int | None, dtype: Any = jnp.float32) -> Any:
    tx = optax.identity()  # the gradient is what is asked for
    return cifar10.make_steps(config(), functools.partial(make_model, dtype=dtype), tx, group)


@pytest.mark.slow
def test_batch_norm_by_groups() -> None:
    """Each group as if it were alone; statistics are the mean of theirs.

    In float64, where rounding puts no activation on the other side of 0. The head sums 64 numbers
    in float32 all the same, which leaves errors of some 1e-7.
    """
    with x64():
        scale = jnp.arange(1.0, 9)[:, None, None, None]
        x = jax.random.normal(jax.random.key(0), (8, 32, 32, 3)) * scale
        labels = jnp.arange(8) % 3
        state = make_steps(None).init(0)
        kept = {name: getattr(state, name) for name in ("params", "batch_stats")}
        state = state._replace(**optax.tree.cast(kept, jnp.float64))

        def update(group: int | None, part: slice) -> Any:
            return jax.jit(make_steps(group, jnp.float64).update)(state, x[part], labels[part])

        whole, whole_metrics = update(None, slice(None))
        as_one, _ = update(8, slice(None))
        grouped, metrics = update(4, slice(None))
        halves = [update(None, part) for part in (slice(4), slice(4, 8))]
        close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
        close(as_one.params, whole.params)
        mean = lambda *values: sum(values) / 2
        for name in kept:
            expected = jax.tree.map(mean, *(getattr(half, name) for half, _ in halves))
            close(getattr(grouped, name), expected)
        close(metrics["loss"], mean(*(m["loss"] for _, m in halves)))
        assert abs(metrics["loss"] - whole_metrics["loss"]) > 1e-4


@pytest.mark.slow
def test_labels_that_do_not_count() -> None:
    logits = jax.random.normal(jax.random.key(0), (5, 3))
    labels = jnp.array([0, -1, 2, -1, 1])
    loss, correct = cifar10.sums(logits, labels)
    real = np.array([0, 2, 4])
    log_p = np.asarray(jax.nn.log_softmax(logits))[real, np.asarray(labels)[real]]
    np.testing.assert_allclose(loss, -log_p.sum(), rtol=1e-6)
    assert correct == (np.asarray(logits)[real].argmax(1) == np.asarray(labels)[real]).sum()
    # The mean is over those that count, and there may be none.
    steps = make_steps(None)
    state, update = steps.init(0), jax.jit(steps.update)
    x = jax.random.normal(jax.random.key(1), (5, 32, 32, 3))
    _, metrics = update(state, x, labels)
    model = make_model(1)
    nnx.update(model, state.params, state.batch_stats)
    loss, _ = cifar10.sums(model(x), labels)
    np.testing.assert_allclose(metrics["loss"], loss / 3, rtol=1e-5)
    after, metrics = update(state, x, jnp.full(5, -1))
    assert metrics["loss"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


def test_recipe() -> None:
    """100 epochs, drops by 10 at 30, 60 and 90."""
    tx = cifar10.make_optimizer(config(optimizer="spa-eta"), 10, imagenet.EPOCHS, imagenet.DROPS)
    x = jnp.ones(2)
    update = jax.jit(tx.update)
    for epoch, eta in ((0, 0.1), (29.9, 0.1), (30, 0.01), (60, 1e-3), (90, 1e-4)):
        state = optax.tree.set(tx.init(x), count=jnp.int32(10 * epoch))
        _, state = update(x, state, x)
        np.testing.assert_allclose(optax.tree.get(state, "eta"), eta, rtol=1e-5)


def test_defaults(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's."""
    found = []

    def stop(config: Any, *_: Any) -> None:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(imagenet, "make_program", stop)
    with pytest.raises(KeyboardInterrupt):
        imagenet.main(["--data-dir", str(tree)])
    paper = {"epochs": 100, "batch": 256, "batch_norm_group": 32, "image_size": 224}
    paper |= {"learning_rate": 1.0, "averaging": 0.1, "weight_decay": 1e-4}
    assert found == [config(model="resnet50", **paper)]


@pytest.mark.slow
def test_evaluation(tree: Path) -> None:
    """Against the model itself, on a set that no batch divides."""
    files = [imagenet.find(tree / part) for part in ("train", "val")]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program = imagenet.make_program(config(), *files, mesh, 2)
    state = program.init(0)
    model = imagenet.MODELS["small"](num_classes=3, rngs=nnx.Rngs(1))
    nnx.update(model, state.params, state.batch_stats)
    model.eval()
    images = [imagenet.decode(path.read_bytes(), 32, None) for path in files[1].paths]
    loss, correct = cifar10.sums(model(imagenet.normalize(np.stack(images))), files[1].labels)
    expected = {"test_loss": loss / 21, "test_accuracy": correct / 21, "test_left_out": 0}
    chex.assert_trees_all_close(program.evaluate(state), expected, rtol=1e-5)


@pytest.fixture
def broken(tree: Path, tmp_path: Path) -> Path:
    """A tree with one broken file of 36 to train on, and one of 21 to validate on."""
    for path in tree.rglob("*.*"):
        copy = tmp_path / "broken" / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        is_broken = path.match("train/flower/4.jpg") or path.match("val/flower/2.jpg")
        copy.write_bytes(path.read_bytes()[: 500 if is_broken else None])
    return tmp_path / "broken"


def test_too_many_left_out(tree: Path) -> None:
    """The share of images that may be left out is --max-left-out, and not one more."""
    files = imagenet.find(tree / "val")
    imagenet.check_left_out(files, "val", 1, 21, 1 / 21)
    message = r"at most 1.5 % of val images that cannot be decoded \(--max-left-out\), got 1 of 21"
    with pytest.raises(ValueError, match=rf"{message} \(4.76 %\), such as those that another pro"):
        imagenet.check_left_out(files, "val", 1, 21, 0.015)
    files.left_out[files.paths[3]] = "OSError: it is cut"
    with pytest.raises(
        ValueError, match=rf"{message} .*, such as {files.paths[3]}: OSError: it is"
    ):
        imagenet.check_left_out(files, "val", 1, 21, 0.015)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* left out:UserWarning")
def test_too_many_left_out_in_the_last_step(broken: Path) -> None:
    files = [imagenet.find(broken / part) for part in ("train", "val")]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program = imagenet.make_program(config(batch=4), *files, mesh, 2)
    (index,) = (i for i, path in enumerate(files[0].paths) if path.match("flower/4.jpg"))
    last = lambda epoch: np.random.default_rng((0, epoch)).permutation(36)[-4:]
    epoch = next(epoch for epoch in range(2, 1_000) if index in last(epoch))
    with pytest.raises(ValueError, match=r"train images .*, got 1 of 36 .*/train/flower/4.jpg: "):
        program.epoch(0, program.init(0), epoch, tqdm(disable=True))


@pytest.mark.filterwarnings("ignore:.* left out:UserWarning")
def test_too_many_left_out_is_found_early(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Of the training images within the epoch; of val before any training."""
    files = [imagenet.find(tree / part) for part in ("train", "val")]
    (tmp_path / "0.jpg").write_bytes(b"")
    nothing = [part._replace(paths=[tmp_path / "0.jpg"] * len(part.paths)) for part in files]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    batches, of_train = imagenet.batches, []

    def count(files: Any, *arguments: Any) -> Iterator[Any]:
        for batch in batches(files, *arguments):
            if files.paths == nothing[0].paths:
                of_train.append(batch)
            yield batch

    monkeypatch.setattr(imagenet, "batches", count)
    program = imagenet.make_program(config(batch=4), nothing[0], files[1], mesh, 2)
    with pytest.raises(
        ValueError, match=r"at most 1 % of train images .*, got 4 of 36 .*, such as"
    ):
        program.epoch(0, program.init(0), 1, tqdm(disable=True))
    assert len(of_train) == 2  # of 9: one more is on its way
    program = imagenet.make_program(config(batch=4), *nothing, mesh, 2)
    with pytest.raises(ValueError, match=r"at most 1 % of val images .*, got 21 of 21 \(100 %\)"):
        program.epoch(0, program.init(0), 1, tqdm(disable=True))
    assert len(of_train) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 18}, "--batch must be a multiple of 4 devices, got 18"),
        ({"batch_norm_group": 5}, "--batch must be a multiple of --batch-norm-group 5, got 16"),
        ({"epochs": 1, "batch": 36}, r"--scale-epochs must .*, got drops at steps \[0, 1, 1\]"),
    ],
)
def test_batches_that_do_not_divide(fields: Any, message: str, tree: Path) -> None:
    files = [imagenet.find(tree / part) for part in ("train", "val")]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    with pytest.raises(ValueError, match=message):
        imagenet.make_program(config(**fields), *files, mesh, 2)


# ------------------------------------------------------------------------------- the command line


def command(tree: Path, out: Path, *arguments: str) -> list[str]:
    given = [*SMALL, "--data-dir", str(tree), "--out", str(out), *arguments]
    return [sys.executable, str(SCRIPT), *given]


def environment(tmp_path: Path, num_devices: int = 1) -> dict[str, str]:
    """Few CPU devices a process; compiles once."""
    return {
        **os.environ,
        **host_devices(num_devices),
        "MPLBACKEND": "agg",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def final(run: Path, tree: Path) -> Any:
    """What the last checkpoint of a run holds, on the one device of this process."""
    files = [imagenet.find(tree / part) for part in ("train", "val")]
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return last_checkpoint(run, imagenet.make_program(config(), *files, mesh, 1).init(0))


@pytest.mark.slow
def test_command_line(broken: Path, tmp_path: Path) -> None:
    """End to end, with two broken files."""
    arguments = [*SMALL, "--data-dir", str(broken), "--out", str(tmp_path / "out")]
    arguments += ["--scale-epochs", "0.02", "--batch", "16"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ValueError, match=r"at most 1 % of val images .*, got 1 of 21"):
            imagenet.main(arguments)
        arguments += ["--max-left-out", "0.05"]  # with which the same run goes on
        text = imagenet.main(arguments)
    lines = metrics(tmp_path / "out" / "spa-gradual" / "seed0")
    assert [line["epoch"] for line in lines] == [1, 2]
    # 36 images fill 48 places, so that the broken one comes up once or twice.
    assert all(line["left_out"] in (1, 2) and len(line["losses"]) == 3 for line in lines)
    assert all(line["test_left_out"] == 1 for line in lines)
    assert (tmp_path / "out" / "imagenet.png").read_bytes().startswith(b"\x89PNG")
    assert "spa-gradual" in text
    with pytest.raises(ValueError, match=r"has another run in .*, with image_size 32 and not 24"):
        imagenet.main([*arguments, "--image-size", "24"])


@pytest.mark.slow
def test_stopped_and_resumed(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """In the middle of anything: the same bits in the end."""
    arguments = [*SMALL, "--data-dir", str(tree), "--scale-epochs", "0.03", "--out"]
    append = cifar10.Lines.append

    def stops(self: Any, line: Any) -> None:
        if line["epoch"] == 2:
            raise KeyboardInterrupt
        append(self, line)

    monkeypatch.setattr(cifar10.Lines, "append", stops)
    with pytest.raises(KeyboardInterrupt):
        imagenet.main([*arguments, str(tmp_path / "stopped")])
    monkeypatch.undo()
    for name in ("stopped", "whole"):
        imagenet.main([*arguments, str(tmp_path / name)])
    whole, stopped = (tmp_path / name / "spa-gradual" / "seed0" for name in ("whole", "stopped"))
    chex.assert_trees_all_equal(final(whole, tree), final(stopped, tree))
    assert metrics(whole) == metrics(stopped)
    assert len(metrics(whole)) == 3


@pytest.mark.slow
def test_measure(tree: Path, capsys: Any) -> None:
    imagenet.main([*SMALL, "--data-dir", str(tree), "--measure"])
    out = capsys.readouterr().out
    assert out.startswith("images/s: ")
    speeds = [float(word.replace(",", "")) for word in out.split() if word[0].isdigit()]
    assert len(speeds) == 2
    assert min(speeds) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", "0"], "--image-size must be finite and > 0, got 0"),
        (["--threads", "0"], "--threads must be finite and > 0, got 0"),
        (["--weight-decay", "nan"], "--weight-decay must be finite and >= 0, got nan"),
        (["--max-left-out", "1"], "--max-left-out must be >= 0 and < 1, got 1.0"),
        (["--max-left-out", "nan"], "--max-left-out must be >= 0 and < 1, got nan"),
        (["--batch-norm-group", "-1"], "--batch-norm-group must be >= 0, got -1"),
        (["--num-processes", "2"], "--coordinator, --num-processes and --process-id go together"),
        (["--optimizer", "adam"], "invalid choice: 'adam'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        imagenet.main(["--data-dir", "nowhere", *arguments])
    assert message in capsys.readouterr().err


def cluster(tree: Path, out: Path, tmp_path: Path, *arguments: str) -> list[Any]:
    """Two processes of two devices."""
    joined = ["--coordinator", free_address(), "--num-processes", "2", "--process-id"]
    return [
        subprocess.Popen(
            command(tree, out, *arguments, *joined, str(i)),
            env=environment(tmp_path, 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_killed_and_resumed(tree: Path, tmp_path: Path) -> None:
    """Two of two devices are one of eight; where one dies the other stops; a restart goes on.

    At a small rate, so that noise grows little. The noise is of many ulps: rounding now and then
    moves a maximum elsewhere, which changes the params a thousand times more than rounding itself,
    and noise must not miss that by chance.
    """
    arguments = ["--scale-epochs", "0.1", "--learning-rate", "0.001"]
    in_this = lambda out: imagenet.main(command(tree, out, *arguments)[2:])
    one, two, noisy = (
        tmp_path / name / "spa-gradual" / "seed0" for name in ("one", "two", "noisy")
    )
    in_this(tmp_path / "one")
    with noisy_optimizers(cifar10, ulps=16):
        in_this(tmp_path / "noisy")
        noisy_state = final(noisy, tree)
    # JAX catches the first signal; and the first process is the one that the others report to.
    for how, which in ((signal.SIGTERM, 1), (signal.SIGKILL, 0)):
        before = num_epochs(two)
        processes = cluster(tree, tmp_path / "two", tmp_path, *arguments)
        dies, other = processes[which], processes[1 - which]
        while other.poll() is None and num_epochs(two) <= before:
            time.sleep(0.01)
        dies.send_signal(how)
        start = time.monotonic()
        output = other.communicate()[0]
        assert time.monotonic() - start < 150  # 30 without a heartbeat, or 100 before jax 0.7
        assert other.returncode != 0
        dies.communicate()
        assert dies.returncode == -how
        assert "another task died" in output
        assert before < num_epochs(two) < 10
    processes = cluster(tree, tmp_path / "two", tmp_path, *arguments)
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "4 × cpu" in outputs[0]
    states = [final(two, tree), final(one, tree), noisy_state]
    assert [int(state.step) for state in states] == [30, 30, 30]
    assert_apart_by_rounding(*(state.params for state in states), at_most=3e-4)  # of another label
    losses = [[line["losses"] for line in metrics(run)] for run in (two, one, noisy)]
    assert_apart_by_rounding(*losses, at_most=3e-2)


@pytest.mark.slow
def test_two_processes_stop_alike(broken: Path, tmp_path: Path) -> None:
    """They decide on what all have left out, also where one of them has left out nothing."""
    processes = cluster(broken, tmp_path / "out", tmp_path)
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    message = "at most 1 % of val images that cannot be decoded (--max-left-out), got 1 of 21"
    assert all(message in output for output in outputs), outputs
    examples = "such as those that another process reports", "val/flower/2.jpg: OSError"
    for example, output in zip(examples, outputs, strict=True):
        assert example in output
