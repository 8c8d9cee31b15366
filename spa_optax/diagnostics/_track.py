"""The gauge around an optimizer."""

import contextlib
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jaxtyping import Array, Int, PyTree

from spa_optax import _checks as checks, _optax_states as of_optax, _trees as trees
from spa_optax._core import SPAState
from spa_optax._storage import tree_of
from spa_optax._wrappers import Float8MomentumState
from spa_optax._xla import behind_a_barrier
from spa_optax.diagnostics._gauge import Gauge, new_gauge, sums_of, update_gauge

PER_LEAF = checks.Rule(
    "a bool or a function", lambda v: isinstance(v, bool) or callable(v)
)
is_c = lambda v: (
    not isinstance(v, bool) and not checks.is_surely(~(jnp.float32(v) > 0) | (v > 1))
)
AVERAGING_OF_OPTAX = checks.Rule("in (0, 1]", is_c, may_be_none=True, is_averaging=True)


class TrackMomentumState(NamedTuple):
    """State of `track_momentum`."""

    inner: PyTree
    count: Int[Array, ""]
    gauge: Gauge
    groups: dict[
        str, optax.EmptyState
    ]  # the labels, in the order of the gauge, before all


def track_momentum(
    inner: optax.GradientTransformation,
    decay: float = 0.99,
    *,
    every: int = 1,
    per_leaf: bool | Callable[[PyTree], PyTree] = False,
    averaging: float | None = None,
    b2: float = 0.999,
) -> optax.GradientTransformationExtraArgs:
    """Measures whether an optimizer's momentum pays; `momentum_report` gives the
    result.

    No step u_k = x_{k+1} − x_k is stored: it follows from d_k = z_k − x_k. For pure
    noise, without cross terms, ‖u_k‖² would be v_{k+1}:

        u_k = c_{k+1} (d_k − η_k g_k)             u_{k−1} = c_k/(1 − c_k) d_k
        v_{k+1} = c_{k+1}²(p_k + η_k²‖g_k‖²)  p_{k+1} = (1 − c_{k+1})²(p_k + η_k²‖g_k‖²)

    g_k is the update that reaches the member of the family: the gradient after clipping
    and decay, or Adam's direction. Optax's own momentum is measured as SPA with η = 1,
    without Adam's ε and Nesterov's further step. A step does not count if more than a
    tenth of ‖u_k‖² may be rounding.

    Args: inner: a transformation with one member of the family, `optax.sgd` with
      momentum, `optax.adam`
        or `optax.adamw`, also in a chain. Put wrappers that skip updates around
        `track_momentum`.
      decay: of the moving averages per measured step, in [0, 1). At 0 only the last
        step counts.
      every: steps from one measurement to the next, ≥ 1. In between only scalars are
        updated.
      per_leaf: True for a gauge of each parameter array; or a function from the params
        to a tree of strings, or a prefix of one, for a gauge of each label.
      averaging: c = 1 − β in (0, 1], for Optax's own momentum. None: as in
        `inject_hyperparams`.
      b2: β₂ in [0, 1) of Adam's state, unless it is injected.

    Returns: A transformation whose state is a `TrackMomentumState`: that of `inner`,
      and the gauge. Under `optax.inject_hyperparams` name all arguments but `inner` in
      its `static_args`.

    Raises: ValueError: if an argument is out of range, or, in `init`, `inner` is none
      of these.

    Examples: With η = 1 and c = 0.5, x goes from 0 to −1 and on to −2: ‖u‖²/(η²c) = 2
      and ½‖g‖² = 0.5.

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

    References: Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Insight
      1 and Figure 2.
    """
    checks.TRANSFORMATION.check(inner=inner)
    checks.B1.check(decay=decay)
    checks.POSITIVE_INTEGER.check(every=every)
    PER_LEAF.check(per_leaf=per_leaf)
    AVERAGING_OF_OPTAX.check(averaging=averaging)
    checks.B2.check(b2=b2)
    tx = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> TrackMomentumState:
        state = inner.init(params)
        momentum = trees.find_one(state, "inner", SPAState, of_optax.ADAM_OR_TRACE)
        is_spa = isinstance(momentum, SPAState)
        refused = (*of_optax.SKIPS_UPDATES, TrackMomentumState)
        for wrapper in trees.find(
            state, refused if is_spa else (*refused, Float8MomentumState)
        ):
            raise ValueError(
                f"`inner` must not hold a `{type(wrapper).__name__}`: put it outside"
            )
        tree = tree_of(getattr(momentum, of_optax.MOMENTUM.get(type(momentum), "z")))
        if (got := len(jax.tree.leaves(tree))) != (num := len(jax.tree.leaves(params))):
            raise ValueError(
                f"`inner` must hold a momentum of all {num} arrays, got {got}"
            )
        if not is_spa:
            of_optax.c_and_b2(state, averaging, b2)
        elif averaging is not None:
            raise ValueError(
                f"`averaging` must be None, as `inner` has its own c, got {averaging}"
            )
        if isinstance(momentum, optax.ScaleByAdamState):
            of_optax.check_moments(inner, params, averaging, b2)
        labels = _labels(per_leaf, params)
        groups = {
            name: optax.EmptyState() for name in sorted({*(labels or {}).values()})
        }
        gauge = new_gauge(() if labels is None else (len(groups) + 1,))
        return TrackMomentumState(state, jnp.zeros([], jnp.int32), gauge, groups)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        trees.check_kind("state", state, TrackMomentumState)
        if per_leaf is not False and params is None:
            raise ValueError(
                "`params` must be passed to `update` under `per_leaf`, got None"
            )
        labels, count = _labels(per_leaf, params), jnp.asarray(state.count)
        if (names := sorted({*(labels or {}).values()})) != sorted(state.groups):
            raise ValueError(
                f"`per_leaf` must be the state's, {[*state.groups]}, got {names}"
            )

        def observe_update(updates: PyTree, inner_state: PyTree, params: PyTree) -> Any:
            steps = []
            u, now = tx.update(
                updates, inner_state, params, **{**extra, "observe": steps.append}
            )
            steps = steps or [of_optax.step_of_optax(inner_state, now, averaging, b2)]
            return u, now, steps[0]

        given = (updates, state.inner, params)
        separate_step = lambda: observe_update(*behind_a_barrier(given))[2]
        separate = lambda: sums_of(separate_step(), labels)
        if (
            isinstance(state.inner, SPAState) and every == 1
        ):  # the sums fuse into its kernels
            u, now, step = observe_update(*given)
            fused = lambda: sums_of(step, labels)
            # On a GPU such a kernel cannot write x and z in place, but copies them.
            sums = jax.lax.platform_dependent(
                cuda=separate, rocm=separate, default=fused
            )
        else:  # from a separate update, so that the real one compiles as without
            u, now = tx.update(*given, **extra)
            step = separate_step()
            zeros = lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(separate))
            at_some = lambda: jax.lax.cond(count % every == 0, separate, zeros)
            sums = sums_of(step, labels) if every == 1 else at_some()
        gauge = update_gauge(state.gauge, step, sums, count, decay, every)
        count = jnp.asarray(optax.safe_increment(count))
        return u, TrackMomentumState(now, count, gauge, state.groups)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _labels(per_leaf: Any, params: PyTree) -> dict[str, str] | None:
    """The label of each trained parameter by its path; None if all share one gauge."""
    if per_leaf is False:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [path for path, leaf in leaves if trees.is_trained(leaf)]
    keys = list(map(keystr, paths))
    if per_leaf is True:
        simple = lambda path: keystr(path, simple=True, separator=".").removesuffix(
            ".value"
        )
        names = list(map(simple, paths))
        return dict(
            zip(keys, names if len({*names}) == len(keys) else keys, strict=True)
        )
    tree, labels = per_leaf(params), {}
    with contextlib.suppress(ValueError):  # `tree` is no prefix
        labelled = jax.tree.map(
            lambda label, of: jax.tree.map(lambda _: label, of), tree, params
        )
        labels = dict(trees.leaves_with_path(labelled))
    if not all(isinstance(labels.get(key), str) for key in keys):
        got = reprlib.repr(tree)
        raise ValueError(
            f"`per_leaf` must return strings for params or their nodes, got {got}"
        )
    return {key: labels[key] for key in keys}
