"""Sizes of the networks, recipes and their defaults, and one step of training."""

from functools import partial
from pathlib import Path
from typing import Any

import chex
import cifar_data
import imagenet_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_cifar10
import train_imagenet
import training
from flax import nnx
from helpers import long, x64
from models import PREACT_RESNETS, RESNETS, convolution
from optimizers import CIFAR10, IMAGENET, make_optimizer
from paper_helpers import config, imagenet_config, mesh_of, small_data


class Kept(nnx.Module):
    """Keeps its input."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.kept = nnx.data(x) if hasattr(nnx, "data") else x
        return x


@pytest.mark.parametrize(
    ("make", "num_classes", "size", "num_params", "last_block"),
    [
        # 11.17 and 23.51 million, as usually quoted; and torchvision's.
        (PREACT_RESNETS["resnet18"], 10, 32, 11_172_170, (4, 4, 512)),
        long(PREACT_RESNETS["resnet50"], 10, 32, 23_513_162, (4, 4, 2_048)),
        long(
            partial(RESNETS["resnet50"], num_classes=1_000),
            1_000,
            224,
            25_557_032,
            (7, 7, 2_048),
        ),
    ],
)
def test_sizes(
    make: Any, num_classes: int, size: int, num_params: int, last_block: Any
) -> None:
    def forward(x: jax.Array) -> tuple[Any, Any, Any]:
        model = make(rngs=nnx.Rngs(0))
        model.blocks = nnx.Sequential(*model.blocks.layers, Kept())
        return (
            nnx.to_pure_dict(nnx.state(model, nnx.Param)),
            model(x),
            model.blocks.layers[-1].kept,
        )

    params, logits, body = jax.eval_shape(forward, jnp.zeros((2, size, size, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_params
    assert (logits.shape, body.shape) == ((2, num_classes), (2, *last_block))


@pytest.mark.usefixtures("_small_networks")
@pytest.mark.parametrize("of", ["cifar10", long("imagenet")])
def test_evaluation(of: str, tree: Path) -> None:
    """Against the model itself, on a set that no batch divides."""
    if of == "cifar10":
        (train, test), mesh, make = small_data(), mesh_of(8), PREACT_RESNETS["small"]
        program = train_cifar10.make_program(
            config(batch=8, learning_rate=0.01),
            training.on_all(train, mesh),
            test,
            mesh,
        )
        images, labels = cifar_data.normalize(jnp.asarray(test[0])), test[1]
    else:
        files = [imagenet_data.find(tree / part) for part in ("train", "val")]
        program = train_imagenet.make_program(imagenet_config(), *files, mesh_of(4), 2)
        decoded = [
            imagenet_data.decode(path.read_bytes(), 32, None) for path in files[1].paths
        ]
        images, labels = imagenet_data.normalize(np.stack(decoded)), files[1].labels
        make = partial(RESNETS["small"], num_classes=3)

    @jax.jit
    def forward(params: Any, batch_stats: Any) -> jax.Array:
        model = make(rngs=nnx.Rngs(1))
        nnx.update(model, params, batch_stats)
        model.eval()
        return model(images)

    state = program.init(0)
    logits = forward(state.params, state.batch_stats)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    expected = {
        "test_loss": loss,
        "test_accuracy": (logits.argmax(-1) == labels).mean(),
    }
    chex.assert_trees_all_close(program.evaluate(state), expected, rtol=1e-5)


def hyperparams(tx: Any, counts: list[int]) -> list[tuple[float, float]]:
    """The η and c that SPA uses at these counts."""
    params, found = jnp.ones(2), []
    for count in counts:
        state = optax.tree.set(tx.init(params), count=jnp.int32(count))
        _, state = jax.jit(tx.update)(params, state, params)
        found.append(
            (float(optax.tree.get(state, "eta")), float(optax.tree.get(state, "c")))
        )
    return found


@pytest.mark.parametrize("epochs", [300, 30])
def test_recipe(epochs: int) -> None:
    steps, scale = 391, epochs / 300
    first, second, last = 150 * 391 * scale, 225 * 391 * scale, 300 * 391 * scale
    counts = [0, int(first) - 2, int(first), round(second), round(last) - 1]

    def make(name: str) -> optax.GradientTransformation:
        return make_optimizer(config(name, epochs=epochs), CIFAR10, steps)

    # (η, c); `averaging` at count k is c_{k+1}, so c has changed one count ahead of η.
    expected = {
        "spa-eta": [(1, 0.1), (1, 0.1), (0.1, 0.1), (0.01, 0.1), (0.01, 0.1)],
        "spa-abrupt": [(1, 0.1), (1, 0.1), (0.1, 1), (0.01, 1), (0.01, 1)],
        "drop-eta": [(1, 0.1), (1, 1), (0.1, 1), (0.01, 1), (0.01, 1)],
        "drop-alpha": [(1, 0.1), (0.1, 1), (0.01, 1), (0.001, 1), (0.001, 1)],
        "tenth": [(1, 0.1), (0.1, 0.1), (0.01, 0.1), (0.001, 0.1), (0.001, 0.1)],
    }
    for name, pairs in expected.items():
        np.testing.assert_allclose(
            hyperparams(make(name), counts), pairs, rtol=1e-5, err_msg=name
        )
    # 1.0005 a step at full length: a factor of 10 in 4,606 steps, or 11.8 epochs.
    halfway = round(first + 2303 * scale)
    found = hyperparams(
        make("spa-gradual"), [int(first) - 2, halfway, int(first + 4_700 * scale)]
    )
    np.testing.assert_allclose(found[0], (1, 0.1), rtol=1e-5)
    np.testing.assert_allclose(found[1], (10**-0.5, 0.1 * 10**0.5), rtol=0.01)
    np.testing.assert_allclose(found[2], (0.1, 1), rtol=1e-5)

    # ImageNet's: 100 epochs, drops by 10 at 30, 60 and 90.
    tx = make_optimizer(imagenet_config(optimizer="spa-eta"), IMAGENET, 10)
    found = hyperparams(tx, [0, 299, 300, 600, 900])
    np.testing.assert_allclose(
        [eta for eta, _ in found], [0.1, 0.1, 0.01, 1e-3, 1e-4], rtol=1e-5
    )


def test_weight_decay_is_a_gradient() -> None:
    """As in `torch.optim.SGD(weight_decay=...)`: g + 1e-4 x goes through the
    momentum."""
    params, grads = jnp.array([2.0]), jnp.array([0.5])
    tx = make_optimizer(config("sgdm", weight_decay=0.1), CIFAR10, 391)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.1 * 0.7], rtol=1e-6)
    updates, state = tx.update(grads, state, params)
    np.testing.assert_allclose(updates, [-0.1 * (0.9 * 0.7 + 0.7)], rtol=1e-6)


class Network(nnx.Module):
    """One convolution, BatchNorm and a linear layer."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.stem = convolution(3, 4, 3, 1, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(4, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.stem(x))).mean((1, 2)))


def make_steps(group: int | None, dtype: Any = jnp.float32) -> Any:
    model, tx = (
        lambda key: Network(dtype, nnx.Rngs(key)),
        optax.identity(),
    )  # the gradient itself
    return training.make_steps(imagenet_config(), model, tx, group)


def test_batch_norm_by_groups() -> None:
    """Each group as if it were alone; statistics are the mean of theirs.

    In float64, where rounding puts no activation on the other side of 0.
    """
    with x64():
        x = np.random.default_rng(0).normal(size=(8, 6, 6, 3))
        x *= np.arange(1.0, 9)[:, None, None, None]
        labels = np.arange(8) % 3
        state = jax.jit(make_steps(None).init)(0)
        kept = {name: getattr(state, name) for name in ("params", "batch_stats")}
        state = state._replace(**optax.tree.cast(kept, jnp.float64))

        def update(group: int | None, part: slice) -> Any:
            return jax.jit(make_steps(group, jnp.float64).update)(
                state, x[part], labels[part]
            )

        whole, whole_metrics = update(None, slice(None))
        as_one, _ = update(8, slice(None))
        grouped, metrics = update(4, slice(None))
        halves = [update(None, part) for part in (slice(4), slice(4, 8))]
        close = partial(chex.assert_trees_all_close, rtol=1e-12, atol=1e-13)
        close(as_one.params, whole.params)
        for name in kept:
            parts = [getattr(half, name) for half, _ in halves]
            expected = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
            close(getattr(grouped, name), expected)
        close(metrics["loss"], sum(m["loss"] for _, m in halves) / 2)
        assert abs(metrics["loss"] - whole_metrics["loss"]) > 1e-4


@pytest.mark.usefixtures("_small_networks")
def test_defaults_of_imagenet(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's."""
    found = []

    def stop(config: Any, *_: Any) -> None:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_imagenet, "make_program", stop)
    with pytest.raises(KeyboardInterrupt):
        train_imagenet.main(["--data-dir", str(tree)])
    paper = {"epochs": 100, "batch": 256, "batch_norm_group": 32, "image_size": 224}
    paper |= {"learning_rate": 1.0, "averaging": 0.1, "weight_decay": 1e-4}
    assert found == [imagenet_config(model="resnet50", **paper)]


@pytest.mark.usefixtures("_small_networks")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 18}, "multiple of 4 devices, got 18"),
        ({"batch_norm_group": 5}, "multiple of --batch-norm-group 5, got 16"),
        (
            {"epochs": 1, "batch": 36},
            r"--epochs must .*, got drops at steps \[0, 1, 1\]",
        ),
    ],
)
def test_batches_that_do_not_divide(fields: Any, message: str, tree: Path) -> None:
    files = [imagenet_data.find(tree / part) for part in ("train", "val")]
    with pytest.raises(ValueError, match=message):
        train_imagenet.make_program(imagenet_config(**fields), *files, mesh_of(4), 2)
