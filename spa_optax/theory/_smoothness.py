"""The smoothness of a loss at a point, by power iteration."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from spa_optax._checks import POSITIVE_INTEGER


def estimate_smoothness(
    loss: Callable[[PyTree], ArrayLike], params: PyTree, *, key: Array, num_iterations: int = 100
) -> Float[Array, ""]:
    """The largest |eigenvalue| of the Hessian of a loss at `params`, from below.

        v ← Hv/‖Hv‖      |λ| ≈ ‖Hv‖

    Power iteration from a random v (`key`). The paper's L bounds the curvature everywhere, and for
    the loss of a network there is often no such L.

    Examples:
      >>> import jax
      >>> from spa_optax import theory
      >>> loss = lambda p: (3 * p["x"] ** 2 - 5 * p["y"] ** 2) / 2
      >>> L = theory.estimate_smoothness(loss, {"x": 1.0, "y": 1.0}, key=jax.random.key(0))
      >>> print(f"{L:.3f}")
      5.000
    """
    POSITIVE_INTEGER.check(num_iterations=num_iterations)
    params = jax.tree.map(jnp.asarray, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            got = f"{leaf.dtype} at {jax.tree_util.keystr(path) or 'its root'}"
            raise ValueError(f"`params` must be real floating-point arrays, got {got}")

    def iterate(v: PyTree, _: None) -> tuple[PyTree, Float[Array, ""]]:
        norm = optax.tree.norm(v)
        v = jax.tree.map(lambda leaf: leaf / jnp.where(norm > 0, norm, 1), v)
        hessian_v = jax.jvp(jax.grad(loss), (params,), (v,))[1]
        return hessian_v, jnp.asarray(optax.tree.norm(hessian_v))

    return jax.lax.scan(iterate, optax.tree.random_like(key, params), length=num_iterations)[1][-1]
