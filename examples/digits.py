"""SGD with momentum, the same as primal averaging, and primal averaging in its own
terms.

Trains a Flax network on the 1,797 handwritten digits that ship inside scikit-learn, a
fifth of them held out, with several seeds at once, in float32 and with the params kept
in bfloat16. Prints a table and draws the training loss at x and at z:

    python examples/digits.py
"""

import argparse
import io
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from spa_optax import eval_params, spa, spa_from_sgdm

BATCH = 64
ALPHA, BETA = 0.1, 0.9  # SGD+M
ETA, C = ALPHA / (1 - BETA), 1 - BETA  # the same, as SPA


def optimizers(num_steps: int) -> dict[str, tuple[optax.GradientTransformation, Any]]:
    """Each with the dtype in which the params are kept."""
    alpha, eta = (
        optax.warmup_cosine_decay_schedule(0.0, peak, num_steps // 10, num_steps)
        for peak in (ALPHA, ETA)
    )
    f32, bf16 = jnp.float32, jnp.bfloat16
    # to round stochastically; seeds side by side share its bits
    key = jax.random.key(0)
    return {
        "optax.sgd": (optax.sgd(alpha, momentum=BETA), f32),
        "spa_from_sgdm": (spa_from_sgdm(alpha, momentum=BETA), f32),
        "spa": (spa(eta, averaging=C), f32),
        # How far rounding alone drives this network apart.
        "sgd + noise": (
            optax.chain(optax.sgd(alpha, momentum=BETA), rounding_noise()),
            f32,
        ),
        # Params of 16 bits, beside a float32 momentum and a float32 z.
        "optax.sgd, bfloat16": (
            optax.sgd(alpha, momentum=BETA, accumulator_dtype=f32),
            bf16,
        ),
        "spa_from_sgdm, bfloat16": (
            spa_from_sgdm(alpha, momentum=BETA, rounding_key=key),
            bf16,
        ),
        "spa, bfloat16": (spa(eta, averaging=C, rounding_key=key), bf16),
    }


def rounding_noise() -> optax.GradientTransformation:
    """Adds noise of the size of a float32 rounding to every parameter: 3e-8 of it."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        noise = optax.tree.random_like(
            jax.random.fold_in(jax.random.key(0), state), params
        )
        return jax.tree.map(
            lambda u, n, p: u + 3e-8 * n * p, updates, noise, params
        ), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


class Network(nnx.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """64 pixels, 128 hidden units, 10 classes."""
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.output = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        return self.output(nnx.relu(self.hidden(x)))


def train(
    name: str,
    tx: optax.GradientTransformation,
    dtype: Any,
    data: Any,
    num_seeds: int,
    num_epochs: int,
) -> dict[str, np.ndarray]:
    """Trains `num_seeds` networks side by side; arrays with a leading axis of seeds."""
    (x_train, y_train), (x_test, y_test) = data
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def loss_and_accuracy(
        params: Any, x: jax.Array, y: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        params = optax.tree.cast(
            params, jnp.float32
        )  # only kept in `dtype`, not computed in it
        logits = nnx.merge(graphdef, params)(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(-1) == y).mean()

    def init(seed: jax.Array) -> Any:
        params = nnx.state(Network(nnx.Rngs(jax.random.key(seed))))
        params = optax.tree.cast(params, dtype)
        return params, tx.init(params)

    def epoch(params: Any, opt_state: Any, key: jax.Array) -> Any:
        def step(carry: Any, batch: jax.Array) -> Any:
            params, opt_state = carry
            grad = jax.grad(
                lambda p: loss_and_accuracy(p, x_train[batch], y_train[batch])[0]
            )
            updates, opt_state = tx.update(grad(params), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        num_batches = len(x_train) // BATCH
        batches = jax.random.permutation(key, len(x_train))[: num_batches * BATCH]
        carry = (params, opt_state)
        carry, _ = jax.lax.scan(step, carry, batches.reshape(num_batches, BATCH))
        params, opt_state = carry
        z = optax.tree.get(opt_state, "z")  # None for optax.sgd
        x = params if z is None else eval_params(opt_state, params)
        metrics = {
            "loss at x": loss_and_accuracy(x, x_train, y_train)[0],
            "test accuracy": loss_and_accuracy(x, x_test, y_test)[1],
        }
        if z is not None and dtype == jnp.float32:  # else the state holds z − x
            metrics["loss at z"] = loss_and_accuracy(z, x_train, y_train)[0]
        return params, opt_state, metrics

    params, opt_state = jax.vmap(init)(jnp.arange(num_seeds))
    epoch = jax.jit(jax.vmap(epoch), donate_argnums=(0, 1))
    history = []
    progress = tqdm(range(num_epochs), desc=f"{name:23}", unit="epoch")
    for k in progress:
        # The same batches for every optimizer, others for every seed.
        keys = jax.vmap(lambda seed, k=k: jax.random.fold_in(jax.random.key(seed), k))(
            jnp.arange(num_seeds)
        )
        params, opt_state, metrics = epoch(params, opt_state, keys)
        history.append(jax.device_get(metrics))
        progress.set_postfix(
            loss=f"{metrics['loss at x'].mean():.4f}",
            accuracy=f"{metrics['test accuracy'].mean():.4f}",
        )
    result = {key: np.stack([entry[key] for entry in history], 1) for key in history[0]}
    leaves = [
        np.asarray(leaf, np.float32).reshape(num_seeds, -1)
        for leaf in jax.tree.leaves(params)
    ]
    return {**result, "params": np.concatenate(leaves, 1)}


def table(results: dict[str, dict[str, np.ndarray]]) -> str:
    """Mean ± standard deviation over seeds, and the largest distance of the params from
    SGD+M's.
    """
    reference = results["optax.sgd"]["params"]
    rows = [
        f"{'':23} {'training loss':>19} {'test accuracy':>18} "
        f"{'|x − x_sgd|/|x_sgd|':>20}"
    ]
    for name, result in results.items():
        loss = plus_minus(result["loss at x"][:, -1], ".6f")
        accuracy = plus_minus(100 * result["test accuracy"][:, -1], ".2f", " %")
        distance = np.linalg.norm(result["params"] - reference, axis=1)
        difference = (distance / np.linalg.norm(reference, axis=1)).max()
        rows.append(f"{name:23} {loss:>19} {accuracy:>18} {difference:20.1e}")
    return "\n".join(rows)


def plus_minus(values: np.ndarray, spec: str, unit: str = "") -> str:
    """Mean ± standard deviation over seeds; for one seed the mean alone."""
    spread = f" ± {values.std(ddof=1):{spec}}{unit}" if len(values) > 1 else ""
    return f"{values.mean():{spec}}{unit}{spread}"


def draw(results: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """The mean training loss after each epoch, at x and at z."""
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 3.6), sharey=True, layout="constrained"
    )
    reference = results["optax.sgd"]["loss at x"].mean(0)
    epochs = np.arange(1, len(reference) + 1)
    for axis, name in zip(
        axes, ("spa_from_sgdm", "spa", "spa_from_sgdm, bfloat16"), strict=True
    ):
        axis.plot(epochs, reference, color="0.75", linewidth=5, label="optax.sgd")
        if "bfloat16" in name:
            narrow = results["optax.sgd, bfloat16"]["loss at x"].mean(0)
            axis.plot(epochs, narrow, color="C3", label="optax.sgd, bfloat16 params")
        axis.plot(epochs, results[name]["loss at x"].mean(0), color="C0", label="x")
        if "loss at z" in results[name]:
            at_z = results[name]["loss at z"].mean(0)
            axis.plot(epochs, at_z, color="C1", linestyle="--", label="z")
        axis.set(xlabel="epoch", yscale="log", title=name)
        axis.legend(frameon=False)
    axes[0].set_ylabel("training loss")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def check_picture(path: Path) -> None:
    """Raises an error now, and not after training, and keeps a picture that is
    there.
    """
    Figure().savefig(io.BytesIO(), format=path.suffix.removeprefix("."))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--epochs", type=int, default=40, help=f"how many {default}")
    add("--seeds", type=int, default=5, help=f"how many {default}")
    add(
        "--picture",
        type=Path,
        default=Path("digits.png"),
        help=f"where to draw it {default}",
    )
    arguments = parser.parse_args(argv)
    for name in ("epochs", "seeds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(arguments, name)}")
    try:
        check_picture(arguments.picture)
    except (OSError, ValueError) as error:
        parser.error(f"--picture must be a picture that can be written: {error}")

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = (
        jnp.asarray(array)
        for array in train_test_split(
            np.float32(images / 16),
            labels,
            test_size=0.2,
            random_state=0,
            stratify=labels,
        )
    )
    data = ((x_train, y_train), (x_test, y_test))
    num_steps = arguments.epochs * (len(x_train) // BATCH)
    results = {
        name: train(name, tx, dtype, data, arguments.seeds, arguments.epochs)
        for name, (tx, dtype) in optimizers(num_steps).items()
    }
    text = table(results)
    print(
        f"\nseeds: {arguments.seeds}, epochs: {arguments.epochs}, steps: "
        f"{num_steps}\n{text}"
    )
    draw(results, arguments.picture)
    print(f"\nLoss curves: {arguments.picture}")
    return text


if __name__ == "__main__":
    # Ctrl-C ends at once. As an exception it can be lost while XLA compiles.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
