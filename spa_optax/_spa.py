"""The members of the family: `spa` and `spa_from_sgdm`."""

import optax
from jaxtyping import DTypeLike, PRNGKeyArray

from . import _arguments
from ._checks import check_state_dtype_of_sgd
from ._codec import codec_of
from ._coefficients import XZCoefficients
from ._core import member_from_rule
from ._sgdm import evaluate_sgdm, sgdm_coefficients


def spa(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    interpolation: optax.ScalarOrSchedule = 1.0,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic primal averaging (SPA): SGD with momentum, written as an average.

    An interpolation below 1 makes it generalized primal averaging (GPA). With y_k the
    params, g_k the gradient at y_k and z_0 = x_0 = y_0, step k = 0, 1, 2, … is

        z_{k+1} = z_k − η_k g_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}

    At μ_y = 1 the params are x, the point to evaluate and to export. For constants the
    iterates are then those of `optax.sgd(η c, momentum=1 − c)`; for schedules see
    `hyperparams_to_sgdm`. With μ_y < 1 evaluate and export x, from
    `eval_params(opt_state, params)`: y and z are stored, x is not. To resume a run,
    save y, the params.

    Put gradient transforms (clipping, `optax.add_decayed_weights`) before `spa` in a
    chain, in `in_float32` if params have 16 bits. A finished optimizer there, such as
    `optax.sgd(0.1)`, makes the loss climb, and nothing warns: use `primal_averaging`.
    Do not modify the update after `spa` or around it (`optax.lookahead`). Where the
    state holds z itself, z would not follow, and would pull x back. After editing
    params call `shift_z`.

    If params or z have 16 bits or fewer, the state holds z − params in place of z. Then
    z is also the params' master copy.

    Under `optax.inject_hyperparams` set `hyperparam_dtype=jnp.float32`, and name
    `state_dtype`, `rounding_key` and an `interpolation` that stays in `static_args`. An
    injected `interpolation` may change, so that no update may be None.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k. To replace SGD
        with momentum, pass α/(1 − β).
      averaging: c_{k+1} = 1 − momentum, in [0, 1], a scalar or a schedule of the count
        k.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k, for y_{k+1}.
        Below 1 a gradient moves y at once by (1 − μ_y (1 − c)) η g. x is
        recovered from y and z, and in it rounding errors of y add up, to about
        1/(μ_y √(2c)) times one. Above 10 times `init` warns if params have 16 bits.
      state_dtype: dtype of z: float8_e4m3fn, bfloat16, float32 or float64. None means
        that of the params, but float32 for params of 16 bits. To change it in mid-run
        use `convert`. Float8 is for steps like Adam's, at rates of 2e-5 or more:
        z − params is clipped at 1.75. It needs a `rounding_key`, and a c that does not
        end between 0 and 0.0125.
      rounding_key: PRNG key. With it params and z, if they are stored in fewer bits
        than a step computes in, are rounded up or down at random, so that the mean is
        right. Without it they are rounded to nearest, as complex numbers always are,
        and a warning is given if they have 16 bits or fewer. Under `jax.jit` the random
        bits do not depend on the sharding. Groups of `optax.partition`, runs under
        `jax.vmap` and shards of params in `jax.shard_map` need different keys: fold
        `jax.lax.axis_index(axis)` into the key for each axis that divides the params.
        Copies of the same params need the same key.

    Returns:
      A transformation whose state is an `SPAState`. `update` needs `params`, and keeps
      their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import eval_params, spa
      >>> tx = spa(learning_rate=1.0, averaging=0.5, interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(y), y)
      >>> y += updates
      >>> # x is halfway to z, and y between the two
      >>> print(state.z, eval_params(state, y), y)
      8.0 9.0 8.5

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2. Defazio
      et al., Smoothing DiLoCo with Primal Averaging, 2025, arXiv:2512.17131. Defazio et
      al., The Road Less Scheduled, 2024, arXiv:2405.15682. Ma, Yarats, Quasi-hyperbolic
      momentum, arXiv:1810.06801.
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.check_averaging(averaging)
    _arguments.check_interpolation(interpolation)
    eta_at = _arguments.as_schedule("learning_rate", learning_rate)
    c_at = _arguments.as_schedule("averaging", averaging)
    mu_y_at = _arguments.as_schedule("interpolation", interpolation)

    params_are_x = _arguments.is_always(interpolation, 1)

    def rule(state):
        k = state.count
        # None leaves μ_y out of the program.
        next_mu_y = None if params_are_x else mu_y_at(k)
        return XZCoefficients(eta=eta_at(k), c=c_at(k), next_mu_y=next_mu_y)

    return member_from_rule(
        rule,
        state_dtype,
        rounding_key,
        nominal_averaging=averaging,
        nominal_interpolation=interpolation,
    )


def spa_from_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule = 0.9,
    nesterov: bool = False,
    *,
    horizon: int | None = None,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum, run as primal averaging: `optax.sgd`, with z in the state.

    Takes the hyper-parameters of SGD+M and gives its iterates, for any schedules:

        m_{k+1} = β_k m_k + g_k        x_{k+1} = x_k − α_k m_{k+1}

    In place of m the state holds z_k = x_k − w_k m_k, the point at which x would come
    to rest if every later gradient were zero (or z_k − x_k, see `SPAState`). These are
    the steps of `spa` with

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i
        η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    For constants, and β > 0, η = α/(1 − β) and c = 1 − β. Where w_{k+1} would be 0, the
    state has a positive one, which gives the same x. Nesterov momentum has
    a_k = α_k β_k in place of α_k in w and c, and

        η_k = a_k + w_{k+1} + α_k      c_{k+1} = a_k / (a_k + w_{k+1})

    and x_{k+1} has a term −α_k (1 − c_{k+1}) g_k.

    Where schedules cannot be evaluated ahead (`optax.inject_hyperparams`, a schedule
    edited before a run is resumed), z − x is rescaled, and the iterates stay those of
    SGD. Exceptions:

    - A rise of w by a factor of 2,896 or more, 1/√ε of float32: momentum restarts.
    - A next β of 0, where the state holds z − params: momentum is dropped.
    - Params of 16 bits: what rounding took from them is rescaled, too. There pass
      schedules, not injected rates that rise.
    - A parameter whose update is None keeps its z. While w changes, its momentum
      (x − z)/w then changes, too.

    Under `optax.inject_hyperparams` set `hyperparam_dtype=jnp.float32`, and name
    `nesterov`, `horizon`, `state_dtype` and `rounding_key` in `static_args`.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k. A schedule is
        evaluated under `jax.vmap` at later counts, where NaN and negative values count
        as 0.
      momentum: β_k in [0, 1), a scalar or a schedule of the count k.
      nesterov: whether to use Nesterov momentum.
      horizon: how many steps to look ahead, at least 1. None means, for a number β,
        until β^horizon < 1e-8 (at most 2^15), else 2,000 steps, enough up to β = 0.99.
        If it is too short, z is rescaled.
      state_dtype: dtype of z, of 16 bits or more: bfloat16 saves memory. None means
        that of the params, but float32 for params of 16 bits.
      rounding_key: PRNG key, to round params and z up or down at random. Give it for
        params or z of 16 bits. Shards, groups and batches of runs need
        different keys, see `spa`.

    Returns:
      A transformation whose state is an `SPAState`. `update` needs `params`, and keeps
      their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import spa_from_sgdm
      >>> tx, x = spa_from_sgdm(learning_rate=1.0, momentum=0.5), jnp.array(10.0)
      >>> state = tx.init(x)
      >>> for gradient in (2.0, 0.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, x)
      ...     x += updates
      ...     print(state.z, x)  # x comes to rest at z
      6.0 8.0
      6.0 7.0

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1.
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.FRACTION_BELOW_1.check(momentum=momentum)
    _arguments.BOOLEAN.check(nesterov=nesterov)
    _arguments.POSITIVE_INTEGER.optional().check(horizon=horizon)
    check_state_dtype_of_sgd(state_dtype)

    def rule(state):
        sgdm = evaluate_sgdm(
            learning_rate, momentum, state.count, nesterov=nesterov, horizon=horizon
        )
        return sgdm_coefficients(
            sgdm,
            state.w,
            # How z is stored decides which w keeps the most digits of m.
            stores_difference=codec_of(state.z).stores_difference,
        )

    # c itself needs the look ahead. While α and β stay, it is 1 − β.
    return member_from_rule(
        rule,
        state_dtype,
        rounding_key,
        nominal_averaging=(lambda k: 1 - momentum(k))
        if callable(momentum)
        else 1 - momentum,
    )
