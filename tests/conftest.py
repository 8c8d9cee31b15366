import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from xla_flags import with_ours

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit them
    os.environ["XLA_FLAGS"] = with_ours(
        os.environ.get("XLA_FLAGS", "")
    )  # before jax is imported
os.environ.setdefault("MPLBACKEND", "agg")
# What takes a second to compile is compiled once, by whichever process comes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name

import jax
import pytest

collect_ignore = ["mutants.py"]  # needs cosmic-ray
# Catches a float32 schedule that meets bfloat16 params.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """What users have."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def compiles_float16() -> bool:
    if jax.__version_info__ < (
        0,
        7,
    ):  # XLA aborts where it can't, so in a process of its own
        program = "import jax; jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0)"
        return (
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True
            ).returncode
            == 0
        )
    try:
        jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("float16") and not compiles_float16():
        pytest.skip("XLA does not compile float16 conversions for this instruction set")
