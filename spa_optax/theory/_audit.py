"""The audit of a schedule: its values as SPA and as SGD with momentum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from spa_optax import _checks as checks
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead
from spa_optax._schedules import hyperparams_to_sgdm
from spa_optax.theory._findings import Audit, Values


def audit(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    num_steps: int,
) -> Audit:
    """Checks a schedule of SPA at every step.

    The verdict, from `report()`, names averages that leave more than 1 % of x_0 in x,
    and jumps of α and of η (of α/(1 − β), for SGD+M). A jump is a change by a factor of
    1.5 or more in one step, above 1e-4 of the largest value, and more than 22 % of the
    change within four steps on either side: a ramp of five equal steps is gradual.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      averaging: c_{k+1} in [0, 1], as above.
      num_steps: the number of steps to check, n ≥ 1.

    Returns:
      An `Audit`, with the values at each step.

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      Figure 1(e): η divided by 10 and c multiplied by 10, at once, makes α spike for
      one step.

      >>> from spa_optax import stagewise, theory
      >>> print(theory.audit(*stagewise(10.0, 0.1, [20]), 100).report().split(",")[0])
      α spikes from 1 to 10 at step 19

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and
      Sections 5 and 6.
    """
    checks.RATE.check(learning_rate=learning_rate)
    checks.POSITIVE_INTEGER.check(num_steps=num_steps)
    sgdm = hyperparams_to_sgdm(learning_rate, averaging)
    schedules = [
        at_count("learning_rate", learning_rate),
        at_count("averaging", averaging),
        at_count("learning_rate", sgdm.learning_rate),
        at_count("momentum", sgdm.momentum),
    ]
    eta, c, alpha, beta = _values(lambda k: [at(k) for at in schedules], num_steps)
    beta[0] = np.nan
    return Audit(eta, c, alpha, beta)


def audit_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    num_steps: int,
    nesterov: bool = False,
) -> Audit:
    """Checks a recipe of SGD with momentum, as `audit` checks one of SPA.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      momentum: β_k in [0, 1), as above.
      num_steps: the number of steps to check, n ≥ 1.
      nesterov: whether momentum is Nesterov's.

    Returns:
      An `Audit`, with the values at each step.

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import theory
      >>> schedule = lambda k: jnp.where(k < 500, 0.1, 0.01)
      >>> print(theory.audit_sgdm(schedule, 0.9, 1_000).report().splitlines()[0])
      Nothing to change: α drops from 0.1 to 0.01 at step 500.
    """
    checks.FLAG.check(nesterov=nesterov)
    checks.RATE.check(learning_rate=learning_rate)
    checks.MOMENTUM.check(momentum=momentum)
    checks.POSITIVE_INTEGER.check(num_steps=num_steps)

    def at(k: Array) -> tuple[Array, ...]:
        ahead = look_ahead(learning_rate, momentum, k, nesterov=nesterov)
        eta, c = eta_and_c(ahead, ahead.w, nesterov=nesterov)
        # Without any momentum x goes where z goes.
        c = jnp.where((ahead.a + ahead.w == 0) & (ahead.alpha > 0), 1, c)
        return eta, c, ahead.alpha, ahead.beta

    return Audit(*_values(at, num_steps))


def _values(at: Callable[[Array], Any], num_steps: int) -> list[Values]:
    """The values of a function of the count, at each, as float64."""
    counts = jnp.arange(num_steps, dtype=jnp.int32)
    values = jax.jit(lambda counts: jax.lax.map(at, counts))(counts)
    return [np.array(v, float) for v in values]
