"""The flags of XLA that the tests run with."""

import os
import subprocess
import sys

DEVICES = "--xla_force_host_platform_device_count=8"  # for the sharding tests
# A compiler that optimizes little, does not cut small programs into pieces, and is
# several times faster.
FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def known(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags that the installed XLA knows. It ends the process at any other, so ask
    in one."""
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    if subprocess.run(start, env=environment, capture_output=True).returncode == 0:
        return flags
    return (
        ()
        if len(flags) == 1
        else tuple(flag for each in flags for flag in known((each,)))
    )


def with_ours(given: str) -> str:
    """The flags of the tests before those of the user, who may choose how much to
    optimize."""
    ours = () if "--xla_backend_optimization_level" in given else known(FAST)
    return " ".join((DEVICES, *ours, given))
