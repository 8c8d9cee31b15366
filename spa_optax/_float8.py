"""The momentum of SGD, Lion and Muon in 8 bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from . import _checks
from ._optax_states import AVERAGING_BASES, FLOAT8_FIELDS, refuse
from ._rounding import FOR_MOMENTUM, rounded, seeds_like
from ._sharding import with_shardings
from ._trees import check_kind, find_nodes, is_none, kinds_of, replace_nodes
from ._types import Count

FLOAT8 = jnp.float8_e4m3fn


class Float8Array(NamedTuple):
    """An array m = s q in the state of `float8_momentum`."""

    q: Float[Array, "..."]  # in float8
    scale: Float[Array, ""]  # s, a power of two


class Float8MomentumState(NamedTuple):
    """State of `float8_momentum`."""

    count: Count  # the random bits depend on it
    base: PyTree  # with a `Float8Array` for each array of its momentum


def float8_momentum(
    base: optax.GradientTransformation, key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Stores the momentum of SGD, Lion or Muon in 8 bits, float8_e4m3fn.

        m = s q,  q ← m / s rounded up or down at random, with m / s as the mean

    s is a power of two for each array, with which max |q| is from 224 to 448. Other
    states of `base`, such as that of Adam inside Muon, stay as they are. With bfloat16
    params put this into `stochastic_rounding` or `primal_averaging`.

    Args:
      base: an optimizer with the momentum of Optax's SGD, Lion or Muon. For Adam's use
        `spa_adamw`, whose z takes 8 bits.
      key: PRNG key, as `rounding_key` of `spa`. `stochastic_rounding` around it may
        have the same.

    Returns:
      A transformation with `count` and `base` in its state, where q and s stand in
      place of m.

    Raises:
      ValueError: in `init`, unless `base` holds such momentum, real and below 64 bits,
        and does not average.

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
    _checks.TRANSFORMATION.check(base=base)
    _checks.KEY.check(key=key)
    tx = optax.with_extra_args_support(base)

    def init_fn(params):
        base_state = with_shardings(tx.init(params), params)
        refuse(base_state, AVERAGING_BASES)
        if find_nodes(base_state, Float8MomentumState):
            raise ValueError(
                "`base` must have its momentum in 16 bits or more, got a "
                "`Float8MomentumState`"
            )
        if not find_nodes(base_state, tuple(FLOAT8_FIELDS)):
            raise ValueError(
                "`base` must hold the momentum of Optax's SGD, Lion or Muon, got "
                f"{kinds_of(base_state)}. For Adam's use `spa_adamw` with "
                "`state_dtype=jnp.float8_e4m3fn`."
            )
        return _pack(base_state, jnp.zeros([], jnp.int32), key)

    def update_fn(updates, state, params=None, **extra):
        check_kind("state", state, Float8MomentumState)
        u, base_state = tx.update(updates, _unpack(state), params, **extra)
        # Float32 momentum made u float32. Optax's own has the dtype of the params.
        like = updates if params is None else params
        u = jax.tree.map(_cast_like, u, like, is_leaf=is_none)
        count = jnp.asarray(optax.safe_increment(jnp.asarray(state.count)))
        return u, _pack(base_state, count, key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _cast_like(u: Any, x: Any) -> Any:
    return None if u is None else u.astype(jnp.result_type(x))


def _pack(base_state: PyTree, count: Array, key: PRNGKeyArray) -> Float8MomentumState:
    """The state with its momentum in float8."""
    kinds = tuple(FLOAT8_FIELDS)
    nodes = find_nodes(base_state, kinds)
    momenta = [getattr(node, FLOAT8_FIELDS[type(node)]) for node in nodes]
    seeds = seeds_like(key, count, momenta, FOR_MOMENTUM)

    def pack(m, seed):
        if jnp.iscomplexobj(m) or m.dtype.itemsize > 4:
            raise ValueError(
                f"`base` must have real momentum in 32 bits or fewer, got {m.dtype}"
            )
        m = m.astype(jnp.float32)
        scale = _scale(m)
        return Float8Array(rounded(m / scale, FLOAT8, seed), scale)

    packed = iter(jax.tree.map(pack, momenta, seeds))

    def with_packed(node):
        return node._replace(**{FLOAT8_FIELDS[type(node)]: next(packed)})

    return Float8MomentumState(count, replace_nodes(base_state, kinds, with_packed))


def _unpack(state: Float8MomentumState) -> PyTree:
    """The state of the base with its momentum in float32."""
    return replace_nodes(
        state.base, Float8Array, lambda m: m.q.astype(jnp.float32) * m.scale
    )


def _scale(m: Array) -> Float[Array, ""]:
    """A power of two s, with which the largest |m| / s is from 224 to 448."""
    largest = jnp.max(jnp.abs(m), initial=0, where=jnp.isfinite(m))
    least = jnp.maximum(largest / float(jnp.finfo(FLOAT8).max), jnp.finfo(m.dtype).tiny)
    return jnp.ldexp(jnp.ones([], m.dtype), jnp.frexp(least)[1])
