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

from spa_optax import _storage
from spa_optax._precision import (
    Seed,
    has_narrow,
    round_update,
    rounds_to,
    seeds_like,
)
from spa_optax._storage import (
    Form,
    Storage,
    form_of,
    map_stored,
    trees_of,
)
from spa_optax._trees import (
    check_same_tree,
    is_array,
    is_float,
    is_none,
    leaves_with_path,
    map_floats,
    scalar_of,
)
from spa_optax._xla import select, shared


class SPAState(NamedTuple):
    """State of every member. Its scalars are float32, whatever the params' dtype.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k except under `gpa`.
    """

    count: Int[Array, ""]  # k, the number of steps taken
    z: PyTree[Array]  # z_k, shaped like the params; in 16 bits or fewer a node of z_k − y_k
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
    saturated: PyTree[Array]  # how many elements of z are at the limit of what can be stored
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
    storage = _storage.storage_of(state_dtype)
    init_fn = functools.partial(init, storage=storage, rounding_key=rounding_key, mu_y_at=mu_y_at)
    # optax types states as trees of arrays; `SPAState` is one, but its type does not say so.
    return optax.GradientTransformationExtraArgs(init_fn, Update(rule, storage, rounding_key))  # pyright: ignore[reportArgumentType]


def init(
    params: PyTree,
    storage: Storage,
    rounding_key: PRNGKeyArray | None,
    mu_y_at: Callable[[Array], Array],
) -> SPAState:
    """The state at step 0, with z_0 = y_0."""
    _check_params(params)
    z = _storage.init(params, storage)
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
    storage: Storage,
    rounding_key: PRNGKeyArray | None,
) -> tuple[PyTree, SPAState, Step]:
    """One step: y_{k+1} − y_k, the new state, and what the step did."""
    _check_state(state, params)
    _storage.check("state.z", state.z, params, storage)
    _check_updates(updates, state, params)
    state = jax.tree.map(jnp.asarray, state)
    g, y = _as_arrays(updates, state.z), _as_arrays(params, state.z)
    given = rule(state, y)
    scalars = given._replace(
        p=given.c if given.p is None else given.p,
        mu_y=jnp.ones_like(given.eta) if given.mu_y is None else given.mu_y,
        r=None,
    )
    ratios = _ratios(given.r, state, y)
    (eta, c, w, delta, p, _, mu_y), r, at_start, one = shared(
        (scalars, ratios, is_at_start(state), jnp.ones_like(given.eta))
    )
    seeds = seeds_like(rounding_key, state.count, trees_of(state.z)[0])

    # Where z − y is stored, z stands for z − y_k here. (From z itself, XLA for TPU v7x would make
    # two kernels of `spa_adamw`.)
    form = form_of(state.z)
    # z_k ← y_k + r (z_k − y_k)
    z = _anchored(form, y, _storage.decode(y, state.z), r, at_start)
    # z_{k+1} = z_k − η g_k
    z_next = map_floats(lambda z, g: z - times(eta, g, z.dtype), z, g)
    # y_{k+1} = y_k + p (z_{k+1} − y_k) − δ g_k
    distance = lambda z, y: z if form.follows_params else z - y.astype(z.dtype)
    u = _param_update(y, map_floats(distance, z_next, y), g, p, delta, seeds)
    # From y + u, an output: XLA for TPU then makes one kernel of both.
    itself = lambda z, y: y.astype(z.dtype) + z if form.follows_params else z
    stored = _storage.encode(map_floats(itself, z_next, y), _add(y, u), seeds, state.z)

    # Under jit this is computed only if observed.
    d = map_floats(distance, z, y)
    rounding = map_stored(_rounding_error, y, state.z, d)
    saturated = map_stored(lambda form, _, *arrays: form.num_saturated(*arrays), y, state.z)
    step = Step(g, d, rounding, saturated, eta, p, delta, r, state.c)
    if given.mu_y is not None:  # of x: z_k − y_k is μ_y (z_k − x_k)
        over_mu_y = lambda leaf: leaf / state.mu_y.astype(leaf.dtype)
        d, rounding = (map_floats(over_mu_y, tree) for tree in (d, rounding))
        step = step._replace(distance=d, rounding=rounding, p=c, delta=None)
    count = jnp.asarray(optax.safe_increment(state.count))
    # With the product, which XLA does not know to be by 1, they are one kernel on a GPU.
    of_state = ((scalar * one).astype(jnp.float32) for scalar in (eta, c, w, mu_y))
    return u, SPAState(count, stored, *of_state), step


def z_now(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the compute dtype; at the start, when params may have been replaced, from them."""
    _check_state(state, params)
    _storage.check_readable("state.z", state.z, params)
    state = jax.tree.map(jnp.asarray, state)
    y = _as_arrays(params, state.z)
    z = map_stored(_storage.z_of, y, state.z)
    z = _anchored(form_of(state.z), y, z, {}, is_at_start(state))
    return jax.tree.map(lambda y, z: y if z is None else z, y, z, is_leaf=is_none)


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The `update` of a member."""

    rule: Rule
    storage: Storage
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
        u, state, step = advance(updates, state, params, self.rule, self.storage, self.rounding_key)
        if observe is not None:
            observe(step)
        return u, state


# ------------------------------------------------------------------------------------------ leaves


def _as_arrays(tree: PyTree, z: PyTree) -> PyTree:
    """A tree as arrays, with None for params that have no z.

    Equinox models hold functions among their params, which are None in `init`.
    """
    array = lambda leaf, z: None if leaf is None or z is None else jnp.asarray(leaf)
    return jax.tree.map(array, tree, trees_of(z)[0], is_leaf=is_none)


def times(scalar: Array, leaf: Array, dtype: Any) -> Array:
    """A product, computed in a dtype."""
    return scalar.astype(dtype) * leaf.astype(dtype)


def is_at_start(state: SPAState) -> Bool[Array, ""]:
    """True until the first step. A count that was reset to 0 has a w, and keeps m."""
    return (scalar_of(state.count) == 0) & (scalar_of(state.w) == 0)


def _rounding_error(form: Form, y: Array, *arrays: Array) -> Array:
    """A bound on the rounding error of d = z − y, which comes after the arrays of z."""
    *stored, d = arrays
    eps = max(float(jnp.finfo(y.dtype).eps), form.eps(*stored))
    return eps * (d if form.follows_params else y.astype(d.dtype))


def _param_update(
    y: PyTree, d: PyTree, g: PyTree, p: Array, delta: Array | None, seeds: PyTree
) -> PyTree:
    """y_{k+1} − y_k = p d − δ g_k, with y_{k+1} rounded to the params' dtype."""

    def update(y: Any, d: Any, g: Any, seed: Seed | None) -> Array | None:
        if d is None:
            return None if g is None or y is None else jnp.zeros_like(y)  # integers stay
        u = times(p, d, d.dtype)
        if delta is not None:
            u -= times(delta, g, d.dtype)
        return round_update(u, y, seed, low_bits=True)

    return jax.tree.map(update, y, d, g, seeds, is_leaf=is_none)


def _add(y: PyTree, u: PyTree) -> PyTree:
    return jax.tree.map(lambda y, u: y if u is None else y + u, y, u, is_leaf=is_none)


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
    check_same_tree("state.z", trees_of(state.z)[0], "params", params)
    check_scalars("state", state)


def check_scalars(name: str, state: SPAState) -> None:
    """Raises ValueError if the scalars were cast: in bfloat16 a count sticks at 256."""
    for field in ("count", "eta", "c", "w", "mu_y"):
        dtype, wanted = scalar_of(getattr(state, field)).dtype, jnp.float32
        if not (jnp.issubdtype(dtype, jnp.integer) if field == "count" else dtype == wanted):
            kind = "an integer" if field == "count" else "float32"
            raise ValueError(f"`{name}.{field}` must be {kind}, whatever the params, got {dtype}")


def _check_updates(updates: PyTree, state: SPAState, params: PyTree) -> None:
    check_same_tree("updates", updates, "params", params)
    z_leaves = jax.tree.leaves(trees_of(state.z)[0], is_leaf=is_none)
    for (path, g), z in zip(leaves_with_path(updates), z_leaves, strict=True):
        if g is not None and z is None:
            at = path or "its root"
            raise ValueError(f"`updates` must be None where `state.z` is, got a gradient at {at}")


# ---------------------------------------------------- z_k ← y_k + r (z_k − y_k), and XLA's limits


def _ratios(
    r: tuple[Float[Array, ""], Float[Array, ""]] | None, state: SPAState, params: PyTree
) -> dict[str, Float[Array, ""]]:
    """The r for each precision of z − y, if a step has one; 0 at the start and for a restart.

    Rescaling multiplies the rounding error of y in z − y by r. At r = 1/√eps that would cost half
    the digits of y, so momentum restarts from 0 instead. A stored difference has no such error.
    """
    if r is None:
        return {}
    (required, held), result = r, {}
    follows_params = form_of(state.z).follows_params
    # Sorted, since every process must compile the same program.
    precisions = map_floats(lambda y: "float32" if follows_params else str(y.dtype), params)
    for dtype in sorted(set(jax.tree.leaves(precisions))):
        restarts = is_at_start(state) | (required * float(jnp.finfo(dtype).eps) ** 0.5 > held)
        # With the division last, XLA on CPU does it once, not in every kernel.
        result[dtype] = jnp.where(restarts, 0, required) / held
    return result


def _rescale(
    y: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """y_k + r (z_k − y_k), or y_0 without an r."""

    def rescale(z: Array, y: Array) -> Array:
        new = y.astype(z.dtype)
        if r:
            new += times(r[str(y.dtype)], z - new, z.dtype)
        if y.dtype == z.dtype:
            return new
        # Params may be replaced between `init` and the first step: z_0 then comes from the new
        # ones. But z stays where it rounds to y, since master weights are made by calling `init` on
        # float32 params that are cast afterwards.
        return select(at_start & rounds_to(z, y), z, new)

    return map_floats(rescale, z, y)


def _anchored(
    form: Form,
    y: PyTree,
    z: PyTree,
    r: dict[str, Float[Array, ""]],
    at_start: Bool[Array, ""],
) -> PyTree:
    """z_k, moved to y_k + r (z_k − y_k) if a step has an r, and at the start to y_0.

    A difference is r (z_k − y_k), and 0 at the start from whatever params.
    """
    if form.follows_params:
        return map_floats(lambda d: times(r["float32"], d, d.dtype), z) if r else z
    return (_rescale_or_select if r else _select_z)(y, z, r, at_start)


def _select_z(
    y: PyTree, z: PyTree, r: dict[str, Float[Array, ""]], at_start: Bool[Array, ""]
) -> PyTree:
    """`_rescale`, but z_k itself where r = 1 or, without an r, after the start.

    The predicate is a scalar, so XLA on CPU makes two loops and nearly always runs the one that
    does not read y. It is as fast as `optax.sgd`; reading y took 1.1 to 1.3 times as long.
    `lax.cond` is as fast if everything is donated, but otherwise copies z (1.23 to 1.30), and on a
    GPU the host would wait for it.
    """

    def keep(z: Array, y: Array, rescaled: Array) -> Array:
        # Not `~at_start`: with one operand more, XLA for TPU gave a kernel smaller windows.
        moves = r[str(y.dtype)] != 1 if r else at_start
        return select(moves, rescaled, z)

    return map_floats(keep, z, y, _rescale(y, z, r, at_start))


_rescale_or_select = jax.custom_jvp(_select_z)


@_rescale_or_select.defjvp
def _(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """The derivative of `_rescale`, since z_k depends on r at r = 1 too."""
    _, tangent = jax.jvp(_rescale, primals, tangents)
    return _rescale_or_select(*primals), tangent
