"""AdamW with primal averaging in place of its first moment."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike, DTypeLike, PRNGKeyArray, PyTree

from . import _arguments
from ._spa import spa
from ._wrappers import by_path, in_float32

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
    second_moment: Literal["full", "factored"] = "full",
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv:1711.05101) with primal averaging in place of its first moment.

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²
        g̃_k     = g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε) + λ y_k

    It is `spa` on the directions g̃. AdamW scales an average of gradients; this averages
    scaled gradients, without bias correction. With `schedule_free_averaging` and an
    `interpolation` of 0.9 it is Schedule-Free AdamW, for float32 params.

    Bfloat16 params and their state take 4 bytes per parameter, and 8 in small arrays,
    with `state_dtype=jnp.bfloat16`, `second_moment="factored"` and a `rounding_key`.

    Under `optax.inject_hyperparams` set `hyperparam_dtype=jnp.float32`, and name a
    function `mask`, `second_moment`, `state_dtype`, `rounding_key` and an
    `interpolation` that stays in `static_args`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k, as for AdamW.
      averaging: c_{k+1} in [0, 1], which is 1 − b1 of `optax.adamw`, a scalar or a
        schedule of the count k.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k. 0.9 acts
        like Nesterov momentum, and lowered losses in pretraining. Below 1 evaluate and
        export `eval_params`.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, as for `optax.add_decayed_weights`. The learning rate
        multiplies it.
      mask: which params to decay: a tree of booleans, or a function of the params, as
        float32. None means all.
      second_moment: ν is "full", by `optax.scale_by_rms`, in 32 bits or more; or
        "factored", by `optax.scale_by_factored_rms`, with almost no memory: only the
        means of ν along the two longest axes are stored, where both are 128 or longer.
        There ε² is added to g² instead, and is at least 1e-30.
      state_dtype: dtype of z: bfloat16 or float8_e4m3fn saves memory. None means that
        of the params, but float32 for params of 16 bits. `spa` has the limits of
        float8.
      rounding_key: PRNG key, to round params and z up or down at random. Give it for
        params or z of 16 bits or fewer. Shards, groups and batches of runs need
        different keys, see `spa`.

    Returns:
      An optax chain whose `update` needs `params` and keeps their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import spa_adamw
      >>> tx, params = spa_adamw(learning_rate=1.0, weight_decay=0.0), jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(params), params)
      >>> z, x = state[1].z, params + updates
      >>> print(f"{z:.3f} {x:.3f}")  # x goes a tenth of the way to z
      9.000 9.900

      Bfloat16 params and their state in 4 bytes per parameter, to pretrain:

      >>> import jax
      >>> tx = spa_adamw(
      ...     1e-3,
      ...     interpolation=0.9,
      ...     state_dtype=jnp.bfloat16,
      ...     second_moment="factored",
      ...     rounding_key=jax.random.key(0),
      ... )
      >>> params = jnp.zeros((1024, 1024), jnp.bfloat16)
      >>> arrays = jax.tree.leaves((params, tx.init(params)))
      >>> print(f"{sum(array.nbytes for array in arrays) / params.size:.2f}")
      4.01

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2.
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2017, arXiv:1711.05101,
      Algorithm 2. Shazeer, Stern, Adafactor, 2018, arXiv:1804.04235, Section 3.
    """
    _arguments.B2.check(b2=b2)
    _arguments.NOT_NEGATIVE.with_type(_arguments.SCALAR).check(eps=eps)
    _arguments.NOT_NEGATIVE.check(weight_decay=weight_decay)
    _arguments.one_of("full", "factored").check(second_moment=second_moment)
    if callable(weight_decay):
        weight_decay = _arguments.as_schedule("weight_decay", weight_decay)  # pyright: ignore[reportAssignmentType]
    b2, eps = _as_python_or_jax(b2), _as_python_or_jax(eps)
    if second_moment == "full":
        direction = optax.scale_by_rms(
            decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True
        )
    else:
        direction = _scale_by_factored_rms(b2, eps)
    add_decay = optax.add_decayed_weights(weight_decay, _as_mask_function(mask))  # pyright: ignore[reportArgumentType]
    spa_tx = spa(
        learning_rate,
        averaging,
        interpolation,
        state_dtype=state_dtype,
        rounding_key=rounding_key,
    )
    return optax.chain(in_float32(optax.chain(direction, add_decay)), spa_tx)


def _as_python_or_jax(value: Any) -> Any:
    """A number of Python or JAX: one of NumPy would make ν float64 under x64."""
    return value if isinstance(value, jax.Array) else float(value)


def _scale_by_factored_rms(b2: Any, eps: Any) -> Any:
    """Optax's factored second moment, with Adam's β₂ and bias correction.

    With the decay β₂ (1 − β₂^k) / (1 − β₂^{k+1}) at count k, the moving average is the
    one that Adam has after its correction of the bias.
    """

    def decay_at(count, b2):  # Optax passes its `decay_rate` as b2
        k = jnp.asarray(count).astype(float)
        return b2 * (1 - b2**k) / (1 - b2 ** (k + 1))

    # Of Python floats Python's: `jnp.maximum` inside `nnx.jit` would leave a tracer.
    maximum = max if isinstance(eps, float) else jnp.maximum
    tx = optax.scale_by_factored_rms(
        decay_rate=b2, epsilon=maximum(eps * eps, 1e-30), decay_rate_fn=decay_at
    )
    return by_path(tx)


def _as_mask_function(mask: Mask) -> Callable[[PyTree], Any] | None:
    """A mask as a function of the params that raises ValueError unless it fits them."""
    if mask is None:
        return None
    leaves = jax.tree.leaves(mask)
    # A tree of booleans may be callable, as an Equinox module is. Its leaves are not.
    function: Any = mask if leaves and all(map(callable, leaves)) else lambda _: mask

    def checked_mask(params):
        tree = function(params)
        if jax.tree_util.all_leaves([tree]) and not jax.tree_util.all_leaves([params]):
            raise ValueError(
                f"`mask` must be a tree of booleans like `params`, got {tree}. In "
                "`optax.inject_hyperparams`, name it in `static_args`."
            )
        try:
            jax.tree.map(
                lambda leaf, _: _arguments.BOOLEAN.check(mask=leaf), tree, params
            )
        except ValueError as error:
            raise ValueError(
                f"`mask` must be a tree of booleans like `params`: {error}"
            ) from None
        return tree

    return checked_mask
