"""The paper's theory: numerical proofs, against the inequalities rather than the formulas."""

import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply, table, x64

from spa_optax import spa, stagewise, theory


def test_forward_recursion_gives_the_iterates_of_sgdm() -> None:
    """Theorem 1, while η is finite: from the default η_0, and from any other."""
    rng = np.random.default_rng(0)
    alphas = rng.uniform(0.05, 0.2, 12)
    grads = rng.normal(size=(12, 4))
    with x64():
        reference, _ = apply(
            optax.sgd(table(jnp.asarray(alphas)), 0.9), jnp.zeros(4), list(jnp.asarray(grads))
        )
        for eta0 in (None, 3.0, 0.7):
            eta, c = theory.forward_recursion(alphas, 0.9, eta0=eta0)
            # Past the first negative η the recursion goes on, and so may we.
            tx = spa(table(jnp.asarray(eta)), table(jnp.asarray(c)))
            x, _ = apply(tx, jnp.zeros(4), list(jnp.asarray(grads)))
            np.testing.assert_allclose(x, reference, rtol=1e-10)


def test_forward_recursion_multiplies_deviations() -> None:
    # By 1/β a step, which is why no schedule can be run this way.
    warm_up = 0.1 * np.arange(101) / 100
    assert theory.forward_recursion(warm_up, 0.9)[0][100] < -1e3
    drop = np.where(np.arange(1020) < 20, 1.0, 0.1)
    assert theory.forward_recursion(drop, 0.9)[0][1019] > 1e45
    near, far = (theory.forward_recursion(np.full(50, 0.1), 0.9, eta0=e)[0] for e in (1.0, 1.1))
    np.testing.assert_allclose((far - near)[1:] / (far - near)[:-1], 1 / 0.9, rtol=1e-6)


def test_forward_recursion_on_arrays() -> None:
    eta, c = theory.forward_recursion([1, 1, 1], [0.9, 0.8, 0.0])
    np.testing.assert_allclose(eta, [10, 9 / 0.8, np.inf], rtol=1e-12)
    np.testing.assert_allclose(c, [0.1, 0.8 / 9, 0], rtol=1e-12)
    assert (eta.dtype, c.dtype) == (np.float64, np.float64)
    assert [a.shape for a in theory.forward_recursion([], 0.9)] == [(0,), (0,)]


# The inequalities themselves, on a smooth non-convex finite sum of which all is known.


class FiniteSum:
    """f(x) = mean_i [1 − cos(aᵢ·x + bᵢ)] · sᵢ + mean_i sᵢ(cᵢ·x)²/(1 + (cᵢ·x)²), float64 NumPy.

    Both are smooth: |1 − cos|'' ≤ 1 and |t²/(1 + t²)|'' ≤ 2, so f is L-smooth with the largest
    eigenvalue of mean sᵢ(aᵢaᵢᵀ + 2cᵢcᵢᵀ), and f* ≥ 0; 0 serves as f* (the bounds hold for any lower
    bound, since they only need f − f* ≥ 0). x is one point or an array of points (..., dim).
    """

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
        components = self.s * (1 - np.cos(x @ self.a.T + self.b) + t**2 / (1 + t**2))
        return components.mean(-1)

    def component_gradients(self, x: np.ndarray) -> np.ndarray:
        t = x @ self.c.T
        of_cos = (self.s * np.sin(x @ self.a.T + self.b))[..., None] * self.a
        return of_cos + (self.s * 2 * t / (1 + t**2) ** 2)[..., None] * self.c

    def gradient(self, x: np.ndarray) -> np.ndarray:
        return self.component_gradients(x).mean(-2)


def test_the_finite_sum_is_what_it_says() -> None:
    f = FiniteSum(0)
    rng = np.random.default_rng(1)
    concave = False
    for _ in range(300):
        x, y = rng.normal(size=(2, 4)) * 2
        numeric = [(f(x + h) - f(x - h)) / 2e-6 for h in 1e-6 * np.eye(4)]
        np.testing.assert_allclose(f.gradient(x), numeric, atol=1e-8)
        difference = np.linalg.norm(f.gradient(x) - f.gradient(y))
        assert difference <= f.smoothness * np.linalg.norm(x - y)
        assert f(x) >= 0
        concave |= f((x + y) / 2) > (f(x) + f(y)) / 2
    assert concave


def sq(v: np.ndarray) -> np.ndarray:
    return np.sum(v**2, axis=-1)


def step_equations(
    f: FiniteSum, etas: np.ndarray, cs: np.ndarray, rng: np.random.Generator, stochastic: bool
) -> dict[str, np.ndarray]:
    """Everything that the step equation at k = 1, … relates, with expectations exact.

    `etas[k]` is η_k and `cs[k]` is c_k, with c_0 = c_1 = cs[0] = cs[1].
    """
    L = f.smoothness
    x_prev = z_prev = f.start
    g = f.component_gradients(x_prev)[rng.integers(6)] if stochastic else f.gradient(x_prev)
    z = z_prev - etas[0] * g
    x = (1 - cs[1]) * x_prev + cs[1] * z
    rows = []
    for k in range(1, len(etas) - 1):
        grads = f.component_gradients(x) if stochastic else f.gradient(x)[None]
        zs = z - etas[k] * grads
        xs = (1 - cs[k + 1]) * x + cs[k + 1] * zs
        rows.append(
            {
                "f_z": f(z),
                "f_z_next": f(zs).mean(),
                "f_x_prev": f(x_prev),
                "f_x": f(x),
                "sq_step": sq(x - x_prev),
                "sq_step_next": sq(xs - x).mean(),
                "sq_grad_x": sq(f.gradient(x)),
                "sq_grad_z": sq(f.gradient(z)),
                "noise": sq(grads).mean(),
                "inner": f.gradient(x) @ (x - x_prev),
            }
        )
        i = rng.integers(len(grads))
        x_prev, x, z = x, xs[i], zs[i]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]} | {"L": np.array(L)}


def slack(t: dict[str, np.ndarray], etas: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """Right side minus left side of the step equation, from the package's functions."""
    eta, eta_prev, c, c_prev, c_next = etas[1:-1], etas[:-2], cs[1:-1], cs[:-2], cs[2:]
    L = float(t["L"])
    now = theory.lyapunov(
        t["f_z"], t["f_x_prev"], t["sq_step"], eta=eta_prev, c=c_prev, c_next=c, smoothness=L
    )
    later = theory.lyapunov(
        t["f_z_next"], t["f_x"], t["sq_step_next"], eta=eta, c=c, c_next=c_next, smoothness=L
    )
    changed = theory.remainder(
        t["f_x_prev"], t["f_z"], eta=eta, eta_prev=eta_prev, c=c, c_prev=c_prev, smoothness=L
    )
    weight = theory.step_weight(eta=eta, eta_prev=eta_prev, c=c, smoothness=L)
    right = now - later + L * t["noise"] + changed + weight * t["sq_step"]
    return np.asarray(right - (t["sq_grad_x"] + t["sq_grad_z"]) / (2 * eta))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), stochastic=st.booleans())
def test_the_step_equation(seed: int, stochastic: bool) -> None:
    """At every step, for any positive η_k and any c_k in (0, 1]."""
    rng = np.random.default_rng(seed)
    f = FiniteSum(int(rng.integers(2**32)))
    etas = 10 ** rng.uniform(-2, 0.5, 32) / f.smoothness
    cs = rng.uniform(0.02, 1, 32)
    cs[0] = cs[1]
    t = step_equations(f, etas, cs, rng, stochastic)
    with x64():
        assert (slack(t, etas, cs) >= -1e-9 * t["f_z"] / etas[1:-1] ** 2).all()


def test_the_step_equation_would_fail_without_its_parts() -> None:
    """The terms matter: 0.9 of the noise weight, or no remainder, is not enough."""
    worst = np.inf
    for seed in range(30):
        rng = np.random.default_rng(seed)
        f = FiniteSum(seed)
        etas = np.where(np.arange(62) % 20 < 10, 1.0, 0.1) / f.smoothness
        cs = np.full(62, 0.3)
        t = step_equations(f, etas, cs, rng, True)
        with x64():
            changed = theory.remainder(
                t["f_x_prev"],
                t["f_z"],
                eta=etas[1:-1],
                eta_prev=etas[:-2],
                c=cs[1:-1],
                c_prev=cs[:-2],
                smoothness=f.smoothness,
            )
            whole = slack(t, etas, cs)
        assert (whole >= -1e-9).all()
        worst = min(worst, (whole - np.asarray(changed)).min())
    assert worst < 0


def run_constant(f: FiniteSum, eta: float, c: float, num_steps: int, seed: int) -> dict[str, Any]:
    """Means over 200 runs of SPA and of SGD with the same η."""
    rng = np.random.default_rng(seed)
    x = z = y = np.tile(f.start, (200, 1))
    means, sgd_means, norms, variances, excesses = [], [], [], [], []
    for _ in range(num_steps):
        grads = f.component_gradients(x)
        full = grads.mean(1)
        norms.append(sq(grads).mean(1).max())
        variances.append(sq(grads - full[:, None]).mean(1).max())
        excesses.append((sq(grads).mean(1) - 2 * sq(full)).max())
        means.append((sq(full) + sq(f.gradient(z))).mean() / 2)
        grads_y = f.component_gradients(y)
        norms.append(sq(grads_y).mean(1).max())
        sgd_means.append(sq(grads_y.mean(1)).mean())
        i = rng.integers(6, size=200)
        z = z - eta * grads[np.arange(200), i]
        x = (1 - c) * x + c * z
        y = y - eta * grads_y[np.arange(200), i]
    return {
        "sgdm": np.mean(means),
        "sgd": np.mean(sgd_means),
        "grad_bound": np.sqrt(max(norms)),
        "variance": max(variances),
        "excess": max(max(excesses), 0),  # of E‖g‖² over 2‖∇f‖²: growth 2
    }


@pytest.mark.parametrize("c", [0.1, 0.5, 1.0])
def test_the_telescoped_bounds(c: float) -> None:
    """Over whole runs, at the largest η that the theory allows and at smaller ones."""
    for seed in range(2):
        f = FiniteSum(seed)
        limit = min(float(theory.max_learning_rate(c, f.smoothness)), 0.4 / f.smoothness)
        for eta in (limit, limit / 10):
            mean = run_constant(f, eta, c, 60, seed)
            known = {"smoothness": f.smoothness, "gap": f(f.start)}
            G, sigma = mean["grad_bound"], np.sqrt(mean["variance"])
            assert mean["sgdm"] <= theory.sgdm_bound(60, eta, c, grad_bound=G, **known)
            for growth, size in ((1, sigma), (2, np.sqrt(mean["excess"]))):
                assert mean["sgdm"] <= theory.sgdm_bound(
                    60, eta, c, grad_bound=size, growth=growth, **known
                )
            assert mean["sgd"] <= theory.sgdm_bound(
                60, eta, 1.0, grad_bound=G / np.sqrt(2), **known
            )


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_the_step_equation_of_sgd(seed: int) -> None:
    """SGD's Λ, R and L/2 are those of c = 1, augmented, also where η changes."""
    rng = np.random.default_rng(seed)
    f = FiniteSum(int(rng.integers(2**32)))
    etas = 10 ** rng.uniform(-2, 0.5, 40) / f.smoothness
    xs = [f.start]
    for eta in etas[1:]:
        xs.append(xs[-1] - eta * f.component_gradients(xs[-1])[rng.integers(6)])
    x, eta, eta_prev = np.array(xs[:-1]), etas[1:], etas[:-1]
    x_prev = np.array([f.start, *xs[:-2]])
    grads = f.component_gradients(x)
    later = f(x[:, None] - eta[:, None, None] * grads).mean(-1)
    of_sgd: Any = {"c": 1.0, "smoothness": f.smoothness}
    with x64():
        function = lambda f_z, f_x, sq_step, eta: theory.lyapunov(
            f_z, f_x, sq_step, eta=eta, c_next=1.0, augmented=True, **of_sgd
        )
        now = function(f(x), f(x_prev), sq(x - x_prev), eta_prev)
        np.testing.assert_allclose(now, f(x) / eta_prev**2, rtol=1e-12)
        after = function(later, f(x), eta**2 * sq(grads).mean(-1), eta)
        changed = theory.remainder(
            f(x_prev), f(x), eta=eta, eta_prev=eta_prev, c_prev=1.0, **of_sgd
        )
        weight = theory.noise_weight(eta, **of_sgd)
        np.testing.assert_allclose(weight, f.smoothness / 2, rtol=1e-12)
        right = now - after + weight * sq(grads).mean(-1) + changed
        assert (sq(f.gradient(x)) / eta <= right + 1e-9 * abs(right)).all()


C = st.floats(0.01, 0.99)
ETA_L = st.floats(1e-3, 10)


@hypothesis.settings(deadline=None)
@hypothesis.given(c=C, L=st.floats(0.1, 10))
def test_the_largest_learning_rate_is_where_the_step_weight_changes_sign(
    c: float, L: float
) -> None:
    with x64():
        limit = theory.max_learning_rate(c, L)
        weight = lambda eta: theory.step_weight(eta=eta, eta_prev=eta, c=c, smoothness=L)
        scale = L / (limit * c) ** 2
        assert abs(weight(limit)) < 1e-9 * scale
        assert weight(0.99 * limit) < 0 < weight(1.01 * limit)
        # As printed in Section 6 and in Section 4: not where the weight changes sign.
        for printed in ((2 - c) / (L * c * (1 - c)), 2 * c * (2 - c) / (L * (1 - c))):
            assert weight(printed) > 0
        # And where the augmented function stops being of use.
        plain, augmented = (
            theory.lyapunov(
                0.0, 0.0, 1.0, eta=limit, c=c, c_next=c, smoothness=L, augmented=augmented
            )
            for augmented in (False, True)
        )
        assert abs(augmented - plain) < 1e-9 * scale
        np.testing.assert_allclose(theory.noise_weight(limit, c, L), L, rtol=1e-9)


@hypothesis.settings(deadline=None)
@hypothesis.given(c=C, eta=ETA_L)
def test_the_largest_decay_is_where_the_step_weight_changes_sign(c: float, eta: float) -> None:
    with x64():
        r = theory.max_decay_ratio(eta, c, 1.0)
        weight = lambda r: theory.step_weight(eta=eta / r, eta_prev=eta, c=c, smoothness=1.0)
        scale = 1 / (eta * c) ** 2
        assert abs(weight(r)) < 1e-9 * scale
        assert weight(0.99 * r) < 0 < weight(1.01 * r)
        # Below 1 from the largest learning rate on, where no decay at all is allowed.
        limit = theory.max_learning_rate(c, 1.0)
        assert (r >= 1) == (eta <= limit) or abs(eta / limit - 1) < 1e-9
        # The paper's way of simplifying, by η_k L ≤ 1, only ever loses.
        simplified = theory.max_decay_ratio(eta, c, 1.0, simplified=True)
        if eta / simplified <= 1:
            assert simplified <= r * (1 + 1e-12)
        # Its quadratic: r²(1 − c) + rηL(1 − c)² − 1 = 0.
        np.testing.assert_allclose(
            simplified**2 * (1 - c) + simplified * eta * (1 - c) ** 2, 1, rtol=1e-9
        )


def test_the_printed_root_is_no_root() -> None:
    c = eta = 0.1
    linear = eta * (1 - c) ** 2
    printed = (-linear + np.sqrt(linear**2 + 4 * (1 - c) * c)) / (2 * (1 - c))
    assert printed == pytest.approx(0.29, abs=0.005)  # no decay at all, says the print
    weight = lambda r: theory.step_weight(eta=eta / r, eta_prev=eta, c=c, smoothness=1.0)
    assert weight(1.0) < 0  # but constants are allowed
    assert theory.max_decay_ratio(eta, c, 1.0, simplified=True) == pytest.approx(1.0101, abs=5e-5)
    assert theory.max_decay_ratio(eta, c, 1.0) == pytest.approx(1.0569, abs=5e-5)


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(c=st.floats(0.01, 0.79), factor=st.floats(1.001, 100), eta=ETA_L)
def test_balanced_averaging_keeps_the_remainder_to_sgds(
    c: float, factor: float, eta: float
) -> None:
    """Insight 2, whose title says "Reduce": c_T is of count T − 1 of `averaging`."""
    with x64():
        schedules: Any = stagewise(eta, c, [5], factor, averaging_rule="balance")
        etas, cs = schedules
        change = {"eta": etas(5), "eta_prev": etas(4), "c_prev": cs(3), "smoothness": 3.0}
        r = theory.remainder(1.0, 0.0, c=cs(4), **change)
        unbalanced = theory.remainder(1.0, 0.0, c=cs(3), **change)
        assert abs(r) <= 1e-12 * (3.0 / eta / c) * factor
        assert factor < 1.01 or unbalanced > 0
        assert cs(3) <= cs(4) <= 1  # increased, not reduced
        np.testing.assert_allclose(1 / cs(4), 1 + (1 / cs(3) - 1) / factor, rtol=1e-9)
        sgd = 2.0 * (1 / etas(5) ** 2 - 1 / etas(4) ** 2)
        both = theory.remainder(1.0, 2.0, c=cs(4), **change)
        np.testing.assert_allclose(both, sgd, rtol=1e-6, atol=1e-12 * factor**2 / eta**2)


def test_the_augmented_function_accounts_for_all_noise() -> None:
    """On pure noise at constants the noise weight is what Λ gains, and what of L the rest cancels.

    With g independent of all and of unit variance, ‖x_{k+1} − x_k‖² follows the recursion without
    the inner product, and in expectation the augmented step equation adds up exactly:
    ρE‖x_{k+1} − x_k‖² = ρ‖x_k − x_{k−1}‖² − `step_weight`·‖x_k − x_{k−1}‖² + ρc²η² E‖g‖², whose
    last weight is `noise_weight` − L.
    """
    rng = np.random.default_rng(0)
    with x64():
        for _ in range(100):
            c, L = rng.uniform(0.05, 1), rng.uniform(0.1, 10)
            eta = rng.uniform(0, 1) * min(float(theory.max_learning_rate(c, L)), 10)
            v, noise = rng.uniform(0, 1, 2)
            rho = L / (2 * eta * c**2) * (L * (1 - c) / (c * (2 - c)) - 1 / eta)  # as printed
            weight = theory.step_weight(eta=eta, eta_prev=eta, c=c, smoothness=L)
            v_next = (1 - c) ** 2 * v + (c * eta) ** 2 * noise
            left = rho * v_next - (rho - weight) * v
            right = (theory.noise_weight(eta, c, L) - L) * noise
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-9 * abs(float(weight)))
            constants: Any = {"eta": eta, "c": c, "c_next": c, "smoothness": L}
            plain = theory.lyapunov(1.0, 2.0, v, **constants)
            gained = theory.lyapunov(1.0, 2.0, v, **constants, augmented=True) - plain
            np.testing.assert_allclose(gained, rho * v, atol=1e-12 * float(plain))


@hypothesis.settings(deadline=None)
@hypothesis.given(st.tuples(*[st.floats(0.1, 10)] * 3), st.integers(1, 10_000), C)
def test_the_tuned_bounds(known: tuple[float, float, float], num_steps: int, c: float) -> None:
    """The η that the docstring names are where the bound is least, and it comes to what it says."""
    L, gap, G = known
    with x64():
        constants = {"smoothness": L, "gap": gap, "grad_bound": G}
        extra = L / num_steps * (1 / c - 1) * gap
        bound = lambda eta: theory.sgdm_bound(num_steps, eta, c, **constants)
        best = np.sqrt(gap / (num_steps * L * G**2))
        expected = 2 * G * np.sqrt(L * gap / num_steps) + extra
        np.testing.assert_allclose(bound(best), expected, rtol=1e-9)
        assert bound(best) < min(bound(0.9 * best), bound(1.1 * best))
        expected = (L * gap + G**2) / np.sqrt(num_steps) + extra
        np.testing.assert_allclose(bound(1 / (L * np.sqrt(num_steps))), expected, rtol=1e-9)
        constants["grad_bound"] = G / np.sqrt(2)
        sgd = lambda eta: theory.sgdm_bound(num_steps, eta, 1.0, **constants)
        best = np.sqrt(2 * gap / (num_steps * L * G**2))
        np.testing.assert_allclose(sgd(best), G * np.sqrt(2 * L * gap / num_steps), rtol=1e-9)
        assert sgd(best) < min(sgd(0.9 * best), sgd(1.1 * best))
        assert theory.sgdm_bound(num_steps, 1 / L, c, growth=1, **constants) == float("inf")


CALLS: dict[str, Any] = {
    "lyapunov": lambda c: theory.lyapunov(2.0, 1.0, 1.0, eta=0.5, c=c, c_next=c, smoothness=3.0),
    "remainder": lambda c: theory.remainder(
        2.0, 1.0, eta=0.5, eta_prev=1.0, c=c, c_prev=c, smoothness=3.0
    ),
    "step_weight": lambda c: theory.step_weight(eta=0.5, eta_prev=1.0, c=c, smoothness=3.0),
    "max_learning_rate": lambda c: theory.max_learning_rate(c, 3.0),
    "max_decay_ratio": lambda c: theory.max_decay_ratio(0.5, c, 3.0),
    "simplified": lambda c: theory.max_decay_ratio(0.5, c, 3.0, simplified=True),
    "noise_weight": lambda c: theory.noise_weight(0.5, c, 3.0),
    "augmented": lambda c: theory.lyapunov(
        2.0, 1.0, 1.0, eta=0.5, c=c, c_next=c, smoothness=3.0, augmented=True
    ),
    "sgdm_bound": lambda c: theory.sgdm_bound(9, 0.1, c, smoothness=3.0, gap=1.0, grad_bound=1.0),
    "growth": lambda c: theory.sgdm_bound(
        9, 0.1, c, smoothness=3.0, gap=1.0, grad_bound=1.0, growth=1.0
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_jit_vmap_and_no_nan(name: str) -> None:
    call = CALLS[name]
    c = jnp.linspace(0.1, 1.0, 12).reshape(3, 4)
    values = call(c)
    assert values.shape == (3, 4)
    assert not np.isnan(values).any()
    infinite = name in ("max_learning_rate", "max_decay_ratio", "simplified")
    assert np.isinf(values[-1, -1]) == infinite
    assert np.isfinite(values.ravel()[:-1]).all()
    np.testing.assert_allclose(jax.jit(call)(c), values, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.vmap(call))(c), values, rtol=1e-5)
    np.testing.assert_allclose([call(float(v)) for v in c.ravel()], values.ravel(), rtol=1e-5)


def test_arguments_out_of_range() -> None:
    for call, message in (
        (lambda: theory.max_learning_rate(2.0, 1.0), "`c` must be in [0, 1], got 2.0"),
        (lambda: theory.max_decay_ratio(-0.1, 0.1, 1.0), "`eta` must be >= 0, got -0.1"),
        (lambda: theory.noise_weight(0.1, 0.1, -1.0), "`smoothness` must be >= 0, got -1.0"),
        (lambda: theory.noise_weight(np.nan, 0.1, 1.0), "`eta` must be >= 0, got nan"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_estimate_smoothness() -> None:
    """The largest |eigenvalue| of a small network's Hessian, against NumPy's of the dense one."""
    rng = np.random.default_rng(0)
    with x64():
        x, y = jnp.asarray(rng.normal(size=(20, 3))), jnp.asarray(rng.normal(size=20))
        params = {
            "hidden": jnp.asarray(rng.normal(size=(3, 4))),
            "output": jnp.asarray(rng.normal(size=4)),
        }

        def loss(p: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["hidden"]) @ p["output"] - y) ** 2)

        flat, unravel = jax.flatten_util.ravel_pytree(params)
        hessian = jax.jit(jax.hessian(lambda v: loss(unravel(v))))(flat)
        expected = np.abs(np.linalg.eigvalsh(hessian)).max()
        key = jax.random.key(0)

        def estimate(params: Any, sign: Any) -> Any:
            signed = lambda p: sign * loss(p)
            return theory.estimate_smoothness(signed, params, key=key, num_iterations=300)

        # Jitted and vmapped; its doctest calls it as it is. The negative of a loss has the same
        # curvature, and a constant has none.
        signs = jnp.array([1.0, -1.0, 0.0])
        many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)
        found = jax.jit(jax.vmap(estimate))(many, signs)
        np.testing.assert_allclose(found, expected * abs(signs), rtol=1e-4)
    with pytest.raises(ValueError, match="`num_iterations` must be a concrete integer >= 1 and"):
        theory.estimate_smoothness(loss, params, key=key, num_iterations=0)


# The other slips of the paper that change a value: the printed form fails, the corrected one holds.


def test_z_starts_at_x_and_not_at_0() -> None:
    """Appendix theorem: printed z_0 = 0."""
    grads = np.random.default_rng(0).normal(size=(5, 3))

    def spa_iterates(z: np.ndarray) -> np.ndarray:
        x = np.ones(3)
        for g in grads:
            z = z - g
            x = 0.9 * x + 0.1 * z
        return x

    x, m = np.ones(3), np.zeros(3)
    for g in grads:
        m = 0.9 * m + g
        x = x - 0.1 * m
    np.testing.assert_allclose(spa_iterates(np.ones(3)), x, rtol=1e-12)
    assert not np.allclose(spa_iterates(np.zeros(3)), x)


def test_momentum_is_removed_at_c_of_1_and_not_of_0() -> None:
    """Figure 3's caption: printed c_k = 0, at which x stands still."""
    x, z, g = 1.0, 2.0, 3.0
    step = lambda c: (1 - c) * x + c * (z - 0.1 * g)
    assert step(1.0) == z - 0.1 * g
    assert step(0.0) == x


def test_the_base_case_of_the_telescope() -> None:
    """Step 0: the second result is divided by η_0², not by η_0 as printed."""
    printed_fails = False
    for seed in range(40):
        rng = np.random.default_rng(seed)
        f = FiniteSum(seed)
        L, c, eta = f.smoothness, rng.uniform(0.05, 1), 10 ** rng.uniform(-1, 1) / f.smoothness
        grads = f.component_gradients(f.start)
        noise = sq(grads).mean()
        later = f(f.start - eta * grads).mean()
        left = sq(f.gradient(f.start)) / eta
        of_step = -L / (2 * eta**2 * c**2) * (c * eta) ** 2 * noise + L * noise
        assert left <= (f(f.start) - later) / eta**2 + of_step + 1e-9
        printed_fails |= left > (f(f.start) - later) / eta + of_step
    assert printed_fails


def test_the_noise_that_momentum_cancels_is_minus_half_of_smoothness() -> None:
    """Insight 1's heuristic product, printed L/2: the weight is negative, which is the point."""
    with x64():
        for c in (0.01, 0.1, 0.5):
            weight = theory.step_weight(eta=1e-8, eta_prev=1e-8, c=c, smoothness=3.0)
            product = weight * c**2 * 1e-16 / (c * (2 - c))
            np.testing.assert_allclose(product, -3.0 / 2, rtol=1e-4)


def test_the_sum_of_sgd_has_a_term_of_noise_for_each_step() -> None:
    """SGD reference proof: a sum over k = 0, …, T has T + 1 of them, and T is printed."""
    f, eta = FiniteSum(0), 1.0
    grads = f.component_gradients(f.start)
    later = f(f.start - eta * grads).mean()
    left = sq(f.gradient(f.start)) / eta
    telescoped = (f(f.start) - later) / eta**2
    noise = f.smoothness / 2 * sq(grads).mean()
    assert left <= telescoped + 1 * noise  # T = 0: one step
    assert left > telescoped + 0 * noise
