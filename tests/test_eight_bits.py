"""z − y and momentum in 8 and 16 bits, rounded stochastically."""

import functools
from collections import OrderedDict
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    FLOAT8,
    long,
    optimized,
    quick,
    run,
    slow,
    spa_state,
    table,
    trained,
    x64,
    z_of,
)
from scipy import stats

from spa_optax import (
    convert,
    eval_params,
    float8_momentum,
    primal_averaging,
    schedule_free_averaging,
    shift_z,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stagewise,
    stochastic_rounding,
)
from spa_optax._codec import choose_codec, codec_of, stored_tree
from spa_optax._float8_momentum import Float8Momentum
from spa_optax._optax_states import FLOAT8_MOMENTUM_FIELDS
from spa_optax._trees import find_nodes
from spa_optax.diagnostics import momentum_report, track_momentum

KEY = jax.random.key(3)
every_dtype = pytest.mark.parametrize("dtype", [FLOAT8, jnp.bfloat16])
E4M3 = jnp.float8_e4m3fn
MAKE: dict[str, Any] = {
    "spa": functools.partial(spa, 0.5, 0.25),
    "sgdm": functools.partial(spa_from_sgdm, 0.125, 0.5),
    "nesterov": functools.partial(spa_from_sgdm, 0.125, 0.5, nesterov=True),
    "gpa": functools.partial(spa, 0.5, 0.25, 0.5),
    "primal_averaging": functools.partial(primal_averaging, optax.sgd(0.5), 0.25, 0.5),
}


@pytest.mark.parametrize("name", quick(MAKE, "nesterov", "primal_averaging"))
@every_dtype
def test_where_it_is_representable_nothing_is_rounded(name: str, dtype: Any) -> None:
    """The first step makes z − y a power of two, and what follows halves or keeps
    it."""
    if dtype == E4M3 and name in ("sgdm", "nesterov"):
        pytest.skip("spa_from_sgdm refuses float8")
    params = {"w": jnp.array([[1.0, -3.0], [0.25, 8.0]]), "b": jnp.array(2.0)}
    grads = [jax.tree.map(lambda p: jnp.sign(p) * 2.0**-4, params)]
    make = MAKE[name]
    wide, narrow = (make(state_dtype=d, rounding_key=KEY) for d in (jnp.float32, dtype))
    expected, wide_state = run(wide, params, grads)
    found, state = run(narrow, params, grads)
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal(z_of(state, found), spa_state(wide_state).z)
    chex.assert_trees_all_equal(
        eval_params(state, found), eval_params(wide_state, expected)
    )
    z = spa_state(state).z
    assert codec_of(z).stores_difference
    assert stored_tree(z)["w"].dtype == dtype
    assert jnp.all(z_of(state, found)["w"] != found["w"])


@pytest.mark.parametrize("dtype", [FLOAT8, jnp.bfloat16, jnp.float32])
def test_the_mean_of_a_step(dtype: Any) -> None:
    """Over places and steps, x and z are what NumPy has for them in float64."""
    n, rng = 20_000, np.random.default_rng(0)
    params_dtype = jnp.float32 if dtype == E4M3 else jnp.bfloat16
    # η g from 1e-7 (subnormal in e4m3) to 0.1; from 1e-5 for a bfloat16, which then
    # moves once in 400 times.
    eta_g = 10.0 ** np.linspace(-7 if dtype == E4M3 else -5, -1, 8) * rng.choice(
        [-1, 1], 8
    )
    y_0 = jnp.asarray(rng.uniform(0.5, 1.5, 8), params_dtype)
    params = jnp.broadcast_to(y_0[:, None], (8, n))
    grads = jnp.broadcast_to(jnp.asarray(eta_g, jnp.float32)[:, None], (8, n))
    tx = spa(1.0, 0.25, 0.5, state_dtype=dtype, rounding_key=KEY)
    found, state = run(tx, params, [grads] * 5)
    x = z = np.asarray(y_0, np.float64)
    for _ in range(5):
        z = z - np.float64(np.float32(eta_g))
        x = x + 0.25 * (z - x)
    y = (x + z) / 2
    for values, expected in ((found, y), (z_of(state, found), z)):
        values = np.asarray(values, np.float64)
        error = values.std(1) / np.sqrt(n) + 1e-7  # the last for float32
        assert (np.abs(values.mean(1) - expected) < 5 * error).all()
    # z has digits that bfloat16 has not: rounding of y does not enter it.
    spread = np.asarray(z_of(state, found), np.float64).std(1)
    assert (spread < 0.25 * np.abs(z - y) + 2.0**-8 * np.abs(y) / 4).all()


def added(v: float, u: Any) -> Any:
    """The mean of f (1 − f) u², the variance that rounding to a grid of spacing u adds.

    Numbers leave the grid by a normal of variance v, to a fraction f of its spacing. By
    Fourier's series f (1 − f) = 1/6 − Σ cos(2πkf)/(πk)² over k ≥ 1.
    """
    k = np.pi * np.arange(1, 21)[:, None]
    return np.mean(u**2 * (1 / 6 - (np.exp(-2 * k**2 * v / u**2) / k**2).sum(0)))


def variances(
    dtype: Any, eta: float, c: float, ulp: float | None
) -> tuple[float, float]:
    """κ² E d² of docs/background.md for normal d, and what rounding adds."""
    info, kept, r, p = jnp.finfo(dtype), (1 - c) ** 2, 0.0, 0.0
    tiny = float(info.tiny) * choose_codec(jnp.zeros(()), dtype).unit
    normal = stats.norm.ppf((np.arange(400) + 0.5) / 400)
    for _ in range(60):  # to the fixed point
        sq_d = (kept * (eta**2 + r) + p) / (1 - kept)
        size = np.maximum(np.abs(normal) * np.sqrt(sq_d), tiny)
        r = added(
            c**2 * sq_d + kept * eta**2, 2.0 ** (np.floor(np.log2(size)) - info.nmant)
        )
        p = added(c**2 * (sq_d + eta**2), np.array([ulp])) if ulp else 0.0
    return r, p


@pytest.mark.parametrize(
    ("dtype", "c", "start"),
    [
        pytest.param(E4M3, 0.1, 0.02, marks=[pytest.mark.float16, pytest.mark.slow]),
        slow(jnp.bfloat16, 0.1, None),
        long(E4M3, 0.1, None),
        long(jnp.bfloat16, 0.1, 0.02),
        long(E4M3, 0.1, 0.1),
        long(jnp.bfloat16, 0.1, 0.1),
        long(E4M3, 0.05, None),
        long(jnp.bfloat16, 0.05, None),
    ],
)
def test_noise_of_rounding(dtype: Any, c: float, start: float | None) -> None:
    """What rounding adds to z, a rate in each row, also beside bfloat16 params."""
    n, num_steps, forget = 4_096, 200, int(5 / c)
    num_rates = {None: 4, 0.02: 3, 0.1: 2}[start]
    rates = jnp.array([1e-3, 5e-5, 1e-5, 1e-6][:num_rates])[:, None]
    y = jnp.full((len(rates), n), start or 0.0, jnp.bfloat16 if start else jnp.float32)

    def noise(_: Any, k: Any) -> jax.Array:
        return rates * jax.random.normal(jax.random.fold_in(KEY, k), y.shape)

    txs = [spa(1.0, c, state_dtype=d, rounding_key=KEY) for d in (jnp.float32, dtype)]

    def errors() -> Any:
        """Of z, once d has forgotten its start, and later."""
        runs, steps = [(y, None)] * 2, jnp.arange(num_steps + forget)
        for items in (steps[:forget], steps[forget:]):
            pairs = zip(txs, runs, strict=True)
            runs = [trained(tx, noise, x, items, state) for tx, (x, state) in pairs]
            exact, narrow = (z_of(state, x) for x, state in runs)
            yield narrow - exact

    error = np.subtract(*optimized(lambda: list(errors()))(), dtype=np.float64)
    measured = (error**2).mean(1) / (num_steps * rates[:, 0] ** 2)
    etas = map(float, rates[:, 0])
    ulp = start and 2.0 ** (np.floor(np.log2(start)) - 7)
    expected = [variances(dtype, eta, c, ulp)[0] / eta**2 for eta in etas]
    np.testing.assert_allclose(measured, expected, rtol=5 * np.sqrt(2 / n))
    # As docs/background.md has it, in the normal range and below.
    over_q = (
        (1 - (1 - c) ** 2)
        / (1 - c) ** 2
        * 4.0 ** jnp.finfo(dtype).nmant
        * 16
        * np.log(2)
    )
    assert start == 0.1 or expected[0] == pytest.approx(1 / (over_q - 1), rel=0.03)
    assert dtype != E4M3 or start or expected[2] == pytest.approx(0.31**2, rel=0.03)
    assert (np.abs(error.mean(1)) < 5 * error.std(1) / np.sqrt(n)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16, long(None)])
def test_y_stays_near_that_of_float32_where_rounded_params_walk_away(
    dtype: Any,
) -> None:
    """z − y keeps what rounding takes from y, so that y forgets it at the rate c.

    Let U be the spacing of the params, and v the variance of one step, about c² E d². A
    step much shorter than U adds about U times its length to the variance, and for
    normal steps the mean length is √(2v/π). So a rounding adds the variance U √(2v/π).
    z pulls y back at the rate c, so d keeps U √(v/(2π))/c. Without z, which is None,
    nothing pulls back: after n steps the variance is n U √(2v/π).
    """
    n, num_steps, eta, c, ulp = 4_096, 2_000, 2e-5, 0.1, 2.0**-13

    def noise(_: Any, k: Any) -> jax.Array:
        return eta * jax.random.normal(jax.random.fold_in(KEY, k), (n,))

    def end(tx: Any, dtype: Any) -> np.ndarray:
        start = jnp.full(n, 0.02, jnp.bfloat16).astype(dtype)
        steps = jnp.arange(num_steps)
        params = optimized(lambda: trained(tx, noise, start, steps)[0])()
        return np.asarray(params, float)

    exact, kept = end(spa(1.0, c), jnp.float32), (1 - c) ** 2
    if dtype is None:
        tx = stochastic_rounding(optax.sgd(c, 1 - c), KEY)
        expected = num_steps * added((c * eta) ** 2 / (1 - kept), np.array([ulp]))
    else:
        tx = spa(1.0, c, state_dtype=dtype, rounding_key=KEY)
        of_z, of_y = variances(dtype, eta, c, ulp)
        expected = of_y / (1 - kept) + num_steps * of_z
    error = end(tx, jnp.bfloat16) - exact
    assert np.mean(error**2) == pytest.approx(expected, rel=5 * np.sqrt(2 / n))


@pytest.mark.float16
def test_saturation() -> None:
    """z stays within the limit of y; NaN and inf come to y."""
    limit = float(jnp.finfo(E4M3).max) / 256
    params = jnp.zeros(6)
    steps = jnp.array([0.0, 0.5, -0.9, 3.0, -3.0, 1e9]) * limit
    tx = spa(1.0, 0.0, state_dtype=E4M3, rounding_key=KEY)
    found, state = run(tx, params, [steps, 0 * steps])
    np.testing.assert_array_equal(found, 0)  # c = 0
    z = np.asarray(z_of(state, found))
    np.testing.assert_allclose(z, -np.clip(steps, -limit, limit), rtol=0.13)
    assert np.abs(z).max() == limit
    tx = spa(1.0, 0.25, state_dtype=E4M3, rounding_key=KEY)
    bad = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])
    found, state = run(tx, jnp.zeros(4), [bad, jnp.zeros(4)])
    for values in (found, z_of(state, found)):
        np.testing.assert_array_equal(np.isfinite(values), [False, False, False, True])


def test_a_limit_slows_what_goes_far() -> None:
    """60 steps of `spa` towards a minimum at 100: in e4m3 z − x is 1.75 at most."""

    def gradient(x: Any, _: Any) -> Any:
        return 0.1 * (x - 100)

    for dtype, reached in ((jnp.float32, 99.6), (E4M3, 53)):
        tx = spa(1.0, 0.1, state_dtype=dtype, rounding_key=KEY)
        x, _ = trained(tx, gradient, jnp.zeros(1_000), jnp.arange(60))
        assert float(x.mean()) == pytest.approx(reached, abs=0.5)


def test_params_that_are_replaced_or_edited() -> None:
    """z follows them, before the first step and later: `shift_z` has nothing to do."""
    tx = spa(0.5, 0.25, 0.5, state_dtype=E4M3, rounding_key=KEY)
    old, new, g = (
        jnp.array([1.0, 2.0]),
        jnp.array([5.0, -3.0]),
        jnp.array([0.125, -0.25]),
    )
    expected, _ = run(tx, new, [g])
    found, state = run(tx, new, [g], tx.init(old))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(eval_params(tx.init(old), new), new)
    moved = shift_z(state, found, found + 1)
    chex.assert_trees_all_equal(moved, state)
    np.testing.assert_array_equal(z_of(moved, found + 1), z_of(state, found) + 1)


@pytest.mark.slow
def test_a_rate_that_falls_to_0_or_jumps() -> None:
    """Where z − x is rescaled, unforeseen, no m is lost.

    A rise by 11 times would restart momentum where x of 16 bits is a term of z − x.
    """
    n, rates = 20_000, jnp.array([0.5, 0.5, 1e-3, 0.0, 0.0, 1e-3, 0.03, 0.5])

    def narrow(learning_rate: Any) -> Any:
        return spa_from_sgdm(
            learning_rate, 0.75, state_dtype=jnp.bfloat16, rounding_key=KEY
        )

    g = [jnp.full(n, 2.0**-6)] * len(rates)
    expected, _ = run(spa_from_sgdm(table(rates), 0.75), jnp.ones(n), g)
    tx = optax.inject_hyperparams(narrow, hyperparam_dtype=jnp.float32)(table(rates))
    # z is x + d in float32, to half an ulp of x, and the rise from 1e-3 multiplies it.
    rounding = 500 * 2.0**-24
    for dtype in (jnp.float32, jnp.bfloat16):
        x, _ = run(tx, jnp.ones(n, dtype), g)
        x = x.astype(float)
        error = 5 * x.std() / np.sqrt(n)
        assert abs(x.mean() - expected[0]) < error + rounding
        assert 0 < error < 0.01  # a momentum lost at the last rise would be 0.02


MOMENTUM: dict[str, Any] = {
    "nesterov": lambda: optax.sgd(0.01, 0.9, nesterov=True),
    "lion": lambda: optax.lion(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
}


@pytest.mark.slow
def test_a_momentum_that_float8_can_hold_is_exact() -> None:
    """Arrays of one scale each, with few bits: m is g, then g/2 + g, g/4 + g/2 + g."""
    g = {
        "a": jnp.array([1.0, -2, 0]),
        "b": jnp.full((2, 1), 2.0**90),
        "c": jnp.array(2.0**-90),
    }
    params, base = optax.tree.zeros_like(g), optax.sgd(1.0, momentum=0.5)
    expected, _ = run(base, params, [g] * 3)
    chex.assert_trees_all_equal(
        run(float8_momentum(base, KEY), params, [g] * 3)[0], expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [long(1e-6), 1e9, 0.0])
def test_the_mean_over_keys_is_the_momentum(size: float) -> None:
    """Also of elements far below the largest, which are subnormal; and all are
    neighbours."""
    g = size * jnp.logspace(-6, 0, 97) * jnp.resize(jnp.array([1.0, -1, 0]), 97)

    def stored(key: jax.Array) -> jax.Array:
        tx = float8_momentum(optax.sgd(1.0, momentum=0.5), key)
        state = tx.update(g, tx.init(g))[1]
        (m,) = find_nodes(state, Float8Momentum)
        assert m.q.dtype == E4M3
        return m.q.astype(float) * m.scale

    num_keys = 4_000
    m = jax.vmap(stored)(jax.random.split(KEY, num_keys))
    # Neighbours are at most 1/8 of the number apart, or 2^-9 of the scale, below 2 max
    # |g| / 448.
    spacing = jnp.maximum(jnp.abs(g) / 8, jnp.max(jnp.abs(g)) / 224 * 2**-9)
    assert jnp.all(jnp.abs(m - g) <= spacing)
    assert jnp.all(jnp.abs(m.mean(0) - g) <= 5 * spacing / 2 / num_keys**0.5)


@pytest.mark.parametrize("name", quick(MOMENTUM))
@pytest.mark.usefixtures("standard_promotion")
def test_it_trains_as_its_base_does(name: str) -> None:
    """In one byte for each element of momentum, with bfloat16 params and without."""
    base = MOMENTUM[name]
    params = {"w": 1 + jax.random.normal(KEY, (128, 128))}
    if name != "muon":  # whose momentum of vectors is Adam's
        params["b"] = jnp.ones(64)
    size = sum(x.size for x in jax.tree.leaves(params))
    expected, tx = base().init(params), float8_momentum(base(), KEY)
    state = tx.init(params)
    assert num_elements(state, E4M3) == size
    count_and_scales = 4 + 4 * len(params)
    assert num_bytes(state) == num_bytes(expected) - 3 * size + count_and_scales
    descents = []
    rounded = stochastic_rounding(tx, KEY)
    for wrapped, dtype in ((base(), float), (tx, float), (rounded, "bfloat16")):
        x = optax.tree.cast(params, dtype)
        state = wrapped.init(x)
        for _ in range(10):
            x, state = run(wrapped, x, [jax.grad(sum_of_squares)(x)], state)
        descents.append(sum_of_squares(params) - sum_of_squares(x))
    # An element of m is at most 1/8 from where it would be.
    np.testing.assert_allclose(descents, descents[0], rtol=1 / 8)


def sum_of_squares(tree: Any) -> jax.Array:
    return sum(jnp.sum(x.astype(float) ** 2) for x in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def num_elements(tree: Any, dtype: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.dtype == dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_adam_inside_muon_keeps_its_dtypes() -> None:
    """Muon trains vectors by Adam."""
    params = {"w": jnp.ones((16, 8)), "b": jnp.linspace(0.5, 1.0, 8)}
    muon = optax.contrib.muon(0.01)
    tx = float8_momentum(muon, KEY)
    expected, _ = run(muon, params, [params] * 3)
    found, state = run(tx, params, [params] * 3)
    np.testing.assert_array_equal(found["b"], expected["b"])
    assert num_elements(state, E4M3) == 16 * 8
    (adam,) = find_nodes(state, optax.ScaleByAdamState)
    assert (adam.mu["b"].dtype, adam.nu["b"].dtype) == (jnp.float32, jnp.float32)


@pytest.mark.slow
def test_momentum_that_is_not_finite_stays_so() -> None:
    """And others keep their scale."""
    tx = float8_momentum(optax.sgd(1.0, momentum=0.5), KEY)
    for bad in (jnp.nan, jnp.inf):
        y, _ = run(tx, jnp.zeros(2), [jnp.array([bad, 1.0]), jnp.zeros(2)])
        assert not jnp.isfinite(y[0])
        assert y[1] == -1.5


def test_float8_momentum_of_no_params() -> None:
    """An empty tree, a label that nothing has, and Optax's placeholder."""
    tx, params = float8_momentum(optax.sgd(0.1, 0.9), KEY), {"w": jnp.ones(3)}
    assert find_nodes(tx.init({}), Float8Momentum) == [Float8Momentum({}, {})]
    state = optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "b"}).init(params)
    chex.assert_trees_all_equal_shapes(state, jax.eval_shape(lambda: state))
    in_one = optax.tree.map_params(tx, lambda q: 1, tx.init(params))
    assert optax.tree.get(in_one, "trace") == Float8Momentum({"w": 1}, {"w": 1})


def test_scales_follow_their_arrays() -> None:
    """Into a tree of another order, and into fewer params."""
    tx = float8_momentum(optax.sgd(0.1, momentum=0.9), KEY)
    params = OrderedDict(b=jnp.ones(2), a=jnp.ones(2))
    grads = OrderedDict(b=jnp.full(2, 1e3), a=jnp.full(2, 1e-3))
    _, state = tx.update(grads, tx.init(params), params)
    for new in (dict(params), {"a": None, "b": params["b"]}):
        moved = convert(state, params, into=tx.init(new), count=1)
        trace = optax.tree.get(moved, "trace")
        for name in (name for name in new if new[name] is not None):
            m = trace.q[name].astype(float) * trace.scale[name]
            np.testing.assert_allclose(m, grads[name], rtol=1 / 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.usefixtures("standard_promotion")
def test_float8_momentum_keeps_the_dtype_of_updates(dtype: str) -> None:
    """So it fits into wrappers that skip updates, where its base does."""
    g, x, base = jnp.ones(3, jnp.bfloat16), jnp.ones(3, dtype), optax.sgd(0.1, 0.9)
    tx = float8_momentum(base, KEY)
    u, _ = tx.update(g, tx.init(x), x)
    assert u.dtype == base.update(g, base.init(x), x)[0].dtype
    assert tx.update(g, tx.init(x))[0].dtype == g.dtype


def test_state_in_8_bits_has_no_derivative() -> None:
    def loss(x: jax.Array, tx: Any) -> jax.Array:
        updates, _ = tx.update(x, tx.init(x), x)
        return jnp.sum(x + updates)

    of_z = spa(0.1, 0.1, state_dtype=E4M3, rounding_key=KEY)
    for tx in (of_z, float8_momentum(optax.sgd(0.1, 0.9), KEY)):
        with pytest.raises(ValueError, match=r"8 bits.*tangent"):
            jax.grad(loss)(jnp.ones(2), tx)


SGD = optax.sgd(0.1, 0.9)
FLOAT8_SGD = float8_momentum(SGD, KEY)


@pytest.mark.parametrize(
    "base",
    [
        optax.rmsprop(0.1),
        optax.adam(0.1),
        optax.adamw(0.1),
        optax.nadam(0.1),
        optax.contrib.adopt(0.1),
        primal_averaging(SGD, 0.1),
        spa(0.1),
    ],
)
def test_bases_that_are_refused(base: Any) -> None:
    """Those without a momentum of their own, with Adam's, or that average."""
    with pytest.raises(ValueError, match=r"`base`.*State"):
        float8_momentum(base, KEY).init(jnp.zeros(2))


ADAMS_STATES = (optax.ScaleByAdamState, optax.ScaleByAmsgradState)


def test_every_state_of_adams_type_in_optax_is_refused() -> None:
    """Whatever their fields mean there: `adopt` divides by the last second moment."""
    found = []
    for module in (optax, optax.contrib):
        for name in dir(module):
            try:
                base = getattr(module, name)(1e-3)
                state = base.init(jnp.zeros(2))
            except Exception:
                continue
            has_momentum = find_nodes(state, tuple(FLOAT8_MOMENTUM_FIELDS))
            if find_nodes(state, ADAMS_STATES) and not has_momentum:
                found.append(name)
                with pytest.raises(ValueError, match=r"`base`.*State"):
                    float8_momentum(base, KEY).init(jnp.zeros(2))
    assert {"adam", "adamw", "nadam", "adopt"} <= set(found)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: spa(0.1, 0.01, **options),
        lambda **options: spa(0.1, jnp.array(0.01), **options),
        lambda **options: spa(0.1, schedule_free_averaging(0.1), **options),
        lambda **options: spa_adamw(
            0.1, lambda k: 1 / (k + 1).astype(float), **options
        ),
        lambda **options: primal_averaging(SGD, 0.012, **options),
    ],
)
def test_an_average_too_long_for_8_bits_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"`averaging`.*0\.0125.*got .*bfloat16"):
        make(state_dtype=E4M3, rounding_key=KEY)
    make(state_dtype=jnp.bfloat16, rounding_key=KEY)


def test_an_average_that_8_bits_can_hold() -> None:
    warm_up = optax.linear_schedule(0.0, 0.1, 1_000)
    for averaging in (0.0125, 1, stagewise(0.1, 0.1, [100]).averaging, warm_up):
        spa(0.1, averaging, state_dtype=E4M3, rounding_key=KEY)


def test_plain_steps_are_not_for_8_bits() -> None:
    """z − params would be clipped at 1.75, and steps would be a quarter of SGD's."""
    g = [jnp.ones(100)] * 60
    clipped, _ = run(spa(1.0, 0.1, state_dtype=E4M3, rounding_key=KEY), -g[0], g)
    expected, _ = run(optax.sgd(0.1, 0.9), -g[0], g)
    assert clipped.mean() > 0.4 * expected.mean()
    match = "`state_dtype` must have 16 bits or more.*got float8_e4m3fn.*`float8_mom"
    with pytest.raises(ValueError, match=match):
        spa_from_sgdm(0.1, state_dtype=E4M3, rounding_key=KEY)
    with pytest.raises(ValueError, match=r"`state_dtype`.*got 'wide'"):
        spa_from_sgdm(0.1, state_dtype="wide")


@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_momentum_that_is_refused(dtype: str) -> None:
    with x64(), pytest.raises(ValueError, match=f"`base`.*{dtype}"):
        FLOAT8_SGD.init(np.zeros(2, dtype))


def test_states_that_are_refused() -> None:
    params = jnp.zeros(2)
    with pytest.raises(ValueError, match=r"`state`.*`Float8MomentumState`.*tuple"):
        FLOAT8_SGD.update(params, SGD.init(params))


def test_a_gauge_around_8_bits_of_momentum() -> None:
    tx = track_momentum(primal_averaging(FLOAT8_SGD, 0.5))
    _, state = run(tx, jnp.zeros(2), [jnp.ones(2)] * 3)
    assert momentum_report(state).num_measured == 3


def test_float8_momentum_is_read_as_it_was_stored() -> None:
    """Powers of two need no rounding: SGD, exactly."""
    tx, g = float8_momentum(optax.sgd(1.0, 0.5), KEY), jnp.array([2.0, 4.0])
    _, state = tx.update(g, tx.init(g), g)
    updates, _ = tx.update(g, state, g)
    np.testing.assert_array_equal(updates, -1.5 * g)
