"""The state of the whole family, and one step of it.

The members of the family differ only in the coefficients of a step. A member is a rule,
from the state to its `XZCoefficients`, and `transformation` makes an optimizer of it.
The recursion itself is written on one array, in `_codec.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from spa_optax import _checks as checks
from spa_optax._codec import (
    ArrayStep,
    YZCoefficients,
    check_codec,
    check_not_cast,
    codec_of,
    init_z,
    stored_tree,
)
from spa_optax._dtypes import Flag, Scalar, as_dtype, has_16_bits, scalar_dtype
from spa_optax._rounding import FOR_PARAMS_AND_Z, seeds_like
from spa_optax._trees import (
    by_path,
    check_kind,
    check_params,
    check_params_passed,
    check_same_tree,
    fill_none,
    is_none,
    is_trained,
    map_trained,
    scalar_of,
)
from spa_optax._xla import hide_from_xla


class SPAState(NamedTuple):
    """State of the whole family.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k at the default
    interpolation of 1. Scalars are float32, or float64 if a parameter has 64 bits.
    """

    count: Int[Array, ""]  # k, the number of steps taken
    z: PyTree[Array]  # z_k, shaped like the params, or a node that holds z_k − y_k
    eta: Scalar  # η_{k−1}, of the last step
    c: Scalar  # c_k, of the last step
    w: Scalar  # w_k, the scale of momentum: m_k = (x_k − z_k) / w_k
    mu_y: Scalar  # μ_y, of y_k


class XZCoefficients(NamedTuple):
    """One step as a member writes it, of x and z. g are the incoming updates.

        z_k     ← y_k + r (z_k − y_k)
        z_{k+1} = z_k − η g_k
        x_{k+1} = x_k + c (z_{k+1} − x_k) − δ g_k
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}            the params

    The new state keeps η, c, w and μ_y.
    """

    eta: Scalar  # η_k
    c: Scalar  # c_{k+1}
    w: Scalar  # w_{k+1}, for the state
    mu_y: Scalar | float = 1.0  # that of y_{k+1}; the state has that of y_k
    delta: Scalar | float = 0.0
    r: Scalar | None = None  # None: 1, which costs no operation. Only where y is x


Rule = Callable[[SPAState], XZCoefficients]


def transformation(
    rule: Rule,
    state_dtype: Any,
    rounding_key: Any,
    *,
    c_is_1: bool = False,
    mu_y_changes: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer, a member of the family, of a rule.

    Args:
      rule: from the state before a step to the `XZCoefficients` of the step.
      state_dtype: dtype of z, as for `spa`. It is checked here, for all members.
      rounding_key: for stochastic rounding, as for `spa`. It is checked here.
      c_is_1: whether params are z, and so need no key where z has 32 bits.
      mu_y_changes: whether μ_y may change, so that params without gradients move too.

    Returns:
      The optimizer. Its `update` takes an extra argument `observe`, a function that it
      calls with (g, params, state, xz) before the step, as `track_momentum` does.
    """
    state_dtype = _checked_state_dtype(state_dtype, rounding_key)

    def warn_of_rounding(params: PyTree, z: PyTree) -> None:
        if rounding_key is not None:
            return
        if has_16_bits(z) or (has_16_bits(params) and not c_is_1):
            checks.warn(
                "`rounding_key` should be given, such as `jax.random.key(0)`: params "
                "or z have 16 bits or fewer. Rounded to nearest they lose every step "
                "below half an ulp."
            )

    def init_fn(params: PyTree) -> SPAState:
        check_params(params)
        z = init_z(params, state_dtype)
        warn_of_rounding(params, z)
        dtype = scalar_dtype(params)
        # All are separate arrays, so that all can be donated.
        return SPAState(
            count=jnp.zeros([], jnp.int32),
            z=z,
            eta=jnp.zeros([], dtype),
            c=jnp.zeros([], dtype),
            w=jnp.zeros([], dtype),
            mu_y=jnp.ones([], dtype),  # y_0 is x_0
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        check_state("state", state, params)
        check_codec("state.z", state.z, params, state_dtype)
        _check_updates(updates, state, params, mu_y_changes)
        warn_of_rounding(params, state.z)
        state = jax.tree.map(jnp.asarray, state)
        xz = rule(state)
        if observe := extra.get("observe"):
            observe(updates, params, state, xz)
        return _step(updates, state, params, xz, rounding_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _checked_state_dtype(state_dtype: Any, rounding_key: Any) -> Any:
    """The dtype, or None. Raises ValueError unless it and the key are right."""
    checks.STATE_DTYPE.optional().check(state_dtype=state_dtype)
    checks.KEY.optional().check(rounding_key=rounding_key)
    state_dtype = None if state_dtype is None else jnp.dtype(state_dtype)
    if rounding_key is None and state_dtype == jnp.float8_e4m3fn:
        raise ValueError(
            "`rounding_key` must be given with a `state_dtype` of 8 bits, got None"
        )
    return state_dtype


def _step(
    updates: PyTree,
    state: SPAState,
    params: PyTree,
    xz: XZCoefficients,
    rounding_key: PRNGKeyArray | None,
) -> tuple[PyTree, SPAState]:
    """One step: y_{k+1} − y_k, and the new state."""
    mu_y = jnp.asarray(xz.mu_y, xz.eta.dtype)
    last = {"eta": xz.eta, "c": xz.c, "w": xz.w, "mu_y": mu_y}
    # If XLA knew constants among them, it would not update z in place.
    yz, last = hide_from_xla(_of_y_and_z(xz, state), last)
    u, z = _step_arrays(updates, state, params, yz, rounding_key)
    count = jnp.asarray(optax.safe_increment(state.count))
    return u, SPAState(count=count, z=z, **as_dtype(last, state.w.dtype))


def _step_arrays(
    updates: PyTree,
    state: SPAState,
    params: PyTree,
    yz: YZCoefficients,
    rounding_key: PRNGKeyArray | None,
) -> tuple[PyTree, PyTree]:
    """One step of every array: y_{k+1} − y_k, and what the state holds of z_{k+1}."""
    codec, stored_z = codec_of(state.z), stored_tree(state.z)
    seeds = seeds_like(rounding_key, state.count, stored_z, FOR_PARAMS_AND_Z)

    def step_array(y: Any, stored: Any, g: Any, seed: Any) -> ArrayStep:
        if g is None or stored is None:
            return ArrayStep(None, stored)
        if not is_trained(y):  # integers stay
            return ArrayStep(jnp.zeros_like(y), stored)
        return codec.step(jnp.asarray(y), stored, jnp.asarray(g), yz, seed)

    steps = jax.tree.map(step_array, params, stored_z, updates, seeds, is_leaf=is_none)
    u = jax.tree.map(lambda s: s.u, steps, is_leaf=_is_step)
    z = jax.tree.map(lambda s: s.stored, steps, is_leaf=_is_step)
    return u, codec.node(z)


def _is_step(node: Any) -> bool:
    return isinstance(node, ArrayStep)


def _of_y_and_z(xz: XZCoefficients, state: SPAState) -> YZCoefficients:
    """The step of x and z as one of y and z, since x is not stored.

    Let a prime mean k + 1, but c be c_{k+1}, and ρ = μ'/μ. With
    x = (y − (1 − μ) z)/μ and z = z' + η g

        y' = μ' x' + (1 − μ') z'
           = μ' (1 − c) x + (1 − μ' (1 − c)) z' − μ' δ g
           = ρ (1 − c) y + (1 − ρ (1 − c)) z' − δ_y g
           = y + c_y (z' − y) − δ_y g
        c_y = 1 − ρ (1 − c) = c − (1 − c)(ρ − 1)
        δ_y = η (1 − c)(ρ − μ') + μ' δ

    If the params are x, they are c and δ themselves.
    """
    eta, c = xz.eta, xz.c
    mu_y = jnp.asarray(xz.mu_y, eta.dtype)
    is_start = has_taken_no_step(state)
    if xz.r is not None:
        eta = _nan_if_params_are_not_x(eta, state.mu_y, is_start)
    rho_minus_1 = _relative_change(state.mu_y, mu_y)
    c_y = c - (1 - c) * rho_minus_1  # exactly c where ρ is 1
    delta_y = eta * (1 - c) * (1 + rho_minus_1 - mu_y) + mu_y * xz.delta
    return YZCoefficients(eta, c_y, delta_y, xz.r, is_start)


def _relative_change(old: Scalar, new: Scalar) -> Scalar:
    """new / old − 1, or 0, with its derivative, if both are stored as one number."""
    divisor = jnp.where(old > 0, old, 1).astype(new.dtype)
    change = new / divisor - 1
    is_unchanged = new.astype(old.dtype) == old
    return change - jnp.where(is_unchanged, jax.lax.stop_gradient(change), 0)


def _nan_if_params_are_not_x(eta: Scalar, mu_y: Scalar, is_start: Flag) -> Scalar:
    """η, or NaN if the params are not x, because the last step had a μ_y below 1.

    A step that rescales z − x takes the params for x. If it is only known when the
    program runs that they are not, NaN is better than a wrong x.
    """
    x_is_lost = ~is_start & (mu_y != 1)
    if checks.is_surely(x_is_lost):
        raise ValueError(
            "`state` must be of a run at an interpolation of 1, got one at "
            f"{mu_y:g}, whose params are not x. Begin anew at `eval_params(state, "
            "params)`, or go on with `spa`."
        )
    return jnp.where(x_is_lost, jnp.nan, eta)


def current_z(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the dtype to compute in; before the first step it is the params."""
    check_state("state", state, params)
    codec = codec_of(state.z)
    is_start = has_taken_no_step(state)

    def value(y: Any, stored: Any) -> Array:
        return codec.z(jnp.asarray(y), jnp.asarray(stored), is_start)

    return fill_none(map_trained(value, params, stored_tree(state.z)), params)


def has_taken_no_step(state: SPAState) -> Flag:
    """Whether z is y, as before the first step.

    The count does not tell, since users set it to shift a schedule. η, c and w are
    those of the last step, and all 0 only if no step moved z.
    """
    eta, c, w = scalar_of(state.eta), scalar_of(state.c), scalar_of(state.w)
    return (eta == 0) & (c == 0) & (w == 0)


def check_state(name: str, state: Any, params: PyTree | None) -> None:
    """Raises ValueError unless a state is of the family and fits the params."""
    check_params_passed(params)
    check_scalars(name, state)
    check_same_tree(f"{name}.z", stored_tree(state.z), "params", params)
    check_not_cast(f"{name}.z", state.z)


def check_scalars(name: str, state: Any) -> None:
    """Raises ValueError if a state is of another type, or its scalars were cast."""
    check_kind(name, state, SPAState)
    for field in ("eta", "c", "w", "mu_y"):
        dtype = scalar_of(getattr(state, field)).dtype
        if dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"`{name}.{field}` must be float32 or float64, whatever the params, "
                f"got {dtype}"
            )


def _check_updates(
    updates: PyTree, state: SPAState, params: PyTree, mu_y_changes: bool
) -> None:
    """Raises ValueError unless updates fit the params and what is stored of z."""
    check_same_tree("updates", updates, "params", params)
    stored = by_path(stored_tree(state.z))
    trained = {path for path, leaf in stored.items() if is_trained(leaf)}
    without_update = trained - by_path(updates).keys()
    if mu_y_changes and without_update:
        raise ValueError(
            "`updates` must not be None where `interpolation` may change, which moves "
            f"the params, got None at {min(without_update) or 'its root'}"
        )
    for name, leaves in (("state.z", stored), ("params", by_path(params))):
        without_leaf = by_path(updates).keys() - leaves.keys()
        if without_leaf:
            path = min(without_leaf) or "its root"
            raise ValueError(
                f"`updates` must be None where `{name}` is, got a gradient at {path}"
            )
