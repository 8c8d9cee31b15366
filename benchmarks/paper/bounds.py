"""The terms of the paper's bound that the audit checks (arXiv:2010.00406).

For k ≥ 1 the paper bounds the gradients at x_k and z_k by the fall of a Lyapunov
function (Section 3). The bound holds with these terms, in which misprints are
corrected:

    Λ_{k+1} = [f(z_{k+1}) − f*]/η_k² + L q_k [f(x_k) − f*]
              + L/(2 η_k² c_{k+1}²) ‖x_{k+1} − x_k‖²
    (‖∇f(x_k)‖² + ‖∇f(z_k)‖²)/(2η_k)
        ≤ Λ_k − E Λ_{k+1} + L E‖g_k‖² + R_k + `step_weight` · ‖x_k − x_{k−1}‖²

with q_k = (1/c_k − 1)/η_k and the smoothness L: ‖∇f(x) − ∇f(y)‖ ≤ L ‖x − y‖. A change
of η or c adds the remainder (Section 3.1)

    R_k = L (q_k − q_{k−1}) [f(x_{k−1}) − f*] + (1/η_k² − 1/η_{k−1}²) [f(z_k) − f*]

All functions are arithmetic alone, of NumPy's or JAX's arrays or of numbers. Where c is
1, as in SGD, use arrays: a limit is then inf.
"""

from typing import Any


def weight_of_f_x(eta: Any, c: Any) -> Any:
    """The weight of f(x_k) − f* in Λ_{k+1}, over L: q_k = (1/c_k − 1)/η_k.

    Insight 2 (Section 5): R_k's first term is 0 if this stays. So c_k has to rise when
    η_k falls, where the title of that section says "Reduce".

    Args:
      eta: η_k > 0.
      c: c_k in (0, 1].

    Returns:
      The weight, in the dtype of the arguments.

    Examples:
      >>> from spa_optax.theory._bounds import weight_of_f_x
      >>> weight_of_f_x(eta=0.5, c=0.25)  # (4 − 1)/½
      6.0
    """
    return (1 / c - 1) / eta


def step_weight(*, eta: Any, eta_prev: Any, c: Any, smoothness: Any) -> Any:
    """The weight of ‖x_k − x_{k−1}‖² in the bound. It should be 0 or less.

        (L/2) [q_k² + q_k L/c_k − 1/(η_{k−1} c_k)²]

    Args:
      eta: η_k > 0.
      eta_prev: η_{k−1} > 0.
      c: c_k in (0, 1].
      smoothness: L > 0.

    Returns:
      The weight, in the dtype of the arguments.

    Examples:
      >>> from spa_optax.theory._bounds import step_weight
      >>> # ½ [1² + 1·1/½ − 1/½²]
      >>> step_weight(eta=1.0, eta_prev=1.0, c=0.5, smoothness=1.0)
      -0.5
    """
    q = weight_of_f_x(eta, c)
    return smoothness / 2 * (q**2 + q * smoothness / c - 1 / (eta_prev * c) ** 2)


def max_learning_rate(c: Any, smoothness: Any) -> Any:
    """The largest constant η with `step_weight` ≤ 0: c (2 − c)/(L (1 − c)).

    Runs that train well exceed it. Section 6 and the appendix "Telescoping" print
    (2 − c)/(L c (1 − c)), and Section 4 prints 2 c (2 − c)/(L (1 − c)).

    Args:
      c: the averaging, in [0, 1].
      smoothness: L > 0.

    Returns:
      The limit of η, in the dtype of the arguments; inf where an array is 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax.theory._bounds import max_learning_rate
      >>> # ½·1½/½
      >>> print(max_learning_rate(jnp.array([0.5, 1.0]), 1.0))
      [1.5 inf]
    """
    return c * (2 - c) / (smoothness * (1 - c))
