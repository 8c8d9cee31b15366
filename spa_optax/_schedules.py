"""The schedules that the paper's theory suggests, as pairs for `spa`."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from spa_optax._checks import (
    check_above_1,
    check_averaging,
    check_choice,
    check_rate,
    check_steps,
)
from spa_optax._coast import value_at
from spa_optax._convert import SPAHyperparams, as_schedule

_AveragingRule = Literal["constant", "scale", "balance"]
Hold = Literal["eta", "alpha"]


def stagewise(
    learning_rate: float,
    averaging: float,
    boundaries: Sequence[int],
    factor: float = 10.0,
    *,
    averaging_rule: _AveragingRule = "scale",
    rate: float | None = None,
) -> SPAHyperparams:
    """Divides η by a factor at each boundary, and has c answer.

    At a boundary b the paper's η_b and c_b are the first that change: `learning_rate` changes at
    count b, and `averaging`, which at count k is c_{k+1}, at count b − 1. With η, c as they begin,

        constant   c_k = c
        scale      c_k = min(1, c η/η_k)
        balance    1/c_k − 1 = (1/c − 1) η_k/η     (Insight 2: R_k's first coefficient stays 0)

    Abruptly, or gradually: η_k = max(η_{k−1}/rate, the η of its stage), which keeps α and β of
    SGD+M from spiking (Insight 3). The paper's rate is 1.0005, at which a factor of 10 takes 4,607
    steps.

    Args:
      learning_rate: η > 0 of the first stage.
      averaging: c in [0, 1] of the first stage.
      boundaries: the steps b ≥ 1 at which a stage begins, ascending.
      factor: what η is divided by at each of them, > 1.
      averaging_rule: "constant", "scale" or "balance".
      rate: None for an abrupt change, else what η is divided by at every step, > 1, from b on,
        until it has arrived; stages may overlap.

    Returns:
      Two schedules: `spa(*stagewise(...))`.

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      >>> from spa_optax import stagewise
      >>> eta, c = stagewise(1.0, 0.1, [3])
      >>> print([f"{eta(k):.2f}" for k in range(5)], [f"{c(k):.2f}" for k in range(5)])
      ['1.00', '1.00', '1.00', '0.10', '0.10'] ['0.10', '0.10', '1.00', '1.00', '1.00']

      With a rate of 2, in steps of 2 until 10 has been reached:

      >>> eta, c = stagewise(1.0, 0.1, [1], rate=2.0)
      >>> print([f"{eta(k):.3f}" for k in range(6)], [f"{c(k):.1f}" for k in range(5)])
      ['1.000', '0.500', '0.250', '0.125', '0.100', '0.100'] ['0.2', '0.4', '0.8', '1.0', '1.0']

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Sections 4 and 5 (Insights 2
      and 3; the title of Section 4, "Reduce c_k", should read "increase").
    """
    _check_number("learning_rate", learning_rate)
    _check_number("averaging", averaging)
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    steps = [check_steps("boundaries", b) for b in boundaries]
    if sorted(set(steps)) != steps:
        raise ValueError(f"`boundaries` must be ascending, got {boundaries!r}")
    check_above_1("factor", factor)
    check_choice("averaging_rule", averaging_rule, _AveragingRule)
    if rate is not None:
        check_above_1("rate", rate)

    def decay(k: Array) -> Float[Array, ""]:
        """log(η/η_k)."""
        fall = math.log(factor)
        stage = jnp.asarray(sum((k >= b).astype(jnp.int32) for b in steps), float)
        decay = stage * fall
        if rate is None:
            return decay
        # Falling by log(rate) a step at most: each boundary passed is a line not to be above of.
        for i, b in enumerate(steps):
            on_the_way = i * fall + (k - b + 1).astype(decay.dtype) * math.log(rate)
            decay = jnp.where(k >= b, jnp.minimum(decay, on_the_way), decay)
        return decay

    def eta(k: Array) -> Float[Array, ""]:
        return value_at(learning_rate, k) * jnp.exp(-decay(k))

    def c(k: Array) -> Float[Array, ""]:
        c, ratio = value_at(averaging, k), jnp.exp(-decay(k + 1))  # η_{k+1}/η, for c_{k+1}
        if averaging_rule == "constant":
            return c
        if averaging_rule == "scale":
            return jnp.minimum(c / ratio, 1)
        return c / (c + (1 - c) * ratio)

    return SPAHyperparams(as_schedule(eta), as_schedule(c))


def momentum_drop(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    step: int,
    *,
    hold: Hold = "eta",
    rate: float | None = None,
) -> SPAHyperparams:
    """Takes c to 1, so that from `step` on there is no momentum: x_k = z_k.

    There are three ways to drop momentum, and they are not the same:

    - `hold="eta"` keeps η, and with it the effective step: α = ηc of SGD+M rises by 1/c as β falls
      to 0 (the paper's Figure 1(d)).
    - `hold="alpha"` keeps α = ηc, at every step: that also cuts the effective step, α/(1 − β), by
      c. What it does to the loss is for the most part that cut.
    - `spa_from_sgdm` with a momentum schedule that falls to 0: as `hold="alpha"`, but c rises ahead
      of the drop, without the jump of x to z that an abrupt c = 1 is.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      step: the first k ≥ 1 with c_k = 1 or, gradually, the first at which c_k has begun to rise.
      hold: "eta" or "alpha".
      rate: None for an abrupt change, else what c is multiplied by, > 1, at every step from `step`
        on, until it is 1.

    Returns:
      Two schedules: `spa(*momentum_drop(...))`.

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      >>> from spa_optax import momentum_drop
      >>> for hold in ("eta", "alpha"):
      ...     eta, c = momentum_drop(1.0, 0.25, 2, hold=hold)
      ...     print([float(eta(k)) for k in range(3)], [float(c(k)) for k in range(3)])
      [1.0, 1.0, 1.0] [0.25, 1.0, 1.0]
      [1.0, 0.25, 0.25] [0.25, 1.0, 1.0]

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Figures 1(d) and 3 (whose
      caption, "setting c_k = 0", should read 1).
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    step = check_steps("step", step)
    check_choice("hold", hold, Hold)
    if rate is not None:
        check_above_1("rate", rate)

    def c(k: Array) -> Float[Array, ""]:
        # c_{k+1} has been multiplied k + 2 − step times.
        return risen(value_at(averaging, k), k + 2 - step, rate)

    def eta(k: Array) -> Float[Array, ""]:
        eta = value_at(learning_rate, k)
        return eta if hold == "eta" else holding_alpha(eta, value_at(averaging, k), c(k))

    return SPAHyperparams(as_schedule(eta), as_schedule(c))


def risen(c: Array, times: Array, rate: float | None) -> Float[Array, ""]:
    """The c that has been multiplied by `rate` so many times, up to 1; at once without a rate."""
    times = times.astype(c.dtype)
    up = 1 if rate is None else jnp.minimum(c * jnp.exp(times * math.log(rate)), 1)
    return jnp.where(times > 0, up, c)


def holding_alpha(eta: Array, before: Array, now: Array) -> Float[Array, ""]:
    """The η that keeps α = ηc where c has gone from `before` to `now`."""
    return jnp.where(before == now, eta, eta * before / now)


def _check_number(name: str, value: Any) -> None:
    if callable(value):
        raise ValueError(f"`{name}` must be a number, got {value!r}")
