"""What optax asks of its own optimizers, and all that a transform is put into."""

import dataclasses
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
from flax import nnx, serialization
from helpers import (
    COLLECTIVE,
    FLOAT16,
    MEAN,
    lenient,
    run,
    slow,
    spa_state,
    table,
    trajectory,
    x64,
)
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

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
from spa_optax.diagnostics import track_momentum

PARAMS = {
    "w": jnp.linspace(-1, 1, 128).reshape(16, 8),
    "b": {"c": jnp.linspace(0.5, 2, 8)},
    "s": jnp.array(2.0, float),
}
GRADS = jax.tree.map(lambda p: jnp.cos(3 * p) / 3, PARAMS)
ULP = 2.0**-7  # of bfloat16 params from 1 to 2
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Transform:
    """A transform, and what tests must know of it."""

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    # one for each way through the code; the others are slow, for they are many
    quick: bool = False
    linear: bool = True  # in the gradients; and the state is SPA's alone
    has_z: bool = True  # and takes a `state_dtype`
    takes_none: bool = True  # for a gradient
    keeps_sharding: bool = True  # in a compiled `init`, which Optax's moments do not
    num_sums: int = 0  # over a mesh
    atol: float = (
        0.0  # by which a step may be off if compiled otherwise, or with another seed
    )
    dtype: Any = jnp.float32  # of the params

    def __call__(self, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        """Made once for all tests, which share its compiled updates."""
        return _made(self, **kwargs)

    @property
    def params(self) -> Any:
        return optax.tree.cast(PARAMS, self.dtype)

    @property
    def grads(self) -> Any:
        return optax.tree.cast(GRADS, self.dtype)

    def assert_close(self, found: Any, expected: Any, num_steps: int) -> None:
        found, expected = optax.tree.cast((found, expected), jnp.float32)
        atol = num_steps * self.atol
        chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=atol)


@functools.cache
def _made(transform: Transform, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
    return transform.factory(**kwargs)


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
        max_rate = jnp.maximum(
            max_rate, gamma_at(k + 1)
        )  # Optax reads the next rate here
        weight_sum += max_rate**2
        c = jnp.where(
            weight_sum > 0, max_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1), 0
        )
        w = (1 - c) * jnp.where(gamma > 0, gamma, state.w.astype(gamma.dtype))
        return Scalars(gamma, c, w, mu_y_at(k), rule_state=(max_rate, weight_sum))

    options = {"state_dtype": None, "rounding_key": None, **options}
    zeros = (jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32))
    return transformation(rule, **options, mu_y_at=mu_y_at, rule_state=zeros)


def factored(**kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """`spa_adamw` with a second moment that is factored for small arrays, too."""
    scale = scale_by_factored_second_moment(0.9, min_dim_size_to_factor=2)
    direction = in_float32(optax.chain(scale, optax.add_decayed_weights(1e-4)))
    return optax.chain(direction, spa(0.1, 0.1, **kwargs))


partial = functools.partial
COSINE = lenient(optax.warmup_cosine_decay_schedule(0.01, 0.1, 10, 1_000))
MU_Y = lambda k: jnp.where(k > 1, 0.5, 0.9)
AT_Z = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
NARROW: dict[str, Any] = {"second_moment": "bfloat16", "rounding_key": KEY}
WATCHED = lambda **kwargs: track_momentum(
    spa_adamw(0.1, 0.1, 0.9, b2=0.9, **kwargs), every=2, per_leaf=True
)
adamw = functools.partial(Transform, linear=False)
# A new member of the family goes here.
FACTORIES: dict[str, Transform] = {
    "spa, schedules": Transform(partial(spa, COSINE, MEAN)),
    "sgdm, schedule": Transform(partial(spa_from_sgdm, COSINE, 0.9)),
    "sgdm, nesterov": Transform(partial(spa_from_sgdm, COSINE, 0.9, True), quick=True),
    "stochastic": Transform(partial(spa_from_sgdm, COSINE, 0.9, rounding_key=KEY)),
    "gpa": Transform(partial(spa, COSINE, MEAN, MU_Y), quick=True),
    "schedule_free": Transform(partial(schedule_free, COSINE), quick=True),
    "tracked": Transform(
        lambda **kwargs: track_momentum(spa(0.1, 0.1, **kwargs)), num_sums=2
    ),
    "around sgd at z": Transform(
        partial(primal_averaging, AT_Z, 0.1, params_of_base="z")
    ),
    "spa_adamw": adamw(partial(spa_adamw, 0.1, 0.1, b2=0.9)),
    "gpa_adamw": adamw(partial(spa_adamw, 0.1, 0.1, 0.9, b2=0.9), quick=True),
    "factored": adamw(factored, num_sums=2),
    # Where ν is rounded otherwise, it is an ulp of bfloat16 off, and a step of 0.1 half
    # as much.
    "16 bits": adamw(
        partial(spa_adamw, 0.1, 0.1, 0.9, b2=0.9, **NARROW), atol=0.1 * 2**-8
    ),
    "around adamw": adamw(
        partial(primal_averaging, optax.adamw(0.1, b2=0.9), 0.1, 0.9),
        takes_none=False,  # Optax takes it only where a parameter is None
        keeps_sharding=False,
    ),
    "watched": adamw(WATCHED, num_sums=2),
}
ROUNDED = {
    name: Transform(
        partial(stochastic_rounding, base, KEY),
        quick=name in ("adamw", "muon"),
        linear=False,
        has_z=False,
        takes_none=name == "sgd",
        keeps_sharding=False,
        dtype=jnp.bfloat16,
        # A step may be rounded to the other neighbour; one of 0.1 in 8 bits be 1/8 off.
        atol=ULP + (0.1 / 8 if name.startswith("float8") else 0.0),
    )
    for name, base in {
        "sgd": optax.sgd(0.1, 0.9),
        "adamw": optax.adamw(0.1, mu_dtype=jnp.bfloat16),
        "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
        "muon": optax.contrib.muon(0.5),
        "float8_sgd": float8_momentum(optax.sgd(0.1, 0.9), KEY),
        "float8_adamw": float8_momentum(optax.adamw(0.1), KEY),
    }.items()
}


def each(condition: Callable[[Transform], bool]) -> pytest.MarkDecorator:
    every = {name: it for name, it in (FACTORIES | ROUNDED).items() if condition(it)}
    return pytest.mark.parametrize(
        "it",
        [
            (pytest.param if it.quick else slow)(it, id=name)
            for name, it in every.items()
        ],
    )


every_transform = each(lambda it: True)
every_member = each(lambda it: it.has_z)
every_linear = each(lambda it: it.linear)


@every_transform
@pytest.mark.parametrize("dtype", [FLOAT16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_types_stay_and_nothing_recompiles(it: Transform, dtype: Any) -> None:
    if dtype == jnp.float64 and not it.has_z:
        pytest.skip("`float8_momentum` refuses 64 bits")
    tx, traces = it(), 0
    wide = dtype if dtype == jnp.float64 else jnp.float32
    types = lambda tree: jax.tree.map(
        lambda leaf: (leaf.dtype, leaf.weak_type, leaf.shape), tree
    )

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        nonlocal traces
        traces += 1
        updates, state = tx.update(
            grads, state, params, value=1.0, not_expected="at all"
        )
        return optax.apply_updates(params, updates), state, updates

    with x64(dtype == jnp.float64):
        params, grads = optax.tree.cast((PARAMS, GRADS), dtype)
        x, state = params, tx.init(params)
        of_init = types(state)
        for _ in range(3):
            x, state, updates = update(x, state, grads)
            assert types(updates) == types(params)
        assert traces == 1
        assert types(state) == of_init
        # Accumulated gradients are often float32 though the params are not.
        if dtype != jnp.float64:
            updates, _ = jax.eval_shape(tx.update, GRADS, state, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(x))
    assert not np.array_equal(x["w"], params["w"])
    if not it.has_z:  # what the base keeps is as for float32 params
        expected = jax.eval_shape(
            it.factory.args[0].init, optax.tree.cast(params, wide)
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(state.base, expected)
        return
    count, z, *scalars, _ = spa_state(state)
    assert (count, count.dtype) == (3, jnp.int32)
    chex.assert_type(jax.tree.leaves(z), wide)
    chex.assert_type(scalars, wide)


@every_member
@pytest.mark.parametrize("state_dtype", [jnp.bfloat16, FLOAT16])
def test_state_dtype(it: Transform, state_dtype: Any) -> None:
    x, state = run(it(state_dtype=state_dtype), PARAMS, [GRADS] * 10)
    chex.assert_type(jax.tree.leaves(optax.tree.get(state, "z")), state_dtype)
    expected, _ = run(it(), PARAMS, [GRADS] * 10)
    assert float(jnp.abs(expected["w"] - PARAMS["w"]).max()) > 0.05
    # Each of 10 steps rounds z, of up to 2, by half an ulp at most (with a key, by an
    # ulp).
    has_key = it in (FACTORIES["stochastic"], FACTORIES["16 bits"])
    atol = 10 * float(jnp.finfo(state_dtype).eps) * (2 if has_key else 1)
    chex.assert_trees_all_close(x, expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        partial(spa, learning_rate=0.1, averaging=0.1),
        partial(spa, learning_rate=0.1, averaging=0.1, interpolation=0.9),
        partial(spa_from_sgdm, learning_rate=0.01, momentum=0.9),
        partial(spa_adamw, learning_rate=0.1, averaging=0.1, b2=0.9),
        partial(primal_averaging, optax.sgd(0.1), averaging=0.1, interpolation=0.9),
    ],
)
def test_hyperparameters_that_are_schedules_injected_or_traced(make: Any) -> None:
    numbers, grads = make.keywords, [GRADS] * 3
    expected, state = run(make(), PARAMS, grads)
    schedules = {name: lambda _, n=n: n for name, n in numbers.items() if name != "b2"}
    found, _ = run(make(**schedules), PARAMS, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    injected = optax.inject_hyperparams(make.func)(*make.args, **numbers)
    found, injected_state = run(injected, PARAMS, grads)
    chex.assert_trees_all_close(
        (found, injected_state.inner_state), (expected, state), rtol=1e-5
    )
    name = next(iter(numbers))
    train = lambda number: run(make(**{name: number}), PARAMS, grads)[0]
    batch = jax.vmap(train)(numbers[name] * jnp.array([0.5, 1.0]))
    for i, one in enumerate((train(0.5 * numbers[name]), expected)):
        of_one = jax.tree.map(lambda x, i=i: x[i], batch)
        chex.assert_trees_all_close(of_one, one, rtol=1e-5, atol=1e-7)


@every_transform
def test_multi_steps(it: Transform) -> None:
    """Two half batches are one batch; and the types fit the `lax.cond` inside."""
    expected, _ = run(it(), it.params, [it.grads] * 3)
    tx = optax.MultiSteps(it(), 2)
    with jax.numpy_dtype_promotion("standard"):
        found, _ = run(tx, it.params, [it.grads] * 6)
        for dtype in (jnp.bfloat16, jnp.float32):
            params = optax.tree.cast(PARAMS, dtype)
            updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
            chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    it.assert_close(found, expected, 3)


@every_transform
def test_scan_and_cond(it: Transform) -> None:
    """A scan is a loop, also one in which a step is skipped."""
    tx = it()

    def step(carry: Any, do: Any) -> Any:
        params, state = carry
        skip = lambda: (jax.tree.map(jnp.zeros_like, params), state)
        updates, state = jax.lax.cond(
            do, lambda: tx.update(it.grads, state, params), skip
        )
        return (optax.apply_updates(params, updates), state), None

    (found, _), _ = jax.lax.scan(
        step, (it.params, tx.init(it.params)), jnp.arange(7) != 3
    )
    expected, _ = run(tx, it.params, [it.grads] * 6)
    it.assert_close(found, expected, 6)


@every_linear
def test_gradient_through_the_update(it: Transform) -> None:
    """Meta-learning differentiates the params with respect to where training began."""
    tx = it()

    def trained(x: Any) -> Any:
        params, state = x, tx.init(x)
        for _ in range(3):
            updates, state = tx.update(2 * params, state, params)
            params = optax.apply_updates(params, updates)
        return params

    x = jnp.array(1.5)
    # Linear in x, so the derivative is the value over x.
    np.testing.assert_allclose(jax.grad(trained)(x), trained(x) / x, rtol=1e-6)


@every_member
def test_complex_params(it: Transform) -> None:
    """What is linear treats two parts as two params; a second moment is real. No cast
    warns."""
    params, grads = {"a": jnp.array([1 + 2j, 3 - 1j])}, {"a": jnp.array([0.5 - 1j, 2j])}
    start = it().init(params)
    found, state = run(it(), params, [grads] * 3)
    chex.assert_trees_all_equal_shapes_and_dtypes((found, state), (params, start))
    assert [leaf for leaf in jax.tree.leaves(state) if jnp.iscomplexobj(leaf)]
    if it.linear:
        parts = lambda tree: {"re": tree["a"].real, "im": tree["a"].imag}
        expected, _ = run(it(), parts(params), [parts(grads)] * 3)
        chex.assert_trees_all_close(parts(found), expected, rtol=1e-6)


@each(lambda it: it.takes_none)
def test_empty_trees_and_none(it: Transform) -> None:
    tx = it()
    for empty in ({}, (), {"a": None}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert updates == empty
    # A parameter without a gradient stays, and so does its z; the others are not
    # affected.
    params, state = run(tx, it.params, [{**it.grads, "b": {"c": None}}] * 2)
    expected, _ = run(tx, it.params, [it.grads] * 2)
    kept = it.params["b"]["c"]
    np.testing.assert_array_equal(params["b"]["c"], kept)
    it.assert_close(params["w"], expected["w"], 2)
    if it.has_z:
        np.testing.assert_array_equal(params["w"], expected["w"])
        np.testing.assert_array_equal(optax.tree.get(state, "z")["b"]["c"], kept)


@every_transform
def test_leaves_that_are_not_trained(it: Transform) -> None:
    """Integers, whose gradients have no dtype, and None."""
    tx = it()
    params = it.params | {
        "step": jnp.array(2**24 + 1),
        "on": jnp.array(True),
        "none": None,
    }
    loss = lambda p: jnp.sum(p["w"].astype(float) ** 2) * jnp.where(p["on"], 1.0, 2.0)
    grads = jax.grad(loss, allow_int=True)(params)
    for g in (grads, jax.tree.map(jnp.zeros_like, params) | {"w": grads["w"]}):
        state = tx.init(params)
        updates, after = tx.update(g, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes((updates, after), (params, state))
        x = optax.apply_updates(params, updates)
        for tree in (x, optax.tree.get(after, "z")) if it.has_z else (x,):
            assert (int(tree["step"]), bool(tree["on"])) == (2**24 + 1, True)
        assert not np.array_equal(x["w"], params["w"])


@every_transform
def test_donation(it: Transform) -> None:
    # A bfloat16 z of bfloat16 params is the case in which a cast would alias.
    tx = it(state_dtype=jnp.bfloat16) if it.has_z else it()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        # All of the old state is read: what is not would not be donated.
        total = optax.tree.sum(optax.tree.cast(state, jnp.float32))
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
        return optax.apply_updates(params, updates), state, total

    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.bfloat16), PARAMS)
    old = (params, tx.init(params))
    params, state, _ = step(*old)
    step(params, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old, params, state)))


@every_transform
def test_abstract_init(it: Transform) -> None:
    tx, params = it(), it.params
    concrete = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)
    after = jax.eval_shape(tx.update, it.grads, abstract, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, (params, concrete))
    if it.has_z:
        from_structs = tx.init(jax.eval_shape(lambda: params))
        chex.assert_trees_all_equal_shapes_and_dtypes(from_structs, concrete)
        expected, _ = tx.update(it.grads, concrete, params)
        updates, _ = tx.update(it.grads, from_structs, params)
        chex.assert_trees_all_equal(updates, expected)


@every_transform
def test_masked_and_partition(it: Transform) -> None:
    mask = {"w": True, "b": {"c": False}, "s": True}
    labels = jax.tree.map(lambda on: "trained" if on else "frozen", mask)
    frozen = {"trained": it(), "frozen": optax.set_to_zero()}
    expected, masked, partitioned = (
        run(tx, it.params, [it.grads] * 3)[0]
        for tx in (it(), optax.masked(it(), mask), optax.partition(frozen, labels))
    )
    for found in (masked, partitioned):  # leaves have other seeds
        it.assert_close(found["w"], expected["w"], 3)
    untouched, g = it.params["b"]["c"], it.grads["b"]["c"]
    np.testing.assert_array_equal(partitioned["b"]["c"], untouched)
    np.testing.assert_array_equal(
        masked["b"]["c"], untouched + g + g + g
    )  # gradients go on


@every_member
def test_flatten_and_chain(it: Transform) -> None:
    grads = [GRADS, jax.tree.map(lambda g: 2 * g, GRADS), GRADS]
    params, _ = run(it(), PARAMS, grads)
    flat, _ = run(optax.flatten(it()), PARAMS, grads)
    if it is not FACTORIES["factored"]:  # there are no rows and columns any more
        it.assert_close(flat, params, 3)
    before = [optax.clip_by_global_norm(0.1), optax.add_decayed_weights(1e-2)]
    chained, _ = run(optax.chain(*before, it()), PARAMS, grads)
    assert not np.allclose(chained["w"], params["w"])
    if getattr(it.factory, "func", None) is spa_from_sgdm:
        reference, _ = run(
            optax.chain(*before, optax.sgd(*it.factory.args)), PARAMS, grads
        )
        chex.assert_trees_all_close(chained, reference, rtol=1e-6)


@every_member
def test_nnx_optimizer(it: Transform) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, it(), wrt=nnx.Param)
    start = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, grads))
    step(model, optimizer)
    step(model, optimizer)
    expected, _ = run(it(), start, [jax.tree.map(jnp.cos, start)] * 2)
    chex.assert_trees_all_close(
        nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected, rtol=1e-5
    )


@every_member
def test_equinox(it: Transform) -> None:
    """The model itself as params, with functions and integers among them, as much code
    has it."""
    model = equinox.nn.MLP(2, 2, 4, 1, activation=jax.nn.relu, key=jax.random.key(0))
    model = (model, jnp.arange(3), "a name")
    loss = lambda model: jnp.sum(jax.vmap(model[0])(jnp.ones((3, 2))) ** 2)
    only_trained = lambda model: equinox.filter(model, equinox.is_inexact_array)
    itself = lambda model: model
    tx = it()

    @equinox.filter_jit
    def step(model: Any, state: Any, as_params: Any) -> Any:
        params, grads = as_params(model), equinox.filter_grad(loss)(model)
        updates, state = tx.update(grads, state, params)
        moved = convert(state, params, into=tx.init(only_trained(model)))
        return equinox.apply_updates(model, updates), state, moved

    start, state = model, tx.init(only_trained(model))
    for _ in range(2):
        expected = step(model, state, only_trained)
        model, state, moved = step(model, state, itself)
        chex.assert_trees_all_equal(
            *map(only_trained, ((model, state, moved), expected))
        )
    x = eval_params(state, model)
    assert jax.tree.structure(x) == jax.tree.structure(model)
    assert not np.array_equal(x[0].layers[0].weight, start[0].layers[0].weight)
    np.testing.assert_array_equal(x[1], start[1])
    chex.assert_trees_all_equal_structs(reanchor(state, model, start), state)


@pytest.mark.parametrize("b1", [0.5, 0.9])
def test_a_member_with_scalars_of_its_own(b1: float) -> None:
    """`schedule_free`, above, is Optax's, here of a rate that rises twice and falls
    between."""
    rates = np.repeat(
        [0.0, 0.125, 0.25, 0.5, 0.125, 1.0, 0.25], 40
    )  # float32 holds their sums
    with x64():
        reference = optax.contrib.schedule_free_sgd(table(rates), b1=b1)
        expected = trajectory(
            reference, optax.contrib.schedule_free_eval_params, jnp.float64
        )
        y, x = trajectory(schedule_free(table(rates), b1), eval_params, jnp.float64)
    np.testing.assert_allclose((y, x), expected, rtol=0, atol=1e-12)
    assert np.abs(x - y).max() > 1e-3


@every_member
def test_pickle_msgpack_and_orbax(it: Transform, tmp_path: Path) -> None:
    tx = it()
    params, state = run(tx, PARAMS, [GRADS] * 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.eval_shape(tx.init, params)
        )
    unpacked = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    expected, _ = tx.update(GRADS, state, params)
    for again in (
        restored,
        unpacked,
        pickle.loads(pickle.dumps(state)),
        jax.device_get(state),
    ):
        chex.assert_trees_all_equal(again, state)
        assert type(spa_state(again)) is SPAState
        assert type(again) is type(state)
        updates, _ = tx.update(GRADS, again, params)
        chex.assert_trees_all_equal(updates, expected)


@every_transform
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_params(it: Transform, axis_type: Any) -> None:
    """The state is sharded as they are, and a step moves nothing from device to
    device."""
    of_optax = not (it.has_z and it.keeps_sharding) or it is FACTORIES["factored"]
    if axis_type == AxisType.Explicit and of_optax:
        pytest.skip("Optax's moments are whole there, or made on one device")
    tx = it() if axis_type == AxisType.Auto else it(state_dtype=jnp.bfloat16)
    one_device = {"w": it.params["w"]}, {"w": it.grads["w"]}
    expected, _ = run(tx, one_device[0], [one_device[1]] * 3)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params, grads = jax.device_put(one_device, sharding)
    is_split = lambda leaf: leaf.sharding.is_equivalent_to(sharding, 2)
    for init in (tx.init, jax.jit(tx.init)) if it.keeps_sharding else (tx.init,):
        large = [
            leaf for leaf in jax.tree.leaves(init(params)) if leaf.shape == (16, 8)
        ]
        assert large or not it.has_z
        assert all(map(is_split, large))
    found, state = run(tx, params, [grads] * 3)
    assert all(
        is_split(leaf)
        for leaf in jax.tree.leaves((found, state))
        if leaf.shape == (16, 8)
    )
    it.assert_close(*jax.device_get((found, expected)), 3)
    if it.has_z:  # what tracks sums ‖g‖² and ‖u‖², and a factored ν its means
        program = jax.jit(tx.update).lower(grads, state, params).compile().as_text()
        assert set(COLLECTIVE.findall(program)) <= (
            {"all-reduce"} if it.num_sums else set()
        )
        assert len(re.findall(r"= .* all-reduce(-start)?\(", program)) <= it.num_sums


@every_member
def test_export_for_cpu_gpu_and_tpu(it: Transform) -> None:
    update, given = jax.jit(it().update), (GRADS, it().init(PARAMS), PARAMS)
    exported = export.export(update, platforms=("cpu", "cuda", "tpu"))(*given)
    # z − y is known to an ulp of params below 2.
    chex.assert_trees_all_close(
        exported.call(*given), update(*given), rtol=1e-6, atol=2.4e-7
    )
