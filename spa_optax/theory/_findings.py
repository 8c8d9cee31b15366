"""The findings of an audit: long averages, β of 1 or more, spikes and jumps, each in a sentence."""

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from spa_optax.theory._audit import Audit

OUT_OF_RANGE = "a hyper-parameter is NaN or out of range"
SPIKE = "α spikes to over twice its neighbours"
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


def find(audit: "Audit") -> list[Finding]:
    """The findings; those that need a change come first."""
    breaches = audit.breaches()
    if out := _steps(breaches[OUT_OF_RANGE]):  # the other findings would be consequences
        return [Finding("range", out, f"A hyper-parameter is NaN or out of range {_places(out)}.")]
    if not audit.alpha.any():
        text = "α is 0 at every step: the params do not move."
        return [Finding("range", list(range(len(audit.alpha))), text)]
    # β ≥ 1 is harmless in the tail of a decay to 0, and at c = 0, where x stands still.
    high = (previous(audit.eta) > 1e-2 * audit.eta.max()) | (_jumps(audit.eta) < 0)
    high[1:] &= audit.c[:-1] > 0
    high &= audit.beta >= 1
    spike, (name, total) = breaches[SPIKE], total_effect(audit)
    of_alpha, of_total = _jumps(audit.alpha), _jumps(total)
    of_total[of_total == of_alpha] = 0  # one event
    of_alpha[spike | np.roll(spike, 1)] = 0
    findings = []
    if (weight := np.prod(1 - audit.c)) > 0.01:  # of x_0 in x_n
        n = len(audit.c)
        text = (
            f"Averages over 1/c steps are too long for {n:,}: x ends with {100 * weight:.2g} % of"
            f" x_0. With a constant c of {min(5 / n, 1):.2g} it would be less than 1 %."
        )
        findings.append(Finding("average", [n - 1], text))
    if steps := _steps(high):
        findings.append(Finding("beta", steps, _beta_text(audit, steps)))
    if steps := _steps(spike):
        findings.append(Finding("spike", steps, _spike_text(audit, steps)))
    for sign in (1, -1):
        for symbol, values, jumps in (("α", audit.alpha, of_alpha), (name, total, of_total)):
            if steps := _steps(jumps == sign):
                findings.append(_jump(audit.c, symbol, values, steps))
    return findings


def _beta_text(audit: "Audit", steps: list[int]) -> str:
    k = steps[0]
    fall, c = 1 - audit.eta[k] / audit.eta[k - 1], audit.c[k - 1]  # β_k = (η_{k−1}/η_k)(1 − c_k)
    text = f"β is {audit.beta[k]:.3g} {_places(steps)}: no SGD+M has that. η falls by"
    return f"{text} {100 * fall:.3g} % there, where c is {100 * c:.3g} %. {_REMEDY}"


def _spike_text(audit: "Audit", steps: list[int]) -> str:
    k = steps[0]
    text = f"α spikes from {audit.alpha[k - 1]:.3g} to {audit.alpha[k]:.3g} {_places(steps)}"
    if audit.c[k] > audit.c[k - 1] and audit.eta[k + 1] < audit.eta[k] and not is_sgdm(audit):
        return f"{text}, as in Figure 1(e): c rises a step before η falls. {_REMEDY}"
    return f"{text}. Make the change gradual."


def _jump(c: np.ndarray, name: str, values: np.ndarray, steps: list[int]) -> Finding:
    k = steps[0]
    before, after = values[k - 1], values[k]
    if after > before:
        text = f"{name} rises from {before:.3g} to {after:.3g} {_places(steps)}. Check that it is"
        return Finding("rise", steps, f"{text} meant, as in a restart.", needs_change=False)
    text = (
        f"{name} falls {'to 0' if after == 0 else f'{before / after:.3g}-fold'} {_places(steps)}."
    )
    if (begin := rise_begins(c, k)) < k:
        text += (
            f" As primal averaging c rises from {c[begin]:.3g} to {c[k - 1]:.3g} over the"
            f" {k - 1 - begin} steps before, and z moves ahead: evaluate the params, not z."
        )
    return Finding("drop", steps, text, needs_change=False)


def is_sgdm(audit: "Audit") -> bool:
    """Whether the schedule was given as SGD+M, so that β_0 is known."""
    return not np.isnan(audit.beta[0])


def total_effect(audit: "Audit") -> tuple[str, np.ndarray]:
    """How far a gradient moves the params in the end. At once it moves them by α."""
    return ("α/(1 − β)", audit.alpha / (1 - audit.beta)) if is_sgdm(audit) else ("η", audit.eta)


def rise_begins(c: np.ndarray, k: int) -> int:
    """The step at which the steady rise of c before step k begins, or k if there is none."""
    ahead = c[max(k - 20_000, 0) : k]
    falls = np.flatnonzero(np.diff(ahead) <= 1e-3 * ahead[1:])
    begin = int(falls[-1]) + 1 if len(falls) else 0
    # A jump of c does not anticipate anything.
    is_rise = len(ahead) - begin > 3 and ahead[-1] > 1.1 * ahead[begin]
    return k - len(ahead) + begin if is_rise else k


def previous(values: np.ndarray) -> np.ndarray:
    """The values at k − 1; at k = 0, the first."""
    return np.concatenate([values[:1], values[:-1]])


def _steps(where: np.ndarray) -> list[int]:
    return np.flatnonzero(where).tolist()


def _places(steps: list[int]) -> str:
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
