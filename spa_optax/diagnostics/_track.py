"""`track_momentum`, the gauge around an optimizer, and its report.

The gauge measures whether momentum pays: whether successive gradients agree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from .. import _arguments
from .._checks import check_not_batched, check_state_type
from .._codec import stored_tree
from .._optax_states import MOMENTUM_STATES, SKIPPING_STATES
from .._state import SPAState
from .._trees import (
    Count,
    Scalar,
    as_scalar,
    find_nodes,
    is_array_like,
    node_type_names,
)
from ._gauge import Gauge, init_gauge, measure, update_gauge


class TrackMomentumState(NamedTuple):
    """State of `track_momentum`."""

    inner_state: PyTree
    gauge: Gauge


def track_momentum(
    inner: optax.GradientTransformation, decay: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    """Measures whether an optimizer's momentum pays, for `momentum_report`.

    It measures each step Δx_k = x_{k+1} − x_k, beside what it would be in pure noise:

        Δx_k = c_{k+1} (z_k − x_k − η_k g_k) − δ_k g_k

    δ_k is 0 without Nesterov momentum. g_k is the update that reaches `spa` inside: the
    gradient after clipping and decay, or Adam's direction. Only numbers are stored. A
    step does not count if more than a tenth of ‖Δx_k‖² may be rounding.

    Args:
      inner: a transformation with one `SPAState` in its state, as `spa_adamw(1e-3)`
        or `primal_averaging(base, 0.1)`, also in a chain. For `optax.sgd` measure
        `spa_from_sgdm`, which has its iterates. Put wrappers that skip updates around
        `track_momentum`.
      decay: of the moving averages, per step, in [0, 1). At 0 they have the last step
        alone. The sums of t decay no faster than by (1 − c)² a step.

    Returns:
      A transformation whose state is a `TrackMomentumState`: that of `inner`, and the
      gauge. Under `optax.inject_hyperparams` name `decay` in its `static_args`.

    Raises:
      ValueError: if an argument is out of range, or, in `init`, `inner` does not hold
        one `SPAState`.

    Examples:
      With η = 1 and c = 0.5, x goes from 0 to −1 and on to −2: ‖Δx‖²/(η²c) = 2 and
      ½‖g‖² = 0.5.

      >>> import jax.numpy as jnp
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import momentum_report, track_momentum
      >>> tx = track_momentum(spa(learning_rate=1.0, averaging=0.5))
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for gradient in (2.0, 1.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = params + updates
      >>> report = momentum_report(state)
      >>> terms = report.iterate_term, report.gradient_term, report.gain
      >>> print(*[f"{term:.3f}" for term in terms])
      2.000 0.500 4.000

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Insight 1 and
      Figure 2.
    """
    _arguments.TRANSFORMATION.check(inner=inner)
    _arguments.FRACTION_BELOW_1.with_type(_arguments.NUMBER).check(decay=decay)
    decay = float(decay)  # NumPy's would change the dtypes of the gauge
    tx = optax.with_extra_args_support(inner)

    def init_fn(params):
        state = inner.init(params)
        _check_inner(state, params)
        return TrackMomentumState(state, init_gauge())

    def update_fn(updates, state, params=None, **extra):
        check_state_type("state", state, TrackMomentumState)
        args = updates, state.inner_state, params

        def measure_separately():
            # Updates a second time. Under `jax.jit` only what `observe` gets remains of
            # it, so the sums stay out of the kernels of the real update.
            *_, observed = _update_and_observe(tx, _barrier(args), extra)
            return measure(*observed)

        if isinstance(state.inner_state, SPAState):
            u, inner_state, observed = _update_and_observe(tx, args, extra)
            # The sums fuse into the kernels of the update. On a GPU such a kernel
            # cannot write x and z in place, but copies them.
            measured = jax.lax.platform_dependent(
                cuda=measure_separately,
                rocm=measure_separately,
                default=lambda: measure(*observed),
            )
        else:  # so that the real update compiles to the same kernels as without a gauge
            u, inner_state = tx.update(*args, **extra)
            measured = measure_separately()
        return u, TrackMomentumState(
            inner_state, update_gauge(state.gauge, measured, decay)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _barrier(tree: PyTree) -> PyTree:
    """`jax.lax.optimization_barrier` for a tree that may hold other leaves."""
    leaves, structure = jax.tree.flatten(tree)
    hidden = iter(jax.lax.optimization_barrier(list(filter(is_array_like, leaves))))
    return structure.unflatten(
        [next(hidden) if is_array_like(leaf) else leaf for leaf in leaves]
    )


def _update_and_observe(
    tx: optax.GradientTransformationExtraArgs, args: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree, tuple[Any, ...]]:
    """An update, and what `measure` takes: the arguments of the member's `observe`."""
    observed = []
    extra = {**extra, "observe": lambda *step: observed.append(step)}
    u, state = tx.update(*args, **extra)
    if not observed:
        raise ValueError(
            "`inner` must pass extra arguments of `update` on, got one that drops "
            "`observe`. Make it an `optax.GradientTransformationExtraArgs`."
        )
    return u, state, observed[0]


def _check_inner(state: PyTree, params: PyTree) -> None:
    """Raises ValueError unless a state has one member, for all params and steps."""
    for node in find_nodes(state, (TrackMomentumState, *SKIPPING_STATES)):
        raise ValueError(
            f"`inner` must not hold a `{type(node).__name__}`. Put that wrapper around "
            "`track_momentum`."
        )
    states = find_nodes(state, SPAState)
    if len(states) != 1:
        raise ValueError(
            f"`inner` must hold one `SPAState`, got {len(states)} of them in "
            f"{node_type_names(state)}. Use `spa`, `spa_adamw`, `primal_averaging`, or "
            "`spa_from_sgdm`, which has the iterates of `optax.sgd`."
        )
    num_params = len(jax.tree.leaves(params))
    num_stored = len(jax.tree.leaves(stored_tree(states[0].z)))
    if num_stored != num_params:
        raise ValueError(
            f"`inner` must hold a momentum of all {num_params} arrays, got "
            f"{num_stored}. Put `optax.masked` or `optax.partition` around "
            "`track_momentum`."
        )


class MomentumReport(NamedTuple):
    """The result of `momentum_report`; NaN where nothing has been measured yet."""

    gain: Scalar  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Scalar  # the gain in pure noise; NaN beside other momentum
    t_statistic: Scalar  # Σ χ_k in standard errors; > 0: steps add up, < 0: they oppose
    iterate_term: Scalar  # the moving average of ‖x_k − x_{k−1}‖²/(η² c)
    gradient_term: Scalar  # the moving average of ½‖g_k‖²
    num_steps: Count  # since the gauge began
    num_measured: Count  # steps that count
    num_not_finite: Count  # consecutive steps up to the last one

    def verdict(self) -> str:
        """Whether steps add up, do not, or do as they would in pure noise, in words.

        The first two need |t| ≥ 3 and a gain on the same side of the noise level, and
        all need ten measured steps and a last step that is finite. A batch raises
        ValueError.
        """
        if shape := np.shape(self.gain):
            raise ValueError(
                f"the report must be of one run, got a batch of shape {shape}"
            )
        if self.num_not_finite > 0:
            return (
                f"Nothing to report: the last {self.num_not_finite} steps were not "
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
                f"0. Of {self.num_steps} steps {self.num_measured} count. The others "
                "were not finite, or overflow float32 if squared, or were within the "
                "rounding error of params and z."
            )
        if self.t_statistic >= 3 and ratio > 1:
            return (
                f"Steps add up: the gain is {ratio:.2f} times that of pure noise. "
                "Momentum speeds the run up here."
            )
        if self.t_statistic <= -3 and ratio < 1:
            return (
                f"Steps do not add up: the gain is {ratio:.2f} times that of pure "
                "noise. Here momentum only reduces noise."
            )
        return (
            f"Cannot be told from pure noise: the gain is {ratio:.2f} times that of "
            f"pure noise, with t = {self.t_statistic:.2f}."
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
    found = find_nodes(opt_state, TrackMomentumState)
    if len(found) != 1:
        raise ValueError(
            f"`opt_state` must hold one `TrackMomentumState`, got {len(found)} in "
            f"{node_type_names(opt_state)}"
        )
    (state,) = found
    check_not_batched("opt_state", state.gauge)
    # Flax nnx keeps arrays in variables.
    gauge = jax.tree.map(lambda _, leaf: as_scalar(leaf), init_gauge(), state.gauge)
    means = gauge.means
    # The error is 0 while z is x.
    cross_error = jnp.maximum(gauge.cross_error, jnp.finfo(jnp.float32).tiny)
    t = jnp.where(means.weight > 0, gauge.cross_sum / cross_error, jnp.nan)
    noise_level = means.noise_term / means.gradient_term
    if find_nodes(state.inner_state, MOMENTUM_STATES):
        t, noise_level = jnp.nan * t, jnp.nan * noise_level
    return MomentumReport(
        gain=means.iterate_term / means.gradient_term,
        noise_level=noise_level,
        t_statistic=t,
        iterate_term=means.iterate_term / means.weight,
        gradient_term=means.gradient_term / means.weight,
        num_steps=gauge.num_steps,
        num_measured=gauge.num_measured,
        num_not_finite=gauge.num_not_finite,
    )
