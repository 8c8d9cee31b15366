"""CIFAR-10 and images in folders: found, decoded, augmented and batched."""

from pathlib import Path
from typing import Any

import chex
import cifar_data
import imagenet_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paper_helpers import records
from PIL import Image
from scipy import stats
from sklearn.datasets import load_sample_images


def test_read(tmp_path: Path) -> None:
    (tmp_path / cifar_data.FOLDER).mkdir()
    for i, name in enumerate(cifar_data.TRAIN):
        (tmp_path / cifar_data.FOLDER / name).write_bytes(records(i, 100).tobytes())
    images, labels = cifar_data.read(tmp_path, cifar_data.TRAIN)
    assert images.shape == (500, 32, 32, 3)
    # By the published layout: a label, then the red, the green and the blue plane, by
    # rows.
    one = records(3, 100)[7]
    assert labels[307] == one[0]
    for row, column, channel in [(0, 0, 0), (0, 31, 1), (5, 6, 2), (31, 31, 1)]:
        assert (
            images[307, row, column, channel]
            == one[1 + 1024 * channel + 32 * row + column]
        )


def test_augment() -> None:
    image = np.random.default_rng(0).integers(1, 256, (32, 32, 3), np.uint8)
    augmented = jax.jit(cifar_data.augment)(
        jax.random.key(0), np.stack([image] * 3_000)
    )
    framed = [np.pad(way, ((4, 4), (4, 4), (0, 0))) for way in (image, image[:, ::-1])]
    crops = {
        frame[i : i + 32, j : j + 32].tobytes(): (flipped, i, j)
        for flipped, frame in enumerate(framed)
        for i in range(9)
        for j in range(9)
    }
    found = [
        crops[one.tobytes()] for one in np.asarray(augmented)
    ]  # each is one of the 162
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 162
    # Uniform: χ² of 161 degrees of freedom is within 6 standard deviations of its mean.
    assert abs(stats.chisquare(counts).statistic - 161) < 6 * np.sqrt(2 * 161)


def test_find(tree: Path) -> None:
    files = imagenet_data.find(tree / "train")
    assert files.classes == ["a temple", "flower", "upside down"]
    assert [path.name for path in files.paths[:3]] == ["0.jpg", "1.JPEG", "10.jpg"]
    np.testing.assert_array_equal(files.labels, np.repeat([0, 1, 2], 12))
    assert imagenet_data.digest(
        imagenet_data.find(tree / "val")
    ) != imagenet_data.digest(files)
    with pytest.raises(ValueError, match="a folder for each class, got 3"):
        imagenet_data.find(tree / "val", ["a temple", "cat", "flower"])


def test_random_crop() -> None:
    """8 to 100 % of the area, from 3:4 to 4:3, anywhere; ten tries, then the middle."""
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet_data.random_crop(400, 400, rng) for _ in range(4_000)])
    left, upper, right, lower = boxes.T
    assert (boxes.min(), boxes.max()) == (0, 400)
    area, ratio = (
        (right - left) * (lower - upper) / 400**2,
        (right - left) / (lower - upper),
    )
    # Sides are whole numbers.
    np.testing.assert_allclose(
        (area.min(), ratio.min(), ratio.max()), (0.08, 3 / 4, 4 / 3), 0.02
    )
    small = area < 0.4  # these always fit, and are uniform
    assert abs(np.mean(area[small]) - 0.24) < 0.01
    assert abs(np.log(ratio[small]).mean()) < 0.02
    assert abs(((left + right) / 2)[small].mean() - 200) < 6
    # 20:1 fits no shape: the middle of 4:3, as high as the image.
    assert imagenet_data.random_crop(2_000, 100, rng) == (933, 0, 1066, 100)


def test_decode_the_middle(tmp_path: Path) -> None:
    """As `resize(256)` of the shorter side, then the middle 224, but in one go."""

    def decoded(image: Image.Image, name: str, size: int) -> np.ndarray:
        image.save(tmp_path / name, quality=95)
        return imagenet_data.decode((tmp_path / name).read_bytes(), size, None).astype(
            float
        )

    photograph = Image.fromarray(load_sample_images().images[0])
    width, height = photograph.size
    resized = photograph.resize(
        (round(256 * width / height), 256), Image.Resampling.BILINEAR
    )
    left = (resized.width - 224) // 2
    expected = np.asarray(resized.crop((left, 16, left + 224, 240)), float)
    assert np.abs(decoded(photograph, "it.png", 224) - expected).mean() < 4
    # A JPEG, decoded at a fraction of its size, is the same to what compression loses.
    photograph = photograph.crop((0, 0, 501, 377))  # no fraction of which is whole
    of_png, of_jpg = (decoded(photograph, name, 32) for name in ("it.png", "it.jpg"))
    assert np.abs(of_png - of_jpg).mean() < 6


def read(files: Any, order: Any, batch: int, **kwargs: Any) -> list[Any]:
    given = {"size": 16, "seed": (0, 1), "num_threads": 3, **kwargs}
    return list(imagenet_data.batches(files, np.array(order), batch, **given))


def test_batches_do_not_depend_on_processes_or_threads(
    tree: Path, monkeypatch: Any
) -> None:
    files = imagenet_data.find(tree / "train")
    order = np.random.default_rng(0).permutation(36)[:32]
    whole = read(files, order, 8)
    labels = [batch["labels"] for batch in whole]
    np.testing.assert_array_equal(labels, files.labels[order].reshape(4, 8))
    chex.assert_trees_all_equal(read(files, order, 8, num_threads=1), whole)
    assert not np.array_equal(
        read(files, order, 8, seed=(0, 2))[0]["images"], whole[0]["images"]
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(read(files, order, 8))
    for batch, *halves in zip(whole, *parts, strict=True):
        together = jax.tree.map(lambda *values: np.concatenate(values), *halves)
        chex.assert_trees_all_equal(together, batch)


def test_a_broken_file(tree: Path, tmp_path: Path) -> None:
    files = imagenet_data.find(tree / "train")
    path = tmp_path / "broken.jpg"
    path.write_bytes(files.paths[1].read_bytes()[:700])
    with pytest.raises(ValueError, match=r"broken.jpg cannot be decoded"):
        read(files._replace(paths=[path, *files.paths[1:]]), [3, 0, 5, -1], 4)
    (batch,) = read(files, [3, 5, -1], 3)
    np.testing.assert_array_equal(batch["labels"], [0, 0, -1])


def test_normalize() -> None:
    black_and_white = jnp.array([[0, 0, 0], [255, 255, 255]], jnp.uint8)
    expected = [
        [-2.1179, -2.0357, -1.8044],
        [2.2489, 2.4286, 2.64],
    ]  # as everywhere in PyTorch
    np.testing.assert_allclose(
        imagenet_data.normalize(black_and_white), expected, atol=1e-4
    )
