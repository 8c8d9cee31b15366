"""CIFAR-10: its files and augmentation."""

from pathlib import Path

import cifar_data
import jax
import numpy as np
from paper_helpers import records
from scipy import stats


def test_read(tmp_path: Path) -> None:
    (tmp_path / cifar_data.FOLDER).mkdir()
    for i, name in enumerate(cifar_data.TRAIN):
        (tmp_path / cifar_data.FOLDER / name).write_bytes(records(i, 100).tobytes())
    images, labels = cifar_data.read(tmp_path, cifar_data.TRAIN)
    assert images.shape == (500, 32, 32, 3)
    # By the published layout: a label, then the red, the green and the blue plane, by rows.
    one = records(3, 100)[7]
    assert labels[307] == one[0]
    for row, column, channel in [(0, 0, 0), (0, 31, 1), (5, 6, 2), (31, 31, 1)]:
        assert images[307, row, column, channel] == one[1 + 1024 * channel + 32 * row + column]


def test_augment() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (32, 32, 3), np.uint8)
    augmented = jax.jit(cifar_data.augment)(jax.random.key(0), np.stack([image] * 3_000))
    framed = [np.pad(way, ((4, 4), (4, 4), (0, 0))) for way in (image, image[:, ::-1])]
    crops = {
        frame[i : i + 32, j : j + 32].tobytes(): (flipped, i, j)
        for flipped, frame in enumerate(framed)
        for i in range(9)
        for j in range(9)
    }
    found = [crops[one.tobytes()] for one in np.asarray(augmented)]  # each is one of the 162
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 162
    # Uniform: χ² of 161 degrees of freedom is within 6 standard deviations of its mean.
    assert abs(stats.chisquare(counts).statistic - 161) < 6 * np.sqrt(2 * 161)
