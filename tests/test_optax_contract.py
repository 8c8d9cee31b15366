"""What optax asks of its own optimizers, and all that a transform is put into."""

import functools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx, serialization
from flax.training.train_state import TrainState
from helpers import (
    COLLECTIVE,
    FLOAT16,
    UNIFORM,
    apply,
    lenient,
    quick,
    spa_state,
    table,
    trajectory,
    x64,
)
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from spa_optax import (
    SPAState,
    convert,
    eval_params,
    float8_momentum,
    in_float32,
    primal_averaging,
    reanchor,
    scale_by_factored_second_moment,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)
from spa_optax._core import Scalars, transformation
from spa_optax._hyperparams import at_count
from spa_optax.diagnostics import TrackMomentumState, track_momentum

KEY = jax.random.key(0)


def schedule_free(
    learning_rate: optax.ScalarOrSchedule, interpolation: float = 0.9, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Schedule-Free for any schedule: a member that keeps two scalars of its own.

    w_k = max(γ_0, …, γ_{k+1})²        c_{k+1} = w_k / (w_0 + … + w_k)
    """
    gamma_at = at_count("learning_rate", learning_rate)
    mu_y_at = at_count("interpolation", interpolation)

    def rule(state: SPAState, _: PyTree) -> Scalars:
        k, gamma = state.count, gamma_at(state.count)
        max_rate, weight_sum = (own.astype(gamma.dtype) for own in state.rule_state)
        max_rate = jnp.maximum(max_rate, gamma_at(k + 1))  # Optax reads the next rate here
        weight_sum += max_rate**2
        c = jnp.where(weight_sum > 0, max_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1), 0)
        w = (1 - c) * jnp.where(gamma > 0, gamma, state.w.astype(gamma.dtype))
        return Scalars(gamma, c, w, mu_y_at(k), rule_state=(max_rate, weight_sum))

    options = {"state_dtype": None, "rounding_key": None, **options}
    zeros = (jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32))
    return transformation(rule, **options, mu_y_at=mu_y_at, rule_state=zeros)


COSINE = lenient(optax.warmup_cosine_decay_schedule(0.01, 0.1, 10, 1_000))
FACTORIES: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "spa": functools.partial(spa, 0.1, 0.1),
    "spa, schedules": functools.partial(spa, COSINE, UNIFORM),
    "sgdm": functools.partial(spa_from_sgdm, 0.01, 0.9),
    "sgdm, schedule": functools.partial(spa_from_sgdm, COSINE, 0.9),
    "sgdm, nesterov": functools.partial(spa_from_sgdm, COSINE, 0.9, True),
    "stochastic": functools.partial(spa_from_sgdm, COSINE, 0.9, rounding_key=KEY),
    "gpa": functools.partial(spa, COSINE, UNIFORM, lambda k: jnp.where(k > 1, 0.5, 0.9)),
    "schedule_free": functools.partial(schedule_free, COSINE),
    "tracked": lambda **kwargs: track_momentum(spa(0.1, 0.1, **kwargs)),
    "around sgd at z": functools.partial(
        primal_averaging,
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
        0.1,
        params_of_base="z",
    ),
}


def factored(**kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """`spa_adamw` with a second moment that is factored for small arrays, too."""
    scale = scale_by_factored_second_moment(0.9, min_dim_size_to_factor=2)
    direction = in_float32(optax.chain(scale, optax.add_decayed_weights(1e-4)))
    return optax.chain(direction, spa(0.1, 0.1, **kwargs))


ALIASES: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "spa_adamw": functools.partial(spa_adamw, 0.1, 0.1, b2=0.9),
    "gpa_adamw": functools.partial(spa_adamw, 0.1, 0.1, 0.9, b2=0.9),
    "factored": factored,
    "16 bits": functools.partial(
        spa_adamw, 0.1, 0.1, 0.9, b2=0.9, second_moment="bfloat16", rounding_key=KEY
    ),
    "around adamw": functools.partial(primal_averaging, optax.adamw(0.1, b2=0.9), 0.1, 0.9),
}
WATCHED: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "watched": lambda **kwargs: track_momentum(
        spa_adamw(0.1, 0.1, 0.9, b2=0.9, **kwargs), every=2, per_leaf=True
    ),
}
ALL = FACTORIES | ALIASES | WATCHED


def keywords(make: Any) -> dict[str, Any]:
    return getattr(make.__wrapped__, "keywords", {})


def ulps_of_rounding(make: Any) -> float:
    """How far two runs may be apart that round ν differently: one ulp of bfloat16, if at all."""
    return 2**-7 if "second_moment" in keywords(make) else 0.0


def is_factored(make: Any) -> bool:
    return make.__wrapped__ is factored


def is_around_adamw(make: Any) -> bool:
    return make.__wrapped__ is ALIASES["around adamw"]


QUICK = ("sgdm, nesterov", "gpa", "gpa_adamw")


def each_of(factories: dict[str, Any], *chosen: str) -> pytest.MarkDecorator:
    """Each makes a transform once for all tests, which share its compiled updates."""
    cached = {name: functools.cache(make) for name, make in factories.items()}
    return pytest.mark.parametrize("make", quick(cached, *chosen))


every_transform = each_of(ALL, *QUICK)
# What holds for updates that are linear in the gradients, and for states that are SPA's alone.
but_adamw = each_of(FACTORIES, *QUICK)
WITH_NUMBERS: list[Any] = [
    functools.partial(spa, 0.1, 0.1),
    functools.partial(spa_from_sgdm, 0.01, 0.9),
    functools.partial(spa, 0.1, 0.1, 0.9),
    functools.partial(spa_adamw, 0.1, 0.1, b2=0.9),
]
AROUND_SGD = functools.partial(primal_averaging, optax.sgd(0.1), 0.1, 0.9)

PARAMS = {
    "w": jnp.arange(6.0).reshape(2, 3) / 4,
    "b": {"c": jnp.ones(3)},
    "s": jnp.array(2.0, float),
}
GRADS = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)


def step_of(tx: optax.GradientTransformation, loss: Any) -> Callable[[Any, Any], Any]:
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


@every_transform
def test_extra_args_are_accepted(make: Any) -> None:
    tx = make()
    state = tx.init(PARAMS)
    expected, _ = tx.update(GRADS, state, PARAMS)
    updates, _ = tx.update(GRADS, state, PARAMS, value=1.0, not_expected="at all")
    chex.assert_trees_all_equal(updates, expected)


@every_transform
def test_the_second_call_does_not_recompile(make: Any) -> None:
    tx = make()
    traces = 0

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        updates, state = tx.update(GRADS, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    types = jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type, leaf.shape), state)
    for _ in range(3):
        params, state = update(params, state)
    assert traces == 1
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type, leaf.shape), state) == types


@pytest.mark.parametrize("b1", [0.5, 0.9])
def test_a_member_with_scalars_of_its_own(b1: float) -> None:
    """`schedule_free`, above, is Optax's, here of a rate that rises twice and falls between."""
    rates = np.repeat([0.0, 0.125, 0.25, 0.5, 0.125, 1.0, 0.25], 40)  # float32 holds their sums
    evaluate = optax.contrib.schedule_free_eval_params
    with x64():
        reference = optax.contrib.schedule_free_sgd(table(rates), b1=b1)
        y_reference, x_reference = trajectory(reference, evaluate, jnp.float64)
        y, x = trajectory(schedule_free(table(rates), b1), eval_params, jnp.float64)
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-12)
    # The state keeps μ_y as a float32.
    np.testing.assert_allclose(x, x_reference, rtol=0, atol=1e-12 if b1 == 0.5 else 1e-7)
    assert np.abs(x - y).max() > 1e-3


@but_adamw
def test_map_params_reaches_z_alone(make: Any) -> None:
    tx = make()
    state = tx.init(PARAMS)
    chex.assert_trees_all_equal(optax.tree.map_params(tx, lambda leaf: leaf, state), state)
    marked = optax.tree.map_params(
        tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other"
    )
    z = jax.tree.map(lambda _: "param", PARAMS)
    own = jax.tree.map(lambda _: "other", spa_state(state).rule_state)
    assert spa_state(marked) == SPAState("other", z, *["other"] * 4, own)
    assert jax.tree.leaves(marked).count("param") == len(jax.tree.leaves(PARAMS))


@pytest.mark.parametrize(
    ("loss", "start", "goal"),
    [
        (lambda x: jnp.sum((x - jnp.array([1.0, -1.0, 1.0])) ** 2), [-1.0, 10.0, 1.0], [1, -1, 1]),
        (lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2, [0.0, 0.0], [1, 1]),
    ],
    ids=["parabola", "Rosenbrock"],
)
@pytest.mark.parametrize(
    "tx",
    [
        spa(1e-2, 0.1),
        spa_from_sgdm(1e-3, 0.9),
        spa_from_sgdm(1e-3, 0.9, True),
        spa_from_sgdm(lenient(optax.linear_schedule(1e-3, 5e-4, 30_000)), 0.9),
        spa(1e-2, 0.1, 0.9),
        spa_adamw(1e-2, weight_decay=0.0),
        spa_adamw(1e-2, 0.1, 0.9, weight_decay=0.0),
    ],
    ids=["spa", "sgdm", "nesterov", "schedule", "gpa", "spa_adamw", "gpa_adamw"],
)
@pytest.mark.slow
def test_30_000_steps_converge(tx: Any, loss: Any, start: list[float], goal: list[int]) -> None:
    step = step_of(tx, loss)
    params = jnp.array(start)
    carry = jax.lax.scan(lambda c, _: (step(*c), None), (params, tx.init(params)), length=30_000)[0]
    np.testing.assert_allclose(carry[0], goal, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("make", [*WITH_NUMBERS, AROUND_SGD])
def test_inject_hyperparams(make: Any) -> None:
    injected = optax.inject_hyperparams(make.func)(*make.args, **make.keywords)
    tx = make()
    state, injected_state = tx.init(PARAMS), injected.init(PARAMS)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(GRADS, state, PARAMS)
        from_injected, injected_state = jax.jit(injected.update)(GRADS, injected_state, PARAMS)
        chex.assert_trees_all_close(from_injected, updates, rtol=1e-5)
        chex.assert_trees_all_close(injected_state.inner_state, state, rtol=1e-5)


@every_transform
@pytest.mark.parametrize("dtype", [FLOAT16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_dtypes_are_preserved(make: Any, dtype: Any) -> None:
    with x64(dtype == jnp.float64):
        params, grads = jax.tree.map(lambda leaf: leaf.astype(dtype), (PARAMS, GRADS))
        tx = make()
        state = tx.init(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(grads, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        z_dtype = dtype if dtype in (jnp.float32, jnp.float64) else jnp.float32
        chex.assert_type(jax.tree.leaves(optax.tree.get(state, "z")), z_dtype)
        count, _, *scalars = spa_state(state)
        chex.assert_type(jax.tree.leaves(scalars), jnp.float32)
        assert count.dtype == jnp.int32
        # Whatever there is beside z, and a ν of 16 bits, is a float32 or an int32.
        others = {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.dtype != z_dtype}
        assert others <= {"float32", "int32"} | ({"bfloat16"} if ulps_of_rounding(make) else set())


@every_transform
@pytest.mark.parametrize("state_dtype", [jnp.bfloat16, FLOAT16, jnp.float32, "bfloat16"])
def test_state_dtype(make: Any, state_dtype: Any) -> None:
    tx = make(state_dtype=state_dtype)
    state = tx.init(PARAMS)
    updates, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    chex.assert_type(jax.tree.leaves(optax.tree.get(state, "z")), jnp.dtype(state_dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)
    # In bfloat16 each of 10 steps rounds z, of up to 2, by half an ulp at most: 2^-8 (or 2^-11).
    # With stochastic rounding by an ulp.
    x, _ = apply(tx, PARAMS, [GRADS] * 10)
    expected, _ = apply(make(), PARAMS, [GRADS] * 10)
    assert float(jnp.abs(expected["w"] - PARAMS["w"]).max()) > 0.05
    ulp = 2 * float(jnp.finfo(state_dtype).eps)
    is_stochastic = "rounding_key" in keywords(make)
    atol = 10 * (ulp if is_stochastic else ulp / 2)
    chex.assert_trees_all_close(x, expected, atol=atol, rtol=1e-5)


@every_transform
def test_gradients_wider_than_params(make: Any) -> None:
    # Accumulated gradients are often float32 though the params are not.
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    tx = make()
    updates, _ = jax.jit(tx.update)(GRADS, tx.init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


@every_transform
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_multi_steps(make: Any, dtype: Any) -> None:
    """Two half batches are one batch; and the types fit the `lax.cond` inside."""
    params, grads = jax.tree.map(lambda leaf: leaf.astype(dtype), (PARAMS, GRADS))
    tx, multi = make(), optax.MultiSteps(make(), 2)
    state, multi_state = tx.init(params), multi.init(params)
    x, multi_x, multi_update = params, params, jax.jit(multi.update)
    for k in range(6):
        with jax.numpy_dtype_promotion("standard"):
            updates, multi_state = multi_update(grads, multi_state, multi_x)
        chex.assert_trees_all_equal_dtypes(updates, params)
        multi_x = optax.apply_updates(multi_x, updates)
        if k % 2:
            updates, state = jax.jit(tx.update)(grads, state, x)
            x = optax.apply_updates(x, updates)
    chex.assert_trees_all_close(multi_x, x, rtol=1e-6 if dtype == jnp.float32 else 1e-2)


@every_transform
def test_inside_cond_and_while(make: Any) -> None:
    tx = make()

    @jax.jit
    def maybe(do: Array, params: Any, state: Any) -> Any:
        skip = lambda: (jax.tree.map(jnp.zeros_like, params), state)
        return jax.lax.cond(do, lambda: tx.update(GRADS, state, params), skip)

    state = tx.init(PARAMS)
    updates, state = maybe(jnp.array(False), PARAMS, state)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    updates, state = maybe(jnp.array(True), PARAMS, state)
    assert spa_state(state).count == 1
    step = step_of(tx, lambda p: optax.tree.norm(p, squared=True) / 2)
    unfinished = lambda carry: spa_state(carry[1]).count < 5
    _, state = jax.lax.while_loop(unfinished, lambda carry: step(*carry), (PARAMS, state))
    assert spa_state(state).count == 5


def test_a_schedule_is_its_scalar() -> None:
    grads = [GRADS] * 10
    for scalar, schedule in (
        (spa(0.1, 0.3), spa(lambda _: 0.1, lambda _: jnp.float32(0.3))),
        (spa_from_sgdm(0.1, 0.9), spa_from_sgdm(lambda _: 0.1, lambda _: jnp.float32(0.9))),
        (spa_from_sgdm(0.1, 0.9, True), spa_from_sgdm(optax.constant_schedule(0.1), 0.9, True)),
    ):
        params, _ = apply(scalar, PARAMS, grads)
        from_schedule, _ = apply(schedule, PARAMS, grads)
        chex.assert_trees_all_close(from_schedule, params, rtol=1e-6)


@every_transform
def test_scan_is_a_loop(make: Any) -> None:
    tx = make()
    step = step_of(tx, lambda p: optax.tree.norm(p, squared=True) / 2)
    carry = (PARAMS, tx.init(PARAMS))
    scanned, _ = jax.lax.scan(lambda c, _: (step(*c), None), carry, length=7)
    for _ in range(7):
        carry = jax.jit(step)(*carry)
    chex.assert_trees_all_close(scanned, carry, rtol=1e-6)


@pytest.mark.parametrize("make", WITH_NUMBERS)
def test_vmap_over_learning_rates(make: Any) -> None:
    rates = jnp.array([0.01, 0.03, 0.1])

    def train(rate: Array) -> Any:
        tx = make.func(rate, *make.args[1:], **make.keywords)
        updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        updates, state = tx.update(GRADS, state, optax.apply_updates(PARAMS, updates))
        return updates, state

    updates, state = jax.jit(jax.vmap(train))(rates)
    assert spa_state(state).count.shape == (3,)
    for i, rate in enumerate(rates):
        one = make.func(float(rate), *make.args[1:], **make.keywords)
        updates_1, state_1 = one.update(GRADS, one.init(PARAMS), PARAMS)
        expected, _ = one.update(GRADS, state_1, optax.apply_updates(PARAMS, updates_1))
        of_one = jax.tree.map(lambda u, i=i: u[i], updates)
        chex.assert_trees_all_close(of_one, expected, rtol=1e-5, atol=1e-7)


@but_adamw
def test_gradient_through_the_update(make: Any) -> None:
    """Meta-learning differentiates the params with respect to where training began."""
    tx = make()

    def trained(x: Array) -> Array:
        params, state = x, tx.init(x)
        for _ in range(3):
            updates, state = tx.update(2 * params, state, params)
            params = optax.apply_updates(params, updates)
        return params

    x = jnp.array(1.5)
    # Linear in x, so the derivative is the value over x.
    np.testing.assert_allclose(jax.grad(trained)(x), trained(x) / x, rtol=1e-6)


@but_adamw
def test_complex_params(make: Any) -> None:
    params = {"a": jnp.array([1 + 2j, 3 - 1j])}
    grads = {"a": jnp.array([0.5 - 1j, 2j])}
    tx = make()
    updates, state = apply(tx, params, [grads] * 3)
    parts = lambda tree: {"re": tree["a"].real, "im": tree["a"].imag}
    split, _ = apply(tx, parts(params), [parts(grads)] * 3)
    chex.assert_trees_all_close(parts(updates), split, rtol=1e-6)
    chex.assert_type(optax.tree.get(state, "z")["a"], jnp.complex64)


@every_transform
def test_empty_trees_and_none(make: Any) -> None:
    tx = make()
    for empty in ({}, (), {"a": None}):
        updates, state = tx.update(empty, tx.init(empty), empty)
        assert updates == empty
        assert spa_state(state).count == 1
    if is_around_adamw(make):  # which takes None only where a parameter is None
        return
    # A parameter without a gradient stays, and so does its z; the others are not affected.
    grads = {**GRADS, "b": {"c": None}}
    params, state = apply(tx, PARAMS, [grads] * 2)
    expected, _ = apply(tx, PARAMS, [GRADS] * 2)
    np.testing.assert_array_equal(params["b"]["c"], PARAMS["b"]["c"])
    np.testing.assert_array_equal(optax.tree.get(state, "z")["b"]["c"], PARAMS["b"]["c"])
    np.testing.assert_array_equal(params["w"], expected["w"])


@every_transform
def test_donation(make: Any) -> None:
    tx = make()
    for dtype in (jnp.float32, jnp.bfloat16):
        # bfloat16 z of bfloat16 params is the case in which a cast would alias.
        tx = make(state_dtype=dtype)
        params, grads = (
            jax.tree.map(lambda leaf, dtype=dtype: jnp.array(leaf, dtype), tree)
            for tree in (PARAMS, GRADS)
        )
        state = tx.init(params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, grads: Any, tx: Any = tx) -> Any:
            # All of the old state is read: what is not would not be donated.
            total = optax.tree.sum(optax.tree.cast(state, jnp.float32))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, total

        old = (params, state)
        params, state, _ = step(params, state, grads)
        params, state, _ = step(params, state, grads)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


@every_transform
def test_abstract_init(make: Any) -> None:
    tx = make()
    concrete = tx.init(PARAMS)
    abstract = jax.eval_shape(tx.init, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)
    structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
    from_structs = tx.init(structs)
    chex.assert_trees_all_equal_shapes_and_dtypes(from_structs, concrete)
    # There was no value to copy, and the first update does not miss it.
    expected, _ = tx.update(GRADS, concrete, PARAMS)
    updates, _ = tx.update(GRADS, from_structs, PARAMS)
    chex.assert_trees_all_equal(updates, expected)
    jax.eval_shape(tx.update, GRADS, abstract, PARAMS)


@every_transform
def test_masked_and_partition(make: Any) -> None:
    mask = {"w": True, "b": {"c": False}, "s": True}
    params, _ = apply(make(), PARAMS, [GRADS] * 3)
    masked, _ = apply(optax.masked(make(), mask), PARAMS, [GRADS] * 3)
    rtol = ulps_of_rounding(make)  # leaves have other seeds
    np.testing.assert_allclose(masked["w"], params["w"], rtol=rtol)
    np.testing.assert_allclose(masked["b"]["c"], PARAMS["b"]["c"] + 3 * GRADS["b"]["c"], rtol=1e-6)
    labels = jax.tree.map(lambda on: "spa" if on else "frozen", mask)
    tx = optax.partition({"spa": make(), "frozen": optax.set_to_zero()}, labels)
    partitioned, _ = apply(tx, PARAMS, [GRADS] * 3)
    np.testing.assert_allclose(partitioned["w"], params["w"], rtol=rtol)
    np.testing.assert_array_equal(partitioned["b"]["c"], PARAMS["b"]["c"])


@every_transform
def test_apply_if_finite(make: Any) -> None:
    tx = optax.apply_if_finite(make(), max_consecutive_errors=3)
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS)
    params, state = apply(tx, PARAMS, [GRADS, bad, GRADS])
    expected, expected_state = apply(make(), PARAMS, [GRADS, GRADS])
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    chex.assert_trees_all_close(state.inner_state, expected_state, rtol=1e-6)


@every_transform
def test_flatten_and_chain(make: Any) -> None:
    grads = [GRADS, jax.tree.map(lambda g: 2 * g, GRADS), GRADS]
    params, _ = apply(make(), PARAMS, grads)
    flat, _ = apply(optax.flatten(make()), PARAMS, grads)
    if not is_factored(make):  # there are no rows and columns any more
        chex.assert_trees_all_close(flat, params, rtol=ulps_of_rounding(make) or 1e-6)
    before = [optax.clip_by_global_norm(0.1), optax.add_decayed_weights(1e-2)]
    chained, _ = apply(optax.chain(*before, make()), PARAMS, grads)
    factory = make.__wrapped__
    if getattr(factory, "func", None) is spa_from_sgdm:
        reference, _ = apply(optax.chain(*before, optax.sgd(*factory.args)), PARAMS, grads)
        chex.assert_trees_all_close(chained, reference, rtol=1e-6)
    assert not np.allclose(chained["w"], params["w"])


@every_transform
def test_nnx_optimizer(make: Any) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    x = jnp.ones((4, 3))
    loss = lambda model: jnp.sum(model(x) ** 2)
    start = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(loss)(model))

    step(model, optimizer)
    step(model, optimizer)

    def pure_loss(p: Any) -> Array:
        return jnp.sum((x @ p["kernel"] + p["bias"]) ** 2)

    tx = make()
    params, state = start, tx.init(start)
    for _ in range(2):
        params, state = step_of(tx, pure_loss)(params, state)
    chex.assert_trees_all_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params, rtol=1e-5)


@every_transform
def test_equinox(make: Any) -> None:
    """The model itself as params, with functions and integers among them, as much code has it."""
    if make.__wrapped__ is FACTORIES["schedule_free"]:
        pytest.skip("`convert` does not know scalars of a member's own yet")
    model = equinox.nn.MLP(2, 2, 4, 1, activation=jax.nn.relu, key=jax.random.key(0))
    model = (model, jnp.arange(3), "a name")
    loss = lambda model: jnp.sum(jax.vmap(model[0])(jnp.ones((3, 2))) ** 2)
    only_trained = lambda model: equinox.filter(model, equinox.is_inexact_array)
    tx = make()

    @equinox.filter_jit
    def both(model: Any, state: Any) -> Any:
        grads = equinox.filter_grad(loss)(model)
        expected = tx.update(grads, state, only_trained(model))
        updates, state = tx.update(grads, state, model)
        model = equinox.apply_updates(model, updates)
        into = tx.init(only_trained(model))
        moved = convert(state, model, into=into)
        of_trained = convert(state, only_trained(model), into=into)
        x = eval_params(state, model)
        return model, state, (updates, state, moved), (*expected, of_trained), x

    start, state = model, tx.init(only_trained(model))
    for _ in range(2):
        model, state, found, expected, x = both(model, state)
        chex.assert_trees_all_equal(found, expected)
        assert jax.tree.structure(x) == jax.tree.structure(model)
    assert not np.array_equal(model[0].layers[0].weight, start[0].layers[0].weight)
    np.testing.assert_array_equal(model[1], start[1])
    moved = equinox.combine(jax.tree.map(lambda p: p + 1, only_trained(model)), model)
    assert spa_state(reanchor(state, model, moved)).count == 2


def test_a_gradient_that_init_did_not_see() -> None:
    params = {"w": jnp.ones(2), "late": jnp.ones(3)}
    tx = spa(0.1)
    with pytest.raises(ValueError, match=r"`updates` must be None where `state.z` is, .*'late'"):
        tx.update(params, tx.init({"w": params["w"], "late": None}), params)


@every_transform
def test_linen_train_state(make: Any) -> None:
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=make())
    # Pretrained weights are put in after `create` all the time: no pull back to the old ones.
    loaded = jax.tree.map(lambda leaf: leaf + 5, params)
    state = state.replace(params=loaded)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        state = jax.jit(lambda s: s.apply_gradients(grads=grads))(state)
    expected, _ = apply(make(), loaded, [grads] * 2)
    chex.assert_trees_all_close(state.params, expected, rtol=1e-6)


@every_transform
def test_pickle_msgpack_and_orbax(make: Any, tmp_path: Path) -> None:
    tx = make()
    params, state = apply(tx, PARAMS, [GRADS] * 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, params))
    unpacked = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    expected, _ = tx.update(GRADS, state, params)
    for again in (restored, unpacked, pickle.loads(pickle.dumps(state)), jax.device_get(state)):
        chex.assert_trees_all_equal(again, state)
        assert type(spa_state(again)) is SPAState
        assert type(again) is type(state)
        updates, _ = tx.update(GRADS, again, params)
        chex.assert_trees_all_equal(updates, expected)


@every_transform
def test_sharded_params(make: Any) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("data",))
    assert mesh.size == 8
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put({"w": jnp.arange(64.0).reshape(16, 4)}, sharding)
    grads = jax.tree.map(jnp.cos, params)
    tx = make()
    for init in (jax.jit(tx.init), tx.init):
        state = init(params)
        # Under jit Optax's moments lose it.
        ours = spa_state(state) if is_around_adamw(make) else state
        large = [leaf for leaf in jax.tree.leaves(ours) if leaf.shape == (16, 4)]
        assert large
        assert all(leaf.sharding.is_equivalent_to(sharding, 2) for leaf in large)
    update = jax.jit(tx.update).lower(grads, state, params).compile()
    # What tracks adds its own sums, ‖g‖² and ‖u‖², a factored ν its means, and no other collective.
    is_tracked = isinstance(state, TrackMomentumState)
    num_sums = 2 if is_tracked or is_factored(make) else 0
    found = COLLECTIVE.findall(update.as_text())
    assert set(found) <= ({"all-reduce"} if num_sums else set())
    assert len(re.findall(r"= .* all-reduce(-start)?\(", update.as_text())) <= num_sums
    updates, state = update(grads, state, params)
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)
    assert optax.tree.get(state, "z")["w"].sharding.is_equivalent_to(sharding, 2)
    one_device = jax.device_get((grads, params))
    expected, _ = tx.update(one_device[0], tx.init(one_device[1]), one_device[1])
    chex.assert_trees_all_close(jax.device_get(updates), jax.device_get(expected), atol=1e-6)
    # The positive control: clipping must add one.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), tx)
    compiled = jax.jit(clipped.update).lower(grads, clipped.init(params), params).compile()
    assert COLLECTIVE.search(compiled.as_text())


@every_transform
def test_export_for_cpu_gpu_and_tpu(make: Any) -> None:
    tx = make()
    step = jax.jit(step_of(tx, lambda p: optax.tree.norm(p, squared=True)))
    platforms = ("cpu", "cuda", "tpu")
    exported = export.export(step, platforms=platforms)(PARAMS, tx.init(PARAMS))
    assert exported.platforms == platforms
    chex.assert_trees_all_close(
        exported.call(PARAMS, tx.init(PARAMS)), step(PARAMS, tx.init(PARAMS)), rtol=1e-6
    )


# ----------------------------------------------------------------------- stochastic_rounding

ROUNDED: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    name: functools.partial(stochastic_rounding, base, KEY)
    for name, base in {
        "sgd": optax.sgd(0.1, 0.9),
        "adamw": optax.adamw(0.1, mu_dtype=jnp.bfloat16),
        "lion": optax.lion(0.1),
        "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
        "muon": optax.contrib.muon(0.5),
        "float8_sgd": float8_momentum(optax.sgd(0.1, 0.9), KEY),
        "float8_adamw": float8_momentum(optax.adamw(0.1), KEY),
    }.items()
}
every_rounded = each_of(ROUNDED, "adamw", "muon")
NARROW = {"w": jnp.linspace(-1, 1, 128).reshape(16, 8), "b": {"c": jnp.linspace(0.5, 2, 8)}}
NARROW = optax.tree.cast(NARROW, jnp.bfloat16)
NARROW_GRADS = jax.tree.map(lambda p: jnp.cos(3 * p) / 3, NARROW)
ULP = 2.0**-7  # of bfloat16 params from 1 to 2


def assert_close_up_to_rounding(
    x: Any, expected: Any, num_steps: int, of_momentum: float = 0.0
) -> None:
    """Compiled otherwise, a step may be rounded to the other neighbour."""
    wide = lambda tree: optax.tree.cast(tree, jnp.float32)
    atol = num_steps * ULP + of_momentum
    chex.assert_trees_all_close(wide(x), wide(expected), rtol=0, atol=atol)


@every_rounded
@pytest.mark.parametrize("dtype", [FLOAT16, jnp.bfloat16, jnp.float32])
def test_rounded_updates_have_the_dtype_of_params(make: Any, dtype: Any) -> None:
    """And the state keeps its own, so that no step compiles anew."""
    tx, traces = make(), 0
    params, grads = optax.tree.cast((NARROW, NARROW_GRADS), dtype)

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    state = tx.init(params)
    types = jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type, leaf.shape), state)
    x = params
    for _ in range(3):
        x, state, updates = update(x, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    assert traces == 1
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type, leaf.shape), state) == types
    assert state.count == 3
    assert all(np.all(np.isfinite(leaf.astype(float))) for leaf in jax.tree.leaves(x))
    assert not np.array_equal(x["w"], params["w"])
    # What the base keeps is as for float32 params.
    base = make.__wrapped__.args[0]
    expected = jax.eval_shape(base.init, optax.tree.cast(params, jnp.float32))
    chex.assert_trees_all_equal_shapes_and_dtypes(state.base, expected)


@every_rounded
def test_scan_of_rounded_is_a_loop(make: Any) -> None:
    tx = make()

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(NARROW_GRADS, state, params)
        return optax.apply_updates(params, updates), state

    carry = (NARROW, tx.init(NARROW))
    (scanned, state), _ = jax.lax.scan(lambda c, _: (step(*c), None), carry, length=7)
    for _ in range(7):
        carry = jax.jit(step)(*carry)
    assert_close_up_to_rounding(scanned, carry[0], 7)
    assert state.count == carry[1].count == 7
    moved = jnp.abs(scanned["w"].astype(float) - NARROW["w"].astype(float))
    assert moved.max() > 10 * 7 * ULP


@every_rounded
def test_donation_of_rounded(make: Any) -> None:
    tx = make()
    params, grads = jax.tree.map(jnp.array, (NARROW, NARROW_GRADS))
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        total = optax.tree.sum(optax.tree.cast(state, jnp.float32))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, total

    old = (params, state)
    params, state, _ = step(params, state)
    step(params, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


@every_rounded
def test_multi_steps_around_rounded(make: Any) -> None:
    """Two half batches are one batch, of which the random bits are."""
    tx, multi = make(), optax.MultiSteps(make(), 2)
    x, state = NARROW, tx.init(NARROW)
    multi_x, multi_state, update = NARROW, multi.init(NARROW), jax.jit(multi.update)
    for k in range(6):
        with jax.numpy_dtype_promotion("standard"):
            updates, multi_state = update(NARROW_GRADS, multi_state, multi_x)
        chex.assert_trees_all_equal_dtypes(updates, NARROW)
        multi_x = optax.apply_updates(multi_x, updates)
        if k % 2:
            updates, state = jax.jit(tx.update)(NARROW_GRADS, state, x)
            x = optax.apply_updates(x, updates)
    assert_close_up_to_rounding(multi_x, x, 3)
    assert multi_state.inner_opt_state.base is not None
    assert multi_state.inner_opt_state.count == 3


@every_rounded
def test_masked_and_partition_of_rounded(make: Any) -> None:
    mask = {"w": True, "b": {"c": False}}
    x, _ = apply(make(), NARROW, [NARROW_GRADS] * 3)
    labels = jax.tree.map(lambda on: "rounded" if on else "frozen", mask)
    frozen = {"rounded": make(), "frozen": optax.set_to_zero()}
    masked, _ = apply(optax.masked(make(), mask), NARROW, [NARROW_GRADS] * 3)
    partitioned, _ = apply(optax.partition(frozen, labels), NARROW, [NARROW_GRADS] * 3)
    # A momentum of 8 bits may be 1/8 off, in the second step, of 0.1, and in the third.
    has_8_bits = optax.tree.get(make().init(NARROW), "scales") is not None
    of_momentum = 2 * 0.1 / 8 if has_8_bits else 0.0
    for found in (masked, partitioned):  # leaves have other seeds
        assert_close_up_to_rounding(found["w"], x["w"], 3, of_momentum)
    untouched = NARROW["b"]["c"]
    np.testing.assert_array_equal(partitioned["b"]["c"], untouched)
    for _ in range(3):  # `masked` passes gradients on
        untouched += NARROW_GRADS["b"]["c"]
    np.testing.assert_array_equal(masked["b"]["c"], untouched)


@pytest.mark.parametrize("inside", [True, False])
def test_injected_rates_of_rounded(inside: bool) -> None:
    """Inside, a rate is float32 whatever the params; outside it takes their dtype."""
    if inside:
        tx = stochastic_rounding(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), KEY)
    else:
        make = lambda learning_rate: stochastic_rounding(optax.sgd(learning_rate), KEY)
        tx = optax.inject_hyperparams(make)(learning_rate=0.1)
    x, state = apply(tx, NARROW, [NARROW_GRADS] * 3)
    (rate,) = jax.tree.leaves(optax.tree.get(state, "hyperparams"))
    assert rate.dtype == (jnp.float32 if inside else jnp.bfloat16)
    expected, _ = apply(
        stochastic_rounding(optax.sgd(float(rate)), KEY), NARROW, [NARROW_GRADS] * 3
    )
    assert_close_up_to_rounding(x, expected, 3)


@every_rounded
def test_abstract_init_of_rounded(make: Any) -> None:
    tx = make()
    concrete = tx.init(NARROW)
    abstract = jax.eval_shape(tx.init, NARROW)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)
    updates, after = jax.eval_shape(tx.update, NARROW_GRADS, abstract, NARROW)
    chex.assert_trees_all_equal_shapes_and_dtypes((updates, after), (NARROW, concrete))


@every_rounded
def test_rounded_params_that_are_sharded(make: Any) -> None:
    """Their shards stay where they are, and round as one array would."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    params, grads = ({"w": tree["w"]} for tree in (NARROW, NARROW_GRADS))
    expected, _ = apply(make(), params, [grads] * 3)
    sharded, state = apply(make(), *jax.device_put((params, [grads] * 3), sharding))
    assert sharded["w"].sharding.is_equivalent_to(sharding, 2)
    for leaf in jax.tree.leaves(state):
        assert leaf.shape != (16, 8) or leaf.sharding.is_equivalent_to(sharding, 2)
    assert_close_up_to_rounding(jax.device_get(sharded), jax.device_get(expected), 3)


@every_rounded
def test_rounded_params_without_gradient_stay(make: Any) -> None:
    """Integers, whose gradients have no dtype."""
    tx = make()
    params = NARROW | {"step": jnp.arange(2), "on": jnp.array(True), "none": None}
    loss = lambda p: jnp.sum(p["w"].astype(float) ** 2) * jnp.where(p["on"], 1.0, 2.0)
    grads = jax.grad(loss, allow_int=True)(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for g in (grads, zeros | {"w": grads["w"]}):
        state = tx.init(params)
        updates, after = tx.update(g, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
        x = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(x["step"], params["step"])
        assert bool(x["on"])
        assert not np.array_equal(x["w"], params["w"])


def test_rounded_with_a_gradient_that_is_none() -> None:
    """The others are not affected."""
    tx = stochastic_rounding(optax.sgd(0.1), KEY)
    updates, _ = tx.update({**NARROW_GRADS, "b": {"c": None}}, tx.init(NARROW), NARROW)
    assert updates["b"]["c"] is None
    expected = NARROW["w"].astype(float) - 0.1 * NARROW_GRADS["w"].astype(float)
    x = (NARROW["w"] + updates["w"]).astype(float)
    np.testing.assert_allclose(x, expected, atol=ULP)


def test_rounded_extra_args_reach_the_base() -> None:
    seen = []

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        seen.append(extra_args)
        return updates, state

    base = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for tx in (stochastic_rounding(base, KEY), primal_averaging(base, 0.1)):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    assert seen == [{"value": 1.0}] * 2
