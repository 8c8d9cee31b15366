"""The audit of a schedule: its values in both forms, what it does, what it breaks."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from spa_optax import _checks as checks
from spa_optax._hyperparams import SGDMHyperparams, at_count
from spa_optax._lookahead import in_range, look_ahead
from spa_optax._schedules import hyperparams_from_sgdm
from spa_optax.theory._bounds import max_learning_rate, step_weight, weight_of_f_x

Values = Float[np.ndarray, " n"]
Where = Bool[np.ndarray, " n"]
SMOOTHNESS = checks.Requirement(
    "finite and > 0", lambda v: 0 < v < np.inf, checks.NUMBER
).optional()

OUT_OF_RANGE = "a hyper-parameter is NaN or out of range"
SPIKE = "α spikes to over twice its neighbours"
STEP_WEIGHT = "the weight of ‖x_k − x_{k−1}‖² is positive"
LIMIT = "η is over the limit for constants"
BOUND = (
    "By the bound, which is for the worst case: recipes that train well exceed its "
    "limit on η."
)
REMEDY = (
    "Let η fall by less than c per step (the `step_factor` of `stagewise`), or give "
    "the recipe as SGD+M, to `spa_from_sgdm`."
)


class Finding(NamedTuple):
    """An observation on a schedule: where, how large, and the remedy."""

    kind: str  # "range", "average", "beta", "spike", "rise" or "drop"
    steps: list[int]
    text: str
    needs_change: bool = True


class Audit(NamedTuple):
    """A schedule as SPA and as SGD+M, and the terms of the bound.

    All are float64, for k = 0, …, n − 1.
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
        lines = [finding.text for finding in findings]
        if not findings:
            symbol, _ = self._total_effect()
            lines = [f"neither α nor {symbol} jumps (by a factor of 1.5 or more)."]
        if all(finding.kind == "drop" for finding in findings):
            lines[0] = f"Nothing to change: {lines[0]}"
        eta, c = _interval(self.eta), _interval(self.c)
        alpha, beta = _interval(self.alpha), _interval(self.beta)
        lines.append(f"{len(self.eta):,} steps as SPA: η {eta}, c {c}")
        lines.append(f"and as SGD+M: α {alpha}, β {beta}")
        broken = {name: where for name, where in breaches.items() if where.any()}
        if verbose:
            remainders = [name for name in broken if name.startswith("R_k")]
            lines += [f"{name} {_at(broken[name])}" for name in remainders]
        if self.step_weight is not None and OUT_OF_RANGE not in broken:
            of_bound = [name for name in (STEP_WEIGHT, LIMIT) if name in broken]
            lines.append(BOUND)
            lines += [f"- {name} {_at(broken[name])}" for name in of_bound]
            if not of_bound:
                lines.append("- they hold at every step")
        return "\n".join(lines)

    def breaches(self) -> dict[str, Where]:
        """The steps that break each condition; those of the bound come last."""
        breaches = {
            OUT_OF_RANGE: self._is_out_of_range(),
            SPIKE: self._spikes(),
            "β is 1 or more": self.beta >= 1,
            "β is negative": self.beta < 0,
            "R_k's first coefficient is positive": self.remainder_x > 0,
            "R_k's second coefficient (SGD's too) is positive": self.remainder_z > 0,
        }
        if self.step_weight is not None:
            breaches[STEP_WEIGHT] = self.step_weight > 0
            breaches[LIMIT] = self.eta > self.max_learning_rate
        return breaches

    def findings(self) -> list[Finding]:
        """The findings; those that need a change come first."""
        is_bad = self._is_out_of_range()
        if is_bad.any():  # other findings would be consequences
            return [Finding("range", _steps(is_bad), f"{OUT_OF_RANGE} {_at(is_bad)}.")]
        if not self.alpha.any():
            steps = _steps(self.alpha == 0)
            return [Finding("range", steps, "α is 0 at every step: params stay.")]
        return [
            *self._long_averages(),
            *self._betas_above_1(),
            *self._alpha_spikes(),
            *self._changes("rise", 1, " Check that it is meant, as in a restart."),
            *self._changes("drop", -1, ""),
        ]

    def _is_out_of_range(self) -> Where:
        beta = self.beta
        if self._is_sgdm():
            beta_fits = (beta >= 0) & (beta < 1)
        else:
            beta_fits = np.append(True, beta[1:] >= 0)
        eta_fits = (self.eta >= 0) & (self.eta < np.inf)
        return ~(eta_fits & (self.c >= 0) & (self.c <= 1) & beta_fits)  # or NaN

    def _spikes(self) -> Where:
        around = np.pad(self.alpha, 1, constant_values=np.inf)  # none at either end
        return self.alpha > 2 * np.maximum(around[:-2], around[2:])

    def _long_averages(self) -> Iterator[Finding]:
        """Whether x_0 has a weight of more than 1 % in the last x."""
        num_steps, weight = len(self.c), np.prod(1 - self.c)
        if weight > 0.01:
            text = (
                f"Averages over 1/c steps are too long for {num_steps:,}: x ends with "
                f"{100 * weight:.2g} % of x_0. With a constant c of "
                f"{min(5 / num_steps, 1):.2g} it would be less than 1 %."
            )
            yield Finding("average", [num_steps - 1], text)

    def _betas_above_1(self) -> Iterator[Finding]:
        """Where no SGD+M has the β. β_k = (η_{k−1}/η_k)(1 − c_k)."""
        # It is harmless where η does not jump, and at c = 0, where x stands still.
        is_high = (self.beta >= 1) & (_jumps(self.eta) < 0)
        is_high[1:] &= self.c[:-1] > 0
        if is_high.any():
            k = is_high.argmax()
            fall = 100 * (1 - self.eta[k] / self.eta[k - 1])
            text = (
                f"β is {self.beta[k]:.3g} {_at(is_high)}: no SGD+M has that. η falls "
                f"by {fall:.3g} % there, where c is {100 * self.c[k - 1]:.3g} %. "
                + REMEDY
            )
            yield Finding("beta", _steps(is_high), text)

    def _alpha_spikes(self) -> Iterator[Finding]:
        is_spike = self._spikes()
        if not is_spike.any():
            return
        k = is_spike.argmax()
        text = f"α spikes {_from_to(self.alpha, k)} {_at(is_spike)}"
        c_rises_first = self.c[k] > self.c[k - 1] and self.eta[k + 1] < self.eta[k]
        if c_rises_first and not self._is_sgdm():
            text += f", as in Figure 1(e): c rises a step before η falls. {REMEDY}"
        else:
            text += ". Make the change gradual."
        yield Finding("spike", _steps(is_spike), text)

    def _changes(self, kind: str, sign: int, advice: str) -> Iterator[Finding]:
        """The jumps of α, and of the total effect of a gradient, in one direction."""
        symbol, total = self._total_effect()
        is_spike = self._spikes()
        alpha_jumps, total_jumps = _jumps(self.alpha), _jumps(total)
        total_jumps[total_jumps == alpha_jumps] = 0  # one event
        alpha_jumps[is_spike | np.roll(is_spike, 1)] = 0
        for name, values, jumps in (
            ("α", self.alpha, alpha_jumps),
            (symbol, total, total_jumps),
        ):
            where = jumps == sign
            if where.any():
                change = _from_to(values, where.argmax())
                text = f"{name} {kind}s {change} {_at(where)}.{advice}"
                yield Finding(kind, _steps(where), text, needs_change=False)

    def _is_sgdm(self) -> bool:  # then β_0 is known
        return not np.isnan(self.beta[0])

    def _total_effect(self) -> tuple[str, np.ndarray]:
        """How far a gradient moves the params in the end."""
        if self._is_sgdm():
            return "α/(1 − β)", self.alpha / (1 - self.beta)
        return "η", self.eta


def _previous(values: np.ndarray) -> np.ndarray:
    """The values at k − 1; at k = 0, the first."""
    return np.append(values[:1], values[:-1])


def _steps(where: np.ndarray) -> list[int]:
    return np.flatnonzero(where).tolist()


def _from_to(values: np.ndarray, k: int) -> str:
    return f"from {values[k - 1]:.3g} to {values[k]:.3g}"


def _at(where: np.ndarray) -> str:
    """The first step, and how many others there are."""
    first, num_others = where.argmax(), where.sum() - 1
    if num_others == 0:
        return f"at step {first:,}"
    others = "others" if num_others > 1 else "other"
    return f"at step {first:,} and at {num_others:,} {others}"


def _interval(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return "undefined"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    return low if low == high else f"{low} to {high}"


def _jumps(values: np.ndarray) -> np.ndarray:
    """1 where a value jumps up as `audit` defines it, −1 where down, else 0."""
    before = _previous(values)
    low, high = np.minimum(values, before), np.maximum(values, before)
    size = abs(values - before)
    # A ramp of 5 steps has a fifth of its change in each, one of 4 a quarter.
    is_jump = size > 0.22 * np.convolve(size, np.ones(9))[4:-4]
    is_jump &= (high >= 1.5 * (1 - 1e-6) * low) & (high > 1e-4 * values.max())
    return np.sign(values - before) * is_jump


def _values(num_steps: int, **hyperparams: optax.ScalarOrSchedule) -> list[np.ndarray]:
    schedules = [at_count(name, value) for name, value in hyperparams.items()]
    counts = jnp.arange(num_steps, dtype=jnp.int32)
    values_at = jax.jit(jax.vmap(lambda k: [schedule(k) for schedule in schedules]))
    return [np.asarray(values, float) for values in values_at(counts)]


def _from_sgdm(
    sgdm: SGDMHyperparams, num_steps: int, nesterov: bool
) -> tuple[np.ndarray, ...]:
    """η, c, α and β of a recipe of SGD+M, in O(n): w backward, which is stable."""
    alpha, beta = _values(num_steps, **sgdm._asdict())
    later = in_range(jnp.asarray(alpha), jnp.asarray(beta))
    later_alpha, later_beta = np.asarray(jnp.stack(later), float)
    a = alpha * beta if nesterov else alpha
    later_a = later_alpha * later_beta if nesterov else later_alpha

    def w_after(k: Array) -> Array:
        return look_ahead(*sgdm, k, nesterov=nesterov).w

    w = np.zeros(num_steps + 1)
    w[-1] = jax.jit(w_after)(np.int32(num_steps - 1))
    for k in reversed(range(num_steps)):
        w[k] = later_beta[k] * (later_a[k] + w[k + 1])
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
    """Checks a schedule of SPA at every step: a verdict, and the paper's conditions.

    The verdict names averages that leave more than 1 % of x_0 in x, and jumps of α and
    of η (of α/(1 − β), for SGD+M). A jump is a change by a factor of 1.5 or more in one
    step, above 1e-4 of the largest value, and more than 22 % of the change within four
    steps on either side: a ramp of five equal steps is gradual.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      averaging: c_{k+1} in [0, 1], as above. A pair from `hyperparams_from_sgdm` is
        evaluated in O(n), and its `horizon` is ignored.
      num_steps: the number of steps to check, n ≥ 1.
      smoothness: L > 0 of the theorem, to check the conditions of its bound too.

    Returns:
      An `Audit`, with a `report` in words.

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
      Sections 3.1, 5 and 6.
    """
    checks.RATE.check(learning_rate=learning_rate)
    checks.check_averaging(averaging=averaging)
    checks.POSITIVE_INTEGER.check(num_steps=num_steps)
    SMOOTHNESS.check(smoothness=smoothness)
    sgdm = getattr(learning_rate, "sgdm", None)
    if sgdm is not None and sgdm is getattr(averaging, "sgdm", None):
        eta, c, alpha, beta = _from_sgdm(sgdm, num_steps, nesterov=False)
    else:
        eta, c = _values(num_steps, learning_rate=learning_rate, averaging=averaging)
        alpha, beta = eta * c, _beta_of_spa(eta, c)
    smoothness = None if smoothness is None else float(smoothness)
    return Audit(eta, c, alpha, beta, *_terms_of_bound(eta, c, smoothness))


def _beta_of_spa(eta: np.ndarray, c: np.ndarray) -> np.ndarray:
    """β_k = (η_{k−1}/η_k)(1 − c_k); β_0 is NaN, since it is free."""
    eta_prev = _previous(eta)
    with np.errstate(divide="ignore", invalid="ignore"):
        beta = np.where(eta_prev == 0, 0, eta_prev / eta) * (1 - _previous(c))
    beta[0] = np.nan
    return beta


def _terms_of_bound(
    eta: np.ndarray, c_next: np.ndarray, smoothness: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """R_k's two coefficients, the weight of a step, and the largest learning rate."""
    c = _previous(c_next)  # c_k, with c_0 = c_1
    eta_prev, c_prev = _previous(eta), _previous(c)
    is_known = (eta > 0) & (eta_prev > 0) & (c > 0) & (c_prev > 0)

    def unless_rounding(values: np.ndarray, error: np.ndarray) -> np.ndarray:
        """0 where a value may be the rounding error of 0, which is no breach."""
        return np.where(is_known & (np.abs(values) > error), values, 0)

    def change(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        return unless_rounding(new - old, 1e-6 * np.maximum(abs(new), abs(old)))

    with np.errstate(divide="ignore", invalid="ignore"):
        of_x = change(weight_of_f_x(eta, c), weight_of_f_x(eta_prev, c_prev))
        of_z = change(1 / eta**2, 1 / eta_prev**2)
        if smoothness is None:
            return of_x, of_z, None, None
        weight = step_weight(eta=eta, eta_prev=eta_prev, c=c, smoothness=smoothness)
        # At c = 1, or at an η at the limit, it is 0 up to rounding.
        weight = unless_rounding(weight, 1e-9 * smoothness / (eta_prev * c) ** 2)
        return of_x, of_z, weight, max_learning_rate(c_next, smoothness)


def audit_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    num_steps: int,
    nesterov: bool = False,
    *,
    smoothness: float | None = None,
) -> Audit:
    """Checks a recipe of SGD with momentum, as `audit` does one of SPA.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      momentum: β_k in [0, 1), as above.
      num_steps: the number of steps to check, n ≥ 1.
      nesterov: whether to use Nesterov momentum. The paper has no bound for it: R_k's
        coefficients are then NaN.
      smoothness: L > 0, as for `audit`; None with Nesterov momentum.

    Returns:
      An `Audit`, with a `report` in words.

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
    hyperparams = hyperparams_from_sgdm(learning_rate, momentum)
    if not nesterov:
        return audit(*hyperparams, num_steps, smoothness=smoothness)
    checks.POSITIVE_INTEGER.check(num_steps=num_steps)
    if smoothness is not None:
        raise ValueError(
            f"`smoothness` must be None with Nesterov momentum, got {smoothness!r}"
        )
    recipe = SGDMHyperparams(learning_rate, momentum)
    eta, c, alpha, beta = _from_sgdm(recipe, num_steps, nesterov=True)
    unknown = np.full(num_steps, np.nan)
    return Audit(eta, c, alpha, beta, unknown, unknown, None, None)
