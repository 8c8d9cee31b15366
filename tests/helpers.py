"""What several test files share: a real convex problem, oracles, and hyper-parameters
that hurt."""

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

from spa_optax import SPAState, _storage
from spa_optax._trees import map_trained

# As parameters of a test: without float16 instructions XLA's CPU compiler may lack
# them.
FLOAT16, *FLOAT8 = (
    pytest.param(dtype, marks=pytest.mark.float16)
    for dtype in (jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
long = functools.partial(pytest.param, marks=pytest.mark.long)


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Names: one for each way through the code; the others are slow, for they are
    many."""
    return [(pytest.param if name in chosen else slow)(name) for name in names]


# For long runs: these tests compile without optimization, which is no gain there.
optimized = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 3}
)
NUM_STEPS = 2_000
MEAN = lambda k: 1 / (k + 1).astype(float)  # averaging of Schedule-Free
BATCH = 64
# In compiled programs.
COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
)


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the package as users have it, without the type checker of these
    tests."""
    return inspect.unwrap(function)


def environment(num_devices: int | None = None) -> dict[str, str]:
    """For another process: the path and flags of this one, or so many CPU devices."""
    result = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if num_devices is not None:
        result["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={num_devices}"
        result["JAX_PLATFORMS"] = "cpu"
    return result


def free_address() -> str:
    """HOST:PORT for processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextlib.contextmanager
def x64(enabled: bool = True) -> Iterator[None]:
    """Double precision, under the name that the installed jax has for it."""
    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(enabled):
            yield
    else:
        from jax.experimental import enable_x64

        with enable_x64(enabled):
            yield


def sgdm(learning_rate: Any, momentum: Any, nesterov: bool = False) -> Any:
    """The oracle: optax's own SGD with momentum, with schedules for both
    hyper-parameters."""
    factory = optax.inject_hyperparams(optax.sgd, static_args="nesterov")
    return factory(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov)


def run(tx: Any, params: Any, grads: list[Any], state: Any = None) -> tuple[Any, Any]:
    """The params and the state after an update for each gradient, from a state or from
    `init`."""
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)  # once: a method of optax's would be traced again
    # A parameter without an update stays.
    add = lambda u, p: p if u is None else optax.apply_updates(p, u)
    for g in grads:
        updates, state = update(g, state, params)
        params = jax.tree.map(add, updates, params, is_leaf=lambda u: u is None)
    return params, state


def trained(
    tx: Any,
    gradient: Callable[..., PyTree],
    params: PyTree,
    items: Any,
    state: Any = None,
) -> tuple[Any, Any]:
    """The params and the state after a step of gradient(params, item) for each item of
    an array."""

    def step(carry: Any, item: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient(params, item), state, params)
        return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params) if state is None else state
    return jax.lax.scan(step, carry, items)[0]


def spa_state(state: Any) -> SPAState:
    """The one state of the family in a state."""
    is_spa = lambda node: isinstance(node, SPAState)
    (found,) = [node for node in jax.tree.leaves(state, is_leaf=is_spa) if is_spa(node)]
    return found


def z_of(state: Any, params: Any) -> Any:
    """The value of z, however it is stored."""
    z = spa_state(state).z
    return map_trained(_storage.form_of(z).value, params, _storage.tree_of(z))


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Real handwritten digits with a bias column, float64 (1797, 65), and one-hot
    labels."""
    images, labels = load_digits(return_X_y=True)
    return np.hstack([images / 16, np.ones((len(images), 1))]), np.eye(10)[labels]


@functools.cache
def batches(num_steps: int = NUM_STEPS) -> np.ndarray:
    """The minibatches of a run: indices (num_steps, BATCH)."""
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
    """The params and what is evaluated, after each of `num_steps` steps of a convex
    problem."""
    loss = logistic_regression(dtype)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):  # for optax's
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, evaluate(state, params))

    params = jnp.full((65, 10), 0.1, dtype)
    return optimized(
        lambda: jax.lax.scan(step, (params, tx.init(params)), batches(num_steps))[1]
    )()


def compiled_step(tx: Any, params: Any) -> Any:
    """A donated step, compiled."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, tx.init(params), params)
        .compile()
    )


def relative_difference(x: PyTree, reference: PyTree) -> float:
    """The L2 norm of the difference over that of the reference, worked out in
    float64."""
    x, reference = (
        np.concatenate(
            [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
        )
        for tree in (x, reference)
    )
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def rounding_noise(ulps: float = 1.0) -> optax.GradientTransformation:
    """For the end of a chain: moves every parameter by some `ulps` of it, at random,
    every step."""

    def update(
        updates: PyTree, count: Array, params: Any = None
    ) -> tuple[PyTree, Array]:
        noise = optax.tree.random_like(
            jax.random.fold_in(jax.random.key(0), count), params
        )
        nudge = lambda u, n, p: u + ulps * float(jnp.finfo(p.dtype).eps) * n * p
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
    """Two ways to compute one run differ by `multiple` times what noise does to it, or
    less.

    Networks amplify rounding, and how much depends on the processor. So the growth is
    measured: `noisy` is the reference with `rounding_noise`. `at_most` limits the
    tolerance itself, so that a run in which noise grows without bound does not pass for
    a comparison."""
    tolerance = multiple * relative_difference(noisy, reference)
    assert 0 < tolerance < at_most
    assert relative_difference(x, reference) < tolerance


def lenient(schedule: optax.Schedule) -> optax.Schedule:
    """Optax's schedules, which the strict promotion of these tests is too strict
    for."""

    def evaluate(count: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return schedule(count)

    return evaluate


def table(values: Any) -> Callable[[Any], Array]:
    """A schedule that reads its values from an array; its last value goes on for
    ever."""
    return lambda count: jnp.asarray(values)[jnp.minimum(count, len(values) - 1)]


def evaluated(
    schedule: optax.Schedule, num_steps: int = NUM_STEPS
) -> Callable[[Any], Array]:
    """A schedule of Optax, evaluated once and for all.

    It computes in float32. Compiled into two transforms that a test compares, it may be
    rounded differently in each, and a network amplifies that."""
    return table(
        np.asarray(jax.vmap(lenient(schedule))(jnp.arange(num_steps + 1)), np.float64)
    )


WARMUP_COSINE = evaluated(optax.warmup_cosine_decay_schedule(0.0, 0.3, 200, NUM_STEPS))


# Learning rates and momenta as functions of an array of counts. Past NUM_STEPS they are
# out of use.
RATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": lambda k: np.full(len(k), 0.1),
    "warm-up from 0, cosine to 0": lambda k: np.asarray(
        jax.vmap(WARMUP_COSINE)(jnp.asarray(k))
    ),
    "gap of 0": lambda k: np.where((k >= 500) & (k < 800), 0.0, 0.2),
    "drop by 100": lambda k: np.where(k < 700, 0.3, 0.003),
    "random over 3 decades": lambda k: (
        10 ** np.random.default_rng(1).uniform(-3.5, -0.5, len(k))
    ),
    "NaN past its end": lambda k: (
        0.3 * np.sqrt(np.where(k < NUM_STEPS, 1 - k / NUM_STEPS, np.nan))
    ),
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
