"""The audit of a schedule: its values in both forms, and the conditions that it breaks."""

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float

from spa_optax._checks import check_averaging, check_rate, check_steps
from spa_optax._coast import foreseen_momentum, foreseen_rate, look_ahead
from spa_optax._hyperparams import FromSGDM, SGDMHyperparams, at_count
from spa_optax.theory._formulas import (
    _max_decay_ratio,
    _max_learning_rate,
    _step_weight,
    _weight_of_f_x,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Condition(NamedTuple):
    """A condition, and the steps of a schedule that break it."""

    name: str  # of the breach, in words
    steps: Bool[np.ndarray, " n"]  # where it breaks
    size: Float[np.ndarray, " n"] | None = None  # if given, the report says where it is largest
    rests_on_bound: bool = False  # else it is beyond doubt

    def summary(self) -> str:
        """The first step that breaks the condition, how many do, and where the size is largest."""
        first, count = int(np.argmax(self.steps)), int(self.steps.sum())
        largest = "" if self.size is None else f", largest at {int(np.argmax(self.size)):,}"
        return f"{self.name}: first at step {first:,}, {count:,} in all{largest}"


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

    def _conditions(self) -> dict[str, Condition]:
        """By a key for the code; in the order in which the report states them."""
        before, after = self.alpha[:-2], self.alpha[2:]
        spike = np.zeros(len(self.alpha), bool)
        spike[1:-1] = (self.alpha[1:-1] > 2 * before) & (self.alpha[1:-1] > 2 * after)
        # Written so that NaN fails. β_0 is free.
        in_range = (self.eta >= 0) & (self.eta < np.inf) & (self.c >= 0) & (self.c <= 1)
        in_range[1:] &= ~np.isnan(self.beta[1:])
        conditions = {
            "range": Condition("a hyper-parameter is NaN or out of range", ~in_range),
            "alpha_spike": Condition("α spikes to over twice its neighbours", spike),
            "beta_large": Condition("β is 1 or more", self.beta >= 1),
            "beta_negative": Condition("β is negative", self.beta < 0),
            "remainder_x": Condition(
                "R_k's first coefficient is positive", self.remainder_x > 0, self.remainder_x
            ),
            "remainder_z": Condition(
                "R_k's second coefficient (SGD's too) is positive",
                self.remainder_z > 0,
                self.remainder_z,
            ),
        }
        if self.step_weight is not None and self.max_learning_rate is not None:
            conditions["step_weight"] = Condition(
                "the weight of ‖x_k − x_{k−1}‖² is positive",
                self.step_weight > 0,
                rests_on_bound=True,
            )
            conditions["max_learning_rate"] = Condition(
                "η is over the limit for constants",
                self.eta > self.max_learning_rate,
                rests_on_bound=True,
            )
        return conditions

    def breaches(self) -> dict[str, Bool[np.ndarray, " n"]]:
        """The steps that break each condition; the conditions that rest on the bound come last."""
        return {condition.name: condition.steps for condition in self._conditions().values()}

    def report(self) -> str:
        """The audit in words: first what is beyond doubt, then what rests on the bound."""
        lines = [
            f"{len(self.eta):,} steps: η {_interval(self.eta)}, c {_interval(self.c)}",
            f"as SGD+M: α {_interval(self.alpha)}, β {_interval(self.beta)}",
        ]
        lines += self._anticipations()
        conditions = self._conditions()
        out_of_range = conditions["range"].steps
        broken = {key: each for key, each in conditions.items() if each.steps.any()}
        lines += [each.summary() for each in broken.values() if not each.rests_on_bound]
        if self.max_decay_ratio is None or out_of_range.all():
            return "\n".join(lines)
        lines += [
            "By the bound, with this smoothness. Its conditions are sufficient, for the worst",
            "case: recipes that train well have had 3 to 77 times the limit on η.",
        ]
        by_bound = {key: each for key, each in broken.items() if each.rests_on_bound}
        for key, condition in by_bound.items():
            lines.append(f"- {condition.summary()}")
            k = int(np.argmax(condition.steps))
            if key == "step_weight" and self.eta[k] != self.eta[max(k - 1, 0)]:
                ratio, allowed = self.eta[k - 1] / self.eta[k], self.max_decay_ratio[k]
                lines[-1] += f"; η is divided by {ratio:.4g} there, {allowed:.4g} is allowed"
        if not by_bound:
            other = "other " if out_of_range.any() else ""
            lines.append(f"- they hold at every {other}step")
        return "\n".join(lines)

    def _drops(self) -> list[tuple[int, int]]:
        """The steps at which α drops by half or more, and those at which c begins to rise ahead."""
        before = np.nan_to_num(self.alpha[:-1])
        largest = before.max(initial=0)
        drops = 1 + np.flatnonzero((self.alpha[1:] < before / 2) & (before > 1e-3 * largest))
        found = []
        for k in drops.tolist():
            ahead = self.c[max(k - 20_000, 0) : k]
            # The rise without a break that ends at the drop.
            falls = np.flatnonzero(np.diff(ahead) <= 1e-3 * ahead[1:])
            begin = falls[-1] + 1 if len(falls) else 0
            # A jump of c does not anticipate anything.
            if len(ahead) - begin > 3 and ahead[-1] > 1.1 * ahead[begin]:
                found.append((k, k - len(ahead) + int(begin)))
        return found

    def _anticipations(self) -> list[str]:
        lines = [
            f"c anticipates the drop of α at step {k:,}: over {k - 1 - begin} steps it rises from "
            f"{self.c[begin]:.3g} to {self.c[k - 1]:.3g}"
            for k, begin in self._drops()
        ]
        more = [f"and so it does at {len(lines) - 3} more drops"] if len(lines) > 3 else []
        return lines[:3] + more

    def plot(self) -> "Figure":
        """η, c, α and β over the steps, and α and c close to the first drop that c anticipates.

        Spikes of α and steps with β ≥ 1 are marked. Needs matplotlib.
        """
        import matplotlib.pyplot as plt

        drops = self._drops()
        size: Any = {"ncols": 3, "figsize": (13, 5)} if drops else {"ncols": 2, "figsize": (9, 5)}
        figure, axes = plt.subplots(2, sharex="col", layout="constrained", **size)
        # Some thousand points at most, and every step at which α changes.
        steps = np.arange(len(self.eta))
        changes = np.abs(np.diff(self.alpha, prepend=self.alpha[0])) > 1e-3 * self.alpha
        keep = (steps % max(1, len(steps) // 2_000) == 0) | changes | np.roll(changes, -1)
        if keep.sum() > 100_000:
            keep = steps % (len(steps) // 50_000) == 0
        values = {"η": self.eta, "c": self.c, "α = ηc": self.alpha, "β": self.beta}
        for axis, (name, value) in zip(axes[:, :2].T.ravel(), values.items(), strict=True):
            axis.plot(steps[keep], value[keep], color="C0")
            axis.set_ylabel(name)
            positive = value[value > 0]
            if len(positive) and positive.max() > 20 * positive.min():
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        conditions = self._conditions()
        spike, large = conditions["alpha_spike"].steps, conditions["beta_large"].steps
        axes[0, 1].plot(steps[spike], self.alpha[spike], "o", color="C3")
        axes[1, 1].plot(steps[large], self.beta[large], "o", color="C3")
        for axis in axes[1]:
            axis.set_xlabel("step")
        if drops:
            k, begin = drops[0]
            near = slice(max(begin - 20, 0), k + 20)
            for axis, name in zip(axes[:, 2], ("α = ηc", "c"), strict=True):
                axis.plot(steps[near], values[name][near], marker=".", color="C0")
                axis.set_ylabel(name)
                axis.set_ylim(bottom=0)
            axes[0, 2].set_title(f"close to the drop at step {k:,}")
        return figure


def _interval(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.min():.4g} to {known.max():.4g}" if len(known) else "undefined"


def _difference(now: np.ndarray, before: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A difference; 0 where it is within float32 rounding of the hyper-parameters, or not known."""
    rounding = np.abs(now - before) <= 1e-6 * np.maximum(np.abs(now), np.abs(before))
    return np.where(known & ~rounding, now - before, 0)


def _values(num_steps: int, **hyperparams: optax.ScalarOrSchedule) -> list[np.ndarray]:
    at = [at_count(name, hyperparam) for name, hyperparam in hyperparams.items()]
    values = jax.jit(jax.vmap(lambda k: [h(k) for h in at]))(jnp.arange(num_steps, dtype=jnp.int32))
    return [np.asarray(value, np.float64) for value in values]


def _from_sgdm(sgdm: SGDMHyperparams, num_steps: int) -> tuple[np.ndarray, ...]:
    """η, c, α and β of a recipe of SGD+M, in O(n)."""
    alpha, beta = _values(num_steps, **sgdm._asdict())
    last = jnp.asarray(num_steps - 1, jnp.int32)
    w = float(jax.jit(lambda k: look_ahead(*sgdm, k).coast)(last))
    # η_k = α_k + w_{k+1}, w_k = β_k (α_k + w_{k+1}): backward, which is stable. Values ahead of a
    # step count as in `look_ahead`.
    ahead = (foreseen_rate(jnp.asarray(alpha)), foreseen_momentum(jnp.asarray(beta)))
    products = zip(*(np.asarray(h, float)[::-1].tolist() for h in ahead), strict=True)
    coasts = itertools.accumulate(products, lambda w, ab: ab[1] * (ab[0] + w), initial=w)
    eta = alpha + np.array(list(coasts))[-2::-1]
    return eta, alpha / np.where(eta == 0, 1, eta), alpha, beta


def audit(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    num_steps: int,
    *,
    smoothness: float | None = None,
) -> Audit:
    """Checks a schedule against the theory, step by step.

    For a recipe of SGD+M, call `audit(*hyperparams_from_sgdm(α, β), num_steps)`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule that can be vmapped. Where both schedules
        come from one call of `hyperparams_from_sgdm`, their attribute `sgdm` is the recipe. η and c
        are then computed from the whole of it, in O(n): a `horizon` does not count.
      num_steps: the number of steps to check, n ≥ 1.
      smoothness: L, for the conditions of the bound. `estimate_smoothness` gives the curvature at
        one point, which is not the L of the theorem. None leaves these conditions out.

    Returns:
      An `Audit`, with `report()` and `plot()`.

    Raises:
      ValueError: if a number is out of range, or `num_steps` is not an integer.

    Examples:
      Figure 1(e): η divided by 10 and c multiplied by 10, at once, makes α spike for one step.

      >>> from spa_optax import stagewise, theory
      >>> audit = theory.audit(*stagewise(10.0, 0.1, [20]), 100)
      >>> print(audit.report())
      100 steps: η 1 to 10, c 0.1 to 1
      as SGD+M: α 1 to 10, β 0 to 0.9
      α spikes to over twice its neighbours: first at step 19, 1 in all
      R_k's second coefficient (SGD's too) is positive: first at step 20, 1 in all, largest at 20

    References:
      arXiv:2010.00406, Theorem 1, Sections 3.1 (R_k and the step weight), 5 and 6.
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    num_steps = check_steps("num_steps", num_steps)
    if smoothness is not None and not 0 < smoothness < float("inf"):
        raise ValueError(f"`smoothness` must be None or finite and > 0, got {smoothness!r}")
    if (
        isinstance(learning_rate, FromSGDM)
        and isinstance(averaging, FromSGDM)
        and learning_rate.sgdm is averaging.sgdm
    ):
        eta, c, alpha, beta = _from_sgdm(learning_rate.sgdm, num_steps)
    else:
        eta, c = _values(num_steps, learning_rate=learning_rate, averaging=averaging)
        alpha, beta = eta * c, None
    c_now = np.concatenate([c[:1], c[:-1]])  # c_k, with c_0 = c_1
    c_prev = np.concatenate([c_now[:1], c_now[:-1]])
    eta_prev = np.concatenate([eta[:1], eta[:-1]])
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta is None:
            beta = np.where(eta_prev == 0, 0, eta_prev / eta) * (1 - c_now)
            beta[0] = np.nan
        known = (eta > 0) & (eta_prev > 0) & (c_now > 0) & (c_prev > 0)
        now, before = _weight_of_f_x(eta, c_now), _weight_of_f_x(eta_prev, c_prev)
        remainder_x = _difference(now, before, known)
        remainder_z = _difference(1 / eta**2, 1 / eta_prev**2, known)
        found = Audit(eta, c, alpha, beta, remainder_x, remainder_z, None, None, None)
        if smoothness is None:
            return found
        weight = _step_weight(eta, eta_prev, c_now, smoothness)
        # Rounding of 0, as at c = 1 or at the limit, is not a breach.
        rounding = np.abs(weight) < 1e-9 * smoothness / (eta_prev * c_now) ** 2
        return found._replace(
            step_weight=np.where(known & ~rounding, weight, 0),
            max_learning_rate=_max_learning_rate(c, smoothness),
            max_decay_ratio=_max_decay_ratio(eta_prev, c_now, smoothness, np.sqrt),
        )
