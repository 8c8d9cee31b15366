"""Directions g / (√ν + ε): what Optax lacks is ν in 16 bits, and a factored ν free of bias."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray, PyTree

from spa_optax._checks import check_same_tree, is_none
from spa_optax._precision import rounded, seeds_like, wide_dtype

# Optax does not export it. (To call `init` itself would start JAX at import.)
RMSState: Any = type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ()))


def scale_by_rms(
    b2: Any, eps: Any, dtype: DTypeLike | None, rounding_key: PRNGKeyArray | None
) -> optax.GradientTransformation:
    """`optax.scale_by_rms` with bias correction, and ν stored in a dtype.

    The direction takes ν as stored. From the wider ν, XLA for TPU makes a second kernel: 18 bytes
    per parameter in place of 14.
    """

    def init_fn(params: PyTree) -> Any:
        zeros = lambda x: jnp.zeros_like(x, dtype=dtype or jnp.finfo(x.dtype).dtype)  # real
        nu = jax.tree.map(lambda x: _sharded_like(zeros(x), x), params)
        return RMSState(jnp.zeros([], jnp.int32), nu)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        _check_state(state, RMSState, "full")
        check_same_tree("state.nu", state.nu, "params", params)
        state = jax.tree.map(jnp.asarray, state)  # a checkpoint may have NumPy's
        count = state.count
        seeds = seeds_like(None if dtype is None else rounding_key, count, state.nu, stream=1)
        k = jnp.asarray(optax.safe_increment(count))
        old = jax.tree.map(lambda v: v.astype(wide_dtype(v)), state.nu)
        nu = optax.tree.update_moment_per_elem_norm(updates, old, b2, 2)
        store = lambda v, old, seed: old if v is None else rounded(v, old.dtype, seed)
        nu = jax.tree.map(store, nu, state.nu, seeds, is_leaf=is_none)
        nu_hat = jax.tree.map(lambda v: v.astype(wide_dtype(v)), nu)
        nu_hat = optax.tree.bias_correction(nu_hat, b2, k)
        scale = lambda g, v: None if g is None else 1 / (jnp.sqrt(v) + eps) * g
        d = jax.tree.map(scale, updates, nu_hat, is_leaf=is_none)
        return d, state._replace(count=k, nu=nu)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_factored_rms(
    b2: Any, eps: Any, decay_rate: Any, min_dim_size_to_factor: int
) -> optax.GradientTransformation:
    """`optax.scale_by_factored_rms`, but free of bias for a constant β₂ (`decay_rate` None).

    ε² below 1e-30, Adafactor's own, counts as 1e-30: in float32 it would be lost, and the direction
    of a row without gradients 0/0.
    """
    optax_init = optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim_size_to_factor).init
    real = lambda x: jnp.real(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    init = lambda params: optax_init(jax.tree.map(real, params))

    def init_fn(params: PyTree) -> Any:
        state: Any = init(params)
        return state._replace(v=jax.tree.map(_sharded_like, state.v, params))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        _check_state(state, optax.FactoredState, "factored")
        check_same_tree("state", state[1:], "init(params)", jax.eval_shape(init, params)[1:])
        state = jax.tree.map(jnp.asarray, state)  # as above
        k, epsilon = state.count, jnp.maximum(eps**2, 1e-30)
        if decay_rate is None:
            decay = b2 * (1 - b2**k) / (1 - b2 ** (k + 1))  # Σ of weights is 1 at every step
        else:
            decay = 1 - (k + 1.0) ** -decay_rate

        def leaf(g: Any, row: Any, column: Any, v: Any) -> tuple[Any, ...]:
            if g is None:
                return None, row, column, v
            square = (g * jnp.conj(g)).real + epsilon
            average = lambda old, new: (decay * old + (1 - decay) * new).astype(old.dtype)
            if v.shape == g.shape:
                v = average(v, square)
                return g * v**-0.5, row, column, v
            i, j = factored_axes(g)
            row, column = average(row, _mean(square, j)), average(column, _mean(square, i))
            # ν = row · column / mean. As roots, none of which overflows.
            rows, columns = jnp.expand_dims(row, j), jnp.expand_dims(column, i)
            d = g * rows**-0.5 * (columns**-0.5 * jnp.sqrt(_mean(rows, i, keepdims=True)))
            return d, row, column, v

        trees = state.v_row, state.v_col, state.v
        result = jax.tree.map(leaf, updates, *trees, is_leaf=is_none)
        is_result = lambda node: isinstance(node, tuple) and len(node) == 4
        pick = lambda i: jax.tree.map(lambda leaf: leaf[i], result, is_leaf=is_result)
        d, *moments = map(pick, range(4))
        return d, optax.FactoredState(jnp.asarray(optax.safe_increment(k)), *moments)

    return optax.GradientTransformation(init_fn, update_fn)


def _check_state(state: Any, kind: Any, name: str) -> None:
    if not isinstance(state, kind):
        got = f"a `{type(state).__name__}`"
        raise ValueError(f"`state` must hold a {name} second moment, `{kind.__name__}`, got {got}")


def factored_axes(x: Array) -> tuple[int, int]:
    """The second longest axis and the longest, in optax's order."""
    i, j = np.argsort(x.shape)[-2:]
    return int(i), int(j)


def _mean(x: Array, axis: int, keepdims: bool = False) -> Float[Array, "..."]:
    """A mean whose sum does not overflow."""
    return jnp.sum(x * (1 / x.shape[axis]), axis, keepdims=keepdims)


def _sharded_like(zeros: Array, x: Any) -> Array:
    """Zeros with the sharding of a parameter of their shape, which `zeros_like` drops under jit.

    Without it every device would hold all of ν. XLA would fold a constant predicate before it
    propagates shardings, hence the barrier.
    """
    if not isinstance(x, jax.Array) or x.shape != zeros.shape:
        return zeros
    never = jax.lax.optimization_barrier(jnp.zeros([], bool))
    return jnp.where(never, jnp.real(x).astype(zeros.dtype), zeros)
