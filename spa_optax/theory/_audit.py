"""The audit of a schedule: its values in both forms, a verdict, and the conditions it breaks."""

import textwrap
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float

from spa_optax._checks import AVERAGING, FLAG, POSITIVE_INTEGER, RATE
from spa_optax._hyperparams import SGDMHyperparams, at_count
from spa_optax._lookahead import in_range, look_ahead
from spa_optax._schedules import hyperparams_from_sgdm
from spa_optax.theory import _formulas
from spa_optax.theory._findings import (
    OUT_OF_RANGE,
    SPIKE,
    Finding,
    find,
    is_sgdm,
    previous,
    rise_begins,
    total_effect,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST = "R_k's first coefficient is positive"
_SECOND = "R_k's second coefficient (SGD's too) is positive"
_STEP_WEIGHT = "the weight of ‖x_k − x_{k−1}‖² is positive"
_LIMIT = "η is over the limit for constants"
_BOUND = (
    "By the bound, with this smoothness. Its conditions are sufficient, for the worst",
    "case: recipes that train well have had 3 to 77 times the limit on η.",
)


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
        """The audit in words, the verdict first. `verbose` adds R_k's coefficients."""
        findings, breaches = self.findings(), self.breaches()
        lines = [finding.text for finding in findings] or [
            f"neither α nor {total_effect(self)[0]} jumps (a factor of 1.5 or more, in no ramp,"
            " above 1e-4 of the largest)."
        ]
        if all(finding.kind == "drop" for finding in findings):
            lines[0] = f"Nothing to change: {lines[0]}"
        lines += [
            f"{len(self.eta):,} steps as SPA: η {_interval(self.eta)}, c {_interval(self.c)}",
            f"and as SGD+M: α {_interval(self.alpha)}, β {_interval(self.beta)}",
        ]
        broken = {
            name: f"{name}: first at step {steps.argmax():,}, {steps.sum():,} in all"
            for name, steps in breaches.items()
            if steps.any()
        }
        if verbose:
            lines += [broken[name] for name in (_FIRST, _SECOND) if name in broken]
        if self.max_decay_ratio is None or OUT_OF_RANGE in broken:
            return "\n".join(lines)
        if _STEP_WEIGHT in broken:
            k = breaches[_STEP_WEIGHT].argmax()
            ratio, allowed = previous(self.eta)[k] / self.eta[k], self.max_decay_ratio[k]
            broken[_STEP_WEIGHT] += f"; η_(k−1)/η_k is {ratio:.6g} there, {allowed:.6g} is allowed"
        bound = [f"- {broken[name]}" for name in (_STEP_WEIGHT, _LIMIT) if name in broken]
        return "\n".join([*lines, *_BOUND, *(bound or ["- they hold at every step"])])

    def breaches(self) -> dict[str, Bool[np.ndarray, " n"]]:
        """The steps that break each condition; those that rest on the bound come last."""
        in_range = (self.eta >= 0) & (self.eta < np.inf) & (self.c >= 0) & (self.c <= 1)  # not NaN
        in_range[1:] &= self.beta[1:] >= 0  # β_0 is free
        if is_sgdm(self):
            in_range &= (self.beta >= 0) & (self.beta < 1)
        around = np.pad(self.alpha, 1, constant_values=np.inf)  # no spike at either end
        breaches = {
            OUT_OF_RANGE: ~in_range,
            SPIKE: self.alpha > 2 * np.maximum(around[:-2], around[2:]),
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
        return find(self)

    def plot(self) -> "Figure":
        """Plots η, c, α and β, and α with c or β close to the first finding. Needs matplotlib.

        The title is the verdict. The steps of findings are marked, in red if they need a change.
        """
        import matplotlib.pyplot as plt

        values = {"η": self.eta, "c": self.c, "α = ηc": self.alpha, "β": self.beta}
        some = slice(None, None, max(1, len(self.eta) // 50_000))  # fewer than 100,000
        panels = [(name, some, "") for name in values]
        findings = [finding for finding in self.findings() if finding.kind != "range"]
        close = ""
        if findings:
            k = findings[0].steps[0]
            near = slice(max(rise_begins(self.c, k) - 20, 0), k + 20)
            other = "β" if findings[0].kind == "beta" else "c"
            panels += [("α = ηc", near, "."), (other, near, ".")]
            close = f"close to step {k:,}"
        cols = len(panels) // 2
        size = (4 * cols + 1, 5)
        figure, axes = plt.subplots(2, cols, sharex="col", figsize=size, layout="constrained")
        figure.suptitle(textwrap.fill(self.report().splitlines()[0], 110), fontsize=10)
        axes[0, -1].set_title(close, fontsize=10)
        for axis, (name, shown, marker) in zip(axes.T.ravel(), panels, strict=True):
            value = values[name][shown]
            axis.plot(np.arange(len(self.eta))[shown], value, marker=marker, color="C0")
            positive = value[(value > 0) & (value < np.inf)]
            low, high = positive.min(initial=np.inf), positive.max(initial=0)
            is_log = high > 20 * low
            bottom = max(low / 1.5, high / 2_000) if is_log else 0
            axis.set(ylabel=name, yscale="log" if is_log else "linear", ylim=(bottom, None))
        for finding in findings:
            row, value = (1, self.beta) if finding.kind == "beta" else (0, self.alpha)
            color = "C3" if finding.needs_change else "C2"
            axes[row, 1].plot(finding.steps, value[finding.steps], "o", color=color, clip_on=False)
        plt.setp(axes[1], xlabel="step")
        return figure


def _interval(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    if not len(known):
        return "undefined"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    return low if low == high else f"between {low} and {high}"


def _change(new: np.ndarray, old: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A difference; 0 where it is within float32 rounding of the hyper-parameters, or not known."""
    rounding = np.abs(new - old) <= 1e-6 * np.maximum(np.abs(new), np.abs(old))
    return np.where(known & ~rounding, new - old, 0)


def _values(num_steps: int, **hyperparams: optax.ScalarOrSchedule) -> list[np.ndarray]:
    schedules = [at_count(name, hyperparam) for name, hyperparam in hyperparams.items()]
    counts = jnp.arange(num_steps, dtype=jnp.int32)
    values = jax.jit(jax.vmap(lambda k: [schedule(k) for schedule in schedules]))(counts)
    return [np.asarray(value, np.float64) for value in values]


def _from_sgdm(sgdm: SGDMHyperparams, num_steps: int, nesterov: bool) -> tuple[np.ndarray, ...]:
    """η, c, α and β of a recipe of SGD+M, in O(n): w backward, which is stable."""
    alpha, beta = _values(num_steps, **sgdm._asdict())
    ahead = in_range(jnp.asarray(alpha), jnp.asarray(beta))
    ahead_alpha, ahead_beta = (np.asarray(values, float) for values in ahead)
    ahead_a = ahead_alpha * (ahead_beta if nesterov else 1)
    w = np.zeros(num_steps + 1)
    w[-1] = jax.jit(lambda k: look_ahead(*sgdm, k, nesterov=nesterov).w)(np.int32(num_steps - 1))
    for k in reversed(range(num_steps)):
        w[k] = ahead_beta[k] * (ahead_a[k] + w[k + 1])
    a = alpha * (beta if nesterov else 1)
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
    """Checks a schedule of SPA step by step: a verdict, and the conditions of arXiv:2010.00406.

    The verdict names averages that leave more than 1 % of x_0 in x, and jumps of α and of η (of
    α/(1 − β), for SGD+M). A jump is a change by a factor of 1.5 or more in one step, above 1e-4 of
    the largest value. It has 22 % of all change within four steps on either side, so a ramp of five
    equal steps is gradual. (Theorem 1, Sections 3.1, 5, 6.)

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule that can be vmapped. A pair of schedules
        from `hyperparams_from_sgdm` is evaluated in O(n), and its `horizon` is ignored.
      num_steps: the number of steps to check, n ≥ 1.
      smoothness: L, to check the conditions of the bound too. `estimate_smoothness` gives the
        curvature at one point, which is not the L of the theorem.

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
    eta_prev, c_now, c_prev = previous(eta), previous(c), previous(previous(c))  # c_0 = c_1
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta is None:
            beta = np.where(eta_prev == 0, 0, eta_prev / eta) * (1 - c_now)
            beta[0] = np.nan
        known = (eta > 0) & (eta_prev > 0) & (c_now > 0) & (c_prev > 0)
        weight_of_f_x = _formulas._weight_of_f_x
        of_x = _change(weight_of_f_x(eta, c_now), weight_of_f_x(eta_prev, c_prev), known)
        of_z = _change(1 / eta**2, 1 / eta_prev**2, known)
        found = Audit(eta, c, alpha, beta, of_x, of_z, None, None, None)
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
    """Checks a recipe of SGD with momentum: `audit` of what `spa_from_sgdm` makes of it.

    α_k ≥ 0 and β_k in [0, 1) are scalars or schedules. The paper has no bound for Nesterov
    momentum: R_k's coefficients are then NaN, and `smoothness` must be None.

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
    unknown = np.full(num_steps, np.nan)
    recipe = SGDMHyperparams(learning_rate, momentum)
    eta, c, alpha, beta = _from_sgdm(recipe, num_steps, nesterov=True)
    return Audit(eta, c, alpha, beta, unknown, unknown, None, None, None)
