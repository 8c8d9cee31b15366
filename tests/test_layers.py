"""`update_in_backward` is an ordinary step without its gradients in memory."""

from typing import Any

import in_backward
import jax
import jax.numpy as jnp
import numpy as np
import one_card
import optax
import pytest
from helpers import assert_apart_by_rounding, long, rounding_noise
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import eval_params, spa_adamw, stochastic_rounding

pytestmark = pytest.mark.usefixtures("standard_promotion")

MODEL = one_card.Model(2, 128, 4, 4, 256, vocabulary=256, head=32)
KEY = jax.random.key(1)
TOKENS = jnp.arange(12 * 8 * 17).reshape(12, 8, 17) * 37 % 256


def gpa_at_4_bytes(i: Any) -> optax.GradientTransformation:
    key = jax.random.fold_in(KEY, i)
    options: dict[str, Any] = {"second_moment": "factored", "state_dtype": jnp.bfloat16}
    return spa_adamw(3e-3, 0.1, 0.9, rounding_key=key, **options)


def adamw(i: Any) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 5, 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def start() -> Any:
    return optax.tree.cast(one_card.start(MODEL), jnp.float32)


def layer(x: jax.Array, w: Any) -> jax.Array:
    return one_card.layer(x, w, MODEL.head)


def place(x: Any, mesh: Mesh) -> jax.Array:
    """Split along the last axis, but one number for each layer is not."""
    spec = [None] * (x.ndim - 1) + ["all" if x.shape[-1] % mesh.size == 0 else None]
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def look_up(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    return embedding[tokens]


def trained(
    make_tx: Any, layer: Any = layer, mesh: Mesh | None = None
) -> tuple[Any, Any, Any]:
    trainer = in_backward.make_trainer(
        MODEL.layers, look_up, layer, one_card.cross_entropy, make_tx
    )
    params = start()
    if mesh:
        params = jax.tree.map(lambda x: place(x, mesh), params)
    state = jax.jit(trainer.init)(params)
    step, losses = jax.jit(trainer.step, donate_argnums=(0, 1)), []
    for tokens in TOKENS:
        params, state, loss = step(params, state, tokens[:, :-1], tokens[:, 1:])
        losses.append(float(loss))
    return params, state, losses


def trained_ordinarily(make_tx: Any, noise: Any = None) -> tuple[Any, list[float]]:
    """Every layer apart; all gradients, then all updates."""
    whole = start()
    layers = [
        jax.tree.map(lambda w, i=i: w[i], whole["layers"]) for i in range(MODEL.layers)
    ]
    params = [*layers, whole["top"], whole["embedding"]]
    txs = [make_tx(i) for i in range(len(params))]
    if noise:
        txs = [optax.chain(tx, noise) for tx in txs]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        *layers, top, embedding = params
        x = embedding[tokens[:, :-1]]
        for w in layers:
            x = layer(x, w)
        return one_card.cross_entropy(x, top, tokens[:, 1:])

    @jax.jit
    def step(params: Any, states: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        new = []
        for tx, g, state, w in zip(txs, grads, states, params, strict=True):
            updates, state = tx.update(g, state, w)
            new.append((optax.apply_updates(w, updates), state))
        return *map(list, zip(*new, strict=True)), value

    states, losses = [tx.init(w) for tx, w in zip(txs, params, strict=True)], []
    for tokens in TOKENS:
        params, states, value = step(params, states, tokens)
        losses.append(float(value))
    *layers, top, embedding = params
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {"layers": stacked, "top": top, "embedding": embedding}, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_tx",
    [long(gpa_at_4_bytes), long(adamw), long(lambda i: optax.contrib.muon(3e-3))],
)
def test_an_ordinary_step(make_tx: Any) -> None:
    """After 12 steps, also of a layer with `jax.checkpoint`, and over eight devices."""
    expected, losses = trained_ordinarily(make_tx)
    noisy, _ = trained_ordinarily(make_tx, rounding_noise(4))
    mesh = Mesh(np.array(jax.devices()), "all")
    runs = [
        trained(make_tx),
        trained(make_tx, jax.checkpoint(layer)),
        trained(make_tx, mesh=mesh),
    ]
    for params, _, found in runs:
        assert_apart_by_rounding(params, expected, noisy, at_most=0.02)
        np.testing.assert_allclose(found, losses, rtol=1e-3)
    assert losses[-1] < losses[0] - 0.3
    params, state, _ = runs[-1]
    stacks = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.ndim == 3]
    assert len(stacks) >= 14  # and as many of their state
    for leaf in stacks:
        assert leaf.sharding.is_equivalent_to(place(leaf, mesh).sharding, 3)


def test_each_layer_has_a_key_of_its_own() -> None:
    """Layers that are alike get the same gradient, and other bits."""

    def make_tx(i: Any) -> optax.GradientTransformation:
        return stochastic_rounding(optax.sgd(2.0**-9), jax.random.fold_in(KEY, i))

    model = in_backward.update_in_backward(lambda x, w: x + jnp.sum(w), make_tx)
    w = jnp.ones((4, 1000), jnp.bfloat16)
    _, inputs = model.forward(w, jnp.zeros([], jnp.bfloat16))
    new, *_ = model.backward(w, model.init(w), inputs, jnp.ones([], jnp.bfloat16))
    assert len(np.unique(np.asarray(new, np.float32), axis=0)) == 4


def test_x_of_each_layer() -> None:
    """z goes from 1 to 0 (the first direction is 1); y and x follow."""
    tx = spa_adamw(1.0, averaging=0.5, interpolation=0.5, eps=0.0, weight_decay=0.0)
    model = in_backward.update_in_backward(lambda x, w: x * jnp.sum(w), lambda i: tx)
    w = jnp.ones((2, 1))
    y, inputs = model.forward(w, jnp.array(1.0))
    w, state, _ = model.backward(w, model.init(w), inputs, y)
    np.testing.assert_allclose(w, np.full((2, 1), 0.25), rtol=1e-4)
    np.testing.assert_allclose(
        jax.vmap(eval_params)(state, w), np.full((2, 1), 0.5), rtol=1e-4
    )


def test_gradients_of_each_layer_add_up_in_multi_steps() -> None:
    """Two gradients, 1 and 3 in each layer, make one step of their mean."""
    tx = optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2)
    model = in_backward.update_in_backward(lambda x, w: x * jnp.sum(w), lambda i: tx)
    w = jnp.ones((2, 1))
    state = model.init(w)
    for h, expected in ((1.0, 1.0), (3.0, 0.0)):
        _, inputs = model.forward(w, jnp.array(1.0))
        w, state, _ = model.backward(w, state, inputs, jnp.array(h))
        np.testing.assert_allclose(w, np.full((2, 1), expected))
