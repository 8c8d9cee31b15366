"""Storage that others proposed, re-implemented in few lines: 8-bit moments, and split
params.

- `DYNAMIC`: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
  arXiv:2110.02861, Section 2; blocks of 256, as in bitsandbytes and torchao.
- `LINEAR`: Gupta et al., Effective Quantization of Muon Optimizer States, 2025,
  arXiv:2509.23106.
- `COMPANDED`: Gonzalez Ortiz et al., FlashOptim, 2026, arXiv:2602.23349, with groups of
  32.
- `with_low_half`: Kalamkar et al., Optimizing Deep Learning Recommender Systems
  Training on CPU Cluster Architectures, 2020, arXiv:2005.04680, "Split-SGD"; FlashOptim
  at 32 bits has the same, and by default (24 bits) 8 bits of that half.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

F32, BF16 = jnp.float32, jnp.bfloat16
SMALLEST = 4_096  # elements of an array that is stored in 8 bits, as in bitsandbytes
Tx = optax.GradientTransformation


class Codec(NamedTuple):
    """How numbers x are stored: each block as code(f(x) / s) with s = max |f(x)|."""

    block: int
    code: Callable[[jax.Array], jax.Array]  # from [−1, 1] to 8 bits
    value: Callable[[jax.Array], jax.Array]  # and back
    f: Callable[[jax.Array], jax.Array] = lambda x: x
    inverse: Callable[[jax.Array], jax.Array] = lambda x: x
    scale_dtype: Any = F32


class Codes(NamedTuple):
    """An array in 8 bits."""

    codes: jax.Array  # of its shape
    scales: jax.Array  # s of each block


def encode(codec: Codec, x: jax.Array) -> Codes:
    flat = codec.f(x.astype(F32)).ravel()
    blocks = jnp.pad(flat, (0, -flat.size % codec.block)).reshape(-1, codec.block)
    scales = jnp.abs(blocks).max(1).astype(codec.scale_dtype)
    unit = blocks / jnp.where(scales > 0, scales, 1).astype(F32)[:, None]
    codes = codec.code(jnp.clip(unit, -1, 1)).ravel()[: x.size]
    return Codes(codes.reshape(x.shape), scales)


def decode(codec: Codec, stored: Codes) -> jax.Array:
    codes, scales = stored
    scales = jnp.repeat(scales.astype(F32), codec.block)[: codes.size].reshape(
        codes.shape
    )
    return codec.inverse(codec.value(codes) * scales)


def dynamic(signed: bool) -> Codec:
    """256 values: the smaller a number, the fewer digits it has."""
    means = []
    for i in range(7):
        ends = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        means.append(10.0 ** (i - 6) * (ends[:-1] + ends[1:]) / 2)
    positive = np.concatenate(means)
    table = np.sort(np.concatenate([positive, -positive if signed else [], [0, 1]]))
    # Of NumPy, since an array of JAX would choose the platform before the command line
    # does.
    middles = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    return Codec(
        256,
        lambda x: jnp.searchsorted(middles, x).astype(jnp.uint8),
        lambda codes: jnp.asarray(table, F32)[codes],
    )


def to_integers(x: jax.Array, dtype: Any = jnp.int8) -> jax.Array:
    """From [−1, 1], with steps of equal size."""
    return jnp.round(jnp.iinfo(dtype).max * x).astype(dtype)


# From a field of Optax's states to how it is stored. m is companded by y = 2 x / (1 +
# |x|).
DYNAMIC = {"mu": dynamic(True), "nu": dynamic(False)}
LINEAR = {"mu": Codec(2_048, to_integers, lambda codes: codes / 127)}
COMPANDED = {
    "mu": Codec(
        32,
        lambda x: to_integers(2 * x / (1 + jnp.abs(x))),
        lambda codes: codes / 127 / (2 - jnp.abs(codes / 127)),
        scale_dtype=jnp.float16,
    ),
    "nu": Codec(
        32,
        lambda x: to_integers(x, jnp.uint8),
        lambda codes: codes / 255,
        jnp.sqrt,
        jnp.square,
        jnp.float16,
    ),
}


def in_codes(base: Tx, codecs: dict[str, Codec]) -> Tx:
    """An optimizer with these fields of its state in 8 bits."""

    def map_fields(function: Callable[[Codec, Any], Any], state: Any) -> Any:
        def leaf(path: Any, x: Any) -> Any:
            names = [
                name
                for entry in path
                if (name := getattr(entry, "name", None)) in codecs
            ]
            size = x.codes.size if isinstance(x, Codes) else x.size
            return function(codecs[names[-1]], x) if names and size >= SMALLEST else x

        return jax.tree_util.tree_map_with_path(
            leaf, state, is_leaf=lambda node: isinstance(node, Codes)
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = base.update(updates, map_fields(decode, state), params)
        return updates, map_fields(encode, state)

    return Tx(lambda params: map_fields(encode, base.init(params)), update)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 as the nearest bfloat16 and what its bits lack, 16 bits each."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = (bits + 0x8000) >> 16
    low = jax.lax.bitcast_convert_type(bits - (high << 16), jnp.int32).astype(jnp.int16)
    return jax.lax.bitcast_convert_type(high.astype(jnp.uint16), BF16), low


def join(high: jax.Array, low: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits + low.astype(jnp.uint32), F32)


def with_low_half(base: Tx, dtype: Any = jnp.int16) -> Tx:
    """Trains bfloat16 params as float32: the state has their lower halves, or 127/2^15
    of those.
    """
    unit = 1 if dtype == jnp.int16 else 2**15 / 127

    def low_half(x: jax.Array) -> jax.Array:
        return jnp.round(split(x)[1] / unit).astype(dtype)

    def whole(high: jax.Array, low: jax.Array) -> jax.Array:
        return join(high, jnp.round(low * unit).astype(jnp.int32))

    def change(x: jax.Array, old: jax.Array) -> jax.Array:
        """Exact in float32, unless one of the two bfloat16 numbers is tiny."""
        return split(x)[0].astype(F32) - old.astype(F32)

    def init(params: Any) -> Any:
        x = optax.tree.cast(params, F32)
        return base.init(x), jax.tree.map(low_half, x)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        of_base, low = state
        x = jax.tree.map(whole, params, low)
        x, of_base = common.update(base, optax.tree.cast(updates, F32), x, of_base)
        u = jax.tree.map(change, x, params)
        return u, (of_base, jax.tree.map(low_half, x))

    return Tx(init, update)
