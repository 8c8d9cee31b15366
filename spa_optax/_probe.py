"""Steps of tiny params show whether an optimizer is Adam: Adamax, Yogi, … have the same state."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import Array, ArrayLike, Bool, PyTree

from spa_optax._checks import is_surely
from spa_optax._precision import wide_dtype
from spa_optax._trees import by_path, find_one, replace

_COUNTS = (0, 1, 12, 123, 1_234, 12_345, 123_456)  # of schedules: at some the rate may be 0
_MAX_BATCHES = 1_000  # in one step of `optax.MultiSteps`
_S, _TINY = 0.01, 1e-12
# Adam's count, and the values of μ, √ν and the largest gradient before a step.
_BEFORE = (
    (0, 0, _S, 0),  # weight decay alone
    (0, 0, 0, _S),
    (0, 0, 2 * _S, _S),
    (0, _S, _S, _S),
    (10**6, _S, _S, _S),  # without bias
    (10**6, _S, _TINY, _TINY),  # ε counts
)


class Step(NamedTuple):
    """Adam's ν before a step; its moments and the updates after, as vectors; and the states."""

    old_nu: Array
    mu: Array
    nu: Array
    updates: Array
    adam: Any
    state: PyTree


@contextlib.contextmanager
def concrete() -> Iterator[None]:
    """Computes at once, also under `jax.jit`, with Optax's promotion of dtypes."""
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        yield


def steps_of(tx: Any, params: PyTree, count: int = 0) -> list[Step]:
    """A step from each of some moments, and a second step. `count` is the count of schedules."""
    full = optax.tree.full_like
    is_count = lambda path: keystr(path).endswith((".count", ".gradient_step", ".step"))
    at_count = lambda path, leaf: full(leaf, count) if is_count(path) else leaf
    tiny = lambda x: jnp.ones([min(n, 2) for n in jnp.shape(x)], wide_dtype(jnp.asarray(x)))
    params = jax.tree.map(tiny, params)
    ramp = jax.tree.map(lambda x: jnp.cumsum(x).reshape(x.shape) / x.size, params)
    update = jax.jit(optax.with_extra_args_support(tx).update)
    start = tx.init(params)
    adam_of = lambda state: find_one(state, "adam", optax.ScaleByAdamState)
    adam, wide = adam_of(start), lambda x: jnp.ravel(x).astype(wide_dtype(x))
    vector = lambda tree: jnp.concatenate([wide(by_path(tree)[key]) for key in by_path(adam.mu)])

    def step(state: PyTree, old: Any, g: float) -> Step:
        state = tree_map_with_path(at_count, state)
        state = replace(state, optax.ScaleByAdamState, lambda _: old)
        for _ in range(_MAX_BATCHES):
            u, state = update(optax.tree.scale(g, ramp), state, params, value=jnp.zeros([]))
            if (new := adam_of(state)).count != old.count:
                return Step(*map(vector, (old.nu, new.mu, new.nu, u)), adam=new, state=state)
        raise ValueError(f"no step in {_MAX_BATCHES} batches")

    before = lambda k, mu, root_nu: map(full, adam, (k, mu, root_nu**2))
    steps = [step(start, optax.ScaleByAdamState(*before(*of)), g) for *of, g in _BEFORE]
    return [*steps, step(steps[3].state, steps[3].adam, -_S)]


def has_other_moments(steps: list[Step], b1: ArrayLike, b2: ArrayLike) -> Bool[Array, ""]:
    """Whether ν' is not β₂ν + (1 − β₂)g², with the g of μ' = (1 − β₁)g."""
    old_nu, mu, nu, _ = map(jnp.stack, zip(*(step[:4] for step in steps[1:3]), strict=True))
    square = jnp.square(jnp.abs(mu / (1 - b1)))  # of g, since μ was 0
    error = jnp.abs(nu - b2 * old_nu - (1 - b2) * square)
    return ~jnp.all(error <= 0.1 * (1 - b2) * jnp.maximum(jnp.abs(old_nu), square))


@concrete()
def check_adam(adam: Any, params: PyTree, b1: ArrayLike, b2: ArrayLike, eps: ArrayLike) -> None:
    """Raises unless the moments are Adam's, and the updates m̂/(√ν̂ + ε) times one rate."""
    bias = lambda b, step: 1 - jnp.asarray(b, jnp.float32) ** step.adam.count
    root = lambda step: jnp.sqrt(step.nu / bias(b2, step))
    direction = lambda step: step.mu / bias(b1, step) / (root(step) + eps)
    try:
        for count in _COUNTS:
            steps = steps_of(adam, params, count)
            if is_surely(has_other_moments(steps, b1, b2)):
                raise ValueError("other moments")
            d, u = jnp.stack([jnp.stack([direction(step), step.updates]) for step in steps], 1)
            decay, d, u = u[0], d - d[0], u - u[0]
            rate = jnp.sum(u[3]) / jnp.sum(d[3])
            limit = 0.02 * jnp.abs(rate * d) + 1e-6 * jnp.abs(decay)
            if is_surely(~jnp.all(jnp.abs(u - rate * d) <= limit)):
                raise ValueError("other updates")
            if not is_surely(rate == 0):
                return
        raise ValueError("updates of 0")
    except Exception as error:
        rule = "must be the optimizer of the run, `optax.adam` or `optax.adamw`"
        given = "with the given `b1`, `b2` and `eps`, got in a step of tiny params"
        raise ValueError(f"`adam` {rule} {given}: {error}") from error
