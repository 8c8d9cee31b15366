"""The flags of XLA that the tests run with."""

import os
import subprocess
import sys

DEVICES = "--xla_force_host_platform_device_count=8"  # for the sharding tests
# With these XLA optimizes little, but compiles several times faster.
FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
)


def known(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags that the installed XLA knows.

    It ends the process at any other, so each try is a process of its own.
    """
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    tries = [
        subprocess.Popen(
            start,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag},
            stderr=subprocess.DEVNULL,
        )
        for flag in flags
    ]
    return tuple(
        flag for flag, each in zip(flags, tries, strict=True) if each.wait() == 0
    )


def with_ours(given: str) -> str:
    """The flags of the tests, then those of the user, which count.

    A user who chooses how much to optimize gets none of the fast flags.
    """
    ours = () if "--xla_backend_optimization_level" in given else known(FAST)
    return " ".join((DEVICES, *ours, given))
