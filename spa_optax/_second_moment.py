"""Directions g / (√ν + ε): what Optax lacks is ν in 16 bits, and a factored ν free of bias."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, DTypeLike, Float, PRNGKeyArray, PyTree

from spa_optax._checks import (
    B2,
    EPS,
    KEY,
    POSITIVE_INTEGER,
    POWER,
    check_params,
    is_plain_number,
    one_of,
)
from spa_optax._optax_states import RMSState
from spa_optax._precision import Stream, rounded, seeds_like, wide_dtype
from spa_optax._trees import check_same_tree, is_none
from spa_optax._xla import sharded_like


def scale_by_second_moment(
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformation:
    """Adam's direction without its first moment; ν may be stored in bfloat16.

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²        g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε)

    The direction takes ν as stored.

    Args:
      b2: β₂ in [0, 1).
      eps: ε ≥ 0.
      dtype: dtype of ν. None means the params', in 32 bits or more within `in_float32`. bfloat16
        needs a `rounding_key`: rounded to nearest, ν would not change if 1 − β₂ is small.
      rounding_key: for stochastic rounding of ν, as for `spa`. It is not used for a wider ν.

    Returns:
      A transformation with the state of `optax.scale_by_rms`.

    Raises:
      ValueError: if an argument is out of range; in `init`, if `params` are not floating-point
        arrays; in `update`, if the trees differ.

    Examples:
      The first direction is the gradient's sign.

      >>> import jax.numpy as jnp
      >>> from spa_optax import scale_by_second_moment
      >>> params = jnp.array([4.0, -2.0])
      >>> tx = scale_by_second_moment(eps=0.0)
      >>> direction, state = tx.update(params, tx.init(params), params)
      >>> print(jnp.round(direction, 3))
      [ 1. -1.]

    References:
      Kingma, Ba, Adam, 2015, arXiv:1412.6980, Algorithm 1.
    """
    B2.check(b2=b2)
    EPS.check(eps=eps)
    one_of(jnp.bfloat16, "bfloat16").optional().check(dtype=dtype)
    KEY.optional().check(rounding_key=rounding_key)
    if dtype is not None and rounding_key is None:
        raise ValueError(
            "`rounding_key` must be given with a 16-bit `dtype`, got None: rounded to nearest, the"
            " second moment would not change"
        )
    b2, eps = _as_python(b2), _as_python(eps)

    def init_fn(params: PyTree) -> Any:
        check_params(params, are_trained=True)
        zeros = lambda x: jnp.zeros_like(x, dtype=dtype or jnp.finfo(x.dtype).dtype)  # real
        nu = jax.tree.map(lambda x: sharded_like(zeros(x), x), params)
        return RMSState(jnp.zeros([], jnp.int32), nu)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        _check_state(state, RMSState, "full")
        check_same_tree("state.nu", state.nu, "updates", updates)
        state = jax.tree.map(jnp.asarray, state)  # a checkpoint may have NumPy's
        count = state.count
        seeds = seeds_like(
            None if dtype is None else rounding_key, count, state.nu, Stream.SECOND_MOMENT
        )
        k = jnp.asarray(optax.safe_increment(count))
        old = jax.tree.map(lambda v: v.astype(wide_dtype(v)), state.nu)
        nu = optax.tree.update_moment_per_elem_norm(updates, old, b2, 2)
        store = lambda v, old, seed: old if v is None else rounded(v, old.dtype, seed)
        nu = jax.tree.map(store, nu, state.nu, seeds, is_leaf=is_none)
        nu_hat = jax.tree.map(lambda v: v.astype(wide_dtype(v)), nu)
        with jax.numpy_dtype_promotion("standard"):  # β₂ to the power of an integer
            nu_hat = optax.tree.bias_correction(nu_hat, b2, k)
        scale = lambda g, v: None if g is None else 1 / (jnp.sqrt(v) + eps) * g
        d = jax.tree.map(scale, updates, nu_hat, is_leaf=is_none)
        return d, state._replace(count=k, nu=nu)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_factored_second_moment(
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    power: ArrayLike | None = None,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Adam's direction with Adafactor's second moment: its means over the two longest axes.

    ν is the product of the means along the two axes, divided by the overall mean. It is free of
    bias, and √ν + ε is √(ν + ε²); ε² below Adafactor's 1e-30 counts as 1e-30.

    Args:
      b2: β₂ in [0, 1).
      eps: ε ≥ 0.
      power: ρ in (0, 1]: Adafactor's 1 − (k + 1)^−ρ then replaces β₂ (`optax.adafactor` uses 0.8).
      min_dim_size_to_factor: arrays whose second longest axis is shorter keep a full ν.

    Returns:
      A transformation with the state of `optax.scale_by_factored_rms`.

    Raises:
      ValueError: if an argument is out of range; in `init`, if `params` are not floating-point
        arrays; in `update`, if the trees differ.

    Examples:
      The first ν of a gradient of rank one is its square.

      >>> import jax.numpy as jnp
      >>> from spa_optax import scale_by_factored_second_moment
      >>> params = jnp.outer(jnp.array([1.0, -2.0]), jnp.array([3.0, 4.0]))
      >>> tx = scale_by_factored_second_moment(min_dim_size_to_factor=2)
      >>> direction, state = tx.update(params, tx.init(params), params)
      >>> print(state.v_row, state.v_col, jnp.round(direction, 3))
      [12.5 50. ] [22.5 40. ] [[ 1.  1.]
       [-1. -1.]]

    References:
      Shazeer, Stern, Adafactor, 2018, arXiv:1804.04235, Sections 3 and 7.
    """
    B2.check(b2=b2)
    EPS.check(eps=eps)
    POWER.check(power=power)
    POSITIVE_INTEGER.check(min_dim_size_to_factor=min_dim_size_to_factor)
    b2, eps, rho = _as_python(b2), _as_python(eps), _as_python(power)
    optax_init = optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim_size_to_factor).init
    real = lambda x: jnp.real(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    init = lambda params: optax_init(jax.tree.map(real, params))

    def init_fn(params: PyTree) -> Any:
        check_params(params, are_trained=True)
        state: Any = init(params)
        return state._replace(v=jax.tree.map(sharded_like, state.v, params))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        _check_state(state, optax.FactoredState, "factored")
        check_same_tree("state", state[1:], "init(params)", jax.eval_shape(init, params)[1:])
        state = jax.tree.map(jnp.asarray, state)  # as above
        k, epsilon = state.count, jnp.maximum(eps**2, 1e-30)
        if rho is None:
            k_float = k.astype(float)
            decay = b2 * (1 - b2**k_float) / (1 - b2 ** (k_float + 1))  # weights sum up to 1
        else:
            decay = 1 - (k + 1.0) ** -rho

        def leaf(g: Any, row: Any, column: Any, v: Any) -> _Factored:
            if g is None:
                return _Factored(None, row, column, v)
            square = (g * jnp.conj(g)).real + epsilon
            average = lambda old, new: (decay * old + (1 - decay) * new).astype(old.dtype)
            if v.shape == g.shape:
                v = average(v, square)
                return _Factored(g * v**-0.5, row, column, v)
            i, j = factored_axes(g)
            row, column = average(row, _mean(square, j)), average(column, _mean(square, i))
            # ν = row · column / mean. As roots, none of which overflows.
            rows, columns = jnp.expand_dims(row, j), jnp.expand_dims(column, i)
            d = g * rows**-0.5 * (columns**-0.5 * jnp.sqrt(_mean(rows, i, keepdims=True)))
            return _Factored(d, row, column, v)

        trees = state.v_row, state.v_col, state.v
        result = jax.tree.map(leaf, updates, *trees, is_leaf=is_none)
        is_result = lambda node: isinstance(node, _Factored)
        pick = lambda i: jax.tree.map(lambda leaf: leaf[i], result, is_leaf=is_result)
        d, *moments = map(pick, range(4))
        return d, optax.FactoredState(jnp.asarray(optax.safe_increment(k)), *moments)

    return optax.GradientTransformation(init_fn, update_fn)


class _Factored(NamedTuple):
    """What a step makes of one array. Params may be tuples, so its type tells it from them."""

    direction: Any
    row: Any
    column: Any
    v: Any


def _as_python(value: Any) -> Any:
    """A number as Python's. One of NumPy would make ν float64 under x64."""
    return value if value is None or not is_plain_number(value) else float(value)


def _check_state(state: Any, kind: Any, name: str) -> None:
    if not isinstance(state, kind):
        got = f"a `{type(state).__name__}`"
        raise ValueError(f"`state` must hold a {name} second moment, `{kind.__name__}`, got {got}")


def factored_axes(x: Array) -> tuple[int, int]:
    """The second longest axis and the longest, in optax's order."""
    i, j = np.argsort(x.shape)[-2:]
    return int(i), int(j)


def _mean(x: Array, axis: int, keepdims: bool = False) -> Float[Array, "..."]:
    """A mean whose sum does not overflow."""
    return jnp.sum(x * (1 / x.shape[axis]), axis, keepdims=keepdims)
