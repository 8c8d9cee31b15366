import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from xla_flags import with_ours

# XLA reads its flags when jax is imported. The workers of xdist inherit them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XLA_FLAGS"] = with_ours(os.environ.get("XLA_FLAGS", ""))
os.environ.setdefault("MPLBACKEND", "agg")
# A program is compiled by one worker, for all.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest

# What jax keeps makes each pass of the garbage collector slow.
gc.set_threshold(50_000, 20, 50)
collect_ignore = ["mutants.py"]  # needs cosmic-ray
# Catches a float32 schedule that meets bfloat16 params.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """The promotion of dtypes that users have."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def compiles_float16() -> bool:
    """Whether XLA compiles conversions to float16 for this processor."""
    if jax.__version_info__ < (0, 7):  # there XLA would abort this process
        program = "import jax; jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0)"
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True).returncode == 0
    try:
        jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("float16") and not compiles_float16():
        pytest.skip("XLA does not compile float16 conversions for this instruction set")
