"""The update that the whole family shares. Its members differ only in their scalars.

A member is a rule that maps the state to the `Scalars` of a step. `init` and `advance` do the rest.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from spa_optax._checks import check_none_without_z, check_params, check_same_tree, is_none
from spa_optax._precision import (
    Seed,
    has_narrow,
    is_float,
    rounded,
    rounds_to,
    seeds_like,
    wide_dtype,
)


class SPAState(NamedTuple):
    """State of `spa` and `spa_from_sgdm`. Its scalars are float32, whatever the params' dtype."""

    count: Int[Array, ""]  # k, the number of steps taken
    z: PyTree[Array]  # z_k, shaped like the params
    eta: Float[Array, ""]  # η_{k−1}, of the last step: for inspection, not read by the update
    c: Float[Array, ""]  # c_k, of the last step: for inspection, not read by the update
    coast: Float[Array, ""]  # w_k: the momentum buffer of SGD+M is m_k = (x_k − z_k) / w_k


class GPAState(NamedTuple):
    """State of `gpa`: that of `spa`, for params y, and their position between x and z."""

    inner: SPAState
    mu_y: Float[Array, ""]  # the μ_y of y_k = μ_y x_k + (1 − μ_y) z_k


class Scalars(NamedTuple):
    """The scalars of one step; x are the params and g the incoming updates.

    z_k     ← x_k + r (z_k − x_k)                        at the start r = 0: z_0 = x_0
    z_{k+1} = z_k − η g_k
    x_{k+1} = x_k + p (z_{k+1} − x_k) − δ g_k            p = c
    """

    eta: Float[Array, ""]
    c: Float[Array, ""]
    coast: Float[Array, ""]  # w_{k+1}, for the state
    delta: Float[Array, ""] | None = None  # None: 0
    p: Float[Array, ""] | None = None  # None: c
    # r as a fraction: the required coast of z_k over its present one. None: 1
    r: tuple[Float[Array, ""], Float[Array, ""]] | None = None


Rule = Callable[[SPAState, PyTree], Scalars]  # from the state and the params
Decay = Callable[[Int[Array, ""], PyTree], PyTree]  # from the count and z_k to λ z_k


class Step(NamedTuple):
    """What a step did to x, for diagnostics: x_{k+1} − x_k = p (d_k − η g_k) − δ g_k."""

    gradient: PyTree[Array]  # g_k, with the decay at z
    distance: PyTree[Array]  # d_k = z_k − x_k after rescaling, in the compute dtype
    rounding: PyTree[Array]  # bound on the rounding error of x_k and z_k in d_k
    eta: Float[Array, ""]
    p: Float[Array, ""]
    delta: Float[Array, ""] | None
    r: dict[str, Float[Array, ""]]  # for each dtype of params; empty: 1
    c_before: Float[Array, ""]  # c_k, of the last step


Observe = Callable[[Step], None]


def init(
    params: PyTree,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> SPAState:
    """The state at step 0, with z_0 = x_0."""
    check_params(params)
    z = jax.tree.map(lambda x: z_0(x, state_dtype), params)
    if rounding_key is None and (has_narrow(params) or has_narrow(z)):
        warnings.warn(
            "`rounding_key` should be given where params or z have 16 bits or fewer: rounded to"
            " nearest, they do not change where a step is below half an ulp. Pass"
            " `rounding_key=jax.random.key(0)`.",
            stacklevel=3,
        )
    scalars = (jnp.zeros([], jnp.float32) for _ in range(3))  # separate, so that all can be donated
    return SPAState(jnp.zeros([], jnp.int32), z, *scalars)


def advance(
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    rule: Rule,
    rounding_key: PRNGKeyArray | None,
    decay: Decay | None = None,
) -> tuple[PyTree, SPAState, Step]:
    """One step: x_{k+1} − x_k, the new state, and what the step did."""
    _check_update(updates, state, params)
    state = jax.tree.map(jnp.asarray, state)
    g, x, z = trained(updates, params, state.z)
    now = rule(state, x)
    p = now.c if now.p is None else now.p
    seeds = seeds_like(rounding_key, state.count, z)
    eta, p, delta, r, at_start = _behind_a_barrier(
        now.eta, p, now.delta, _ratios(now.r, state, x), is_at_start(state)
    )

    # z_k ← x_k + r (z_k − x_k)
    z_k = (_rescaled_or_kept if r else _kept)(x, z, r, at_start)
    # z_{k+1} = z_k − η g_k, where g_k may hold the decay λ z_k
    if decay is not None:
        add = lambda d, g: g.astype(d.dtype) + d
        g = map_trained(add, decay(state.count, z_k), g, otherwise=g)
    z_wide = map_trained(lambda z, g: z - times(eta, g, z.dtype), z_k, g, otherwise=z_k)
    z_next = _rounded_like(z, z_wide, seeds)
    # x_{k+1} = x_k + p (z_{k+1} − x_k) − δ g_k
    u = _param_update(g, x, z_next, p, delta, seeds)

    # Under jit this is computed only if observed.
    distance = map_trained(lambda z, x: z - x.astype(z.dtype), z_k, x)
    eps = lambda x, z: float(max(jnp.finfo(x.dtype).eps, jnp.finfo(z.dtype).eps))
    rounding = map_trained(lambda d, x, z: eps(x, z) * x.astype(d.dtype), distance, x, z)
    step = Step(g, distance, rounding, eta, p, delta, r, state.c)
    f32 = lambda scalar: scalar.astype(jnp.float32)
    count = jnp.asarray(optax.safe_increment(state.count))
    return u, SPAState(count, z_next, f32(now.eta), f32(now.c), f32(now.coast)), step


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The `update` of a transformation that consists of a rule."""

    rule: Rule
    rounding_key: PRNGKeyArray | None
    decay: Decay | None = None

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
        u, state, step = advance(updates, state, params, self.rule, self.rounding_key, self.decay)
        if observe is not None:
            observe(step)
        return u, state


# --------------------------------------------------------------------------------- leaves and trees


def trained(updates: PyTree, params: PyTree, z: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """The three trees as arrays, with None for params that have no z.

    Equinox models hold functions among their params, which are None in `init`.
    """
    array = lambda leaf, z: None if leaf is None or z is None else jnp.asarray(leaf)
    arrays = lambda tree: jax.tree.map(array, tree, z, is_leaf=is_none)
    return arrays(updates), arrays(params), arrays(z)


def map_trained(
    function: Callable[..., Any], tree: PyTree, *trees: PyTree, otherwise: PyTree = None
) -> PyTree:
    """`jax.tree.map` over floating-point leaves of the first tree that all others have too.

    Integers, and leaves that are None in one of the trees, come from `otherwise`.
    """

    def leaf(first: Any, other: Any, *rest: Any) -> Any:
        is_trained = is_float(first) and not any(map(is_none, rest))
        return function(first, *rest) if is_trained else other

    if otherwise is None:
        otherwise = jax.tree.map(lambda _: None, tree, is_leaf=is_none)
    return jax.tree.map(leaf, tree, otherwise, *trees, is_leaf=is_none)


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
    # A copy, so that params and state can both be donated; unlike zeros, it keeps the sharding.
    return jnp.array(x, dtype=dtype, copy=True)


def scalar_of(value: PyTree) -> Array:
    """A scalar of a state as an array. Flax nnx keeps it in a variable."""
    return jnp.asarray(*jax.tree.leaves(value))


def is_at_start(state: SPAState) -> Bool[Array, ""]:
    """True until the first step. A count that was reset to 0 has a coast, and keeps m."""
    return (scalar_of(state.count) == 0) & (scalar_of(state.coast) == 0)


def find(state: PyTree, kinds: Any) -> list[Any]:
    """The nodes of some kinds in a state."""
    is_kind = lambda node: isinstance(node, kinds)
    return [node for node in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(node)]


def only(state: PyTree, kind: Any, name: str) -> Any:
    """The one node of a kind in a state."""
    found = find(state, kind)
    if len(found) != 1:
        is_transformation = isinstance(state, optax.GradientTransformation)
        got = "a transformation, not its state" if is_transformation else len(found)
        raise ValueError(f"`{name}` must hold one `{kind.__name__}`, got {got}")
    return found[0]


def _rounded_like(z: PyTree, z_wide: PyTree, seeds: PyTree) -> PyTree:
    """z_{k+1} in the dtypes of z_k."""
    store = lambda z, new, seed: rounded(new, z.dtype, seed) if is_float(z) else new
    return jax.tree.map(store, z, z_wide, seeds, is_leaf=is_none)


def _param_update(
    g: PyTree, x: PyTree, z_next: PyTree, p: Array, delta: Array | None, seeds: PyTree
) -> PyTree:
    """x_{k+1} − x_k, with x_{k+1} rounded to the params' dtype."""

    def u(x: Array, z_next: Array, g: Array) -> Array:
        dtype = wide_dtype(x, z_next)
        u = times(p, z_next.astype(dtype) - x.astype(dtype), dtype)
        return u if delta is None else u - times(delta, g, dtype)

    def as_update(g: Any, x: Any, u: Any, seed: Seed | None) -> Array | None:
        if u is None:
            return None if g is None or x is None else jnp.zeros_like(x)  # integers stay
        if u.dtype == x.dtype:
            return u
        # Round x_{k+1} to the params' dtype first: adding the update to x then gives exactly that.
        return rounded(x.astype(u.dtype) + u, x.dtype, seed, low_bits=True) - x

    return jax.tree.map(as_update, g, x, map_trained(u, x, z_next, g), seeds, is_leaf=is_none)


def _check_update(updates: PyTree, state: Any, params: PyTree | None) -> None:
    if params is None:
        raise ValueError("`params` must be passed to `update`, got None")
    if not isinstance(state, SPAState):
        raise ValueError(f"`state` must be an `SPAState`, got {type(state).__name__}")
    check_same_tree("updates", updates, "params", params)
    check_same_tree("state.z", state.z, "params", params)
    check_none_without_z(updates, state.z)


# ---------------------------------------------------- z_k ← x_k + r (z_k − x_k), and XLA's limits


def _ratios(
    r: tuple[Float[Array, ""], Float[Array, ""]] | None, state: SPAState, params: PyTree
) -> dict[str, Float[Array, ""]]:
    """The r for each dtype of params, if a step has one; 0 at the start and for a restart.

    Rescaling multiplies the rounding error of x in z − x by r. At r = 1/√eps that would cost half
    the digits of x, so momentum restarts from 0 instead.
    """
    if r is None:
        return {}
    (required, held), result = r, {}
    # Sorted, since every process must compile the same program.
    for dtype in sorted({x.dtype for x in jax.tree.leaves(params) if is_float(x)}, key=str):
        restarts = is_at_start(state) | (required * float(jnp.finfo(dtype).eps) ** 0.5 > held)
        # With the division last, XLA on CPU does it once, not in every kernel.
        result[str(dtype)] = jnp.where(restarts, 0, required) / held
    return result


def _behind_a_barrier(*scalars: Any) -> Any:
    """The scalars of a step, hidden from XLA's constant folding.

    At η = 1, the paper's own value, XLA on CPU folds the multiplication away and then no longer
    updates z in place: three times the time (18 ms against 6 on 300 leaves of 64×64×3×3).
    """
    return jax.lax.optimization_barrier(scalars)


def _rescaled(
    params: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """x_k + r (z_k − x_k) in the compute dtype, or x_0 if there is no r."""

    def rescale(x: Array, z: Array) -> Array:
        dtype = wide_dtype(x, z)
        x_wide, z_wide = x.astype(dtype), z.astype(dtype)
        new = x_wide + times(r[str(x.dtype)], z_wide - x_wide, dtype) if r else x_wide
        if x.dtype == dtype:
            return new
        # Params may be replaced between `init` and the first step: z_0 then comes from the new
        # ones. But z stays where it rounds to x, since master weights are made by calling `init` on
        # float32 params that are cast afterwards.
        return jnp.where(at_start & rounds_to(z_wide, x), z_wide, new)

    return map_trained(rescale, params, z, otherwise=z)


def _kept(
    params: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """`_rescaled`, but z_k itself where r = 1 or, without an r, after the start.

    The predicate is a scalar, so XLA on CPU makes two loops and nearly always runs the one that
    does not read x. It is as fast as `optax.sgd`; reading x took 1.1 to 1.3 times as long.
    `lax.cond` is as fast if everything is donated, but otherwise copies z (1.23 to 1.30), and on a
    GPU the host would wait for it.
    """

    def keep(x: Array, z: Array, rescaled: Array) -> Array:
        # Not `~at_start`: with one operand more, XLA for TPU gave a kernel smaller windows.
        moves = r[str(x.dtype)] != 1 if r else at_start
        return jnp.where(moves, rescaled, z.astype(rescaled.dtype))

    return map_trained(keep, params, z, _rescaled(params, z, r, at_start), otherwise=z)


_rescaled_or_kept = jax.custom_jvp(_kept)


@_rescaled_or_kept.defjvp
def _(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """The derivative of `_rescaled`, since z_k depends on r at r = 1 too."""
    _, tangent = jax.jvp(_rescaled, primals, tangents)
    return _rescaled_or_kept(*primals), tangent
