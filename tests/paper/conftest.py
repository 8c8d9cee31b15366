import os
import signal
from collections.abc import Iterator
from pathlib import Path

import cifar_data
import jax
import numpy as np
import pytest
from paper_helpers import records
from PIL import Image
from sklearn.datasets import load_sample_images
from worker import small_networks

# Programs of these small networks are compiled once, also if that takes less than a
# second.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # of other processes
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these are slow: they guard experiments, and not the package."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _as_users(standard_promotion: None) -> Iterator[None]:
    del standard_promotion
    of_pytest = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, of_pytest)


@pytest.fixture
def _small_networks() -> Iterator[None]:
    with small_networks():
        yield


@pytest.fixture(scope="session")
def data_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where `train_cifar10.py` finds the files of CIFAR-10's binary version, with other
    images."""
    folder = tmp_path_factory.mktemp("data")
    for i, name in enumerate(cifar_data.TRAIN + cifar_data.TEST):
        (folder / name).write_bytes(records(i).tobytes())
    return ["--data-dir", str(folder)]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in folders like ImageNet's: 36 to train on, and 21 to validate on."""
    folder, rng = tmp_path_factory.mktemp("tree"), np.random.default_rng(0)
    temple, flower = load_sample_images().images
    classes = {"a temple": temple, "flower": flower, "upside down": flower[::-1]}
    for part, num in (("train", 12), ("val", 7)):
        for name, photograph in classes.items():
            (folder / part / name).mkdir(parents=True)
            for i in range(num):
                height, width = rng.integers(40, 90, 2, endpoint=True)
                top, left = rng.integers(
                    0, np.subtract(photograph.shape[:2], (height, width)) + 1
                )
                piece = Image.fromarray(
                    photograph[top : top + height, left : left + width]
                )
                piece.save(
                    folder / part / name / f"{i}.{'JPEG' if i % 2 else 'jpg'}",
                    quality=90,
                )
    return folder
