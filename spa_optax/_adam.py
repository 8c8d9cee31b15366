"""AdamW with primal averaging for its first moment, and its directions g / (√ν + ε)."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, DTypeLike, Float, PRNGKeyArray, PyTree

from spa_optax import _checks as checks, _trees as trees
from spa_optax._family import spa
from spa_optax._optax_states import RMSState
from spa_optax._precision import Stream, has_narrow, rounded, seeds_like, widen
from spa_optax._wrappers import in_float32
from spa_optax._xla import sharded_like

Mask = PyTree | Callable[[PyTree], PyTree] | None


def spa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    interpolation: optax.ScalarOrSchedule = 1.0,
    *,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask = None,
    second_moment: Literal["full", "bfloat16", "factored"] = "full",
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv:1711.05101) with primal averaging in place of its first moment.

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²
        d_k = g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε) + λ y_k

    It is `spa` on the directions d: AdamW scales an average of gradients. This averages
    scaled gradients, without bias correction. With `schedule_free_averaging` it is
    Schedule-Free AdamW.

    Args: learning_rate: η_k ≥ 0, a scalar or a schedule of the count k, as for AdamW.
      averaging: c_{k+1} = 1 − b1 in [0, 1], a scalar or a schedule of the count k.
      interpolation: μ_y in (0, 1], as for `spa`. Below 1 evaluate and save
      `eval_params`. b2: β₂ in [0, 1), of the second moment. eps: ε ≥ 0. weight_decay: λ
      ≥ 0, as for `optax.add_decayed_weights`. The learning rate multiplies it. mask:
      which params to decay: a tree of booleans, or a function of the params. None means
      all. second_moment: ν is "full", in 32 bits or more; "bfloat16", which needs a
      `rounding_key`; or
        "factored", by `scale_by_factored_second_moment`, with almost no memory.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. Under
        `optax.inject_hyperparams` put it, `state_dtype`, `second_moment` and a function
        `mask` into `static_args`.

    Returns:
      An optax chain whose `update` needs `params` and keeps their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import spa_adamw
      >>> tx, params = spa_adamw(learning_rate=1.0, weight_decay=0.0), jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(params), params)
      >>> # x goes a tenth of the way to z
      >>> print(f"{state[1].z:.3f} {params + updates:.3f}")
      9.000 9.900
    """
    checks.RATE.check(weight_decay=weight_decay)
    checks.one_of("full", "bfloat16", "factored").check(second_moment=second_moment)
    checks.STATE_DTYPE.optional().check(state_dtype=state_dtype)
    if second_moment == "factored":
        scale = scale_by_factored_second_moment(b2, eps)
    else:
        dtype = jnp.bfloat16 if second_moment == "bfloat16" else None
        scale = scale_by_second_moment(b2, eps, dtype=dtype, rounding_key=rounding_key)
    add_decay = optax.add_decayed_weights(weight_decay, _checked(mask))  # pyright: ignore[reportArgumentType]
    is_one = type(interpolation) in (int, float) and interpolation == 1
    if is_one and second_moment == "full" and state_dtype in (jnp.bfloat16, "bfloat16"):
        interpolation = jnp.ones(
            []
        )  # if it does not know the 1, XLA for TPU v7x makes one kernel
    narrow: dict[str, Any] = {"state_dtype": state_dtype, "rounding_key": rounding_key}
    average = spa(learning_rate, averaging, interpolation, **narrow)
    return optax.chain(in_float32(optax.chain(scale, add_decay)), average)


def _checked(mask: Mask) -> Callable[[PyTree], Any] | None:
    """A mask as a function of the params that raises ValueError unless it fits them."""
    leaves = jax.tree.leaves(mask)
    # A tree of booleans may be callable, as an Equinox module is. Its leaves are not.
    function: Any = mask if leaves and all(map(callable, leaves)) else lambda _: mask

    def mask_of(params: PyTree) -> PyTree:
        tree = function(params)
        try:
            jax.tree.map(lambda leaf, _: checks.FLAG.check(mask=leaf), tree, params)
        except ValueError as error:
            raise ValueError(
                f"`mask` must be a tree of booleans like `params`: {error}"
            ) from None
        return tree

    return None if mask is None else mask_of


def scale_by_second_moment(
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformation:
    """The direction of Adam (arXiv:1412.6980, Algorithm 1), without its first moment.

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²        g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε)

    Args: b2: β₂ in [0, 1). eps: ε ≥ 0. dtype: dtype of ν: None, the params' (within
      `in_float32` 32 bits or more), or bfloat16. rounding_key: for stochastic rounding
      of a bfloat16 ν, which rounded to nearest would stay.

    Returns:
      A transformation with the state of `optax.scale_by_rms`.

    Raises: ValueError: if an argument is out of range, `params` are not floats, or the
      trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import scale_by_second_moment
      >>> tx, params = scale_by_second_moment(eps=0.0), jnp.array([4.0, -2.0])
      >>> direction, state = tx.update(params, tx.init(params), params)
      >>> print(jnp.round(direction, 3))  # the gradient's sign
      [ 1. -1.]
    """
    checks.B2.check(b2=b2)
    checks.EPS.check(eps=eps)
    checks.one_of(jnp.bfloat16, "bfloat16").optional().check(dtype=dtype)
    checks.KEY.optional().check(rounding_key=rounding_key)
    if dtype is not None and rounding_key is None:
        raise ValueError(
            "`rounding_key` must be given with a bfloat16 second moment, got None"
        )
    b2, eps = _as_python(b2), _as_python(eps)

    def init_fn(params: PyTree) -> Any:
        checks.check_params(params, are_trained=True)
        zeros = lambda x: jnp.zeros_like(
            x, dtype=dtype or jnp.finfo(x.dtype).dtype
        )  # real
        nu = jax.tree.map(lambda x: sharded_like(zeros(x), x), params)
        return RMSState(jnp.zeros([], jnp.int32), nu)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        trees.check_kind("state", state, RMSState)
        trees.check_same_tree("state.nu", state.nu, "updates", updates)
        if rounding_key is None and has_narrow(state.nu):
            raise ValueError(
                "`rounding_key` must be given where `state.nu` has 16 bits, got None"
            )
        state = jax.tree.map(jnp.asarray, state)  # a checkpoint may have NumPy's
        seeds = seeds_like(rounding_key, state.count, state.nu, Stream.SECOND_MOMENT)
        k = jnp.asarray(optax.safe_increment(state.count))
        nu = optax.tree.update_moment_per_elem_norm(updates, widen(state.nu), b2, 2)
        store = lambda v, old, seed: old if v is None else rounded(v, old.dtype, seed)
        nu = jax.tree.map(store, nu, state.nu, seeds, is_leaf=trees.is_none)
        with jax.numpy_dtype_promotion("standard"):  # β₂ to the power of an integer
            nu_hat = optax.tree.bias_correction(widen(nu), b2, k)
        scale = lambda g, v: None if g is None else 1 / (jnp.sqrt(v) + eps) * g
        d = jax.tree.map(scale, updates, nu_hat, is_leaf=trees.is_none)
        return d, state._replace(count=k, nu=nu)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_factored_second_moment(
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    power: ArrayLike | None = None,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Adam's direction with the second moment of Adafactor (arXiv:1804.04235, Sections
    3 and 7).

        v_{k+1} = β v_k + (1 − β) (|g_k|² + ε²)       β = β₂ (1 − β₂^k) / (1 − β₂^{k+1})

    Only the means of v along its two longest axes, `v_row` and `v_col`, are stored. The
    direction is g_k/√ν, where ν is their product over the overall mean. It needs no
    bias correction.

    Args: b2: β₂ in [0, 1). eps: ε ≥ 0; ε² below Adafactor's 1e-30 counts as 1e-30.
      power: ρ in (0, 1]: Adafactor's 1 − (k + 1)^−ρ then replaces β (`optax.adafactor`
      uses 0.8). min_dim_size_to_factor: arrays whose second longest axis is shorter
      keep a full ν.

    Returns:
      A transformation with the state of `optax.scale_by_factored_rms`.

    Raises:
      ValueError: as for `scale_by_second_moment`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import scale_by_factored_second_moment
      >>> params = jnp.outer(jnp.array([1.0, -2.0]), jnp.array([3.0, 4.0]))
      >>> tx = scale_by_factored_second_moment(min_dim_size_to_factor=2)
      >>> direction, state = tx.update(params, tx.init(params), params)
      >>> # of rank one: exact
      >>> print(state.v_row, state.v_col, jnp.round(direction[1], 3))
      [12.5 50. ] [22.5 40. ] [-1. -1.]
    """
    checks.B2.check(b2=b2)
    checks.EPS.check(eps=eps)
    checks.POWER.check(power=power)
    checks.POSITIVE_INTEGER.check(min_dim_size_to_factor=min_dim_size_to_factor)
    b2, eps, rho = map(_as_python, (b2, eps, power))
    optax_init = optax.scale_by_factored_rms(
        min_dim_size_to_factor=min_dim_size_to_factor
    ).init
    real = lambda x: jnp.real(x) if jnp.iscomplexobj(x) else x
    init = lambda params: optax_init(jax.tree.map(real, params))

    def init_fn(params: PyTree) -> Any:
        checks.check_params(params, are_trained=True)
        state: Any = init(params)
        return state._replace(v=jax.tree.map(sharded_like, state.v, params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        trees.check_kind("state", state, optax.FactoredState)
        trees.check_same_tree(
            "state", state[1:], "init(params)", jax.eval_shape(init, params)[1:]
        )
        if has_narrow(state[1:]):
            raise ValueError(
                "`state` must have 32 bits or more, got 16: put this in `in_float32`"
            )
        state = jax.tree.map(jnp.asarray, state)  # as above
        k, epsilon = state.count, jnp.maximum(eps**2, 1e-30)
        n = k.astype(float)
        decay = (
            b2 * (1 - b2**n) / (1 - b2 ** (n + 1))
            if rho is None
            else 1 - (k + 1.0) ** -rho
        )
        average = lambda old, new: (decay * old + (1 - decay) * new).astype(old.dtype)

        def leaf(g: Any, row: Any, column: Any, v: Any) -> tuple[Any, ...]:
            if g is None:
                return None, row, column, v
            square = (g * jnp.conj(g)).real + epsilon
            if v.shape == g.shape:
                v = average(v, square)
                return g * v**-0.5, row, column, v
            i, j = factored_axes(g)
            row, column = (
                average(row, _mean(square, j)),
                average(column, _mean(square, i)),
            )
            # ν = row · column / mean. As roots, none of which overflows.
            rows, columns = jnp.expand_dims(row, j), jnp.expand_dims(column, i)
            d = (
                g
                * rows**-0.5
                * (columns**-0.5 * jnp.sqrt(_mean(rows, i, keepdims=True)))
            )
            return d, row, column, v

        results = jax.tree.map(leaf, updates, *state[1:], is_leaf=trees.is_none)
        part = lambda i: jax.tree.map(
            lambda _, of: of[i], updates, results, is_leaf=trees.is_none
        )
        d, *moments = map(part, range(4))
        return d, optax.FactoredState(jnp.asarray(optax.safe_increment(k)), *moments)

    return optax.GradientTransformation(init_fn, update_fn)


def _as_python(value: Any) -> Any:
    """A number as Python's. One of NumPy would make ν float64 under x64."""
    return value if value is None or isinstance(value, jax.Array) else float(value)


def factored_axes(x: Array) -> tuple[int, int]:
    """The second longest axis and the longest, in optax's order."""
    i, j = np.argsort(x.shape)[-2:]
    return int(i), int(j)


def _mean(x: Array, axis: int, keepdims: bool = False) -> Float[Array, "..."]:
    """A mean whose sum does not overflow."""
    return jnp.sum(x * (1 / x.shape[axis]), axis, keepdims=keepdims)
