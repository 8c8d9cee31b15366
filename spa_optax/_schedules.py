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
    B1,
    MOMENTUM,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INTEGER,
    POSITIVE_INTEGER,
    RATE,
    one_of,
)
from spa_optax._hyperparams import (
    GPAHyperparams,
    Schedule,
    SGDMHyperparams,
    SPAHyperparams,
    at_count,
)
from spa_optax._lookahead import eta_and_c, look_ahead

_EXACT = 100  # from this count on, sums of powers by their expansion in 1/k are exact to 1e-13


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
    count_power: float = 0.0,
    num_unaveraged_steps: int = 0,
) -> optax.Schedule:
    """The averaging that makes `spa` Schedule-Free, for a rate with a warm-up.

    x is the mean of the z so far, weighted by the count and by the largest rate until then:

        w_k = (k + 1)^r max(γ_0, …, γ_k)^p        c_{k+1} = w_k / (w_0 + … + w_k)

    Without a warm-up and r, c_{k+1} is 1/(k + 1). `optax.contrib.schedule_free` reads the rate for
    its weights one count later than for its steps: to reproduce it, pass `lambda k: rate(k + 1)`
    here, and `rate` to `spa`.

    Args:
      learning_rate: a number γ, whose warm-up is taken as γ (k + 1)/`num_warmup_steps`; or γ_k ≥ 0,
        a schedule of the count k that can be vmapped. It must not rise after the warm-up: 550
        counts up to 10^6 are checked, so a short rise may pass.
      num_warmup_steps: the count ≥ 0 by which the rate is largest.
      weight_power: p ≥ 0.
      count_power: r ≥ 0. ScheduleFree+ has up to 2, for long runs.
      num_unaveraged_steps: for how many steps ≥ 0 x is z (c is 1). The mean begins after them.

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

    References:
      Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682, Section 4. ScheduleFree+,
      2026, arXiv:2605.19095, adds r and the steps without averaging.
    """
    RATE.check(learning_rate=learning_rate)
    NOT_NEGATIVE_INTEGER.check(num_warmup_steps=num_warmup_steps)
    NOT_NEGATIVE.check(weight_power=weight_power)
    NOT_NEGATIVE.check(count_power=count_power)
    NOT_NEGATIVE_INTEGER.check(num_unaveraged_steps=num_unaveraged_steps)
    end = num_warmup_steps
    rates = np.minimum(np.arange(1, end + 2) / max(end, 1), 1)  # of a number, over that number
    if callable(learning_rate):
        rates, later = _up_to_and_after("learning_rate", learning_rate, end)
        if not np.all(np.isfinite(rates) & (rates >= 0)):
            raise ValueError("`learning_rate` must be finite and >= 0 during its warm-up")
        rises = later > (1 + 1e-6) * rates.max()  # up to rounding; past its end it may be NaN
        if rates.max() == 0 or rises.any():
            k = np.argmax(rises)
            raise ValueError(
                f"`learning_rate` must be > 0 and largest by count {end}, `num_warmup_steps`, got"
                f" {later[k]:g} at {end + _AHEAD[k]} after {rates.max():g}"
            )
    # 1/c, in float64; inf as long as weights are 0.
    last, start, r = max(end, num_unaveraged_steps, _EXACT), num_unaveraged_steps, count_power
    n = np.arange(1.0, last + 2)
    largest = np.maximum.accumulate(np.append(rates, np.full(last - end, rates.max())))
    weights = n**r * (largest / rates.max()) ** weight_power
    weights[:start] = 0
    inverse = np.divide(np.cumsum(weights), weights, np.full(last + 1, np.inf), where=weights > 0)
    inverse[:start] = 1
    # Afterwards Σ j^r grows as Euler and Maclaurin have it, from where the table ends.
    power_sum = lambda n: n / (r + 1) + 1 / 2 + r / (12 * n) - r * (r - 1) * (r - 2) / (720 * n**3)
    constant = inverse[-1] - power_sum(n[-1])

    def c(k: Array) -> Float[Array, ""]:
        n_k = jnp.maximum(k + 1, last + 1).astype(float)
        later = power_sum(n_k) + constant * (n_k / n[-1]) ** -r
        return 1 / jnp.where(k > last, later, jnp.asarray(inverse, float)[jnp.minimum(k, last)])

    return Schedule(c)


def ema_nesterov(
    learning_rate: optax.ScalarOrSchedule,
    decay: float,
    lookahead: optax.ScalarOrSchedule,
    num_steps: int = 0,
) -> GPAHyperparams:
    """EMA-Nesterov (arXiv:2605.25395) as primal averaging.

    With u the update of a base optimizer at the params y_k = θ_k + β_k m_k, EMA-Nesterov is

        θ_{k+1} = y_k + u_k        m_{k+1} = γ m_k + (1 − γ)(θ_{k+1} − θ_k)

    These y are those of primal averaging with the rate of the base times η_k, and

        η_k = 1 − γ + (γ + (1 − γ) β_{k+1}) η_{k+1}     c_{k+1} = (1 − γ)/η_k     μ_y = 1 − 1/η_k

    for y_k; x is the moving average of θ, of decay γ. For a constant β, η is 1/(1 − β), c is
    (1 − γ)(1 − β) and μ_y is β. Where all later β are 0, μ_y is 0: params are θ, and x is lost.

    Args:
      learning_rate: α_k ≥ 0 of the base, a scalar or a schedule of the count k. Around a finished
        optimizer, which has a rate, it is 1.
      decay: γ in [0, 1), of the moving average m.
      lookahead: β_k in [0, 1), a number, or a schedule of the count k that can be vmapped.
      num_steps: the count ≥ 0 from which a schedule of β is constant.

    Returns:
      Schedules of α_k η_k, c and μ_y: `spa(*ema_nesterov(...))`.

    Raises:
      ValueError: if an argument is out of range, or the schedule is traced or changes later.

    Examples:
      With γ = ½, β_2 = ½ and no other, η_1 = ½ + ¾ = 1.25, η_0 = ½ + ½ · 1.25 and c_2 = ½ / 1.25.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import ema_nesterov, primal_averaging
      >>> beta = lambda k: jnp.where(k == 2, 0.5, 0.0)
      >>> eta, c, mu_y = ema_nesterov(1.0, decay=0.5, lookahead=beta, num_steps=3)
      >>> print([f"{eta(k):.3f}" for k in range(3)], [f"{c(k):.3f}" for k in range(3)])
      ['1.125', '1.250', '1.000'] ['0.444', '0.400', '0.500']
      >>> muon = optax.chain(optax.contrib.muon(0.02), optax.scale_by_schedule(eta))
      >>> tx = primal_averaging(muon, c, mu_y)
    """
    RATE.check(learning_rate=learning_rate)
    B1.check(decay=decay)
    MOMENTUM.check(lookahead=lookahead)
    NOT_NEGATIVE_INTEGER.check(num_steps=num_steps)
    beta, later = _up_to_and_after("lookahead", lookahead, num_steps)
    if not np.all((beta >= 0) & (beta < 1)):
        raise ValueError(f"`lookahead` must be in [0, 1) up to count {num_steps}, got {beta}")
    changes = np.abs(later - beta[-1]) > 1e-6  # up to rounding; past its end it may be NaN
    if changes.any():
        k = np.argmax(changes)
        raise ValueError(
            f"`lookahead` must be constant from count {num_steps}, `num_steps`, got {later[k]:g} at"
            f" {num_steps + _AHEAD[k]} after {beta[-1]:g}"
        )
    # η_k − 1, in float64, from the last to the first.
    excess = np.full(num_steps + 1, beta[-1] / (1 - beta[-1]))
    for k in reversed(range(num_steps)):
        excess[k] = (1 - decay) * beta[k + 1] + (decay + (1 - decay) * beta[k + 1]) * excess[k + 1]
    excess[: np.max(np.flatnonzero(excess), initial=0)] += 1e-30  # before β rises, μ_y is not 0
    at = lambda values, k: jnp.asarray(values, float)[jnp.minimum(k, num_steps)]
    alpha_at = at_count("learning_rate", learning_rate)
    eta, c, mu_y = 1 + excess, (1 - decay) / (1 + excess), excess / (1 + excess)
    return GPAHyperparams(
        Schedule(lambda k: alpha_at(k) * at(eta, k)),
        Schedule(lambda k: at(c, k)),
        Schedule(lambda k: at(mu_y, k + 1)),
    )


_AHEAD = np.unique(np.geomspace(1, 10**6, 700).astype(int))  # 550 counts


def _up_to_and_after(
    name: str, hyperparam: optax.ScalarOrSchedule, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The values up to a count, and some of those after it; they must not be traced."""
    counts = np.append(np.arange(count + 1), count + _AHEAD)
    try:
        with jax.ensure_compile_time_eval():
            values = jax.vmap(at_count(name, hyperparam))(jnp.asarray(counts, jnp.int32))
        first, later = np.split(np.asarray(values, np.float64), [count + 1])
    except jax.errors.TracerArrayConversionError:
        raise ValueError(f"`{name}` must not depend on traced values") from None
    return first, later
