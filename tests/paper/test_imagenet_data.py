"""Images in folders: found, decoded, augmented and batched."""

import io
from pathlib import Path
from typing import Any

import chex
import imagenet_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images


def test_find(tree: Path, tmp_path: Path) -> None:
    files = imagenet_data.find(tree / "train")
    assert files.classes == ["a temple", "flower", "upside down"]
    assert [path.name for path in files.paths[:3]] == ["0.jpg", "1.JPEG", "10.jpg"]
    np.testing.assert_array_equal(files.labels, np.repeat([0, 1, 2], 12))
    message = "must have a folder for each class, got"
    with pytest.raises(ValueError, match=f"val {message} 3"):
        imagenet_data.find(tree / "val", ["a temple", "cat", "flower"])
    with pytest.raises(ValueError, match=f"{message} 0"):
        imagenet_data.find(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "README.txt").write_text("no image")
    (tmp_path / "one" / "._0.jpg").write_text("what a Mac puts beside 0.jpg")
    with pytest.raises(ValueError, match=r"one must have images \(.jpeg, .jpg, .png\)"):
        imagenet_data.find(tmp_path)


def test_digest(tree: Path) -> None:
    files = imagenet_data.find(tree / "val")
    assert imagenet_data.digest(files) == imagenet_data.digest(imagenet_data.find(tree / "val"))
    assert imagenet_data.digest(files) != imagenet_data.digest(imagenet_data.find(tree / "train"))


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


@pytest.mark.parametrize("content", ["cut", b"", b"<html>"])
def test_a_broken_file(content: Any, tree: Path, tmp_path: Path) -> None:
    files = imagenet_data.find(tree / "train")
    path = tmp_path / "broken.jpg"
    path.write_bytes(files.paths[1].read_bytes()[:700] if content == "cut" else content)
    files = files._replace(paths=[path, *files.paths[1:]])
    (batch,) = read(files, [3, 5, -1], 3)
    np.testing.assert_array_equal(batch["labels"], [0, 0, -1])
    with pytest.raises(ValueError, match=r"broken.jpg cannot be decoded: "):
        read(files, [3, 0, 5, -1], 4)


def test_normalize() -> None:
    black_and_white = jnp.array([[0, 0, 0], [255, 255, 255]], jnp.uint8)
    expected = [[-2.1179, -2.0357, -1.8044], [2.2489, 2.4286, 2.64]]  # as everywhere in PyTorch
    np.testing.assert_allclose(imagenet_data.normalize(black_and_white), expected, atol=1e-4)
