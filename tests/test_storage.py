"""The form of z stands in the structure of a state: what is read as something else is
refused."""

import functools
import itertools
import pickle
from collections import namedtuple
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
from helpers import FLOAT16, run, slow, spa_state, x64, z_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from spa_optax._precision import random_bits
from spa_optax._storage import BFloat16Difference, E4M3Difference, E5M2Difference, Form

from spa_optax import (
    _core,
    _storage,
    convert,
    eval_params,
    primal_averaging,
    reanchor,
    spa,
    spa_from_sgdm,
)
from spa_optax._checks import Rule
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
    "schedule": functools.partial(
        spa_from_sgdm, lambda k: 0.1 / (k + 1).astype(float), 0.9
    ),
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


@pytest.mark.parametrize(
    ("kind", "member", "params"),
    [
        ("orbax", "spa", jnp.ones(3)),
        *itertools.product(
            ["msgpack", "pickle"], MEMBERS, [{"w": jnp.ones(3), "n": jnp.array(3)}]
        ),
    ],
)
def test_another_dtype_at_a_restore(
    kind: str, member: str, params: Any, tmp_path: Path
) -> None:
    """Raises in the checkpoint's reader or in the first update, for each pair of
    forms."""
    grads = [jax.tree.map(lambda p: p // 8 if p.dtype == int else p / 8, params)] * 3
    runs = {}
    for dtype, form in FORMS.items():
        tx = MEMBERS[member](state_dtype=dtype, rounding_key=KEY)
        runs[dtype] = (tx, *run(tx, params, grads))
        z = spa_state(runs[dtype][2]).z
        assert _storage.form_of(z) is _storage.FORMS.get(form, _storage.ITSELF)
    for old, new in itertools.product(FORMS, FORMS):
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
def test_a_state_of_another_form_is_refused_by_name(make: Any) -> None:
    params = {"w": jnp.ones(3)}
    wide, narrow = make(), make(state_dtype=jnp.bfloat16, rounding_key=KEY)
    x, state = run(wide, params, [params])
    asked = (
        r"`state_dtype=bfloat16` .* `BFloat16.*got z itself in float32 at \['w'\]: "
        "use `convert"
    )
    with pytest.raises(ValueError, match=asked):
        narrow.update(params, state, x)
    with pytest.raises(
        ValueError, match=r"`state_dtype=None` .*, got a `BFloat16.*` in bfloat16"
    ):
        wide.update(params, narrow.init(x), x)
    # Nor is a difference z, if it has been cast to the dtype that z would have.
    cast = jax.tree.map(
        lambda a: jnp.float32(a) if a.dtype == jnp.bfloat16 else a, narrow.init(x)
    )
    with pytest.raises(
        ValueError, match=r"z itself in float32, got a `BFloat16Diff.*` in float32"
    ):
        wide.update(params, cast, x)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(None, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (E4M3, jnp.float32)],
)
def test_a_cast_changes_precision_alone(dtype: Any, other: Any) -> None:
    """What was cast is refused where it is used, and `convert` reads it as what it
    is."""
    params = jnp.linspace(1, 2, 5)
    tx = spa(1.0, 0.1, 0.5, state_dtype=dtype, rounding_key=KEY)
    x, state = run(tx, params, [params / 8] * 3)
    cast = state._replace(z=optax.tree.cast(state.z, other))
    assert type(cast.z) is type(state.z)
    eps = float(jnp.finfo(other).eps) * jnp.max(jnp.abs(z_of(state, x)))
    np.testing.assert_allclose(z_of(cast, x), z_of(state, x), atol=eps)
    np.testing.assert_allclose(
        z_of(convert(cast, x, into=tx.init(x)), x), z_of(state, x), atol=eps
    )
    evaluate = lambda state: eval_params(state, x)
    update = lambda state: tx.update(params, state, x)
    shift = lambda state: reanchor(state, x, x + 1)
    for use in (update, evaluate, shift):
        with pytest.raises(ValueError, match="use `convert"):
            use(cast)
    narrow = lambda name: state._replace(
        **{name: getattr(state, name).astype(jnp.bfloat16)}
    )
    for use in (update, evaluate, shift):
        with pytest.raises(
            ValueError, match=r"count` must be an integer, .*, got bfloat16"
        ):
            use(narrow("count"))  # in 16 bits it sticks at 256
        with pytest.raises(
            ValueError, match=r"mu_y` must be float32 or float64, .*, got bfloat16"
        ):
            use(narrow("mu_y"))


def test_a_complex_z_that_became_real() -> None:
    tx, y = spa(0.25, 0.1, 0.5), jnp.array([1 + 2j])
    y, state = run(tx, y, [y / 8])
    real = state._replace(z=jnp.real(state.z))
    for use in (lambda: eval_params(real, y), lambda: reanchor(real, y, y + 1)):
        with pytest.raises(ValueError, match="asks for, got z itself in float32"):
            use()


def test_a_complex_z_has_the_precision_of_the_state_dtype() -> None:
    params = jnp.array([1j], jnp.complex64)
    with x64():
        for dtype, expected in (
            (jnp.float32, jnp.complex64),
            (jnp.float64, jnp.complex128),
        ):
            assert spa(0.1, state_dtype=dtype).init(params).z.dtype == expected


def test_the_run_goes_on_after_a_conversion() -> None:
    """From one dtype to the next and back: NumPy in float64."""
    n, x, z = 4_000, 2.5, 2.5
    params, error, state = jnp.full(n, x), 0.0, None
    for dtype in (None, E4M3, jnp.bfloat16, E5M2, None):
        tx = spa(0.25, 0.1, state_dtype=dtype, rounding_key=KEY)
        state = (
            tx.init(params)
            if state is None
            else convert(state, params, into=tx.init(params))
        )
        if dtype is not None:  # `convert` rounds to nearest
            error += float(jnp.finfo(dtype).eps) / 2 * abs(x - z)
        params, state = run(tx, params, [jnp.full(n, 0.125)] * 3, state)
        for _ in range(3):
            z = z - 0.25 * 0.125
            x = x + np.float64(np.float32(0.1)) * (z - x)
        bound = error + 5 * float(params.std()) / np.sqrt(n) + 15 * 2.0**-23
        assert abs(float(params.mean(dtype=float)) - x) < bound


@pytest.mark.parametrize("dtype", [jnp.bfloat16, E4M3, E5M2])
@every_member
def test_digits_of_a_float32_checkpoint(make: Any, dtype: Any) -> None:
    """z_0 has what a cast to bfloat16 loses, and the first step adds −η g to it."""
    wide, tx = (make(state_dtype=d, rounding_key=KEY) for d in (None, dtype))
    checkpoint, g = jnp.linspace(1, 2, 1_000), jnp.full(1_000, 2.0**-9, jnp.bfloat16)
    y, eps = checkpoint.astype(jnp.bfloat16), float(jnp.finfo(dtype).eps)
    tiny = (
        float(jnp.finfo(dtype).tiny) / 256
    )  # of float8, and far below what matters in bfloat16
    spacing = lambda z, y: eps * np.maximum(np.abs(z - y.astype(jnp.float32)), tiny)
    state = convert(tx.init(checkpoint), checkpoint, into=tx.init(y), new_params=y)
    error = spacing(checkpoint, y) / 2  # `convert` rounds to nearest
    np.testing.assert_array_less(np.abs(z_of(state, y) - checkpoint), error + 1e-7)
    x, state = run(tx, y, [g], state)
    z = checkpoint - spa_state(state).eta * 2.0**-9
    np.testing.assert_array_less(
        np.abs(z_of(state, x) - z), error + spacing(z, x) + 1e-6
    )
    # From the same random bits x is that of a float32 z, except where that error
    # decides.
    assert np.mean(x != run(wide, y, [g], wide.init(checkpoint))[0]) <= eps / 4


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_is_too_large_saturates(dtype: Any, key: Any) -> None:
    """With a key and without: z is finite, and so are params when gradients are 0
    again."""
    tx = spa(1.0, 0.1, state_dtype=dtype, rounding_key=key)
    g = jnp.array([2e37, -2e37, 3.39e38, -3.4e38, 1.0])
    for grads in ([g], [g, 0 * g, 0 * g]):
        x, state = run(tx, jnp.zeros(5), grads)
        assert np.isfinite(np.float32(jax.tree.leaves(state.z)[0])).all()
    assert np.isfinite(x).all()


@pytest.mark.parametrize("axis_type", [slow(AxisType.Auto), AxisType.Explicit], ids=str)
@every_member
def test_state_sharded_otherwise_than_params(make: Any, axis_type: Any) -> None:
    """ZeRO-1, and the other way round."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ("", "x"))
    params = {"w": jnp.linspace(1, 2, 64).reshape(16, 4).astype(jnp.bfloat16)}
    grads = jax.tree.map(lambda p: p / 64, params)
    for state_dtype in (None, E4M3):
        tx = make(state_dtype=state_dtype, rounding_key=KEY)
        x, state = run(tx, params, [grads] * 2)
        expected = jax.device_get(eval_params(state, x))
        for of_params, of_state in ((whole, split), (split, whole), (split, split)):
            x, g = jax.device_put((params, grads), of_params)
            put = lambda a, of=of_state: jax.device_put(a, of if a.ndim == 2 else whole)
            x, state = run(tx, x, [g] * 2, jax.tree.map(put, tx.init(x)))
            found = jax.device_get(eval_params(state, x))
            chex.assert_trees_all_close(found, expected, rtol=2 * 2.0**-7)


Int8Rows = namedtuple("Int8Rows", "int8")


class RowScaled(Form):
    """z − y in int8, with a scale for each row of the params. Nothing else knows of
    it."""

    def scale(self, y: Any) -> Any:
        return jnp.max(jnp.abs(y.astype(jnp.float32)), axis=-1, keepdims=True) / 32

    def decode(self, y: Any, stored: Any) -> Any:
        return stored.astype(jnp.float32) * self.scale(y)

    def encode(self, z: Any, y: Any, seed: Any, old: Any) -> Any:
        part = (
            0.5
            if seed is None
            else random_bits(seed, z.shape).astype(jnp.float32) / 2.0**32
        )
        q = jnp.floor((z - y.astype(z.dtype)) / self.scale(y) + part)
        return jnp.clip(q, -127, 127).astype(jnp.int8)

    def eps(self, stored: Any) -> float:
        return 1 / 127

    def out_of_range(self, stored: Any) -> Any:
        return _storage.OutOfRange(jnp.sum(jnp.abs(stored) == 127, dtype=jnp.float32))


def test_a_third_form_needs_nothing_but_its_codec(monkeypatch: Any) -> None:
    monkeypatch.setitem(_storage.FORMS, Int8Rows, RowScaled(Int8Rows, 1.0))
    monkeypatch.setattr(_core, "STATE_DTYPE", Rule("any", lambda _: True))
    wide, tx = (
        spa(0.25, 0.1, 0.5),
        spa(0.25, 0.1, 0.5, state_dtype="int8", rounding_key=KEY),
    )
    params = {"w": jnp.ones((4, 20_000))}
    grads = [
        jax.tree.map(lambda p: p * jnp.array([[1.0], [-2.0], [0.5], [0.0]]), params)
    ] * 5
    expected, wide_state = run(wide, params, grads)
    found, state = run(track_momentum(tx), params, grads)
    assert isinstance(spa_state(state).z, Int8Rows)
    for values, of in ((found, expected), (z_of(state, found), wide_state.z)):
        values, of = values["w"], of["w"]
        error = values.std(1) / np.sqrt(20_000) + 1e-6
        assert (np.abs(values.mean(1) - of[:, 0]) < 5 * error).all()
    assert momentum_report(state).num_measured == 5
    chex.assert_trees_all_equal(reanchor(state, found, expected), state)
    back = convert(
        convert(state, found, into=wide.init(found)), found, into=tx.init(found)
    )
    atol = float(jnp.abs(found["w"]).max()) / 32
    chex.assert_trees_all_close(z_of(back, found), z_of(state, found), atol=atol)
    with pytest.raises(
        ValueError, match="z itself in float32, got a `Int8Rows` in int8"
    ):
        wide.update(grads[0], state.inner, found)


def test_nodes_are_plain_named_tuples() -> None:
    """Some checkpointers, as that of Levanter, ask for no other base than `tuple`."""
    assert all(node.__bases__ == (tuple,) for node in _storage.FORMS)
