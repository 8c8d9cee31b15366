"""Averaging, and storage in 16 and 8 bits, around any finished Optax optimizer."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from spa_optax._checks import KEY, TRANSFORMATION, one_of
from spa_optax._core import SPAState, current_z
from spa_optax._family import spa
from spa_optax._optax_states import MOMENTUM, SKIPS_UPDATES, visible_sam
from spa_optax._precision import Stream, round_update, rounded, seeds_like, widen
from spa_optax._trees import (
    check_kind,
    check_same_tree,
    fill_none,
    find,
    is_none,
    is_trained,
    kinds_of,
    map_trained,
    replace,
)


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: Int[Array, ""]  # the random bits depend on it
    base: PyTree


_AVERAGES = (SPAState, optax.contrib.ScheduleFreeState)
_NOT_IN_BASE: dict[type, str] = {
    **dict.fromkeys(_AVERAGES, "averages"),
    StochasticRoundingState: "rounds: pass `rounding_key` instead",
}


class Float8MomentumState(NamedTuple):
    """State of `float8_momentum`."""

    count: Int[Array, ""]  # the random bits depend on it
    base: PyTree  # with m / s as its momentum (Adam's: m / (s √ν)), in float8
    scales: Float[Array, " arrays"]  # s, a power of two for each array of momentum


class PrimalAveragingState(NamedTuple):
    """State of `primal_averaging`."""

    base: PyTree
    average: SPAState


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 for params of 16 bits or fewer.

    Its state is that for float32 params, and its updates are float32. Optax's transformations would
    keep second moments in bfloat16, where a β₂ of 0.999 is 1.

    Args:
      inner: any transformation, such as a direction in a chain before `spa`.

    Returns:
      A transformation with the state of `inner`. Updates of integer params are returned unchanged.

    Raises:
      ValueError: if `inner` is not a transformation, or, in `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import in_float32
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> print(in_float32(optax.scale_by_adam()).init(params).nu.dtype)
      float32
    """
    TRANSFORMATION.check(inner=inner)
    tx = optax.with_extra_args_support(inner)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        if params is not None:
            check_same_tree("updates", updates, "params", params)
        with jax.numpy_dtype_promotion("standard"):  # optax raises β₂ to the power of an integer
            u, state = tx.update(widen(updates), state, widen(params), **extra_args)
        return fill_none(u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: tx.init(widen(params)), update_fn)


def primal_averaging(
    base: optax.GradientTransformation,
    averaging: optax.ScalarOrSchedule,
    interpolation: optax.ScalarOrSchedule = 1.0,
    *,
    params_of_base: Literal["params", "z"] = "params",
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Primal averaging around any finished optimizer, whose updates have their rate and sign.

    With u_k the update of `base`, step k = 0, 1, 2, … is

        z_{k+1} = z_k + u_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}

    This is `spa` with η g = −u: the params are y, `eval_params` gives x, μ_y = 1 adds momentum
    1 − c, and `schedule_free_averaging` makes it Schedule-Free. `base` runs in float32, as in
    `in_float32`. Put `optax.MultiSteps`, `optax.apply_if_finite`, `optax.masked` around it.

    Args:
      base: a finished optimizer: `optax.sgd(0.1)`, `optax.adamw(1e-3)`, `optax.contrib.muon(0.02)`.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k; see `spa` for its scale.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k, as for `spa`.
      params_of_base: the params that `base` sees: "params", y_k; or "z", where weight decay, trust
        ratios and the like are those of z_k. Use "z" for `optax.contrib.cocob`.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. 16-bit params need it.

    Returns:
      A transformation whose `update` needs `params`, and passes extra arguments on to `base`. Its
      state has the fields `base` and `average`, an `SPAState`, in which η is 1 and the gradient −u.

    Raises:
      ValueError: if an argument is out of range; in `init`, if `base` averages or rounds already,
        skips updates, or moves params back (`optax.lookahead`, `optax.contrib.sam`); in `update`,
        if `params` is missing or the trees differ.

    Examples:
      A step of −4 takes z from 10 to 6, x half of the way to z, and y is midway between x and z.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, primal_averaging
      >>> tx = primal_averaging(optax.sgd(2.0), averaging=0.5, interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(y), y)
      >>> y = optax.apply_updates(y, updates)
      >>> print(state.average.z, eval_params(state, y), y)
      6.0 8.0 7.0

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, 2025,
      arXiv:2512.17131. Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682.
    """
    TRANSFORMATION.check(base=base)
    one_of("params", "z").check(params_of_base=params_of_base)
    tx = in_float32(base)
    average = spa(1.0, averaging, interpolation, state_dtype=state_dtype, rounding_key=rounding_key)

    def init_fn(params: PyTree) -> PrimalAveragingState:
        state = tx.init(params)
        for node in find(state, tuple(_NOT_IN_BASE) + SKIPS_UPDATES):
            does = _NOT_IN_BASE.get(type(node), "skips updates: put it around")
            raise ValueError(
                "`base` must neither average, round nor skip updates, got a"
                f" `{type(node).__name__}`, which {does}"
            )
        for node in [*visible_sam(state), *find(state, optax.LookaheadState)]:
            raise ValueError(
                f"`base` must not move params aside or back, got a `{type(node).__name__}`: for"
                " `optax.contrib.sam` set `opaque_mode=True`"
            )
        return PrimalAveragingState(state, average.init(params))  # pyright: ignore[reportArgumentType]

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        observe: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PrimalAveragingState]:
        check_kind("state", state, PrimalAveragingState)
        seen = current_z(state.average, params) if params_of_base == "z" else params
        u, of_base = tx.update(updates, state.base, seen, **extra_args)
        minus_u = fill_none(map_trained(jnp.negative, u), u)
        u, of_average = average.update(minus_u, state.average, params, observe=observe)
        return u, PrimalAveragingState(of_base, of_average)  # pyright: ignore[reportArgumentType]

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def stochastic_rounding(
    base: optax.GradientTransformation, key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Trains params of 16 bits or fewer by any finished optimizer, without a master copy.

        x_{k+1} = x_k + u_k, rounded up or down at random, with x_k + u_k as the mean

    (If a step more than halves or doubles a param, or turns its sign, the result is rounded once
    more, to nearest. The mean may then be off by an ulp of the larger of the two.) `base` runs in
    float32, as in `in_float32`. Wider params are trained as by `base` alone.

    Args:
      base: a finished optimizer: `optax.sgd(0.1)`, `optax.adamw(1e-3)`, `optax.contrib.muon(0.02)`.
      key: PRNG key. The random bits depend on it, the count and the position in the array, as for
        `spa`. Two optimizers with one key round alike: under `optax.partition` give each its own.

    Returns:
      A transformation whose `update` needs `params`, and passes extra arguments on to `base`. Its
      state has the fields `count` and `base`.

    Raises:
      ValueError: if an argument is of the wrong kind; in `init`, if `base` averages; in `update`,
        if `params` is missing or the trees differ.

    Examples:
      Neighbours of 1 in bfloat16 are 1/128 apart. A step of a quarter of that is rounded up one
      time in four.

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import stochastic_rounding
      >>> tx = stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> params = jnp.ones(100_000, jnp.bfloat16)
      >>> updates, state = tx.update(jnp.full(100_000, -1 / 512), tx.init(params), params)
      >>> print(jnp.unique(updates), f"{jnp.mean(updates > 0):.2f}")
      [0 0.0078125] 0.25

    References:
      Gupta et al., Deep Learning with Limited Numerical Precision, 2015, arXiv:1502.02551.
    """
    TRANSFORMATION.check(base=base)
    KEY.check(key=key)
    tx = in_float32(base)

    def init_fn(params: PyTree) -> StochasticRoundingState:
        state = tx.init(params)
        for node in find(state, _AVERAGES):
            raise ValueError(
                f"`base` must not average, got a `{type(node).__name__}`: use `primal_averaging("
                "base, schedule_free_averaging(...), interpolation, rounding_key=key)`, or pass"
                " `rounding_key` to the member of the family"
            )
        return StochasticRoundingState(jnp.zeros([], jnp.int32), state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, StochasticRoundingState]:
        if params is None:
            raise ValueError("`params` must be passed to `update`, got None")
        check_kind("state", state, StochasticRoundingState)
        u, of_base = tx.update(updates, state.base, params, **extra_args)
        count = jnp.asarray(state.count)
        seeds = seeds_like(key, count, u, Stream.PARAMS_AND_Z)

        def round_leaf(u: Any, x: Any, seed: Any) -> Array | None:
            if u is None:
                return None
            u, x = jnp.asarray(u), jnp.asarray(x)
            return round_update(u, x, seed) if is_trained(x) else jnp.zeros_like(x)

        u = jax.tree.map(round_leaf, u, params, seeds, is_leaf=is_none)
        return u, StochasticRoundingState(jnp.asarray(optax.safe_increment(count)), of_base)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def float8_momentum(
    base: optax.GradientTransformation, key: PRNGKeyArray
) -> optax.GradientTransformationExtraArgs:
    """Stores the momentum of any of Optax's optimizers in 8 bits, in float8_e4m3fn.

        m = s q,  q ← m / s rounded up or down at random, with m / s as the mean

    Each array has its own s, the power of two with which max |q| is from 224 to 448, the largest
    number of float8_e4m3fn. Adam divides m by √ν, which may differ a lot within an array. So there
    q stands for m / √ν. With bfloat16 params put it into `stochastic_rounding` or
    `primal_averaging`: Muon's kernels then take 3 bytes a parameter, or with a bfloat16 z 5.

    Args:
      base: an optimizer that holds the state of `optax.trace`, `optax.ema`, `scale_by_adam`,
        `scale_by_lion` or `optax.contrib.scale_by_muon`: SGD, AdamW, Lion, Muon, Adafactor. A
        second moment stays as it is.
      key: PRNG key, as for `stochastic_rounding`, which may have the same.

    Returns:
      A transformation whose state has the fields `count`, `base` (the state of `base`, with q as
      its momentum) and `scales` (s). Put `track_momentum` inside, around `base`.

    Raises:
      ValueError: if an argument is of the wrong kind; in `init`, if `base` averages, or has no such
        momentum, or one of complex numbers or of 64 bits.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import float8_momentum
      >>> tx = float8_momentum(optax.sgd(1.0, momentum=0.5), jax.random.key(0))
      >>> params = jnp.zeros(2)
      >>> updates, state = tx.update(jnp.array([2.0, 3.0]), tx.init(params), params)
      >>> print(optax.tree.get(state, "trace"), state.scales)
      [256 384] [0.0078125]

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, arXiv:2110.02861, has
      int8 codes and an s for each block of 2,048.
    """
    TRANSFORMATION.check(base=base)
    KEY.check(key=key)
    tx = optax.with_extra_args_support(base)
    float8 = jnp.float8_e4m3fn

    def pack(of_base: PyTree, count: Array) -> Float8MomentumState:
        arrays = jax.tree.map(jnp.divide, *_momentum_and_units(of_base))
        scales = [_scale(m, float(jnp.finfo(float8).max)) for m in arrays]
        seeds = seeds_like(key, count, arrays, Stream.MOMENTUM)
        store = lambda m, s, seed: rounded(m / s, float8, seed)
        q = jax.tree.map(store, arrays, scales, seeds)
        return Float8MomentumState(
            count, _with_momentum(of_base, q), jnp.array(scales, jnp.float32)
        )

    def init_fn(params: PyTree) -> Float8MomentumState:
        of_base = tx.init(params)
        for node in find(of_base, _AVERAGES):
            raise ValueError(f"`base` must not average, got a `{type(node).__name__}`")
        if not find(of_base, tuple(MOMENTUM)):
            names = ", ".join(f"`{kind.__name__}`" for kind in MOMENTUM)
            raise ValueError(f"`base` must hold one of {names}, got {kinds_of(of_base)}")
        for dtype in {m.dtype for m in _momentum_of(of_base)}:
            if jnp.issubdtype(dtype, jnp.complexfloating) or dtype.itemsize > 4:
                rule = "have a momentum of real numbers in 32 bits or fewer"
                raise ValueError(f"`base` must {rule}, got one of dtype {dtype}")
        return pack(of_base, jnp.zeros([], jnp.int32))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Float8MomentumState]:
        check_kind("state", state, Float8MomentumState)
        q, units = _momentum_and_units(state.base)
        m = jax.tree.map(lambda q, s, unit: q * s * unit, q, list(state.scales), units)
        u, of_base = tx.update(updates, _with_momentum(state.base, m), params, **extra_args)
        inputs = (updates,) if params is None else (updates, params)
        with jax.numpy_dtype_promotion("standard"):  # as from a momentum in the params' dtype
            cast = lambda u, *of: u.astype(jnp.result_type(*of))
            u = fill_none(map_trained(cast, u, *inputs), u)
        return u, pack(of_base, jnp.asarray(optax.safe_increment(jnp.asarray(state.count))))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _momentum_of(state: PyTree) -> list[Array]:
    """The arrays of Optax's momentum in a state."""
    fields = [getattr(node, MOMENTUM[type(node)]) for node in find(state, tuple(MOMENTUM))]
    return list(map(jnp.asarray, jax.tree.leaves(fields)))


def _momentum_and_units(state: PyTree) -> tuple[list[Array], list[Array]]:
    """The same in float32, and what each array is divided by: √ν under Adam, else 1."""
    units = []
    for node in find(state, tuple(MOMENTUM)):
        if isinstance(node, optax.ScaleByAdamState):
            units += [_root(jnp.asarray(v)) for v in jax.tree.leaves(node.nu)]
        else:
            num_arrays = len(jax.tree.leaves(getattr(node, MOMENTUM[type(node)])))
            units += [jnp.ones([], jnp.float32)] * num_arrays
    return [m.astype(jnp.float32) for m in _momentum_of(state)], units


def _root(nu: Array) -> Array:
    """√ν in float32, neither 0 nor inf, so that m stays finite. A ν that underflows is not 0."""
    wide, least = jnp.finfo(jnp.float32), float(jnp.finfo(nu.dtype).tiny)
    return jnp.sqrt(jnp.clip(nu.astype(jnp.float32), max(least, float(wide.tiny)), wide.max))


def _with_momentum(state: PyTree, arrays: Iterable[Array]) -> PyTree:
    """The state with other arrays in their places."""
    rest = iter(arrays)

    def new(node: Any) -> Any:
        field = MOMENTUM[type(node)]
        return node._replace(**{field: jax.tree.map(lambda _: next(rest), getattr(node, field))})

    return replace(state, tuple(MOMENTUM), new)


def _scale(m: Array, limit: float) -> Float[Array, ""]:
    """The smallest power of two s with |m| / s < limit."""
    largest = jnp.max(jnp.abs(m), initial=0, where=jnp.isfinite(m))
    least = jnp.maximum(largest / limit, jnp.finfo(m.dtype).tiny)
    return jnp.ldexp(jnp.ones([], m.dtype), jnp.frexp(least)[1])
