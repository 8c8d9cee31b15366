"""Stochastic rounding: to a narrower dtype so that the mean is the number itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree, UInt32

from ._trees import compute_dtype
from ._xla import as_stored, split_seeds

Seed = UInt32[Array, ""]  # of the random bits of one array
# Folded into the key, so that params and z get other bits than momentum, also if both
# have the same key and count. Larger numbers are for further momenta.
FOR_PARAMS_AND_Z, FOR_FIRST_MOMENTUM = 0, 1


def seeds_like(
    key: PRNGKeyArray | None, count: Array, tree: PyTree, purpose: int
) -> PyTree:
    """A seed for each leaf at a step, or None without a key."""
    if key is None:
        return jax.tree.map(lambda _: None, tree)
    leaves, structure = jax.tree.flatten(tree)
    key = jax.random.fold_in(jax.random.fold_in(key, count), purpose)
    seeds = jax.random.bits(key, (len(leaves),), jnp.uint32)
    return structure.unflatten(split_seeds(seeds, count))


def round_to(
    array: Array,
    dtype: Any,
    seed: Seed | None,
    use_low_bits: bool = False,
    saturate: bool = False,
) -> Array:
    """An array in a dtype as wide or narrower, rounded to nearest, or at random.

    With a seed each number is rounded up or down so that the mean is the number.

    The seed makes a random word of 32 bits for each element. `use_low_bits` uses its
    low bits in place of the high ones, so that two roundings may share a seed. With
    `saturate` the result is at most the dtype's largest number, and a NaN may become
    any number.
    """
    if jnp.iscomplexobj(array) or dtype == array.dtype:
        return array.astype(dtype)
    if seed is not None:
        return _round_stochastically(array, seed, dtype, use_low_bits, saturate)
    if saturate:
        largest = float(jnp.finfo(dtype).max)
        array = jnp.clip(array, -largest, largest)
    return array.astype(dtype)


def round_update(
    u: Array, y: Array, seed: Seed | None, use_low_bits: bool = False
) -> Array:
    """An update in the dtype of y: y + u is rounded to that dtype, and y subtracted.

    Adding it to y is then exact if u neither more than halves nor more than doubles y,
    nor turns its sign (Sterbenz). Otherwise the sum is up to an ulp off, of y or of
    y + u.
    """
    dtype = compute_dtype(u, y)
    if dtype == y.dtype:
        return u.astype(dtype)
    next_y = round_to(y.astype(dtype) + u.astype(dtype), y.dtype, seed, use_low_bits)
    return as_stored(next_y - y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _round_stochastically(
    array: Array, seed: Seed, dtype: Any, use_low_bits: bool, saturate: bool
) -> Array:
    """`round_to` with a seed, with the derivative of a cast.

    Random bits are added below those that stay, and what is below is then cut off.
    """
    wide, narrow = jnp.finfo(array.dtype), jnp.finfo(dtype)
    num_dropped = wide.nmant - narrow.nmant
    largest = float(narrow.max)

    def add_and_cut(value):
        bits = _as_bits(value)
        bits += _random_integers(seed, array.shape, num_dropped, use_low_bits).astype(
            bits.dtype
        )
        bits &= jnp.array(2**wide.bits - 2**num_dropped, bits.dtype)
        return jax.lax.bitcast_convert_type(bits, array.dtype)

    if narrow.minexp == wide.minexp:  # the low bits are cut from every number
        result = add_and_cut(jnp.clip(array, -largest, largest) if saturate else array)
    else:
        sign = _as_bits(array) & jnp.array(2 ** (wide.bits - 1), f"uint{wide.bits}")
        magnitude = jax.lax.bitcast_convert_type(_as_bits(array) ^ sign, array.dtype)
        if saturate:  # one operation, where `clip` takes two
            magnitude = jnp.minimum(magnitude, largest)
        # Below the smallest normal number, `tiny`, spacing is that of [tiny, 2 tiny).
        # So numbers are moved there before they are rounded, and back afterwards.
        tiny = jnp.asarray(float(narrow.tiny), array.dtype)
        shift = jnp.where(magnitude < tiny, tiny, 0)
        magnitude = add_and_cut(magnitude + shift) - shift
        result = jax.lax.bitcast_convert_type(_as_bits(magnitude) | sign, array.dtype)
    if not saturate:  # the bits of a NaN could overflow
        result = jnp.where(jnp.isfinite(array), result, array)
    return result.astype(dtype)


@_round_stochastically.defjvp
def _(
    dtype: Any, use_low_bits: bool, saturate: bool, primals: Any, tangents: Any
) -> Any:
    if jnp.finfo(dtype).bits == 8:  # whose tangents would be 0 or NaN
        raise ValueError("state in 8 bits must not be differentiated, got a tangent")
    result = _round_stochastically(*primals, dtype, use_low_bits, saturate)
    return result, tangents[0].astype(dtype)


def _as_bits(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array, f"uint{jnp.finfo(array.dtype).bits}")


def _random_integers(
    seed: Seed, shape: tuple[int, ...], num_bits: int, use_low_bits: bool
) -> Array:
    """Random integers of `num_bits` bits, of which at most the upper 32 are random."""
    num_random = min(num_bits, 32)
    random = random_bits(seed, shape)
    if use_low_bits:
        random &= jnp.uint32(2**num_random - 1)
    else:
        random >>= 32 - num_random
    return random.astype(jnp.uint64) << (num_bits - 32) if num_bits > 32 else random


def random_bits(seed: Seed, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 bits for each element, which depend only on the seed and its position.

    This hash fuses into its consumer, where `jax.random.bits` takes 20 bytes of
    temporaries an element. It multiplies only twice, since that is slow on TPU, so
    seeds must be random, not differ in one bit. The seed enters twice: entering once,
    it would only permute the bits of an array.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index * jnp.uint32(size % 2**32) + place
    h = index ^ seed
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)  # constants of C. Wellons' lowbias32
    h = (h ^ (h >> 15) ^ seed) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
