"""The update that the whole family shares. Its members differ only in their scalars.

A member is a rule that maps the state to the `Scalars` of a step. `init` and `advance` do the rest.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from spa_optax._precision import (
    UNIT,
    Seed,
    difference,
    has_narrow,
    holds_difference,
    num_saturated,
    restored,
    round_update,
    rounded,
    rounds_to,
    seeds_like,
    wide_dtype,
)
from spa_optax._trees import (
    behind_a_barrier,
    check_same_tree,
    is_array,
    is_float,
    is_none,
    leaves_with_path,
    map_floats,
    scalar_of,
    sharded_like,
)


class SPAState(NamedTuple):
    """State of every member. Its scalars are float32, whatever the params' dtype.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k except under `gpa`.
    """

    count: Int[Array, ""]  # k, the number of steps taken
    z: PyTree[Array]  # z_k, shaped like the params; in ≤ 16 bits 256 (z_k − y_k)
    eta: Float[Array, ""]  # η_{k−1}, of the last step: for inspection, not read by the update
    c: Float[Array, ""]  # c_k, of the last step: for inspection, not read by the update
    w: Float[Array, ""]  # w_k, the scale of momentum: m_k = (params − z_k) / w_k
    mu_y: Float[Array, ""]  # μ_y, of the last step; 1 except under `gpa`


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: Int[Array, ""]  # the random bits depend on it
    base: PyTree


class Scalars(NamedTuple):
    """The scalars of one step; y are the params and g the incoming updates.

    z_k     ← y_k + r (z_k − y_k)                        at the start r = 0: z_0 = y_0
    z_{k+1} = z_k − η g_k
    y_{k+1} = y_k + p (z_{k+1} − y_k) − δ g_k            p = c
    """

    eta: Float[Array, ""]
    c: Float[Array, ""]
    w: Float[Array, ""]  # w_{k+1}, for the state
    delta: Float[Array, ""] | None = None  # None: 0
    p: Float[Array, ""] | None = None  # None: c
    # r as a fraction: the w that the step requires of z_k, over the one that it has. None: 1
    r: tuple[Float[Array, ""], Float[Array, ""]] | None = None
    mu_y: Float[Array, ""] | None = None  # the μ_y of y_{k+1}. None: 1


Rule = Callable[[SPAState, PyTree], Scalars]  # from the state and the params


class Step(NamedTuple):
    """What a step did to x, for diagnostics: x_{k+1} − x_k = p (d_k − η g_k) − δ g_k."""

    gradient: PyTree[Array]  # g_k
    distance: PyTree[Array]  # d_k = z_k − x_k after rescaling, in the compute dtype
    rounding: PyTree[Array]  # bound on the rounding error of x_k and z_k in d_k
    saturated: PyTree[Array]  # how many elements of z are at the limit of its dtype
    eta: Float[Array, ""]
    p: Float[Array, ""]
    delta: Float[Array, ""] | None
    r: dict[str, Float[Array, ""]]  # for each precision of z − x; empty: 1
    c_before: Float[Array, ""]  # c_k, of the last step


Observe = Callable[[Step], None]


def transformation(
    rule: Rule,
    state_dtype: DTypeLike | None,
    rounding_key: PRNGKeyArray | None,
    mu_y_at: Callable[[Array], Array] = jnp.ones_like,
) -> optax.GradientTransformationExtraArgs:
    """The member of the family that consists of a rule, and of μ_y at a count."""
    if rounding_key is None and state_dtype is not None and jnp.dtype(state_dtype).itemsize == 1:
        raise ValueError("`rounding_key` must be given with a `state_dtype` of 8 bits, got None")
    init_fn = functools.partial(
        init, state_dtype=state_dtype, rounding_key=rounding_key, mu_y_at=mu_y_at
    )
    # optax types states as trees of arrays; `SPAState` is one, but its type does not say so.
    return optax.GradientTransformationExtraArgs(init_fn, Update(rule, rounding_key))  # pyright: ignore[reportArgumentType]


def init(
    params: PyTree,
    state_dtype: DTypeLike | None,
    rounding_key: PRNGKeyArray | None,
    mu_y_at: Callable[[Array], Array],
) -> SPAState:
    """The state at step 0, with z_0 = y_0."""
    _check_params(params)
    z = jax.tree.map(lambda x: z_0(x, state_dtype), params)
    if rounding_key is None and (has_narrow(params) or has_narrow(z)):
        warnings.warn(
            "`rounding_key` should be given where params or z have 16 bits or fewer: rounded to"
            " nearest, they do not change where a step is below half an ulp. Pass"
            " `rounding_key=jax.random.key(0)`.",
            stacklevel=3,
        )
    # All are separate arrays, so that all can be donated.
    zero = lambda: jnp.zeros([], jnp.float32)
    count = jnp.zeros([], jnp.int32)
    return SPAState(count, z, zero(), zero(), zero(), jnp.array(mu_y_at(count), jnp.float32))


def advance(
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    rule: Rule,
    rounding_key: PRNGKeyArray | None,
) -> tuple[PyTree, SPAState, Step]:
    """One step: y_{k+1} − y_k, the new state, and what the step did."""
    _check_state(state, params)
    _check_updates(updates, state, params)
    state = jax.tree.map(jnp.asarray, state)
    g, y, z = _as_arrays(updates, params, state.z)
    now = rule(state, y)
    in_full = now._replace(
        p=now.c if now.p is None else now.p,
        mu_y=jnp.ones_like(now.eta) if now.mu_y is None else now.mu_y,
        r=None,
    )
    one = jnp.ones_like(now.eta)
    (eta, c, w, delta, p, _, mu_y), r, at_start, one = _shared(
        (in_full, _ratios(now.r, state, y, z), is_at_start(state), one)
    )
    seeds = seeds_like(rounding_key, state.count, z)

    # z_k ← y_k + r (z_k − y_k). Where z has 16 bits or fewer, it stands for z − y_k here.
    z_k = (_rescale_or_select if r else _select_z)(y, z, r, at_start)
    # z_{k+1} = z_k − η g_k
    z_wide = map_floats(lambda z, g: z - times(eta, g, z.dtype), z_k, g, otherwise=z_k)
    z_next = _round_z(z, z_wide, seeds)
    # y_{k+1} = y_k + p (z_{k+1} − y_k) − δ g_k
    distance = map_floats(_distance, z_next, y, z)
    u = _param_update(g, y, distance, p, delta, seeds)
    z_next = _as_difference(z, z_next, y, u, seeds)

    # Under jit this is computed only if observed.
    distance = map_floats(_distance, z_k, y, z)
    rounding = map_floats(_rounding_error, distance, y, z)
    saturated = map_floats(num_saturated, z)
    step = Step(g, distance, rounding, saturated, eta, p, delta, r, state.c)
    if now.mu_y is not None:  # of x: z_k − y_k is μ_y (z_k − x_k)
        over_mu_y = lambda leaf: leaf / state.mu_y.astype(leaf.dtype)
        d, rounding = (map_floats(over_mu_y, tree) for tree in (distance, rounding))
        step = step._replace(distance=d, rounding=rounding, p=c, delta=None)
    count = jnp.asarray(optax.safe_increment(state.count))
    # With the product, which XLA does not know to be by 1, they are one kernel on a GPU.
    scalars = ((scalar * one).astype(jnp.float32) for scalar in (eta, c, w, mu_y))
    return u, SPAState(count, z_next, *scalars), step


def z_now(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the compute dtype; at the start, when params may have been replaced, from them."""
    _check_state(state, params)
    state = jax.tree.map(jnp.asarray, state)
    _, y, z = _as_arrays(params, params, state.z)
    z = map_floats(restored, z, y, otherwise=z)
    return _select_z(y, z, {}, is_at_start(state))


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The `update` of a member."""

    rule: Rule
    rounding_key: PRNGKeyArray | None

    def __call__(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        observe: Observe | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, SPAState]:
        """`advance`, as Optax calls it. The extra argument `observe` is called with the step."""
        del extra_args
        u, state, step = advance(updates, state, params, self.rule, self.rounding_key)
        if observe is not None:
            observe(step)
        return u, state


# ------------------------------------------------------------------------------------------ leaves


def _as_arrays(updates: PyTree, params: PyTree, z: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """The three trees as arrays, with None for params that have no z.

    Equinox models hold functions among their params, which are None in `init`.
    """
    array = lambda leaf, z: None if leaf is None or z is None else jnp.asarray(leaf)
    arrays = lambda tree: jax.tree.map(array, tree, z, is_leaf=is_none)
    return arrays(updates), arrays(params), arrays(z)


def _shared(scalars: PyTree) -> PyTree:
    """The scalars of a step, hidden from XLA's constant folding.

    At η = 1, the paper's own value, XLA on CPU would fold the multiplication away and no longer
    update z in place, which takes three times as long. On a GPU they are slices of one array, since
    XLA merges the kernels of leaves only where these read the same array.
    """
    leaves, structure = jax.tree.flatten(scalars)

    def slices(leaves: list[Array]) -> list[Array]:
        array = behind_a_barrier(jnp.stack([leaf.astype(leaves[0].dtype) for leaf in leaves]))
        return [array[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)]

    on_gpu = {"cuda": slices, "rocm": slices}
    leaves = jax.lax.platform_dependent(leaves, **on_gpu, default=behind_a_barrier)
    return structure.unflatten(leaves)


def times(scalar: Array, leaf: Array, dtype: Any) -> Array:
    """A product, computed in a dtype."""
    return scalar.astype(dtype) * leaf.astype(dtype)


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
    if isinstance(x, jax.ShapeDtypeStruct):  # no value yet: the first update takes it from params
        return jnp.zeros(x.shape, dtype)
    if is_float(x) and jnp.dtype(dtype).itemsize <= 2:  # z_0 − x_0
        return sharded_like(jnp.zeros_like(x, dtype=dtype), x)
    # A copy, so that params and state can both be donated; unlike zeros, it keeps the sharding.
    return jnp.array(x, dtype=dtype, copy=True)


def _rounding_error(d: Array, y: Array, z: Array) -> Array:
    """A bound on the error of d = z − y."""
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in (y, z))
    return eps * (d if holds_difference(z) else y.astype(d.dtype))


def is_at_start(state: SPAState) -> Bool[Array, ""]:
    """True until the first step. A count that was reset to 0 has a w, and keeps m."""
    return (scalar_of(state.count) == 0) & (scalar_of(state.w) == 0)


def _round_z(z: PyTree, z_wide: PyTree, seeds: PyTree) -> PyTree:
    """z_{k+1} in the dtypes of z_k, but in full where the difference from y_{k+1} is stored."""
    is_stored = lambda z: is_float(z) and not holds_difference(z)
    store = lambda z, new, seed: rounded(new, z.dtype, seed) if is_stored(z) else new
    return jax.tree.map(store, z, z_wide, seeds, is_leaf=is_none)


def _distance(z_wide: Array, y: Array, z: Array) -> Array:
    """Z − y_k."""
    dtype = wide_dtype(y, z)
    z_wide = z_wide.astype(dtype)
    return z_wide if holds_difference(z) else z_wide - y.astype(dtype)


def _as_difference(z: PyTree, z_next: PyTree, y: PyTree, u: PyTree, seeds: PyTree) -> PyTree:
    """From z_{k+1} − y_k to z_{k+1} − y_{k+1}, where that is stored."""

    def leaf(z: Any, new: Any, y: Any, u: Any, seed: Seed | None) -> Any:
        if not holds_difference(z):
            return new
        # Not `new - u`: with y_{k+1}, an output, XLA for TPU makes one kernel of both.
        wide = lambda leaf: leaf.astype(new.dtype)
        return z if u is None else difference(new + wide(y) - wide(y + u), z.dtype, seed)

    return jax.tree.map(leaf, z, z_next, y, u, seeds, is_leaf=is_none)


def _param_update(
    g: PyTree, y: PyTree, distance: PyTree, p: Array, delta: Array | None, seeds: PyTree
) -> PyTree:
    """y_{k+1} − y_k, with y_{k+1} rounded to the params' dtype."""

    def u(d: Array, g: Array) -> Array:
        u = times(p, d, d.dtype)
        return u if delta is None else u - times(delta, g, d.dtype)

    def as_update(g: Any, y: Any, u: Any, seed: Seed | None) -> Array | None:
        if u is None:
            return None if g is None or y is None else jnp.zeros_like(y)  # integers stay
        return round_update(u, y, seed, low_bits=True)

    return jax.tree.map(as_update, g, y, map_floats(u, distance, g), seeds, is_leaf=is_none)


def _check_params(params: PyTree) -> None:
    for path, leaf in leaves_with_path(params):
        if not (leaf is None or is_array(leaf)):
            raise ValueError(
                f"`params` must be a tree of arrays, got a `{type(leaf).__name__}` at"
                f" {path or 'its root'}. For an Equinox model use `eqx.filter(model, eqx.is_array)`"
            )
        if not path and leaf is not None and not is_float(leaf):
            dtype = jnp.result_type(leaf)
            raise ValueError(f"`params` must be floating-point arrays, got one of dtype {dtype}")


def _check_state(state: Any, params: PyTree | None) -> None:
    if params is None:
        raise ValueError("`params` must be passed to `update`, got None")
    if not isinstance(state, SPAState):
        raise ValueError(f"`state` must be an `SPAState`, got {type(state).__name__}")
    check_same_tree("state.z", state.z, "params", params)


def _check_updates(updates: PyTree, state: SPAState, params: PyTree) -> None:
    check_same_tree("updates", updates, "params", params)
    z_leaves = jax.tree.leaves(state.z, is_leaf=is_none)
    for (path, g), z in zip(leaves_with_path(updates), z_leaves, strict=True):
        if g is not None and z is None:
            at = path or "its root"
            raise ValueError(f"`updates` must be None where `state.z` is, got a gradient at {at}")


# ---------------------------------------------------- z_k ← y_k + r (z_k − y_k), and XLA's limits


def _ratios(
    r: tuple[Float[Array, ""], Float[Array, ""]] | None,
    state: SPAState,
    params: PyTree,
    z: PyTree,
) -> dict[str, Float[Array, ""]]:
    """The r for each precision of z − x, if a step has one; 0 at the start and for a restart.

    Rescaling multiplies the rounding error of x in z − x by r. At r = 1/√eps that would cost half
    the digits of x, so momentum restarts from 0 instead. A difference has no such error.
    """
    if r is None:
        return {}
    (required, held), result = r, {}
    # Sorted, since every process must compile the same program.
    precisions = map_floats(_precision_of_distance, params, z)
    for dtype in sorted(set(jax.tree.leaves(precisions))):
        restarts = is_at_start(state) | (required * float(jnp.finfo(dtype).eps) ** 0.5 > held)
        # With the division last, XLA on CPU does it once, not in every kernel.
        result[dtype] = jnp.where(restarts, 0, required) / held
    return result


def _precision_of_distance(x: Array, z: Array) -> str:
    """The dtype whose rounding error z − x has."""
    return "float32" if holds_difference(z) else str(x.dtype)


def _rescale(
    params: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """x_k + r (z_k − x_k) in the compute dtype, or x_0 without an r. A difference: less x_k."""

    def rescale(x: Array, z: Array) -> Array:
        dtype = wide_dtype(x, z)
        x_wide, z_wide = x.astype(dtype), z.astype(dtype)
        ratio = r.get(_precision_of_distance(x, z))
        if holds_difference(z):  # 0 at the start, from whatever params
            return UNIT * z_wide if ratio is None else times(ratio, UNIT * z_wide, dtype)
        new = x_wide if ratio is None else x_wide + times(ratio, z_wide - x_wide, dtype)
        if x.dtype == dtype:
            return new
        # Params may be replaced between `init` and the first step: z_0 then comes from the new
        # ones. But z stays where it rounds to x, since master weights are made by calling `init` on
        # float32 params that are cast afterwards.
        return jnp.where(at_start & rounds_to(z_wide, x), z_wide, new)

    return map_floats(rescale, params, z, otherwise=z)


def _select_z(
    params: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """`_rescale`, but z_k itself where r = 1 or, without an r, after the start.

    The predicate is a scalar, so XLA on CPU makes two loops and nearly always runs the one that
    does not read x. It is as fast as `optax.sgd`; reading x took 1.1 to 1.3 times as long.
    `lax.cond` is as fast if everything is donated, but otherwise copies z (1.23 to 1.30), and on a
    GPU the host would wait for it.
    """

    def keep(x: Array, z: Array, rescaled: Array) -> Array:
        if holds_difference(z):
            return rescaled
        # Not `~at_start`: with one operand more, XLA for TPU gave a kernel smaller windows.
        moves = r[_precision_of_distance(x, z)] != 1 if r else at_start
        return jnp.where(moves, rescaled, z.astype(rescaled.dtype))

    return map_floats(keep, params, z, _rescale(params, z, r, at_start), otherwise=z)


_rescale_or_select = jax.custom_jvp(_select_z)


@_rescale_or_select.defjvp
def _(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """The derivative of `_rescale`, since z_k depends on r at r = 1 too."""
    _, tangent = jax.jvp(_rescale, primals, tangents)
    return _rescale_or_select(*primals), tangent
