"""Steps of tiny params, which show whether an optimizer is Adam. Its state does not show it.

Adamax, Adopt, RAdam, Yogi, NAdam(W) and LAMB keep a state of the same type.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

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


class Trial(NamedTuple):
    """A step of an optimizer: Adam's states before and after, the updates and the whole state."""

    old: Any
    new: Any
    updates: PyTree
    state: PyTree


@contextlib.contextmanager
def concrete() -> Iterator[None]:
    """Computes at once, also under `jax.jit`, with Optax's promotion of dtypes."""
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        yield


@concrete()
def trials(tx: Any, params: PyTree, count: int = 0) -> list[Trial]:
    """A step from each of some moments, and a second step. `count` is the count of schedules."""
    full = lambda tree, value: jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)
    is_count = lambda path: keystr(path).endswith((".count", ".gradient_step", ".step"))
    at_count = lambda path, leaf: jnp.full_like(leaf, count) if is_count(path) else leaf
    tiny = lambda x: jnp.ones([min(n, 2) for n in jnp.shape(x)], wide_dtype(jnp.asarray(x)))
    params = jax.tree.map(tiny, params)
    ramp = jax.tree.map(lambda x: jnp.cumsum(x).reshape(x.shape) / x.size, params)
    update = jax.jit(optax.with_extra_args_support(tx).update)

    def step(state: PyTree, adam: Any, g: float) -> Trial:
        state = tree_map_with_path(at_count, state)
        state = replace(state, optax.ScaleByAdamState, lambda _: adam)
        grads = jax.tree.map(lambda x: g * x, ramp)
        for _ in range(_MAX_BATCHES):
            updates, state = update(grads, state, params, value=jnp.zeros([]))
            new = find_one(state, "adam", optax.ScaleByAdamState)
            if new.count != adam.count:
                return Trial(adam, new, updates, state)
        raise ValueError(f"no step in {_MAX_BATCHES} batches")

    start = tx.init(params)
    adam = find_one(start, "adam", optax.ScaleByAdamState)
    steps = []
    for k, mu, root_nu, g in _BEFORE:
        mu, nu = full(adam.mu, mu), full(adam.nu, root_nu**2)
        steps.append(step(start, adam._replace(count=full(adam.count, k), mu=mu, nu=nu), g))
    return [*steps, step(steps[3].state, steps[3].new, -_S)]


@concrete()
def has_other_moments(steps: list[Trial], b1: ArrayLike, b2: ArrayLike) -> Bool[Array, ""]:
    """Whether ν' is not β₂ν + (1 − β₂)g², with the g of μ' = (1 − β₁)g."""
    fits = []
    for step in steps[1:3]:  # where μ = 0
        nu, old_nu = by_path(step.new.nu), by_path(step.old.nu)
        for key, m in by_path(step.new.mu).items():
            square = jnp.square(jnp.abs(m.astype(wide_dtype(m)) / (1 - b1)))
            error = jnp.abs(nu[key] - b2 * old_nu[key] - (1 - b2) * square)
            limit = 0.1 * (1 - b2) * jnp.maximum(jnp.abs(old_nu[key]), square)
            fits.append(jnp.all(error <= limit))
    return ~jnp.all(jnp.array(fits, bool))


@concrete()
def check_adam(adam: Any, params: PyTree, b1: ArrayLike, b2: ArrayLike, eps: ArrayLike) -> None:
    """Raises unless the moments are Adam's, and the updates m̂/(√ν̂ + ε) times one rate."""

    def refuse(got: str, cause: Exception | None = None) -> NoReturn:
        raise ValueError(
            "`adam` must be the optimizer of the run, `optax.adam` or `optax.adamw` with the given"
            f" `b1`, `b2` and `eps`, got {got}"
        ) from cause

    def directions(step: Trial) -> Array:
        """Adam's, and the updates."""
        mu, nu, u = map(by_path, (step.new.mu, step.new.nu, step.updates))
        bias = lambda b: 1 - jnp.asarray(b, jnp.float32) ** step.new.count
        m_hat = {key: m.astype(wide_dtype(m)) / bias(b1) for key, m in mu.items()}
        d = {key: m / (jnp.sqrt(nu[key] / bias(b2)) + eps) for key, m in m_hat.items()}
        vector = lambda tree: jnp.concatenate([jnp.ravel(tree[key]) for key in mu])
        return jnp.stack([vector(d), vector(u)])

    if adam is None:
        refuse("None")
    for count in _COUNTS:
        try:
            steps = trials(adam, params, count)
            d, u = jnp.stack([directions(step) for step in steps], axis=1)
        except Exception as error:
            refuse(f"a {type(error).__name__} in a step of tiny params", error)
        if is_surely(has_other_moments(steps, b1, b2)):
            refuse("one with other moments")
        decay, d, u = u[0], d - d[0], u - u[0]
        rate = jnp.sum(u[3]) / jnp.sum(d[3])
        limit = 0.02 * jnp.abs(rate * d) + 1e-6 * jnp.abs(decay)
        if is_surely(~jnp.all(jnp.abs(u - rate * d) <= limit)):
            refuse("one with other updates")
        if not is_surely(rate == 0):
            return
    refuse("updates of 0")
