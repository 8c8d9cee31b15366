"""One update for the whole family. Its members differ only in their scalars.

A member is a rule, from the state to the `Scalars` of a step. `advance` does the rest.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from spa_optax import _storage, _trees as trees
from spa_optax._checks import KEY, STATE_DTYPE, check_params, is_surely
from spa_optax._precision import (
    Stream,
    has_narrow,
    round_update,
    scalar_dtype,
    scaled,
    seeds_like,
)
from spa_optax._storage import form_of, tree_of
from spa_optax._trees import map_trained
from spa_optax._xla import Ratios, rescale, shared


class SPAState(NamedTuple):
    """State of the whole family. Its scalars are float32, or float64 if a parameter has
    64 bits.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k at the default
    interpolation of 1.
    """

    count: Int[Array, ""]  # k, the number of steps taken
    z: PyTree[
        Array
    ]  # z_k, shaped like the params; in 16 bits or fewer a node of z_k − y_k
    eta: Float[
        Array, ""
    ]  # η_{k−1}, of the last step: for inspection, not read by the update
    c: Float[Array, ""]  # c_k, of the last step: for inspection, not read by the update
    w: Float[Array, ""]  # w_k, the scale of momentum: m_k = (x_k − z_k) / w_k
    mu_y: Float[Array, ""]  # μ_y, of y_k
    rule_state: PyTree[Array] = ()  # scalars that the member's rule keeps for itself


class Scalars(NamedTuple):
    """The scalars of one step; g are the incoming updates, and z_0 = x_0.

        z_k     ← x_k + r (z_k − x_k)
        z_{k+1} = z_k − η g_k
        x_{k+1} = x_k + c (z_{k+1} − x_k) − δ g_k
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}            the params

    A field that is None leaves its term out of the program.
    """

    eta: Float[Array, ""]
    c: Float[Array, ""]
    w: Float[Array, ""]  # w_{k+1}, for the state
    mu_y: Float[Array, ""] | None = None  # None: 1
    delta: Float[Array, ""] | None = None  # None: 0
    r: tuple[Float[Array, ""], Float[Array, ""]] | None = (
        None  # numerator, denominator; None: 1
    )
    rule_state: PyTree[Array] = ()  # for the state


Rule = Callable[[SPAState, PyTree], Scalars]  # from the state and the params


class Step(NamedTuple):
    """What a step did to x, for diagnostics: x_{k+1} − x_k = c (d_k − η g_k) − δ
    g_k.
    """

    gradient: PyTree[Array]  # g_k
    distance: PyTree[Array]  # d_k = z_k − x_k after rescaling, in the compute dtype
    rounding: PyTree[Array]  # bound on the rounding error of x_k and z_k in d_k
    out_of_range: PyTree[_storage.OutOfRange]  # how many elements of z, in each array
    eta: Float[Array, ""]
    c: Float[Array, ""]  # c_{k+1}
    delta: Float[Array, ""] | None
    r: Ratios
    c_before: Float[Array, ""]  # c_k, of the last step


def transformation(
    rule: Rule,
    state_dtype: Any,  # checked here, for all members
    rounding_key: Any,
    *,
    mu_y_at: Callable[[Array], Array] = jnp.ones_like,
    rule_state: PyTree[Array] = (),
) -> optax.GradientTransformationExtraArgs:
    """The member of a rule and its first state, with μ_y at a count. `observe` gets
    each `Step`.
    """
    STATE_DTYPE.optional().check(state_dtype=state_dtype)
    KEY.optional().check(rounding_key=rounding_key)
    state_dtype = None if state_dtype is None else jnp.dtype(state_dtype)
    if rounding_key is None and state_dtype is not None and state_dtype.itemsize == 1:
        raise ValueError(
            "`rounding_key` must be given with a `state_dtype` of 8 bits, got None"
        )

    def init_fn(params: PyTree) -> SPAState:
        check_params(params)
        z = _storage.init(params, state_dtype)
        if rounding_key is None and (has_narrow(params) or has_narrow(z)):
            text = (
                "`rounding_key` should be given, such as `jax.random.key(0)`: "
                "params or z have"
            )
            hint = (
                "16 bits or fewer, and rounded to nearest they lose steps below "
                "half an ulp."
            )
            warnings.warn(f"{text} {hint}", stacklevel=3)
        # All are separate arrays, so that all can be donated.
        dtype, count = scalar_dtype(params), jnp.zeros([], jnp.int32)
        eta, c, w = (jnp.zeros([], dtype) for _ in range(3))
        mu_y, own = (
            jnp.array(mu_y_at(count), dtype),
            jax.tree.map(jnp.array, rule_state),
        )
        return SPAState(count, z, eta, c, w, mu_y, own)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        _check_state(state, params, state_dtype)
        expected, own = map(jax.tree.structure, (rule_state, state.rule_state))
        if own != expected:
            raise ValueError(
                f"`state.rule_state` must be this member's, {expected}, got {own}"
            )
        trees.check_same_tree("updates", updates, "params", params)
        if odd := sorted(
            trees.by_path(updates).keys() - trees.by_path(tree_of(state.z)).keys()
        ):
            at = odd[0] or "its root"
            raise ValueError(
                f"`updates` must be None where `state.z` is, got a gradient at {at}"
            )
        u, state, step = advance(updates, state, params, rule, rounding_key)
        if observe := extra.get("observe"):
            observe(step)
        return u, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def advance(
    updates: PyTree,
    state: SPAState,
    params: PyTree,
    rule: Rule,
    rounding_key: PRNGKeyArray | None,
) -> tuple[PyTree, SPAState, Step]:
    """One step: y_{k+1} − y_k, the new state, and what the step did."""
    state = jax.tree.map(jnp.asarray, state)
    form, stored, at_start = form_of(state.z), tree_of(state.z), is_at_start(state)
    g, y = _as_arrays(updates, stored), _as_arrays(params, stored)
    scalars = rule(state, y)
    eta, c, w = scalars.eta, scalars.c, scalars.w
    if scalars.mu_y is None:  # x would be y
        is_lost = ~at_start & (state.mu_y != 1)
        if is_surely(is_lost):
            raise ValueError(
                f"`interpolation` after {state.mu_y:g} must be `lambda k: 1.0`, got 1"
            )
        eta = jnp.where(is_lost, jnp.nan, eta)
    p, delta = _for_params(scalars, state)
    r = _ratios(scalars, y, form.follows_params, at_start)
    one = jnp.ones_like(eta)
    mu_y = one if scalars.mu_y is None else scalars.mu_y
    of_step = (eta, c, w, mu_y, p, delta, r, at_start, one)
    eta, c, w, mu_y, p, delta, r, at_start, opaque_one = shared(of_step)
    seeds = seeds_like(rounding_key, state.count, stored, Stream.PARAMS_AND_Z)

    # Where z − y is stored, z stands for z − y_k here: of z itself TPU v7x would make
    # two kernels. z_k ← y_k + r (z_k − y_k)
    z = rescale(
        y, map_trained(form.decode, y, stored), r, at_start, form.follows_params
    )
    # z_{k+1} = z_k − η g_k
    z_next = map_trained(lambda z, g: z - scaled(eta, g, z.dtype), z, g)
    # y_{k+1} = y_k + p (z_{k+1} − y_k) − δ g_k, rounded to the params' dtype
    distance = lambda z, y: z if form.follows_params else z - y.astype(z.dtype)

    def move(y: Any, d: Any, g: Any, seed: Any) -> Array | None:
        if d is None:
            return (
                None if g is None or y is None else jnp.zeros_like(y)
            )  # integers stay
        u = scaled(p, d, d.dtype)
        if delta is not None:
            u -= scaled(delta, g, d.dtype)
        return round_update(u, y, seed, low_bits=True)

    u = jax.tree.map(
        move, y, map_trained(distance, z_next, y), g, seeds, is_leaf=trees.is_none
    )
    itself = lambda z, y: y.astype(z.dtype) + z if form.follows_params else z
    z_next = map_trained(itself, z_next, y)
    # From y + u, an output: XLA for TPU then makes one kernel of both.
    z_stored = _storage.encode(z_next, map_trained(jnp.add, y, u), seeds, state.z)

    count = jnp.asarray(optax.safe_increment(state.count))
    # Multiplied by a 1 that XLA cannot see, they are one kernel on a GPU.
    own = jax.tree.map(
        lambda new, old: new.astype(old.dtype), scalars.rule_state, state.rule_state
    )
    of_state = [(s * opaque_one).astype(state.w.dtype) for s in (eta, c, w, mu_y)]
    new_state = SPAState(count, z_stored, *of_state, rule_state=own)

    def rounding_error(y: Array, stored: Array, d: Array) -> Array:
        """A bound on that of d = z − y, which has what y lost by rounding."""
        of_y = float(jnp.finfo(y.dtype).eps) * jnp.abs(y).astype(d.dtype)
        size = d if form.follows_params else y
        return jnp.maximum(of_y, form.eps(stored) * jnp.abs(size).astype(d.dtype))

    # Under jit this is computed only if observed.
    d = map_trained(distance, z, y)
    rounding = map_trained(rounding_error, y, stored, d)
    out_of_range = map_trained(lambda _, stored: form.out_of_range(stored), y, stored)
    if scalars.mu_y is not None:  # of x: z_k − y_k is μ_y (z_k − x_k)
        over_mu_y = lambda leaf: leaf / state.mu_y.astype(leaf.dtype)
        d, rounding = (map_trained(over_mu_y, tree) for tree in (d, rounding))
    return (
        u,
        new_state,
        Step(g, d, rounding, out_of_range, eta, c, scalars.delta, r, state.c),
    )


def _for_params(scalars: Scalars, state: SPAState) -> tuple[Array, Array | None]:
    """The p and δ with which y follows x: y_{k+1} = y_k + p (z_{k+1} − y_k) − δ g_k.

    z_k − y_k = μ (z_k − x_k) with the μ of y_k. If μ_y changes by ρ, 1 − c becomes ρ (1
    − c).
    """
    eta, c, _, mu_y, delta, *_ = scalars
    if mu_y is None:
        return c, delta
    before = state.mu_y
    same = is_at_start(state) | (mu_y.astype(before.dtype) == before)
    change = mu_y / jnp.where(before > 0, before, 1).astype(mu_y.dtype) - 1  # ρ − 1
    change -= jnp.where(
        same, jax.lax.stop_gradient(change), 0
    )  # its derivative is kept
    of_z = eta * (1 - c) * (1 + change - mu_y)
    return c - (1 - c) * change, of_z if delta is None else of_z + mu_y * delta


def _ratios(
    scalars: Scalars, y: PyTree, of_difference: bool, at_start: Bool[Array, ""]
) -> Ratios:
    """The r for each precision of z − y; 0 at the start and where momentum restarts.

    Rescaling multiplies the rounding error of y in z − y by r. At r = 1/√eps that would
    cost half the digits of y, so momentum restarts from 0 instead. A stored difference
    has no such error. At the start it is 0, or what was lost when the params were cast,
    which is kept.
    """
    if scalars.r is None:
        return {}
    (numerator, denominator), result = scalars.r, {}
    dtypes = map_trained(lambda y: "float32" if of_difference else str(y.dtype), y)
    # Sorted, since every process must compile the same program.
    for dtype in sorted(set(jax.tree.leaves(dtypes))):
        restarts = numerator * float(jnp.finfo(dtype).eps) ** 0.5 > denominator
        restarts = restarts if of_difference else at_start | restarts
        # With the division last, XLA on CPU does it once, not in every kernel.
        result[dtype] = jnp.where(restarts, 0, numerator) / denominator
    return result


def current_z(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the compute dtype; at the start, when params may have been replaced, from
    them.
    """
    _check_state(state, params)
    state = jax.tree.map(jnp.asarray, state)
    form, stored = form_of(state.z), tree_of(state.z)
    y = _as_arrays(params, stored)
    z = map_trained(form.value, y, stored)
    return trees.fill_none(
        rescale(y, z, {}, is_at_start(state), form.follows_params), y
    )


def _as_arrays(tree: PyTree, z: PyTree) -> PyTree:
    """A tree as arrays, and None where there is no z: Equinox models hold functions."""
    array = lambda leaf, z: None if leaf is None or z is None else jnp.asarray(leaf)
    return jax.tree.map(array, tree, z, is_leaf=trees.is_none)


def is_at_start(state: SPAState) -> Bool[Array, ""]:
    """True until the first step. A count that was reset to 0 has a w, and keeps m."""
    return (trees.scalar_of(state.count) == 0) & (trees.scalar_of(state.w) == 0)


def _check_state(
    state: Any, params: PyTree | None, state_dtype: Any = _storage.ANY
) -> None:
    if params is None:
        raise ValueError("`params` must be passed to `update`, got None")
    check_scalars("state", state)
    _storage.check_stored("state.z", state.z, params, state_dtype)
    trees.check_same_tree("state.z", tree_of(state.z), "params", params)


def check_scalars(name: str, state: Any) -> None:
    """Raises ValueError if the state is of another type, or its scalars were cast."""
    trees.check_kind(name, state, SPAState)
    for field in ("eta", "c", "w", "mu_y"):
        dtype, rule = trees.scalar_of(getattr(state, field)).dtype, "float32 or float64"
        if dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"`{name}.{field}` must be {rule}, whatever the params, got {dtype}"
            )
