"""The form of z stands in the structure of a state: what is read as something else is refused."""

import dataclasses
import functools
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import FLOAT16, quick, run, spa_state, z_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spa_optax import (
    _storage,
    convert,
    eval_params,
    primal_averaging,
    reanchor,
    spa,
    spa_adamw,
    spa_from_sgdm,
)
from spa_optax._precision import random_bits
from spa_optax._storage import (
    BFloat16Difference,
    E4M3Difference,
    E5M2Difference,
    Form,
    Storage,
)
from spa_optax.diagnostics import momentum_report, track_momentum

KEY = jax.random.key(0)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FORMS: dict[Any, Any] = {
    jnp.float32: None,
    jnp.bfloat16: BFloat16Difference,
    E4M3: E4M3Difference,
    E5M2: E5M2Difference,
}
MEMBERS: dict[str, Any] = {
    "spa": functools.partial(spa, 1.0, 0.1),
    "spa_from_sgdm": functools.partial(spa_from_sgdm, 0.1, 0.9),
    "gpa": functools.partial(spa, 1.0, 0.1, 0.5),
    "primal_averaging": functools.partial(primal_averaging, optax.sgd(1.0), 0.1, 0.9),
    "spa_adamw": functools.partial(spa_adamw, 0.01),
}
every_member = pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)


def save_and_load(kind: str, state: Any, like: Any, folder: Path) -> Any:
    """A checkpoint, read into the structure of another state, which decides of dtypes."""
    if kind == "pickle":
        return pickle.loads(pickle.dumps(state))
    if kind == "msgpack":
        return serialization.from_bytes(like, serialization.to_bytes(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.eval_shape(lambda: like))


@pytest.mark.parametrize("kind", ["orbax", "msgpack", "pickle"])
@pytest.mark.parametrize("params", [jnp.ones(3), {"w": jnp.ones(3)}], ids=["array", "dict"])
@every_member
def test_another_state_dtype_at_a_restore(
    make: Any, params: Any, kind: str, tmp_path: Path
) -> None:
    """Raises in the checkpoint's reader or in the first update, for each pair of forms."""
    if kind == "orbax" and (make is not MEMBERS["spa"] or isinstance(params, dict)):
        pytest.skip("as with the others, and slow")
    grads = [jax.tree.map(lambda p: p / 8, params)] * 3
    runs = {}
    for dtype, form in FORMS.items():
        tx = make(state_dtype=dtype, rounding_key=KEY)
        runs[dtype] = (tx, *run(tx, params, grads))
        assert _storage.form_of(spa_state(runs[dtype][2]).z).node is form
    for old in FORMS:
        for new in FORMS:
            (_, x, state), (tx, _, like) = runs[old], runs[new]
            folder = tmp_path / f"{jnp.dtype(old)} {jnp.dtype(new)}"
            restore = functools.partial(save_and_load, kind, state, like, folder)
            if old == new:
                chex.assert_trees_all_equal(restore(), state)
                continue
            with pytest.raises((ValueError, AttributeError, KeyError)):
                tx.update(grads[0], restore(), x)
            moved = convert(state, x, into=tx.init(x))
            chex.assert_trees_all_equal_structs(moved, like)


@every_member
def test_a_state_of_another_form_is_refused_by_name(make: Any) -> None:
    params = {"w": jnp.ones(3)}
    wide, narrow = make(), make(state_dtype=jnp.bfloat16, rounding_key=KEY)
    x, state = run(wide, params, [params])
    said = re.escape(
        "must be stored as `state_dtype=bfloat16` asks for, a `BFloat16Difference` in bfloat16,"
        " got z itself in float32 at ['w']: use `convert"
    )
    with pytest.raises(ValueError, match=said):
        narrow.update(params, state, x)
    with pytest.raises(ValueError, match=said):
        track_momentum(narrow).update(params, track_momentum(wide).init(x)._replace(inner=state), x)
    said = (
        r"`state_dtype=None` asks for, z itself in float32, got a `BFloat16Difference` in bfloat16"
    )
    with pytest.raises(ValueError, match=said):
        wide.update(params, narrow.init(x), x)


@pytest.mark.parametrize("make", [MEMBERS["spa"], MEMBERS["gpa"]])
def test_a_cast_changes_precision_alone(make: Any) -> None:
    """What was cast is refused where it is used, and `convert` reads it as what it is."""
    params = jnp.linspace(1, 2, 5)
    for dtype, other in ((None, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (E4M3, jnp.float32)):
        tx = make(state_dtype=dtype, rounding_key=KEY)
        x, state = run(tx, params, [params / 8] * 3)
        cast = state._replace(z=optax.tree.cast(state.z, other))
        assert type(cast.z) is type(state.z)
        eps = float(jnp.finfo(other).eps) * jnp.max(jnp.abs(z_of(state, x)))
        np.testing.assert_allclose(z_of(cast, x), z_of(state, x), atol=eps)
        with pytest.raises(ValueError, match="use `convert"):
            tx.update(params, cast, x)
        for use in (
            lambda state, x: eval_params(state, x),
            lambda state, x: reanchor(state, x, x + 1),
        ):
            with pytest.raises(ValueError, match=r"must hold z as a `state_dtype` asks for.*`conv"):
                use(cast, x)
        back = convert(cast, x, into=tx.init(x))
        np.testing.assert_allclose(z_of(back, x), z_of(state, x), atol=eps)
        # In 16 bits a count sticks at 256.
        with pytest.raises(ValueError, match=r"count` must be an integer, .*, got bfloat16"):
            eval_params(state._replace(count=state.count.astype(jnp.bfloat16)), x)
        with pytest.raises(ValueError, match=r"mu_y` must be float32, .*, got bfloat16"):
            tx.update(params, state._replace(mu_y=state.mu_y.astype(jnp.bfloat16)), x)
    tx, y = spa(0.25, 0.1, 0.5), jnp.array([1 + 2j])
    y, state = run(tx, y, [y / 8])
    real = state._replace(z=jnp.real(state.z))
    for use in (lambda: eval_params(real, y), lambda: reanchor(real, y, y + 1)):
        with pytest.raises(ValueError, match="asks for, got z itself in float32"):
            use()


def test_the_run_goes_on_after_a_conversion() -> None:
    """Between every pair of dtypes: NumPy in float64, from where the first run was."""
    dtypes = [None, jnp.bfloat16, E4M3, E5M2]
    n = 4_000
    params, g = jnp.full(n, 2.5), jnp.full(n, 0.125)
    for old in dtypes:
        for new in dtypes:
            of_old, of_new = (spa(0.25, 0.1, state_dtype=d, rounding_key=KEY) for d in (old, new))
            params_k, state = run(of_old, params, [g] * 10)
            state = convert(state, params_k, into=of_new.init(params_k))
            found, _ = run(of_new, params_k, [g] * 3, state)
            x = z = 2.5
            for _ in range(13):
                z = z - 0.25 * 0.125
                x = x + np.float64(np.float32(0.1)) * (z - x)
            error = 5 * float(found.std()) / np.sqrt(n) + 13 * 2.0**-23
            if new is not None:  # `convert` rounds to nearest
                error += float(jnp.finfo(new).eps) / 2 * abs(x - z)
            assert abs(float(found.mean(dtype=float)) - x) < error


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_is_too_large_saturates(dtype: Any, key: Any) -> None:
    """With a key and without: z is finite, and so are params when gradients are 0 again."""
    tx = spa(1.0, 0.1, state_dtype=dtype, rounding_key=key)
    g = jnp.array([2e37, -2e37, 3.39e38, -3.4e38, 1.0])
    x, state = run(tx, jnp.zeros(5), [g])
    assert np.isfinite(np.float32(jax.tree.leaves(state.z)[0])).all()
    x, state = run(tx, x, [jnp.zeros(5)] * 2, state)
    assert np.isfinite(x).all()
    assert np.isfinite(np.float32(jax.tree.leaves(state.z)[0])).all()


def test_shardings_of_a_state_by_map_params() -> None:
    """The usual recipe: specs in the structure of the params."""
    params = {"w": jnp.ones((8, 2)), "b": jnp.ones(8)}
    specs = {"w": PartitionSpec("x", None), "b": PartitionSpec("x")}
    for dtype, form in FORMS.items():
        tx = spa(1.0, 0.1, state_dtype=dtype, rounding_key=KEY)
        found = optax.tree.map_params(
            tx,
            lambda _, spec: spec,
            tx.init(params),
            specs,
            transform_non_params=lambda _: PartitionSpec(),
        )
        assert found.z == (specs if form is None else form(specs))


# --------------------------------------------------------------------------------- explicit meshes

SHARDED: dict[str, Any] = {
    **MEMBERS,
    "schedule": functools.partial(spa_from_sgdm, lambda k: 0.1 / (k + 1).astype(float), 0.9),
    "nesterov": functools.partial(spa_from_sgdm, 0.1, 0.9, True),
    "gpa_adamw": functools.partial(spa_adamw, 0.01, 0.05, 0.9),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("make", quick(SHARDED, "spa", "schedule", "primal_averaging"))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_state_sharded_otherwise_than_params(make: Any, dtype: Any, axis_type: Any) -> None:
    """ZeRO-1, and the other way round."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ("", "x"))
    params = {"w": jnp.linspace(1, 2, 64).reshape(16, 4).astype(dtype)}
    grads = jax.tree.map(lambda p: p / 64, params)
    for state_dtype in (None, E4M3):
        tx = make(state_dtype=state_dtype, rounding_key=KEY)

        def result(params: Any, grads: Any, of_state: Any, tx: Any = tx) -> Any:
            state = tx.init(params)
            if of_state is not None:
                put = lambda a: jax.device_put(a, of_state if a.ndim == 2 else whole)
                state = jax.tree.map(put, state)
            params, state = run(tx, params, [grads] * 2, state)
            return jax.device_get(eval_params(state, params))

        expected = result(params, grads, None)
        for of_params, of_state in ((whole, split), (split, whole), (split, split)):
            found = result(*jax.device_put((params, grads), of_params), of_state)
            chex.assert_trees_all_close(found, expected, rtol=2 * float(jnp.finfo(dtype).eps))


# ------------------------------------------------------------------------------------ a third form


class Int8Rows(NamedTuple):
    q: Any
    scale: Any


class RowScaled(Form):
    """z − y in int8, with a scale for each row: nothing else of the package knows of it."""

    follows_params = True

    def start(self, y: Any, dtype: Any) -> Any:
        return jnp.zeros(y.shape, jnp.int8), jnp.zeros((*y.shape[:-1], 1), jnp.float32)

    def decode(self, y: Any, *arrays: Any) -> Any:
        q, scale = arrays
        return q.astype(jnp.float32) * scale

    def encode(self, z: Any, y: Any, seed: Any, *old: Any) -> Any:
        d = z - y.astype(z.dtype)
        scale = jnp.max(jnp.abs(d), axis=-1, keepdims=True) / 127
        part = 0.5 if seed is None else random_bits(seed, d.shape).astype(jnp.float32) / 2.0**32
        q = jnp.floor(d / jnp.where(scale > 0, scale, 1) + part)
        return jnp.clip(q, -127, 127).astype(jnp.int8), scale

    def eps(self, *arrays: Any) -> float:
        return 1 / 127


def test_a_third_form_needs_nothing_but_its_codec(monkeypatch: Any) -> None:
    form = RowScaled(Int8Rows)
    monkeypatch.setitem(_storage.FORMS, Int8Rows, form)
    wide = spa(0.25, 0.1, 0.5)
    storage = Storage(form, None)
    init: Any = wide.init
    tx = optax.GradientTransformationExtraArgs(
        functools.partial(init.func, **init.keywords | {"storage": storage, "rounding_key": KEY}),
        dataclasses.replace(wide.update, storage=storage, rounding_key=KEY),  # pyright: ignore
    )
    params = {"w": jnp.ones((4, 20_000))}
    grads = [jax.tree.map(lambda p: p * jnp.array([[1.0], [-2.0], [0.5], [0.0]]), params)] * 5
    expected, wide_state = run(wide, params, grads)
    gauge = track_momentum(tx)
    found, state = run(gauge, params, grads)
    z = spa_state(state).z
    assert isinstance(z, Int8Rows)
    assert z.q["w"].dtype == jnp.int8
    for values, of in (
        (found, expected),
        (eval_params(state, found), eval_params(wide_state, expected)),
        (z_of(state, found), wide_state.z),
    ):
        values, of = values["w"], of["w"]
        error = values.std(1) / np.sqrt(20_000) + 1e-6
        assert (np.abs(values.mean(1) - of[:, 0]) < 5 * error).all()
    assert momentum_report(state).num_measured == 5
    chex.assert_trees_all_equal(reanchor(state, found, expected), state)
    back = convert(state, found, into=wide.init(found))
    chex.assert_trees_all_close(back.z, z_of(state, found))
    again = convert(back, found, into=tx.init(found))
    chex.assert_trees_all_close(z_of(again, found), back.z, atol=float(z.scale["w"].max()))
    with pytest.raises(ValueError, match="z itself in float32, got a `Int8Rows` in int8, float32"):
        wide.update(grads[0], state.inner, found)


def test_nodes_are_plain_named_tuples() -> None:
    """Some checkpointers, as that of Levanter, ask for no other base than `tuple`."""
    assert all(node.__bases__ == (tuple,) for node in _storage.FORMS)
