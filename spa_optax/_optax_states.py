"""What the package knows of Optax's states: which there are, their momentum, and which
are Adam's.

Adamax, Yogi and others have a state of Adam's type. Steps of tiny params show who has
its moments.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import Array, ArrayLike, Bool, PyTree

from spa_optax._checks import is_surely
from spa_optax._core import Step
from spa_optax._precision import scaled, wide_dtype
from spa_optax._storage import OutOfRange
from spa_optax._trees import by_path, find, find_one, map_trained, replace

# Optax does not export it. (To call `init` here would start JAX at import.)
RMSState: Any = type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ()))
SECOND_MOMENTS = (RMSState, optax.FactoredState)
# The momentum of Optax's optimizers: a state and its field.
MOMENTUM: dict[Any, str] = {
    optax.TraceState: "trace",
    optax.EmaState: "ema",
    optax.ScaleByAdamState: "mu",
    optax.ScaleByLionState: "mu",
    optax.contrib.MuonState: "mu",
}
# The momentum that `track_momentum` can measure and `convert` can move.
ADAM_OR_TRACE = (optax.TraceState, optax.ScaleByAdamState)
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
states = lambda names, of=optax: tuple(
    getattr(of, f"{name}State") for name in names.split()
)
is_opaque_sam = lambda node: (
    getattr(node, "cache", node) is None
)  # it then keeps no params
# Wrappers that skip updates, or keep gradients of several batches.
SKIPS_UPDATES = states(
    "MultiSteps ApplyIfFinite ConditionallyTransform ConditionallyMask"
)
# Directions, whose states depend on the updates alone; the first have momentum of their
# own.
WITH_MOMENTUM = states(
    "ScaleByAdan ScaleByAmsgrad ScaleByBelief ScaleByNovograd ScaleBySM3"
)
WITH_MOMENTUM += states("ScaleByAdemamix ScaleBySimplifiedAdEMAMix", optax.contrib)
WITH_MOMENTUM += (*MOMENTUM, optax.ApplyEvery)
DIRECTIONS = states(
    "AddNoise ScaleByAdaDelta ScaleByRms ScaleByRprop ScaleByRss ScaleByRStdDev"
)
DIRECTIONS += states("DifferentiallyPrivateAggregate ReduceLROnPlateau", optax.contrib)
DIRECTIONS += WITH_MOMENTUM
# Measurements, on which no update depends; some are newer than the oldest Optax.
_NAMES = ("MonitorState", "SnapshotState", "ZeroNansState")
MONITORS = tuple(getattr(optax, name) for name in _NAMES if hasattr(optax, name))


def c_and_b2(state: PyTree, averaging: float | None, b2: float) -> tuple[Any, Any]:
    """The c = 1 − β and the β₂ of Optax's own momentum, as given or injected."""
    found = {
        name: v
        for node in find(state, INJECTED)
        for name, v in node.hyperparams.items()
    }
    beta = found.get("momentum", found.get("b1"))
    if averaging is None and beta is None:
        raise ValueError(
            "`averaging` must be given, as 1 − β, for momentum of Optax, got None"
        )
    return 1 - jnp.asarray(beta) if averaging is None else averaging, found.get(
        "b2", b2
    )


def step_of_optax(
    before: PyTree, after: PyTree, averaging: float | None, b2: float
) -> Step:
    """The step of `optax.trace` or `optax.scale_by_adam` as one of SPA with η = 1.

    From m_{k+1} = (1 − c) m_k + g_k, which is −u_k/c. Under Adam m_{k+1} = (1 − c) m_k
    + c g_k, and all is divided by √ν̂_{k+1}. (Adam's ε is left out.)
    """
    old, new = (next(iter(find(of, ADAM_OR_TRACE)), None) for of in (before, after))
    if old is None or new is None:
        raise ValueError(
            "`inner` must pass extra arguments to its member, got one that does not"
        )
    c, beta2 = (
        jnp.asarray(value, jnp.float32) for value in c_and_b2(after, averaging, b2)
    )
    wide = lambda leaf: jnp.asarray(leaf).astype(wide_dtype(leaf))
    m, m_next = (
        map_trained(wide, getattr(of, MOMENTUM[type(of)])) for of in (old, new)
    )
    if isinstance(new, optax.TraceState):
        scale = map_trained(lambda _: jnp.ones([]), m)
    else:  # 1/(c √ν̂)
        bias = 1 - beta2 ** jnp.asarray(new.count).astype(jnp.float32)
        rsqrt = lambda v: jnp.where(v > 0, v, jnp.inf) ** -0.5
        nu_hat = map_trained(lambda v: wide(v) / bias.astype(wide(v).dtype), new.nu)
        scale = map_trained(lambda v: scaled(1 / c, rsqrt(v), v.dtype), nu_hat)
    # Optax rounds β, if it is a number, to the dtype of m: 0.9 is 0.8984 in bfloat16.
    beta_for = lambda stored: (
        1 - c if averaging is None else (1 - c).astype(stored.dtype)
    )
    keep = lambda m, stored: scaled(beta_for(stored), m, m.dtype)
    kept = map_trained(keep, m, getattr(old, MOMENTUM[type(old)]))
    g = map_trained(
        lambda s, m, kept: scaled(s, m - kept, m.dtype), scale, m_next, kept
    )
    d = map_trained(lambda s, kept: scaled(-s, kept, kept.dtype), scale, kept)
    # m is stored, not a difference: it is neither rounding error nor out of range.
    exact, in_range = (
        map_trained(lambda _, of=of: of, m) for of in (jnp.zeros([]), OutOfRange())
    )
    return Step(g, d, exact, in_range, jnp.ones([]), c, None, {}, c)


_COUNTS = (
    0,
    1,
    12,
    123,
    1_234,
    12_345,
    123_456,
)  # of schedules: at some the rate may be 0
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


@contextlib.contextmanager
def _concrete() -> Iterator[None]:
    """Computes at once, also under `jax.jit`, with Optax's promotion of dtypes."""
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        yield


def _steps_of(tx: Any, params: PyTree, count: int = 0) -> tuple[Array, Array, PyTree]:
    """A step from each moment and a second: ν before; μ, ν and updates after it;
    counts; state.
    """
    full = optax.tree.full_like
    is_count = lambda path: keystr(path).endswith((".count", ".gradient_step", ".step"))
    at_count = lambda path, leaf: full(leaf, count) if is_count(path) else leaf
    tiny = lambda x: jnp.ones(
        [min(n, 2) for n in jnp.shape(x)], wide_dtype(jnp.asarray(x))
    )
    params = jax.tree.map(tiny, params)
    ramp = jax.tree.map(lambda x: jnp.cumsum(x).reshape(x.shape) / x.size, params)
    update = jax.jit(optax.with_extra_args_support(tx).update)
    start = tx.init(params)
    adam_of = lambda state: find_one(state, "adam", optax.ScaleByAdamState)
    adam, wide = adam_of(start), lambda x: jnp.ravel(x).astype(wide_dtype(x))
    vector = lambda tree: jnp.concatenate(
        [wide(by_path(tree)[key]) for key in by_path(adam.mu)]
    )

    def step(state: PyTree, old: Any, g: float) -> tuple[Array, Any, PyTree]:
        state = tree_map_with_path(at_count, state)
        state = replace(state, optax.ScaleByAdamState, lambda _: old)
        for _ in range(_MAX_BATCHES):
            u, state = update(
                optax.tree.scale(g, ramp), state, params, value=jnp.zeros([])
            )
            if (new := adam_of(state)).count != old.count:
                return (
                    jnp.stack(list(map(vector, (old.nu, new.mu, new.nu, u)))),
                    new,
                    state,
                )
        raise ValueError(f"no step in {_MAX_BATCHES} batches")

    before = lambda k, mu, root_nu: map(full, adam, (k, mu, root_nu**2))
    steps = [step(start, optax.ScaleByAdamState(*before(*of)), g) for *of, g in _BEFORE]
    _, adam, state = steps[3]
    vectors, adams, _ = zip(*steps, step(state, adam, -_S), strict=True)
    return jnp.stack(vectors, 1), jnp.stack([adam.count for adam in adams]), state


def _has_other_moments(vectors: Array, b1: ArrayLike, b2: ArrayLike) -> Bool[Array, ""]:
    """Whether ν' is not β₂ν + (1 − β₂)g², with the g of μ' = (1 − β₁)g."""
    old_nu, mu, nu, _ = vectors[:, 1:3]
    square = jnp.square(jnp.abs(mu / (1 - b1)))  # of g, since μ was 0
    error = jnp.abs(nu - b2 * old_nu - (1 - b2) * square)
    return ~jnp.all(error <= 0.1 * (1 - b2) * jnp.maximum(jnp.abs(old_nu), square))


@_concrete()
def check_adam(
    adam: Any, params: PyTree, b1: ArrayLike, b2: ArrayLike, eps: ArrayLike
) -> None:
    """Raises unless the moments are Adam's, and the updates m̂/(√ν̂ + ε) times one
    rate.
    """
    bias = lambda b, counts: 1 - jnp.asarray(b, jnp.float32) ** counts[:, None]
    try:
        for count in _COUNTS:
            vectors, counts, _ = _steps_of(adam, params, count)
            if is_surely(_has_other_moments(vectors, b1, b2)):
                raise ValueError("other moments")
            _, mu, nu, u = vectors
            d = mu / bias(b1, counts) / (jnp.sqrt(nu / bias(b2, counts)) + eps)
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
        given = "with the given `b1`, `b2` and `eps`; a step of tiny params"
        raise ValueError(f"`adam` {rule} {given} got {error}") from error


@_concrete()
def check_moments(
    inner: Any, params: PyTree, averaging: float | None, b2: float
) -> None:
    """Raises unless μ' = β₁μ + (1 − β₁)g and ν' = β₂ν + (1 − β₂)g²."""
    try:
        vectors, _, state = _steps_of(inner, params)
        c, b2 = c_and_b2(state, averaging, b2)
    except (
        Exception
    ):  # it needs extra arguments, the shapes of the params, a mesh's axis, …
        return
    if is_surely(_has_other_moments(vectors, 1 - c, b2)):
        rule = (
            "the moments of `optax.adam` or `optax.adamw`, with the given "
            "`averaging` and `b2`"
        )
        raise ValueError(f"`inner` must hold {rule}, got others")
