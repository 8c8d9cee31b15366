"""Updates each layer inside the backward pass, so that no gradient of the whole model exists."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from spa_optax._checks import check, check_floats
from spa_optax._optax_states import SKIPS_UPDATES, visible_sam
from spa_optax._trees import find, leaves_with_path


class ScannedLayers(NamedTuple):
    """The functions of `update_in_backward`. L layers are stacked along the arrays' first axis."""

    init: Callable[[PyTree], PyTree]  # layers → state
    forward: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # layers, x → y, inputs
    # layers, state, inputs, ∂loss/∂y → layers, state, ∂loss/∂x
    backward: Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]


def update_in_backward(
    layer: Callable[[PyTree, PyTree], PyTree],
    make_tx: Callable[[Any], optax.GradientTransformation],
) -> ScannedLayers:
    """Trains layers that are scanned over, each updated as soon as its gradient is known.

    Layer i = 0, …, L − 1 maps x_i to x_{i+1} with the params w_i. From the last to the first,

        g_i, h_i = ∂(h_{i+1} · layer(x_i, w_i)) / ∂(w_i, x_i)        h_L = ∂loss/∂y
        w_i ← w_i + u_i, where u_i is the update of `make_tx(i)` for g_i

    The numbers are those of an ordinary step in which each layer has its own optimizer. But only
    one gradient g_i is in memory at a time, and of the forward pass only the inputs x_i. An
    ordinary step holds all g_i, as many bytes as the params.

    The optimizer sees one layer at a time, so norms and means are those of one layer.
    Clip by the norm of a layer: clipping by the global norm needs all gradients first, and so does
    accumulating them over several batches. `optax.clip_by_global_norm` in `make_tx` clips each
    layer by itself. That cannot be detected, since it has no state.

    Args:
      layer: from x and the params of one layer to the next x, a tree of floating-point arrays
        of the same shapes and dtypes. It is computed again in the backward pass, so it needs no
        `jax.checkpoint`.
      make_tx: from i, which may be traced, to the optimizer of layer i. All must have states of
        one structure. Give each its own key if it rounds stochastically:
        `lambda i: spa_adamw(1e-3, rounding_key=jax.random.fold_in(key, i))`.

    Returns:
      `init`, from the layers to their state, stacked in the same way; `forward`, from the layers
      and x to y = x_L and the inputs x_i; and `backward`, from layers, state, inputs and ∂loss/∂y
      to new layers, new state and ∂loss/∂x. Donate params and state to the jitted step: both are
      then updated in place. If they are sharded, split another axis than the first. For `gpa` and
      its relatives `jax.vmap(eval_params)(state, layers)` is the point to evaluate.

    Raises:
      ValueError: if an argument is not a function; if `layers` are not floating-point arrays with
        the same first axis; in `init`, if `make_tx(i)` accumulates or skips updates, or moves
        params aside (`optax.contrib.sam`); in `backward`, if state or inputs are of another number
        of layers.

    Examples:
      Two layers of one number, y = 3 · (2 · 1), with the loss y: the gradients are 2 and 3.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import update_in_backward
      >>> tx = optax.sgd(0.1)
      >>> model = update_in_backward(lambda x, w: w * x, lambda i: tx)
      >>> w = jnp.array([2.0, 3.0])
      >>> y, inputs = model.forward(w, jnp.array(1.0))
      >>> w, state, dx = model.backward(w, model.init(w), inputs, jnp.array(1.0))
      >>> print(y, w, dx)
      6.0 [1.7 2.8] 6.0

    References:
      Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, 2023,
      arXiv:2306.09782, Section 3.
    """
    check(layer=layer, make_tx=make_tx)

    def init_fn(layers: PyTree) -> PyTree:
        places = jnp.arange(_num_layers(layers=layers))
        state = jax.vmap(lambda i, w: make_tx(i).init(w))(places, layers)
        for node in [*find(state, SKIPS_UPDATES), *visible_sam(state)]:
            raise ValueError(
                "`make_tx` must not accumulate or skip updates, or move params aside, got a"
                f" `{type(node).__name__}`"
            )
        return state

    def forward_fn(layers: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        _num_layers(layers=layers)
        return jax.lax.scan(lambda x, w: (layer(x, w), x), x, layers)

    def backward_fn(
        layers: PyTree, state: PyTree, inputs: PyTree, dy: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        places = jnp.arange(_num_layers(layers=layers, state=state, inputs=inputs))

        # Params and state are carried, not scanned over: XLA then writes each layer in its place.
        def step(carry: Any, place: Any) -> tuple[Any, None]:
            (dy, stacked), (i, x) = carry, place
            w, of_tx = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, False), stacked)
            dx, g = jax.vjp(layer, x, w)[1](dy)
            u, of_tx = make_tx(i).update(g, of_tx, w)
            new = optax.apply_updates(w, u), of_tx
            put = lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, i, 0)
            return (dx, jax.tree.map(put, stacked, new)), None

        carry = dy, (layers, state)
        (dx, (layers, state)), _ = jax.lax.scan(step, carry, (places, inputs), reverse=True)
        return layers, state, dx

    return ScannedLayers(init_fn, forward_fn, backward_fn)


def _num_layers(**trees: PyTree) -> int:
    """The length of the first axis, which all arrays must have. Layers have a gradient, too."""
    check_floats("layers", trees["layers"])
    first = None
    for name, tree in trees.items():
        for path, leaf in leaves_with_path(tree):
            length = next(iter(np.shape(leaf)), None)
            first = length if first is None else first
            if leaf is not None and (length is None or length != first):
                at = path or "its root"
                rule = "have the layers as first axis of every array"
                rule += "" if first is None else f", {first}"
                raise ValueError(f"`{name}` must {rule}, got {np.shape(leaf)} at {at}")
        if not first:
            got = "none" if first is None else "arrays of 0 layers"
            raise ValueError(f"`{name}` must hold an array of one layer or more, got {got}")
    return first or 0
