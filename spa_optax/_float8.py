"""The momentum of SGD, Lion and Muon in 8 bits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from spa_optax import _checks as checks, _trees as trees
from spa_optax._rounding import MOMENTUM, rounded, seeds_like
from spa_optax._wrappers import AVERAGES, refuse

FLOAT8 = jnp.float8_e4m3fn
# The states that hold the momentum of SGD, Lion and Muon, and its field. One power of
# two scales a whole array of it. Adam's momentum needs another scale for each element.
MOMENTUM_FIELDS: dict[type, str] = {
    optax.TraceState: "trace",
    optax.ScaleByLionState: "mu",
    optax.contrib.MuonState: "mu",
}


class Float8MomentumState(NamedTuple):
    """State of `float8_momentum`."""

    count: Int[Array, ""]  # the random bits depend on it
    base: PyTree  # with m / s as its momentum, in float8
    scales: Float[Array, " arrays"]  # s, a power of two for each array of momentum


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
      A transformation with `count`, `base` (whose momentum is q) and `scales` (s) in
      its state.

    Raises:
      ValueError: unless `base` holds such momentum, real and below 64 bits, and does
        not average.

    Examples:
      >>> import jax
      >>> import optax
      >>> from spa_optax import float8_momentum
      >>> tx = float8_momentum(optax.sgd(1.0, 0.5), jax.random.key(0))
      >>> g = jax.numpy.array([2.0, 3.0])
      >>> _, state = tx.update(g, tx.init(g))
      >>> print(optax.tree.get(state, "trace"), state.scales)
      [256 384] [0.0078125]

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
      arXiv:2110.02861, Section 2.
    """
    checks.TRANSFORMATION.check(base=base)
    checks.KEY.check(key=key)
    tx = optax.with_extra_args_support(base)

    def init_fn(params: PyTree) -> Float8MomentumState:
        of_base = tx.init(params)
        refuse(of_base, AVERAGES)
        if not trees.find(of_base, tuple(MOMENTUM_FIELDS)):
            raise ValueError(
                "`base` must hold the momentum of Optax's SGD, Lion or Muon, got "
                f"{trees.kinds_of(of_base)}. For Adam's use `spa_adamw` with "
                "`state_dtype=jnp.float8_e4m3fn`."
            )
        return _pack(of_base, jnp.zeros([], jnp.int32), key)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        trees.check_kind("state", state, Float8MomentumState)
        u, of_base = tx.update(updates, _unpack(state), params, **extra)

        def cast(u: Array, *inputs: Array) -> Array:
            return u.astype(jnp.result_type(*inputs))

        # The dtypes are those with a momentum in the dtype of the params.
        inputs = (updates,) if params is None else (updates, params)
        with jax.numpy_dtype_promotion("standard"):
            u = trees.fill_none(trees.map_trained(cast, u, *inputs), u)
        count = jnp.asarray(optax.safe_increment(jnp.asarray(state.count)))
        return u, _pack(of_base, count, key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _pack(of_base: PyTree, count: Array, key: PRNGKeyArray) -> Float8MomentumState:
    """The state with its momentum in float8."""
    arrays = _momentum(of_base)
    scales = [_scale(m) for m in arrays]
    seeds = seeds_like(key, count, arrays, MOMENTUM)
    q = [
        rounded(m / s, FLOAT8, seed)
        for m, s, seed in zip(arrays, scales, seeds, strict=True)
    ]
    of_base = _with_momentum(of_base, q)
    return Float8MomentumState(count, of_base, jnp.array(scales, jnp.float32))


def _unpack(state: Float8MomentumState) -> PyTree:
    """The state of the base with its momentum in float32."""
    pairs = zip(_momentum(state.base), state.scales, strict=True)
    return _with_momentum(state.base, [q * s for q, s in pairs])


def _momentum(of_base: PyTree) -> list[Array]:
    """The arrays of momentum in float32."""
    arrays = []
    for node in trees.find(of_base, tuple(MOMENTUM_FIELDS)):
        arrays += jax.tree.leaves(getattr(node, MOMENTUM_FIELDS[type(node)]))
    arrays = [jnp.asarray(m) for m in arrays]
    for m in arrays:
        if jnp.iscomplexobj(m) or m.itemsize > 4:
            raise ValueError(
                f"`base` must have real momentum in 32 bits or fewer, got {m.dtype}"
            )
    return [m.astype(jnp.float32) for m in arrays]


def _with_momentum(of_base: PyTree, arrays: Sequence[Array]) -> PyTree:
    """The state of the base with other arrays of momentum."""
    remaining = iter(arrays)

    def with_next_arrays(node: Any) -> Any:
        field = MOMENTUM_FIELDS[type(node)]
        momentum = jax.tree.map(lambda _: next(remaining), getattr(node, field))
        return node._replace(**{field: momentum})

    return trees.replace(of_base, tuple(MOMENTUM_FIELDS), with_next_arrays)


def _scale(m: Array) -> Float[Array, ""]:
    """The smallest power of two s with which |m| / s fits into float8."""
    largest = jnp.max(jnp.abs(m), initial=0, where=jnp.isfinite(m))
    least = jnp.maximum(largest / float(jnp.finfo(FLOAT8).max), jnp.finfo(m.dtype).tiny)
    return jnp.ldexp(jnp.ones([], m.dtype), jnp.frexp(least)[1])
