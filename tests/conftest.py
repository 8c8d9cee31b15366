import os

# Before jax is imported: eight CPU devices, for the sharding tests.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("MPLBACKEND", "agg")

import jax

# Catches a float32 schedule that meets bfloat16 params.
jax.config.update("jax_numpy_dtype_promotion", "strict")
