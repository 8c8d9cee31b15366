"""One step of the family, and `member_from_rule`, which makes an optimizer of a rule.

The members of the family differ only in their rule, from the state to the
`XZCoefficients` of a step. The recursion itself is written on one array, in
`_codec.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike, PRNGKeyArray, PyTree

from . import _arguments
from ._checks import (
    check_params,
    check_state_dtype,
    check_update,
    nan_or_error_if_x_wrong,
    warn_of_missing_key,
    warn_of_rough_x,
)
from ._codec import codec_of, init_z, stored_tree
from ._coefficients import XZCoefficients, eliminate_x, fill_next_w
from ._rounding import FOR_PARAMS_AND_Z, seeds_like
from ._state import SPAState, is_initial
from ._trees import (
    as_dtype,
    is_inexact,
    is_none,
    scalar_dtype,
)
from ._xla import hide_from_xla

Rule = Callable[[SPAState], XZCoefficients]  # from the state before a step


def member_from_rule(
    rule: Rule,
    state_dtype: DTypeLike | None,
    rounding_key: PRNGKeyArray | None,
    *,
    nominal_averaging: optax.ScalarOrSchedule,
    nominal_interpolation: optax.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer that a rule defines, a member of the family.

    Args:
      rule: from the state before a step to the `XZCoefficients` of the step.
      state_dtype: dtype of z, as for `spa`. It is checked here.
      rounding_key: for stochastic rounding, as for `spa`. It is checked here.
      nominal_averaging: c, a scalar or a schedule, for checks alone: steps take c from
        the rule. A z in 8 bits is refused if c ends between 0 and 0.0125. At a constant
        1 there is no warning of a missing key beside a z of 32 bits.
      nominal_interpolation: μ_y, a scalar or a schedule, for checks alone. Unless it is
        a number, μ_y may change. Then no update may be None, since a change moves all
        params.

    Returns:
      The optimizer. Its `update` takes an extra argument `observe`, which it calls with
      (g, state, params, xz) before the step; `track_momentum` passes one.
    """
    check_state_dtype(state_dtype, rounding_key, nominal_averaging)
    state_dtype = None if state_dtype is None else jnp.dtype(state_dtype)
    params_are_z = _arguments.is_always(nominal_averaging, 1)
    mu_y_may_change = not _arguments.is_static_number(nominal_interpolation)

    def init_fn(params):
        check_params(params)
        z_field = init_z(params, state_dtype)
        warn_of_missing_key(params, z_field, rounding_key, params_are_z)
        warn_of_rough_x(params, nominal_averaging, nominal_interpolation)
        dtype = scalar_dtype(params)
        # All are separate arrays, so that all can be donated. With η = c = w = 0 it is
        # the initial state (`is_initial`).
        return SPAState(
            count=jnp.zeros([], jnp.int32),
            z=z_field,
            eta=jnp.zeros([], dtype),
            c=jnp.zeros([], dtype),
            w=jnp.zeros([], dtype),
            mu_y=jnp.ones([], dtype),  # y_0 is x_0
        )

    def update_fn(updates, state, params=None, *, observe=None, **_):
        check_update(updates, state, params, state_dtype)
        warn_of_missing_key(params, state.z, rounding_key, params_are_z)
        state = jax.tree.map(jnp.asarray, state)  # restored ones may be of NumPy
        xz = fill_next_w(rule(state), state.w)
        xz = nan_or_error_if_x_wrong(xz, updates, state, mu_y_may_change)
        if observe is not None:
            observe(updates, state, params, xz)
        return _step(updates, state, params, xz, rounding_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _step(
    updates: PyTree,
    state: SPAState,
    params: PyTree,
    xz: XZCoefficients,
    rounding_key: PRNGKeyArray | None,
) -> tuple[PyTree, SPAState]:
    """One step of every array: y_{k+1} − y_k, and the next state."""
    yz = eliminate_x(xz, state.mu_y)
    if rounding_key is not None and yz.delta_y is None:
        # XLA for TPU v7x fuses a step that rounds at random with Adam's direction only
        # if the program has the term δ_y g (benchmarks/compiled.py).
        yz = yz._replace(delta_y=jnp.zeros_like(yz.eta))
    next_scalars = {
        "eta": xz.eta,
        "c": xz.c,
        "w": xz.next_w,
        "mu_y": jnp.ones_like(xz.eta) if xz.next_mu_y is None else xz.next_mu_y,
    }
    (yz, state_is_initial), next_scalars = hide_from_xla(
        (yz, is_initial(state)), next_scalars
    )
    codec, stored_z = codec_of(state.z), stored_tree(state.z)
    seeds = seeds_like(rounding_key, state.count, stored_z, FOR_PARAMS_AND_Z)

    def step_leaf(y, stored, g, seed):
        if stored is None:  # not trained
            return None, None
        if not is_inexact(y):  # integers stay
            return None if g is None else jnp.zeros_like(y), stored
        g = None if g is None else jnp.asarray(g)
        return codec.step(jnp.asarray(y), stored, g, yz, seed, state_is_initial)

    leaves, structure = jax.tree.flatten(params, is_leaf=is_none)
    others = map(structure.flatten_up_to, (stored_z, updates, seeds))
    steps = list(map(step_leaf, leaves, *others))
    next_z = structure.unflatten(next_stored for _, next_stored in steps)
    return structure.unflatten(u for u, _ in steps), SPAState(
        count=jnp.asarray(optax.safe_increment(state.count)),
        z=codec.wrap(next_z),
        **as_dtype(next_scalars, state.w.dtype),
    )
