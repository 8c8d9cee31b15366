"""The gauge around an optimizer."""

from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import PyTree

from spa_optax import _checks as checks
from spa_optax._codec import unwrap
from spa_optax._optax_states import SKIPPING_STATES
from spa_optax._state import SPAState
from spa_optax._tree_checks import check_kind
from spa_optax._trees import find_nodes, kinds_of
from spa_optax._xla import behind_a_barrier
from spa_optax.diagnostics._gauge import Gauge, Step, measure, new_gauge, update_gauge


class TrackMomentumState(NamedTuple):
    """State of `track_momentum`."""

    inner: PyTree
    gauge: Gauge


def track_momentum(
    inner: optax.GradientTransformation, decay: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    """Measures whether an optimizer's momentum pays, for `momentum_report`.

    It measures each step u_k = x_{k+1} − x_k, beside what it would be in pure noise:

        u_k = c_{k+1} (z_k − x_k − η_k g_k) − δ_k g_k

    δ_k is 0 without Nesterov momentum. g_k is the update that reaches the member of
    the family: the gradient after clipping and decay, or Adam's direction. Only numbers
    are stored. A step does not count if more than a tenth of ‖u_k‖² may be rounding.

    Args:
      inner: a transformation with one member of the family, such as `spa_adamw(1e-3)`
        or `primal_averaging(base, 0.1)`, also in a chain. For `optax.sgd` measure
        `spa_from_sgdm`, which has its iterates. Put wrappers that skip updates around
        `track_momentum`.
      decay: of the moving averages, per step, in [0, 1). At 0 only the last step
        counts.

    Returns:
      A transformation whose state is a `TrackMomentumState`: that of `inner`, and the
      gauge. Under `optax.inject_hyperparams` name `decay` in its `static_args`.

    Raises:
      ValueError: if an argument is out of range, or, in `init`, `inner` does not hold
        one member of the family.

    Examples:
      With η = 1 and c = 0.5, x goes from 0 to −1 and on to −2: ‖u‖²/(η²c) = 2 and
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
    checks.TRANSFORMATION.check(inner=inner)
    checks.DECAY.check(decay=decay)
    tx = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> TrackMomentumState:
        state = inner.init(params)
        _check_inner(state, params)
        return TrackMomentumState(state, new_gauge())

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        check_kind("state", state, TrackMomentumState)
        args = updates, state.inner, params

        # A second update, of which only the arguments of `observe` are used: in
        # `jax.jit` XLA removes the rest.
        def measure_separately() -> Step:
            return measure(*_observed(tx, behind_a_barrier(args), extra)[2])

        if isinstance(state.inner, SPAState):
            u, inner_state, observed = _observed(tx, args, extra)
            # The sums fuse into the kernels of the update. On a GPU such a kernel
            # cannot write x and z in place, but copies them.
            step = jax.lax.platform_dependent(
                cuda=measure_separately,
                rocm=measure_separately,
                default=lambda: measure(*observed),
            )
        else:  # so that the real update compiles to the same kernels as without a gauge
            u, inner_state = tx.update(*args, **extra)
            step = measure_separately()
        return u, TrackMomentumState(
            inner_state, update_gauge(state.gauge, step, decay)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _observed(
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
    members = find_nodes(state, SPAState)
    if len(members) != 1:
        raise ValueError(
            f"`inner` must hold one `SPAState`, got {len(members)} of them in "
            f"{kinds_of(state)}. Use `spa`, `spa_adamw`, `primal_averaging`, or "
            "`spa_from_sgdm`, which has the iterates of `optax.sgd`."
        )
    num_params = len(jax.tree.leaves(params))
    num_measured = len(jax.tree.leaves(unwrap(members[0].z)))
    if num_measured != num_params:
        raise ValueError(
            f"`inner` must hold a momentum of all {num_params} arrays, got "
            f"{num_measured}. Put `optax.masked` or `optax.partition` around "
            "`track_momentum`."
        )
