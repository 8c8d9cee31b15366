"""AdamW with primal averaging in place of its first moment."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, DTypeLike, Int, PRNGKeyArray, PyTree

from spa_optax._checks import (
    check_choice,
    check_clipping_threshold,
    check_factored,
    check_mask,
    check_rate,
    check_same_tree,
    check_second_moment,
    check_second_moment_dtype,
    is_none,
    is_plain_number,
)
from spa_optax._gpa import gpa
from spa_optax._precision import is_float
from spa_optax._second_moment import scale_by_factored_rms, scale_by_rms
from spa_optax._spa import spa

SecondMoment = Literal["full", "factored"]
DecayAt = Literal["params", "z"]


def spa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    decay_at: DecayAt = "params",
    second_moment: SecondMoment = "full",
    second_moment_dtype: DTypeLike | None = None,
    decay_rate: ArrayLike | None = None,
    clipping_threshold: ArrayLike | None = None,
    min_dim_size_to_factor: int | None = None,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with primal averaging in place of its first moment: `spa` on Adam's direction.

    With λ the weight decay, the direction d_k is

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²
        d_k = g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε) + λ x_k

    and `spa` does the rest. AdamW scales an average of gradients; this averages scaled gradients.
    Its momentum starts from 0 without bias correction. Rates and momenta are on AdamW's scale:
    averaging is 1 − b1, and a step is the learning rate times the mean of the last 1/c directions.

    z replaces the first moment and the float32 master copy. Bytes per parameter for bfloat16 params
    and their state (the last three rows with a `rounding_key`):

        10    z and ν in float32
        8     `state_dtype=jnp.bfloat16`
        6     and `second_moment_dtype=jnp.bfloat16`
        4     or, instead, `second_moment="factored"`

    AdamW takes 14 with a master copy, 12 with float32 params, and 10 with float32 params and
    `mu_dtype=jnp.bfloat16`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, a scalar, or a schedule if `optax.add_decayed_weights` takes one. It is
        decoupled and multiplied by the learning rate, as in `optax.adamw`.
      mask: which params to decay, as for `optax.adamw`: a tree of booleans, or a function of the
        params that returns one.
      decay_at: "params": λ x_k is part of the direction, as above. "z": λ z_k takes its place.
      second_moment: "full", or "factored" as in `optax.adafactor`: only the means of ν over each of
        the two longest axes are stored, and ν is their product over the overall mean. √ν + ε is
        then √(ν + ε²). Arrays that are not factored keep a full ν.
      second_moment_dtype: dtype of a full ν, as it is stored and as d_k takes it. None means 32
        bits or more. bfloat16 needs a `rounding_key`: rounded to nearest, ν would not change if
        1 − β₂ is small.
      decay_rate: for a factored ν, ρ in (0, 1]: Adafactor's 1 − (k + 1)^−ρ then replaces β₂
        (`optax.adafactor` uses 0.8). None uses β₂ with bias correction.
      clipping_threshold: the largest root mean square of the first term of d_k, per array; larger
        ones are scaled down to it. `optax.adafactor` uses 1. None means no limit.
      min_dim_size_to_factor: arrays whose second longest axis is shorter are not factored. None
        means optax's 128.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`.

    Under `optax.inject_hyperparams`, list `rounding_key`, the dtypes, `min_dim_size_to_factor` and
    a `mask` that is a function in `static_args`. For 16-bit params also set `hyperparam_dtype` to
    float32, as for `optax.adamw`: in bfloat16 a β₂ of 0.999 is 1.

    Returns:
      An optax chain whose `update` needs `params`; its updates have the params' dtype. Evaluate and
      save the params.

    Raises:
      ValueError: if an argument is out of range or conflicts with another; in `update`, if `params`
        is missing or the trees differ.

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
      Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2. Shazeer, Stern, Adafactor,
      2018, arXiv:1804.04235, Sections 3, 6 and 7.
    """
    last = spa(learning_rate, averaging, state_dtype=state_dtype, rounding_key=rounding_key)
    second = (second_moment, second_moment_dtype, decay_rate, min_dim_size_to_factor)
    direction = _direction(b2, eps, *second, clipping_threshold, rounding_key)
    return _with_decay(direction, last, weight_decay, mask, decay_at)


def gpa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.0033,
    interpolation: optax.ScalarOrSchedule = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    decay_at: DecayAt = "params",
    second_moment: SecondMoment = "full",
    second_moment_dtype: DTypeLike | None = None,
    decay_rate: ArrayLike | None = None,
    clipping_threshold: ArrayLike | None = None,
    min_dim_size_to_factor: int | None = None,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with generalized primal averaging in place of its first moment.

    This is `gpa` on the direction of `spa_adamw`, taken at y. With `schedule_free_averaging` as
    averaging it is `optax.contrib.schedule_free_adamw` with b1 = μ_y.

    The authors' GPA-AdamW also has Adam's first moment, one more buffer, as
    `optax.chain(optax.scale_by_adam(), gpa(1e-3))` does. By default it decays z, as `decay_at="z"`
    does here, but leaves the decay out of y's own step: its x is then too large, in a steady state
    by (1 − c)/c · (1 − μ_y)/μ_y · γλ of itself.

    Args:
      learning_rate: γ_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k; see `gpa` for its scale.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k. The part of each
        direction that enters y at once is 1 − μ_y (1 − c), as 1 − b1 in AdamW.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, as for `spa_adamw`.
      mask: which params to decay, as for `spa_adamw`.
      decay_at: "params", where λ y_k is part of the direction, or "z", as for `spa_adamw`.
      second_moment: "full" or "factored", as for `spa_adamw`.
      second_moment_dtype: dtype of a full ν, as for `spa_adamw`.
      decay_rate: for a factored ν, as for `spa_adamw`.
      clipping_threshold: for each array's direction, as for `spa_adamw`.
      min_dim_size_to_factor: for a factored ν, as for `spa_adamw`.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, which 16-bit params need here: see `gpa`.

    For bytes per parameter and `optax.inject_hyperparams`, see `spa_adamw`.

    Returns:
      An optax chain whose `update` needs `params`; its updates have the params' dtype.
      `eval_params` gives the point to evaluate and to save.

    Raises:
      ValueError: if an argument is out of range or conflicts with another; in `update`, if `params`
        is missing or the trees differ.

    Examples:
      The first direction is the gradient's sign: z goes from 10 to 9, x half of the way to z, and y
      is midway between x and z.

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
    second = (second_moment, second_moment_dtype, decay_rate, min_dim_size_to_factor)
    direction = _direction(b2, eps, *second, clipping_threshold, rounding_key)
    return _with_decay(direction, last, weight_decay, mask, decay_at)


def _direction(
    b2: ArrayLike,
    eps: ArrayLike,
    second_moment: str,
    second_moment_dtype: DTypeLike | None,
    decay_rate: ArrayLike | None,
    min_dim_size_to_factor: int | None,
    clipping_threshold: ArrayLike | None,
    rounding_key: PRNGKeyArray | None,
) -> optax.GradientTransformation:
    """The direction g / (√ν + ε), for gradients and params of 32 bits or more."""
    check_second_moment(b2, eps)
    check_choice("second_moment", second_moment, SecondMoment)
    is_factored = second_moment == "factored"
    check_factored(is_factored, decay_rate, min_dim_size_to_factor)
    check_second_moment_dtype(second_moment_dtype, is_factored, rounding_key)
    check_clipping_threshold(clipping_threshold)
    # A NumPy scalar would make ν float64 under x64.
    b2, eps = (float(v) if is_plain_number(v) else v for v in (b2, eps))  # pyright: ignore[reportArgumentType]
    if is_factored:
        scale = scale_by_factored_rms(b2, eps, decay_rate, min_dim_size_to_factor or 128)
    else:
        scale = scale_by_rms(b2, eps, second_moment_dtype, rounding_key)
    clips = clipping_threshold is not None
    clip = optax.clip_by_block_rms(clipping_threshold) if clips else optax.identity()

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        d, state = scale.update(updates, state, params)
        d, _ = clip.update(d, optax.EmptyState())
        return d, state

    return optax.GradientTransformation(scale.init, update_fn)


def _with_decay(
    direction: optax.GradientTransformation,
    last: optax.GradientTransformationExtraArgs,
    weight_decay: optax.ScalarOrSchedule,
    mask: PyTree | Callable[[PyTree], PyTree] | None,
    decay_at: str,
) -> optax.GradientTransformationExtraArgs:
    """Chains a direction, weight decay and a member of the family, in 32 bits or more."""
    check_rate("weight_decay", weight_decay)
    check_choice("decay_at", decay_at, DecayAt)
    add_decay = optax.add_decayed_weights(weight_decay, mask)  # pyright: ignore[reportArgumentType]

    def decay_of_z(count: Int[Array, ""], z: PyTree) -> PyTree:
        now = weight_decay(count) if callable(weight_decay) else weight_decay
        add = optax.add_decayed_weights(now, mask)  # pyright: ignore[reportArgumentType]
        with jax.numpy_dtype_promotion("standard"):
            return add.update(optax.tree.zeros_like(z), add.init(z), z)[0]

    def init_fn(params: PyTree) -> Any:
        check_mask(mask, params)
        wide = jax.tree.map(_widened, params)
        return direction.init(wide), add_decay.init(wide)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        del extra_args
        if params is None:
            raise ValueError("`params` must be passed to `update`, got None")
        check_same_tree("updates", updates, "params", params)
        of_direction, of_decay = state
        g, x = jax.tree.map(_widened, (updates, params))
        with jax.numpy_dtype_promotion("standard"):  # optax raises β₂ to the power of an integer
            d, of_direction = direction.update(g, of_direction, x)
            decayed, of_decay = add_decay.update(d, of_decay, x)
        d = decayed if decay_at == "params" else d
        of_others = lambda d, g: g if d is None or g is None else d
        return jax.tree.map(of_others, d, updates, is_leaf=is_none), (of_direction, of_decay)

    if decay_at == "z":
        update: Any = last.update
        last = last._replace(update=dataclasses.replace(update, decay=decay_of_z))
    return optax.chain(optax.GradientTransformationExtraArgs(init_fn, update_fn), last)


def _widened(x: Any) -> Any:
    """In 32 bits or more; None for what is not trained."""
    if not is_float(x):
        return None
    dtype = jnp.result_type(x)
    if dtype.itemsize <= 2:
        dtype = jnp.float32
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    return jnp.asarray(x, dtype)
