import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

# Before jax is imported: eight CPU devices for the sharding tests, and a compiler that optimizes
# little, does not cut small programs into pieces, and is several times faster. Flags given by the
# user come last, and win.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def known(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags that the installed XLA knows. It ends the process at any other, so ask in one."""
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    if subprocess.run(start, env=environment, capture_output=True).returncode == 0:
        return flags
    return () if len(flags) == 1 else tuple(flag for each in flags for flag in known((each,)))


if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit them
    os.environ["XLA_FLAGS"] = " ".join((*known(FLAGS), os.environ.get("XLA_FLAGS", "")))
os.environ.setdefault("MPLBACKEND", "agg")
# What takes a second to compile is compiled once, by whichever process comes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name

import jax
import pytest

# Catches a float32 schedule that meets bfloat16 params.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """What users have."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def compiles_float16() -> bool:
    if jax.__version_info__ < (0, 7):  # XLA aborts where it can't, so in a process of its own
        program = "import jax; jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0)"
        return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
    try:
        jax.jit(lambda x: x.astype(jax.numpy.float16))(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("float16") and not compiles_float16():
        pytest.skip("XLA does not compile float16 conversions for this instruction set")
