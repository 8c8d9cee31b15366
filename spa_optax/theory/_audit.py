"""The audit of a schedule: its values as SPA and as SGD+M, and what they show."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from .. import _arguments
from .._schedules import hyperparams_to_sgdm
from .._sgdm import default_horizon, eta_and_c, evaluate_sgdm

Values = Float[np.ndarray, " n"]
StepMask = Bool[np.ndarray, " n"]  # True at the steps that a finding is about
GRADUAL = "Let η fall by a smaller fraction than c in each step."


class Finding(NamedTuple):
    """An observation on a schedule.

    A drop calls for no change. Check that a rise is intended.
    """

    kind: Literal["range", "standstill", "average", "beta", "spike", "rise", "drop"]
    text: str  # where, how large, and the remedy


class Audit(NamedTuple):
    """A schedule as SPA and as SGD+M, for k = 0, …, n − 1, as float64."""

    eta: Values  # η_k
    c: Values  # c_{k+1}, which step k uses
    alpha: Values  # α_k of SGD+M
    beta: Values  # β_k of SGD+M; β_0 is free: NaN, unless the schedule is SGD+M's
    is_from_sgdm: bool  # whether the schedule was given as SGD+M

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """The audit in words, the most important finding first. `print` shows it."""
        findings = self.findings()
        lines = [finding.text for finding in findings]
        if not lines:
            name, _ = self.effective_learning_rate()
            jump = "by a factor of 1.5 or more in one step, but for ramps"
            lines = [f"neither α nor {name} jumps ({jump})."]
        needs_change = any(finding.kind != "drop" for finding in findings)
        if not needs_change:
            lines[0] = f"Nothing to change: {lines[0]}"
        eta, c = _describe_range(self.eta), _describe_range(self.c)
        alpha, beta = _describe_range(self.alpha), _describe_range(self.beta)
        lines.append(f"{len(self.eta):,} steps as SPA: η {eta}, c {c}")
        lines.append(f"and as SGD+M: α {alpha}, β {beta}")
        return "\n".join(lines)

    def findings(self) -> list[Finding]:
        """The findings. Those that need a change come first."""
        first = _find_out_of_range(self) or _find_standstill(self)
        if first:  # other findings would be its consequences
            return [first]
        found = [_find_long_average(self), _find_high_beta(self), _find_spikes(self)]
        return [*filter(None, found), *_find_jumps(self)]

    def effective_learning_rate(self) -> tuple[str, Values]:
        """How far a gradient moves the params in the end, in units of itself.

        This is η, or α/(1 − β) of a schedule that was given as SGD+M.
        """
        if not self.is_from_sgdm:
            return "η", self.eta
        with np.errstate(divide="ignore"):
            return "α/(1 − β)", self.alpha / (1 - self.beta)


def audit(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    num_steps: int,
) -> Audit:
    """Checks a schedule of SPA at every step.

    `summary()` names averages that leave more than 1 % of x_0 in x, and jumps of α and
    of η. For SGD+M these are jumps of α/(1 − β). Where η should fall gradually,
    `stagewise` does so with a `step_divisor` below 1/(1 − c), and `spa_from_sgdm` needs
    no change.

    A jump is a change by a factor of 1.5 or more in one step. It must be above 1e-4 of
    the largest value, and more than 22 % of the change within four steps on either
    side, so that a ramp of five equal steps is gradual. Slower falls of η are not
    named, though x lags behind z in those that are shorter than some 5/c steps.

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
      >>> print(theory.audit(*stagewise(10.0, 0.1, [20]), 100).summary().split(",")[0])
      α spikes from 1 to 10 at step 19

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and
      Sections 5 and 6.
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.POSITIVE_INTEGER.check(num_steps=num_steps)
    hyperparams = hyperparams_to_sgdm(learning_rate, averaging)
    schedules = [
        _arguments.as_schedule("learning_rate", learning_rate),
        _arguments.as_schedule("averaging", averaging),
        _arguments.as_schedule("learning_rate", hyperparams.learning_rate),
        _arguments.as_schedule("momentum", hyperparams.momentum),
    ]
    eta, c, alpha, beta = _evaluate(
        lambda k: [schedule(k) for schedule in schedules], num_steps
    )
    beta[0] = np.nan
    return Audit(eta, c, alpha, np.abs(beta), is_from_sgdm=False)  # at η = −0.0, too


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
      >>> print(theory.audit_sgdm(schedule, 0.9, 1_000).summary().splitlines()[0])
      Nothing to change: α drops from 0.1 to 0.01 at step 500.
    """
    _arguments.BOOLEAN.check(nesterov=nesterov)
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.FRACTION_BELOW_1.check(momentum=momentum)
    _arguments.POSITIVE_INTEGER.check(num_steps=num_steps)
    horizon = None
    if not _arguments.is_static_number(momentum):
        betas = _arguments.sample(momentum, np.arange(num_steps))
        largest = np.nanmax(betas, where=betas < 1, initial=0.0)
        horizon = max(default_horizon(momentum), default_horizon(largest))

    def values_at(k):
        sgdm = evaluate_sgdm(
            learning_rate, momentum, k, nesterov=nesterov, horizon=horizon
        )
        eta, c = eta_and_c(sgdm, sgdm.next_resting_w)
        return eta, c, sgdm.alpha, sgdm.beta

    return Audit(*_evaluate(values_at, num_steps), is_from_sgdm=True)


def _evaluate(values_at: Callable[[Array], Any], num_steps: int) -> list[Values]:
    """The values of a function of the count, at each, as float64."""
    counts = jnp.arange(num_steps, dtype=jnp.int32)
    values = jax.jit(lambda counts: jax.lax.map(values_at, counts))(counts)
    return [np.array(v, float) for v in values]


def _spike_mask(alpha: Values) -> StepMask:
    """Whether α is over twice both neighbours. The first and last never are.

    Nor is rounding error at the end of a decay to 0.
    """
    padded = np.pad(alpha, 1, constant_values=np.inf)
    highest_around = np.maximum(padded[:-2], padded[2:])
    return alpha > np.maximum(2 * highest_around, 1e-4 * alpha.max())


def _find_out_of_range(audited: Audit) -> Finding | None:
    """Hyper-parameters that no step can have.

    In range are 0 ≤ η < ∞, 0 ≤ c ≤ 1 and 0 ≤ β, below 1 if it was given. NaN is not.
    """
    eta, c, alpha, beta, is_from_sgdm = audited
    is_in_range = ~_negative_mask(eta) & (eta < np.inf) & (c >= 0) & (c <= 1)
    is_in_range &= ~_negative_mask(alpha)
    if is_from_sgdm:  # else β ≥ 0 follows
        is_in_range &= (beta >= 0) & (beta < 1)
    out = ~is_in_range
    if not out.any():
        return None
    return Finding(
        "range", f"a hyper-parameter is NaN or out of range {_describe_steps(out)}."
    )


def _negative_mask(values: Values) -> StepMask:
    """Whether a value is NaN, or below 0 by more than the error of a decay to 0."""
    largest = np.max(np.abs(values), initial=0.0, where=np.isfinite(values))
    return ~(values >= -1e-6 * largest)


def _find_standstill(audited: Audit) -> Finding | None:
    """A schedule that never moves the params."""
    z_has_moved = np.maximum.accumulate(audited.eta > 0)
    if audited.alpha.any() or (z_has_moved & (audited.c > 0)).any():
        return None
    return Finding("standstill", "α is 0 at every step: params stay.")


def _find_long_average(audited: Audit) -> Finding | None:
    """An average that remembers the first params to the end."""
    n, share = len(audited.c), np.prod(1 - audited.c)  # of x_0 in x_n
    if share <= 0.01:
        return None
    text = (
        f"Averages over 1/c steps are too long for {n:,}: x ends with "
        f"{100 * share:.2g} % of x_0. With a constant c of {min(5 / n, 1):.2g} it "
        "would be less than 1 %."
    )
    return Finding("average", text)


def _find_high_beta(audited: Audit) -> Finding | None:
    """β_k = (η_{k−1}/η_k) (1 − c_k) is 1 or more where η falls by more than c_k."""
    eta, c, beta = audited.eta, audited.c, audited.beta
    # β is over 1 in the end of any decay to 0, so only jumps count. At c = 0 x stands
    # still.
    is_high = (beta >= 1) & (_jump_signs(eta) < 0)
    is_high[1:] &= c[:-1] > 0
    if not is_high.any():
        return None
    k = is_high.argmax()
    text = (
        f"η falls {_describe_change(eta, is_high)}, where c is {c[k - 1]:.3g}: x "
        f"overshoots. {GRADUAL}"
    )
    return Finding("beta", text)


def _find_spikes(audited: Audit) -> Finding | None:
    """Single steps of α that are far above both neighbours (Insight 3)."""
    eta, c, is_spike = audited.eta, audited.c, _spike_mask(audited.alpha)
    if not is_spike.any():
        return None
    k = is_spike.argmax()
    change = _describe_change(audited.alpha, is_spike)
    c_is_early = c[k] > c[k - 1] and eta[k + 1] < eta[k]
    if c_is_early and not audited.is_from_sgdm:
        text = (
            f"α spikes {change}, as in Figure 1(e): c rises a step before η falls. "
            f"{GRADUAL}"
        )
    else:
        text = f"α spikes {change}. Make the change gradual."
    return Finding("spike", text)


def _find_jumps(audited: Audit) -> list[Finding]:
    """Jumps of α and of the effective learning rate; those up come first."""
    name, effective = audited.effective_learning_rate()
    is_spike = _spike_mask(audited.alpha)
    alpha_signs, effective_signs = _jump_signs(audited.alpha), _jump_signs(effective)
    effective_signs[effective_signs == alpha_signs] = 0  # one event
    alpha_signs[is_spike | np.roll(is_spike, 1)] = 0
    found = [
        _describe_jump("rise", "α", audited.alpha, alpha_signs > 0),
        _describe_jump("rise", name, effective, effective_signs > 0),
        _describe_jump("drop", "α", audited.alpha, alpha_signs < 0),
        _describe_jump("drop", name, effective, effective_signs < 0),
    ]
    return [*filter(None, found)]


def _describe_jump(
    kind: Literal["rise", "drop"], name: str, values: Values, mask: StepMask
) -> Finding | None:
    """The jumps of one quantity, if there are any."""
    if not mask.any():
        return None
    text = f"{name} {kind}s {_describe_change(values, mask)}."
    if kind == "rise":
        text += " Check that it is meant, as in a restart."
    return Finding(kind, text)


def _jump_signs(values: Values) -> Values:
    """1 where a value jumps up, −1 where it jumps down, else 0; see `audit`."""
    before = np.append(values[:1], values[:-1])
    low, high = np.minimum(values, before), np.maximum(values, before)
    size = high - low
    # A ramp of 5 steps has a fifth of its change in each, one of 4 a quarter.
    nearby = np.convolve(size, np.ones(9))[4:-4]
    is_abrupt = size > 0.22 * nearby
    is_large = (high >= 1.5 * (1 - 1e-6) * low) & (high > 1e-4 * values.max())
    return np.sign(values - before) * (is_abrupt & is_large)


def _describe_steps(mask: StepMask) -> str:
    """The first of some steps, and how many others there are."""
    text = f"at step {mask.argmax():,}"
    num_others = mask.sum() - 1
    if num_others == 0:
        return text
    return f"{text} and at {num_others:,} other{'s' if num_others > 1 else ''}"


def _describe_change(values: Values, mask: StepMask) -> str:
    """The change at the first of some steps, and where the others are."""
    k = mask.argmax()
    before, after = values[k - 1 : k + 1] + 0.0  # −0.0 + 0.0 is 0.0
    return f"from {before:.3g} to {after:.3g} {_describe_steps(mask)}"


def _describe_range(values: Values) -> str:
    """The least and the largest value."""
    known = values[~np.isnan(values)]
    if not len(known):
        return "undefined"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    return low if low == high else f"{low} to {high}"
