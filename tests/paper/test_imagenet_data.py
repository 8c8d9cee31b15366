"""Images in folders: found, decoded, augmented, batched, and left out if they are broken."""

import contextlib
import errno
import io
import os
import struct
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import imagenet_data
import jax
import jax.numpy as jnp
import numpy as np
import photographs
import pytest
from PIL import EpsImagePlugin, Image
from sklearn.datasets import load_sample_images


def test_find(tree: Path, tmp_path: Path) -> None:
    files = imagenet_data.find(tree / "train")
    assert files.classes == ["a temple", "flower", "upside down"]
    assert [path.name for path in files.paths[:3]] == ["0.jpg", "1.JPEG", "10.jpg"]
    np.testing.assert_array_equal(files.labels, np.repeat([0, 1, 2], 12))
    with pytest.raises(ValueError, match=r"--data-dir must have a folder test, got none at"):
        imagenet_data.find(tree / "test")
    with pytest.raises(ValueError, match="val must have the training classes, got no cat"):
        imagenet_data.find(tree / "val", ["a temple", "cat", "flower", "upside down"])
    with pytest.raises(ValueError, match="val must have the training classes, got also flower"):
        imagenet_data.find(tree / "val", ["a temple", "upside down"])
    (tmp_path / ".ipynb_checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"must have a folder of images for each class, got none"):
        imagenet_data.find(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "README.txt").write_text("no image")
    (tmp_path / "one" / "._0.jpg").write_text("what a Mac puts beside 0.jpg")
    with pytest.raises(ValueError, match=r"one must have images \(.jpeg, .jpg, .png\)"):
        imagenet_data.find(tmp_path)


def test_find_what_is_no_file(tree: Path, tmp_path: Path) -> None:
    """Each would hang the reader or be missed; links to files and folders are as good as these."""
    (tmp_path / "one").symlink_to(tree / "train" / "flower")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "0.PNG").symlink_to(tree / "train" / "flower" / "0.jpg")
    assert len(imagenet_data.find(tmp_path).paths) == 13
    odd = tmp_path / "two" / "x.jpg"
    odd.mkdir()
    with pytest.raises(ValueError, match=r"x\.jpg must be a file, got a folder"):
        imagenet_data.find(tmp_path)
    odd.rmdir()
    for place in (odd, tmp_path / "three"):
        for make in (os.mkfifo, lambda path: path.symlink_to("nowhere")):
            make(place)
            with pytest.raises(ValueError, match=rf"{place} must be a file, a folder or a link to"):
                imagenet_data.find(tmp_path)
            place.unlink()
    odd.symlink_to(odd)
    with pytest.raises(OSError, match=r"symbolic links: .*x\.jpg"):
        imagenet_data.find(tmp_path)


def test_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "NUM_TRAIN", 3)
    monkeypatch.setattr(photographs, "NUM_VAL", 2)
    photographs.main([str(tmp_path)])
    training = imagenet_data.find(tmp_path / "train")
    assert len(training.paths) == 3 * 3
    assert len(imagenet_data.find(tmp_path / "val", training.classes).paths) == 3 * 2
    with Image.open(training.paths[0]) as image:
        assert image.size == (500, 375)


def test_digest(tree: Path, tmp_path: Path) -> None:
    files = imagenet_data.find(tree / "val")
    assert imagenet_data.digest(files) == imagenet_data.digest(imagenet_data.find(tree / "val"))
    assert imagenet_data.digest(files) != imagenet_data.digest(imagenet_data.find(tree / "train"))
    paths = [tmp_path / os.fsdecode(b"\xe9t\xe9.jpg"), *files.paths[1:]]  # no UTF-8
    with contextlib.suppress(OSError):  # where there is no such name
        paths[0].symlink_to("nowhere")
        assert imagenet_data.digest(files) != imagenet_data.digest(files._replace(paths=paths))


def test_random_crop() -> None:
    """8 to 100 % of the area, from 3:4 to 4:3, anywhere; ten tries, then the middle."""
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet_data.random_crop(400, 400, rng) for _ in range(4_000)])
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
    assert imagenet_data.random_crop(2_000, 100, rng) == (933, 0, 1066, 100)
    assert imagenet_data.random_crop(100, 2_000, rng) == (0, 933, 100, 1066)


def test_decode_the_middle(tmp_path: Path) -> None:
    """As `resize(256)` of the shorter side, then the middle 224, but in one go."""
    photograph = Image.fromarray(load_sample_images().images[0])
    photograph.save(tmp_path / "it.png")
    found = imagenet_data.decode((tmp_path / "it.png").read_bytes(), 224, None).astype(float)
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
            imagenet_data.decode((tmp_path / name).read_bytes(), size, None).astype(float)
            for name in ("it.png", "it.jpg")
        )
        error = lambda shift: np.abs(of_png - np.roll(of_jpg, shift, 1)).mean()  # noqa: B023
        assert error(0) < 6
        assert 2 * error(0) < error(1)


def test_decode_at_random(tree: Path) -> None:
    content = imagenet_data.find(tree / "train").paths[0].read_bytes()
    decode = lambda seed: imagenet_data.decode(content, 32, np.random.default_rng(seed))
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
    pixels = imagenet_data.decode(saved(image.convert(mode), format=format), 24, None)
    assert pixels.shape == (24, 24, 3)
    near = imagenet_data.decode(saved(image, format="PNG"), 24, None).mean(2)
    assert np.corrcoef(near.ravel(), pixels.mean(2).ravel())[0, 1] > 0.7


@pytest.mark.parametrize(("mode", "transparency"), [("RGB", (9, 9, 9)), ("P", b"\0"), ("L", 7)])
def test_decode_drops_alpha(mode: str, transparency: Any) -> None:
    image = Image.fromarray(load_sample_images().images[1][:60, :80]).convert(mode)
    files = [saved(image, format="PNG")]
    files.append(saved(image, format="PNG", transparency=transparency))
    if mode != "P":
        image.putalpha(7)
        files.append(saved(image, format="PNG"))
    first, *others = (imagenet_data.decode(file, 24, None) for file in files)
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
        images.append(imagenet_data.decode(png((80, 60), bits, color, rows), 24, None))
    assert np.ptp(images[0]) > 50
    np.testing.assert_array_equal(*images)


def test_decode_rounds_sixteen_bits() -> None:
    for value in (0, 128, 129, 32_767, 65_406, 65_407, 65_535):
        rows = 8 * (b"\0" + 8 * struct.pack(">H", value))
        pixels = imagenet_data.decode(png((8, 8), 16, 0, rows), 4, None)
        np.testing.assert_array_equal(pixels, round(value / 257))


def test_decode_refuses_unknown_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_data, "FORMATS", ("TIFF",))
    for mode in ("F", "I"):  # of values that may go from anywhere to anywhere
        content = saved(Image.new(mode, (9, 9)), format="TIFF")
        with pytest.raises(ValueError, match=rf"the mode must be one of 1, CMYK, .*, got {mode}"):
            imagenet_data.decode(content, 4, None)


def test_decode_takes_the_first_picture_as_it_is_stored() -> None:
    """Phones put two into a JPEG, and tell by EXIF how to turn it."""
    image = Image.fromarray(load_sample_images().images[1][:60, :80])
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90°
    files = [saved(image, format="JPEG"), saved(image, format="JPEG", exif=exif)]
    other = Image.new("RGB", (80, 60))
    files.append(saved(image, format="MPO", save_all=True, append_images=[other]))
    assert b"MPF" in files[2]
    pixels = [imagenet_data.decode(file, 24, None) for file in files]
    np.testing.assert_array_equal(pixels[0], pixels[1])
    np.testing.assert_array_equal(pixels[0], pixels[2])


def read(files: Any, order: Any, batch: int, **kwargs: Any) -> list[Any]:
    given = {"size": 16, "seed": (0, 1), "num_threads": 3, **kwargs}
    return list(imagenet_data.batches(files, np.array(order), batch, **given))


def test_batches_do_not_depend_on_processes_or_threads(tree: Path, monkeypatch: Any) -> None:
    files = imagenet_data.find(tree / "train")
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
    files = imagenet_data.find(tree / "train")
    path = tmp_path / "broken.jpg"
    path.write_bytes(files.paths[1].read_bytes()[:700] if content == "cut" else content)
    files = files._replace(paths=[path, *files.paths[1:]])
    with pytest.warns(UserWarning, match=r"broken.jpg is left out: "):
        (batch,) = read(files, [3, 0, 5, -1], 4)
    np.testing.assert_array_equal(batch["labels"], [0, -1, 0, -1])
    assert batch["images"][0].any()
    assert not batch["images"][1].any()


def written(folder: Path, contents: list[bytes]) -> imagenet_data.Files:
    """Images of one class."""
    paths = [folder / f"{i}.jpg" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return imagenet_data.Files(paths, np.zeros(len(paths), np.int32), ["it"], {})


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

    monkeypatch.setattr(imagenet_data, "decode", fail)
    with pytest.raises(MemoryError):
        read(imagenet_data.find(tree / "train"), [0, 1], 2)


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


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_data, "WAITS", (0.01, 0.01, 0.01))


@pytest.mark.usefixtures("_short_waits")
def test_data_gone_for_a_moment(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """No image is taken for broken."""
    files = imagenet_data.find(tree / "train")
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
    files = imagenet_data.find(tree / "train")
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
    files = imagenet_data.find(tree / "train")
    files = files._replace(paths=[path.with_suffix(".gone") for path in files.paths])
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    reader = imagenet_data.Reader(files, 16, np.arange(36), np.arange(36), (0, 1))
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(reader.__getitem__, k) for k in range(36)]
    assert all(isinstance(future.exception(), FileNotFoundError) for future in futures)
    assert len(imagenet_data.WAITS) <= len(waits) <= 2 * len(imagenet_data.WAITS)


def test_normalize() -> None:
    black_and_white = jnp.array([[0, 0, 0], [255, 255, 255]], jnp.uint8)
    expected = [[-2.1179, -2.0357, -1.8044], [2.2489, 2.4286, 2.64]]  # as everywhere in PyTorch
    np.testing.assert_allclose(imagenet_data.normalize(black_and_white), expected, atol=1e-4)


def test_too_many_left_out(tree: Path) -> None:
    """The share of images that may be left out is --max-left-out, and not one more."""
    files = imagenet_data.find(tree / "val")
    imagenet_data.check_left_out(files, "val", 1, 21, 1 / 21)
    message = r"at most 1.5 % of val images that cannot be decoded \(--max-left-out\), got 1 of 21"
    with pytest.raises(ValueError, match=rf"{message} \(4.76 %\), such as those that another pro"):
        imagenet_data.check_left_out(files, "val", 1, 21, 0.015)
    files.left_out[files.paths[3]] = "OSError: it is cut"
    with pytest.raises(
        ValueError, match=rf"{message} .*, such as {files.paths[3]}: OSError: it is"
    ):
        imagenet_data.check_left_out(files, "val", 1, 21, 0.015)
