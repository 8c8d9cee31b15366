"""When momentum pays: the gauge of the paper's Insight 1, and tools to act on it."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import keystr
from jaxtyping import Array, Bool, Float, Int, PyTree

from spa_optax._checks import (
    check_averaging,
    check_concrete,
    check_rate,
    check_steps,
)
from spa_optax._convert import INJECTED, like, replace_nodes
from spa_optax._core import (
    GPAState,
    SPAState,
    Step,
    Update,
    find,
    map_trained,
    only,
    scalar_of,
    times,
)
from spa_optax._gpa import GPAUpdate
from spa_optax._precision import has_narrow, is_array, is_float, wide_dtype

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PerLeaf = bool | Callable[[PyTree], PyTree]


class Means(NamedTuple):
    """Moving averages before division by `weight`, the sum of their weights."""

    iterate: Float[Array, "*n"]  # of ‖u_{k−1}‖²/(η_{k−1}²c_k)
    noise: Float[Array, "*n"]  # of the same, if every cross term vanished
    gradient: Float[Array, "*n"]  # of ½‖g_k‖²
    weight: Float[Array, "*n"]


class AlignmentMeans(NamedTuple):
    """Like `Means`, over the steps at which u_{k−1} can be computed from z_k − x_k."""

    inner_product: Float[Array, "*n"]  # of ⟨g_k, u_{k−1}⟩
    step: Float[Array, "*n"]  # of ‖u_{k−1}‖²
    gradient: Float[Array, "*n"]  # of ‖g_k‖²
    weight: Float[Array, "*n"]


class Sums(NamedTuple):
    """The measurements of a step."""

    sq_gradient: Float[Array, "*n"]  # ‖g_k‖²
    sq_distance: Float[Array, "*n"]  # ‖d_k‖², with d_k = z_k − x_k
    inner_product: Float[Array, "*n"]  # ⟨g_k, d_k⟩
    sq_rounding: Float[Array, "*n"]  # the most that rounding adds to ‖d_k‖²


class Gauge(NamedTuple):
    """The stored measurements: numbers, or vectors over groups of params."""

    iterate: Float[Array, "*n"]  # ‖u‖²/(η²c) of the last measured step; −1 if there is none
    noise: Float[Array, "*n"]  # the same, if every cross term vanished
    gradient: Float[Array, "*n"]  # ‖g‖² of the last measured step
    spread: Float[Array, "*n"]  # what ‖z_k − x_k‖² would be if every cross term vanished
    means: Means
    alignment: AlignmentMeans
    num_skipped: Int[Array, "*n"]  # measured steps that were not finite


class TrackMomentumState(NamedTuple):
    """State of `track_momentum`."""

    inner: PyTree
    count: Int[Array, ""]
    gauge: Gauge
    groups: dict[str, optax.EmptyState]  # the labels, in the order of the gauge; {} without groups


class MomentumReport(NamedTuple):
    """The result of `momentum_report`; NaN where nothing has been measured yet."""

    gain: Float[Array, ""]  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Float[Array, ""]  # the gain of gradients that are pure noise
    alignment: Float[Array, ""]  # the cosine between −g_k and x_k − x_{k−1}
    inner_product: Float[Array, ""]  # the moving average of ⟨g_k, x_k − x_{k−1}⟩
    iterate_term: Float[Array, ""]  # the moving average of ‖x_k − x_{k−1}‖²/(η²c)
    gradient_term: Float[Array, ""]  # the moving average of ½‖g_k‖²
    num_skipped: Int[Array, ""]  # measured steps that were not finite

    def verdict(self) -> str:
        """The report in words."""
        times = float(self.gain / self.noise_level)
        if not np.isfinite(times):
            return "Nothing to report: no step was measured, or all of them were rounding error."
        of_noise = f"the gain is {times:.2f} times that of pure noise."
        if times > 1:
            return f"Steps add up: {of_noise} Momentum speeds the run up here."
        return f"Steps do not add up: {of_noise} Momentum only averages here, which may still help."


def track_momentum(
    inner: optax.GradientTransformation,
    decay: float = 0.99,
    *,
    every: int = 1,
    per_leaf: PerLeaf = False,
    averaging: float | None = None,
    b2: float = 0.999,
) -> optax.GradientTransformationExtraArgs:
    """Measures whether an optimizer's momentum pays; `momentum_report` gives the result.

    With u_k = x_{k+1} − x_k, the step before it is rounded to the params' dtype, it keeps
    bias-corrected moving averages of

        ‖u_{k−1}‖²/(η_{k−1}²c_k)      ½‖g_k‖²      ‖u_{k−1}‖²      ⟨g_k, u_{k−1}⟩

    No step is stored. With d_k = z_k − x_k, they follow from ‖g_k‖², ‖d_k‖² and ⟨g_k, d_k⟩ by

        u_k = c_{k+1} (d_k − η_k g_k)      u_{k−1} = c_k/(1 − c_k) d_k

    ‖g_k‖² alone gives v_{k+1}, the value of ‖u_k‖² if every cross term vanished, as for pure noise:

        v_{k+1} = c_{k+1}²(p_k + η_k²‖g_k‖²)      p_{k+1} = (1 − c_{k+1})²(p_k + η_k²‖g_k‖²)

    `inner` is any transformation that holds one member of the family: `spa`, `spa_from_sgdm`, `gpa`
    (its x is measured, not its params), `spa_adamw`, `gpa_adamw`, or a chain with one of them. g_k
    is the update that the member receives, after clipping, preconditioning and decay: under the
    Adam forms, their direction. `optax.sgd` with momentum, `optax.adamw` and others with a state of
    `optax.trace` or `optax.scale_by_adam` are measured as SPA of directions with the same momentum
    and a rate of 1, without Adam's ε and Nesterov's further step. (Adamax and Adopt store something
    else in that state, and cannot be measured.) Wrappers that skip updates, such as
    `optax.MultiSteps`, go around `track_momentum`.

    A step does not count if rounding of the params may be more than a tenth of ‖u_k‖², as with most
    16-bit params. The gain is NaN if no step counts.

    The updates are bit for bit those of `inner` (with `decay_at="z"` on CPU, to an ulp).

    Args:
      inner: the transformation to measure.
      decay: of the averages per measured step, in [0, 1). At 0 only the last step counts.
      every: steps from one measurement to the next, ≥ 1. In between only scalars are computed, and
        ‖g_k‖² is taken as unchanged.
      per_leaf: True for a gauge of each parameter array; or a function from the params to a tree of
        strings (or a prefix of one, as for `optax.partition`) for a gauge of each label.
      averaging: c = 1 − β in (0, 1], for `inner` with Optax's own momentum. None reads it from
        `optax.inject_hyperparams` (`momentum` or `b1`).
      b2: β₂ in [0, 1), for `inner` with Adam's state, to correct the bias of ν. An injected `b2`
        takes precedence.

    Under `optax.inject_hyperparams` name all but `inner` in its `static_args`.

    Returns:
      A transformation whose state is a `TrackMomentumState`: that of `inner`, and the gauge.

    Raises:
      ValueError: if an argument is out of range, or, in `init`, `inner` holds no momentum, more
        than one, or a wrapper that skips updates.

    Examples:
      Two steps with η = 1 and c = 0.5: x goes from 0 to −1, and on to −2 with a gradient of 1.
      ‖u‖²/(η²c) = 2 and ½‖g‖² = 0.5.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import momentum_report, track_momentum
      >>> tx = track_momentum(spa(learning_rate=1.0, averaging=0.5))
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for gradient in (2.0, 1.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> report = momentum_report(state)
      >>> print(f"{report.iterate_term:.3f} {report.gradient_term:.3f} {report.gain:.3f}")
      2.000 0.500 4.000
      >>> print(f"{report.inner_product:.3f} {report.alignment:.3f}")
      -1.000 1.000

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 4 (Insight 1) and
      Figure 2. The noise level, and measuring without a stored step, are this package's.
    """
    tx = _checked_transformation(inner)
    is_member = isinstance(inner.update, (Update, GPAUpdate))
    decay = check_concrete("decay", decay, "in [0, 1)", lambda v: 0 <= v < 1)
    every = check_steps("every", every)
    if averaging is not None:
        is_c = lambda v: 0 < v <= 1
        averaging = check_concrete("averaging", averaging, "None or in (0, 1]", is_c)
        check_averaging(averaging)  # warns if it looks like a momentum
    b2 = check_concrete("b2", b2, "in [0, 1)", lambda v: 0 <= v < 1)

    def init_fn(params: PyTree) -> TrackMomentumState:
        state = inner.init(params)
        _check_watchable(state, params, averaging)
        labels = _labels(per_leaf, params)
        groups = {label: optax.EmptyState() for label in _groups(labels)}
        gauge = _new_gauge(() if labels is None else (len(groups),))
        return TrackMomentumState(state, jnp.zeros([], jnp.int32), gauge, groups)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, TrackMomentumState]:
        if not isinstance(state, TrackMomentumState):
            raise ValueError(f"`state` must be a `TrackMomentumState`, got {type(state).__name__}")
        if per_leaf is not False and params is None:
            raise ValueError("`params` must be passed to `update` under `per_leaf`, got None")
        labels = _labels(per_leaf, params)

        def observed(updates: PyTree, inner_state: PyTree, params: PyTree) -> Any:
            steps = []
            observe = {**extra_args, "observe": steps.append}
            u, now = tx.update(updates, inner_state, params, **observe)
            return u, now, steps[0] if steps else _step_of_optax(inner_state, now, averaging, b2)

        given = (updates, state.inner, params)
        count = jnp.asarray(state.count)
        is_measured = count % every == 0
        apart = lambda: observed(*_behind_a_barrier(given))[2]
        if is_member and every == 1:  # the sums fuse into the update's kernels
            u, now, step = observed(*given)
            fused, by_themselves = lambda: _sums(step, labels), lambda: _sums(apart(), labels)
            # On a GPU such a kernel cannot write x and z in place, but copies them.
            sums = jax.lax.platform_dependent(cuda=by_themselves, rocm=by_themselves, default=fused)
        else:  # from a separate update, so that the real one compiles as without
            u, now = tx.update(*given, **extra_args)
            step, measure = apart(), lambda: _sums(apart(), labels)
            nothing = lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(measure))
            sums = jax.lax.cond(is_measured, measure, nothing) if every > 1 else _sums(step, labels)
        gauge = _measured(state.gauge, step, sums, is_measured, count == 0, decay)
        count = jnp.asarray(optax.safe_increment(count))
        return u, TrackMomentumState(now, count, gauge, state.groups)

    # As in `spa`.
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _checked_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(
            f"`inner` must be a gradient transformation, got a `{type(inner).__name__}`"
        )
    return optax.with_extra_args_support(inner)


def _behind_a_barrier(tree: PyTree) -> PyTree:
    """The same arrays, but XLA treats them as different ones."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = iter(jax.lax.optimization_barrier([leaf for leaf in leaves if is_array(leaf)]))
    return structure.unflatten([next(arrays) if is_array(leaf) else leaf for leaf in leaves])


_OPTAX_MOMENTUM = (optax.TraceState, optax.ScaleByAdamState)
_SKIPS_UPDATES = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)


def _check_watchable(state: PyTree, params: PyTree, averaging: float | None) -> None:
    """Raises unless `inner` has one momentum, of all params, with known c, and skips no updates."""
    for wrapper in find(state, (*_SKIPS_UPDATES, TrackMomentumState)):
        raise ValueError(
            "`inner` must not hold gauges or wrappers that skip updates, which go around"
            f" `track_momentum`, got a `{type(wrapper).__name__}`"
        )
    members, of_optax = find(state, SPAState), find(state, _OPTAX_MOMENTUM)
    if len(members) + len(of_optax) != 1:
        raise ValueError(
            "`inner` must hold one momentum, that of `spa` or a relative, of `optax.trace` or of"
            f" `optax.scale_by_adam`, got {len(members) + len(of_optax)}"
        )
    in_optax = lambda s: s.trace if isinstance(s, optax.TraceState) else s.mu
    (buffer,) = [*(s.z for s in members), *map(in_optax, of_optax)]
    num_watched, num_params = (sum(map(is_float, jax.tree.leaves(t))) for t in (buffer, params))
    if num_watched != num_params:
        raise ValueError(
            "`inner` must hold a momentum of all params, got one of"
            f" {num_watched} of {num_params} arrays: watch that part of it alone"
        )
    if members and averaging is not None:
        raise ValueError(
            f"`averaging` must be left out for an `inner` that has its own c, got {averaging!r}"
        )
    if of_optax:
        _averaging_of(state, averaging)


def _averaging_of(state: PyTree, averaging: float | None) -> Any:
    """The c = 1 − β of Optax's own momentum, as given or injected."""
    beta = _injected(state, ("momentum", "b1"), None)
    if averaging is None and beta is None:
        raise ValueError(
            "`averaging` must be given for an `inner` with Optax's own momentum, whose state does"
            " not hold β: it is 1 − β, got None"
        )
    return 1 - jnp.asarray(beta) if averaging is None else averaging


def _injected(state: PyTree, names: tuple[str, ...], otherwise: Any) -> Any:
    """A hyper-parameter of `optax.inject_hyperparams`."""
    found = [node.hyperparams for node in find(state, INJECTED)]
    values = [hyperparams[name] for hyperparams in found for name in names if name in hyperparams]
    return values[0] if values else otherwise


def _rsqrt(v: Array) -> Array:
    return jnp.where(v > 0, v, jnp.inf) ** -0.5


def _step_of_optax(before: PyTree, after: PyTree, averaging: float | None, b2: float) -> Step:
    """The step of `optax.trace` or `optax.scale_by_adam` as one of SPA with η = 1.

    From m_{k+1} = (1 − c) m_k + g_k, which is −u_k/c. Under Adam m_{k+1} = (1 − c) m_k + c g_k, and
    all is divided by √ν̂_{k+1}. (Adam's ε is left out.)
    """
    if not find(before, _OPTAX_MOMENTUM):
        raise ValueError(
            "`inner` must pass extra arguments of `update` on to its member, as"
            " `optax.GradientTransformationExtraArgs` does, got a wrapper that drops them"
        )
    (old,), (new,) = find(before, _OPTAX_MOMENTUM), find(after, _OPTAX_MOMENTUM)
    c = jnp.asarray(_averaging_of(after, averaging), jnp.float32)
    wide = lambda leaf: jnp.asarray(leaf).astype(wide_dtype(leaf))
    if isinstance(old, optax.TraceState):
        m, m_next, weight = old.trace, new.trace, jnp.ones([])
        scale = jax.tree.map(lambda m: jnp.ones([]), m)
    else:
        m, m_next, weight = old.mu, new.mu, c
        b2 = _injected(after, ("b2",), b2)
        unbiased = 1 - jnp.asarray(b2, jnp.float32) ** jnp.asarray(new.count).astype(jnp.float32)
        scale = jax.tree.map(lambda v: _rsqrt(wide(v) / unbiased.astype(wide(v).dtype)), new.nu)

    def gradient(m: Array, m_next: Array, s: Array) -> Array:
        m, m_next = wide(m), wide(m_next)
        return times(1 / weight, s, m.dtype) * (m_next - times(1 - c, m, m.dtype))

    distance = lambda m, s: times(-(1 - c) / weight, s, wide(m).dtype) * wide(m)
    rounding = lambda m: jnp.zeros_like(wide(m))  # m is stored, not a difference
    g, d = map_trained(gradient, m, m_next, scale), map_trained(distance, m, scale)
    return Step(g, d, map_trained(rounding, m), jnp.ones([]), c, None, {}, c)


def _labels(per_leaf: Any, params: PyTree) -> dict[str, str] | None:
    """The label of each trained parameter by its path; None if all share one gauge."""
    if per_leaf is False:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [path for path, leaf in leaves if is_float(leaf)]
    if per_leaf is True:
        simple = lambda path: keystr(path, simple=True, separator=".").removesuffix(".value")
        are_unique = len(set(map(simple, paths))) == len(paths)
        return {keystr(path): (simple if are_unique else keystr)(path) for path in paths}
    if not callable(per_leaf):
        raise ValueError(
            f"`per_leaf` must be a bool or a function from params to labels, got {per_leaf!r}"
        )
    of_subtree = lambda label, subtree: jax.tree.map(lambda _: label, subtree)
    labelled = jax.tree.map(of_subtree, per_leaf(params), params)
    labels = {keystr(path): label for path, label in jax.tree_util.tree_leaves_with_path(labelled)}
    for path, label in labels.items():
        if not isinstance(label, str):
            raise ValueError(f"`per_leaf` must return strings as labels, got {label!r} for {path}")
    return {keystr(path): labels[keystr(path)] for path in paths}


def _groups(labels: dict[str, str] | None) -> list[str]:
    return [] if labels is None else sorted(set(labels.values()))


def _new_gauge(shape: tuple[int, ...]) -> Gauge:
    """The gauge before the first step."""
    zero = lambda: jnp.zeros(shape, jnp.float32)  # separate, so that all can be donated
    means = Means(zero(), zero(), zero(), zero())
    alignment = AlignmentMeans(zero(), zero(), zero(), zero())
    none = jnp.full(shape, -1, jnp.float32)
    skipped = jnp.zeros(shape, jnp.int32)
    return Gauge(none, zero(), zero(), zero(), means, alignment, skipped)


def _sums(step: Step, labels: dict[str, str] | None) -> Sums:
    """‖g_k‖², ‖d_k‖² and ⟨g_k, d_k⟩ over all params, or for each group."""

    def of_leaf(d: Array, g: Array, rounding: Array) -> Sums:
        g = g.astype(wide_dtype(g, d))
        dot = lambda a, b: jnp.sum(jnp.real(a * jnp.conj(b))).astype(jnp.float32)
        return Sums(dot(g, g), dot(d, d), dot(g, d), dot(rounding, rounding))

    by_leaf = jax.tree_util.tree_leaves_with_path(
        map_trained(of_leaf, step.distance, step.gradient, step.rounding),
        is_leaf=lambda n: isinstance(n, Sums),
    )
    zero = Sums(*(jnp.zeros([], jnp.float32) for _ in Sums._fields))
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    if labels is None:
        return functools.reduce(add, (sums for _, sums in by_leaf), zero)
    totals = dict.fromkeys(_groups(labels), zero)
    for path, sums in by_leaf:
        if keystr(path) not in labels:
            raise ValueError(
                "`per_leaf` must be False for an `inner` that changes the tree of params, got one"
                f" with an array at {keystr(path) or 'its root'}"
            )
        label = labels[keystr(path)]
        totals[label] = add(totals[label], sums)
    of_groups = lambda i: jnp.array([sums[i] for sums in totals.values()], jnp.float32)
    return Sums(*map(of_groups, range(len(Sums._fields))))


def _measured(
    gauge: Gauge,
    step: Step,
    sums: Sums,
    is_measured: Bool[Array, ""],
    is_first: Bool[Array, ""],
    decay: float,
) -> Gauge:
    """The gauge after a step."""
    f32 = lambda scalar: jnp.asarray(0 if scalar is None else scalar, jnp.float32)
    eta, c, delta, c_before = map(f32, (step.eta, step.p, step.delta, step.c_before))
    # r is the same for all dtypes, unless momentum restarts for some.
    r = f32(functools.reduce(jnp.minimum, step.r.values() or [jnp.ones([])]))
    sq_g, sq_d, g_d, sq_rounding = sums
    is_finite = jnp.isfinite(sq_g) & jnp.isfinite(sq_d) & jnp.isfinite(g_d)
    is_known = is_measured & is_finite
    one = jnp.ones_like(sq_g)

    def averaged(means: Any, terms: Any, counts: Array) -> Any:
        average = lambda mean, term: decay * mean + (1 - decay) * term
        new = lambda mean, term: jnp.where(counts, average(mean, term), mean)
        return jax.tree.map(new, means, terms)

    # The last step, or the last measured one.
    terms = Means(gauge.iterate, gauge.noise, sq_g / 2, one)
    means = averaged(gauge.means, terms, is_known & (gauge.iterate >= 0))

    # u_{k−1} = c_k/(1 − c_k) d_k, if d_k is more than rounding error.
    follows = is_known & (c_before > 0) & (c_before < 1) & (r > 0) & (step.delta is None)
    follows &= sq_rounding < 1e-4 * sq_d
    s = c_before / jnp.where(c_before < 1, 1 - c_before, 1) / jnp.where(r > 0, r, 1)
    alignment = averaged(gauge.alignment, AlignmentMeans(s * g_d, s**2 * sq_d, sq_g, one), follows)
    # Otherwise the average restarts.
    alignment = jax.tree.map(lambda a: jnp.where(is_measured & ~follows, 0, a), alignment)

    # ‖u_k‖² for u_k = c d_k − (c η + δ) g_k, and its value without cross terms.
    b = c * eta + delta
    square = jnp.maximum(c**2 * sq_d - 2 * c * b * g_d + b**2 * sq_g, 0)
    gradient = jnp.where(is_known, sq_g, gauge.gradient)
    before = jnp.where(is_first & is_known, sq_d, r**2 * gauge.spread)
    noise = c**2 * before + b**2 * gradient
    spread = (1 - c) ** 2 * before + ((1 - c) * eta - delta) ** 2 * gradient
    # In units of η²c, unless η or c is 0.
    scale = eta**2 * c
    unit = jnp.where(scale > 0, scale, 1)
    iterate, level = square / unit, noise / unit
    has_unit = is_known & (scale > 0) & jnp.isfinite(iterate) & jnp.isfinite(level)
    has_unit &= c**2 * sq_rounding <= 0.1 * square  # else it may be only rounding error
    return Gauge(
        iterate=jnp.where(is_measured, jnp.where(has_unit, iterate, -1), gauge.iterate),
        noise=jnp.where(has_unit, level, gauge.noise),
        gradient=gradient,
        spread=jnp.where(jnp.isfinite(spread), spread, gauge.spread),
        means=means,
        alignment=alignment,
        num_skipped=gauge.num_skipped + (is_measured & ~is_finite).astype(jnp.int32),
    )


def momentum_report(opt_state: PyTree) -> MomentumReport:
    """Reports the measurements of `track_momentum`: whether steps add up.

        gain = ‖x_k − x_{k−1}‖²/(η²c) over ½‖g_k‖²      alignment = cos(−g_k, x_k − x_{k−1})

    Each term is a moving average. If gain / noise level is above 1, steps add up. At or below 1
    they do not, which is no reason to drop momentum. The noise level is 2/(2 − c) for a constant c,
    1.053 at c = 0.1 (the paper's 1 is the limit for small c). It changes with η, c and the
    gradients' size.

    Under the Adam forms g_k is the direction, the gradient over √ν: the sums then weigh all params
    alike, whatever the scale of their gradients.

    Args:
      opt_state: a state that holds one `TrackMomentumState`, in any chain or wrapper.

    Returns:
      Scalars, NaN until something has been measured; under `per_leaf` over all params together. May
      be called under `jax.jit`, to return them from the training step. `verdict()` puts them into a
      sentence, outside of it.

    Raises:
      ValueError: if `opt_state` does not hold exactly one `TrackMomentumState`.

    Examples:
      If all gradients are equal, every step tends to −ηg and the gain to 2/c:

      >>> import jax
      >>> import jax.numpy as jnp
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

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 4 (Insight 1) and
      Figure 2.
    """
    gauge = _gauge_of(opt_state)
    if not only(opt_state, TrackMomentumState, "opt_state").groups:
        return _report(gauge)
    # Sums of squares add up, if all groups have some.
    has_all = lambda means: means.weight.min(initial=1) > 0
    together = lambda means: jax.tree.map(
        lambda of: jnp.where(has_all(means), of.sum(), 0), means
    )._replace(weight=means.weight.max(initial=0))
    return _report(
        gauge._replace(
            means=together(gauge.means),
            alignment=together(gauge.alignment),
            num_skipped=gauge.num_skipped.max(initial=0),
        )
    )


def momentum_reports(opt_state: PyTree) -> dict[str, MomentumReport]:
    """The report of each parameter array, or each label, of `track_momentum(…, per_leaf=…)`.

    Args:
      opt_state: a state that holds one `TrackMomentumState`, in any chain or wrapper.

    Returns:
      A `MomentumReport` by label, in alphabetical order. The label of an array is its path.

    Raises:
      ValueError: if `opt_state` does not hold exactly one `TrackMomentumState` with `per_leaf`.

    Examples:
      Momentum helps b, whose gradients agree, and not w, whose gradients alternate:

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import momentum_reports, track_momentum
      >>> tx = track_momentum(spa(1.0, averaging=0.5), per_leaf=True)
      >>> params = {"b": jnp.zeros(1), "w": jnp.zeros(1)}
      >>> state = tx.init(params)
      >>> for k in range(10):
      ...     gradients = {"b": jnp.ones(1), "w": (-1.0) ** k * jnp.ones(1)}
      ...     updates, state = tx.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> for label, report in momentum_reports(state).items():
      ...     print(label, bool(report.gain > report.noise_level))
      b True
      w False
    """
    gauge, state = _gauge_of(opt_state), only(opt_state, TrackMomentumState, "opt_state")
    if not state.groups:
        raise ValueError(
            "`opt_state` must come from `track_momentum` with `per_leaf`, got one without"
        )
    report = _report(gauge)
    of_group = lambda i: MomentumReport(*(values[i] for values in report))
    return {label: of_group(i) for i, label in enumerate(sorted(state.groups))}


def _gauge_of(opt_state: PyTree) -> Gauge:
    state = only(opt_state, TrackMomentumState, "opt_state")
    gauge = jax.tree.map(jnp.asarray, state.gauge)  # under Flax nnx the leaves are variables
    if gauge.iterate.shape not in ((), (len(state.groups),)) or jnp.ndim(scalar_of(state.count)):
        raise ValueError("`opt_state` must be of one run, got a batch of them: use `jax.vmap`")
    return gauge


def _report(gauge: Gauge) -> MomentumReport:
    means, alignment = gauge.means, gauge.alignment
    cosine = -alignment.inner_product / jnp.sqrt(alignment.step) / jnp.sqrt(alignment.gradient)
    return MomentumReport(
        gain=means.iterate / means.gradient,
        noise_level=means.noise / means.gradient,
        alignment=cosine,
        inner_product=alignment.inner_product / alignment.weight,
        iterate_term=means.iterate / means.weight,
        gradient_term=means.gradient / means.weight,
        num_skipped=gauge.num_skipped,
    )


def plot_momentum(
    reports: Mapping[int, MomentumReport | Mapping[str, MomentumReport]],
) -> "Figure":
    """Plots gain / noise level and alignment over a run.

    Args:
      reports: results of `momentum_report` or `momentum_reports`, by step. A label "all" is drawn
        thick.

    Returns:
      A figure; this needs matplotlib.

    Raises:
      ValueError: if there is no report, or labels differ from step to step.

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

    if not isinstance(reports, Mapping):
        raise ValueError(f"`reports` must be a mapping from steps, got a {type(reports).__name__}")
    as_mapping = lambda report: {"": report} if isinstance(report, MomentumReport) else report
    by_step = {step: as_mapping(report) for step, report in sorted(reports.items())}
    labels = list(next(iter(by_step.values()), ()))
    if not labels or any(list(of_step) != labels for of_step in by_step.values()):
        raise ValueError(
            f"`reports` must hold the same labels at every step, at least one, got {labels!r} first"
        )
    figure, (top, bottom) = plt.subplots(2, sharex=True, layout="constrained", figsize=(8, 6))
    for i, label in enumerate(labels):
        of_label = [of_step[label] for of_step in by_step.values()]
        gains, levels = (
            np.array([float(getattr(report, field)) for report in of_label])
            for field in ("gain", "noise_level")
        )
        ratio = np.divide(gains, levels, np.full(len(gains), np.nan), where=levels > 0)
        # From blue to yellow, in the order of the labels.
        color = "black" if label in ("", "all") else plt.get_cmap("plasma")(i / len(labels))
        style = {"color": color, "linewidth": 2.5 if color == "black" else 1.2, "label": label}
        top.plot(list(by_step), ratio, **style)
        bottom.plot(list(by_step), [float(report.alignment) for report in of_label], **style)
    top.set_title("Steps add up where gain over noise level is above 1")
    top.set_ylabel("gain / noise level")
    top.set_yscale("log")
    top.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    top.yaxis.set_major_formatter("{x:g}")
    top.yaxis.set_minor_formatter("")
    top.axhline(1, color="C3", linestyle="--")
    bottom.set_ylabel("alignment, cos(−g, last step)")
    bottom.axhline(0, color="C3", linestyle="--")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    if labels != [""]:
        figure.legend(*top.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def release_momentum(
    opt_state: PyTree, params: PyTree, learning_rate: optax.ScalarOrSchedule
) -> tuple[optax.GradientTransformationExtraArgs, PyTree]:
    """Replaces SPA at c = 1 by plain SGD, without z: the same iterates, half the memory.

        x_{k+1} = z_{k+1} = x_k − η_k g_k

    Args:
      opt_state: a state that holds one `SPAState` with c = 1, in any chain or wrapper, but not in
        `optax.inject_hyperparams`. (`spa_from_sgdm` keeps c below 1 even at β = 0.)
      params: x_k, of more than 16 bits, like z. (For narrower params z is the master copy.)
      learning_rate: η_k, a scalar or a schedule of the count k, which continues. If the optimizer
        has changed η (`hold="alpha"`), pass the changed η.

    Returns:
      `optax.sgd(learning_rate)`, to replace `spa`, `spa_from_sgdm` or `track_momentum` in the same
      chain; and the new state of that chain.

    Raises:
      ValueError: if `opt_state` does not hold exactly one `SPAState`, or holds it in
        `optax.inject_hyperparams`; if the last step had c < 1; if params or z have 16 bits or
        fewer; if `learning_rate` is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import release_momentum
      >>> chain = lambda tx: optax.chain(optax.clip(1.0), tx)
      >>> params = jnp.array([3.0])
      >>> tx = chain(spa(0.5, averaging=1.0))
      >>> _, state = tx.update(jnp.array([1.0]), tx.init(params), params)
      >>> sgd, state = release_momentum(state, params, 0.5)
      >>> updates, state = chain(sgd).update(jnp.array([1.0]), state, params)
      >>> print(updates)
      [-0.5]

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2: c = 1 is SGD.
    """
    check_rate("learning_rate", learning_rate)
    spa_state = only(opt_state, SPAState, "opt_state")
    if any(find(node, SPAState) for node in find(opt_state, INJECTED)):
        raise ValueError(
            "`opt_state` must not hold SPA inside of `optax.inject_hyperparams`, whose"
            " hyper-parameters `optax.sgd` does not have"
        )
    if has_narrow(params) or has_narrow(spa_state.z):
        raise ValueError(
            "`params` and z must have more than 16 bits, got narrower ones: without z the"
            " iterates would change"
        )
    c = scalar_of(spa_state.c)
    if isinstance(c, Tracer):
        raise ValueError("`opt_state` must be concrete, not traced: the result depends on c")
    if not jnp.all(c == 1):
        raise ValueError(f"`opt_state` must come from a step with c = 1, got c = {c}")
    tx: Any = optax.sgd(learning_rate)
    sgd_state = tx.init(params)
    if callable(learning_rate):
        count = like(spa_state.count, [jnp.array(scalar_of(spa_state.count), copy=True)])
        sgd_state = optax.tree.set(sgd_state, count=count)
    state = replace_nodes(opt_state, TrackMomentumState, lambda node: node.inner)
    return tx, replace_nodes(state, (GPAState, SPAState), lambda _: sgd_state)
