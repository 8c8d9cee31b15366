"""When momentum pays: the gauge of the paper's Insight 1, and what to do about what it says."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from spa_optax._checks import (
    check_above_1,
    check_averaging,
    check_choice,
    check_concrete,
    check_dtype,
    check_key,
    check_rate,
    check_steps,
)
from spa_optax._convert import INJECTED, like
from spa_optax._core import (
    GPAState,
    Rule,
    SPAState,
    StepInfo,
    Update,
    advance,
    find,
    init,
    map_trained,
    only,
    scalar_of,
    times,
    trained,
)
from spa_optax._hyperparams import at_count
from spa_optax._precision import has_narrow, wide_dtype
from spa_optax._schedules import Hold, eta_at_constant_alpha, ramp_up
from spa_optax._spa import spa_scalars


class Means(NamedTuple):
    """Moving averages, each still to be divided by `weight`, the sum of their weights."""

    iterate: Float[Array, ""]  # of ‖x_k − x_{k−1}‖²/(η²c)
    noise: Float[Array, ""]  # of the same, if every cross term vanished
    gradient: Float[Array, ""]  # of ½‖g_k‖²
    weight: Float[Array, ""]


class AlignmentMeans(NamedTuple):
    """Moving averages over steps at which ⟨g_k, x_k − x_{k−1}⟩ is known, to be divided alike."""

    inner_product: Float[Array, ""]  # of ⟨g_k, x_k − x_{k−1}⟩
    step: Float[Array, ""]  # of ‖x_k − x_{k−1}‖²
    gradient: Float[Array, ""]  # of ‖g_k‖²
    weight: Float[Array, ""]


class TrackMomentumState(NamedTuple):
    """State of `track_momentum`: that of SPA, and scalars."""

    inner: SPAState
    step: Float[Array, ""]  # ‖x_k − x_{k−1}‖²; −1 where it is not known
    noise: Float[Array, ""]  # v_k, what it would be if every cross term vanished
    spread: Float[Array, ""]  # p_k, what ‖z_k − x_k‖² would be in that case
    means: Means
    alignment: AlignmentMeans
    num_skipped: Int[Array, ""]  # steps with a ‖g_k‖² or ‖u_k‖² that was not finite


class MomentumReport(NamedTuple):
    """What `momentum_report` reads off; NaN where there is nothing to go by yet."""

    gain: Float[Array, ""]  # iterate_term / gradient_term: the ratio of the paper's Figure 2
    noise_level: Float[Array, ""]  # the gain of gradients that are nothing but noise
    alignment: Float[Array, ""]  # the cosine between −g_k and x_k − x_{k−1}
    inner_product: Float[Array, ""]  # the moving average of ⟨g_k, x_k − x_{k−1}⟩
    iterate_term: Float[Array, ""]  # the moving average of ‖x_k − x_{k−1}‖²/(η²c)
    gradient_term: Float[Array, ""]  # the moving average of ½‖g_k‖²
    num_skipped: Int[Array, ""]  # steps with a ‖g_k‖² or ‖u_k‖² that was not finite


def track_momentum(
    inner: optax.GradientTransformation, decay: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    """Keeps the averages that tell when momentum pays; `momentum_report` reads them.

    With u_k = x_{k+1} − x_k the step, before it is rounded to the params' dtype, bias-corrected
    moving averages of

        ‖u_{k−1}‖²/(η_{k−1}²c_k)      ½‖g_k‖²      ‖u_{k−1}‖²      ⟨g_k, u_{k−1}⟩

    The inner product needs no buffer. It follows from ‖u_k‖², ‖u_{k−1}‖² and ‖g_k‖² by

        u_k = a u_{k−1} − b g_k        a = c_{k+1}(1/c_k − 1)      b = c_{k+1}η_k

    times r for a z that was moved by r. And from ‖g_k‖² alone, what ‖u_k‖² would be if every cross
    term vanished, as for gradients that are nothing but noise:

        v_{k+1} = c_{k+1}²(p_k + η_k²‖g_k‖²)      p_{k+1} = (1 − c_{k+1})²(p_k + η_k²‖g_k‖²)

    The updates are those of `inner`, to the bit. Wrap SPA itself, not a chain, so that what is
    tracked is the gradient that it receives and the step that it returns:
    `optax.chain(optax.add_decayed_weights(1e-4), track_momentum(spa(1.0)))`. The result goes into
    chains and wrappers like any other.

    The inner product is NaN, and its average begins anew, where it does not follow: after c_k = 1,
    where there is no momentum to align with, and where momentum was restarted. With Nesterov
    momentum, and where params or z have 16 bits or fewer, it never does. Steps must be well above
    the rounding of params. Where they are not, as with many params of 16 bits, x lags behind z, and
    the gain is too high.

    Args:
      inner: what `spa` or `spa_from_sgdm` returns.
      decay: of the averages, in [0, 1). At 0 they are the values of the last step.

    Returns:
      A transformation whose state is a `TrackMomentumState`: that of `inner`, and scalars.

    Raises:
      ValueError: if `inner` is something else, or `decay` is out of range.

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
      Figure 2. The noise level and the inner product by recursion are this package's.
    """
    member = inner.update
    if not isinstance(member, Update):
        raise ValueError(
            "`inner` must be what `spa` or `spa_from_sgdm` returns, with chains and wrappers around"
            f" `track_momentum`, got a `{type(inner).__name__}`"
        )
    decay = _check_decay(decay)

    def init_fn(params: PyTree) -> TrackMomentumState:
        return _untracked(inner.init(params))  # pyright: ignore[reportArgumentType]

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, TrackMomentumState]:
        del extra_args
        if not isinstance(state, TrackMomentumState):
            raise ValueError(f"`state` must be a `TrackMomentumState`, got {type(state).__name__}")
        u, state, _ = _track(updates, state, params, member.rule, member.rounding_key, decay)
        return u, state

    # As in `spa`.
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _check_decay(decay: float) -> float:
    return check_concrete("decay", decay, "in [0, 1)", lambda v: 0 <= v < 1)


def _untracked(inner: SPAState) -> TrackMomentumState:
    """The state before the first step."""
    zero = lambda: jnp.zeros([], jnp.float32)  # one each, so that all can be donated
    return TrackMomentumState(
        inner=inner,
        step=jnp.full([], -1, jnp.float32),
        noise=zero(),
        spread=zero(),
        means=Means(zero(), zero(), zero(), zero()),
        alignment=AlignmentMeans(zero(), zero(), zero(), zero()),
        num_skipped=jnp.zeros([], jnp.int32),
    )


def _track(
    updates: PyTree,
    state: TrackMomentumState,
    params: PyTree | None,
    rule: Rule,
    rounding_key: PRNGKeyArray | None,
    decay: float,
) -> tuple[PyTree, TrackMomentumState, Bool[Array, ""]]:
    """The update and the state; and whether this step has added to the averages."""
    u, inner, info = advance(updates, state.inner, params, rule, rounding_key)
    g, x, z_k = trained(updates, params, info.z)
    has_alignment = info.delta is None and not has_narrow(x) and not has_narrow(inner.z)
    squares = _square(g, x), _square(_step_from_z(g, x, z_k, info), x)
    return u, *_averaged(state, inner, info, *squares, has_alignment, decay)


def _step_from_z(g: PyTree, x: PyTree, z_k: PyTree, info: StepInfo) -> PyTree:
    """u_k = p (z_k − x_k − η g_k) − δ g_k, before rounding.

    From what the update reads, so that its kernel adds up the squares as well. Of u itself, or of
    z_{k+1}, XLA makes a second kernel: 1.4 times the cycles on a TPU, and a copy of u on a GPU.
    """

    def u(z: Array, x: Array, g: Array) -> Array:
        distance = (z - x.astype(z.dtype)) - times(info.eta, g, z.dtype)
        u = times(info.p, distance, z.dtype)
        return u if info.delta is None else u - times(info.delta, g, z.dtype)

    return map_trained(u, z_k, x, g)


def _square(tree: PyTree, params: PyTree) -> Float[Array, ""]:
    """‖·‖² over all that is not None and belongs to floating-point params, as float32."""

    def square(_: Array, leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        leaf = leaf.astype(wide_dtype(leaf))
        return jnp.sum(jnp.real(leaf * jnp.conj(leaf))).astype(jnp.float32)

    squares = map_trained(square, params, tree)
    return sum(jax.tree.leaves(squares), jnp.zeros([], jnp.float32))


def _averaged(
    state: TrackMomentumState,
    inner: SPAState,
    info: StepInfo,
    sq_gradient: Float[Array, ""],
    sq_update: Float[Array, ""],
    has_alignment: bool,
    decay: float,
) -> tuple[TrackMomentumState, Bool[Array, ""]]:
    """The new state from ‖g_k‖² and ‖u_k‖², and whether the averages have a new term."""
    f32 = lambda scalar: jnp.asarray(0 if scalar is None else scalar, jnp.float32)
    eta, c, delta = f32(info.eta), f32(info.p), f32(info.delta)
    # Those of all dtypes are the same, but where momentum restarts for some.
    r = f32(functools.reduce(jnp.minimum, info.r.values() or [jnp.ones([])]))
    eta_before, c_before = state.inner.eta, state.inner.c
    is_finite = jnp.isfinite(sq_gradient) & jnp.isfinite(sq_update)
    one = jnp.ones([], jnp.float32)
    average = lambda mean, term: decay * mean + (1 - decay) * term

    # The terms of the step that led here, which has no scale where η or c was 0.
    scale = eta_before**2 * c_before
    counts = is_finite & (state.step >= 0) & (scale > 0)
    safe = jnp.where(scale > 0, scale, 1)
    terms = Means(state.step / safe, state.noise / safe, sq_gradient / 2, one)
    counts &= jnp.isfinite(terms.iterate) & jnp.isfinite(terms.noise)
    means = jax.tree.map(
        lambda mean, term: jnp.where(counts, average(mean, term), mean), state.means, terms
    )

    # ‖u_k‖² = ‖a u_{k−1} − b g_k‖², unless u_k depends on more than that.
    a, b = r * c * (1 / jnp.where(c_before > 0, c_before, 1) - 1), c * eta
    squares, safe = a**2 * state.step + b**2 * sq_gradient, jnp.where(a * b > 0, 2 * a * b, 1)
    inner_product = (squares - sq_update) / safe
    # The squares are known to some eps. Beside the bound of Cauchy and Schwarz that must be little,
    # and the bound must hold.
    error = float(jnp.finfo(jnp.float32).eps) * squares / safe
    bound = jnp.sqrt(jnp.maximum(state.step, 0)) * jnp.sqrt(sq_gradient)
    follows = is_finite & (state.step >= 0) & (a * b > 0) & (error < 1e-4 * bound)
    follows &= jnp.abs(inner_product) < 1.001 * bound
    follows &= has_alignment
    terms = AlignmentMeans(inner_product, state.step, sq_gradient, one)
    alignment = jax.tree.map(
        lambda mean, term: jnp.where(follows, average(mean, term), 0), state.alignment, terms
    )

    spread = r**2 * state.spread
    noise = c**2 * spread + (c * eta + delta) ** 2 * sq_gradient
    spread = (1 - c) ** 2 * spread + ((1 - c) * eta - delta) ** 2 * sq_gradient
    state = TrackMomentumState(
        inner=inner,
        step=jnp.where(is_finite, sq_update, -1),
        noise=jnp.where(is_finite, noise, state.noise),
        spread=jnp.where(is_finite, spread, state.spread),
        means=means,
        alignment=alignment,
        num_skipped=state.num_skipped + jnp.where(is_finite, 0, 1),
    )
    return state, counts & (sq_gradient > 0)


def momentum_report(opt_state: PyTree) -> MomentumReport:
    """What `track_momentum` has found: whether momentum cancels noise.

        gain = ‖x_k − x_{k−1}‖²/(η²c) over ½‖g_k‖²      alignment = cos(−g_k, x_k − x_{k−1})

    each term a moving average. Gain over noise level above 1 means that steps add up, and that
    momentum pays; at or below 1 that it no longer does. The noise level is 2/(2 − c) for a constant
    c, 1.053 at c = 0.1 (the paper's "noise level of 1" is without its cross terms), and moves where
    η, c or the gradients' size change.

    Args:
      opt_state: a state that holds one `TrackMomentumState`, in any chain or wrapper.

    Returns:
      Scalars, NaN as long as there is nothing to go by. May be called under `jax.jit`, to return
      them from the training step.

    Raises:
      ValueError: if `opt_state` does not hold just one `TrackMomentumState`.

    Examples:
      Under gradients that all point one way every step comes to be ηg, and the gain to be 2/c:

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

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 4 (Insight 1) and
      Figure 2.
    """
    state = only(opt_state, TrackMomentumState, "opt_state")
    # Under Flax nnx the leaves are variables.
    scalars = (state.means, state.alignment, state.num_skipped)
    means, alignment, num_skipped = jax.tree.map(jnp.asarray, scalars)
    cosine = -alignment.inner_product / jnp.sqrt(alignment.step) / jnp.sqrt(alignment.gradient)
    return MomentumReport(
        gain=means.iterate / means.gradient,
        noise_level=means.noise / means.gradient,
        alignment=cosine,
        inner_product=alignment.inner_product / alignment.weight,
        iterate_term=means.iterate / means.weight,
        gradient_term=means.gradient / means.weight,
        num_skipped=num_skipped,
    )


class UntilNoiseState(NamedTuple):
    """State of `spa_until_noise`."""

    tracked: TrackMomentumState
    num_quiet: Int[Array, ""]  # steps in a row with the gain at noise level
    dropped_at: Int[Array, ""]  # the count from which c rises; −1 while momentum is kept


def spa_until_noise(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    *,
    tolerance: float = 0.05,
    patience: int = 100,
    hold: Hold = "eta",
    rate: float | None = 1.01,
    decay: float = 0.99,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SPA that drops momentum, by c → 1, once its own gain says that momentum no longer pays.

    That is, once for `patience` steps in a row

        gain ≤ (1 + tolerance) · noise level

    not counting the first 5/c steps, in which the gain only settles, nor steps that measure
    nothing: without a gradient, after a step with η = 0, or where something is not finite. From
    then on c is multiplied by `rate` at every step, until it is 1. See `momentum_report`, which
    reads this one's state too, and `momentum_drop`, which does the same at a step that is given.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      tolerance: ≥ 0.
      patience: steps, ≥ 1.
      hold: "eta" keeps the effective step; "alpha" keeps α = ηc, and divides η by what c rises by.
      rate: > 1; None for an abrupt drop.
      decay: of the moving averages, in [0, 1).
      state_dtype: of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`.

    Under `optax.inject_hyperparams` name `tolerance`, `patience`, `rate`, `decay` and
    `rounding_key` in its `static_args`.

    Returns:
      A transformation whose state is an `UntilNoiseState`. Once its `dropped_at` is not negative
      momentum is on its way out, and once c is 1 `release_momentum` frees its memory.

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      Gradients of alternating sign are worse than noise: dropped after 5/c steps and `patience`.

      >>> import jax.numpy as jnp
      >>> from spa_optax.diagnostics import spa_until_noise
      >>> tx = spa_until_noise(1.0, averaging=0.5, patience=3, rate=None)
      >>> params = jnp.zeros(1)
      >>> state = tx.init(params)
      >>> for k in range(20):
      ...     _, state = tx.update((-1.0) ** k * jnp.ones(1), state, params)
      >>> print(state.dropped_at, state.tracked.inner.c)
      13 1.0

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 4 (Insight 1) and
      Figure 3, where momentum is dropped after the first epoch.
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    rule = "finite and >= 0"
    tolerance = check_concrete("tolerance", tolerance, rule, lambda v: 0 <= v < float("inf"))
    patience = check_steps("patience", patience)
    check_choice("hold", hold, Hold)
    if rate is not None:
        rate = check_above_1("rate", rate)
    check_dtype(state_dtype)
    check_key(rounding_key)
    decay = _check_decay(decay)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def init_fn(params: PyTree) -> UntilNoiseState:
        return UntilNoiseState(
            tracked=_untracked(init(params, state_dtype)),
            num_quiet=jnp.zeros([], jnp.int32),
            dropped_at=jnp.full([], -1, jnp.int32),
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, UntilNoiseState]:
        del extra_args
        if not isinstance(state, UntilNoiseState):
            raise ValueError(f"`state` must be an `UntilNoiseState`, got {type(state).__name__}")
        count = jnp.asarray(state.tracked.inner.count)
        eta, before = eta_at(count), c_at(count)
        num_rises = jnp.where(state.dropped_at >= 0, count - state.dropped_at + 1, 0)
        c = ramp_up(before, num_rises, rate)
        if hold == "alpha":
            eta = eta_at_constant_alpha(eta, before, c)
        rule: Any = lambda inner, _: spa_scalars(eta, c, inner)
        updates, now, measured = _track(updates, state.tracked, params, rule, rounding_key, decay)
        # The gain and the noise level share their denominator.
        is_quiet = now.means.iterate <= (1 + tolerance) * now.means.noise
        is_quiet &= count.astype(before.dtype) * before >= 5
        num_quiet = jnp.where(is_quiet, state.num_quiet + 1, 0)
        num_quiet = jnp.where(measured, num_quiet, state.num_quiet)
        drops = (state.dropped_at < 0) & (num_quiet >= patience)
        dropped_at = jnp.where(drops, jnp.asarray(now.inner.count), state.dropped_at)
        return updates, UntilNoiseState(now, num_quiet, dropped_at)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def release_momentum(
    opt_state: PyTree, params: PyTree, learning_rate: optax.ScalarOrSchedule
) -> tuple[optax.GradientTransformationExtraArgs, PyTree]:
    """Plain SGD in the place of SPA with c = 1, without z: the same iterates, half the memory.

        x_{k+1} = z_{k+1} = x_k − η_k g_k

    Args:
      opt_state: a state that holds one `SPAState` with c = 1, in any chain or wrapper, but not in
        `optax.inject_hyperparams`. (`spa_from_sgdm` keeps c below 1 at β = 0, too.)
      params: x_k, of more than 16 bits, as z. (Beside narrower ones z is the master copy.)
      learning_rate: η_k, a scalar or a schedule of the count k, which goes on. With an η that the
        optimizer has changed (`hold="alpha"`), that η.

    Returns:
      `optax.sgd(learning_rate)`, to put where `spa`, `spa_from_sgdm`, `track_momentum` or
      `spa_until_noise` stood, in the same chain; and the state of that chain, which holds the state
      of `optax.sgd` in the place of theirs.

    Raises:
      ValueError: if `opt_state` does not hold just one `SPAState`, or holds it where it must not;
        the last step had c < 1; params or z have 16 bits or fewer; `learning_rate` is out of range.

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
            "`params` and z must have more than 16 bits, got narrower ones: without z, or on from"
            " its rounding, the iterates would not be the same"
        )
    c = scalar_of(spa_state.c)
    if isinstance(c, Tracer):
        raise ValueError("`opt_state` must be concrete, not traced: what is returned depends on c")
    if not jnp.all(c == 1):
        raise ValueError(f"`opt_state` must come from a step with c = 1, got c = {c}")
    tx: Any = optax.sgd(learning_rate)
    sgd_state = tx.init(params)
    if callable(learning_rate):
        count = like(spa_state.count, [jnp.array(scalar_of(spa_state.count), copy=True)])
        sgd_state = optax.tree.set(sgd_state, count=count)
    kinds = (UntilNoiseState, TrackMomentumState, GPAState, SPAState)
    holds = lambda node: isinstance(node, kinds)
    state = jax.tree.map(lambda node: sgd_state if holds(node) else node, opt_state, is_leaf=holds)
    return tx, state
