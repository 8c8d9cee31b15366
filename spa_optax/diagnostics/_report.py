"""The gauge in numbers, in words and in a picture."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from spa_optax._checks import Rule, check_one_run
from spa_optax._core import SPAState
from spa_optax._trees import find, find_one, scalar_of
from spa_optax.diagnostics._gauge import Gauge, new_gauge
from spa_optax.diagnostics._track import TrackMomentumState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_NAMED = 5  # of the lines of `plot_momentum`


class MomentumReport(NamedTuple):
    """The result of `momentum_report`; NaN where nothing has been measured yet."""

    gain: Float[Array, ""]  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Float[Array, ""]  # the gain of gradients that are pure noise
    alignment: Float[Array, ""]  # the cosine between −g_k and x_k − x_{k−1}
    inner_product: Float[Array, ""]  # the moving average of ⟨g_k, x_k − x_{k−1}⟩
    iterate_term: Float[Array, ""]  # the moving average of ‖x_k − x_{k−1}‖²/(η²c)
    gradient_term: Float[Array, ""]  # the moving average of ½‖g_k‖²
    num_skipped: Int[Array, ""]  # measured steps that were not finite, or overflow if squared
    num_zero: Int[Array, ""]  # measured steps that were 0, or underflow if squared
    num_rounded: Int[Array, ""]  # measured steps within the rounding error of params and z
    t: Float[Array, ""]  # how far steps add up, in standard errors of pure noise; negative: oppose
    average_length: Float[Array, ""]  # 1/c of the last step; NaN for Optax's own momentum
    num_steps: Int[Array, ""]  # taken so far
    num_saturated: Int[Array, ""]  # the most elements of z at its dtype's limit in a measured step
    num_measured: Int[Array, ""]  # measured steps that count

    def verdict(self) -> str:
        """Whether steps add up, do not, or do as they would in pure noise, in words.

        The first two need |t| ≥ 3 and a gain on the same side of the noise level, and all need ten
        measured steps. Raises ValueError for a batch of reports, as from `jax.vmap`.
        """
        if shape := np.shape(self.gain):
            raise ValueError(f"the report must be of one run, got a batch of shape {shape}")
        times, t = float(self.gain / self.noise_level), float(self.t)
        if not np.isfinite(times):
            reasons = {
                "were not finite, or their squares overflow float32": int(self.num_skipped),
                "were 0, or their squares underflow float32": int(self.num_zero),
                "were within the rounding error of params and z": int(self.num_rounded),
            }
            why, number = max(reasons.items(), key=lambda item: item[1])
            found = f"{number} of the measured steps {why}" if number else "two steps are needed"
            return f"Nothing to report: {found}."
        of_noise = f"the gain is {times:.2f} times that of pure noise"
        if (number := int(self.num_measured)) < 10:  # |t| is at most √n
            text = f"Nothing to report yet: 10 measured steps are needed, got {number}."
        elif t >= 3 and times > 1:
            text = f"Steps add up: {of_noise}. Momentum speeds the run up here."
        elif t <= -3 and times < 1:
            text = f"Steps do not add up: {of_noise}. Here momentum only reduces noise."
        else:
            text = f"No difference from pure noise: {of_noise}, with t = {t:.2f}."
            text += " (A difference has |t| ≥ 3, and a gain on the same side.)"
        if np.isnan(float(self.alignment)):
            text += " Alignment is unknown: it needs z − x above 100 times the rounding error of x"
            text += " and z, and no Nesterov steps."
        if (length := float(self.average_length)) > 1.01 * int(self.num_steps):
            text += f" The average is longer than the run: 1/c is {length:.0f}, after"
            text += f" {int(self.num_steps)} steps."
        if number := int(self.num_saturated):
            text += f" Up to {number} elements of z were at the limit of its dtype, so their steps"
            text += " were cut. Use `state_dtype=jnp.bfloat16`."
        return text


@overload
def momentum_report(opt_state: PyTree, *, by_label: Literal[False] = False) -> MomentumReport: ...


@overload
def momentum_report(opt_state: PyTree, *, by_label: bool) -> dict[str, MomentumReport]: ...


def momentum_report(
    opt_state: PyTree, *, by_label: bool = False
) -> MomentumReport | dict[str, MomentumReport]:
    """Reports the measurements of `track_momentum`: whether steps add up.

        gain = ‖x_k − x_{k−1}‖²/(η²c) over ½‖g_k‖²      alignment = cos(−g_k, x_k − x_{k−1})

    Each term is a moving average. Steps add up if gain / noise level is above 1. Otherwise they do
    not, which is no reason to drop momentum. The noise level is 2/(2 − c) for constants, 1.053 at
    c = 0.1 (the paper's 1 is the limit for small c). It changes with η, c and the gradients' size.

    t tells a difference from chance. It is Σ a / √(Σ a²) with a = −⟨g_k, z_k − x_k⟩/η_k, with
    weights that fall like those of the averages, or like (1 − c)^2k if that is slower. For pure
    noise the terms are uncorrelated with mean 0, and |t| ≥ 3 in about 0.3 % of reports. |t| is at
    most √n over n measured steps, and √((1 + decay)/(1 − decay)) over many.

    Under the Adam forms g_k is the direction, the gradient over √ν: the sums then weigh all params
    alike, whatever the scale of their gradients.

    Args:
      opt_state: a state that holds one `TrackMomentumState`, in any chain or wrapper.
      by_label: under `per_leaf`, whether to return a report for each label.

    Returns:
      One report of scalars, over all params, NaN until something has been measured. With
      `by_label`, a dict of them in alphabetical order of the labels; an array's label is its path.
      Works under `jax.jit`, as in a training step, but `verdict()`, a sentence, does not.

    Raises:
      ValueError: if `opt_state` does not hold one `TrackMomentumState`, or, with `by_label`, one
        without labels.

    Examples:
      If all gradients are equal, every step tends to −ηg and the gain to 2/c:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import momentum_report, track_momentum
      >>> tx = track_momentum(spa(1.0, averaging=0.1), decay=0.9)
      >>> params = jnp.zeros(1)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(300):
      ...     updates, state = update(jnp.ones(1), state, params)
      ...     params = params + updates
      >>> report = momentum_report(state)
      >>> print(f"{report.gain:.2f} {report.noise_level:.2f} {report.alignment:.2f}")
      20.00 1.05 1.00
      >>> print(report.verdict())
      Steps add up: the gain is 19.00 times that of pure noise. Momentum speeds the run up here.

      Momentum helps b, whose gradients agree, and not w, whose gradients alternate:

      >>> tx = track_momentum(spa(1.0, averaging=0.5), per_leaf=True)
      >>> params = {"b": jnp.zeros(1), "w": jnp.zeros(1)}
      >>> state = tx.init(params)
      >>> for k in range(10):
      ...     gradients = {"b": jnp.ones(1), "w": (-1.0) ** k * jnp.ones(1)}
      ...     updates, state = tx.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> by_label = momentum_report(state, by_label=True)
      >>> print({label: bool(r.gain > r.noise_level) for label, r in by_label.items()})
      {'b': True, 'w': False}

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 4 (Insight 1) and
      Figure 2.
    """
    state = find_one(opt_state, "opt_state", TrackMomentumState)
    check_one_run("opt_state", state.count)
    leaves = map(jnp.asarray, jax.tree.leaves(state.gauge))  # under Flax nnx they are in variables
    gauge = jax.tree.unflatten(jax.tree.structure(new_gauge(())), leaves)
    averages = [1 / scalar_of(node.c) for node in find(state.inner, SPAState)]
    report = _report(gauge, averages[0] if averages else jnp.nan, scalar_of(state.count))
    if not by_label:
        return jax.tree.map(lambda values: values[-1] if values.ndim else values, report)
    if not state.groups:
        raise ValueError("`opt_state` must be of a gauge with `per_leaf`, got one without")
    of_label = lambda i: MomentumReport(*(values[i] for values in report))
    return {label: of_label(i) for i, label in enumerate(sorted(state.groups))}


def _report(gauge: Gauge, average_length: ArrayLike, num_steps: Array) -> MomentumReport:
    means, alignment = gauge.means, gauge.alignment
    like_gain = lambda value: jnp.broadcast_to(jnp.asarray(value), means.iterate.shape)
    error = jnp.maximum(gauge.cross.error, jnp.finfo(jnp.float32).tiny)  # 0 where z = x
    cosine = -alignment.inner_product / jnp.sqrt(alignment.step) / jnp.sqrt(alignment.gradient)
    return MomentumReport(
        gain=means.iterate / means.gradient,
        noise_level=means.noise / means.gradient,
        alignment=cosine,
        inner_product=alignment.inner_product / alignment.weight,
        iterate_term=means.iterate / means.weight,
        gradient_term=means.gradient / means.weight,
        num_skipped=gauge.uncounted.skipped,
        num_zero=gauge.uncounted.zero,
        num_rounded=gauge.uncounted.rounded,
        t=jnp.where(means.weight > 0, gauge.cross.total / error, jnp.nan),
        average_length=like_gain(average_length),
        num_steps=like_gain(num_steps),
        num_saturated=gauge.saturated,
        num_measured=gauge.cross.number,
    )


def _are_reports(value: Any) -> bool:
    by_label = (r if isinstance(r, Mapping) else {"": r} for r in value.values())
    return all(isinstance(report, tuple) for labels in by_label for report in labels.values())


REPORTS = Rule(
    "a mapping from steps to reports", lambda v: isinstance(v, Mapping) and _are_reports(v)
)


def plot_momentum(
    reports: Mapping[int, MomentumReport | Mapping[str, MomentumReport]],
) -> "Figure":
    """Plots gain / noise level and alignment over a run.

    Args:
      reports: results of `momentum_report`, by step. A label "all" is drawn thick. Of the others
        the five that differ most from pure noise are named, and the rest is grey.

    Returns:
      A figure; this needs matplotlib.

    Raises:
      ValueError: if there is no report, or one of a batch, or labels differ from step to step.

    Examples:
      Measured every 10 steps and collected every 100, which costs next to nothing:

          tx = track_momentum(optax.adamw(1e-3), averaging=0.1, every=10)
          reports = {}
          for step in range(num_steps):
              params, opt_state = train_step(params, opt_state, batch)
              if step % 100 == 0:
                  reports[step] = momentum_report(opt_state)
          plot_momentum(reports).savefig("momentum.png")

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Figure 2.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    REPORTS.check(reports=reports)
    as_mapping = lambda report: {"": report} if isinstance(report, MomentumReport) else report
    by_step = {step: as_mapping(report) for step, report in sorted(reports.items())}
    labels = list(next(iter(by_step.values()), ()))
    if not labels or any(list(of_step) != labels for of_step in by_step.values()):
        raise ValueError(f"`reports` must hold the same labels at every step, got {labels} first")
    values = np.array([list(of_step.values()) for of_step in by_step.values()], float)
    if shape := values.shape[3:]:
        raise ValueError(f"`reports` must be of one run, got a batch of shape {shape}")
    of_label = [MomentumReport(*values[:, i].T) for i in range(len(labels))]
    ratios = np.full((len(labels), len(values)), np.nan)
    for ratio, report in zip(ratios, of_label, strict=True):
        np.divide(report.gain, report.noise_level, ratio, where=report.noise_level > 0)
    from_noise = np.nan_to_num(np.abs(ratios - 1)).sum(1)
    others = [i for i, label in enumerate(labels) if label not in ("", "all")]
    named = sorted(others, key=lambda i: -from_noise[i])[:NUM_NAMED]
    figure, (top, bottom) = plt.subplots(2, sharex=True, layout="constrained", figsize=(8, 6))
    for i, (label, report) in enumerate(zip(labels, of_label, strict=True)):
        style: dict[str, Any] = {"linewidth": 1.2, "label": label}
        if i not in others:
            style |= {"color": "black", "linewidth": 2.5}
        elif i not in named:
            style = {"color": "0.75", "linewidth": 0.8, "zorder": 1}
        top.plot(list(by_step), ratios[i], **style)
        bottom.plot(list(by_step), report.alignment, **style)
    top.set(ylabel="gain / noise level", yscale="log")
    top.set_title("Steps add up where gain over noise level is above 1")
    top.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    top.yaxis.set_major_formatter("{x:g}")
    top.yaxis.set_minor_formatter("")
    bottom.set(ylabel="alignment, cos(−g, last step)", xlabel="step")
    for axis, level in ((top, 1), (bottom, 0)):
        axis.axhline(level, color="C3", linestyle="--")
        axis.grid(alpha=0.3)
    if labels != [""]:
        figure.legend(*top.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure
