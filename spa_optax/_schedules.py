"""Schedules of the paper, of Schedule-Free, and to and from SGD with momentum."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike

from . import _arguments
from ._sgdm import eta_and_c, evaluate_sgdm


class SPAHyperparams(NamedTuple):
    """Hyper-parameters of SPA, scalars or schedules: `spa(*hyperparams)`."""

    learning_rate: optax.ScalarOrSchedule  # η_k at count k
    averaging: optax.ScalarOrSchedule  # c_{k+1} at count k


class SGDMHyperparams(NamedTuple):
    """Hyper-parameters of SGD+M, scalars or schedules.

    Numbers go into `optax.sgd(*hyperparams)`, which takes no schedule of momentum.
    """

    learning_rate: optax.ScalarOrSchedule  # α_k at count k
    momentum: optax.ScalarOrSchedule  # β_k at count k
    nesterov: bool = False


class AdamWHyperparams(NamedTuple):
    """Hyper-parameters of `optax.adamw`, for `convert`."""

    learning_rate: optax.ScalarOrSchedule  # η_k at count k
    b1: ArrayLike = 0.9
    b2: ArrayLike = 0.999
    eps: ArrayLike = 1e-8


def hyperparams_from_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    *,
    horizon: int | None = None,
) -> SPAHyperparams:
    """The SPA hyper-parameters that give the iterates of heavy-ball SGD+M.

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i
        η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    For constants, η = α/(1 − β) and c = 1 − β. Unlike the paper's recursion in k, this
    solution of Theorem 1 is bounded. For Nesterov momentum and injected numbers use
    `spa_from_sgdm`.

    Args:
      learning_rate: α_k ≥ 0, as for `spa_from_sgdm`.
      momentum: β_k in [0, 1), as for `spa_from_sgdm`.
      horizon: as for `spa_from_sgdm`, but nothing makes up for one that is too short.
        By default w is off by some 1e-8 of itself for a number β up to 0.999 or a
        schedule up to 0.99. Beyond pass a longer one.

    Returns:
      Numbers if both arguments are numbers, else schedules. There, where α_k is 0,
      c_{k+1} is 0, or 1 if no later α is above 0 or the next β is 0.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from spa_optax import hyperparams_from_sgdm, stagewise
      >>> alpha, _ = stagewise(4.0, 0.5, [2], divisor=4.0)  # 4, 4, 1, 1, …
      >>> eta, c = hyperparams_from_sgdm(alpha, 0.5)
      >>> # η_1 = 4 + ½ + ¼ + … = 5
      >>> print([f"{eta(k):.1f} {c(k):.3f}" for k in range(3)])
      ['6.5 0.615', '5.0 0.800', '2.0 0.500']
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.FRACTION_BELOW_1.check(momentum=momentum)
    _arguments.POSITIVE_INTEGER.optional().check(horizon=horizon)
    if not (callable(learning_rate) or callable(momentum)):
        return SPAHyperparams(learning_rate / (1 - momentum), 1 - momentum)

    def eta_and_c_at(k):
        sgdm = evaluate_sgdm(learning_rate, momentum, k, horizon=horizon)
        return eta_and_c(sgdm, sgdm.next_resting_w)

    return SPAHyperparams(
        learning_rate=as_vectorized(lambda k: eta_and_c_at(k)[0]),
        averaging=as_vectorized(lambda k: eta_and_c_at(k)[1]),
    )


def hyperparams_to_sgdm(
    learning_rate: optax.ScalarOrSchedule, averaging: optax.ScalarOrSchedule
) -> SGDMHyperparams:
    """The hyper-parameters of SGD+M that give the iterates of SPA.

        α_k = η_k c_{k+1}      β_k = (η_{k−1} / η_k)(1 − c_k)

    β_0 is free: 1 − c_1. β_k may exceed 1 where η falls fast; where η_k = 0 < η_{k−1}
    it is inf.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.

    Returns:
      Numbers if both arguments are numbers, else schedules.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from spa_optax import hyperparams_to_sgdm, stagewise
      >>> eta, c = stagewise(10.0, 0.1, [2], averaging_mode="constant")
      >>> alpha, beta, _ = hyperparams_to_sgdm(eta, c)
      >>> # β spikes to 10 · 0.9
      >>> print([f"{alpha(k):.1f} {beta(k):.1f}" for k in range(4)])
      ['1.0 0.9', '1.0 0.9', '0.1 9.0', '0.1 0.9']
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.check_averaging(averaging)
    if not (callable(learning_rate) or callable(averaging)):
        return SGDMHyperparams(learning_rate * averaging, 1 - averaging)
    eta_at = _arguments.as_schedule("learning_rate", learning_rate)
    c_at = _arguments.as_schedule("averaging", averaging)

    def beta_at(k):
        last = jnp.maximum(k - 1, 0)  # `averaging` at count k − 1 is c_k
        eta, last_eta, c = eta_at(k), eta_at(last), c_at(last)
        ratio = jnp.where((last_eta == 0) | (c == 1), 0, last_eta / eta)
        return jnp.where(k == 0, 1, ratio) * (1 - c)

    return SGDMHyperparams(
        as_vectorized(lambda k: eta_at(k) * c_at(k)), as_vectorized(beta_at)
    )


def stagewise(
    learning_rate: float,
    averaging: float,
    boundaries: Sequence[int],
    divisor: float = 10.0,
    *,
    averaging_mode: Literal["constant", "scale", "balance"] = "scale",
    step_divisor: float | None = None,
) -> SPAHyperparams:
    """Divides η by a number at each boundary, and adapts c.

    At boundary b the paper's η_b and c_b change first: `learning_rate` at count b, and
    `averaging`, which is c_{k+1}, at count b − 1. With the initial η and c:

        constant   c_k = c
        scale      c_k = min(1, c η/η_k)
        balance    1/c_k − 1 = (1/c − 1) η_k/η

    Args:
      learning_rate: η ≥ 0 of the first stage.
      averaging: c in (0, 1] of the first stage.
      boundaries: the steps b ≥ 1 at which a stage begins, ascending.
      divisor: of η at every boundary, > 1.
      averaging_mode: "constant", "scale" or "balance".
      step_divisor: s > 1: η_k = max(η_{k−1}/s, the η of its stage). With
        s = divisor^(1/n) a transition takes n steps. None is abrupt, and α or β of
        SGD+M then spikes (Insight 3).

    Returns:
      Two schedules: `spa(*stagewise(...))`.

    Raises:
      ValueError: if an argument is out of range, or a transition too long for its
        stage.

    Examples:
      >>> from spa_optax import stagewise
      >>> eta, c = stagewise(1.0, 0.1, [2], step_divisor=2.0)
      >>> # c rises until η is divided by 10
      >>> print([f"{eta(k):.3f} {c(k):.1f}" for k in range(5)])
      ['1.000 0.1', '1.000 0.2', '0.500 0.4', '0.250 0.8', '0.125 1.0']

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Sections 5 and 6.
    """
    _arguments.NOT_NEGATIVE.with_type(_arguments.SCALAR).check(
        learning_rate=learning_rate
    )
    _arguments.POSITIVE_FRACTION.with_type(_arguments.SCALAR).check(averaging=averaging)
    _arguments.one_of("constant", "scale", "balance").check(
        averaging_mode=averaging_mode
    )
    _arguments.ABOVE_1.check(divisor=divisor)
    _arguments.ABOVE_1.optional().check(step_divisor=step_divisor)
    boundaries = _as_boundaries(boundaries, divisor, step_divisor)
    log_divisor, log_step = math.log(divisor), math.log(step_divisor or divisor)

    def log_decay_at(k):
        """log(η/η_k): each stage that has begun adds log(s) a step."""
        total = jnp.zeros([], float)
        for b in boundaries:
            num_steps = (k - b + 1).astype(float)
            total += jnp.clip(num_steps * log_step, 0, log_divisor)
        return total

    def eta_at(k):
        return jnp.asarray(learning_rate, float) * jnp.exp(-log_decay_at(k))

    def c_at(k):
        c, log_ratio = jnp.asarray(averaging, float), log_decay_at(k + 1)
        if averaging_mode == "scale":
            return jnp.minimum(c * jnp.exp(log_ratio), 1)
        if averaging_mode == "balance":
            return c / (c + (1 - c) * jnp.exp(-log_ratio))
        return c

    return SPAHyperparams(as_vectorized(eta_at), as_vectorized(c_at))


def _as_boundaries(
    boundaries: Any, divisor: float, step_divisor: float | None
) -> list[int]:
    """The steps at which stages begin, if each has room for its transition."""
    if isinstance(boundaries, (str, Mapping)) or not isinstance(boundaries, Iterable):
        raise ValueError(
            "`boundaries` must be a sequence of steps, with one `divisor` for all, got "
            f"{boundaries!r}"
        )
    boundaries = list(boundaries)
    for b in boundaries:
        _arguments.POSITIVE_INTEGER.check(boundaries=b)
    boundaries = list(map(operator.index, boundaries))  # NumPy's have a dtype
    lengths = [after - b for b, after in itertools.pairwise(boundaries)]
    shortest = min(lengths, default=math.inf)
    if shortest <= 0:
        raise ValueError(f"`boundaries` must be ascending, got {boundaries}")
    least = (1 - 1e-12) * divisor ** (1 / shortest)  # up to rounding
    if step_divisor is not None and step_divisor < least:
        raise ValueError(
            f"`step_divisor` must be at least {math.ceil(1e6 * least) / 1e6}, to end "
            f"before the next boundary, got {step_divisor}"
        )
    return boundaries


def schedule_free_averaging(
    learning_rate: optax.ScalarOrSchedule,
    warmup_steps: int = 0,
    *,
    weight_lr_power: float = 2.0,
) -> optax.Schedule:
    """The averaging that makes `spa` Schedule-Free: x is a weighted mean of all z.

        ω_k = max(η_0, …, η_k)^p        c_{k+1} = ω_k / (ω_0 + … + ω_k)

    To have the steps of `optax.contrib.schedule_free`, which weights step k by the rate
    of step k + 1, pass `lambda k: rate(k + 1)` here and `rate` to `spa`.

    Args:
      learning_rate: η_k ≥ 0, a schedule of the count k that can be vmapped; or a number
        η, taken to warm up as η (k + 1)/`warmup_steps`.
      warmup_steps: the count ≥ 0 by which the rate is largest; some later ones are
        checked.
      weight_lr_power: p ≥ 0.

    Returns:
      c_{k+1}, a schedule of the count k. With p > 0 it is 0 while a schedule's rates
      are 0.

    Raises:
      ValueError: if an argument is out of range, or the schedule is traced or rises
        later.

    Examples:
      >>> from spa_optax import schedule_free_averaging
      >>> c = schedule_free_averaging(0.1, warmup_steps=2)
      >>> # weights are 1/4, 1, 1, …, so c is 1, 1/1.25, 1/2.25, …
      >>> print([f"{c(k):.3f}" for k in range(4)])
      ['1.000', '0.800', '0.444', '0.308']

    References:
      Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682, Section 4.
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.NOT_NEGATIVE_INTEGER.check(warmup_steps=warmup_steps)
    _arguments.NOT_NEGATIVE.with_type(_arguments.NUMBER).check(
        weight_lr_power=weight_lr_power
    )
    if callable(learning_rate):
        rates = _rates_of_warmup(learning_rate, warmup_steps)
    else:  # divided by η, which cancels in c
        counts = np.arange(1, warmup_steps + 2)
        rates = np.minimum(counts / max(warmup_steps, 1), 1)
    # A table of 1/c up to the last step of warm-up, in float64; inf while weights are
    # 0.
    largest = np.maximum.accumulate(rates)
    weights = (largest / largest[-1]) ** weight_lr_power
    inverse_c = np.full_like(weights, np.inf)
    np.divide(np.cumsum(weights), weights, inverse_c, where=weights > 0)

    def c_at(k):
        in_table = jnp.asarray(inverse_c, float)[jnp.minimum(k, warmup_steps)]
        # Afterwards each step adds the same weight.
        return 1 / (in_table + jnp.maximum(k - warmup_steps, 0).astype(float))

    return as_vectorized(c_at)


def _rates_of_warmup(
    learning_rate: Callable[..., Any], warmup_steps: int
) -> np.ndarray:
    """The rates of counts 0 to `warmup_steps`, in float64.

    Raises ValueError if a later one is larger.
    """
    later = warmup_steps + np.unique(np.geomspace(1, 10**6, 700).astype(int))
    counts = np.append(np.arange(warmup_steps + 1), later)
    rate_at = _arguments.as_schedule("learning_rate", learning_rate)
    rates = _arguments.sample(rate_at, counts)
    if not rates.size:
        raise ValueError("`learning_rate` must not depend on traced values")
    first, rest = np.split(rates, [warmup_steps + 1])
    largest = first.max()  # NaN if one is
    _arguments.NOT_NEGATIVE.check(learning_rate=float(first.min()))
    _arguments.NOT_NEGATIVE.check(learning_rate=float(largest))
    has_risen = (rest > (1 + 1e-6) * largest) | (largest == 0)
    if has_risen.any():  # not if it is NaN, as past its end
        k = np.argmax(has_risen)
        raise ValueError(
            "`learning_rate` must be > 0 and largest by count "
            f"{warmup_steps} (`warmup_steps`), got {rest[k]:g} at {later[k]}"
        )
    return first


def as_vectorized(at: Callable[[Array], Array]) -> optax.Schedule:
    """A schedule of a count, or of an array of counts.

    Counts are int32, as in states, so that values are the same there.
    """
    return lambda count: jnp.vectorize(at)(jnp.asarray(count).astype(jnp.int32))
