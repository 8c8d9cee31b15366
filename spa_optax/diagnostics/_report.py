"""The gauge in numbers and in words."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from spa_optax._optax_states import MOMENTUM_STATES
from spa_optax._state import SPAState
from spa_optax._tree_checks import check_not_batched
from spa_optax._trees import find_node, find_nodes, scalar_of
from spa_optax._types import Count, Scalar
from spa_optax.diagnostics._gauge import new_gauge
from spa_optax.diagnostics._track import TrackMomentumState


class MomentumReport(NamedTuple):
    """The result of `momentum_report`; NaN where nothing has been measured yet."""

    gain: Scalar  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Scalar  # the gain in pure noise; NaN beside other momentum
    t: Scalar  # Σ χ_k in standard errors; > 0: steps add up, < 0: they oppose
    iterate_term: Scalar  # the moving average of ‖x_k − x_{k−1}‖²/(η² c)
    gradient_term: Scalar  # the moving average of ½‖g_k‖²
    average_length: Scalar  # 1/c of the last step
    num_steps: Count  # since the gauge began
    num_measured: Count  # steps that count
    num_skipped: Count  # steps that were not finite, or overflow if squared
    num_rounded: Count  # steps of 0, or within the rounding error of params and z
    num_skipped_last: Count  # skipped steps in a row, up to the last step
    num_saturated: Scalar  # the most elements of z at its dtype's limit in a step

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
        verdict = self._comparison()
        num_steps, length = int(self.num_steps), float(self.average_length)
        if 1.01 * num_steps < length < np.inf:  # α may be 0
            verdict += (
                f" The average, {length:.0f} steps, is longer than the "
                f"{num_steps} steps so far."
            )
        if self.num_saturated > 0:
            verdict += (
                f" Up to {self.num_saturated:.0f} elements of z were at the limit of "
                "its dtype. Use bfloat16."
            )
        return verdict

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
        ratio = self.gain / self.noise_level
        if self.num_measured < 10 or not np.isfinite(ratio):  # |t| is at most √n
            return (
                "Nothing to report yet: 10 steps must count, and gradients must not be "
                f"0. Of {self.num_steps} steps {self.num_measured} count, "
                f"{self.num_skipped} were not finite, or their squares overflow "
                f"float32, and {self.num_rounded} were 0 or within the rounding error "
                "of params and z."
            )
        if self.t >= 3 and ratio > 1:
            return (
                f"Steps add up: the gain is {ratio:.2f} times that of pure noise. "
                "Momentum speeds the run up here."
            )
        if self.t <= -3 and ratio < 1:
            return (
                f"Steps do not add up: the gain is {ratio:.2f} times that of pure "
                "noise. Here momentum only reduces noise."
            )
        return (
            f"Not told from pure noise: the gain is {ratio:.2f} times that of pure "
            f"noise, with t = {self.t:.2f}."
        )


def momentum_report(opt_state: PyTree) -> MomentumReport:
    """Reports the measurements of `track_momentum`: whether steps add up.

        gain = ‖x_k − x_{k−1}‖²/(η²c) over ½‖g_k‖²
        t = Σ χ_k / √(Σ χ_k²)  with  χ_k = −2 b_k ⟨g_k, z_k − x_k⟩/η_k²
        b_k = c_{k+1} η_k + δ_k, where δ_k is 0 without Nesterov momentum

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
    state = find_node("opt_state", opt_state, TrackMomentumState)
    check_not_batched("opt_state", state.gauge)
    # Flax nnx keeps arrays in variables.
    gauge = jax.tree.map(lambda _, x: scalar_of(x), new_gauge(), state.gauge)
    means, counts = gauge.means, gauge.counts
    cross_error = jnp.maximum(gauge.cross_error, jnp.finfo(jnp.float32).tiny)  # z = x
    t = jnp.where(means.weight > 0, gauge.cross_sum / cross_error, jnp.nan)
    noise_level = means.noise / means.gradient
    if find_nodes(state.inner, MOMENTUM_STATES):
        t, noise_level = jnp.nan * t, jnp.nan * noise_level
    member = find_node("opt_state", state.inner, SPAState)
    return MomentumReport(
        gain=means.iterate / means.gradient,
        noise_level=noise_level,
        t=t,
        iterate_term=means.iterate / means.weight,
        gradient_term=means.gradient / means.weight,
        average_length=1 / scalar_of(member.c),
        num_steps=jnp.asarray(sum(counts)),
        num_measured=counts.measured,
        num_skipped=counts.skipped,
        num_rounded=counts.rounded,
        num_skipped_last=gauge.num_skipped_last,
        num_saturated=gauge.num_saturated,
    )
