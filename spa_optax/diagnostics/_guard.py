"""A wrapper that raises where something else moves the params."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from .. import _arguments
from .._checks import check_params_passed, check_state_type
from .._trees import (
    Flag,
    arrays_by_path,
    as_dtype,
    compute_dtype,
    copy_arrays,
    is_none,
    map_inexact,
)


class GuardParamsState(NamedTuple):
    """State of `guard_params`."""

    inner_state: PyTree
    has_updated: Flag  # False before the first update, when any params pass
    params: PyTree  # y_k
    next_params: PyTree  # y_{k+1}, as the last update makes it


def guard_params(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Raises if the params are not those that the last update of `inner` made.

        y_{k+1} = y_k + u_k

    Optimizers with a z need that, since z does not follow what else moves the params: a
    transform behind them in a chain, a wrapper such as `optax.lookahead`, a projection,
    pruning. Use it to look for such a mistake, not to train: it stores the params
    twice.

    Args:
      inner: a transformation whose updates are added to the params as they are. Put
        `guard_params` directly around an optimizer of this package: it does not see
        what changes the update inside.

    Returns:
      A transformation with the updates of `inner`. `update` needs `params`. Outside
      `jax.jit` it raises `ValueError`; in compiled code JAX raises
      `jax.errors.JaxRuntimeError` with the same message. It does not know of
      `shift_z`.

    Raises:
      ValueError: if `inner` is not a transformation, or, in `update`, the params
        differ from those of the last update by more than an ulp.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> from spa_optax.diagnostics import guard_params
      >>> tx = optax.chain(guard_params(spa(1.0)), optax.scale(0.5))
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
      >>> try:
      ...     tx.update(jnp.ones(2), state, params + updates)
      ... except ValueError as error:
      ...     print(str(error)[:58])
      `params` must be those that the last update made, got othe
    """
    _arguments.TRANSFORMATION.check(inner=inner)
    tx = optax.with_extra_args_support(inner)

    def init_fn(params):
        return GuardParamsState(
            inner_state=inner.init(params),
            has_updated=jnp.zeros([], bool),
            params=copy_arrays(params),
            next_params=copy_arrays(params),
        )

    def update_fn(updates, state, params=None, **extra):
        check_state_type("state", state, GuardParamsState)
        check_params_passed(params)
        _check_not_moved(state, params)
        u, inner_state = tx.update(updates, state.inner_state, params, **extra)
        return u, GuardParamsState(
            inner_state=inner_state,
            has_updated=jnp.ones([], bool),
            params=copy_arrays(params),
            next_params=jax.tree.map(
                lambda y, u: y if u is None else optax.apply_updates(y, u),
                params,
                u,
                is_leaf=is_none,
            ),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _check_not_moved(state: GuardParamsState, params: PyTree) -> None:
    """Raises, also in compiled code, where params are not those after the last step."""

    def is_moved(*leaves):
        y, old_y, next_y = map(jnp.asarray, leaves)
        eps = float(jnp.finfo(y.dtype).eps)
        y, old_y, next_y = as_dtype((y, old_y, next_y), compute_dtype(y))
        # The user's program and this one may round y + u differently.
        ulp = eps * jnp.maximum(jnp.abs(old_y), jnp.abs(next_y))
        both_nan = jnp.isnan(y) & jnp.isnan(next_y)
        is_same = (jnp.abs(y - next_y) <= ulp) | (y == next_y) | both_nan
        return state.has_updated & ~jnp.all(is_same)

    moved = arrays_by_path(
        map_inexact(is_moved, params, state.params, state.next_params)
    )
    if any(isinstance(flag, Tracer) for flag in moved.values()):
        jax.debug.callback(_raise_if_moved, moved)
    else:
        _raise_if_moved(moved)


def _raise_if_moved(moved: dict[str, Any]) -> None:
    for path, flag in moved.items():
        if flag:
            raise ValueError(
                "`params` must be those that the last update made, got others at "
                f"{path or 'their root'}. Put the optimizer of this package last in "
                "its chain, and in no wrapper that moves the params. After an edit of "
                "the params call `shift_z`, without this guard."
            )
