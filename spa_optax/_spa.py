"""Momentum via primal averaging, with its own hyper-parameters or those of SGD with momentum."""

import functools

import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray, PyTree

from spa_optax import _core
from spa_optax._checks import (
    check_averaging,
    check_bool,
    check_dtype,
    check_horizon,
    check_key,
    check_momentum,
    check_rate,
)
from spa_optax._coast import look_ahead, sgdm_scalars
from spa_optax._core import Rule, Scalars, SPAState
from spa_optax._hyperparams import at_count
from spa_optax._precision import has_narrow


def spa(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum via primal averaging (SPA).

    With x_k the params, g_k the gradient at x_k and z_0 = x_0, step k = 0, 1, 2, … is

        z_{k+1} = z_k − η_k g_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}

    For constants this is `optax.sgd(η c, momentum=1 − c)`, the same iterates x_k. For schedules it
    is SGD+M with α_k = η_k c_{k+1} and β_k = (η_{k−1}/η_k)(1 − c_k): see `hyperparams_to_sgdm`.
    To keep the hyper-parameters of SGD+M instead, use `spa_from_sgdm`.

    The params are the point to evaluate and to save; z is in the state.

    Put gradient transforms (clipping, `optax.add_decayed_weights`) before `spa` in a chain. They
    must keep the gradient's sign: after a finished optimizer, such as `optax.sgd(0.1)`, the loss
    climbs, and nothing warns. Do not place anything that modifies the update after it or around it
    (`optax.contrib.reduce_on_plateau`, `optax.lookahead`): z would not follow, and would pull x
    back. After editing params outside the optimizer, call `reanchor`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k. To replace SGD+M with learning
        rate α and momentum β, use η = α/(1 − β): ten times α at β = 0.9.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k. It is 1 − momentum; at 1
        there is no momentum, and z = x.
      state_dtype: dtype of z. None means the params' dtype, but float32 for params of 16 bits or
        fewer: z is then both their master copy and the momentum. A narrower z needs a
        `rounding_key` to keep small steps.
      rounding_key: PRNG key for unbiased stochastic rounding wherever params or z are stored at
        lower precision. None rounds to nearest; complex values always are. The random bits depend
        on the key, k and the position in the array, and not on the sharding under `jax.jit`. Under
        `jax.vmap` and inside `jax.shard_map` positions start at 0 in each replica and shard, which
        therefore share their bits. If that matters, give each its own key (for shards
        `jax.random.fold_in(key, jax.lax.axis_index(axis))`), but never along an axis on which
        params are replicated. Under `optax.inject_hyperparams` name `rounding_key` and
        `state_dtype` in `static_args`.

    Returns:
      A transformation whose `update` needs `params`. Its state is an `SPAState`; its updates have
      the params' dtype.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is not a real floating-point dtype, or,
        in `update`, `params` is missing or the trees differ.

    Examples:
      With η = 1, c = 0.5 and a gradient of 2: z goes from 10 to 8, and x half of the way to it.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> tx = spa(learning_rate=1.0, averaging=0.5)
      >>> params = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(params), params)
      >>> print(state.z, optax.apply_updates(params, updates))
      8.0 9.0

    References:
      Defazio, Momentum via Primal Averaging: Theoretical Insights and Learning Rate Schedules for
      Non-Convex Optimization, 2020, arXiv:2010.00406, Section 2, "The averaging form of momentum".
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    check_key(rounding_key)
    check_dtype(state_dtype)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def rule(state: SPAState, _: PyTree) -> Scalars:
        return spa_scalars(eta_at(state.count), c_at(state.count), state)

    return primal_averaging(rule, state_dtype, rounding_key)


def spa_scalars(eta: Float[Array, ""], c: Float[Array, ""], state: SPAState) -> Scalars:
    """The scalars of `spa`, whose z has the coast η_k (1 − c_{k+1})."""
    # While η = 0 no gradient enters z, and x − z shrinks by 1 − c, as if m were constant.
    return Scalars(eta, c, coast=(1 - c) * jnp.where(eta > 0, eta, state.coast.astype(eta.dtype)))


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

    through z_k = x_k − w_k m_k, where w_k, the coast, looks ahead in the schedules:

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i      η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    so that z_k is the point at which x would come to rest if every later gradient were zero. For
    constants, and β > 0, η = α/(1 − β) and c = 1 − β. (The recursion of the paper's Theorem 1 gives
    the same iterates through an η_k that blows up; this is the one solution that stays bounded.)
    With Nesterov momentum, a_k = α_k β_k replaces α_k, η_k is larger by α_k, and x takes a further
    step of −α_k (1 − c_{k+1}) g_k.

    Schedules are evaluated ahead of time. Where that is impossible (`optax.inject_hyperparams`, a
    schedule edited before a run is resumed), z − x is rescaled; the iterates are unchanged. Then z
    need not be the resting point. After an injected rate falls, w keeps its size, so that a later
    rise does not magnify rounding errors. If β or all later α are 0, z is not a resting point
    either; it only stores m.

    With 16-bit params w follows an injected rate down, and each rescaling also scales the rounding
    error of x in z − x: prefer schedules there. Where an unforeseen rise would magnify that error
    more than 1/√eps times (2,896 in float32, 11 in bfloat16), momentum restarts from zero instead.

    For the place in a chain, and for params edited outside the optimizer, see `spa`.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k. A schedule is evaluated under
        `jax.vmap` for counts ahead of k, where NaN and negative values count as 0.
      momentum: β_k in [0, 1), a scalar or a schedule of the count k.
      nesterov: whether to use Nesterov momentum.
      horizon: how many steps to look ahead, at least 1. None means as many as matter where momentum
        is a Python number (β^horizon < 1e-8: 175 steps at β = 0.9, 18,412 at 0.999, at most 32,768)
        and 2,000 where it is a schedule or an array (enough up to β = 0.99). With fewer steps the
        iterates remain exact, but z is rescaled. Under `optax.inject_hyperparams` name it in
        `static_args`.
      state_dtype: dtype of z. None means the params' dtype, but float32 for params of 16 bits or
        fewer: z is then both their master copy and the momentum. A narrower z needs a
        `rounding_key` to keep small steps.
      rounding_key: for stochastic rounding, as for `spa`.

    Returns:
      A transformation whose `update` needs `params`. Its state is an `SPAState`; its updates have
      the params' dtype.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is not a real floating-point dtype, or,
        in `update`, `params` is missing or the trees differ.

    Examples:
      α = 1, β = 0.5 and a gradient of 2, then none: x goes from 10 to 8, then half as far per step.
      z is at 6, the end point, from the first step.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_from_sgdm
      >>> tx = spa_from_sgdm(learning_rate=1.0, momentum=0.5)
      >>> params = jnp.array(10.0)
      >>> state = tx.init(params)
      >>> for gradient in (2.0, 0.0, 0.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(state.z, params)
      6.0 8.0
      6.0 7.0
      6.0 6.5

    References:
      Defazio, Momentum via Primal Averaging: Theoretical Insights and Learning Rate Schedules for
      Non-Convex Optimization, 2020, arXiv:2010.00406, Theorem 1. The look-ahead is this package's.
    """
    check_rate("learning_rate", learning_rate)
    check_momentum(momentum)
    check_bool("nesterov", nesterov)
    check_horizon(horizon)
    check_key(rounding_key)
    check_dtype(state_dtype)

    def rule(state: SPAState, params: PyTree) -> Scalars:
        ahead = look_ahead(learning_rate, momentum, state.count, nesterov=nesterov, horizon=horizon)
        return sgdm_scalars(ahead, state.coast, is_master=has_narrow(params), nesterov=nesterov)

    return primal_averaging(rule, state_dtype, rounding_key)


def primal_averaging(
    rule: Rule, state_dtype: DTypeLike | None, rounding_key: PRNGKeyArray | None
) -> optax.GradientTransformationExtraArgs:
    """The optax transformation of a rule."""
    init = functools.partial(_core.init, state_dtype=state_dtype, rounding_key=rounding_key)
    update = _core.Update(rule, rounding_key)
    # optax types states as trees of arrays; `SPAState` is one, but its type does not say so.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
