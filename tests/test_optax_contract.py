"""What Optax asks of its own optimizers, and everything that users put them into."""

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
    lenient,
    long,
    mean_of_all,
    run,
    slow,
    spa_state,
    x64,
    z_of,
)
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spa_optax import (
    SPAState,
    convert,
    eval_params,
    float8_momentum,
    in_float32,
    primal_averaging,
    shift_z,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)
from spa_optax._codec import stored_tree
from spa_optax._wrappers import by_path
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
    quick: bool = False  # quick tests take one for each way through the code
    long: bool = False  # left out of CI, where another takes the same way
    linear: bool = True  # in the gradients; and the state is an `SPAState` alone
    has_z: bool = True  # and takes a `state_dtype`
    # As a gradient. Optax takes it only where params are None, and a changing
    # interpolation moves params without gradients.
    takes_none: bool = True
    # Whether a compiled `init` shards the state like the params.
    keeps_sharding: bool = True
    num_sums: int = 0  # over a mesh
    # How far off a step may be if it is compiled otherwise, or has another seed.
    atol: float = 0.0
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


def factored(**kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """As `spa_adamw`, but the second moment of small arrays is factored, too."""
    scale = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    decay = optax.add_decayed_weights(1e-4)
    direction = in_float32(optax.chain(by_path(scale), decay))
    return optax.chain(direction, spa(0.1, 0.1, **kwargs))


def watched(**kwargs: Any) -> optax.GradientTransformationExtraArgs:
    return track_momentum(spa_adamw(0.1, 0.1, 0.9, b2=0.9, **kwargs))


def tracked(**kwargs: Any) -> optax.GradientTransformationExtraArgs:
    return track_momentum(spa(0.1, 0.1, **kwargs))


def falling_mu_y(count: Any) -> Any:
    return jnp.where(count > 1, 0.5, 0.9)


partial = functools.partial
COSINE = lenient(optax.warmup_cosine_decay_schedule(0.01, 0.1, 10, 1_000))
AT_Z = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
adamw = functools.partial(Transform, linear=False, takes_none=False)
# A new member of the family goes here.
FACTORIES: dict[str, Transform] = {
    "spa, schedules": Transform(partial(spa, COSINE, mean_of_all)),
    "sgdm, schedule": Transform(partial(spa_from_sgdm, COSINE, 0.9), long=True),
    "sgdm, nesterov": Transform(partial(spa_from_sgdm, COSINE, 0.9, True), quick=True),
    "stochastic": Transform(partial(spa_from_sgdm, COSINE, 0.9, rounding_key=KEY)),
    "gpa": Transform(
        partial(spa, COSINE, mean_of_all, falling_mu_y), quick=True, takes_none=False
    ),
    "tracked": Transform(tracked, num_sums=2),
    "around sgd at z": Transform(
        partial(primal_averaging, AT_Z, 0.1, params_of_base="z")
    ),
    "spa_adamw": adamw(partial(spa_adamw, 0.1, 0.1, b2=0.9)),
    "gpa_adamw": adamw(partial(spa_adamw, 0.1, 0.1, 0.9, b2=0.9), quick=True),
    "factored": adamw(factored, num_sums=2),
    "around adamw": adamw(
        partial(primal_averaging, optax.adamw(0.1, b2=0.9), 0.1, 0.9)
    ),
    "watched": adamw(watched, num_sums=2, long=True),
}
OLD_OPTAX = tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 7)
ROUNDED = {
    name: Transform(
        partial(stochastic_rounding, base, KEY),
        quick=name in ("adamw", "muon"),
        long=name in ("sgd", "float8_sgd", "adafactor"),
        linear=False,
        has_z=False,
        takes_none=name == "sgd",
        keeps_sharding=False,
        dtype=jnp.bfloat16,
        # A step may be rounded to the other neighbour. In 8 bits one of 0.1 (of 0.5 by
        # Muon) may be 1/8 off.
        atol=ULP + {"float8_sgd": 0.1 / 8, "float8_muon": 0.5 / 8}.get(name, 0.0),
    )
    for name, base in {
        "sgd": optax.sgd(0.1, 0.9),
        "adamw": optax.adamw(0.1, mu_dtype=jnp.bfloat16),
        "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
        "muon": optax.contrib.muon(0.5),
        "float8_sgd": float8_momentum(optax.sgd(0.1, 0.9), KEY),
        "float8_muon": float8_momentum(optax.contrib.muon(0.5), KEY),
    }.items()
}


def each(condition: Callable[[Transform], bool]) -> pytest.MarkDecorator:
    """A test of each transform that meets a condition, most of them slow."""

    def case(name, it):
        if it.quick:
            return pytest.param(it, id=name)
        return (long if it.long else slow)(it, id=name)

    cases = [
        case(name, it) for name, it in (FACTORIES | ROUNDED).items() if condition(it)
    ]
    return pytest.mark.parametrize("it", cases)


def leaf_types(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type, leaf.shape), tree)


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
        types_of_init = leaf_types(state)
        for _ in range(3):
            x, state, updates = update(x, state, grads)
            assert leaf_types(updates) == leaf_types(params)
        assert traces == 1
        assert leaf_types(state) == types_of_init
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
        chex.assert_trees_all_equal_shapes_and_dtypes(state.base_state, expected)
        return
    count, z, *scalars, _ = spa_state(state)
    assert (count, count.dtype) == (3, jnp.int32)
    chex.assert_type(jax.tree.leaves(z), wide)
    chex.assert_type(scalars, wide)


@every_member
def test_state_dtype(it: Transform) -> None:
    x, state = run(it(state_dtype=jnp.bfloat16), PARAMS, [GRADS] * 10)
    chex.assert_type(jax.tree.leaves(spa_state(state).z), jnp.bfloat16)
    expected, _ = run(it(), PARAMS, [GRADS] * 10)
    assert float(jnp.abs(expected["w"] - PARAMS["w"]).max()) > 0.05
    # Each of 10 steps rounds z − y, of up to 2, by half an ulp at most, or by an ulp
    # with a key.
    ulps = 1.0 if it is FACTORIES["stochastic"] else 0.5
    atol = 10 * ulps * 2 * float(jnp.finfo(jnp.bfloat16).eps)
    chex.assert_trees_all_close(x, expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        slow(partial(spa, learning_rate=0.1, averaging=0.1)),
        partial(spa, learning_rate=0.1, averaging=0.1, interpolation=0.9),
        partial(spa_from_sgdm, learning_rate=0.01, momentum=0.9),
        slow(partial(spa_adamw, learning_rate=0.1, averaging=0.1, b2=0.9)),
        slow(
            partial(primal_averaging, optax.sgd(0.1), averaging=0.1, interpolation=0.9)
        ),
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

    def train(number: Any) -> Any:
        return run(make(**{name: number}), PARAMS, grads)[0]

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
        skipped = jax.tree.map(jnp.zeros_like, params), state
        updates, state = jax.lax.cond(
            do, lambda: tx.update(it.grads, state, params), lambda: skipped
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
    """What is linear treats two parts as two params. No cast warns."""
    params, grads = {"a": jnp.array([1 + 2j, 3 - 1j])}, {"a": jnp.array([0.5 - 1j, 2j])}
    start = it().init(params)
    found, state = run(it(), params, [grads] * 3)
    chex.assert_trees_all_equal_shapes_and_dtypes((found, state), (params, start))
    assert [leaf for leaf in jax.tree.leaves(state) if jnp.iscomplexobj(leaf)]
    if it.linear:

        def parts(tree: Any) -> Any:
            return {"re": tree["a"].real, "im": tree["a"].imag}

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
        np.testing.assert_array_equal(z_of(state, params)["b"]["c"], kept)


@every_transform
def test_leaves_that_are_not_trained(it: Transform) -> None:
    """Integers, whose gradients have no dtype, and None."""
    tx = it()
    params = it.params | {
        "step": jnp.array(2**24 + 1),
        "on": jnp.array(True),
        "none": None,
    }

    def loss(p: Any) -> Any:
        return jnp.sum(p["w"].astype(float) ** 2) * jnp.where(p["on"], 1.0, 2.0)

    grads = jax.grad(loss, allow_int=True)(params)
    for g in (grads, jax.tree.map(jnp.zeros_like, params) | {"w": grads["w"]}):
        state = tx.init(params)
        updates, after = tx.update(g, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes((updates, after), (params, state))
        x = optax.apply_updates(params, updates)
        for tree in (x, stored_tree(spa_state(after).z)) if it.has_z else (x,):
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
    if it is not FACTORIES["factored"]:  # a vector has no rows and columns
        it.assert_close(flat, params, 3)
    before = [optax.clip_by_global_norm(0.1), optax.add_decayed_weights(1e-2)]
    chained, _ = run(optax.chain(*before, it()), PARAMS, grads)
    assert not np.allclose(chained["w"], params["w"])
    if getattr(it.factory, "func", None) is spa_from_sgdm:
        reference, _ = run(
            optax.chain(*before, optax.sgd(*it.factory.args)), PARAMS, grads
        )
        chex.assert_trees_all_close(chained, reference, rtol=1e-6)


@every_transform
def test_nnx_optimizer(it: Transform) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    nnx.update(model, optax.tree.cast(nnx.state(model, nnx.Param), it.dtype))
    if it in (ROUNDED["muon"], ROUNDED["float8_muon"]) and OLD_OPTAX:
        pytest.skip("Optax's Muon itself does not run here before 0.2.7")
    optimizer = nnx.Optimizer(model, it(), wrt=nnx.Param)
    start = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, grads)

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
    tx = it()

    def loss(model: Any) -> jax.Array:
        return jnp.sum(jax.vmap(model[0])(jnp.ones((3, 2))) ** 2)

    def only_trained(model: Any) -> Any:
        return equinox.filter(model, equinox.is_inexact_array)

    @equinox.filter_jit
    def step(model: Any, state: Any, params: Any) -> Any:
        grads = equinox.filter_grad(loss)(model)
        updates, state = tx.update(grads, state, params)
        return equinox.apply_updates(model, updates), state

    start, state = model, tx.init(only_trained(model))
    for _ in range(2):
        expected = step(model, state, only_trained(model))
        model, state = step(model, state, model)
        chex.assert_trees_all_equal(*map(only_trained, ((model, state), expected)))
        moved = convert(state, model, into=tx.init(only_trained(model)))
        chex.assert_trees_all_equal_structs(moved, state)
        chex.assert_trees_all_equal(spa_state(moved), spa_state(state))
    x = eval_params(state, model)
    assert jax.tree.structure(x) == jax.tree.structure(model)
    assert not np.array_equal(x[0].layers[0].weight, start[0].layers[0].weight)
    np.testing.assert_array_equal(x[1], start[1])
    chex.assert_trees_all_equal_structs(shift_z(state, model, start), state)


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
    is_whole = not it.has_z or it is FACTORIES["factored"]
    if axis_type == AxisType.Explicit and is_whole:
        pytest.skip("Optax's moments are whole there, or made on one device")
    tx = it() if axis_type == AxisType.Auto else it(state_dtype=jnp.bfloat16)
    one_device = {"w": it.params["w"]}, {"w": it.grads["w"]}
    expected, _ = run(tx, one_device[0], [one_device[1]] * 3)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params, grads = jax.device_put(one_device, sharding)

    def is_split(leaf: jax.Array) -> bool:
        return leaf.sharding.is_equivalent_to(sharding, 2)

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
