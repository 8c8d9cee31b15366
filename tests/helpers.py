"""What several test files share: a real convex problem, oracles, and hyper-parameters
that are hard to follow.
"""

import contextlib
import functools
import inspect
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, PyTree
from sklearn.datasets import load_digits

from spa_optax import SPAState
from spa_optax._codec import codec_of, stored_tree
from spa_optax._trees import find_nodes, map_inexact

# Parameters of a test. XLA for CPUs converts them only if the processor does.
FLOAT16 = pytest.param(jnp.float16, marks=pytest.mark.float16)
FLOAT8 = pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.float16)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
long = functools.partial(pytest.param, marks=(pytest.mark.long, pytest.mark.slow))


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Names as parameters of a test. All but the chosen ones are slow."""
    return [pytest.param(name) if name in chosen else slow(name) for name in names]


# For long runs. Other tests compile without optimization, which takes less time.
optimized = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 3}
)
NUM_STEPS = 2_000
BATCH = 64
# The names of collectives in compiled programs.
COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
)


def mean_of_all(count: Array) -> Array:
    """The averaging with which x is the mean of all z: 1, 1/2, 1/3, …"""
    return 1 / (count + 1).astype(float)


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the package without the type checker of these tests."""
    return inspect.unwrap(function)


def environment(num_devices: int | None = None) -> dict[str, str]:
    """The variables for another process: this one's path and flags.

    With a number of devices, the process has that many CPU devices.
    """
    result = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if num_devices is not None:
        result["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={num_devices}"
        result["JAX_PLATFORMS"] = "cpu"
    return result


def free_address() -> str:
    """HOST:PORT at which several processes can meet."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


@contextlib.contextmanager
def x64(enabled: bool = True) -> Iterator[None]:
    """Double precision. Older releases of jax have it under another name."""
    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(enabled):
            yield
    else:
        from jax.experimental import enable_x64

        with enable_x64(enabled):
            yield


def sgdm(learning_rate: Any, momentum: Any, nesterov: bool = False) -> Any:
    """The oracle: Optax's SGD with momentum. Both arguments may be schedules."""
    factory = optax.inject_hyperparams(optax.sgd, static_args="nesterov")
    return factory(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov)


def run(tx: Any, params: Any, grads: list[Any], state: Any = None) -> tuple[Any, Any]:
    """The params and the state after an update for each gradient.

    It starts from a state, or from `init`. A parameter whose update is None stays.
    """
    state = tx.init(params) if state is None else state
    # Before the loop: `optax.MultiSteps` makes a new method at each access, which jax
    # would compile again.
    update = jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = jax.tree.map(_add, updates, params, is_leaf=lambda u: u is None)
    return params, state


def _add(update: Array | None, param: Any) -> Any:
    return param if update is None else optax.apply_updates(param, update)


def trained(
    tx: Any,
    gradient: Callable[..., PyTree],
    params: PyTree,
    items: Any,
    state: Any = None,
) -> tuple[Any, Any]:
    """The params and the state after a step for each item of an array.

    The gradient of a step is `gradient(params, item)`.
    """

    def step(carry: Any, item: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient(params, item), state, params)
        return (optax.apply_updates(params, updates), state), None

    state = tx.init(params) if state is None else state
    return jax.lax.scan(step, (params, state), items)[0]


def spa_state(state: Any) -> SPAState:
    """The one `SPAState` in a state."""
    (found,) = find_nodes(state, SPAState)
    return found


def z_of(state: Any, params: Any) -> Any:
    """z after a step, whether the state holds z itself or z − y."""
    z = spa_state(state).z
    decode = functools.partial(codec_of(z).decode_z, is_initial=jnp.array(False))
    return map_inexact(decode, params, stored_tree(z))


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits with a bias column (1797, 65), and one-hot labels."""
    images, labels = load_digits(return_X_y=True)
    return np.hstack([images / 16, np.ones((len(images), 1))]), np.eye(10)[labels]


@functools.cache
def batches(num_steps: int = NUM_STEPS) -> np.ndarray:
    """The indices of the images in each minibatch (num_steps, BATCH)."""
    return np.random.default_rng(0).integers(
        0, len(digits()[0]), (num_steps, BATCH), np.int32
    )


def logistic_regression(dtype: Any) -> Callable[[Array, Array], Array]:
    """A convex loss of weights (65, 10) and minibatch indices."""
    images, labels = (jnp.asarray(a, dtype) for a in digits())

    def loss(w: Array, batch: Array) -> Array:
        cross_entropy = optax.softmax_cross_entropy(images[batch] @ w, labels[batch])
        return cross_entropy.mean() + 1e-4 * jnp.sum(w**2)

    return loss


def trajectory(
    tx: Any, evaluate: Any, dtype: Any, num_steps: int = 300
) -> tuple[Any, Any]:
    """The params and `evaluate(state, params)` after each step of a convex problem."""
    loss = logistic_regression(dtype)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):  # Optax needs it
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, evaluate(state, params))

    params = jnp.full((65, 10), 0.1, dtype)

    def all_steps() -> Any:
        return jax.lax.scan(step, (params, tx.init(params)), batches(num_steps))[1]

    return optimized(all_steps)()


def compiled_step(tx: Any, params: Any) -> Any:
    """A compiled step that donates params and state."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.lower(params, tx.init(params), params).compile()


def relative_difference(x: PyTree, reference: PyTree) -> float:
    """‖x − reference‖ / ‖reference‖, computed in float64."""
    x, reference = _as_vector(x), _as_vector(reference)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def _as_vector(tree: PyTree) -> np.ndarray:
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.ravel() for leaf in leaves])


def rounding_noise(ulps: float = 1.0) -> optax.GradientTransformation:
    """Moves every parameter by some ulps at random, at the end of a chain."""

    def nudge(update: Array, noise: Array, param: Array) -> Array:
        ulp = float(jnp.finfo(param.dtype).eps) * param
        return update + ulps * ulp * noise

    def update(
        updates: PyTree, count: Array, params: Any = None
    ) -> tuple[PyTree, Array]:
        key = jax.random.fold_in(jax.random.key(0), count)
        noise = optax.tree.random_like(key, params)
        return jax.tree.map(nudge, updates, noise, params), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def assert_apart_by_rounding(
    x: PyTree,
    reference: PyTree,
    noisy: PyTree,
    *,
    multiple: float = 10.0,
    at_most: float,
) -> None:
    """Asserts that two computations of one run differ by no more than rounding.

    Networks amplify rounding, and how much depends on the processor. So the growth is
    measured: `noisy` is the reference with `rounding_noise`, and `multiple` times its
    effect is allowed. `at_most` limits that tolerance, since a run in which noise grows
    without bound compares nothing.
    """
    tolerance = multiple * relative_difference(noisy, reference)
    assert 0 < tolerance < at_most
    assert relative_difference(x, reference) < tolerance


def lenient(schedule: optax.Schedule) -> optax.Schedule:
    """A schedule of Optax, which needs standard dtype promotion."""

    def evaluate(count: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return schedule(count)

    return evaluate


def table(values: Any) -> Callable[[Any], Array]:
    """A schedule that reads an array. Past its end it returns the last value."""
    return lambda count: jnp.asarray(values)[jnp.minimum(count, len(values) - 1)]


def evaluated(
    schedule: optax.Schedule, num_steps: int = NUM_STEPS
) -> Callable[[Any], Array]:
    """A schedule of Optax as a table of its values.

    Optax computes in float32. Compiled into two transforms that a test compares, a
    schedule may be rounded differently in each, and a network amplifies that.
    """
    values = jax.vmap(lenient(schedule))(jnp.arange(num_steps + 1))
    return table(np.asarray(values, np.float64))


WARMUP_COSINE = evaluated(optax.warmup_cosine_decay_schedule(0.0, 0.3, 200, NUM_STEPS))


def _random_over_3_decades(k: np.ndarray) -> np.ndarray:
    return 10 ** np.random.default_rng(1).uniform(-3.5, -0.5, len(k))


def _nan_past_its_end(k: np.ndarray) -> np.ndarray:
    return 0.3 * np.sqrt(np.where(k < NUM_STEPS, 1 - k / NUM_STEPS, np.nan))


# Learning rates and momenta as functions of an array of counts, for NUM_STEPS steps.
RATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": lambda k: np.full(len(k), 0.1),
    "warm-up from 0, cosine to 0": lambda k: np.asarray(WARMUP_COSINE(jnp.asarray(k))),
    "gap of 0": lambda k: np.where((k >= 500) & (k < 800), 0.0, 0.2),
    "drop by 100": lambda k: np.where(k < 700, 0.3, 0.003),
    "random over 3 decades": _random_over_3_decades,
    "NaN past its end": _nan_past_its_end,
    "negative past its end": lambda k: 0.3 * (1 - k / NUM_STEPS),
    "cosine with warm restarts": lambda k: 0.15 * (1 + np.cos(np.pi * (k % 400) / 400)),
}
MOMENTA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": lambda k: np.full(len(k), 0.9),
    "ramp": lambda k: np.clip(0.5 + 0.45 * k / 1000, 0.5, 0.95),
    "0 for a while": lambda k: np.where((k >= 300) & (k < 350), 0.0, 0.9),
    "0.95 to 0": lambda k: np.where(k < 1200, 0.95, 0.0),
    "NaN past its end": lambda k: np.where(k < NUM_STEPS, 0.9, np.nan),
    "up to 0.995": lambda k: np.clip(0.9 + 0.095 * k / 1500, 0.9, 0.995),
}
