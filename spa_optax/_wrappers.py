"""Averaging, and storage in 16 and 8 bits, around any finished Optax optimizer."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from spa_optax import _checks as checks, _trees as trees
from spa_optax._core import SPAState, current_z
from spa_optax._family import spa
from spa_optax._optax_states import MOMENTUM, SKIPS_UPDATES, is_opaque_sam, states
from spa_optax._precision import Stream, round_update, rounded, seeds_like, widen


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: Int[Array, ""]  # the random bits depend on it
    base: PyTree


class Float8MomentumState(NamedTuple):
    """State of `float8_momentum`."""

    count: Int[Array, ""]  # the random bits depend on it
    base: PyTree  # with m / s as its momentum (Adam's: m / (s √ν)), in float8
    scales: Float[Array, " arrays"]  # s, a power of two for each array of momentum


class PrimalAveragingState(NamedTuple):
    """State of `primal_averaging`."""

    base: PyTree
    average: SPAState


_FLOAT8 = jnp.float8_e4m3fn
_AVERAGES = (SPAState, optax.contrib.ScheduleFreeState)
_BY_DISTANCE = states("Prodigy DAdaptAdamW", optax.contrib)
_BY_FIRST = states("COCOB Mechanic DoG DoWG", optax.contrib)
# What a base must not do, and what to do instead.
_REFUSED: list[tuple[Any, str, str]] = [
    (_AVERAGES, "average", "average once, and pass `rounding_key` to that"),
    (StochasticRoundingState, "round", "pass `rounding_key` instead"),
    (SKIPS_UPDATES, "skip updates", "put it around this"),
    (optax.ApplyEvery, "skip updates", "put `optax.MultiSteps` around this"),
    (
        states("ScaleByBacktrackingLinesearch ScaleByZoomLinesearch"),
        "search",
        "use it alone",
    ),
    (optax.LookaheadState, "move params back", "average instead"),
    (
        getattr(optax.contrib, "MadgradState", ()),
        "average",
        "use it alone",
    ),  # not in optax 0.2.5
    (optax.contrib.SAMState, "move params aside", "set `opaque_mode=True`"),
    (
        _BY_DISTANCE,
        "find its rate by how far params went",
        "it cannot see z: use another base",
    ),
]
_REFUSED_AT_Y = (
    _BY_FIRST,
    "compare params with the first ones",
    'set `params_of_base="z"`',
)
_OF_PAIRS = (optax.ScaleByLBFGSState, *states("Momo MomoAdam", optax.contrib))
_REFUSED_AT_Z = (
    _OF_PAIRS,
    "relate params to gradients",
    'set `params_of_base="params"`',
)


def _refuse(state: PyTree, *refused: tuple[Any, str, str]) -> None:
    found = (
        (node, *why) for kinds, *why in refused for node in trees.find(state, kinds)
    )
    for node, does, instead in found:
        if not is_opaque_sam(node):
            raise ValueError(
                f"`base` must not {does}, got a `{type(node).__name__}`: {instead}"
            )


def in_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 for 16-bit params: in bfloat16 a β₂ of 0.999
    would be 1.

    Args:
      inner: any transformation, such as a direction in a chain before `spa`.

    Returns: A transformation with the state and updates of `inner` for float32 params.
      Integers stay.

    Raises:
      ValueError: if `inner` is not a transformation, or, in `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import in_float32
      >>> tx, params = in_float32(optax.scale_by_adam()), jnp.ones(3, jnp.bfloat16)
      >>> print(tx.init(params).nu.dtype)
      float32
    """
    checks.TRANSFORMATION.check(inner=inner)
    tx = optax.with_extra_args_support(inner)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        if params is not None:
            trees.check_same_tree("updates", updates, "params", params)
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # optax raises β₂ to the power of an integer
            u, state = tx.update(widen(updates), state, widen(params), **extra)
        return trees.fill_none(u, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: tx.init(widen(params)), update_fn
    )


def primal_averaging(
    base: optax.GradientTransformation,
    averaging: optax.ScalarOrSchedule,
    interpolation: optax.ScalarOrSchedule = 1.0,
    *,
    params_of_base: Literal["params", "z"] = "params",
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Primal averaging (arXiv:2512.17131) around an optimizer, whose update replaces −η
    g in `spa`.

    `base` runs in float32, as in `in_float32`. Wrappers that skip updates go around.

    Args: base: a finished optimizer: `optax.sgd(0.1)`, `optax.adamw(1e-3)`,
      `optax.contrib.muon(0.02)`. averaging: c_{k+1} in [0, 1], as for `spa`.
      interpolation: μ_y in (0, 1], as for `spa`. params_of_base: "params" if `base`
      sees y_k, "z" if z_k (and so decays it). state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. 16-bit params need it.

    Returns: A transformation with `base` and `average`, an `SPAState`, in its state.
      `update` needs `params`, and passes extra arguments on to `base`.

    Raises: ValueError: if an argument is out of range, or `base` averages, rounds,
      skips or undoes steps.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, primal_averaging
      >>> tx = primal_averaging(optax.sgd(2.0), 0.5, interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(y), y)
      >>> y += updates
      >>> # x is halfway to z, y midway
      >>> print(state.average.z, eval_params(state, y), y)
      6.0 8.0 7.0
    """
    checks.TRANSFORMATION.check(base=base)
    checks.one_of("params", "z").check(params_of_base=params_of_base)
    tx = in_float32(base)
    average = spa(
        1.0,
        averaging,
        interpolation,
        state_dtype=state_dtype,
        rounding_key=rounding_key,
    )

    def init_fn(params: PyTree) -> PrimalAveragingState:
        state = tx.init(params)
        _refuse(
            state,
            *_REFUSED,
            _REFUSED_AT_Y if params_of_base == "params" else _REFUSED_AT_Z,
        )
        return PrimalAveragingState(state, average.init(params))  # pyright: ignore[reportArgumentType]

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        trees.check_kind("state", state, PrimalAveragingState)
        observe = extra.pop("observe", None)  # the step of `average`
        seen = current_z(state.average, params) if params_of_base == "z" else params
        u, of_base = tx.update(updates, state.base, seen, **extra)
        minus_u = trees.fill_none(trees.map_trained(jnp.negative, u), u)
        u, of_average = average.update(minus_u, state.average, params, observe=observe)
        return u, PrimalAveragingState(of_base, of_average)  # pyright: ignore[reportArgumentType]

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def stochastic_rounding(
    base: optax.GradientTransformation, key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Trains params of 16 bits or fewer by any optimizer, with no master copy
    (arXiv:1502.02551).

        x_{k+1} = x_k + u_k, rounded up or down at random, with x_k + u_k as the mean

    `base` runs in float32, as in `in_float32`. Wider params are trained as by `base`
    alone.

    Args:
      base: a finished optimizer, as for `primal_averaging`.
      key: PRNG key, as `rounding_key` of `spa`.

    Returns:
      A transformation with `count` and `base` in its state. `update` needs `params`.

    Raises: ValueError: if an argument is of the wrong kind, the trees differ, or `base`
      averages.

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
    """
    checks.TRANSFORMATION.check(base=base)
    checks.KEY.check(key=key)
    tx = in_float32(base)

    def init_fn(params: PyTree) -> StochasticRoundingState:
        state = tx.init(params)
        _refuse(state, _REFUSED[0])
        return StochasticRoundingState(jnp.zeros([], jnp.int32), state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        if params is None:
            raise ValueError("`params` must be passed to `update`, got None")
        trees.check_kind("state", state, StochasticRoundingState)
        u, of_base = tx.update(updates, state.base, params, **extra)
        seeds = seeds_like(
            key, count := jnp.asarray(state.count), u, Stream.PARAMS_AND_Z
        )

        def leaf(u: Any, x: Any, seed: Any) -> Array | None:
            if u is None or not trees.is_trained(x):
                return None if u is None else jnp.zeros_like(x)
            return round_update(jnp.asarray(u), jnp.asarray(x), seed)

        u = jax.tree.map(leaf, u, params, seeds, is_leaf=trees.is_none)
        return u, StochasticRoundingState(
            jnp.asarray(optax.safe_increment(count)), of_base
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def float8_momentum(
    base: optax.GradientTransformation, key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Stores the momentum of Optax's optimizers in 8 bits, float8_e4m3fn (as in
    arXiv:2110.02861).

        m = s q,  q ← m / s rounded up or down at random, with m / s as the mean

    s is a power of two for each array, with which max |q| is from 224 to 448. Under
    Adam, m / √ν is stored. With bfloat16 params put this into `stochastic_rounding` or
    `primal_averaging`.

    Args: base: an optimizer with the momentum of Optax's SGD, Adam, Lion, Muon or
      Adafactor, or its
        `ema`. Put `diagnostics.track_momentum` directly around it.
      key: PRNG key, as `rounding_key` of `spa`. `stochastic_rounding` around it may
        have the same.

    Returns: A transformation with `count`, `base` (whose momentum is q) and `scales`
      (s) in its state.

    Raises: ValueError: unless `base` holds such momentum, real and below 64 bits, and
      does not average.

    Examples:
      >>> import jax
      >>> import optax
      >>> from spa_optax import float8_momentum
      >>> tx = float8_momentum(optax.sgd(1.0, 0.5), jax.random.key(0))
      >>> g = jax.numpy.array([2.0, 3.0])
      >>> _, state = tx.update(g, tx.init(g))
      >>> print(optax.tree.get(state, "trace"), state.scales)
      [256 384] [0.0078125]
    """
    checks.TRANSFORMATION.check(base=base)
    checks.KEY.check(key=key)
    tx = optax.with_extra_args_support(base)

    def pack(of_base: PyTree, count: Array) -> Float8MomentumState:
        arrays = jax.tree.map(jnp.divide, *_momentum_and_units(of_base))
        scales = list(map(_scale, arrays))
        seeds = seeds_like(key, count, arrays, Stream.MOMENTUM)
        q = jax.tree.map(
            lambda m, s, seed: rounded(m / s, _FLOAT8, seed), arrays, scales, seeds
        )
        of_base = _with_momentum(of_base, q)
        return Float8MomentumState(count, of_base, jnp.array(scales, jnp.float32))

    def init_fn(params: PyTree) -> Float8MomentumState:
        of_base = tx.init(params)
        _refuse(of_base, _REFUSED[0])
        if not trees.find(of_base, tuple(MOMENTUM)):
            names = ", ".join(kind.__name__ for kind in MOMENTUM)
            raise ValueError(
                f"`base` must hold one of {names}, got {trees.kinds_of(of_base)}"
            )
        return pack(of_base, jnp.zeros([], jnp.int32))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        trees.check_kind("state", state, Float8MomentumState)
        q, units = _momentum_and_units(state.base)
        m = jax.tree.map(lambda q, s, unit: q * s * unit, q, list(state.scales), units)
        u, of_base = tx.update(updates, _with_momentum(state.base, m), params, **extra)
        inputs = (updates,) if params is None else (updates, params)
        cast = lambda u, *of: u.astype(jnp.result_type(*of))
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # as from a momentum in the params' dtype
            u = trees.fill_none(trees.map_trained(cast, u, *inputs), u)
        return u, pack(
            of_base, jnp.asarray(optax.safe_increment(jnp.asarray(state.count)))
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _momentum_and_units(state: PyTree) -> tuple[list[Array], list[Array]]:
    """The arrays of momentum in float32, and the unit of each: √ν under Adam, else
    1.
    """
    arrays, units = [], []
    for node in trees.find(state, tuple(MOMENTUM)):
        arrays += map(jnp.asarray, jax.tree.leaves(getattr(node, MOMENTUM[type(node)])))
        if isinstance(node, optax.ScaleByAdamState):
            units += map(_root, jax.tree.leaves(node.nu))
        units += [jnp.ones([], jnp.float32)] * (len(arrays) - len(units))
    for m in arrays:
        if jnp.iscomplexobj(m) or m.itemsize > 4:
            raise ValueError(
                f"`base` must have real momentum in 32 bits or fewer, got {m.dtype}"
            )
    return [m.astype(jnp.float32) for m in arrays], units


def _root(nu: Array) -> Array:
    """√ν in float32, neither 0 nor inf, so that m stays finite. A ν that underflows is
    not 0.
    """
    wide, least = jnp.finfo(jnp.float32), float(jnp.finfo(nu.dtype).tiny)
    return jnp.sqrt(
        jnp.clip(nu.astype(jnp.float32), max(least, float(wide.tiny)), wide.max)
    )


def _with_momentum(state: PyTree, arrays: Iterable[Array]) -> PyTree:
    """The state with other arrays of momentum."""
    rest = iter(arrays)

    def new(node: Any) -> Any:
        field = MOMENTUM[type(node)]
        return node._replace(
            **{field: jax.tree.map(lambda _: next(rest), getattr(node, field))}
        )

    return trees.replace(state, tuple(MOMENTUM), new)


def _scale(m: Array) -> Float[Array, ""]:
    """The smallest power of two s with which |m| / s fits into float8."""
    largest = jnp.max(jnp.abs(m), initial=0, where=jnp.isfinite(m))
    least = jnp.maximum(
        largest / float(jnp.finfo(_FLOAT8).max), jnp.finfo(m.dtype).tiny
    )
    return jnp.ldexp(jnp.ones([], m.dtype), jnp.frexp(least)[1])
