"""Momentum via primal averaging, as Optax gradient transformations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray, PyTree, UInt32

from spa_optax._checks import (
    check_averaging,
    check_dtype,
    check_horizon,
    check_key,
    check_momentum,
    check_none_without_z,
    check_rate,
    check_same_tree,
    is_none,
)
from spa_optax._coast import at_count, eta_and_c, look_ahead, positive
from spa_optax._rounding import rounded, seeds_like


class SPAState(NamedTuple):
    """State of `spa` and `spa_from_sgdm`. Its scalars are float32, whatever the params' dtype."""

    count: Int[Array, ""]  # k, the number of steps taken
    z: PyTree[Array]  # z_k, shaped like the params
    eta: Float[Array, ""]  # η_{k−1}, of the last step: to look at, not read again
    c: Float[Array, ""]  # c_k, likewise
    coast: Float[Array, ""]  # w_k: the momentum buffer of SGD+M is m_k = (x_k − z_k) / w_k


class GPAState(NamedTuple):
    """State of `gpa`: that of `spa`, for params y, and where they are between x and z."""

    inner: SPAState
    mu_y: Float[Array, ""]  # that y_k was made with: y_k = μ_y x_k + (1 − μ_y) z_k


def spa(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum via primal averaging (SPA).

    With x_k the params, g_k the gradient at x_k and z_0 = x_0, step k = 0, 1, 2, … is

        z_{k+1} = z_k − η_k g_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}

    For constants this is `optax.sgd(η c, momentum=1 − c)`, the same iterates x_k. For schedules it
    is SGD+M with α_k = η_k c_{k+1} and β_k = (η_{k−1}/η_k)(1 − c_k): see `hyperparams_to_sgdm`.
    To keep the hyper-parameters of SGD+M instead, use `spa_from_sgdm`.

    The params are the point to evaluate and to save; z is in the state. What changes the gradient
    (clipping, `optax.add_decayed_weights`) goes before `spa` in a chain. Nothing that changes the
    update may stand behind it or around it (`optax.contrib.reduce_on_plateau`, `optax.lookahead`):
    z would be left where it was and pull x back. After params have been edited outside the
    optimizer, use `reanchor`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k. To replace SGD+M with learning
        rate α and momentum β, η = α/(1 − β): ten times α at β = 0.9.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k. 1 − momentum; at 1 there
        is no momentum, and z = x.
      state_dtype: dtype of z. None means the params' dtype, but float32 for params of 16 bits or
        fewer, so that z is their float32 master copy and the momentum at once.
      rounding_key: a key of `jax.random`, for stochastic rounding of all that is rounded to params
        or to z: up or down at random, right in the mean. None rounds to nearest. The bits of step k
        follow from the key, k and the place in the array, under any sharding by `jax.jit`. Under
        `jax.vmap` and inside `jax.shard_map` the places start anew in each replica and shard, which
        so share their bits: pass each a key of its own where that matters, for shards
        `jax.random.fold_in(key, jax.lax.axis_index(axis))` (never along an axis on which params are
        replicated). Complex values are rounded to nearest. Name it, as `state_dtype`, in the
        `static_args` of `optax.inject_hyperparams`.

    Returns:
      A transformation whose `update` needs `params`. Its state is an `SPAState`; its updates have
      the params' dtype.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is no real floating-point dtype, or, in
        `update`, `params` is missing or the trees differ.

    Examples:
      With η = 1, c = 0.5 and a gradient of 2: z goes from 10 to 8, and x half of the way to it.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> tx = spa(learning_rate=1.0, averaging=0.5)
      >>> params = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(params), params)
      >>> print(state.z, optax.apply_updates(params, updates))
      8.0 9.0

    References:
      Defazio, Momentum via Primal Averaging: Theoretical Insights and Learning Rate Schedules for
      Non-Convex Optimization, 2020, arXiv:2010.00406, Section 2, "The averaging form of momentum".
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    check_dtype(state_dtype)
    check_key(rounding_key)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def step(state: SPAState, is_master: bool) -> Step:
        del is_master
        eta, c = eta_at(state.count), c_at(state.count)
        # While η = 0 no gradient enters z, and x − z shrinks by 1 − c: as if m stood still.
        coast = (1 - c) * jnp.where(eta > 0, eta, state.coast.astype(eta.dtype))
        return Step(eta, c, coast)

    return primal_averaging(step, state_dtype, rounding_key)


def spa_from_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule = 0.9,
    nesterov: bool = False,
    *,
    horizon: int | None = None,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum, run as primal averaging: `optax.sgd`, with z in hand.

    Takes the hyper-parameters of SGD+M and gives its iterates, whatever the schedules do,

        m_{k+1} = β_k m_k + g_k        x_{k+1} = x_k − α_k m_{k+1}

    through z_k = x_k − w_k m_k, where w_k, the coast, looks ahead in the schedules:

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i      η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    so that z_k is the point at which x would come to rest if every later gradient were zero. For
    constants, and β > 0, η = α/(1 − β) and c = 1 − β. (The recursion of the paper's Theorem 1 gives
    the same iterates through an η_k that blows up; this is the one solution that stays bounded.)
    With Nesterov momentum a_k = α_k β_k is in the place of α_k, η_k is α_k more, and x takes a
    further step of −α_k (1 − c_{k+1}) g_k.

    Schedules are foreseen. What cannot be (`optax.inject_hyperparams`, a schedule edited before a
    run is resumed) is made good by moving z along the line through x and z. The iterates are those
    of SGD+M all the same, but z is not where x would come to rest: after an injected rate has
    fallen, for one, w stays as large as it was, so that a rise again magnifies no rounding. Nor is
    it where nothing lies ahead, β or every later α being 0: z then keeps m all the same.

    With params of 16 bits or fewer w follows an injected rate down, and each move also scales the
    rounding of x in z − x: prefer schedules there. Where a rise that was not foreseen would magnify
    that rounding more than 1/√eps times (2,896 in float32, 11 in bfloat16), momentum restarts from
    zero instead.

    As to chains, and params edited outside the optimizer, see `spa`.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k. A schedule is evaluated under
        `jax.vmap` for counts ahead of k, where NaN and negative values count as 0.
      momentum: β_k in [0, 1), a scalar or a schedule of the count k.
      nesterov: whether to use Nesterov momentum.
      horizon: how many steps to look ahead, at least 1. None means as many as matter where momentum
        is a Python number (β^horizon < 1e-8: 175 steps at β = 0.9, 18,412 at 0.999, at most 32,768)
        and 2,000 where it is a schedule or an array (enough up to β = 0.99). With fewer the
        iterates remain exact, at the cost of moving z. Name it in the `static_args` of
        `optax.inject_hyperparams`.
      state_dtype: dtype of z. None means the params' dtype, but float32 for params of 16 bits or
        fewer, so that z is their float32 master copy and the momentum at once.
      rounding_key: for stochastic rounding, as for `spa`.

    Returns:
      A transformation whose `update` needs `params`. Its state is an `SPAState`; its updates have
      the params' dtype.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is no real floating-point dtype, or, in
        `update`, `params` is missing or the trees differ.

    Examples:
      α = 1, β = 0.5 and a gradient of 2, then none: x goes from 10 to 8, then on by half as much.
      z is at 6 from the start, where that would end.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_from_sgdm
      >>> tx = spa_from_sgdm(learning_rate=1.0, momentum=0.5)
      >>> params = jnp.array(10.0)
      >>> state = tx.init(params)
      >>> for gradient in (2.0, 0.0, 0.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(state.z, params)
      6.0 8.0
      6.0 7.0
      6.0 6.5

    References:
      Defazio, Momentum via Primal Averaging: Theoretical Insights and Learning Rate Schedules for
      Non-Convex Optimization, 2020, arXiv:2010.00406, Theorem 1. The look-ahead is this package's.
    """
    check_rate("learning_rate", learning_rate)
    check_momentum(momentum)
    check_horizon(horizon)
    check_dtype(state_dtype)
    check_key(rounding_key)

    def step(state: SPAState, is_master: bool) -> Step:
        ahead = look_ahead(learning_rate, momentum, state.count, nesterov=nesterov, horizon=horizon)
        alpha, beta, a, coast, unseen = ahead
        held = state.coast.astype(a.dtype)
        foreseen = unseen <= 1e-7
        if not is_master:
            # m = (x − z) / w is known to within rounding of x over w. Where a rise of α or β would
            # come unforeseen, w must not have followed them down. But where z is a master copy
            # first, a w that stays behind would wear it off.
            floor = jnp.maximum(held, alpha / 100)
            coast = jnp.where(foreseen, coast, jnp.maximum(coast, floor))
        coast = positive(coast, a, held)
        # r − 1, in the form that loses the fewest digits where r is close to 1.
        held = jnp.where(held > 0, held, 1)
        shift = ((coast - held) + (beta * a - (1 - beta) * coast)) / held
        # Below this it is rounding: sums over a horizon are known to some tens of eps, and traced
        # numbers that have not changed to (1 − β) eps. Its derivative is not, and is kept.
        rounding = jnp.where(foreseen, 64, 4 * (1 - beta)) * float(jnp.finfo(a.dtype).eps)
        shift -= jnp.where(jnp.abs(shift) > rounding, 0, jax.lax.stop_gradient(shift))
        shift = jnp.where(state.coast > 0, shift, 0)
        eta, c = eta_and_c(ahead, coast, nesterov=nesterov)
        delta = alpha * (1 - c) if nesterov else None
        return Step(eta, c, coast, delta, coasts=(held + shift * held, held))

    return primal_averaging(step, state_dtype, rounding_key)


class Step(NamedTuple):
    """The scalars of one step, all that the members of the family differ in; x are the params.

    z_k     ← x_k + r (z_k − x_k)                        at the start r = 0: z_0 = x_0
    z_{k+1} = z_k − η g_k
    x_{k+1} = x_k + c (z_{k+1} − x_k) − δ g_k
    """

    eta: Float[Array, ""]
    c: Float[Array, ""]
    coast: Float[Array, ""]  # w_{k+1}, for the state
    delta: Float[Array, ""] | None = None  # None: 0
    # r, as a fraction: the coast that z_k has to have, over the one that it has. None: 1
    coasts: tuple[Float[Array, ""], Float[Array, ""]] | None = None
    key: PRNGKeyArray | None = None  # to round this step with; None: to nearest


class SPATransformation(optax.GradientTransformationExtraArgs):
    """What `spa` and `spa_from_sgdm` return. It also tells what a step was, for `diagnostics`."""

    advance: Callable[[PyTree, SPAState, PyTree], tuple[PyTree, SPAState, Step]]


def primal_averaging(
    step: Callable[[SPAState, bool], Step],
    state_dtype: DTypeLike | None,
    rounding_key: PRNGKeyArray | None,
) -> SPATransformation:
    """The transformation of one member of the family: all that a step is not told by `Step`."""

    def init_fn(params: PyTree) -> SPAState:
        if jax.tree_util.all_leaves([params]) and not is_float(params):
            dtype = jnp.result_type(params)
            raise ValueError(f"`params` must be floating-point arrays, got one of dtype {dtype}")
        z = jax.tree.map(lambda x: z_0(x, state_dtype), params)
        scalars = (jnp.zeros([], jnp.float32) for _ in range(3))  # one each: all can be donated
        return SPAState(jnp.zeros([], jnp.int32), z, *scalars)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SPAState]:
        del extra_args
        updates, state, _ = advance(updates, state, params)
        return updates, state

    def advance(
        updates: PyTree, state: PyTree, params: PyTree | None
    ) -> tuple[PyTree, SPAState, Step]:
        if params is None:
            raise ValueError("`params` must be passed to `update`, which starts from x, got None")
        if not isinstance(state, SPAState):
            raise ValueError(f"`state` must be an `SPAState`, got {type(state).__name__}")
        check_same_tree("updates", updates, "params", params)
        check_same_tree("state.z", state.z, "params", params)
        check_none_without_z(updates, state.z)
        state = jax.tree.map(jnp.asarray, state)
        updates, params, _ = trained(updates, params, state.z)
        now = step(state, has_narrow(params))
        if rounding_key is not None:
            now = now._replace(key=jax.random.fold_in(rounding_key, state.count))
        return *_advance(updates, state, params, now), now

    # optax types states as trees of arrays, of which `SPAState` is one in fact but not in type.
    tx = SPATransformation(init_fn, update_fn)  # pyright: ignore[reportArgumentType]
    tx.advance = advance
    return tx


def is_float(x: Any) -> bool:
    """Whether a leaf is a real or complex floating-point array; other leaves are not trained."""
    return is_array(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def has_narrow(params: PyTree) -> bool:
    """Whether there are params of 16 bits or fewer, beside which z is a master copy."""
    leaves = map(jnp.asarray, filter(is_float, jax.tree.leaves(params)))
    return any(x.size and x.itemsize <= 2 for x in leaves)


def trained(updates: PyTree, params: PyTree, z: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """The three trees as arrays, with None for params that have no z.

    A model of Equinox holds functions among its params, for which `init` saw None.
    """
    array = lambda leaf, z: None if leaf is None or z is None else jnp.asarray(leaf)
    arrays = lambda tree: jax.tree.map(array, tree, z, is_leaf=is_none)
    return arrays(updates), arrays(params), arrays(z)


def wide_dtype(*arrays: Array) -> Any:
    """The dtype to compute in: that of the widest array, and at least float32."""
    with jax.numpy_dtype_promotion("standard"):  # whatever the user has made of it
        return jnp.result_type(*(a.dtype for a in arrays if a.itemsize > 2), jnp.float32)


def z_0(x: Any, state_dtype: DTypeLike | None) -> Array:
    """A copy of a parameter, in the dtype of z."""
    dtype = jnp.result_type(x)
    if not is_float(x):
        pass
    elif state_dtype is None:
        if dtype.itemsize <= 2:
            dtype = jnp.float32
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        dtype = jnp.complex128 if jnp.finfo(state_dtype).bits == 64 else jnp.complex64
    else:
        dtype = state_dtype
    if isinstance(x, jax.ShapeDtypeStruct):  # no value yet: the first update has it from params
        return jnp.zeros(x.shape, dtype)
    # A copy, so that params and state can both be donated; unlike zeros it takes the sharding.
    return jnp.array(x, dtype=dtype, copy=True)


def _advance(
    updates: PyTree, state: SPAState, params: PyTree, step: Step
) -> tuple[PyTree, SPAState]:
    """The three equations of `Step`, a tree map each."""
    # XLA on CPU folds η = 1 away, and then no longer updates z in place: three times the time.
    # Behind a barrier every η takes the same kernel.
    eta, c, delta, r, at_start = jax.lax.optimization_barrier(
        (step.eta, step.c, step.delta, ratios(step, state, params), is_at_start(state))
    )

    def descend(
        g: Any, anchored: Array | None, z: Array | None, seed: UInt32[Array, "2"] | None
    ) -> Array | None:
        if anchored is None or z is None or not is_float(z):  # a param may itself be None
            return z
        dtype = anchored.dtype
        z_next = anchored if g is None else anchored - eta.astype(dtype) * g.astype(dtype)
        return rounded(z_next, z.dtype, seed)

    z_anchored = (_reanchored if r else _anchored)(params, state.z, r, at_start)
    seeds = seeds_like(step.key, 0, params)
    z_next = jax.tree.map(descend, updates, z_anchored, state.z, seeds, is_leaf=is_none)
    updates = average(updates, params, z_next, step._replace(c=c, delta=delta))
    f32 = lambda scalar: scalar.astype(jnp.float32)
    count = jnp.asarray(optax.safe_increment(state.count))
    return updates, SPAState(count, z_next, f32(step.eta), f32(step.c), f32(step.coast))


def is_at_start(state: SPAState) -> Bool[Array, ""]:
    """True until the first step. A count that was set back to 0 comes with a coast, and keeps m."""
    # Under Flax nnx they are variables.
    count, coast = (jnp.asarray(*jax.tree.leaves(s)) for s in (state.count, state.coast))
    return (count == 0) & (coast == 0)


def ratios(step: Step, state: SPAState, params: PyTree) -> dict[str, Float[Array, ""]]:
    """The r of each dtype of params, where a step has one: 0 at the start, or for a restart.

    Re-anchoring magnifies the rounding of x, which z − x holds, by r. By 1/√eps it would cost half
    the digits of x, and momentum restarts from 0 instead.
    """
    if step.coasts is None:
        return {}
    (required, held), result = step.coasts, {}
    # In order, since every process must compile the same program.
    for dtype in sorted({x.dtype for x in jax.tree.leaves(params) if is_float(x)}, key=str):
        restarts = is_at_start(state) | (required * float(jnp.finfo(dtype).eps) ** 0.5 > held)
        # With the division last, XLA on CPU does it once, and not in every kernel again.
        result[str(dtype)] = jnp.where(restarts, 0, required) / held
    return result


def _anchored(
    params: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """z_k with the coast that it has to have, in the dtype to compute in.

    Whether a leaf is moved is for a scalar to tell, so that where it is not, and that is nearly
    always, a loop that does not read x is run on a CPU. (`lax.cond` is no slower there if all is
    donated, but else copies z; and on a GPU the host would wait for it.)
    """

    def stays_or_moves(x: Array, z: Array, moved: Array) -> Array:
        if not is_float(x):
            return z
        stays = r[str(x.dtype)] == 1 if r else ~at_start
        return jnp.where(stays, z.astype(moved.dtype), moved)

    return jax.tree.map(stays_or_moves, params, z, _moved(params, z, r, at_start))


_reanchored = jax.custom_jvp(_anchored)


@_reanchored.defjvp
def _(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """At r = 1, too, z_k depends on r."""
    _, tangent = jax.jvp(_moved, primals, tangents)
    return _reanchored(*primals), tangent


def _moved(
    params: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    def move(x: Array, z: Array) -> Array:
        if not is_float(x):
            return z
        dtype = wide_dtype(x, z)
        x_wide, z_wide = x.astype(dtype), z.astype(dtype)
        moved = x_wide + r[str(x.dtype)].astype(dtype) * (z_wide - x_wide) if r else x_wide
        if x.dtype == dtype:
            return moved
        # Params may be replaced between `init` and the first step: z_0 is theirs, not `init`'s. But
        # it stays where it rounds to x, since master weights are made by calling `init` on float32
        # params that are cast afterwards.
        return jnp.where(at_start & (z.astype(x.dtype) == x), z_wide, moved)

    return jax.tree.map(move, params, z)


def average(updates: PyTree, params: PyTree, z_next: PyTree, step: Step) -> PyTree:
    """The last equation of `Step`, as the update x_{k+1} − x_k."""

    def x_step(
        g: Any, x: Array | None, z_next: Array | None, seed: UInt32[Array, "2"] | None
    ) -> Array | None:
        if g is None or x is None or z_next is None:
            return None
        if not is_float(x):
            return jnp.zeros_like(x)
        dtype = wide_dtype(x, z_next)
        x_wide = x.astype(dtype)
        x_step = step.c.astype(dtype) * (z_next.astype(dtype) - x_wide)
        if step.delta is not None:
            x_step -= step.delta.astype(dtype) * g.astype(dtype)
        if dtype == x.dtype:
            return x_step
        # Round x_{k+1} to the params' dtype first: adding the update to x then gives just that.
        return rounded(x_wide + x_step, x.dtype, seed) - x

    seeds = seeds_like(step.key, 1, params)
    return jax.tree.map(x_step, updates, params, z_next, seeds, is_leaf=is_none)
