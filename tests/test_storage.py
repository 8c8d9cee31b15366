"""How z is held stands in the structure of a state, so nothing reads it as another."""

import functools
import itertools
import pickle
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import long, run, slow, spa_state, x64, z_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from spa_optax import (
    convert,
    eval_params,
    primal_averaging,
    shift_z,
    spa,
    spa_from_sgdm,
)
from spa_optax._codec import ZMinusParams, ZMinusParamsTimes256, stored_tree

KEY = jax.random.key(0)
E4M3 = jnp.float8_e4m3fn
# The node that stands in the state beside float32 params.
NODES: dict[Any, Any] = {
    jnp.float32: dict,
    jnp.bfloat16: ZMinusParams,
    E4M3: ZMinusParamsTimes256,
}


def falling_rate(count: Any) -> Any:
    return 0.1 / (count + 1).astype(float)


MEMBERS: dict[str, Any] = {
    "spa": functools.partial(spa, 1.0, 0.1),
    "schedule": functools.partial(spa_from_sgdm, falling_rate, 0.9),
    "primal_averaging": functools.partial(primal_averaging, optax.sgd(1.0), 0.1, 0.9),
}
every_member = pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)


def save_and_load(kind: str, state: Any, like: Any, folder: Path) -> Any:
    """A checkpoint, read into the structure of another state, which decides of
    dtypes."""
    if kind == "pickle":
        return pickle.loads(pickle.dumps(state))
    if kind == "msgpack":
        return serialization.from_bytes(like, serialization.to_bytes(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.eval_shape(lambda: like))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "member"),
    [slow("orbax", "spa"), *itertools.product(["msgpack", "pickle"], MEMBERS)],
)
def test_another_dtype_at_a_restore(kind: str, member: str, tmp_path: Path) -> None:
    """Raises in the checkpoint's reader or in the first update, for each two dtypes."""
    params = {"w": jnp.ones(3), "n": jnp.array(3)}
    grads = [{"w": jnp.full(3, 0.125), "n": jnp.array(0)}] * 3
    runs, nodes = {}, dict(NODES)
    if member == "schedule":
        del nodes[E4M3]  # spa_from_sgdm refuses float8
    for dtype, node in nodes.items():
        tx = MEMBERS[member](state_dtype=dtype, rounding_key=KEY)
        runs[dtype] = (tx, *run(tx, params, grads))
        assert type(spa_state(runs[dtype][2]).z) is node
    for old, new in itertools.product(nodes, nodes):
        (_, x, state), (tx, _, like) = runs[old], runs[new]
        folder = tmp_path / f"{jnp.dtype(old)} {jnp.dtype(new)}"
        restore = functools.partial(save_and_load, kind, state, like, folder)
        if old == new:
            chex.assert_trees_all_equal(restore(), state)
            continue
        with pytest.raises((ValueError, AttributeError, KeyError)):
            tx.update(grads[0], restore(), x)
        chex.assert_trees_all_equal_structs(convert(state, x, into=tx.init(x)), like)


@every_member
def test_z_of_another_node_is_refused_by_name(make: Any) -> None:
    params = {"w": jnp.ones(3)}
    wide, narrow = make(), make(state_dtype=jnp.bfloat16, rounding_key=KEY)
    x, state = run(wide, params, [params])
    with pytest.raises(ValueError, match=r"`state\.z`.*state_dtype=bfloat16.*z itself"):
        narrow.update(params, state, x)
    with pytest.raises(ValueError, match=r"`state\.z`.*state_dtype=None.*z − params"):
        wide.update(params, narrow.init(x), x)
    # Nor is a difference z, if it was cast to the dtype that z would have.
    cast = jax.tree.map(
        lambda a: jnp.float32(a) if a.dtype == jnp.bfloat16 else a, narrow.init(x)
    )
    with pytest.raises(ValueError, match=r"`state\.z`.*state_dtype=None.*z − params"):
        wide.update(params, cast, x)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(None, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (E4M3, jnp.float32)],
)
def test_a_cast_changes_precision_alone(dtype: Any, other: Any) -> None:
    """A cast of z itself to 16 bits is refused; one of z − y is what it was.

    An update refuses both, and `convert` reads both.
    """
    params = jnp.linspace(1, 2, 5)
    tx = spa(1.0, 0.1, 0.5, state_dtype=dtype, rounding_key=KEY)
    x, state = run(tx, params, [params / 8] * 3)
    cast = state._replace(z=optax.tree.cast(state.z, other))
    assert type(cast.z) is type(state.z)
    eps = float(jnp.finfo(other).eps) * jnp.max(jnp.abs(z_of(state, x)))
    np.testing.assert_allclose(z_of(cast, x), z_of(state, x), atol=eps)
    again = convert(cast, x, into=tx.init(x))
    np.testing.assert_allclose(z_of(again, x), z_of(state, x), atol=eps)
    got = "16" if dtype is None else jnp.dtype(other)
    with pytest.raises(ValueError, match=rf"`state\.z`.*{got}"):
        tx.update(params, cast, x)
    if dtype is not None:
        x_of = eval_params(state, x)
        np.testing.assert_allclose(eval_params(cast, x), x_of, atol=eps)
        chex.assert_trees_all_equal(shift_z(cast, x, x + 1), cast)
        return
    with pytest.raises(ValueError, match=r"`opt_state\.z`.*16"):
        eval_params(cast, x)
    with pytest.raises(ValueError, match=r"`opt_state\.z`.*16"):
        shift_z(cast, x, x + 1)


@pytest.mark.parametrize("field", ["count", "mu_y"])
def test_scalars_that_were_cast_are_refused(field: str) -> None:
    """A count in bfloat16 stops at 256."""
    x, tx = jnp.linspace(1, 2, 5), spa(1.0, 0.1, 0.5)
    state = tx.init(x)
    cast = state._replace(**{field: getattr(state, field).astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match=rf"`state\.{field}`.*bfloat16"):
        tx.update(x, cast, x)
    with pytest.raises(ValueError, match=rf"`opt_state\.{field}`.*bfloat16"):
        eval_params(cast, x)
    with pytest.raises(ValueError, match=rf"`opt_state\.{field}`.*bfloat16"):
        shift_z(cast, x, x + 1)


def test_a_complex_z_that_became_real() -> None:
    tx, y = spa(0.25, 0.1, 0.5), jnp.array([1 + 2j])
    y, state = run(tx, y, [y / 8])
    real = state._replace(z=jnp.real(state.z))
    with pytest.raises(ValueError, match=r"`state\.z`.*complex64.*float32"):
        tx.update(y / 8, real, y)


def test_a_complex_z_has_the_precision_of_the_state_dtype() -> None:
    params = jnp.array([1j], jnp.complex64)
    with x64():
        for dtype, expected in (
            (jnp.float32, jnp.complex64),
            (jnp.float64, jnp.complex128),
        ):
            assert spa(0.1, state_dtype=dtype).init(params).z.dtype == expected


@pytest.mark.slow
def test_the_run_goes_on_after_a_conversion() -> None:
    """From one dtype to the next and back: NumPy in float64."""
    n, x, z = 4_000, 2.5, 2.5
    params, error, state = jnp.full(n, x), 0.0, None
    for dtype in (None, E4M3, jnp.bfloat16, E4M3, None):
        tx = spa(0.25, 0.1, state_dtype=dtype, rounding_key=KEY)
        start = tx.init(params)
        state = start if state is None else convert(state, params, into=start)
        if dtype is not None:  # `convert` rounds to nearest
            error += float(jnp.finfo(dtype).eps) / 2 * abs(x - z)
        params, state = run(tx, params, [jnp.full(n, 0.125)] * 3, state)
        for _ in range(3):
            z = z - 0.25 * 0.125
            x = x + np.float64(np.float32(0.1)) * (z - x)
        bound = error + 5 * float(params.std()) / np.sqrt(n) + 15 * 2.0**-23
        assert abs(float(params.mean(dtype=float)) - x) < bound


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, E4M3])
@every_member
def test_digits_of_a_float32_checkpoint(make: Any, dtype: Any) -> None:
    """z_0 has what a cast to bfloat16 loses, and the first step adds −η g to it."""
    if dtype == E4M3 and make is MEMBERS["schedule"]:
        pytest.skip("spa_from_sgdm refuses float8")
    tx = make(state_dtype=dtype, rounding_key=KEY)
    checkpoint, g = jnp.linspace(1, 2, 1_000), jnp.full(1_000, 2.0**-9, jnp.bfloat16)
    y = checkpoint.astype(jnp.bfloat16)
    state = convert(tx.init(checkpoint), checkpoint, into=tx.init(y), new_params=y)
    error = spacing(checkpoint, y, dtype) / 2  # `convert` rounds to nearest
    np.testing.assert_array_less(np.abs(z_of(state, y) - checkpoint), error + 1e-7)
    x, state = run(tx, y, [g], state)
    z = checkpoint - spa_state(state).eta * 2.0**-9
    error += spacing(z, x, dtype)
    np.testing.assert_array_less(np.abs(z_of(state, x) - z), error + 1e-6)
    # From the same random bits x is that of a float32 z, except where that error
    # decides.
    wide = make(rounding_key=KEY)
    start = convert(wide.init(checkpoint), checkpoint, into=wide.init(y), new_params=y)
    expected, _ = run(wide, y, [g], start)
    assert np.mean(x != expected) <= float(jnp.finfo(dtype).eps) / 4


def spacing(z: Any, y: Any, dtype: Any) -> Any:
    """The distance of z − y to the next number of a dtype; float8 is in 256ths."""
    tiny = float(jnp.finfo(dtype).tiny) / 256
    size = np.maximum(np.abs(z - y.astype(jnp.float32)), tiny)
    return float(jnp.finfo(dtype).eps) * size


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "random"])
@pytest.mark.parametrize("in_one_program", [True, False])
@pytest.mark.parametrize(("scale", "interpolation"), [(0.0, 1.0), (0.02, 0.5)])
@pytest.mark.filterwarnings("ignore:`rounding_key`")
def test_z_keeps_what_compiled_params_lose(
    scale: float, interpolation: float, in_one_program: bool, key: Any
) -> None:
    """Small params and long steps, whose update is not exact in bfloat16: float64."""
    num_steps, rng = 30, np.random.default_rng(0)
    tx = spa(2**-7, 0.1, interpolation, rounding_key=key)
    y = jnp.asarray(scale * rng.standard_normal(1_000), jnp.bfloat16)
    z, state = np.asarray(y, np.float64), tx.init(y)

    def step(y: Array, state: Any, g: Array) -> Any:
        u, state = tx.update(g, state, y)
        return (optax.apply_updates(y, u), state) if in_one_program else (u, state)

    compiled = jax.jit(step)
    for _ in range(num_steps):
        g = jnp.asarray(rng.standard_normal(1_000), jnp.bfloat16)
        y_or_u, state = compiled(y, state, g)
        y = y_or_u if in_one_program else optax.apply_updates(y, y_or_u)
        z -= np.asarray(g, np.float64) * 2**-7
    found = np.asarray(y, np.float64) + np.asarray(stored_tree(state.z), np.float64)
    # A step rounds in float32 the product, d, y + d and the difference, each to half an
    # ulp of at most 2 max |z|. An ulp of the params would be 2^16 times as much.
    half_ulp = 2.0**-24 * 2 * np.abs(z).max()
    np.testing.assert_allclose(found, z, rtol=0, atol=4 * num_steps * half_ulp)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_is_too_large_saturates(key: Any) -> None:
    """z is finite, and so are the params when gradients are 0 again."""
    tx = spa(1.0, 0.1, state_dtype=jnp.bfloat16, rounding_key=key)
    g = jnp.array([2e37, -2e37, 3.39e38, -3.4e38, 1.0])
    for grads in ([g], [g, 0 * g, 0 * g]):
        x, state = run(tx, jnp.zeros(5), grads)
        assert np.isfinite(np.float32(jax.tree.leaves(state.z)[0])).all()
    assert np.isfinite(x).all()


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [long(AxisType.Auto), AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "name", [name if name == "spa" else long(name) for name in MEMBERS]
)
def test_state_sharded_otherwise_than_params(name: str, axis_type: Any) -> None:
    """ZeRO-1, and the other way round."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ("", "x"))
    params = {"w": jnp.linspace(1, 2, 64).reshape(16, 4).astype(jnp.bfloat16)}
    grads = jax.tree.map(lambda p: p / 64, params)
    narrow = jnp.bfloat16 if name == "schedule" else E4M3  # spa_from_sgdm refuses it
    for state_dtype in (None, narrow):
        tx = MEMBERS[name](state_dtype=state_dtype, rounding_key=KEY)
        x, state = run(tx, params, [grads] * 2)
        expected = jax.device_get(eval_params(state, x))
        for of_params, of_state in ((whole, split), (split, whole), (split, split)):
            x, g = jax.device_put((params, grads), of_params)
            shardings = jax.tree.map(
                lambda a, split=of_state: split if a.ndim == 2 else whole, tx.init(x)
            )
            x, state = run(tx, x, [g] * 2, jax.device_put(tx.init(x), shardings))
            found = jax.device_get(eval_params(state, x))
            chex.assert_trees_all_close(found, expected, rtol=2 * 2.0**-7)


@pytest.mark.parametrize("node", [ZMinusParams, ZMinusParamsTimes256])
def test_nodes_are_plain_named_tuples(node: type) -> None:
    """Some checkpointers, such as Levanter's, allow no other base than `tuple`."""
    assert node.__bases__ == (tuple,)


def test_params_of_fewer_bits_than_their_z() -> None:
    """Params that are cast to float32 in mid-run keep their z in float64."""
    with x64():
        tx = spa(0.1)
        state: Any = tx.init(jnp.ones(2))
        x = jnp.ones(2, jnp.float32)
        _, state = tx.update(x, state, x)
        assert state.z.dtype == jnp.float64


def test_a_z_of_integers_beside_float_params_is_refused() -> None:
    """It would be cut to integers at every step."""
    tx = spa(0.1)
    state = tx.init({"w": jnp.arange(3)})
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"`state\.z` must be in float32.*int32"):
        tx.update(params, state, params)
