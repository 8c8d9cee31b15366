"""Dtypes to train and to compute in, and unbiased stochastic rounding for storage."""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree, UInt32

from spa_optax._trees import is_trained, map_trained

Seed = UInt32[Array, ""]
# What random words are for.
Stream = enum.IntEnum("Stream", "PARAMS_AND_Z SECOND_MOMENT MOMENTUM", start=0)


def has_narrow(params: PyTree) -> bool:
    """Whether there are params of 16 bits or fewer, for which z is a master copy."""
    is_narrow = lambda x: (
        jnp.result_type(x).itemsize <= 2 and 0 not in getattr(x, "shape", ())
    )
    return any(is_trained(x) and is_narrow(x) for x in jax.tree.leaves(params))


def scalar_dtype(params: PyTree) -> Any:
    """The dtype of a state's scalars: float64 if a parameter has 64 bits, else
    float32.
    """
    bits = (
        jnp.finfo(jnp.result_type(x)).bits
        for x in jax.tree.leaves(params)
        if is_trained(x)
    )
    return jnp.dtype(jnp.float64 if 64 in bits else jnp.float32)


def wide_dtype(*arrays: Any) -> Any:
    """The dtype to compute in: that of the widest array, and at least float32."""
    dtypes = (a.dtype if hasattr(a, "dtype") else jnp.result_type(a) for a in arrays)
    with jax.numpy_dtype_promotion("standard"):  # whatever the user has set
        return jnp.result_type(
            *(dtype for dtype in dtypes if dtype.itemsize > 2), jnp.float32
        )


def scaled(scalar: Array, leaf: Array, dtype: Any) -> Array:
    """A product, computed in a dtype."""
    return scalar.astype(dtype) * leaf.astype(dtype)


def widen(tree: PyTree) -> PyTree:
    """Floating-point leaves in 32 bits or more, and None for others."""
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    as_shape = lambda x: jax.ShapeDtypeStruct(x.shape, wide_dtype(x))
    as_array = lambda x: jnp.asarray(x, wide_dtype(x))
    return map_trained(lambda x: as_shape(x) if is_shape(x) else as_array(x), tree)


def round_update(
    u: Array, x: Array, seed: Seed | None, low_bits: bool = False
) -> Array:
    """An update in the dtype of x: x + u is rounded to that dtype, and x subtracted.

    Adding it to x is then exact if u neither more than halves nor more than doubles x,
    nor turns its sign (Sterbenz). Otherwise the sum is up to an ulp off, of x or of x +
    u.
    """
    dtype = wide_dtype(u, x)
    if dtype == x.dtype:
        return u.astype(dtype)
    return rounded(x.astype(dtype) + u.astype(dtype), x.dtype, seed, low_bits) - x


def seeds_like(
    key: PRNGKeyArray | None, count: Array, tree: PyTree, stream: Stream
) -> PyTree:
    """A random word for each leaf at a step, or None without a key."""
    if key is None:
        return jax.tree.map(lambda _: None, tree)
    leaves, structure = jax.tree.flatten(tree)
    key = jax.random.fold_in(jax.random.fold_in(key, count), int(stream))
    # Drawn once: XLA must not repeat the draw in the kernel of every leaf.
    words = jax.lax.optimization_barrier(
        jax.random.bits(key, (len(leaves),), jnp.uint32)
    )

    def on_cpu(words: Array) -> list[Array]:
        # From a loop that XLA does not know to be of one step: it cannot fuse them
        # then, and leaves of one shape share a program. 60 leaves took 3.4 seconds to
        # compile, and take 0.9.
        num_loops, zeros = jnp.minimum(count, 0) + 1, list(jnp.zeros_like(words))
        return jax.lax.fori_loop(0, num_loops, lambda *_: list(words), zeros)

    return structure.unflatten(
        jax.lax.platform_dependent(words, cpu=on_cpu, default=list)
    )


def rounded(
    x: Array,
    dtype: Any,
    seed: Seed | None,
    low_bits: bool = False,
    saturates: bool = False,
) -> Array:
    """`x` in a dtype as wide or narrower: rounded to nearest, or with a seed so that
    the mean is x.

    One 32-bit hash serves two arrays that drop 16 bits each: one takes its high bits,
    the other its low bits. What saturates is at most the dtype's largest number, and
    NaN may become any.
    """
    if jnp.iscomplexobj(x) or dtype == x.dtype:
        return x.astype(dtype)
    if seed is not None:
        return _stochastic(x, seed, dtype, low_bits, saturates)
    limit = float(jnp.finfo(dtype).max)
    return (jnp.clip(x, -limit, limit) if saturates else x).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _stochastic(
    x: Array, seed: Seed, dtype: Any, low_bits: bool, saturates: bool
) -> Array:
    """`rounded` with a seed, with the derivative of a cast."""
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    limit = float(narrow.max)
    num_extra = wide.nmant - narrow.nmant  # bits to drop
    as_bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{wide.bits}")
    as_float = lambda bits: jax.lax.bitcast_convert_type(bits, x.dtype)
    shift, bits = None, as_bits(x)
    sign = bits & jnp.array(2 ** (wide.bits - 1), bits.dtype)
    if (
        narrow.minexp > wide.minexp
    ):  # below its smallest normal number, spacing is constant
        size, tiny = as_float(bits ^ sign), jnp.asarray(float(narrow.tiny), x.dtype)
        if saturates:  # one operation, where `clip` takes two
            size = jnp.minimum(size, limit)
        shift = jnp.where(size < tiny, tiny, 0)
        bits = as_bits(size + shift)
    elif saturates:
        bits = as_bits(jnp.clip(x, -limit, limit))
    num_random = min(num_extra, 32)
    random = random_bits(seed, x.shape)
    random = (
        random & jnp.uint32(2**num_random - 1)
        if low_bits
        else random >> (32 - num_random)
    )
    random = random.astype(bits.dtype)
    bits += random << (num_extra - 32) if num_extra > 32 else random
    bits &= jnp.array(2**wide.bits - 2**num_extra, bits.dtype)
    if shift is not None:
        bits = as_bits(as_float(bits) - shift) | sign
    result = as_float(bits)
    if not saturates:
        result = jnp.where(
            jnp.isfinite(x), result, x
        )  # the bits of a NaN could overflow
    return result.astype(dtype)


@_stochastic.defjvp
def _(dtype: Any, low_bits: bool, saturates: bool, primals: Any, tangents: Any) -> Any:
    if jnp.finfo(dtype).bits == 8:  # whose tangents would be 0 or NaN
        raise ValueError("state in 8 bits must not be differentiated, got a tangent")
    return _stochastic(*primals, dtype, low_bits, saturates), tangents[0].astype(dtype)


def rounds_to(wide: Array, x: Array) -> Bool[Array, "..."]:
    """Where `wide`, rounded to nearest in x's dtype, equals x."""
    info = jnp.finfo(x.dtype)
    if (
        info.nexp == jnp.finfo(wide.dtype).nexp
    ):  # bfloat16: 4 % fewer cycles of a TPU than a cast
        return jax.lax.reduce_precision(wide, info.nexp, info.nmant) == x.astype(
            wide.dtype
        )
    return wide.astype(x.dtype) == x


def random_bits(seed: Seed, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 bits for each element, which depend only on the seed and its position.

    This hash fuses into its consumer. `jax.random.bits` would take 20 bytes of
    temporaries per element and, on CPU, 15 times as long as a whole update. It
    multiplies only twice, since that is slow on TPU, so seeds must be random, not
    differ in one bit. The seed enters twice: entering once, it would only permute the
    bits of an array.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index * jnp.uint32(size % 2**32) + place
    h = index ^ seed
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)  # constants of C. Wellons' lowbias32
    h = (h ^ (h >> 15) ^ seed) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
