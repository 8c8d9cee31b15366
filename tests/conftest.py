import os
import tempfile

# Before jax is imported: eight CPU devices, for the sharding tests.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("MPLBACKEND", "agg")
# What takes a second to compile is compiled once, by whichever process comes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name

import jax

# Catches a float32 schedule that meets bfloat16 params.
jax.config.update("jax_numpy_dtype_promotion", "strict")
