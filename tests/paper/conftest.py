import os
import signal
from collections.abc import Iterator
from pathlib import Path

import cifar_data
import jax
import photographs
import pytest
from paper_helpers import md5, records, tar
from worker import small_networks

# Programs of these small networks are compiled once, also if that takes less than a second.
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
def files() -> dict[str, bytes]:
    """The files of CIFAR-10's binary version, with other images."""
    return {name: records(i).tobytes() for i, name in enumerate(cifar_data.FILES)}


@pytest.fixture(scope="session")
def archive(files: dict[str, bytes]) -> bytes:
    return tar({f"{cifar_data.FOLDER}/{name}": content for name, content in files.items()})


@pytest.fixture(scope="session")
def data_options(archive: bytes, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where `train_cifar10.py` finds the archive."""
    folder = tmp_path_factory.mktemp("data")
    (folder / cifar_data.ARCHIVE).write_bytes(archive)
    return ["--data-dir", str(folder), "--md5", md5(archive)]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in folders like ImageNet's: 36 to train on, and 21 to validate on."""
    folder = tmp_path_factory.mktemp("tree")
    photographs.write_tree(folder, 12, 7, (40, 40), (90, 90))
    return folder


@pytest.fixture
def broken(tree: Path, tmp_path: Path) -> Path:
    """The same tree with one broken file in each part."""
    for path in tree.rglob("*.*"):
        copy = tmp_path / "broken" / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        is_broken = path.match("train/flower/4.jpg") or path.match("val/flower/2.jpg")
        copy.write_bytes(path.read_bytes()[: 500 if is_broken else None])
    return tmp_path / "broken"
