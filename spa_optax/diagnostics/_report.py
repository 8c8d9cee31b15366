"""The gauge in numbers and in words."""

from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from spa_optax import _checks as checks, _trees as trees
from spa_optax._core import SPAState
from spa_optax._optax_states import WITH_MOMENTUM
from spa_optax.diagnostics._gauge import new_gauge
from spa_optax.diagnostics._track import TrackMomentumState


class MomentumReport(NamedTuple):
    """The result of `momentum_report`; NaN where nothing has been measured yet."""

    gain: Float[
        Array, ""
    ]  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Float[
        Array, ""
    ]  # the gain in pure noise; NaN beside other momentum, as of a base
    alignment: Float[Array, ""]  # the cosine between −g_k and x_k − x_{k−1}
    inner_product: Float[Array, ""]  # the moving average of ⟨g_k, x_k − x_{k−1}⟩
    iterate_term: Float[Array, ""]  # the moving average of ‖x_k − x_{k−1}‖²/(η²c)
    gradient_term: Float[Array, ""]  # the moving average of ½‖g_k‖²
    num_skipped: Int[
        Array, ""
    ]  # measured steps that were not finite, or overflow if squared
    num_zero: Int[Array, ""]  # measured steps that were 0, or underflow if squared
    num_rounded: Int[
        Array, ""
    ]  # measured steps within the rounding error of params and z
    t: Float[
        Array, ""
    ]  # over standard errors of pure noise; > 0: steps add up, < 0: they oppose
    average_length: Float[
        Array, ""
    ]  # 1/c of the last step; NaN for Optax's own momentum
    num_steps: Int[Array, ""]  # taken so far
    num_saturated: Int[
        Array, ""
    ]  # the most elements of z at its dtype's limit in a measured step
    num_measured: Int[Array, ""]  # measured steps that count
    subnormal: Float[
        Array, ""
    ]  # the share of nonzero z − params below its dtype's normal range

    def verdict(self) -> str:
        """Whether steps add up, do not, or do as they would in pure noise, in words.

        The first two need |t| ≥ 3 and a gain on the same side of the noise level, and
        all need ten measured steps. Also says if z saturates or is too coarse. A batch
        raises ValueError.
        """
        if shape := np.shape(self.gain):
            raise ValueError(
                f"the report must be of one run, got a batch of shape {shape}"
            )
        times, t, length = map(
            float, (self.gain / self.noise_level, self.t, self.average_length)
        )
        of_noise, is_known = (
            f"the gain is {times:.2f} times that of pure noise",
            np.isfinite(times),
        )
        if np.isnan(self.noise_level) and np.isfinite(self.gain):
            text = (
                "Nothing to report: the direction's or base's own momentum makes "
                "noise add up, too."
            )
        elif not is_known:
            number, why = max(
                (0, "two steps are needed"),
                (
                    int(self.num_rounded),
                    "steps were within the rounding error of params and z",
                ),
                (
                    int(self.num_zero),
                    "steps were 0, or their squares underflow float32",
                ),
                (
                    int(self.num_skipped),
                    "steps were not finite, or their squares overflow float32",
                ),
                key=lambda reason: reason[0],
            )
            text = f"Nothing to report: {f'{number} measured ' if number else ''}{why}."
        elif self.num_measured < 10:  # |t| is at most √n
            text = (
                f"Nothing to report yet: 10 measured steps are needed, got "
                f"{self.num_measured}."
            )
        elif t >= 3 and times > 1:
            text = f"Steps add up: {of_noise}. Momentum speeds the run up here."
        elif t <= -3 and times < 1:
            text = f"Steps do not add up: {of_noise}. Here momentum only reduces noise."
        else:
            text = f"Not told from pure noise: {of_noise}, with t = {t:.2f}."
        if is_known and np.isnan(self.alignment):
            text += (
                " Alignment is unknown: z − x may be rounding error, or steps "
                "are Nesterov's."
            )
        if is_known and 1.01 * int(self.num_steps) < length < np.inf:  # α may be 0
            text += (
                f" The average, {length:.0f} steps, is longer than the run, "
                f"{self.num_steps}."
            )
        if number := int(self.num_saturated):
            text += (
                f" Up to {number} elements of z were at the limit of its dtype. "
                f"Use bfloat16."
            )
        if (
            self.subnormal > 7 / 8
        ):  # at 7/8 of a normal distribution e4m3 is as coarse as e5m2
            below = (
                f"{self.subnormal:.0%} of z − params are below the normal range "
                f"of its dtype"
            )
            text += f" {below}. Use float8_e5m2 or bfloat16."
        return text


@overload
def momentum_report(
    opt_state: PyTree, *, by_label: Literal[False] = False
) -> MomentumReport: ...
@overload
def momentum_report(
    opt_state: PyTree, *, by_label: bool
) -> dict[str, MomentumReport]: ...
def momentum_report(
    opt_state: PyTree, *, by_label: bool = False
) -> MomentumReport | dict[str, MomentumReport]:
    """Reports the measurements of `track_momentum`: whether steps add up.

        gain = ‖x_k − x_{k−1}‖²/(η²c) over ½‖g_k‖²  alignment = cos(−g_k, x_k − x_{k−1})
        t = Σ a_k / √(Σ a_k²)  with  a_k = −c_{k+1}⟨g_k, z_k − x_k⟩/η_k

    Steps add up if gain / noise level is above 1. The noise level is 2/(2 − c) for
    constants (the paper's 1 is its limit for small c). Under pure noise |t| ≥ 3 in
    about 0.3 % of reports.

    Args: opt_state: a state that holds one `TrackMomentumState`, in any chain or
      wrapper. by_label: under `per_leaf`, whether to return a dict of reports, one for
      each label.

    Returns: The report over all params, or reports sorted by label; an array's label is
      its path.

    Raises: ValueError: if `opt_state` does not hold one `TrackMomentumState`, or
      `by_label` no labels.

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
    leaves = map(
        jnp.asarray, jax.tree.leaves(state.gauge)
    )  # under Flax nnx they are in variables
    gauge = jax.tree.unflatten(jax.tree.structure(new_gauge(())), leaves)
    means, aligned = gauge.means, gauge.alignment
    error = jnp.maximum(gauge.cross_error, jnp.finfo(jnp.float32).tiny)  # 0 where z = x
    members = trees.find(state.inner, SPAState)
    known = (
        jnp.nan if len(trees.find(state.inner, (SPAState, *WITH_MOMENTUM))) > 1 else 1.0
    )
    report = MomentumReport(
        gain=means.iterate / means.gradient,
        noise_level=known * means.noise / means.gradient,
        alignment=-aligned.inner_product
        / jnp.sqrt(aligned.step)
        / jnp.sqrt(aligned.gradient),
        inner_product=aligned.inner_product / aligned.weight,
        iterate_term=means.iterate / means.weight,
        gradient_term=means.gradient / means.weight,
        subnormal=means.subnormal / means.weight,
        t=known * jnp.where(means.weight > 0, gauge.cross_sum / error, jnp.nan),
        average_length=1 / trees.scalar_of(members[0].c)
        if members
        else jnp.asarray(jnp.nan),
        num_steps=trees.scalar_of(state.count),
        **{
            name: getattr(gauge, name)
            for name in gauge._fields
            if name.startswith("num_")
        },
    )
    of_label = lambda i: jax.tree.map(lambda v: v[i] if v.ndim else v, report)
    if not by_label:
        return of_label(-1)
    if not state.groups:
        raise ValueError(
            "`opt_state` must be of a gauge with `per_leaf`, got one without"
        )
    return {label: of_label(i) for i, label in enumerate(sorted(state.groups))}
