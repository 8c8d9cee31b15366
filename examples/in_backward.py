"""A training step in which each layer is updated as soon as its gradient is known.

To fork: copy this file. `make_trainer` makes the step from your model's functions, and
`one_card.py` trains a Llama with it. (LOMO: Lv et al., Full Parameter Fine-tuning for
Large Language Models with Limited Resources, 2023, arXiv:2306.09782.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ScannedLayers(NamedTuple):
    """The functions of `update_in_backward`. L layers are stacked along the arrays'
    first axis.
    """

    init: Callable[[Any], Any]  # layers → state
    forward: Callable[[Any, Any], tuple[Any, Any]]  # layers, h → h, inputs
    # layers, state, inputs, ∂loss/∂h → layers, state, ∂loss/∂h
    backward: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]


def update_in_backward(layer: Any, make_tx: Any) -> ScannedLayers:
    """Trains layers that are scanned over, each updated as soon as its gradient is
    known.

    Layer i = 0, …, L − 1 maps the activations h_i to h_{i+1} with the params w_i. dh_i
    is ∂loss/∂h_i. From the last layer to the first,

        g_i, dh_i = ∂(dh_{i+1} · layer(h_i, w_i)) / ∂(w_i, h_i)
        w_i ← w_i + u_i, where u_i is the update of `make_tx(i)` for g_i

    These are the numbers of an ordinary step in which each layer has its own optimizer.
    But only one gradient g_i is in memory at a time, and of the forward pass only the
    inputs h_i. In `make_tx`, `optax.MultiSteps` would store all gradients again,
    `optax.apply_if_finite` decides for each layer by itself, and `optax.contrib.sam`
    does not work.
    """

    def num_layers(layers: Any) -> int:
        return len(jax.tree.leaves(layers)[0])

    def init(layers: Any) -> Any:
        return jax.vmap(lambda i, w: make_tx(i).init(w))(
            jnp.arange(num_layers(layers)), layers
        )

    def forward(layers: Any, h: Any) -> tuple[Any, Any]:
        return jax.lax.scan(lambda h, w: (layer(h, w), h), h, layers)

    def backward(layers: Any, state: Any, inputs: Any, dh: Any) -> tuple[Any, Any, Any]:
        # Params and state are carried, not scanned over: XLA then writes each layer in
        # its place.
        def step(carry: Any, place: Any) -> tuple[Any, None]:
            (dh, stacked), (i, h) = carry, place
            w, of_tx = jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, False), stacked
            )
            dh, g = jax.vjp(layer, h, w)[1](dh)
            u, of_tx = make_tx(i).update(g, of_tx, w)
            new = optax.apply_updates(w, u), of_tx
            stacked = jax.tree.map(
                lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, i, 0),
                stacked,
                new,
            )
            return (dh, stacked), None

        carry, places = (dh, (layers, state)), jnp.arange(num_layers(layers))
        (dh, (layers, state)), _ = jax.lax.scan(
            step, carry, (places, inputs), reverse=True
        )
        return layers, state, dh

    return ScannedLayers(init, forward, backward)


class Trainer(NamedTuple):
    """The two functions of `make_trainer`."""

    init: Callable[[Any], Any]  # params → state
    step: Callable[
        [Any, Any, jax.Array, jax.Array], Any
    ]  # params, state, … → params, state, loss


def make_trainer(
    num_layers: int, embed: Any, layer: Any, loss: Any, make_tx: Any
) -> Trainer:
    """One step: forward, the head's update, back through the layers, the embedding's
    update.

    `embed(embedding, tokens)` returns activations h, `layer(h, w)` the next h, and
    `loss(h, top, labels)` a number.
    """
    layers = update_in_backward(layer, make_tx)
    place = {"top": num_layers, "embedding": num_layers + 1}

    def init(params: Any) -> Any:
        others = {name: make_tx(i).init(params[name]) for name, i in place.items()}
        return {"layers": layers.init(params["layers"]), **others}

    def updated(name: str, gradient: Any, params: Any, state: Any) -> Any:
        updates, new = make_tx(place[name]).update(gradient, state[name], params[name])
        return optax.apply_updates(params[name], updates), new

    def step(params: Any, state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        h, back_to_embedding = jax.vjp(lambda e: embed(e, tokens), params["embedding"])
        h, inputs = layers.forward(params["layers"], h)
        value, (dh, g) = jax.value_and_grad(loss, (0, 1))(h, params["top"], labels)
        new = {"top": updated("top", g, params, state)}
        *of_layers, dh = layers.backward(params["layers"], state["layers"], inputs, dh)
        (g,) = back_to_embedding(dh)
        new |= {
            "layers": of_layers,
            "embedding": updated("embedding", g, params, state),
        }
        params, state = ({name: pair[i] for name, pair in new.items()} for i in (0, 1))
        return params, state, value

    return Trainer(init, step)
