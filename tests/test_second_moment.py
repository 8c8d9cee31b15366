"""The directions of `spa_adamw`: Optax's second moments give Adam's formulas."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import long, run, x64
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import convert, eval_params, spa_adamw

pytestmark = pytest.mark.usefixtures("standard_promotion")
SHAPES = {"matrix": (130, 140), "stack": (2, 140, 130), "bias": (30,)}
# The two longest axes, the second longest first, where both are 128 or longer.
FACTORED_AXES = {"matrix": (0, 1), "stack": (2, 1)}
NUM_STEPS = 5


def gradients() -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), NUM_STEPS)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    return [optax.tree.random_like(key, params) for key in keys]


def directions(grads: list[Any], **options: Any) -> Iterator[Any]:
    """d_k of each step, one operation at a time.

    From params of 0 with c = 1 and a learning rate of 1, the update is −d.
    """
    tx = spa_adamw(1.0, averaging=1.0, weight_decay=0.0, **options)
    params = optax.tree.zeros_like(grads[0])
    start = state = tx.init(params)
    for g in grads:
        updates, (state_of_direction, _) = tx.update(g, state, params)
        state = (state_of_direction, start[1])
        yield jax.tree.map(jnp.negative, updates)


@jax.jit
def without_bias(nu: Any, b2: float, num_steps: jax.Array) -> Any:
    """ν / (1 − β₂^n), compiled for the whole tree as Optax does it."""
    bias = 1 - b2**num_steps
    return jax.tree.map(lambda nu: nu / bias, nu)


@pytest.mark.parametrize("b2", [long(0.0), 0.9, 0.999])
def test_full_is_adams_formula_to_the_bit(b2: float) -> None:
    """ν ← β₂ ν + (1 − β₂) g², d = g / (√(ν / (1 − β₂^(k+1))) + ε)."""
    eps, grads = 1e-3, gradients()
    nu = optax.tree.zeros_like(grads[0])

    def next_nu(g: jax.Array, nu: jax.Array) -> jax.Array:
        return (1 - b2) * g**2 + b2 * nu

    found = directions(grads, b2=b2, eps=eps)
    for k, (g, d) in enumerate(zip(grads, found, strict=True)):
        nu = jax.tree.map(next_nu, g, nu)
        nu_hat = without_bias(nu, b2, jnp.array(k + 1))
        for name in SHAPES:
            expected = 1 / (jnp.sqrt(nu_hat[name]) + eps) * g[name]
            np.testing.assert_array_equal(d[name], expected)


def test_full_in_numpy() -> None:
    b2, eps, grads = 0.9, 1e-3, gradients()
    nu = dict.fromkeys(SHAPES, 0.0)
    found = directions(grads, b2=b2, eps=eps)
    for k, (grad, d) in enumerate(zip(grads, found, strict=True)):
        for name in SHAPES:
            g = np.asarray(grad[name], np.float64)
            nu[name] = b2 * nu[name] + (1 - b2) * g**2
            expected = g / (np.sqrt(nu[name] / (1 - b2 ** (k + 1))) + eps)
            np.testing.assert_allclose(d[name], expected, rtol=1e-6)


def factored_root(row: jax.Array, column: jax.Array, i: int, j: int) -> jax.Array:
    """1/√ν where ν is the product of two means over the overall mean."""
    rows, columns = jnp.expand_dims(row, j), jnp.expand_dims(column, i)
    return rows**-0.5 * (columns**-0.5 * jnp.sqrt(rows.mean(i, keepdims=True)))


@pytest.mark.slow
@pytest.mark.parametrize("b2", [long(0.0), 0.9, 0.999])
def test_factored_is_adafactors_formula(b2: float) -> None:
    """With β = β₂ (1 − β₂^k) / (1 − β₂^(k+1)), which needs no bias correction.

    The order of operations is another than Optax's: float32 rounds otherwise.
    """
    eps, grads = 1e-3, gradients()
    moments: dict[str, Any] = dict.fromkeys(SHAPES, (0.0, 0.0))
    found = directions(grads, b2=b2, eps=eps, second_moment="factored")
    for k, (grad, d) in enumerate(zip(grads, found, strict=True)):
        n = jnp.float32(k)
        beta = b2 * (1 - b2**n) / (1 - b2 ** (n + 1))
        for name, g in grad.items():
            square = g**2 + jnp.float32(eps) ** 2
            if name not in FACTORED_AXES:
                nu = beta * moments[name][0] + (1 - beta) * square
                moments[name] = nu, nu
                expected = g * nu**-0.5
            else:
                i, j = FACTORED_AXES[name]
                row, column = moments[name]
                row = beta * row + (1 - beta) * square.mean(j)
                column = beta * column + (1 - beta) * square.mean(i)
                moments[name] = row, column
                expected = g * factored_root(row, column, i, j)
            np.testing.assert_allclose(d[name], expected, rtol=4e-7)


@pytest.mark.parametrize("b2", [0.0, 0.999])
def test_factored_in_numpy(b2: float) -> None:
    """Means over rows and columns of a ν that is corrected for its bias."""
    eps, grads = 1e-3, gradients()
    *_, d = directions(grads, b2=b2, eps=eps, second_moment="factored")
    weights = np.array([(1 - b2) * b2 ** (NUM_STEPS - 1 - k) for k in range(NUM_STEPS)])
    weights /= 1 - b2**NUM_STEPS
    for name in SHAPES:
        g = np.array([g[name] for g in grads], np.float64)
        nu = np.tensordot(weights, g**2 + eps**2, 1)
        if name in FACTORED_AXES:
            i, j = FACTORED_AXES[name]
            rows, columns = nu.mean(j, keepdims=True), nu.mean(i, keepdims=True)
            nu = rows * columns / nu.mean((i, j), keepdims=True)
        # 1 − β₂^k loses up to 1/(1 − β₂) of its digits: 6e-8 · 1,000 at 0.999.
        np.testing.assert_allclose(d[name], g[-1] / np.sqrt(nu), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("second_moment", ["full", "factored"])
def test_complex_gradients_keep_their_angle(second_moment: Any) -> None:
    """No cast from complex to real warns."""
    g = jnp.array([[3 + 4j, -5j], [1.0, 2j]], jnp.complex64)
    for d in directions([g] * 3, second_moment=second_moment):
        np.testing.assert_allclose(d, g / jnp.abs(g), rtol=1e-5)


@pytest.mark.parametrize("second_moment", ["full", "factored"])
@pytest.mark.parametrize("scalar", [np.float64, np.asarray])
def test_scalars_of_numpy_do_not_widen_the_state(
    scalar: Any, second_moment: Any
) -> None:
    params = jnp.ones((130, 130), jnp.float32)
    with x64():
        options: Any = {"b2": scalar(0.99), "eps": scalar(1e-8)}
        tx = spa_adamw(0.1, second_moment=second_moment, **options)
        state = tx.init(params)
        updates, after = tx.update(params, state, params)
        assert updates.dtype == jnp.float32
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
        assert [leaf.dtype for leaf in jax.tree.leaves(after)] == dtypes


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_factored_where_gradients_are_zero_or_large(size: float) -> None:
    """An ε² that underflows counts as 1e-30, so a gradient of 0 gives a step of 0."""
    g = jnp.full((256, 256), size).at[3].set(0)
    for d in directions([g] * 3, eps=1e-30, second_moment="factored"):
        np.testing.assert_allclose(d, jnp.sign(g), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("second_moment", ["full", "factored"])
def test_update_names_the_params_that_it_needs(second_moment: str) -> None:
    tx = spa_adamw(1e-3, second_moment=second_moment)
    with pytest.raises(ValueError, match="`params`"):
        tx.update(gradients()[0], tx.init(gradients()[0]))


@pytest.mark.slow
def test_factored_on_a_mesh() -> None:
    """nnx gives the arrays of a state that has the structure of the params the
    shardings of these, which means over rows and columns do not fit.
    """
    narrow = {"state_dtype": jnp.bfloat16, "rounding_key": jax.random.key(0)}
    ours = spa_adamw(1e-3, 0.05, 0.9, second_moment="factored", **narrow)
    of_optax = optax.adafactor(1e-3)

    def loss(model: nnx.Linear) -> jax.Array:
        outputs = model(jnp.ones((8, 256), jnp.bfloat16))
        return jnp.mean(outputs.astype(float) ** 2)

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer) -> None:
        optimizer.update(model, nnx.grad(loss)(model))

    def train(tx: Any) -> Any:
        initial = nnx.initializers.lecun_normal()
        if jax.sharding.get_abstract_mesh().shape:
            initial = nnx.with_partitioning(initial, ("data", None))
        options = {
            "use_bias": False,
            "param_dtype": jnp.bfloat16,
            "kernel_init": initial,
        }
        model = nnx.Linear(256, 128, **options, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for _ in range(3):
            step(model, optimizer)
        x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
        return x["kernel"][...]

    expected = train(ours)
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("data",))):
        with pytest.raises(ValueError, match="shard"):
            train(of_optax)
        found = train(ours)
    assert found.sharding.spec[0] == PartitionSpec("data")[0]
    difference = found.astype(jnp.float32) - expected.astype(jnp.float32)
    assert jnp.abs(difference).max() < 2**-8  # rounded elsewhere: an ulp of the largest


@pytest.mark.parametrize("nested", [False, True])
def test_factored_keeps_the_sharding_of_whole_moments(nested: bool) -> None:
    """A compiled `init` would drop it. That of a neighbour would not do."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    # Each whole moment has the sharding of its own parameter.
    specs: Any = {"a": ("x", "y"), "b": ("x", None), "c": ("y", "x")}
    if nested:
        specs = [[specs["a"], specs["b"]], specs["c"]]

    def put(spec: tuple[str | None, ...]) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.device_put(jnp.ones((64, 16)), sharding)

    params = jax.tree.map(put, specs, is_leaf=lambda spec: isinstance(spec, tuple))
    tx = spa_adamw(1e-3, second_moment="factored")
    (factored, _), spa_state = jax.jit(tx.init)(params)
    for moments in (factored.v, spa_state.z):
        pairs = zip(*map(jax.tree.leaves, (moments, params)), strict=True)
        for leaf, param in pairs:
            assert leaf.sharding.is_equivalent_to(param.sharding, 2)


@pytest.mark.parametrize("second_moment", ["full", "factored"])
def test_a_run_goes_on_with_fewer_params(second_moment: str) -> None:
    """Each keeps its own second moment, though all have one shape."""
    grads = {"a": jnp.full((128, 128), 1e-3), "b": jnp.ones((128, 128))}
    tx = spa_adamw(1.0, second_moment=second_moment, weight_decay=0.0)
    _, state = run(tx, grads, [grads] * 30)
    groups = {"frozen": optax.set_to_zero(), "trained": tx}
    some = optax.partition(groups, {"a": "frozen", "b": "trained"})
    state = convert(state, grads, into=some.init(grads))
    _, after = some.update(grads, state, grads)
    z, next_z = (
        of_some.inner_states["trained"].inner_state[1].z["b"]
        for of_some in (state, after)
    )
    np.testing.assert_allclose(z - next_z, 1.0, rtol=1e-3)


def test_factored_is_made_in_nnx_jit() -> None:
    @nnx.jit
    def make() -> tuple[nnx.Linear, nnx.Optimizer]:
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        tx = spa_adamw(1e-3, second_moment="factored")
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = make()
    before = model.kernel[...]
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert jnp.all(model.kernel[...] != before)
