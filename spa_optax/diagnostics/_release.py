"""Frees the memory of a momentum that was dropped."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from spa_optax._checks import check_rate
from spa_optax._convert import INJECTED, like, replace_nodes
from spa_optax._core import GPAState, SPAState, find, only, scalar_of
from spa_optax._precision import has_narrow
from spa_optax.diagnostics._track import TrackMomentumState


def release_momentum(
    opt_state: PyTree, params: PyTree, learning_rate: optax.ScalarOrSchedule
) -> tuple[optax.GradientTransformationExtraArgs, PyTree]:
    """Replaces SPA at c = 1 by plain SGD, without z: the same iterates, half the memory.

        x_{k+1} = z_{k+1} = x_k − η_k g_k

    Args:
      opt_state: a state that holds one `SPAState` with c = 1, in any chain or wrapper, but not in
        `optax.inject_hyperparams`. (`spa_from_sgdm` keeps c below 1 even at β = 0.)
      params: x_k, of more than 16 bits, like z. (For narrower params z is the master copy.)
      learning_rate: η_k, a scalar or a schedule of the count k, which continues. If the optimizer
        has changed η (`hold="alpha"`), pass the changed η.

    Returns:
      `optax.sgd(learning_rate)`, to replace `spa`, `spa_from_sgdm` or `track_momentum` in the same
      chain; and the new state of that chain.

    Raises:
      ValueError: if `opt_state` does not hold exactly one `SPAState`, or holds it in
        `optax.inject_hyperparams`; if the last step had c < 1; if params or z have 16 bits or
        fewer; if `learning_rate` is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import release_momentum
      >>> chain = lambda tx: optax.chain(optax.clip(1.0), tx)
      >>> params = jnp.array([3.0])
      >>> tx = chain(spa(0.5, averaging=1.0))
      >>> _, state = tx.update(jnp.array([1.0]), tx.init(params), params)
      >>> sgd, state = release_momentum(state, params, 0.5)
      >>> updates, state = chain(sgd).update(jnp.array([1.0]), state, params)
      >>> print(updates)
      [-0.5]

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2: c = 1 is SGD.
    """
    check_rate("learning_rate", learning_rate)
    spa_state = only(opt_state, SPAState, "opt_state")
    if any(find(node, SPAState) for node in find(opt_state, INJECTED)):
        raise ValueError(
            "`opt_state` must not hold SPA inside of `optax.inject_hyperparams`, whose"
            " hyper-parameters `optax.sgd` does not have"
        )
    if has_narrow(params) or has_narrow(spa_state.z):
        raise ValueError(
            "`params` and z must have more than 16 bits, got narrower ones: without z the"
            " iterates would change"
        )
    c = scalar_of(spa_state.c)
    try:
        is_one = bool(jnp.all(c == 1))
    except jax.errors.ConcretizationTypeError:
        raise ValueError("`opt_state` must be concrete, as the result depends on c") from None
    if not is_one:
        raise ValueError(f"`opt_state` must come from a step with c = 1, got c = {c}")
    tx: Any = optax.sgd(learning_rate)
    sgd_state = tx.init(params)
    if callable(learning_rate):
        count = like(spa_state.count, [jnp.array(scalar_of(spa_state.count), copy=True)])
        sgd_state = optax.tree.set(sgd_state, count=count)
    state = replace_nodes(opt_state, TrackMomentumState, lambda node: node.inner)
    return tx, replace_nodes(state, (GPAState, SPAState), lambda _: sgd_state)
