"""The schedules that the paper's theory suggests, as pairs for `spa`, and Schedule-Free's c."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from spa_optax._checks import (
    check_above_1,
    check_averaging,
    check_choice,
    check_concrete,
    check_rate,
    check_steps,
)
from spa_optax._hyperparams import SPAHyperparams, as_schedule, at_count

_AveragingRule = Literal["constant", "scale", "balance"]
_Hold = Literal["eta", "alpha"]


def stagewise(
    learning_rate: float,
    averaging: float,
    boundaries: Sequence[int],
    factor: float = 10.0,
    *,
    averaging_rule: _AveragingRule = "scale",
    rate: float | None = None,
    transition_steps: int | None = None,
) -> SPAHyperparams:
    """Divides η by a factor at each boundary, and adapts c.

    At a boundary b, the paper's η_b and c_b are the first to change. `learning_rate` changes at
    count b. `averaging`, which at count k is c_{k+1}, changes at count b − 1. With the initial η
    and c:

        constant   c_k = c
        scale      c_k = min(1, c η/η_k)
        balance    1/c_k − 1 = (1/c − 1) η_k/η     (Insight 2: R_k's first coefficient stays 0)

    The change is abrupt or, with a `rate`, gradual: η_k = max(η_{k−1}/rate, the η of its stage). α
    and β of SGD+M then do not spike (Insight 3). A transition takes log(factor)/log(rate) steps:
    4,607 for a factor of 10 at the paper's rate of 1.0005. It must end before the next boundary. A
    run that ends during the last transition ends with a larger η.

    Args:
      learning_rate: η > 0 of the first stage.
      averaging: c in [0, 1] of the first stage.
      boundaries: the steps b ≥ 1 at which a stage begins, ascending.
      factor: the divisor of η at every boundary, > 1.
      averaging_rule: "constant", "scale" or "balance".
      rate: the divisor of η per step during a transition, > 1. None means an abrupt change.
      transition_steps: the steps of a transition, ≥ 1, instead of `rate`.

    Returns:
      Two schedules: `spa(*stagewise(...))`.

    Raises:
      ValueError: if an argument is out of range, or a transition does not end before the next
        boundary.

    Examples:
      >>> from spa_optax import stagewise
      >>> eta, c = stagewise(1.0, 0.1, [3])
      >>> print([f"{eta(k):.2f}" for k in range(5)], [f"{c(k):.2f}" for k in range(5)])
      ['1.00', '1.00', '1.00', '0.10', '0.10'] ['0.10', '0.10', '1.00', '1.00', '1.00']

      With a rate of 2, η is halved until it has been divided by 10:

      >>> eta, c = stagewise(1.0, 0.1, [1], rate=2.0)
      >>> print([f"{eta(k):.3f}" for k in range(6)], [f"{c(k):.1f}" for k in range(5)])
      ['1.000', '0.500', '0.250', '0.125', '0.100', '0.100'] ['0.2', '0.4', '0.8', '1.0', '1.0']

      In two steps:

      >>> eta, c = stagewise(1.0, 0.1, [1], 4.0, transition_steps=2)
      >>> print([f"{eta(k):.2f}" for k in range(5)])
      ['1.00', '0.50', '0.25', '0.25', '0.25']

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Sections 5 and 6 (Insights 2
      and 3; the title of Section 5, "Reduce c_k", should read "increase").
    """
    _check_number("learning_rate", learning_rate)
    _check_number("averaging", averaging)
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    steps = _check_boundaries(boundaries)
    factor = check_above_1("factor", factor)
    check_choice("averaging_rule", averaging_rule, _AveragingRule)
    if transition_steps is not None:
        if rate is not None:
            raise ValueError(f"`rate` must be None with `transition_steps`, got {rate!r}")
        transition_steps = check_steps("transition_steps", transition_steps)
        _check_transitions(transition_steps, steps)
        rate = factor ** (1 / transition_steps)
    elif rate is not None:
        _check_arrival(check_above_1("rate", rate), factor, steps)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def decay(k: Array) -> Float[Array, ""]:
        """log(η/η_k): each stage that has begun adds log(rate) per step, up to log(factor)."""
        in_all = math.log(factor)
        a_step = in_all if rate is None else math.log(rate)
        of_stages = (jnp.clip((k - b + 1).astype(float) * a_step, 0, in_all) for b in steps)
        return sum(of_stages, jnp.zeros([], float))

    def eta(k: Array) -> Float[Array, ""]:
        return eta_at(k) * jnp.exp(-decay(k))

    def c(k: Array) -> Float[Array, ""]:
        c, log_ratio = c_at(k), decay(k + 1)  # log(η/η_{k+1}), for c_{k+1}
        if averaging_rule == "constant":
            return c
        if averaging_rule == "scale":
            return _scaled_up_to_1(c, log_ratio)
        return jnp.where(c > 0, c / (jnp.where(c > 0, c, 1) + (1 - c) * jnp.exp(-log_ratio)), 0)

    return SPAHyperparams(as_schedule(eta), as_schedule(c))


def momentum_drop(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    step: int,
    *,
    hold: _Hold = "eta",
    rate: float | None = None,
) -> SPAHyperparams:
    """Raises c to 1 from `step` on, which removes momentum: x_k = z_k.

    There are three different ways to drop momentum:

    - `hold="eta"` keeps η and the effective step: α = ηc of SGD+M rises by a factor 1/c as β falls
      to 0 (the paper's Figure 1(d)).
    - `hold="alpha"` keeps α = ηc. That also multiplies the effective step α/(1 − β) by c, which
      explains most of its effect on the loss.
    - `spa_from_sgdm` with a momentum schedule that falls to 0 is like `hold="alpha"`, but c rises
      ahead of the drop. An abrupt c = 1 makes x jump to z.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      step: the first k ≥ 1 with c_k = 1 or, with a `rate`, the first at which c_k has risen.
      hold: "eta" or "alpha".
      rate: the factor on c per step, > 1, from `step` on until c is 1. None means an abrupt change.

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
    check_choice("hold", hold, _Hold)
    if rate is not None:
        check_above_1("rate", rate)

    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def c(k: Array) -> Float[Array, ""]:
        before, num_rises = c_at(k), k + 2 - step  # of c_{k+1}
        after = 1
        if rate is not None:
            after = _scaled_up_to_1(before, num_rises.astype(before.dtype) * math.log(rate))
        return jnp.where(num_rises > 0, after, before)

    def eta(k: Array) -> Float[Array, ""]:
        if hold == "eta":
            return eta_at(k)
        before, now = c_at(k), c(k)
        ratio = before / jnp.where(now > 0, now, 1)
        return eta_at(k) * jnp.where(before == now, 1, ratio)

    return SPAHyperparams(as_schedule(eta), as_schedule(c))


def schedule_free_averaging(
    learning_rate: optax.ScalarOrSchedule,
    num_warmup_steps: int = 0,
    *,
    weight_power: float = 2.0,
) -> optax.Schedule:
    """The averaging that makes `gpa` Schedule-Free, for a rate with a warm-up.

    x is the mean of all z so far, each weighted by the power p of the largest rate until then:

        w_k = max(γ_0, …, γ_k)^p        c_{k+1} = w_k / (w_0 + … + w_k)

    After the warm-up all weights are the same, if the rate rises no more. Without a warm-up c_{k+1}
    is 1/(k + 1).

    Args:
      learning_rate: γ_k ≥ 0, a schedule of the count k, evaluated under `jax.vmap`, with its
        maximum by count `num_warmup_steps`; or the number γ that is warmed up, by the authors'
        γ (k + 1)/`num_warmup_steps`. A schedule is checked at 550 counts up to 10^6 after the
        warm-up: a later rise is not seen, nor one shorter than 4 % of the steps since the warm-up.
      num_warmup_steps: the length of the warm-up, ≥ 0: the count by which the rate is largest.
      weight_power: p ≥ 0.

    Returns:
      c_{k+1}, a schedule of the count k; 0 while rates are 0. `optax.contrib.schedule_free` reads
      the rate for its weights one count later than for its steps: to reproduce it, pass
      `lambda k: rate(k + 1)` here, and `rate` to `gpa`.

    Raises:
      ValueError: if an argument is out of range, or the schedule is not finite, has not risen above
        0 by the end of the warm-up, is seen to rise after it, or is traced.

    Examples:
      Warmed up over two steps the weights are 1/4, 1, 1, …, and c 1, 1/1.25, 1/2.25, …

      >>> import jax.numpy as jnp
      >>> from spa_optax import gpa_adamw, schedule_free_averaging
      >>> rate = lambda k: 0.1 * jnp.minimum((k + 1) / 2, 1)
      >>> c = schedule_free_averaging(rate, num_warmup_steps=2)
      >>> print([f"{c(k):.3f}" for k in range(4)])
      ['1.000', '0.800', '0.444', '0.308']
      >>> tx = gpa_adamw(rate, c)

    References:
      Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682, Section 4.
    """
    check_rate("learning_rate", learning_rate)
    end = check_steps("num_warmup_steps", num_warmup_steps, least=0)
    is_power = lambda v: 0 <= v < float("inf")
    power = check_concrete("weight_power", weight_power, "finite and >= 0", is_power)
    if callable(learning_rate):
        ahead = np.unique(np.geomspace(1, 10**6, 700).astype(int))
        with jax.ensure_compile_time_eval():
            counts = jnp.asarray(np.append(np.arange(end + 1), end + ahead), jnp.int32)
            values = jax.vmap(at_count("learning_rate", learning_rate))(counts)
        try:
            rates, later = np.split(np.asarray(values, np.float64), [end + 1])
        except jax.errors.TracerArrayConversionError:
            raise ValueError("`learning_rate` must not depend on traced values") from None
        if not np.all(np.isfinite(rates) & (rates >= 0)):
            raise ValueError("`learning_rate` must be finite and >= 0 during its warm-up")
        largest = rates.max()
        rises = later > (1 + 1e-6) * largest  # up to rounding; past its end it may be NaN
        if largest == 0 or rises.any():
            k = np.argmax(rises)
            raise ValueError(
                f"`learning_rate` must be > 0 and largest by count {end}, the end of its warm-up"
                f" (`num_warmup_steps`), got {later[k]:g} at {end + ahead[k]} after {largest:g}"
            )
    else:
        rates = np.minimum(np.arange(1, end + 2) / max(end, 1), 1)
    weights = (np.maximum.accumulate(rates) / rates.max()) ** power
    # 1/c, in float64; inf as long as rates are 0.
    inverse = np.divide(np.cumsum(weights), weights, np.full(end + 1, np.inf), where=weights > 0)

    def c(k: Array) -> Float[Array, ""]:
        after = jnp.maximum(k - end, 0).astype(float)
        return 1 / (jnp.asarray(inverse, float)[jnp.minimum(k, end)] + after)

    return as_schedule(c)


def _scaled_up_to_1(c: Array, log_factor: Array) -> Float[Array, ""]:
    """min(1, c·factor). A c of 0 stays 0: a factor that overflows does not make 0 · inf."""
    enough = 1 - jnp.log(jnp.where(c > 0, c, 1))  # log(e/c)
    return jnp.minimum(c * jnp.exp(jnp.minimum(log_factor, enough)), 1)


def _check_boundaries(boundaries: Any) -> list[int]:
    if isinstance(boundaries, Mapping):
        raise ValueError(
            "`boundaries` must be a sequence of steps, and `factor` is the same at all of them, got"
            f" {boundaries!r}"
        )
    if isinstance(boundaries, str) or not isinstance(boundaries, Iterable):
        raise ValueError(f"`boundaries` must be a sequence of steps, got {boundaries!r}")
    steps = [check_steps("boundaries", b) for b in boundaries]
    if sorted(set(steps)) != steps:
        raise ValueError(f"`boundaries` must be ascending, got {steps!r}")
    return steps


def _check_transitions(transition_steps: int, boundaries: list[int]) -> None:
    for b, after in itertools.pairwise(boundaries):
        if after - b < transition_steps:
            raise ValueError(
                f"`transition_steps` must be at most {after - b}, to end between boundaries {b}"
                f" and {after}, got {transition_steps}"
            )


def _check_arrival(rate: float, factor: float, boundaries: list[int]) -> None:
    num_steps = math.ceil(math.log(factor) / math.log(rate) - 1e-9)  # up to rounding
    for b, after in itertools.pairwise(boundaries):
        if after - b < num_steps:
            smallest = math.ceil(1e6 * factor ** (1 / (after - b))) / 1e6
            raise ValueError(
                f"`rate` must be at least {smallest}, to end between boundaries {b} and {after},"
                f" got {rate!r}, at which a factor of {factor:g} takes {num_steps:,} steps"
            )


def _check_number(name: str, value: Any) -> None:
    if callable(value):
        raise ValueError(f"`{name}` must be a number, got {value!r}")
