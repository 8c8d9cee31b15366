"""AdamW with primal averaging in place of its first moment: a chain of the package's pieces."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike, DTypeLike, PRNGKeyArray, PyTree

from spa_optax._checks import FLAG, RATE, STATE_DTYPE, is_plain_number, one_of
from spa_optax._family import spa
from spa_optax._second_moment import scale_by_factored_second_moment, scale_by_second_moment
from spa_optax._wrappers import in_float32

SecondMoment = Literal["full", "bfloat16", "factored"]
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
    second_moment: SecondMoment = "full",
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with primal averaging in place of its first moment: `spa` on Adam's direction.

    With λ the weight decay, the direction d_k is

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²
        d_k = g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε) + λ y_k

    AdamW scales an average of gradients; this averages scaled gradients, without bias correction.
    Rates and momenta are on AdamW's scale: averaging is 1 − b1, and a step is the learning rate
    times the mean of the last 1/c directions. It is a chain of pieces, to take apart and change:

        optax.chain(
            in_float32(optax.chain(scale_by_second_moment(b2, eps), optax.add_decayed_weights(λ))),
            spa(learning_rate, averaging, interpolation),
        )

    At μ_y = 1 the params are the point to evaluate and to save. Below 1 `eval_params` gives it;
    with `schedule_free_averaging` this is then `optax.contrib.schedule_free_adamw` with b1 = μ_y.

    GPA's authors also have Adam's first moment, one more buffer, and decay z:
    `primal_averaging(optax.adamw(1e-3), 0.0033, 0.7, params_of_base="z")`. But their code forgets
    the decay in y's own step, so its x is too large.

    z replaces the first moment and the float32 master copy. Params and state take these bytes per
    parameter, with bfloat16 params and a `rounding_key`:

        10    z and ν in float32
        8     `state_dtype=jnp.bfloat16`
        6     and `second_moment="bfloat16"`
        4     or `second_moment="factored"`

    AdamW takes 14 with a master copy, 12 in float32, and 10 with `mu_dtype=jnp.bfloat16` too.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k. A share
        1 − μ_y (1 − c) of each direction enters y at once; in AdamW that share is 1 − b1.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, a scalar, or a schedule if `optax.add_decayed_weights` takes one. It is
        decoupled and multiplied by the learning rate, as in `optax.adamw`.
      mask: which params to decay: a tree of booleans, or a function of the params. None means all.
      second_moment: ν is "full", in 32 bits or more; "bfloat16", which needs a `rounding_key`; or
        "factored" as in `optax.adafactor`, with almost no memory, and √(ν + ε²) for √ν + ε. Only
        arrays whose second longest axis is 128 or more are factored.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. Under `optax.inject_hyperparams` put it,
        `state_dtype`, `second_moment` and a function `mask` into `static_args`. For 16-bit params
        also set `hyperparam_dtype` to float32: in bfloat16 a β₂ of 0.999 is 1.

    Returns:
      An optax chain whose `update` needs `params` and keeps their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

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
      2018, arXiv:1804.04235, Sections 3 and 7. Decay of z: Defazio et al., 2025, arXiv:2512.17131.
    """
    RATE.check(weight_decay=weight_decay)
    one_of("full", "bfloat16", "factored").check(second_moment=second_moment)
    if second_moment == "bfloat16" and rounding_key is None:
        raise ValueError('`rounding_key` must be given with `second_moment="bfloat16"`, got None')
    if second_moment == "factored":
        scale = scale_by_factored_second_moment(b2, eps)
    else:
        dtype = jnp.bfloat16 if second_moment == "bfloat16" else None
        scale = scale_by_second_moment(b2, eps, dtype=dtype, rounding_key=rounding_key)
    add_decay = optax.add_decayed_weights(weight_decay, _checked(mask))  # pyright: ignore[reportArgumentType]
    STATE_DTYPE.optional().check(state_dtype=state_dtype)
    is_one = is_plain_number(interpolation) and interpolation == 1
    if is_one and second_moment == "full" and state_dtype in (jnp.bfloat16, "bfloat16"):
        # As an array it may be any number. XLA for TPU v7x then makes one kernel, not two.
        interpolation = jnp.ones([])
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
            jax.tree.map(lambda leaf, _: FLAG.check(mask=leaf), tree, params)
        except ValueError as error:
            raise ValueError(f"`mask` must be a tree of booleans like `params`: {error}") from None
        return tree

    return None if mask is None else mask_of
