"""How far SPA drifts from SGD+M in a million steps, beside SGD+M's own drift in
float32.

    python benchmarks/equivalence.py

Logistic regression on the digits of scikit-learn, in batches of 64: convex, so that
rounding errors do not grow by themselves. Reported is the L2 norm of the difference of
params over that of the params. For a constant rate SGD+M is there in the form of Keras
as well (v ← βv + αg, x ← x − v).
"""

import itertools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

from spa_optax import spa_from_sgdm

BATCH, DECAY = 64, 1e-4
SCHEDULES, MOMENTA = ("constant", "cosine", "restarts"), (0.9, 0.999)
REPORTS = 10  # readings of the params in a run


def learning_rate(name: str, alpha: float, num_steps: int) -> optax.Schedule:
    if name == "constant":
        return lambda count: jnp.asarray(alpha, jnp.float32)
    cosine: Any = lambda steps: optax.warmup_cosine_decay_schedule(
        0.0, alpha, steps // 10, steps
    )
    if name == "cosine":
        return cosine(num_steps)
    period = max(num_steps // 100, 10)  # a hundred warm-ups, and as many falls to 0
    return lambda count: cosine(period)(jnp.mod(count, period))


def trajectories(txs: dict[str, Any], dtype: Any, num_steps: int) -> Any:
    """The params of each optimizer, in float64, at each reading."""
    images, labels = load_digits(return_X_y=True)
    features = jnp.asarray(np.hstack([images / 16, np.ones((len(images), 1))]), dtype)
    targets = jnp.asarray(np.eye(10)[labels], dtype)
    part = num_steps // REPORTS

    def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
        cross_entropy = optax.softmax_cross_entropy(features[batch] @ w, targets[batch])
        return cross_entropy.mean() + DECAY * jnp.sum(w**2)

    def body(carry: Any, k: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(0), k)
        batch = jax.random.randint(key, (BATCH,), 0, len(labels), jnp.int32)
        new = {}
        for name, (w, state) in carry.items():
            new[name] = common.update(txs[name], jax.grad(loss)(w, batch), w, state)
        return new, None

    @jax.jit
    def run(carry: Any, start: Any) -> Any:
        return jax.lax.scan(body, carry, start + jnp.arange(part, dtype=jnp.int32))[0]

    w_0 = jnp.zeros((65, 10), dtype)
    carry = {name: (w_0, tx.init(w_0)) for name, tx in txs.items()}
    readings = []
    for i in tqdm(range(REPORTS), desc=str(jnp.dtype(dtype))):
        carry = run(carry, jnp.int32(i * part))
        readings.append(
            {name: np.asarray(w, np.float64) for name, (w, _) in carry.items()}
        )
    return readings


def drifts(name: str, beta: float, num_steps: int) -> dict[str, list[float]]:
    """Relative differences at each reading."""
    alpha = learning_rate(name, 1 - beta, num_steps)  # η = 1
    txs = {"SGD+M": optax.sgd(alpha, beta), "SPA": spa_from_sgdm(alpha, beta)}
    jax.config.update("jax_enable_x64", True)
    exact = trajectories({"SGD+M": txs["SGD+M"]}, jnp.float64, num_steps)
    jax.config.update("jax_enable_x64", False)
    if name == "constant":  # otherwise it is another method
        txs["Keras"] = optax.chain(
            optax.scale_by_learning_rate(alpha), optax.trace(beta)
        )
    found = trajectories(txs, jnp.float32, num_steps)
    result = {"SPA from SGD+M": [distance(w["SPA"], w["SGD+M"]) for w in found]}
    for other in txs:
        pairs = zip(found, exact, strict=True)
        distances = [distance(w[other], e["SGD+M"]) for w, e in pairs]
        result[f"{other} from float64"] = distances
    return result


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """In units of the norm of b."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each run")
    arguments = common.parse(parser, argv, "steps")
    common.check_new(arguments.json)
    figures, rows = {}, []
    header = [
        "SPA from SGD+M",
        *(f"{n} from float64" for n in ("SPA", "SGD+M", "Keras")),
    ]
    for name, beta in itertools.product(SCHEDULES, MOMENTA):
        result = figures[f"{name} {beta}"] = drifts(name, beta, arguments.steps)
        cells = [f"{max(result[key]):.1e}" if key in result else "" for key in header]
        rows.append([name, f"{beta:g}", *cells])
    text = common.markdown(["schedule", "β", *header], rows)
    print(
        f"{common.device()}, {arguments.steps:,} steps, largest of {REPORTS} "
        f"readings\n\n{text}"
    )
    common.write_json(arguments.json, figures)
    return text


if __name__ == "__main__":
    common.command_line.run(main)
