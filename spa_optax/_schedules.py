"""Schedules: of the paper's theory, of Schedule-Free, and to and from SGD with momentum."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from spa_optax._checks import (
    ABOVE_1,
    AVERAGING,
    MOMENTUM,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INTEGER,
    POSITIVE_INTEGER,
    RATE,
    one_of,
)
from spa_optax._hyperparams import Schedule, SGDMHyperparams, SPAHyperparams, at_count
from spa_optax._lookahead import eta_and_c, look_ahead


def hyperparams_from_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    *,
    horizon: int | None = None,
) -> SPAHyperparams:
    """The SPA hyper-parameters that give the iterates of heavy-ball SGD+M (arXiv:2010.00406).

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i      η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    For constants, η = α/(1 − β) and c = 1 − β. This is the bounded solution of Theorem 1;
    `theory.forward_recursion` is the paper's own. For Nesterov momentum, and for
    hyper-parameters that cannot be evaluated ahead of time, use `spa_from_sgdm`.

    Args:
      learning_rate: α_k ≥ 0, as for `spa_from_sgdm`.
      momentum: β_k in [0, 1), as for `spa_from_sgdm`.
      horizon: how many steps to look ahead, at least 1; as for `spa_from_sgdm`.

    Returns:
      Numbers if both arguments are numbers, else schedules; c_{k+1} is 0 where α_k is.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      c rises before α falls, as here with β = ½: w_1 = 4·½ + 1·½·(½ + ¼ + …) = 2.5, w_2 = 1.

      >>> import jax.numpy as jnp
      >>> from spa_optax import hyperparams_from_sgdm
      >>> hyperparams = hyperparams_from_sgdm(lambda k: jnp.where(k < 2, 4.0, 1.0), 0.5)
      >>> for k in range(3):
      ...     print(*(f"{h(k):.3f}" for h in hyperparams))
      6.500 0.615
      5.000 0.800
      2.000 0.500
    """
    RATE.check(learning_rate=learning_rate)
    MOMENTUM.check(momentum=momentum)
    POSITIVE_INTEGER.optional().check(horizon=horizon)
    if not (callable(learning_rate) or callable(momentum)):
        return SPAHyperparams(learning_rate / (1 - momentum), 1 - momentum)

    def at(count: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
        ahead = look_ahead(learning_rate, momentum, count, horizon=horizon)
        return eta_and_c(ahead, ahead.w)

    sgdm = SGDMHyperparams(learning_rate, momentum)
    return SPAHyperparams(Schedule(lambda k: at(k)[0], sgdm), Schedule(lambda k: at(k)[1], sgdm))


def hyperparams_to_sgdm(
    learning_rate: optax.ScalarOrSchedule, averaging: optax.ScalarOrSchedule
) -> SGDMHyperparams:
    """The hyper-parameters of SGD+M that give the iterates of SPA (arXiv:2010.00406, Theorem 1).

        α_k = η_k c_{k+1}      β_k = (η_{k−1} / η_k)(1 − c_k)

    β_0 is free because m_0 = 0; it is set to 1 − c_1. β_k may exceed 1 where η falls fast. It is
    inf where η_k = 0 < η_{k−1}: x then moves on towards a fixed z, which SGD+M cannot do.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.

    Returns:
      Numbers if both arguments are numbers, else schedules.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      Dividing η by 10 makes β spike for one step, to 10 · 0.9 (the paper's Figure 1(c)).

      >>> import jax.numpy as jnp
      >>> from spa_optax import hyperparams_to_sgdm
      >>> hyperparams = hyperparams_to_sgdm(lambda k: jnp.where(k < 2, 10.0, 1.0), 0.1)
      >>> for k in range(1, 4):
      ...     print(*(f"{h(k):.1f}" for h in hyperparams))
      1.0 0.9
      0.1 9.0
      0.1 0.9
    """
    RATE.check(learning_rate=learning_rate)
    AVERAGING.check(averaging=averaging)
    if not (callable(learning_rate) or callable(averaging)):
        return SGDMHyperparams(learning_rate * averaging, 1 - averaging)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def beta(k: Array) -> Float[Array, ""]:
        before = jnp.maximum(k - 1, 0)  # `averaging` at count k − 1 is c_k
        eta, eta_before, decay = eta_at(k), eta_at(before), 1 - c_at(before)
        ratio = jnp.where((eta_before == 0) | (decay == 0), 0, eta_before / eta)
        return jnp.where(k == 0, 1, ratio) * decay

    return SGDMHyperparams(Schedule(lambda k: eta_at(k) * c_at(k)), Schedule(beta))


def stagewise(
    learning_rate: float,
    averaging: float,
    boundaries: Sequence[int],
    factor: float = 10.0,
    *,
    averaging_rule: Literal["constant", "scale", "balance"] = "scale",
    step_factor: float | None = None,
) -> SPAHyperparams:
    """Divides η by a factor at each boundary, and adapts c (arXiv:2010.00406, Sections 5 and 6).

    At boundary b, the paper's η_b and c_b change first. `averaging` at count k is c_{k+1}, so it
    changes at count b − 1, and `learning_rate` at count b. With the initial η and c:

        constant   c_k = c
        scale      c_k = min(1, c η/η_k)
        balance    1/c_k − 1 = (1/c − 1) η_k/η     (Insight 2: R_k's first coefficient stays 0)

    The change is abrupt or, with a `step_factor` s, gradual: η_k = max(η_{k−1}/s, the η of its
    stage). α and β of SGD+M then do not spike (Insight 3). A transition takes log(factor)/log(s)
    steps: 4,607 for 10 at the paper's s = 1.0005.

    Args:
      learning_rate: η ≥ 0 of the first stage.
      averaging: c in [0, 1] of the first stage.
      boundaries: the steps b ≥ 1 at which a stage begins, ascending.
      factor: the divisor of η at every boundary, > 1.
      averaging_rule: "constant", "scale" or "balance".
      step_factor: s > 1, factor^(1/n) for a transition of n steps. None means an abrupt change.

    Returns:
      Two schedules: `spa(*stagewise(...))`.

    Raises:
      ValueError: if an argument is out of range, or a transition too long for its stage.

    Examples:
      Abrupt, and with a step factor of 2, which halves η until it has been divided by 10:

      >>> from spa_optax import stagewise
      >>> for step_factor in (None, 2.0):
      ...     eta, c = stagewise(1.0, 0.1, [2], step_factor=step_factor)
      ...     print([f"{eta(k):.3f}" for k in range(6)], [f"{c(k):.1f}" for k in range(5)])
      ['1.000', '1.000', '0.100', '0.100', '0.100', '0.100'] ['0.1', '1.0', '1.0', '1.0', '1.0']
      ['1.000', '1.000', '0.500', '0.250', '0.125', '0.100'] ['0.1', '0.2', '0.4', '0.8', '1.0']
    """
    for name, value in (("learning_rate", learning_rate), ("averaging", averaging)):
        if callable(value):
            raise ValueError(f"`{name}` must be a number, got {value!r}")
    RATE.check(learning_rate=learning_rate)
    AVERAGING.check(averaging=averaging)
    one_of("constant", "scale", "balance").check(averaging_rule=averaging_rule)
    ABOVE_1.check(factor=factor)
    ABOVE_1.optional().check(step_factor=step_factor)
    if isinstance(boundaries, Mapping) or not isinstance(boundaries, Iterable):
        rule = "must be a sequence of steps, with one `factor` for all"  # unlike Optax's mapping
        raise ValueError(f"`boundaries` {rule}, got {boundaries!r}")
    steps = list(boundaries)
    for b in steps:
        POSITIVE_INTEGER.check(boundaries=b)
    for b, after in itertools.pairwise(steps):
        if b >= after:
            raise ValueError(f"`boundaries` must be ascending, got {steps!r}")
        least = (1 - 1e-12) * factor ** (1 / (after - b))  # up to rounding
        if step_factor is not None and step_factor < least:
            raise ValueError(
                f"`step_factor` must be at least {math.ceil(1e6 * least) / 1e6}, to end between"
                f" boundaries {b} and {after}, got {step_factor!r}"
            )
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def decay(k: Array) -> Float[Array, ""]:
        """log(η/η_k): each stage that has begun adds log(s) per step, up to log(factor)."""
        most, per_step = math.log(factor), math.log(step_factor or factor)
        of_stages = (jnp.clip((k - b + 1).astype(float) * per_step, 0, most) for b in steps)
        return sum(of_stages, jnp.zeros([], float))

    def c(k: Array) -> Float[Array, ""]:
        c, log_ratio = c_at(k), decay(k + 1)  # log(η/η_{k+1}), for c_{k+1}
        if averaging_rule == "constant":
            return c
        if averaging_rule == "scale":
            return _scaled_up_to_1(c, log_ratio)
        return jnp.where(c > 0, c / (jnp.where(c > 0, c, 1) + (1 - c) * jnp.exp(-log_ratio)), 0)

    return SPAHyperparams(Schedule(lambda k: eta_at(k) * jnp.exp(-decay(k))), Schedule(c))


def momentum_drop(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    step: int,
    *,
    hold: Literal["eta", "alpha"] = "eta",
    step_factor: float | None = None,
) -> SPAHyperparams:
    """Raises c to 1 from `step` on, which removes momentum: x_k = z_k (arXiv:2010.00406, Figure 3).

    `hold="eta"` keeps η, and α = ηc of SGD+M rises by 1/c (Figure 1(d)). `hold="alpha"` keeps α,
    so the effective step α/(1 − β) shrinks by c. (For c_k = 1 the caption of Figure 3 prints 0.)

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      step: the first k ≥ 1 at which c_k is 1; with a `step_factor`, at which it has risen.
      hold: "eta" or "alpha".
      step_factor: of c per step, > 1, from `step` on until c is 1. None means an abrupt change.

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
    """
    RATE.check(learning_rate=learning_rate)
    AVERAGING.check(averaging=averaging)
    POSITIVE_INTEGER.check(step=step)
    one_of("eta", "alpha").check(hold=hold)
    ABOVE_1.optional().check(step_factor=step_factor)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def c(k: Array) -> Float[Array, ""]:
        num_rises = jnp.maximum(k + 2 - step, 0)  # of c_{k+1}
        if step_factor is None:
            return jnp.where(num_rises > 0, 1, c_at(k))
        return _scaled_up_to_1(c_at(k), num_rises.astype(float) * math.log(step_factor))

    def eta(k: Array) -> Float[Array, ""]:
        if hold == "eta":
            return eta_at(k)
        before, now = c_at(k), c(k)
        return eta_at(k) * jnp.where(before == now, 1, before / jnp.where(now > 0, now, 1))

    return SPAHyperparams(Schedule(eta), Schedule(c))


def _scaled_up_to_1(c: Array, log_factor: Array) -> Float[Array, ""]:
    """min(1, c·factor). A c of 0 stays 0: a factor that overflows does not make 0 · inf."""
    enough = 1 - jnp.log(jnp.where(c > 0, c, 1))  # log(e/c)
    return jnp.minimum(c * jnp.exp(jnp.minimum(log_factor, enough)), 1)


def schedule_free_averaging(
    learning_rate: optax.ScalarOrSchedule,
    num_warmup_steps: int = 0,
    *,
    weight_power: float = 2.0,
) -> optax.Schedule:
    """The averaging that makes `spa` Schedule-Free, for a rate with a warm-up.

    x is the mean of all z so far, each weighted by the largest rate until then, to the power p
    (Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682, Section 4):

        w_k = max(γ_0, …, γ_k)^p        c_{k+1} = w_k / (w_0 + … + w_k)

    Without a warm-up c_{k+1} is 1/(k + 1). `optax.contrib.schedule_free` reads the rate for its
    weights one count later than for its steps: to reproduce it, pass `lambda k: rate(k + 1)` here,
    and `rate` to `spa`.

    Args:
      learning_rate: a number γ, whose warm-up is taken as γ (k + 1)/`num_warmup_steps`; or γ_k ≥ 0,
        a schedule of the count k that can be vmapped. It must not rise after the warm-up: 550
        counts up to 10^6 are checked, so a short rise may pass.
      num_warmup_steps: the count ≥ 0 by which the rate is largest.
      weight_power: p ≥ 0.

    Returns:
      c_{k+1}, a schedule of the count k; with p > 0 it is 0 while rates are 0.

    Raises:
      ValueError: if an argument is out of range, or the schedule is traced or rises later.

    Examples:
      Warmed up over two steps the weights are 1/4, 1, 1, …, and c 1, 1/1.25, 1/2.25, …

      >>> import jax.numpy as jnp
      >>> from spa_optax import schedule_free_averaging, spa_adamw
      >>> rate = lambda k: 0.1 * jnp.minimum((k + 1) / 2, 1)
      >>> c = schedule_free_averaging(rate, num_warmup_steps=2)
      >>> print([f"{c(k):.3f}" for k in range(4)])
      ['1.000', '0.800', '0.444', '0.308']
      >>> tx = spa_adamw(rate, c, interpolation=0.9)
    """
    RATE.check(learning_rate=learning_rate)
    NOT_NEGATIVE_INTEGER.check(num_warmup_steps=num_warmup_steps)
    NOT_NEGATIVE.check(weight_power=weight_power)
    end = num_warmup_steps
    rates = np.minimum(np.arange(1, end + 2) / max(end, 1), 1)  # of a number, over that number
    if callable(learning_rate):
        ahead = end + np.unique(np.geomspace(1, 10**6, 700).astype(int))
        with jax.ensure_compile_time_eval():
            counts = jnp.asarray(np.append(np.arange(end + 1), ahead), jnp.int32)
            values = jax.vmap(at_count("learning_rate", learning_rate))(counts)
        try:
            rates, later = np.split(np.asarray(values, np.float64), [end + 1])
        except jax.errors.TracerArrayConversionError:
            raise ValueError("`learning_rate` must not depend on traced values") from None
        if not np.all(np.isfinite(rates) & (rates >= 0)):
            raise ValueError("`learning_rate` must be finite and >= 0 during its warm-up")
        rises = later > (1 + 1e-6) * rates.max()  # up to rounding; past its end it may be NaN
        if rates.max() == 0 or rises.any():
            k = np.argmax(rises)
            raise ValueError(
                f"`learning_rate` must be > 0 and largest by count {end}, `num_warmup_steps`, got"
                f" {later[k]:g} at {ahead[k]} after {rates.max():g}"
            )
    weights = (np.maximum.accumulate(rates) / rates.max()) ** weight_power
    # 1/c, in float64; inf as long as rates are 0.
    inverse = np.divide(np.cumsum(weights), weights, np.full(end + 1, np.inf), where=weights > 0)

    def c(k: Array) -> Float[Array, ""]:
        after = jnp.maximum(k - end, 0).astype(float)
        return 1 / (jnp.asarray(inverse, float)[jnp.minimum(k, end)] + after)

    return Schedule(c)
