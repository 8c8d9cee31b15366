"""AdamW with its first moment by primal averaging."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike, DTypeLike, PRNGKeyArray, PyTree

from spa_optax._checks import (
    check_rate,
    check_same_tree,
    check_second_moment,
    is_none,
    is_plain_number,
)
from spa_optax._gpa import gpa
from spa_optax._precision import is_float
from spa_optax._spa import spa


def spa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with its first moment by primal averaging: `spa` of Adam's direction.

    With λ the weight decay, the direction d_k is

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²
        d_k = g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε) + λ x_k

    and the rest is `spa`. It differs from AdamW in that it averages the steps that Adam has scaled,
    where AdamW scales an average of gradients, and in that momentum starts from 0 without a
    correction of its bias. Rates and momenta are on the scale of AdamW's: averaging stands for
    1 − b1, and steps for the mean of the last 1/c directions, times the learning rate.

    In memory it has z in the place of the first moment and, for params of 16 bits or fewer, of the
    float32 master copy too: 10 bytes a parameter with a float32 ν, 8 with z in bfloat16, and 12 for
    float32 params. AdamW takes 14 with a master copy, 12 with float32 params, and 10 with float32
    params and `mu_dtype=jnp.bfloat16`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, a scalar, or a schedule where `optax.add_decayed_weights` takes one. It
        is decoupled, and multiplied by the learning rate, as in `optax.adamw`.
      mask: which params to decay, as for `optax.adamw`: a tree of booleans, or a function of the
        params that returns one.
      state_dtype: dtype of z, as for `spa`. ν has at least 32 bits.
      rounding_key: for stochastic rounding, as for `spa`.

    Under `optax.inject_hyperparams` name `rounding_key`, and `mask` where it is a function, in its
    `static_args`, and for params of 16 bits set `hyperparam_dtype` to float32, as for
    `optax.adamw`: in bfloat16 a β₂ of 0.999 is 1.

    Returns:
      A transformation, a chain, whose `update` needs `params`; its updates have the params' dtype.
      Params are the point to evaluate and to save.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is not a real floating-point dtype, or,
        in `update`, `params` is missing or the trees differ.

    Examples:
      The first direction is the gradient's sign: z goes from 10 to 9, and x a tenth of the way.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_adamw
      >>> tx = spa_adamw(learning_rate=1.0, weight_decay=0.0)
      >>> params = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(params), params)
      >>> print(f"{optax.tree.get(state, 'z'):.3f} {optax.apply_updates(params, updates):.3f}")
      9.000 9.900

    References:
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2019, arXiv:1711.05101. Defazio,
      Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2.
    """
    last = spa(learning_rate, averaging, state_dtype=state_dtype, rounding_key=rounding_key)
    return optax.chain(_adamw_direction(b2, eps, weight_decay, mask), last)


def gpa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.0033,
    interpolation: optax.ScalarOrSchedule = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with its first moment by generalized primal averaging: `gpa` of Adam's direction.

    The direction is that of `spa_adamw`, at y, and the rest is `gpa`. With averaging(k) = 1/(k + 1)
    and a constant rate it is `optax.contrib.schedule_free_adamw`, with b1 = μ_y.

    The authors' own GPA-AdamW differs twice. It has Adam's first moment as well, a buffer more,
    which `optax.chain(optax.scale_by_adam(), gpa(1e-3))` has too. And it decays z, by
    z ← (1 − γλ) z, where here λ y is part of the direction: these are different iterates.

    Args:
      learning_rate: γ_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k; see `gpa` for its scale.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k. 1 − μ_y (1 − c) of each
        direction enters y at once, as 1 − b1 in AdamW.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, as for `spa_adamw`, of y.
      mask: which params to decay, as for `spa_adamw`.
      state_dtype: dtype of z, as for `spa`. ν has at least 32 bits.
      rounding_key: for stochastic rounding, which params of 16 bits need here: see `gpa`.

    For `optax.inject_hyperparams` see `spa_adamw`.

    Returns:
      A transformation, a chain, whose `update` needs `params`; its updates have the params' dtype.
      `eval_params` gives the point to evaluate and to save.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is not a real floating-point dtype, or,
        in `update`, `params` is missing or the trees differ.

    Examples:
      The first direction is the gradient's sign: z goes from 10 to 9, x half of the way to it, and
      y half of the way from there.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, gpa_adamw
      >>> tx = gpa_adamw(1.0, averaging=0.5, interpolation=0.5, weight_decay=0.0)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(y), y)
      >>> y = optax.apply_updates(y, updates)
      >>> print(f"{optax.tree.get(state, 'z'):.3f} {eval_params(state, y):.3f} {y:.3f}")
      9.000 9.500 9.250

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, 2025,
      arXiv:2512.17131. Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2019,
      arXiv:1711.05101.
    """
    last = gpa(
        learning_rate,
        averaging,
        interpolation,
        state_dtype=state_dtype,
        rounding_key=rounding_key,
    )
    return optax.chain(_adamw_direction(b2, eps, weight_decay, mask), last)


def _adamw_direction(
    b2: ArrayLike,
    eps: ArrayLike,
    weight_decay: optax.ScalarOrSchedule,
    mask: PyTree | Callable[[PyTree], PyTree] | None,
) -> optax.GradientTransformationExtraArgs:
    """That of AdamW without a first moment, in 32 bits or more, as is its state."""
    check_second_moment(b2, eps)
    check_rate("weight_decay", weight_decay)
    # A scalar of NumPy would make a float64 of ν, where there are any.
    b2, eps = (float(v) if is_plain_number(v) else v for v in (b2, eps))  # pyright: ignore[reportArgumentType]
    inner = optax.chain(
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),  # pyright: ignore[reportArgumentType]
    )

    def widened(x: Any) -> Any:
        if not is_float(x):
            return None
        dtype = jnp.result_type(x)
        if dtype.itemsize <= 2:
            dtype = jnp.float32
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype)
        return jnp.asarray(x, dtype)

    def init_fn(params: PyTree) -> Any:
        return inner.init(jax.tree.map(widened, params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("`params` must be passed to `update`, which starts from x, got None")
        check_same_tree("updates", updates, "params", params)
        wide_updates, params = jax.tree.map(widened, (updates, params))
        with jax.numpy_dtype_promotion("standard"):  # optax raises β₂ to the power of an integer
            directions, state = inner.update(wide_updates, state, params, **extra_args)
        of_others = lambda d, g: g if d is None else d
        return jax.tree.map(of_others, directions, updates, is_leaf=is_none), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
