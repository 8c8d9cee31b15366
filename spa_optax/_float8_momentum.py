"""`float8_momentum`: the momentum of Optax's optimizers in 8 bits."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from . import _arguments
from ._checks import check_state_type
from ._optax_states import AVERAGING_REFUSALS, FLOAT8_MOMENTUM_FIELDS, check_base
from ._rounding import FOR_FIRST_MOMENTUM, round_to, seeds_like
from ._shardings import shard_state_like
from ._trees import Count, find_nodes, is_none, node_type_names, replace_nodes

FLOAT8 = jnp.float8_e4m3fn


class Float8Momentum(NamedTuple):
    """A tree of momentum m = s q in the state of `float8_momentum`.

    Two trees, not a tree of pairs: Flax nnx would make variables of the pairs.
    """

    q: PyTree[Array]  # in float8
    scale: PyTree[Array]  # s, a power of two for each array


class Float8MomentumState(NamedTuple):
    """State of `float8_momentum`."""

    count: Count  # the random bits depend on it
    base_state: PyTree  # with a `Float8Momentum` in place of its momentum


def float8_momentum(
    base: optax.GradientTransformation, rounding_key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Stores the momentum of SGD, Lion or Muon in 8 bits, float8_e4m3fn.

        m = s q,  q ← m / s rounded up or down at random, with m / s as the mean

    s is a power of two for each array, with which max |q| is from 224 to 448. Other
    states of `base`, such as that of Adam inside Muon, stay as they are. With bfloat16
    params put this into `stochastic_rounding` or `primal_averaging`. On several
    devices libraries that shard each array of a state like its parameter, such as Flax
    nnx, fail on s.

    Args:
      base: an optimizer with the momentum of Optax's SGD, Lion or Muon. For Adam's use
        `spa_adamw` with `state_dtype=jnp.float8_e4m3fn`.
      rounding_key: PRNG key. `stochastic_rounding` around it may have the same. Groups
        of `optax.partition`, runs under `jax.vmap` and shards in `jax.shard_map` need
        different ones.

    Returns:
      A transformation with `count` and `base_state` in its state, where q and s stand
      in place of m.

    Raises:
      ValueError: if an argument is of the wrong kind; in `init`, unless `base` holds
        such momentum, real and below 64 bits, and does not average.

    Examples:
      >>> import jax
      >>> import optax
      >>> from spa_optax import float8_momentum
      >>> tx = float8_momentum(optax.sgd(1.0, 0.5), jax.random.key(0))
      >>> g = jax.numpy.array([2.0, 3.0])
      >>> _, state = tx.update(g, tx.init(g))
      >>> print(*optax.tree.get(state, "trace"))
      [256 384] 0.0078125

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
      arXiv:2110.02861, Section 2.
    """
    _arguments.TRANSFORMATION.check(base=base)
    _arguments.KEY.check(rounding_key=rounding_key)
    tx = optax.with_extra_args_support(base)
    refusals = AVERAGING_REFUSALS | {
        Float8MomentumState: (
            "`base` must have its momentum in 16 bits or more, got a `{}`"
        )
    }

    def cast(u, y):
        return None if u is None else u.astype(jnp.result_type(y))

    def init_fn(params):
        base_state = shard_state_like(tx.init(params), params)
        check_base(base_state, refusals)
        if not find_nodes(base_state, tuple(FLOAT8_MOMENTUM_FIELDS)):
            raise ValueError(
                "`base` must hold the momentum of Optax's SGD, Lion or Muon, got "
                f"{node_type_names(base_state)}. For Adam's use `spa_adamw` with "
                "`state_dtype=jnp.float8_e4m3fn`."
            )
        return _quantize(base_state, jnp.zeros([], jnp.int32), rounding_key)

    def update_fn(updates, state, params=None, **extra):
        check_state_type("state", state, Float8MomentumState)
        u, base_state = tx.update(updates, _dequantize(state), params, **extra)
        # The base saw momentum in float32, so u is in float32, too. With its own
        # momentum u would have the dtype of the params.
        u = jax.tree.map(
            cast, u, updates if params is None else params, is_leaf=is_none
        )
        count = jnp.asarray(optax.safe_increment(jnp.asarray(state.count)))
        return u, _quantize(base_state, count, rounding_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _quantize(
    base_state: PyTree, count: Array, rounding_key: PRNGKeyArray
) -> Float8MomentumState:
    """The state with its momentum in float8."""
    purposes = itertools.count(
        FOR_FIRST_MOMENTUM
    )  # each momentum has its own random bits

    def quantize_leaf(m, scale, seed):
        return round_to(m / scale, FLOAT8, seed)

    def quantize(node):
        field = FLOAT8_MOMENTUM_FIELDS[type(node)]
        momentum = jax.tree.map(_as_float32, getattr(node, field))
        scale = jax.tree.map(_choose_scale, momentum)
        seeds = seeds_like(rounding_key, count, momentum, next(purposes))
        q = jax.tree.map(quantize_leaf, momentum, scale, seeds)
        return node._replace(**{field: Float8Momentum(q, scale)})

    return Float8MomentumState(
        count, replace_nodes(base_state, tuple(FLOAT8_MOMENTUM_FIELDS), quantize)
    )


def _as_float32(m: Array) -> Array:
    """Momentum in float32. Raises ValueError if it is complex or has 64 bits."""
    if jnp.iscomplexobj(m) or m.dtype.itemsize > 4:
        raise ValueError(
            f"`base` must have real momentum in 32 bits or fewer, got {m.dtype}"
        )
    return m.astype(jnp.float32)


def _dequantize(state: Float8MomentumState) -> PyTree:
    """The state of the base with its momentum in float32."""

    def dequantize(momentum):
        return jax.tree.map(
            lambda q, scale: q.astype(jnp.float32) * scale, momentum.q, momentum.scale
        )

    return replace_nodes(state.base_state, Float8Momentum, dequantize)


def _choose_scale(m: Array) -> Float[Array, ""]:
    """A power of two s, with which the largest |m| / s is from 224 to 448."""
    largest = jnp.max(jnp.abs(m), initial=0, where=jnp.isfinite(m))
    least = jnp.maximum(largest / float(jnp.finfo(FLOAT8).max), jnp.finfo(m.dtype).tiny)
    return jnp.ldexp(jnp.ones([], m.dtype), jnp.frexp(least)[1])
