"""The terms of the paper's bound, against what the paper derives them from."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import max_learning_rate, step_weight, weight_of_f_x
from helpers import x64

from spa_optax import stagewise

many = hypothesis.settings(deadline=None, max_examples=100)
few = hypothesis.settings(deadline=None, max_examples=30)
C, ETA_L = st.floats(0.01, 0.99), st.floats(1e-3, 10)


@many
@hypothesis.given(c=C, eta=ETA_L, eta_prev=ETA_L, smoothness=st.floats(0.1, 10))
def test_the_step_weight_is_the_papers(
    c: float, eta: float, eta_prev: float, smoothness: float
) -> None:
    """As it stands expanded in Section 3.1, for NumPy's and JAX's arrays."""
    inverse, L = 1 / c - 1, smoothness
    terms = (
        (inverse + eta * L) * inverse / eta**2,
        L / eta * inverse**2,
        -1 / (eta_prev * c) ** 2,
    )
    expected, size = L / 2 * sum(terms), L / 2 * sum(map(abs, terms))
    with x64():
        for array in (np.asarray, jnp.asarray):
            found = step_weight(
                eta=array(eta),
                eta_prev=array(eta_prev),
                c=array(c),
                smoothness=array(L),
            )
            np.testing.assert_allclose(found, expected, atol=1e-12 * size)


@many
@hypothesis.given(c=C, smoothness=st.floats(0.1, 10))
def test_the_largest_rate_is_where_the_step_weight_changes_sign(
    c: float, smoothness: float
) -> None:
    L, limit = smoothness, max_learning_rate(c, smoothness)

    def weight(eta: float) -> float:
        return step_weight(eta=eta, eta_prev=eta, c=c, smoothness=L)

    assert abs(weight(limit)) < 1e-9 * L / (limit * c) ** 2
    assert weight(0.99 * limit) < 0 < weight(1.01 * limit)
    # As printed in Section 6 and in Section 4.
    for printed in ((2 - c) / (L * c * (1 - c)), 2 * c * (2 - c) / (L * (1 - c))):
        assert weight(printed) > 0


def test_without_averaging_there_is_no_largest_rate() -> None:
    with np.errstate(divide="ignore"):
        assert max_learning_rate(np.ones(1), 1.0) == np.inf
    assert max_learning_rate(jnp.ones(1), 1.0) == jnp.inf


def test_the_printed_decay_is_no_root() -> None:
    """Section 6 prints a root at which η could not even stay; constants may."""
    c = eta = 0.1
    linear = eta * (1 - c) ** 2
    printed = (-linear + np.sqrt(linear**2 + 4 * (1 - c) * c)) / (2 * (1 - c))
    assert printed == pytest.approx(0.29, abs=0.005)
    assert step_weight(eta=eta, eta_prev=eta, c=c, smoothness=1.0) < 0


@few
@hypothesis.given(c=st.floats(0.01, 0.79), factor=st.floats(1.001, 100), eta=ETA_L)
def test_balanced_averaging_keeps_the_weight_of_f(
    c: float, factor: float, eta: float
) -> None:
    """Insight 2, whose title says "Reduce": c_T is of count T − 1 of `averaging`."""
    with x64():
        etas, cs = stagewise(eta, c, [5], factor, averaging_mode="balance")
        before, after = weight_of_f_x(etas(4), cs(3)), weight_of_f_x(etas(5), cs(4))
        assert abs(after - before) <= 1e-12 * factor / (eta * c)
        # At a constant c it would rise.
        assert factor < 1.01 or weight_of_f_x(etas(5), cs(3)) > before
        assert cs(3) <= cs(4) <= 1
