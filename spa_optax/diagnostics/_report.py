"""The gauge in numbers and in words."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from spa_optax import _checks as checks, _trees as trees
from spa_optax._core import SPAState
from spa_optax.diagnostics._gauge import Gauge, new_gauge
from spa_optax.diagnostics._track import TrackMomentumState

Scalar = Float[Array, ""]
Count = Int[Array, ""]

# Other momentum, beside which noise adds up too.
_OTHER_MOMENTUM = (
    optax.ApplyEvery,
    optax.EmaState,
    optax.ScaleByAdamState,
    optax.ScaleByAdanState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByLionState,
    optax.ScaleByNovogradState,
    optax.ScaleBySM3State,
    optax.TraceState,
    optax.contrib.MuonState,
    optax.contrib.ScaleByAdemamixState,
    optax.contrib.ScaleBySimplifiedAdEMAMixState,
)


class MomentumReport(NamedTuple):
    """The result of `momentum_report`; NaN where nothing has been measured yet."""

    gain: Scalar  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Scalar  # the gain in pure noise; NaN beside other momentum
    alignment: Scalar  # the cosine between −g_k and x_k − x_{k−1}
    inner_product: Scalar  # the moving average of ⟨g_k, x_k − x_{k−1}⟩
    iterate_term: Scalar  # the moving average of ‖x_k − x_{k−1}‖²/(η² c)
    gradient_term: Scalar  # the moving average of ½‖g_k‖²
    num_skipped: Count  # steps that were not finite, or overflow if squared
    num_zero: Count  # steps that were 0, or underflow if squared
    num_rounded: Count  # steps within the rounding error of params and z
    t: Scalar  # over standard errors of pure noise; > 0: steps add up, < 0: they oppose
    average_length: Scalar  # 1/c of the last step
    num_steps: Count  # taken so far
    num_saturated: Count  # the most elements of z at its dtype's limit in a step
    num_measured: Count  # steps that count
    num_skipped_last: Count  # skipped steps in a row, up to the last step

    def verdict(self) -> str:
        """Whether steps add up, do not, or do as they would in pure noise, in words.

        The first two need |t| ≥ 3 and a gain on the same side of the noise level, and
        all need ten measured steps and a last step that is finite. Also says if z
        saturates. A batch raises ValueError.
        """
        if shape := np.shape(self.gain):
            raise ValueError(
                f"the report must be of one run, got a batch of shape {shape}"
            )
        sentences = [self._comparison()]
        is_known = np.isfinite(self.gain / self.noise_level)
        if is_known and np.isnan(self.alignment):
            sentences.append(
                "Alignment is unknown: z − x may be rounding error, or steps are "
                "Nesterov's."
            )
        num_steps, length = int(self.num_steps), float(self.average_length)
        if is_known and 1.01 * num_steps < length < np.inf:  # α may be 0
            sentences.append(
                f"The average, {length:.0f} steps, is longer than the run, {num_steps}."
            )
        if self.num_saturated > 0:
            sentences.append(
                f"Up to {self.num_saturated} elements of z were at the limit of its "
                "dtype. Use bfloat16."
            )
        return " ".join(sentences)

    def _comparison(self) -> str:
        """The gain beside that of pure noise."""
        if self.num_skipped_last > 0:
            return (
                f"Nothing to report: the last {self.num_skipped_last} steps were not "
                "finite, or their squares overflow float32."
            )
        if np.isnan(self.noise_level) and np.isfinite(self.gain):
            return (
                "Nothing to report: the direction's or base's own momentum makes "
                "noise add up, too."
            )
        ratio, t = float(self.gain / self.noise_level), float(self.t)
        if not np.isfinite(ratio):
            return self._why_unknown()
        if self.num_measured < 10:  # |t| is at most √n
            return (
                "Nothing to report yet: 10 measured steps are needed, got "
                f"{self.num_measured}."
            )
        if t >= 3 and ratio > 1:
            return (
                f"Steps add up: the gain is {ratio:.2f} times that of pure noise. "
                "Momentum speeds the run up here."
            )
        if t <= -3 and ratio < 1:
            return (
                f"Steps do not add up: the gain is {ratio:.2f} times that of pure "
                "noise. Here momentum only reduces noise."
            )
        return (
            f"Not told from pure noise: the gain is {ratio:.2f} times that of pure "
            f"noise, with t = {t:.2f}."
        )

    def _why_unknown(self) -> str:
        """Why no step counts, by what befell the most of them."""
        reasons = {
            "two steps are needed.": 0,
            f"{self.num_rounded} steps were within the rounding error of "
            "params and z.": int(self.num_rounded),
            f"{self.num_zero} steps were 0, or their squares underflow float32.": int(
                self.num_zero
            ),
            f"{self.num_skipped} steps were not finite, or their squares "
            "overflow float32.": int(self.num_skipped),
        }
        return f"Nothing to report: {max(reasons, key=lambda text: reasons[text])}"


def momentum_report(opt_state: PyTree) -> MomentumReport:
    """Reports the measurements of `track_momentum`: whether steps add up.

        gain = ‖x_k − x_{k−1}‖²/(η²c) over ½‖g_k‖²  alignment = cos(−g_k, x_k − x_{k−1})
        t = Σ a_k / √(Σ a_k²)  with  a_k = −c_{k+1}⟨g_k, z_k − x_k⟩/η_k

    Steps add up if gain / noise level is above 1. The noise level is 2/(2 − c) for
    constants (the paper's 1 is its limit for small c). Under pure noise |t| ≥ 3 in
    about 0.3 % of reports.

    Args:
      opt_state: a state that holds one `TrackMomentumState`, in any chain or wrapper.

    Returns:
      The report, of scalars. It can be made in a jitted step, as a metric.

    Raises:
      ValueError: if `opt_state` does not hold one `TrackMomentumState`.

    Examples:
      If all gradients are equal, the gain tends to 2/c, which is 19 times 2/(2 − c):

      >>> import jax, jax.numpy as jnp
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import momentum_report, track_momentum
      >>> tx, params = track_momentum(spa(1.0, averaging=0.1), decay=0.9), jnp.zeros(1)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(300):
      ...     updates, state = update(jnp.ones(1), state, params)
      ...     params = params + updates
      >>> print(momentum_report(state).verdict().split(".")[0])
      Steps add up: the gain is 19
    """
    state = trees.find_one(opt_state, "opt_state", TrackMomentumState)
    checks.check_one_run("opt_state", state.count)
    gauge = _of_arrays(state.gauge)
    means, aligned, counts = gauge.means, gauge.alignment, gauge.counts
    norms = jnp.sqrt(aligned.step) * jnp.sqrt(aligned.gradient)
    cross_error = jnp.maximum(gauge.cross_error, jnp.finfo(jnp.float32).tiny)  # z = x
    t = jnp.where(means.weight > 0, gauge.cross_sum / cross_error, jnp.nan)
    noise_level = means.noise / means.gradient
    if trees.find(state.inner, _OTHER_MOMENTUM):
        t, noise_level = jnp.nan * t, jnp.nan * noise_level
    member = trees.find_one(state.inner, "opt_state", SPAState)
    return MomentumReport(
        gain=means.iterate / means.gradient,
        noise_level=noise_level,
        alignment=-aligned.inner_product / norms,
        inner_product=aligned.inner_product / aligned.weight,
        iterate_term=means.iterate / means.weight,
        gradient_term=means.gradient / means.weight,
        num_skipped=counts.skipped,
        num_zero=counts.zero,
        num_rounded=counts.rounded,
        t=t,
        average_length=1 / trees.scalar_of(member.c),
        num_steps=trees.scalar_of(state.count),
        num_saturated=gauge.num_saturated,
        num_measured=counts.measured,
        num_skipped_last=gauge.num_skipped_last,
    )


def _of_arrays(gauge: PyTree) -> Gauge:
    """A gauge of arrays. Flax nnx keeps them in variables."""
    leaves = map(jnp.asarray, jax.tree.leaves(gauge))
    return jax.tree.unflatten(jax.tree.structure(new_gauge()), leaves)
