"""The audit of a schedule: its values in both forms, a verdict, and the conditions it breaks."""

import textwrap
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float

from spa_optax._checks import AVERAGING, FLAG, POSITIVE_INTEGER, RATE
from spa_optax._hyperparams import SGDMHyperparams, at_count
from spa_optax._lookahead import foreseen_momentum, foreseen_rate, look_ahead
from spa_optax._schedules import hyperparams_from_sgdm
from spa_optax.theory import _formulas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OUT_OF_RANGE = "a hyper-parameter is NaN or out of range"
_SPIKE = "α spikes to over twice its neighbours"
_FIRST = "R_k's first coefficient is positive"
_SECOND = "R_k's second coefficient (SGD's too) is positive"
_STEP_WEIGHT = "the weight of ‖x_k − x_{k−1}‖² is positive"
_LIMIT = "η is over the limit for constants"
_REMEDY = (
    "Let η fall by less than c per step (the `step_factor` of `stagewise` or `momentum_drop`), or"
    " give the recipe as SGD+M, to `spa_from_sgdm`."
)


class Finding(NamedTuple):
    """An observation on a schedule: where, how large, and the remedy."""

    kind: Literal["range", "average", "beta", "spike", "rise", "drop"]
    steps: list[int]
    text: str
    needs_change: bool = True


class Audit(NamedTuple):
    """A schedule as SPA and as SGD+M, and the terms of the bound: float64, k = 0, …, n − 1."""

    eta: Float[np.ndarray, " n"]  # η_k
    c: Float[np.ndarray, " n"]  # c_{k+1}, which step k uses
    alpha: Float[np.ndarray, " n"]  # α_k of SGD+M
    beta: Float[np.ndarray, " n"]  # β_k of SGD+M; β_0 is free: NaN, unless the schedule is SGD+M's
    remainder_x: Float[np.ndarray, " n"]  # R_k's coefficient of f(x_{k−1}) − f*, over L
    remainder_z: Float[np.ndarray, " n"]  # R_k's coefficient of f(z_k) − f*
    step_weight: Float[np.ndarray, " n"] | None  # None without a smoothness
    max_learning_rate: Float[np.ndarray, " n"] | None
    max_decay_ratio: Float[np.ndarray, " n"] | None  # of η_{k−1}/η_k

    def report(self, *, verbose: bool = False) -> str:
        """The audit in words. Its first line says whether anything needs a change, or a check.

        `verbose` adds R_k's coefficients, which are positive wherever η falls.
        """
        findings, breaches = self.findings(), self.breaches()
        lines = [finding.text for finding in findings] or [
            f"neither α nor {self._in_all()[0]} jumps (a factor of 1.5 or more, in no ramp, above"
            " 1e-4 of the largest)."
        ]
        if all(finding.kind == "drop" for finding in findings):
            lines[0] = f"Nothing to change: {lines[0]}"
        lines += [
            f"{len(self.eta):,} steps as SPA: η {_interval(self.eta)}, c {_interval(self.c)}",
            f"and as SGD+M: α {_interval(self.alpha)}, β {_interval(self.beta)}",
        ]
        told = lambda name, at: f"{name}: first at step {at.argmax():,}, {at.sum():,} in all"
        if verbose:
            lines += [
                f"{told(name, breaches[name])}, largest at {np.argmax(coefficient):,}"
                for name, coefficient in ((_FIRST, self.remainder_x), (_SECOND, self.remainder_z))
                if breaches[name].any()
            ]
        if self.max_decay_ratio is None or breaches[_OUT_OF_RANGE].all():
            return "\n".join(lines)
        lines += [
            "By the bound, with this smoothness. Its conditions are sufficient, for the worst",
            "case: recipes that train well have had 3 to 77 times the limit on η.",
        ]
        broken = [name for name in (_STEP_WEIGHT, _LIMIT) if breaches[name].any()]
        for name in broken:
            lines.append(f"- {told(name, breaches[name])}")
            k = int(np.argmax(breaches[name]))
            if name == _STEP_WEIGHT and self.eta[k] != self.eta[max(k - 1, 0)]:
                ratio, allowed = self.eta[k - 1] / self.eta[k], self.max_decay_ratio[k]
                lines[-1] += f"; η is divided by {ratio:.6g} there, {allowed:.6g} is allowed"
        if not broken:
            other = "other " if breaches[_OUT_OF_RANGE].any() else ""
            lines.append(f"- they hold at every {other}step")
        return "\n".join(lines)

    def breaches(self) -> dict[str, Bool[np.ndarray, " n"]]:
        """The steps that break each condition; those that rest on the bound come last."""
        in_range = (self.eta >= 0) & (self.eta < np.inf) & (self.c >= 0) & (self.c <= 1)  # not NaN
        in_range[1:] &= self.beta[1:] >= 0  # β_0 is free
        if self._is_sgdm():
            in_range &= (self.beta >= 0) & (self.beta < 1)
        around = np.pad(self.alpha, 1, constant_values=np.inf)  # no spike at either end
        breaches = {
            _OUT_OF_RANGE: ~in_range,
            _SPIKE: self.alpha > 2 * np.maximum(around[:-2], around[2:]),
            "β is 1 or more": self.beta >= 1,
            "β is negative": self.beta < 0,
            _FIRST: self.remainder_x > 0,
            _SECOND: self.remainder_z > 0,
        }
        if self.step_weight is not None:
            breaches[_STEP_WEIGHT] = self.step_weight > 0
            breaches[_LIMIT] = self.eta > self.max_learning_rate
        return breaches

    def findings(self) -> list[Finding]:
        """The findings; those that need a change come first."""
        breaches = self.breaches()
        # What else may be found is a consequence.
        if steps := np.flatnonzero(breaches[_OUT_OF_RANGE]).tolist():
            text = f"A hyper-parameter is NaN or out of range {_at(steps)}."
            return [Finding("range", steps, text)]
        if not self.alpha.any():
            steps = list(range(len(self.alpha)))
            return [Finding("range", steps, "α is 0 at every step: the params do not move.")]
        spike = breaches[_SPIKE]
        return [
            *self._long_average(),
            *self._high_beta(),
            *self._spike(spike),
            *self._jumps(spike),
        ]

    def _long_average(self) -> list[Finding]:
        n, weight = len(self.c), np.prod(1 - self.c)  # of x_0 in x_n
        if weight <= 0.01:
            return []
        text = (
            f"Averages over 1/c steps are too long for {n:,}: x ends with {100 * weight:.2g} % of"
            f" x_0. With a constant c of {min(5 / n, 1):.2g} it would be less than 1 %."
        )
        return [Finding("average", [n - 1], text)]

    def _high_beta(self) -> list[Finding]:
        # Except in the tail of a decay to 0, where η is tiny, and at c = 0, where x stands still.
        before = _previous(self.eta)
        matters = (before > 1e-2 * self.eta.max()) | (_jumps(self.eta) < 0)
        matters[1:] &= self.c[:-1] > 0
        steps = np.flatnonzero((self.beta >= 1) & matters).tolist()
        if not steps:
            return []
        k = steps[0]
        fall, c = 1 - self.eta[k] / before[k], self.c[k - 1]  # β_k = (η_{k−1}/η_k)(1 − c_k)
        text = (
            f"β is {self.beta[k]:.3g} {_at(steps)}: no SGD+M has that. η falls by"
            f" {100 * fall:.3g} % there, where c is {100 * c:.3g} %. {_REMEDY}"
        )
        return [Finding("beta", steps, text)]

    def _spike(self, spike: np.ndarray) -> list[Finding]:
        steps = np.flatnonzero(spike).tolist()
        if not steps:
            return []
        k = steps[0]
        text = f"α spikes from {self.alpha[k - 1]:.3g} to {self.alpha[k]:.3g} {_at(steps)}"
        if self.c[k] > self.c[k - 1] and self.eta[k + 1] < self.eta[k] and not self._is_sgdm():
            text += f", as in Figure 1(e): c rises a step before η falls. {_REMEDY}"
        else:
            text += ". Make the change gradual."
        return [Finding("spike", steps, text)]

    def _jumps(self, spike: np.ndarray) -> list[Finding]:
        in_all = self._in_all()
        of_alpha, of_all = _jumps(self.alpha), _jumps(in_all[1])
        of_all[of_all == of_alpha] = 0  # one event
        of_alpha[spike | np.roll(spike, 1)] = 0
        return [
            self._jump(*quantity, steps)
            for sign in (1, -1)
            for quantity, jumps in ((("α", self.alpha), of_alpha), (in_all, of_all))
            if (steps := np.flatnonzero(jumps == sign).tolist())
        ]

    def _jump(self, name: str, values: np.ndarray, steps: list[int]) -> Finding:
        k = steps[0]
        before, now = values[k - 1], values[k]
        if now > before:
            text = (
                f"{name} rises from {before:.3g} to {now:.3g} {_at(steps)}. Check that it is meant,"
            )
            return Finding("rise", steps, f"{text} as in a restart.", needs_change=False)
        fall = "to 0" if now == 0 else f"{before / now:.3g}-fold"
        text = f"{name} falls {fall} {_at(steps)}."
        if (begin := self._rise_begins(k)) < k:
            text += (
                f" As primal averaging c rises from {self.c[begin]:.3g} to {self.c[k - 1]:.3g} over"
                f" the {k - 1 - begin} steps before, and z moves ahead: evaluate the params, not z."
            )
        return Finding("drop", steps, text, needs_change=False)

    def _rise_begins(self, k: int) -> int:
        """The step at which the steady rise of c before step k begins, or k if there is none."""
        ahead = self.c[max(k - 20_000, 0) : k]
        falls = np.flatnonzero(np.diff(ahead) <= 1e-3 * ahead[1:])
        begin = int(falls[-1]) + 1 if len(falls) else 0
        # A jump of c does not anticipate anything.
        is_rise = len(ahead) - begin > 3 and ahead[-1] > 1.1 * ahead[begin]
        return k - len(ahead) + begin if is_rise else k

    def _is_sgdm(self) -> bool:
        return not np.isnan(self.beta[0])

    def _in_all(self) -> tuple[str, np.ndarray]:
        """How far a gradient moves the params in all, if nothing changes. At once it is α."""
        return ("α/(1 − β)", self.alpha / (1 - self.beta)) if self._is_sgdm() else ("η", self.eta)

    def plot(self) -> "Figure":
        """Plots η, c, α and β over the steps, and α with c or β close to the first finding.

        The title is the verdict. Steps that the report names are marked, in red if they need a
        change. Axes are logarithmic where values span more than a factor of 20. Needs matplotlib.
        """
        import matplotlib.pyplot as plt

        findings = [finding for finding in self.findings() if finding.kind != "range"]
        cols, width = (3, 13) if findings else (2, 9)
        figure, axes = plt.subplots(2, cols, sharex="col", figsize=(width, 5), layout="constrained")
        figure.suptitle(textwrap.fill(self.report().splitlines()[0], 110), fontsize=10)
        steps = np.arange(len(self.eta))
        some = steps[:: max(1, len(steps) // 50_000)]  # fewer than 100,000
        values = {"η": self.eta, "c": self.c, "α = ηc": self.alpha, "β": self.beta}
        panels = [(name, some, "") for name in values]
        if findings:
            k = findings[0].steps[0]
            near = steps[max(self._rise_begins(k) - 20, 0) : k + 20]
            other = "β" if findings[0].kind == "beta" else "c"
            panels += [("α = ηc", near, "."), (other, near, ".")]
            axes[0, 2].set_title(f"close to step {k:,}", fontsize=10)
        for axis, (name, shown, marker) in zip(axes.T.ravel(), panels, strict=True):
            value = values[name][shown]
            axis.plot(shown, value, marker=marker, color="C0")
            axis.set_ylabel(name)
            positive = value[(value > 0) & (value < np.inf)]
            if len(positive) and positive.max() > 20 * positive.min():
                axis.set_yscale("log")
                axis.set_ylim(bottom=max(positive.min() / 1.5, positive.max() / 2_000))
            else:
                axis.set_ylim(bottom=0)
        for finding in findings:
            row, value = (1, self.beta) if finding.kind == "beta" else (0, self.alpha)
            color = "C3" if finding.needs_change else "C2"
            axes[row, 1].plot(finding.steps, value[finding.steps], "o", color=color, clip_on=False)
        plt.setp(axes[1], xlabel="step")
        return figure


def _previous(values: np.ndarray) -> np.ndarray:
    """The values at k − 1; at k = 0, the first."""
    return np.concatenate([values[:1], values[:-1]])


def _at(steps: list[int]) -> str:
    more = len(steps) - 1
    others = f" and at {more:,} {'others' if more > 1 else 'other'}" if more else ""
    return f"at step {steps[0]:,}{others}"


def _jumps(values: np.ndarray) -> np.ndarray:
    """1 where a value jumps up, −1 where it jumps down, else 0; `audit` defines a jump."""
    change = np.diff(values, prepend=values[0])
    low, high = values - np.maximum(change, 0), values - np.minimum(change, 0)
    size = np.abs(change)
    # A ramp of 5 steps has a fifth of its change in each, one of 4 a quarter.
    is_jump = size > 0.22 * np.convolve(size, np.ones(9))[4:-4]
    is_jump &= (high >= 1.5 * (1 - 1e-6) * low) & (high > 1e-4 * values.max())
    return np.sign(change) * is_jump


def _interval(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    if not len(known):
        return "undefined"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    return low if low == high else f"between {low} and {high}"


def _difference(now: np.ndarray, before: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A difference; 0 where it is within float32 rounding of the hyper-parameters, or not known."""
    rounding = np.abs(now - before) <= 1e-6 * np.maximum(np.abs(now), np.abs(before))
    return np.where(known & ~rounding, now - before, 0)


def _values(num_steps: int, **hyperparams: optax.ScalarOrSchedule) -> list[np.ndarray]:
    at = [at_count(name, hyperparam) for name, hyperparam in hyperparams.items()]
    values = jax.jit(jax.vmap(lambda k: [h(k) for h in at]))(jnp.arange(num_steps, dtype=jnp.int32))
    return [np.asarray(value, np.float64) for value in values]


def _from_sgdm(sgdm: SGDMHyperparams, num_steps: int, nesterov: bool) -> tuple[np.ndarray, ...]:
    """η, c, α and β of a recipe of SGD+M, in O(n): w backward, which is stable."""
    alpha, beta = _values(num_steps, **sgdm._asdict())
    b = np.asarray(foreseen_momentum(jnp.asarray(beta)), float)
    a = np.asarray(foreseen_rate(jnp.asarray(alpha)), float) * (b if nesterov else 1)
    w = np.zeros(num_steps + 1)
    w[-1] = jax.jit(lambda k: look_ahead(*sgdm, k, nesterov=nesterov).w)(np.int32(num_steps - 1))
    for k in reversed(range(num_steps)):
        w[k] = b[k] * (a[k] + w[k + 1])
    now = alpha * (beta if nesterov else 1)
    total = now + w[1:]
    c = now / np.where(total == 0, 1, total)
    if nesterov:  # without any momentum, x goes where z goes
        c = np.where((total == 0) & (alpha > 0), 1, c)
    return (total + alpha if nesterov else total), c, alpha, beta


def audit(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    num_steps: int,
    *,
    smoothness: float | None = None,
) -> Audit:
    """Checks a schedule of SPA step by step: a verdict, and the conditions of arXiv:2010.00406.

    The verdict names jumps of α and of η (of α/(1 − β), for SGD+M). A jump is a change by a factor
    of 1.5 or more in one step, where the value is above 1e-4 of its largest. A ramp over five or
    more equal steps is gradual: a jump is 22 % or more of the change from four steps before it to
    four steps after. (Theorem 1, Sections 3.1, 5, 6.) The verdict also names averages that are too
    long for the run: those that end with more than 1 % of x_0 in x. For SGD with momentum, use
    `audit_sgdm`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule that can be vmapped. A pair of schedules
        from `hyperparams_from_sgdm` is evaluated in O(n), and its `horizon` is ignored.
      num_steps: the number of steps to check, n ≥ 1.
      smoothness: L, for the conditions of the bound. `estimate_smoothness` gives the curvature at
        one point, which is not the L of the theorem. None leaves these conditions out.

    Returns:
      An `Audit`, with `report()`, `plot()` and, for programs, `findings()` and `breaches()`.

    Raises:
      ValueError: if a number is out of range, or `num_steps` is not an integer.

    Examples:
      Figure 1(e): η divided by 10 and c multiplied by 10, at once, makes α spike for one step.

      >>> from spa_optax import stagewise, theory
      >>> for line in theory.audit(*stagewise(10.0, 0.1, [20]), 100).report().splitlines():
      ...     print(line[:58])
      α spikes from 1 to 10 at step 19, as in Figure 1(e): c ris
      100 steps as SPA: η between 1 and 10, c between 0.1 and 1
      and as SGD+M: α between 1 and 10, β between 0 and 0.9
    """
    RATE.check(learning_rate=learning_rate)
    AVERAGING.check(averaging=averaging)
    POSITIVE_INTEGER.check(num_steps=num_steps)
    if smoothness is not None:
        value = np.asarray(smoothness)
        if value.shape != () or value.dtype.kind not in "iuf" or not 0 < value < np.inf:
            raise ValueError(f"`smoothness` must be None or finite and > 0, got {smoothness!r}")
        smoothness = float(value)
    sgdm = getattr(learning_rate, "sgdm", None)
    if sgdm is not None and sgdm is getattr(averaging, "sgdm", None):
        eta, c, alpha, beta = _from_sgdm(sgdm, num_steps, nesterov=False)
    else:
        eta, c = _values(num_steps, learning_rate=learning_rate, averaging=averaging)
        alpha, beta = eta * c, None
    c_now, c_prev, eta_prev = _previous(c), _previous(_previous(c)), _previous(eta)  # c_0 = c_1
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta is None:
            beta = np.where(eta_prev == 0, 0, eta_prev / eta) * (1 - c_now)
            beta[0] = np.nan
        known = (eta > 0) & (eta_prev > 0) & (c_now > 0) & (c_prev > 0)
        now, before = (_formulas._weight_of_f_x(*of) for of in ((eta, c_now), (eta_prev, c_prev)))
        remainder_x = _difference(now, before, known)
        remainder_z = _difference(1 / eta**2, 1 / eta_prev**2, known)
        found = Audit(eta, c, alpha, beta, remainder_x, remainder_z, None, None, None)
        if smoothness is None:
            return found
        weight = _formulas._step_weight(eta, eta_prev, c_now, smoothness)
        # Rounding of 0, as at c = 1 or at the limit, is not a breach.
        rounding = np.abs(weight) < 1e-9 * smoothness / (eta_prev * c_now) ** 2
        return found._replace(
            step_weight=np.where(known & ~rounding, weight, 0),
            max_learning_rate=_formulas._max_learning_rate(c, smoothness),
            max_decay_ratio=_formulas._max_decay_ratio(eta_prev, c_now, smoothness),
        )


def audit_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    num_steps: int,
    nesterov: bool = False,
    *,
    smoothness: float | None = None,
) -> Audit:
    """Checks a recipe of SGD with momentum step by step: `audit` of what `spa_from_sgdm` makes.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      momentum: β_k in [0, 1), a scalar or a schedule that can be vmapped.
      num_steps: the number of steps to check, n ≥ 1.
      nesterov: whether it is Nesterov momentum. The paper has no bound for that: R_k's coefficients
        are then NaN, and `smoothness` must be None.
      smoothness: as for `audit`, of which the result, errors and references are the same too.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import theory
      >>> schedule = lambda k: jnp.where(k < 500, 0.1, 0.01)
      >>> print(theory.audit_sgdm(schedule, 0.9, 1_000).report()[:52])
      Nothing to change: α falls 10-fold at step 500. As p
    """
    FLAG.check(nesterov=nesterov)
    hyperparams = hyperparams_from_sgdm(learning_rate, momentum)
    if not nesterov:
        return audit(*hyperparams, num_steps, smoothness=smoothness)
    POSITIVE_INTEGER.check(num_steps=num_steps)
    if smoothness is not None:
        raise ValueError(f"`smoothness` must be None with Nesterov momentum, got {smoothness!r}")
    sgdm, unknown = SGDMHyperparams(learning_rate, momentum), np.full(num_steps, np.nan)
    eta, c, alpha, beta = _from_sgdm(sgdm, num_steps, nesterov=True)
    return Audit(eta, c, alpha, beta, unknown, unknown, None, None, None)
