"""The paper's theory: numerical proofs, against the inequalities rather than the
formulas."""

import doctest
import functools
from typing import Any

import formulas
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from formulas import momentum_drop
from helpers import run, table, x64

from spa_optax import spa, stagewise

examples = functools.partial(hypothesis.settings, deadline=None)
C, ETA_L = st.floats(0.01, 0.99), st.floats(1e-3, 10)


def test_forward_recursion_gives_the_iterates_of_sgdm() -> None:
    """Theorem 1, while η is finite: from the default η_0, and from any other."""
    rng = np.random.default_rng(0)
    alphas, grads = rng.uniform(0.05, 0.2, 12), rng.normal(size=(12, 4))
    with x64():

        def iterate(tx: optax.GradientTransformation) -> Any:
            return run(tx, jnp.zeros(4), list(jnp.asarray(grads)))[0]

        reference = iterate(optax.sgd(table(jnp.asarray(alphas)), 0.9))
        for eta0 in (None, 3.0, 0.7):
            eta, c = formulas.forward_recursion(alphas, 0.9, eta0=eta0)
            x = iterate(spa(table(jnp.asarray(eta)), table(jnp.asarray(c))))
            np.testing.assert_allclose(x, reference, rtol=1e-10)


def test_forward_recursion_multiplies_deviations() -> None:
    eta, c = formulas.forward_recursion([1, 1, 1], [0.9, 0.8, 0.0])
    np.testing.assert_allclose(eta, [10, 9 / 0.8, np.inf], rtol=1e-12)
    np.testing.assert_allclose(c, [0.1, 0.8 / 9, 0], rtol=1e-12)
    # By 1/β a step, which is why no schedule can be run this way.
    near, far = (
        formulas.forward_recursion(np.full(50, 0.1), 0.9, eta0=e)[0] for e in (1.0, 1.1)
    )
    np.testing.assert_allclose((far - near)[1:] / (far - near)[:-1], 1 / 0.9, rtol=1e-6)


# The inequalities themselves, on a smooth non-convex finite sum of which all is known.


class FiniteSum:
    """f(x) = mean_i [1 − cos(aᵢ·x + bᵢ)] · sᵢ + mean_i sᵢ(cᵢ·x)²/(1 + (cᵢ·x)²), float64
    NumPy.

    Both are smooth: |1 − cos|'' ≤ 1 and |t²/(1 + t²)|'' ≤ 2, so f is L-smooth with the
    largest eigenvalue of mean sᵢ(aᵢaᵢᵀ + 2cᵢcᵢᵀ), and f* ≥ 0; 0 serves as f* (the
    bounds hold for any lower bound, since they only need f − f* ≥ 0). x is one point or
    an array of points (..., dim)."""

    def __init__(self, seed: int, num_components: int = 6, dim: int = 4) -> None:
        rng = np.random.default_rng(seed)
        self.a = rng.normal(size=(num_components, dim))
        self.b = rng.uniform(0, 2 * np.pi, num_components)
        self.c = rng.normal(size=(num_components, dim)) / 2
        self.s = rng.uniform(0.2, 1, num_components)
        hessian = np.einsum("i,ij,ik->jk", self.s, self.a, self.a)
        hessian += 2 * np.einsum("i,ij,ik->jk", self.s, self.c, self.c)
        self.smoothness = float(np.linalg.eigvalsh(hessian / num_components)[-1])
        self.start = rng.normal(size=dim) * 2

    def __call__(self, x: np.ndarray) -> np.ndarray:
        t = x @ self.c.T
        return (self.s * (1 - np.cos(x @ self.a.T + self.b) + t**2 / (1 + t**2))).mean(
            -1
        )

    def component_gradients(self, x: np.ndarray) -> np.ndarray:
        t = x @ self.c.T
        of_cos = (self.s * np.sin(x @ self.a.T + self.b))[..., None] * self.a
        return of_cos + (self.s * 2 * t / (1 + t**2) ** 2)[..., None] * self.c

    def gradient(self, x: np.ndarray) -> np.ndarray:
        return self.component_gradients(x).mean(-2)


def test_the_finite_sum_is_what_it_says() -> None:
    f, rng, concave = FiniteSum(0), np.random.default_rng(1), False
    for _ in range(300):
        x, y = rng.normal(size=(2, 4)) * 2
        numeric = [(f(x + h) - f(x - h)) / 2e-6 for h in 1e-6 * np.eye(4)]
        np.testing.assert_allclose(f.gradient(x), numeric, atol=1e-8)
        difference = np.linalg.norm(f.gradient(x) - f.gradient(y))
        assert difference <= f.smoothness * np.linalg.norm(x - y)
        assert f(x) >= 0
        concave |= f((x + y) / 2) > (f(x) + f(y)) / 2
    assert concave


def sq(v: np.ndarray) -> Any:
    return np.sum(v**2, axis=-1)


def slack(
    f: FiniteSum,
    etas: np.ndarray,
    cs: np.ndarray,
    rng: np.random.Generator,
    stochastic: bool = True,
    augmented: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Right minus left side of the step equation at k = 1, …, and R_k; expectations are
    exact.

    `etas[k]` is η_k and `cs[k]` is c_k, with c_0 = c_1 = cs[0] = cs[1].
    """
    x, z, x_next, rows = f.start, f.start, f.start, []
    for k in range(len(etas) - 1):
        x_prev, x = x, x_next
        grads = f.component_gradients(x) if stochastic else f.gradient(x)[None]
        zs = z - etas[k] * grads
        xs = (1 - cs[k + 1]) * x + cs[k + 1] * zs
        left = (sq(f.gradient(x)) + sq(f.gradient(z))) / (2 * etas[k])
        after = f(zs).mean(), f(x), sq(xs - x).mean()
        rows.append((left, sq(grads).mean(), f(z), f(x_prev), sq(x - x_prev), *after))
        i = rng.integers(len(grads))
        x_next, z = xs[i], zs[i]
    left, noise, *before, after_z, after_x, after_step = np.array(rows[1:]).T
    after = after_z, after_x, after_step
    eta, eta_prev, c, c_prev, c_next = etas[1:-1], etas[:-2], cs[1:-1], cs[:-2], cs[2:]
    known: Any = {"smoothness": f.smoothness, "augmented": augmented}
    with x64():
        fall = formulas.lyapunov(*before, eta=eta_prev, c=c_prev, c_next=c, **known)
        fall -= formulas.lyapunov(*after, eta=eta, c=c, c_next=c_next, **known)
        of = {"eta": eta, "eta_prev": eta_prev, "c": c, "smoothness": f.smoothness}
        changed = formulas.remainder(before[1], before[0], c_prev=c_prev, **of)
        if augmented:
            right = fall + formulas.noise_weight(eta, c, f.smoothness) * noise + changed
        else:
            right = (
                fall
                + f.smoothness * noise
                + changed
                + formulas.step_weight(**of) * before[2]
            )
        return np.asarray(right - left + 1e-9 * before[0] / eta**2), np.asarray(changed)


@examples(max_examples=60)
@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_the_step_equation(seed: int, stochastic: bool, is_sgd: bool) -> None:
    """At every step, for any positive η_k and any c_k in (0, 1]. SGD's is that of c =
    1, augmented.

    For SGD, Λ is f(x)/η², R_k has f(x_k) (printed f(z_k)), and the noise counts L/2.
    """
    rng = np.random.default_rng(seed)
    f = FiniteSum(int(rng.integers(2**32)))
    etas, cs = 10 ** rng.uniform(-2, 0.5, 32) / f.smoothness, rng.uniform(0.02, 1, 32)
    cs = np.ones(32) if is_sgd else np.append(cs[1], cs[1:])
    assert (slack(f, etas, cs, rng, stochastic, augmented=is_sgd)[0] >= 0).all()


def test_the_step_equation_would_fail_without_the_remainder() -> None:
    etas, cs, worst = (
        np.where(np.arange(62) % 20 < 10, 1.0, 0.1),
        np.full(62, 0.3),
        np.inf,
    )
    for seed in range(30):
        f = FiniteSum(seed)
        whole, changed = slack(f, etas / f.smoothness, cs, np.random.default_rng(seed))
        assert (whole >= 0).all()
        worst = min(worst, (whole - changed).min())
    assert worst < 0


@pytest.mark.parametrize("c", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("part", [1, 0.1])
def test_the_telescoped_bounds(c: float, part: float) -> None:
    """Means over 200 runs of SPA and of SGD, at the largest η that the theory allows or
    less."""
    f, rng = FiniteSum(0), np.random.default_rng(0)
    eta = part * min(
        float(formulas.max_learning_rate(jnp.array(c), f.smoothness)),
        0.4 / f.smoothness,
    )
    x = z = y = np.tile(f.start, (200, 1))
    rows, T = [], 60
    for _ in range(T):
        grads, grads_y = f.component_gradients(x), f.component_gradients(y)
        full, full_y, second = grads.mean(1), grads_y.mean(1), sq(grads).mean(1)
        rows.append(
            (
                (sq(full) + sq(f.gradient(z))).mean() / 2,
                sq(full_y).mean(),
                max(second.max(), sq(grads_y).mean(1).max()),
                *((second - growth * sq(full)).max() for growth in (1, 2)),
            )
        )
        i = np.arange(200), rng.integers(6, size=200)
        z = z - eta * grads[i]
        x = (1 - c) * x + c * z
        y = y - eta * grads_y[i]
    spa_mean, sgd_mean, *_ = np.mean(rows, 0)
    roots = np.sqrt(
        np.maximum(np.max(rows, 0)[2:], 0)
    )  # G, σ, and what 2‖∇f‖² leaves of E‖g‖²
    bound = functools.partial(
        formulas.sgdm_bound, T, eta, smoothness=f.smoothness, gap=f(f.start)
    )
    for growth, root in enumerate(roots):
        assert spa_mean <= bound(c, grad_bound=root, growth=growth)
    assert sgd_mean <= bound(1.0, grad_bound=roots[0] / np.sqrt(2))


@examples(max_examples=100)
@hypothesis.given(c=C, L=st.floats(0.1, 10))
def test_the_largest_rate_is_where_the_step_weight_changes_sign(
    c: float, L: float
) -> None:
    with x64():
        limit = formulas.max_learning_rate(c, L)

        def weight(eta: float) -> Any:
            return formulas.step_weight(eta=eta, eta_prev=eta, c=c, smoothness=L)

        scale = L / (limit * c) ** 2
        assert abs(weight(limit)) < 1e-9 * scale
        assert weight(0.99 * limit) < 0 < weight(1.01 * limit)
        # As printed in Section 6 and in Section 4.
        for printed in ((2 - c) / (L * c * (1 - c)), 2 * c * (2 - c) / (L * (1 - c))):
            assert weight(printed) > 0


@examples(max_examples=100)
@hypothesis.given(c=C, eta=ETA_L)
def test_the_largest_decay_is_where_the_step_weight_changes_sign(
    c: float, eta: float
) -> None:
    with x64():
        r = formulas.max_decay_ratio(eta, c, 1.0)

        def weight(r: float) -> Any:
            return formulas.step_weight(eta=eta / r, eta_prev=eta, c=c, smoothness=1.0)

        assert abs(weight(r)) < 1e-9 / (eta * c) ** 2
        assert weight(0.99 * r) < 0 < weight(1.01 * r)
        limit = formulas.max_learning_rate(c, 1.0)  # from there on no decay is allowed
        assert (r >= 1) == (eta <= limit) or abs(eta / limit - 1) < 1e-9
        # The paper's simplification, by η_k L ≤ 1, gives a smaller ratio, from a
        # quadratic.
        s = formulas.max_decay_ratio(eta, c, 1.0, simplified=True)
        assert s <= r * (1 + 1e-12) or eta / s > 1
        np.testing.assert_allclose(
            s**2 * (1 - c) + s * eta * (1 - c) ** 2, 1, rtol=1e-9
        )


def test_the_printed_root_is_no_root() -> None:
    c = eta = 0.1
    linear = eta * (1 - c) ** 2
    printed = (-linear + np.sqrt(linear**2 + 4 * (1 - c) * c)) / (2 * (1 - c))
    assert printed == pytest.approx(0.29, abs=0.005)  # no decay at all, says the print
    assert (
        formulas.step_weight(eta=eta, eta_prev=eta, c=c, smoothness=1.0) < 0
    )  # constants may stay
    for simplified in (False, True):
        assert formulas.max_decay_ratio(eta, 1.0, 1.0, simplified=simplified) == np.inf


@examples(max_examples=30)
@hypothesis.given(c=st.floats(0.01, 0.79), factor=st.floats(1.001, 100), eta=ETA_L)
def test_balanced_averaging_keeps_the_remainder_of_sgd(
    c: float, factor: float, eta: float
) -> None:
    """Insight 2, whose title says "Reduce": c_T is of count T − 1 of `averaging`."""
    with x64():
        schedules: Any = stagewise(eta, c, [5], factor, averaging_mode="balance")
        etas, cs = schedules
        change = {
            "eta": etas(5),
            "eta_prev": etas(4),
            "c_prev": cs(3),
            "smoothness": 3.0,
        }
        assert abs(
            formulas.remainder(1.0, 0.0, c=cs(4), **change)
        ) <= 1e-12 * 3 * factor / (eta * c)
        assert (
            factor < 1.01 or formulas.remainder(1.0, 0.0, c=cs(3), **change) > 0
        )  # c constant
        assert cs(3) <= cs(4) <= 1  # increased, not reduced
        np.testing.assert_allclose(1 / cs(4), 1 + (1 / cs(3) - 1) / factor, rtol=1e-9)


def test_the_augmented_function_accounts_for_all_noise() -> None:
    """On pure noise at constants the noise weight is what Λ gains, and what of L the
    rest cancels.

    With g independent of all and of unit variance, ‖x_{k+1} − x_k‖² follows the
    recursion without the inner product, and in expectation the augmented step equation
    adds up exactly: ρE‖x_{k+1} − x_k‖² = ρ‖x_k − x_{k−1}‖² − `step_weight`·‖x_k −
    x_{k−1}‖² + ρc²η² E‖g‖², whose last weight is `noise_weight` − L. For small η it is
    −L/2; Insight 1 prints L/2."""
    rng = np.random.default_rng(0)
    with x64():
        for k in range(100):
            c, L, part, v, noise = rng.uniform((0.05, 0.1, 0, 0, 0), (1, 10, 1, 1, 1))
            eta = (part if k else 1e-8) * min(
                float(formulas.max_learning_rate(c, L)), 10
            )
            rho = (
                L / (2 * eta * c**2) * (L * (1 - c) / (c * (2 - c)) - 1 / eta)
            )  # as printed
            weight = formulas.step_weight(eta=eta, eta_prev=eta, c=c, smoothness=L)
            gain = formulas.noise_weight(eta, c, L) - L
            left = (
                rho * ((1 - c) ** 2 * v + (c * eta) ** 2 * noise) - (rho - weight) * v
            )
            np.testing.assert_allclose(
                left, gain * noise, rtol=1e-6, atol=1e-9 * abs(weight)
            )
            assert k or abs(gain / L + 1 / 2) < 1e-6
            known: Any = {"eta": eta, "c": c, "c_next": c, "smoothness": L}
            plain, other = (
                formulas.lyapunov(1, 2, v, **known, augmented=a) for a in (False, True)
            )
            np.testing.assert_allclose(
                other - plain, rho * v, atol=1e-12 * float(plain)
            )


@examples(max_examples=100)
@hypothesis.given(st.tuples(*[st.floats(0.1, 10)] * 3), st.integers(1, 10_000), C)
def test_the_tuned_bounds(
    known: tuple[float, float, float], num_steps: int, c: float
) -> None:
    """Where the bound is least, for SGD+M and for SGD, and what it comes to there."""
    L, gap, G = known
    with x64():
        constants = {"smoothness": L, "gap": gap}
        extra = L / num_steps * (1 / c - 1) * gap
        for root, c_of, rest in ((G, c, extra), (G / np.sqrt(2), 1.0, 0)):
            bound = functools.partial(
                formulas.sgdm_bound, num_steps, c=c_of, grad_bound=root, **constants
            )
            best = np.sqrt(gap / (num_steps * L * root**2))
            expected = 2 * root * np.sqrt(L * gap / num_steps) + rest
            np.testing.assert_allclose(bound(best), expected, rtol=1e-9)
            assert bound(best) < min(bound(0.9 * best), bound(1.1 * best))
        assert (
            formulas.sgdm_bound(
                num_steps, 1 / L, c, growth=1, grad_bound=G, **constants
            )
            == np.inf
        )


# The other slips of the paper that change a value: the printed form fails, the
# corrected one holds.


def test_the_base_case_of_the_telescope() -> None:
    """Step 0: the second result is divided by η_0², not by η_0 as printed."""
    printed_fails = False
    for seed in range(40):
        rng, f = np.random.default_rng(seed), FiniteSum(seed)
        L, c, eta = (
            f.smoothness,
            rng.uniform(0.05, 1),
            10 ** rng.uniform(-1, 1) / f.smoothness,
        )
        grads = f.component_gradients(f.start)
        fall = f(f.start) - f(f.start - eta * grads).mean()
        left = sq(f.gradient(f.start)) / eta
        of_step = (L - L / (2 * eta**2 * c**2) * (c * eta) ** 2) * sq(grads).mean()
        assert left <= fall / eta**2 + of_step + 1e-9
        printed_fails |= left > fall / eta + of_step
    assert printed_fails


def test_the_sum_of_sgd_has_a_term_of_noise_for_each_step() -> None:
    """SGD reference proof: a sum over k = 0, …, T has T + 1 of them, and T is
    printed."""
    f, eta = FiniteSum(0), 1.0
    grads = f.component_gradients(f.start)
    left = sq(f.gradient(f.start)) / eta
    telescoped = (f(f.start) - f(f.start - eta * grads).mean()) / eta**2
    noise = f.smoothness / 2 * sq(grads).mean()
    assert telescoped + 0 * noise < left <= telescoped + 1 * noise  # T = 0: one step


# The momentum is dropped.


def values(hyperparams: Any, num_steps: int) -> list[np.ndarray]:
    """Both schedules at counts 0, …, num_steps − 1, in float64."""
    with x64():
        return [np.array(h(np.arange(num_steps, dtype=np.int32))) for h in hyperparams]


@pytest.mark.parametrize("step_divisor", [None, 1.5])
@pytest.mark.parametrize("hold", ["eta", "alpha"])
def test_momentum_drop_to_the_step(hold: Any, step_divisor: float | None) -> None:
    eta, c = values(
        momentum_drop(2.0, 0.25, 6, hold=hold, step_divisor=step_divisor), 20
    )
    c_after = np.ones(15)
    if step_divisor:
        c_after = np.minimum(0.25 * step_divisor ** np.arange(1, 16), 1)
    np.testing.assert_allclose(c, [0.25] * 5 + [*c_after], rtol=1e-12)  # from c_6 on
    kept = eta if hold == "eta" else eta * c / 0.25
    np.testing.assert_allclose(kept, np.full(20, 2.0), rtol=1e-12)


@pytest.mark.parametrize("c", [0.0, 1e-30, 0.1])
@pytest.mark.parametrize("hold", ["eta", "alpha"])
def test_momentum_drop_has_no_nan_where_its_factor_overflows(
    hold: Any, c: float
) -> None:
    """In float32 1.5^300 is inf; and c may be 0."""
    eta, late = (h(300) for h in momentum_drop(1.0, c, 1, step_divisor=1.5, hold=hold))
    assert float(late) == (c > 0)
    np.testing.assert_allclose(eta, 1 if hold == "eta" or c == 0 else c, rtol=1e-6)


@pytest.mark.parametrize(
    "hyperparams",
    [
        momentum_drop(
            lambda k: 1 / (k + 1).astype(float), lambda k: 0.1 + 0 * k.astype(float), 5
        ),
        momentum_drop(
            *stagewise(1.0, 0.1, [5], averaging_mode="balance"), 9, hold="alpha"
        ),
    ],
)
def test_momentum_drop_gives_ordinary_schedules(hyperparams: Any) -> None:
    """Of a Python int, and of an array under jit and vmap."""
    for schedule in hyperparams:
        found = jax.jit(jax.vmap(schedule))(np.arange(10, dtype=np.int32))
        np.testing.assert_allclose(found[7], schedule(7), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0}, "`step`.*0"),
        ({"hold": "x"}, "`hold`.*'x'"),
        ({"step_divisor": 1.0}, r"`step_divisor`.*1\.0"),
        ({"averaging": 1.5}, r"`averaging`.*1\.5"),
        ({"learning_rate": -1.0}, r"`learning_rate`.*-1\.0"),
    ],
)
def test_momentum_drop_refuses(arguments: dict[str, Any], message: str) -> None:
    options: Any = {"learning_rate": 1.0, "averaging": 0.1, "step": 5} | arguments
    with pytest.raises(ValueError, match=message):
        momentum_drop(**options)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(formulas) == (0, 13)
