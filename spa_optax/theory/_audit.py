"""The audit of a schedule: its values in both forms, what it does, and the conditions
it breaks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float

from spa_optax import _checks as checks
from spa_optax._hyperparams import SGDMHyperparams, at_count
from spa_optax._lookahead import in_range, look_ahead
from spa_optax._schedules import hyperparams_from_sgdm
from spa_optax.theory import _formulas

Values = Float[np.ndarray, " n"]
_is_real = lambda v: np.ndim(v) == 0 and np.asarray(v).dtype.kind in "iuf"
SMOOTHNESS = checks.Rule(
    "finite and > 0", lambda v: _is_real(v) and 0 < v < np.inf
).optional()

_OUT_OF_RANGE = "a hyper-parameter is NaN or out of range"
_SPIKE = "α spikes to over twice its neighbours"
_BOUND = (
    "By the bound, which is for the worst case: recipes that train well exceed "
    "its limit on η."
)
_REMEDY = (
    "Let η fall by less than c per step (the `step_factor` of `stagewise` or "
    "`momentum_drop`), or"
    " give the recipe as SGD+M, to `spa_from_sgdm`."
)

_previous = lambda values: np.append(
    values[:1], values[:-1]
)  # at k − 1; at k = 0, the first
_steps = lambda where: np.flatnonzero(where).tolist()
_from_to = lambda values, k: f"from {values[k - 1]:.3g} to {values[k]:.3g}"


class Finding(NamedTuple):
    """An observation on a schedule: where, how large, and the remedy."""

    kind: str  # "range", "average", "beta", "spike", "rise" or "drop"
    steps: list[int]
    text: str
    needs_change: bool = True


class Audit(NamedTuple):
    """A schedule as SPA and as SGD+M, and the terms of the bound: float64, k = 0, …, n
    − 1.
    """

    eta: Values  # η_k
    c: Values  # c_{k+1}, which step k uses
    alpha: Values  # α_k of SGD+M
    beta: Values  # β_k of SGD+M; β_0 is free: NaN, unless the schedule is SGD+M's
    remainder_x: Values  # R_k's coefficient of f(x_{k−1}) − f*, over L
    remainder_z: Values  # R_k's coefficient of f(z_k) − f*
    step_weight: Values | None  # None without a smoothness
    max_learning_rate: Values | None

    def report(self, *, verbose: bool = False) -> str:
        """The audit in words, the verdict first. `verbose` adds R_k's coefficients."""
        findings, breaches = self.findings(), self.breaches()
        none = "neither α nor {} jumps (by a factor of 1.5 or more)."
        lines = [finding.text for finding in findings] or [
            none.format(self._total_effect()[0])
        ]
        if all(finding.kind == "drop" for finding in findings):
            lines[0] = f"Nothing to change: {lines[0]}"
        eta, c, alpha, beta = map(_interval, self[:4])
        lines.append(f"{len(self.eta):,} steps as SPA: η {eta}, c {c}")
        lines.append(f"and as SGD+M: α {alpha}, β {beta}")
        broken = [
            f"{name} {_at(steps)}" for name, steps in breaches.items() if steps.any()
        ]
        if verbose:
            lines += [text for text in broken if text.startswith("R_k")]
        if self.step_weight is not None and not breaches[_OUT_OF_RANGE].any():
            of_bound = [
                f"- {text}" for text in broken if text.startswith(("the weight", "η"))
            ]
            lines += [_BOUND, *(of_bound or ["- they hold at every step"])]
        return "\n".join(lines)

    def breaches(self) -> dict[str, Bool[np.ndarray, " n"]]:
        """The steps that break each condition; those that rest on the bound come
        last.
        """
        eta, c, alpha, beta = self[:4]
        of_sgdm = (
            ((beta >= 0) & (beta < 1))
            if self._is_sgdm()
            else np.append(True, beta[1:] >= 0)
        )
        fits = (eta >= 0) & (eta < np.inf) & (c >= 0) & (c <= 1) & of_sgdm  # not NaN
        around = np.pad(alpha, 1, constant_values=np.inf)  # no spike at either end
        breaches = {
            _OUT_OF_RANGE: ~fits,
            _SPIKE: alpha > 2 * np.maximum(around[:-2], around[2:]),
            "β is 1 or more": beta >= 1,
            "β is negative": beta < 0,
            "R_k's first coefficient is positive": self.remainder_x > 0,
            "R_k's second coefficient (SGD's too) is positive": self.remainder_z > 0,
        }
        if self.step_weight is not None:
            breaches["the weight of ‖x_k − x_{k−1}‖² is positive"] = (
                self.step_weight > 0
            )
            breaches["η is over the limit for constants"] = eta > self.max_learning_rate
        return breaches

    def findings(self) -> list[Finding]:
        """The findings; those that need a change come first."""
        (eta, c, alpha, beta), breaches = self[:4], self.breaches()
        if (
            out := breaches[_OUT_OF_RANGE]
        ).any():  # other findings would be consequences
            return [Finding("range", _steps(out), f"{_OUT_OF_RANGE} {_at(out)}.")]
        if not alpha.any():
            return [
                Finding(
                    "range", _steps(alpha == 0), "α is 0 at every step: params stay."
                )
            ]
        found, n, left = [], len(c), np.prod(1 - c)  # of x_0 in x_n
        if left > 0.01:
            text = (
                f"Averages over 1/c steps are too long for {n:,}: x ends with "
                f"{100 * left:.2g} %"
            )
            text += (
                f" of x_0. With a constant c of {min(5 / n, 1):.2g} it would be "
                f"less than 1 %."
            )
            found.append(Finding("average", [n - 1], text))
        # β ≥ 1 is harmless where η does not jump, and at c = 0, where x stands still.
        high = (beta >= 1) & (_jumps(eta) < 0)
        high[1:] &= c[:-1] > 0
        if high.any():
            k = high.argmax()  # β_k = (η_{k−1}/η_k)(1 − c_k)
            text = f"β is {beta[k]:.3g} {_at(high)}: no SGD+M has that. η falls by"
            text += f" {100 * (1 - eta[k] / eta[k - 1]):.3g} % there, where c is"
            found.append(
                Finding(
                    "beta", _steps(high), f"{text} {100 * c[k - 1]:.3g} %. {_REMEDY}"
                )
            )
        if (spike := breaches[_SPIKE]).any():
            k, rest = spike.argmax(), "Make the change gradual."
            text = f"α spikes {_from_to(alpha, k)} {_at(spike)}"
            if c[k] > c[k - 1] and eta[k + 1] < eta[k] and not self._is_sgdm():
                text, rest = (
                    f"{text}, as in Figure 1(e): c rises a step before η falls",
                    _REMEDY,
                )
            found.append(Finding("spike", _steps(spike), f"{text}. {rest}"))
        symbol, total = self._total_effect()
        of_alpha, of_total = _jumps(alpha), _jumps(total)
        of_total[of_total == of_alpha] = 0  # one event
        of_alpha[spike | np.roll(spike, 1)] = 0
        check = " Check that it is meant, as in a restart."
        for kind, sign, rest in (("rise", 1, check), ("drop", -1, "")):
            for name, values, jumps in (
                ("α", alpha, of_alpha),
                (symbol, total, of_total),
            ):
                if (where := jumps == sign).any():
                    text = (
                        f"{name} {kind}s {_from_to(values, where.argmax())} "
                        f"{_at(where)}.{rest}"
                    )
                    found.append(Finding(kind, _steps(where), text, needs_change=False))
        return found

    def _is_sgdm(self) -> bool:  # then β_0 is known
        return not np.isnan(self.beta[0])

    def _total_effect(self) -> tuple[str, np.ndarray]:
        """How far a gradient moves the params in the end. At once it moves them by
        α.
        """
        return (
            ("α/(1 − β)", self.alpha / (1 - self.beta))
            if self._is_sgdm()
            else ("η", self.eta)
        )


def _at(where: np.ndarray) -> str:
    others = where.sum() - 1
    more = f" and at {others:,} other{'s' if others > 1 else ''}" if others else ""
    return f"at step {where.argmax():,}{more}"


def _interval(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    ends = (
        [f"{f(known):.4g}" for f in (np.min, np.max)] if len(known) else ["undefined"]
    )
    return " to ".join(dict.fromkeys(ends))


def _jumps(values: np.ndarray) -> np.ndarray:
    """1 where a value jumps up, −1 where it jumps down, else 0; `audit` defines a
    jump.
    """
    before = _previous(values)
    low, high, size = (
        np.minimum(values, before),
        np.maximum(values, before),
        abs(values - before),
    )
    # A ramp of 5 steps has a fifth of its change in each, one of 4 a quarter.
    is_jump = size > 0.22 * np.convolve(size, np.ones(9))[4:-4]
    is_jump &= (high >= 1.5 * (1 - 1e-6) * low) & (high > 1e-4 * values.max())
    return np.sign(values - before) * is_jump


def _values(num_steps: int, **hyperparams: optax.ScalarOrSchedule) -> list[np.ndarray]:
    schedules = [at_count(*hyperparam) for hyperparam in hyperparams.items()]
    at = jax.jit(jax.vmap(lambda k: [schedule(k) for schedule in schedules]))
    return [
        np.asarray(values, float)
        for values in at(jnp.arange(num_steps, dtype=jnp.int32))
    ]


def _from_sgdm(
    sgdm: SGDMHyperparams, num_steps: int, nesterov: bool
) -> tuple[np.ndarray, ...]:
    """η, c, α and β of a recipe of SGD+M, in O(n): w backward, which is stable."""
    alpha, beta = _values(num_steps, **sgdm._asdict())
    later = np.asarray(
        jnp.stack(in_range(jnp.asarray(alpha), jnp.asarray(beta))), float
    )
    a, later_a = (of[0] * (of[1] if nesterov else 1) for of in ((alpha, beta), later))
    last = jax.jit(lambda k: look_ahead(*sgdm, k, nesterov=nesterov).w)(
        np.int32(num_steps - 1)
    )
    w = np.append(np.zeros(num_steps), last)
    for k in reversed(range(num_steps)):
        w[k] = later[1, k] * (later_a[k] + w[k + 1])
    eta = a + w[1:]
    c = a / np.where(eta == 0, 1, eta)
    if nesterov:  # without any momentum, x goes where z goes
        eta, c = eta + alpha, np.where((eta == 0) & (alpha > 0), 1, c)
    return eta, c, alpha, beta


def audit(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    num_steps: int,
    *,
    smoothness: float | None = None,
) -> Audit:
    """Checks a schedule of SPA at every step: a verdict, and the conditions of
    arXiv:2010.00406.

    The verdict names averages that leave more than 1 % of x_0 in x, and jumps of α and
    of η (of α/(1 − β), for SGD+M). A jump is a change by a factor of 1.5 or more in one
    step, above 1e-4 of the largest value, and more than 22 % of the change within four
    steps on either side: a ramp of five equal steps is gradual. (Theorem 1, Sections
    3.1, 5, 6.)

    Args: learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be
      vmapped. averaging: c_{k+1} in [0, 1], as above. A pair from
      `hyperparams_from_sgdm` is evaluated in
        O(n), and its `horizon` is ignored.
      num_steps: the number of steps to check, n ≥ 1.
      smoothness: L > 0 of the theorem, to check the conditions of its bound too.

    Examples: Figure 1(e): η divided by 10 and c multiplied by 10, at once, makes α
      spike for one step.

      >>> from spa_optax import stagewise, theory
      >>> print(theory.audit(*stagewise(10.0, 0.1, [20]), 100).report().split(",")[0])
      α spikes from 1 to 10 at step 19
    """
    checks.RATE.check(learning_rate=learning_rate)
    checks.AVERAGING.check(averaging=averaging)
    checks.POSITIVE_INTEGER.check(num_steps=num_steps)
    SMOOTHNESS.check(smoothness=smoothness)
    sgdm = getattr(learning_rate, "sgdm", None)
    if sgdm is not None and sgdm is getattr(averaging, "sgdm", None):
        eta, c, alpha, beta = _from_sgdm(sgdm, num_steps, nesterov=False)
    else:
        eta, c = _values(num_steps, learning_rate=learning_rate, averaging=averaging)
        alpha, beta = eta * c, None
    eta_prev, c_now, c_prev = (
        _previous(eta),
        _previous(c),
        _previous(_previous(c)),
    )  # c_0 = c_1
    known = (eta > 0) & (eta_prev > 0) & (c_now > 0) & (c_prev > 0)
    # Rounding of 0 is not a breach: of float32 hyper-parameters, or of c = 1 or η at
    # the limit.
    unless_rounding = lambda value, size: np.where(
        known & (np.abs(value) > size), value, 0
    )
    change = lambda new, old: unless_rounding(
        new - old, 1e-6 * np.maximum(abs(new), abs(old))
    )
    weight_of_f_x, of_bound = _formulas._weight_of_f_x, [None] * 2
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta is None:
            beta = np.where(eta_prev == 0, 0, eta_prev / eta) * (1 - c_now)
            beta[0] = np.nan
        of_x = change(weight_of_f_x(eta, c_now), weight_of_f_x(eta_prev, c_prev))
        of_z = change(1 / eta**2, 1 / eta_prev**2)
        if smoothness is not None:
            smoothness = float(smoothness)
            weight = _formulas._step_weight(eta, eta_prev, c_now, smoothness)
            weight = unless_rounding(
                weight, 1e-9 * smoothness / (eta_prev * c_now) ** 2
            )
            of_bound = [weight, _formulas._max_learning_rate(c, smoothness)]
    return Audit(eta, c, alpha, beta, of_x, of_z, *of_bound)


def audit_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    num_steps: int,
    nesterov: bool = False,
    *,
    smoothness: float | None = None,
) -> Audit:
    """Checks a recipe of SGD with momentum: `audit` of what `spa_from_sgdm` makes of
    it.

    α_k ≥ 0 and β_k in [0, 1) are scalars or schedules. The paper has no bound for
    Nesterov momentum: R_k's coefficients are then NaN, and `smoothness` must be None.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import theory
      >>> schedule = lambda k: jnp.where(k < 500, 0.1, 0.01)
      >>> print(theory.audit_sgdm(schedule, 0.9, 1_000).report().splitlines()[0])
      Nothing to change: α drops from 0.1 to 0.01 at step 500.
    """
    checks.FLAG.check(nesterov=nesterov)
    hyperparams = hyperparams_from_sgdm(learning_rate, momentum)
    if not nesterov:
        return audit(*hyperparams, num_steps, smoothness=smoothness)
    checks.POSITIVE_INTEGER.check(num_steps=num_steps)
    if smoothness is not None:
        raise ValueError(
            f"`smoothness` must be None with Nesterov momentum, got {smoothness!r}"
        )
    recipe, unknown = (
        SGDMHyperparams(learning_rate, momentum),
        np.full(num_steps, np.nan),
    )
    return Audit(
        *_from_sgdm(recipe, num_steps, nesterov=True), *[unknown] * 2, *[None] * 2
    )
