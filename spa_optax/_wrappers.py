"""Wrappers around Optax's optimizers: averages, and params in few bits.

`base` is always a finished optimizer, and `inner` any transformation.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike, PRNGKeyArray, PyTree

from . import _arguments
from ._checks import (
    check_params_passed,
    check_same_tree,
    check_state_fits,
    check_state_type,
)
from ._codec import codec_of, stored_tree
from ._optax_states import (
    AVERAGING_REFUSALS,
    PRIMAL_AVERAGING_REFUSALS,
    REFUSALS_AT_PARAMS,
    REFUSALS_AT_Z,
    Refusals,
    check_base,
    check_sam_is_opaque,
)
from ._rounding import FOR_PARAMS_AND_Z, round_update, seeds_like
from ._shardings import shard_state_like
from ._spa import spa
from ._state import SPAState, is_initial
from ._trees import (
    Count,
    fill_none,
    has_narrow_leaves,
    is_inexact,
    is_none,
    leaves_by_path,
    map_inexact,
    widen,
)


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: Count  # the random bits depend on it
    base_state: PyTree


class PrimalAveragingState(NamedTuple):
    """State of `primal_averaging`."""

    base_state: PyTree
    spa_state: SPAState


def in_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 for params of 16 bits.

    In bfloat16 a β₂ of 0.999 would be 1. Arrays of the state have the sharding of their
    params, also if `init` runs in `jax.jit`.

    Args:
      inner: any transformation, such as a direction in a chain before `spa`.

    Returns:
      A transformation with the state and updates of `inner` for float32 params. So
      updates are in float32, too. Updates of integers are passed on.

    Raises:
      ValueError: if `inner` is not a transformation; in `init`, beside params of 16
        bits, if it is an optimizer of this package, which would not round; or, in
        `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import in_float32
      >>> tx, params = in_float32(optax.scale_by_adam()), jnp.ones(3, jnp.bfloat16)
      >>> print(tx.init(params).nu.dtype)
      float32
    """
    _arguments.TRANSFORMATION.check(inner=inner)
    tx = _run_in_float32(inner)
    refusals: Refusals = dict.fromkeys(
        (SPAState, StochasticRoundingState),
        "`inner` must not be an optimizer of this package, got a `{}`: it computes in "
        "float32 by itself, and would not round. Leave `in_float32` out, or put it "
        "around the transformations before the optimizer.",
    )

    def init_fn(params):
        state = tx.init(params)
        if has_narrow_leaves(params):
            check_base(state, refusals)
        return state

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


def _run_in_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`in_float32` for any `inner`, also the base of a wrapper."""
    tx = optax.with_extra_args_support(inner)

    def init_fn(params):
        wide = widen(params)
        return shard_state_like(tx.init(wide), wide)

    def update_fn(updates, state, params=None, **extra):
        g = updates
        if params is not None:
            check_same_tree("updates", updates, "params", params)
            g = _inexact_like(updates, params)
        with jax.numpy_dtype_promotion("standard"):  # optax has β₂ ** count
            u, state = tx.update(widen(g), state, widen(params), **extra)
        return fill_none(u, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _inexact_like(updates: PyTree, params: PyTree) -> PyTree:
    """Updates that are floating-point where params are, and None elsewhere."""

    def cast(y, g):
        return g if is_inexact(g) else jnp.asarray(g, jnp.result_type(y))

    return map_inexact(cast, params, updates)


def by_path(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs a transformation on the arrays of a tree as a dict, by their paths.

    Some libraries give a state that is shaped like the params their shardings. That
    fails for means over rows or columns, which have fewer axes. A dict has another
    structure.
    """

    def as_dict(tree):
        # In Flax nnx params are variables in `init`, and their values in `update`.
        leaves = leaves_by_path(tree)
        return {path.removesuffix(".value"): leaf for path, leaf in leaves.items()}

    def init_fn(params):
        arrays = as_dict(params)
        return shard_state_like(inner.init(arrays), arrays)

    def update_fn(updates, state, params=None):
        check_params_passed(params)
        arrays = as_dict(updates)
        new: Any
        new, state = inner.update(arrays, state, as_dict(params))
        structure = jax.tree.structure(updates, is_leaf=is_none)
        return structure.unflatten([new[path] for path in arrays]), state

    return optax.GradientTransformation(init_fn, update_fn)


def primal_averaging(
    base: optax.GradientTransformation,
    averaging: optax.ScalarOrSchedule,
    interpolation: optax.ScalarOrSchedule = 1.0,
    *,
    params_of_base: Literal["params", "z"] = "params",
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Primal averaging around an optimizer, whose update replaces −η g in `spa`.

        z_{k+1} = z_k + u_k                                  u_k: the update of `base`
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}

    `base` runs in float32, as in `in_float32`. Put wrappers that skip updates around
    `primal_averaging`, not inside.

    Under `optax.inject_hyperparams` set `hyperparam_dtype=jnp.float32`, and name
    `base`, `params_of_base`, `state_dtype`, `rounding_key` and an `interpolation` that
    stays in `static_args`.

    Args:
      base: a finished optimizer: `optax.sgd(0.1)`, `optax.adamw(1e-3)`,
        `optax.contrib.muon(0.02)`.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k: the weight
        of the newest z in x.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k. Below 1
        evaluate and export `eval_params`.
      params_of_base: "params" if `base` sees y_k, "z" if z_k (and so decays it).
      state_dtype: dtype of z: bfloat16 or float8_e4m3fn saves memory. None means that
        of the params, but float32 for params of 16 bits. `spa` has the limits of
        float8.
      rounding_key: PRNG key, to round params and z up or down at random. Give it for
        params or z of 16 bits or fewer. Shards, groups and batches of runs need
        different keys, see `spa`.

    Returns:
      A transformation with `base_state` and `spa_state`, an `SPAState`, in its state.
      `update` needs `params`, and passes extra arguments on to `base`.

    Raises:
      ValueError: if an argument is out of range, or, in `init`, `base` averages,
        rounds, skips or undoes steps.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, primal_averaging
      >>> tx = primal_averaging(optax.sgd(2.0), 0.5, interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(y), y)
      >>> y += updates
      >>> # x is halfway to z, and y midway between the two
      >>> print(state.spa_state.z, eval_params(state, y), y)
      6.0 8.0 7.0

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging, 2025, arXiv:2512.17131,
      Section 3.
    """
    _arguments.TRANSFORMATION.check(base=base)
    _arguments.one_of("params", "z").check(params_of_base=params_of_base)
    tx = _run_in_float32(base)
    refusals = AVERAGING_REFUSALS | PRIMAL_AVERAGING_REFUSALS
    refusals |= REFUSALS_AT_Z if params_of_base == "z" else REFUSALS_AT_PARAMS
    refusals[StochasticRoundingState] = (
        "`base` must not round, got a `{}`. Pass `rounding_key` instead."
    )
    spa_tx = spa(
        1.0,
        averaging,
        interpolation,
        state_dtype=state_dtype,
        rounding_key=rounding_key,
    )

    def init_fn(params):
        base_state = tx.init(params)
        check_sam_is_opaque(base_state)
        check_base(base_state, refusals)
        spa_state: Any = spa_tx.init(params)
        return PrimalAveragingState(base_state, spa_state)

    def update_fn(updates, state, params=None, **extra):
        check_state_type("state", state, PrimalAveragingState)
        # `track_momentum` observes the step of `spa`.
        observe = extra.pop("observe", None)
        base_params = params
        if params_of_base == "z":
            base_params = _current_z(state.spa_state, params)
        base_u, base_state = tx.update(updates, state.base_state, base_params, **extra)
        # `spa` subtracts η g, at η = 1.
        g = fill_none(map_inexact(jnp.negative, base_u), base_u)
        u, spa_state = spa_tx.update(g, state.spa_state, params, observe=observe)
        return u, PrimalAveragingState(base_state, spa_state)  # pyright: ignore[reportArgumentType]

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _current_z(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the dtype to compute in; before the first step it is the params."""
    check_state_fits(state, params)
    codec, state_is_initial = codec_of(state.z), is_initial(state)

    def value(y, stored):
        return codec.decode_z(jnp.asarray(y), jnp.asarray(stored), state_is_initial)

    return fill_none(map_inexact(value, params, stored_tree(state.z)), params)


def stochastic_rounding(
    base: optax.GradientTransformation, rounding_key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Trains params of 16 bits or fewer by another optimizer, with no master copy.

        y_{k+1} = y_k + u_k, rounded up or down at random, with y_k + u_k as the mean

    `base` runs in float32, as in `in_float32`. Wider params are trained as by `base`
    alone. The update u_k is itself in the params' dtype. So the mean is off by a part
    of an ulp where a step turns a param's sign or more than halves or doubles it.

    Args:
      base: a finished optimizer that does not average:
        `optax.adamw(1e-3, nesterov=True, mu_dtype=jnp.bfloat16)`,
        `optax.adafactor(1e-3, multiply_by_parameter_scale=False)`.
      rounding_key: PRNG key. Under `jax.jit` one will do. Groups of `optax.partition`,
        runs under `jax.vmap` and shards in `jax.shard_map` need different ones.

    Returns:
      A transformation with `count` and `base_state` in its state. `update` needs
      `params`.

    Raises:
      ValueError: if an argument is of the wrong kind; in `init`, if `base` averages;
        or, in `update`, the trees differ.

    Examples:
      >>> import jax
      >>> import optax
      >>> from spa_optax import stochastic_rounding
      >>> tx = stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> params = jax.numpy.ones(100_000, "bfloat16")
      >>> updates, _ = tx.update(params / -512, tx.init(params), params)
      >>> # 1/512 in the mean
      >>> print(set(updates.tolist()), f"{(updates > 0).mean():.2f}")
      {0.0, 0.0078125} 0.25

    References:
      Gupta et al., Deep Learning with Limited Numerical Precision, 2015,
      arXiv:1502.02551, Section 3.
    """
    _arguments.TRANSFORMATION.check(base=base)
    _arguments.KEY.check(rounding_key=rounding_key)
    tx = _run_in_float32(base)

    def init_fn(params):
        base_state = tx.init(params)
        check_base(base_state, AVERAGING_REFUSALS)
        return StochasticRoundingState(jnp.zeros([], jnp.int32), base_state)

    def update_fn(updates, state, params=None, **extra):
        check_params_passed(params)
        check_state_type("state", state, StochasticRoundingState)
        u, base_state = tx.update(updates, state.base_state, params, **extra)
        count = jnp.asarray(state.count)
        seeds = seeds_like(rounding_key, count, u, FOR_PARAMS_AND_Z)

        def round_leaf(u, y, seed):
            if u is None or y is None:
                return None
            if not is_inexact(y):
                return jnp.zeros_like(y)
            return round_update(jnp.asarray(u), jnp.asarray(y), seed)

        u = jax.tree.map(round_leaf, u, params, seeds, is_leaf=is_none)
        count = jnp.asarray(optax.safe_increment(count))
        return u, StochasticRoundingState(count, base_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]
