"""The conditions of the paper's bound that an audit checks (arXiv:2010.00406).

    symbol                    argument     unit   range
    η_k, the learning rate    eta          x²/f   > 0
    c_k, the averaging        c            1      in (0, 1]
    L, the smoothness         smoothness   f/x²   > 0; ‖∇f(x) − ∇f(y)‖ ≤ L ‖x − y‖

`eta_prev` is η_{k−1}. The functions are arithmetic alone, so they take numbers, NumPy's
arrays and JAX's.
"""

from typing import Any


def weight_of_f_x(eta: Any, c: Any) -> Any:
    """The weight of f(x_k) − f* in the Lyapunov function over L, (1/c_k − 1)/η_k.

    >>> weight_of_f_x(0.5, 0.5)  # (2 − 1)/½
    2.0
    """
    return (1 / c - 1) / eta


def step_weight(*, eta: Any, eta_prev: Any, c: Any, smoothness: Any) -> Any:
    """The weight of ‖x_k − x_{k−1}‖² in the step equation (Section 3.1).

        (L/2) [q² + q L/c_k − 1/(η_{k−1} c_k)²]      q = (1/c_k − 1)/η_k

    The bound needs it to be ≤ 0.

    >>> step_weight(eta=1, eta_prev=1, c=0.5, smoothness=1)  # ½ [1² + 1·1/½ − 1/½²]
    -0.5
    """
    q = weight_of_f_x(eta, c)
    square = q**2 + q * smoothness / c - 1 / (eta_prev * c) ** 2
    return smoothness / 2 * square


def max_learning_rate(c: Any, smoothness: Any) -> Any:
    """The largest constant η with `step_weight` ≤ 0, c (2 − c)/(L (1 − c)).

    Runs that train well exceed it. Section 6 and the appendix "Telescoping" print
    (2 − c)/(L c (1 − c)), Section 4 2c(2 − c)/(L (1 − c)).

    >>> max_learning_rate(0.5, 1.0)  # ½ · 1½ / ½
    1.5
    """
    return c * (2 - c) / (smoothness * (1 - c))
