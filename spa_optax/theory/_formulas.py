"""The formulas of the paper, as functions of scalars and arrays.

A function with an underscore, like `_step_weight`, is the arithmetic alone, for JAX or NumPy
arrays. The audit evaluates it in NumPy's float64.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from spa_optax._checks import check_steps

_AnyArray = TypeVar("_AnyArray", Array, np.ndarray)


def _arrays(*values: ArrayLike) -> list[Float[Array, "..."]]:
    return [jnp.asarray(value, float) for value in values]


def _weight_of_f_x(eta: _AnyArray, c: _AnyArray) -> _AnyArray:
    """The weight of f(x_k) − f* in `lyapunov`, over L."""
    return (1 / c - 1) / eta


def lyapunov(
    f_z: ArrayLike,
    f_x: ArrayLike,
    sq_step: ArrayLike,
    *,
    eta: ArrayLike,
    c: ArrayLike,
    c_next: ArrayLike,
    smoothness: ArrayLike,
    f_star: ArrayLike = 0.0,
) -> Float[Array, "..."]:
    """The Lyapunov function of SPA: each step decreases it, up to noise and `remainder`.

        Λ_{k+1} = [f(z_{k+1}) − f*]/η_k² + (L/η_k)(1/c_k − 1)[f(x_k) − f*]
                  + L/(2 η_k² c_{k+1}²) ‖x_{k+1} − x_k‖²

    The step equation, for k ≥ 1 (with c_0 = c_1), expectations over the gradient at step k:

        (‖∇f(x_k)‖² + ‖∇f(z_k)‖²)/(2η_k)
            ≤ Λ_k − E Λ_{k+1} + L E‖g_k‖² + R_k + `step_weight` · ‖x_k − x_{k−1}‖²

    Args:
      f_z: f(z_{k+1}).
      f_x: f(x_k).
      sq_step: ‖x_{k+1} − x_k‖².
      eta: η_k > 0.
      c: c_k in (0, 1].
      c_next: c_{k+1} in (0, 1].
      smoothness: L > 0.
      f_star: f*.

    Returns:
      Λ_{k+1}.

    Examples:
      3/½² + (1/½)(2 − 1)·3 + 1/(2·¼·¼)·1 = 12 + 6 + 8:

      >>> from spa_optax import theory
      >>> float(theory.lyapunov(3.0, 3.0, 1.0, eta=0.5, c=0.5, c_next=0.5, smoothness=1.0))
      26.0

    References:
      arXiv:2010.00406, Section 3.1 and appendix "Building the Lyapunov function".
    """
    f_z, f_x, sq_step, eta, c, c_next, L, f_star = _arrays(
        f_z, f_x, sq_step, eta, c, c_next, smoothness, f_star
    )
    return (
        (f_z - f_star) / eta**2
        + L * _weight_of_f_x(eta, c) * (f_x - f_star)
        + L / (2 * eta**2 * c_next**2) * sq_step
    )


def remainder(
    f_x_prev: ArrayLike,
    f_z: ArrayLike,
    *,
    eta: ArrayLike,
    eta_prev: ArrayLike,
    c: ArrayLike,
    c_prev: ArrayLike,
    smoothness: ArrayLike,
    f_star: ArrayLike = 0.0,
) -> Float[Array, "..."]:
    """The error R_k that a change of hyper-parameters adds to the step equation (`lyapunov`).

        R_k = [(L/η_k)(1/c_k − 1) − (L/η_{k−1})(1/c_{k−1} − 1)] [f(x_{k−1}) − f*]
              + [1/η_k² − 1/η_{k−1}²] [f(z_k) − f*]

    Args:
      f_x_prev: f(x_{k−1}).
      f_z: f(z_k).
      eta: η_k > 0.
      eta_prev: η_{k−1} > 0.
      c: c_k in (0, 1].
      c_prev: c_{k−1} in (0, 1].
      smoothness: L > 0.
      f_star: f*.

    Returns:
      R_k; 0 if η and c have not changed.

    Examples:
      η halved from 1, c = ½: (2·1 − 1·1)·1 + (4 − 1)·2 = 7.

      >>> from spa_optax import theory
      >>> change = {"eta": 0.5, "eta_prev": 1.0, "c": 0.5, "c_prev": 0.5}
      >>> float(theory.remainder(1.0, 2.0, **change, smoothness=1.0))
      7.0

    References:
      arXiv:2010.00406, Section 3.1.
    """
    f_x_prev, f_z, eta, eta_prev, c, c_prev, L, f_star = _arrays(
        f_x_prev, f_z, eta, eta_prev, c, c_prev, smoothness, f_star
    )
    of_x = L * (_weight_of_f_x(eta, c) - _weight_of_f_x(eta_prev, c_prev))
    return of_x * (f_x_prev - f_star) + (1 / eta**2 - 1 / eta_prev**2) * (f_z - f_star)


def _step_weight(eta: _AnyArray, eta_prev: _AnyArray, c: _AnyArray, L: Any) -> _AnyArray:
    m = 1 / c - 1
    return L / 2 * ((m + eta * L) * m / eta**2 + L / eta * m**2 - 1 / (eta_prev**2 * c**2))


def step_weight(
    *, eta: ArrayLike, eta_prev: ArrayLike, c: ArrayLike, smoothness: ArrayLike
) -> Float[Array, "..."]:
    """The weight of ‖x_k − x_{k−1}‖² in the step equation: it helps where it is negative.

        (L/2) [(1/c_k − 1 + η_k L)(1/c_k − 1)/η_k² + (L/η_k)(1/c_k − 1)² − 1/(η_{k−1}² c_k²)]

    Args:
      eta: η_k > 0.
      eta_prev: η_{k−1} > 0.
      c: c_k in (0, 1].
      smoothness: L > 0.

    Returns:
      The weight, including the factor L/2. For constants it is 0 at `max_learning_rate`. If η is
      divided by r in one step, it is 0 at `max_decay_ratio`.

    Examples:
      ½ [(1 + 1)·1 + 1·1² − 4] = −½:

      >>> from spa_optax import theory
      >>> float(theory.step_weight(eta=1.0, eta_prev=1.0, c=0.5, smoothness=1.0))
      -0.5

    References:
      arXiv:2010.00406, Section 3.1, the step equation.
    """
    return _step_weight(*_arrays(eta, eta_prev, c, smoothness))


def _max_learning_rate(c: _AnyArray, L: Any) -> _AnyArray:
    return c * (2 - c) / (L * (1 - c))


def max_learning_rate(c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The largest constant η for which the bound holds: `step_weight` ≤ 0.

        η ≤ c (2 − c) / (L (1 − c))

    The condition is sufficient for a worst-case bound, not necessary. With a measured curvature for
    L, the η of recipes that train well is several to many times as large.

    Args:
      c: c in [0, 1].
      smoothness: L > 0.

    Returns:
      The limit; inf at c = 1, where every η satisfies the condition.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.max_learning_rate(0.5, 1.0), theory.max_learning_rate(1.0, 1.0))
      1.5 inf

    References:
      arXiv:2010.00406, Section 6 and appendix "Telescoping", which print (2 − c)/(L c (1 − c)), and
      Section 4, 2c(2 − c)/(L(1 − c)). Appendix "Augmented Lyapunov" is correct.
    """
    return _max_learning_rate(*_arrays(c, smoothness))


def _max_decay_ratio(
    eta: _AnyArray, c: _AnyArray, L: Any, sqrt: Callable[[_AnyArray], _AnyArray]
) -> _AnyArray:
    # The root, multiplied by its conjugate: no cancellation.
    return 2 / ((1 - c) * (eta * L + sqrt((eta * L) ** 2 + 4)))


def max_decay_ratio(
    eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike, *, simplified: bool = False
) -> Float[Array, "..."]:
    """The largest r by which η may be divided in one step: `step_weight` ≤ 0 with η_k = η_{k−1}/r.

        r = (√(η²L² + 4) − ηL) / (2 (1 − c))
        simplified:  r = (√(η²L²(1 − c)⁴ + 4(1 − c)) − ηL(1 − c)²) / (2 (1 − c))

    The simplified form is the paper's. It uses η_k L ≤ 1, and is not larger where that holds.

    Args:
      eta: η_{k−1} > 0.
      c: c_k in [0, 1].
      smoothness: L > 0.
      simplified: whether to use the paper's form.

    Returns:
      r; inf at c = 1. Where η is over `max_learning_rate` already, r is below 1: no decay is
      allowed.

    Examples:
      The paper's own example, c = ηL = 0.1, where it gives 1.01:

      >>> from spa_optax import theory
      >>> print(f"{theory.max_decay_ratio(0.1, 0.1, 1.0, simplified=True):.4f}")
      1.0101
      >>> print(f"{theory.max_decay_ratio(0.1, 0.1, 1.0):.4f}")
      1.0569

    References:
      arXiv:2010.00406, Section 6 (Insight 3), which prints 4(1 − c)c under the root instead of
      4(1 − c). In the example that would give 0.29.
    """
    eta, c, L = _arrays(eta, c, smoothness)
    if not simplified:
        return _max_decay_ratio(eta, c, L, jnp.sqrt)
    # The root, multiplied by its conjugate: no cancellation, and no 0/0 at c = 1.
    linear = eta * L * (1 - c) ** 2
    return 2 / (linear + jnp.sqrt(linear**2 + 4 * (1 - c)))


def balanced_averaging(c: ArrayLike, factor: ArrayLike) -> Float[Array, "..."]:
    """The c that keeps the first coefficient of `remainder` at 0 when η is divided by a factor.

        1/c_T = 1 + (1/φ)(1/c_{T−1} − 1)

    This is nearly φ c while φ c is small: increase c when you decrease η.

    Args:
      c: c_{T−1} in [0, 1].
      factor: φ > 0, with η_T = η_{T−1}/φ.

    Returns:
      c_T in [0, 1].

    Examples:
      1/c = 1 + 9/9 = 2:

      >>> from spa_optax import theory
      >>> print(theory.balanced_averaging(0.1, 9.0))
      0.5

    References:
      arXiv:2010.00406, Section 5 (Insight 2), whose title, "Reduce c_k", should read "increase".
    """
    c, factor = _arrays(c, factor)
    return c * factor / (c * factor + 1 - c)


def noise_weight(eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The weight of E‖g_k‖² in the step equation with the augmented function.

        (1 + ηL(1 − c)/(c(2 − c))) L/2

    The weight for SGD is L/2, and for SPA without the augmentation L. The formula assumes that
    ⟨∇f(x_k), x_k − x_{k−1}⟩ is 0 on average, as it is when noise dominates.

    Args:
      eta: η > 0.
      c: c in (0, 1].
      smoothness: L > 0.

    Returns:
      The weight; L at `max_learning_rate`.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.noise_weight(0.75, 0.5, 1.0), theory.noise_weight(9.0, 1.0, 1.0))
      0.75 0.5

    References:
      arXiv:2010.00406, Section 4 (Insight 1) and appendix "Augmented Lyapunov".
    """
    eta, c, L = _arrays(eta, c, smoothness)
    return (1 + eta * L * (1 - c) / (c * (2 - c))) * L / 2


def augmentation(eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The weight ρ of ‖x_{k+1} − x_k‖² that is added to Λ_{k+1} to make the augmented function.

        ρ = L/(2ηc²) [L(1 − c)/(c(2 − c)) − 1/η]

    ρ solves ρ(1 − c)² + `step_weight` = ρ. Then Λ + ρ‖x_{k+1} − x_k‖² accounts for the noise in the
    momentum while it decays.

    Args:
      eta: η > 0.
      c: c in (0, 1].
      smoothness: L > 0.

    Returns:
      ρ; at most 0 for η up to `max_learning_rate`.

    Examples:
      ½/(1·¼)·[½/¾ − 1] = 2·(−⅓):

      >>> from spa_optax import theory
      >>> print(f"{theory.augmentation(1.0, 0.5, 1.0):.4f}")
      -0.6667

    References:
      arXiv:2010.00406, Section 4 (Insight 1) and appendix "Augmented Lyapunov".
    """
    eta, c, L = _arrays(eta, c, smoothness)
    return L / (2 * eta * c**2) * (L * (1 - c) / (c * (2 - c)) - 1 / eta)


def augmented_lyapunov(
    f_z: ArrayLike,
    f_x: ArrayLike,
    sq_step: ArrayLike,
    *,
    eta: ArrayLike,
    c: ArrayLike,
    smoothness: ArrayLike,
    f_star: ArrayLike = 0.0,
) -> Float[Array, "..."]:
    """The Lyapunov function of SPA with constants, augmented to account for cancelled noise.

        Λ_{k+1} + ρ ‖x_{k+1} − x_k‖²

    Args:
      f_z: f(z_{k+1}).
      f_x: f(x_k).
      sq_step: ‖x_{k+1} − x_k‖².
      eta: η > 0.
      c: c in (0, 1].
      smoothness: L > 0.
      f_star: f*.

    Returns:
      `lyapunov` + `augmentation` · ‖x_{k+1} − x_k‖².

    Examples:
      At c = 1 it is that of SGD, f/η²:

      >>> from spa_optax import theory
      >>> float(theory.augmented_lyapunov(3.0, 2.0, 1.0, eta=0.5, c=1.0, smoothness=1.0))
      12.0

    References:
      arXiv:2010.00406, Section 4 (Insight 1) and appendix "Augmented Lyapunov".
    """
    plain = lyapunov(
        f_z, f_x, sq_step, eta=eta, c=c, c_next=c, smoothness=smoothness, f_star=f_star
    )
    return plain + augmentation(eta, c, smoothness) * jnp.asarray(sq_step, float)


def sgdm_bound(
    num_steps: ArrayLike,
    eta: ArrayLike,
    c: ArrayLike,
    *,
    smoothness: ArrayLike,
    gap: ArrayLike,
    grad_bound: ArrayLike,
) -> Float[Array, "..."]:
    """A bound on the mean of ½(‖∇f(x_k)‖² + ‖∇f(z_k)‖²) over the first T steps, η and c constant.

        Δ/(ηT) + (L/T)(1/c − 1)Δ + ηLG²

    The bound holds for η ≤ `max_learning_rate`. It is the middle term plus 2G√(LΔ/T) at
    `optimal_learning_rate`, or plus (LΔ + G²)/√T at `conservative_learning_rate`.

    Args:
      num_steps: T ≥ 1.
      eta: η > 0.
      c: c in (0, 1].
      smoothness: L > 0.
      gap: Δ = f(x_0) − f*.
      grad_bound: G, with E‖g_k‖² ≤ G².

    Returns:
      The bound.

    Examples:
      1/(½·4) + (1/4)(2 − 1) + ½ = 1.25:

      >>> from spa_optax import theory
      >>> print(theory.sgdm_bound(4, 0.5, 0.5, smoothness=1.0, gap=1.0, grad_bound=1.0))
      1.25

    References:
      arXiv:2010.00406, appendix "Telescoping".
    """
    T, eta, c, L, gap, G = _arrays(num_steps, eta, c, smoothness, gap, grad_bound)
    return gap / (eta * T) + L / T * (1 / c - 1) * gap + eta * L * G**2


def sgdm_variance_bound(
    num_steps: ArrayLike,
    eta: ArrayLike,
    c: ArrayLike,
    *,
    smoothness: ArrayLike,
    gap: ArrayLike,
    variance: ArrayLike,
) -> Float[Array, "..."]:
    """`sgdm_bound` for gradients whose variance, not norm, is bounded: E‖g_k − ∇f(x_k)‖² ≤ σ².

        [Δ/(ηT) + (L/T)(1/c − 1)Δ + ηLσ²] / (1 − 2ηL)

    In E‖g_k‖² ≤ ‖∇f(x_k)‖² + σ² the first term is moved to the left side of the bound. The paper
    says that this can be done, but does not give the constants; they are derived here.

    Args:
      num_steps: T ≥ 1.
      eta: η > 0, at most `max_learning_rate`.
      c: c in (0, 1].
      smoothness: L > 0.
      gap: Δ = f(x_0) − f*.
      variance: σ².

    Returns:
      The bound; inf for ηL ≥ ½, where there is none.

    Examples:
      [1/(¼·4) + ¼·1·1 + ¼·1] / ½ = 3:

      >>> from spa_optax import theory
      >>> print(theory.sgdm_variance_bound(4, 0.25, 0.5, smoothness=1.0, gap=1.0, variance=1.0))
      3.0

    References:
      arXiv:2010.00406, appendix "Removing the bounded gradients assumption".
    """
    eta, L, variance = _arrays(eta, smoothness, variance)
    bound = sgdm_bound(num_steps, eta, c, smoothness=L, gap=gap, grad_bound=jnp.sqrt(variance))
    left = 1 - 2 * eta * L
    return jnp.where(left > 0, bound / jnp.where(left > 0, left, 1), jnp.inf)


def sgd_bound(
    num_steps: ArrayLike,
    eta: ArrayLike,
    *,
    smoothness: ArrayLike,
    gap: ArrayLike,
    grad_bound: ArrayLike,
) -> Float[Array, "..."]:
    """A bound on the mean of ‖∇f(x_k)‖² over the first T steps of SGD, η constant.

        Δ/(ηT) + ½ηLG²

    Args:
      num_steps: T ≥ 1.
      eta: η > 0.
      smoothness: L > 0.
      gap: Δ = f(x_0) − f*.
      grad_bound: G, with E‖g_k‖² ≤ G².

    Returns:
      The bound; G√(2LΔ/T) at `sgd_optimal_learning_rate`.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.sgd_bound(4, 0.5, smoothness=1.0, gap=1.0, grad_bound=1.0))
      0.75

    References:
      arXiv:2010.00406, appendix "SGD reference proof", whose sum over k = 0, …, T has T + 1 terms.
    """
    T, eta, L, gap, G = _arrays(num_steps, eta, smoothness, gap, grad_bound)
    return gap / (eta * T) + eta * L * G**2 / 2


def optimal_learning_rate(
    num_steps: ArrayLike, *, smoothness: ArrayLike, gap: ArrayLike, grad_bound: ArrayLike
) -> Float[Array, "..."]:
    """The η that makes `sgdm_bound` smallest.

        η = √(Δ/(TLG²))

    Args:
      num_steps: T ≥ 1.
      smoothness: L > 0.
      gap: Δ = f(x_0) − f*.
      grad_bound: G, with E‖g_k‖² ≤ G².

    Returns:
      η; the bound holds where it is at most `max_learning_rate`.

    Examples:
      >>> from spa_optax import theory
      >>> eta = theory.optimal_learning_rate(100, smoothness=4.0, gap=1.0, grad_bound=0.5)
      >>> print(f"{eta:.3f}")
      0.100

    References:
      arXiv:2010.00406, appendix "Telescoping".
    """
    T, L, gap, G = _arrays(num_steps, smoothness, gap, grad_bound)
    return jnp.sqrt(gap / (T * L)) / G


def sgd_optimal_learning_rate(
    num_steps: ArrayLike, *, smoothness: ArrayLike, gap: ArrayLike, grad_bound: ArrayLike
) -> Float[Array, "..."]:
    """The η that makes `sgd_bound` smallest.

        η = √(2Δ/(TLG²))

    Args:
      num_steps: T ≥ 1.
      smoothness: L > 0.
      gap: Δ = f(x_0) − f*.
      grad_bound: G, with E‖g_k‖² ≤ G².

    Returns:
      η.

    Examples:
      >>> from spa_optax import theory
      >>> eta = theory.sgd_optimal_learning_rate(100, smoothness=4.0, gap=0.5, grad_bound=0.5)
      >>> print(f"{eta:.3f}")
      0.100

    References:
      arXiv:2010.00406, appendix "SGD reference proof".
    """
    return jnp.sqrt(2.0) * optimal_learning_rate(
        num_steps, smoothness=smoothness, gap=gap, grad_bound=grad_bound
    )


def conservative_learning_rate(num_steps: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The paper's "more realistic" η, which depends on neither the gap nor G.

        η = 1/(L√T)

    Args:
      num_steps: T ≥ 1.
      smoothness: L > 0.

    Returns:
      η.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.conservative_learning_rate(4, 2.0))
      0.25

    References:
      arXiv:2010.00406, appendix "Telescoping".
    """
    T, L = _arrays(num_steps, smoothness)
    return 1 / (L * jnp.sqrt(T))


def sgd_lyapunov(f_x: ArrayLike, *, eta: ArrayLike, f_star: ArrayLike = 0.0) -> Float[Array, "..."]:
    """The Lyapunov function of SGD.

        Λ_{k+1} = [f(x_{k+1}) − f*]/η_k²

    The step equation: ‖∇f(x_k)‖²/η_k ≤ Λ_k − E Λ_{k+1} + (L/2) E‖g_k‖² + R_k (`sgd_remainder`).

    Args:
      f_x: f(x_{k+1}).
      eta: η_k > 0.
      f_star: f*.

    Returns:
      Λ_{k+1}.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.sgd_lyapunov(3.0, eta=0.5, f_star=1.0))
      8.0

    References:
      arXiv:2010.00406, Section 3.
    """
    f_x, eta, f_star = _arrays(f_x, eta, f_star)
    return (f_x - f_star) / eta**2


def sgd_remainder(
    f_x: ArrayLike, *, eta: ArrayLike, eta_prev: ArrayLike, f_star: ArrayLike = 0.0
) -> Float[Array, "..."]:
    """The error that a change of η adds to the step equation of SGD (`sgd_lyapunov`).

        R_k = (1/η_k² − 1/η_{k−1}²)[f(x_k) − f*]

    Args:
      f_x: f(x_k).
      eta: η_k > 0.
      eta_prev: η_{k−1} > 0.
      f_star: f*.

    Returns:
      R_k.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.sgd_remainder(2.0, eta=0.5, eta_prev=1.0))
      6.0

    References:
      arXiv:2010.00406, Section 3, which prints f(z_k), although SGD has no z.
    """
    f_x, eta, eta_prev, f_star = _arrays(f_x, eta, eta_prev, f_star)
    return (1 / eta**2 - 1 / eta_prev**2) * (f_x - f_star)


def estimate_smoothness(
    loss: Callable[[PyTree], ArrayLike],
    params: PyTree,
    *,
    key: Array,
    num_iterations: int = 100,
) -> Float[Array, ""]:
    """The largest |eigenvalue| of the Hessian of a loss, by power iteration.

        v ← Hv/‖Hv‖      |λ| ≈ ‖Hv‖

    Each iteration is one Hessian-vector product: the Hessian is never formed. ‖Hv‖ approaches |λ|
    from below. The result is the curvature at `params`. The L of the theorems bounds the curvature
    everywhere, and for the loss of a network there is often no such L.

    Args:
      loss: a scalar function of the params, twice differentiable.
      params: the point at which to take the Hessian, a tree of real floating-point arrays.
      key: a key of `jax.random`, for the first direction.
      num_iterations: at least 1.

    Returns:
      An estimate of max |λ|.

    Raises:
      ValueError: if `num_iterations` is not an integer ≥ 1, or `params` are not real floating-point
        arrays.

    Examples:
      ½(3x² − 5y²):

      >>> import jax
      >>> from spa_optax import theory
      >>> loss = lambda p: (3 * p["x"] ** 2 - 5 * p["y"] ** 2) / 2
      >>> L = theory.estimate_smoothness(loss, {"x": 1.0, "y": 1.0}, key=jax.random.key(0))
      >>> print(f"{L:.3f}")
      5.000

    References:
      Pearlmutter, Fast Exact Multiplication by the Hessian, 1994.
    """
    num_iterations = check_steps("num_iterations", num_iterations)
    params = jax.tree.map(jnp.asarray, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            at = jax.tree_util.keystr(path) or "its root"
            raise ValueError(
                f"`params` must be real floating-point arrays, got {leaf.dtype} at {at}"
            )

    def iterate(v: PyTree, _: None) -> tuple[PyTree, Float[Array, ""]]:
        hessian_v = jax.jvp(jax.grad(loss), (params,), (v,))[1]
        norm = jnp.asarray(optax.tree.norm(hessian_v))
        return jax.tree.map(lambda leaf: leaf / jnp.where(norm > 0, norm, 1), hessian_v), norm

    v = optax.tree.random_like(key, params)
    v = jax.tree.map(lambda leaf: leaf / optax.tree.norm(v), v)
    return jax.lax.scan(iterate, v, length=num_iterations)[1][-1]


def forward_recursion(
    alphas: npt.ArrayLike, betas: npt.ArrayLike, *, eta0: float | None = None
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The paper's own map from SGD+M to SPA, a recursion forward in k, in float64.

        η_{k+1} = (η_k − α_k) / β_{k+1}      c_{k+1} = α_k / η_k

    η_0 is free, but only η_0 = Σ_j α_j β_1⋯β_j keeps η bounded: each step multiplies a deviation
    from it by 1/β. `hyperparams_from_sgdm` finds that solution by looking ahead.

    Args:
      alphas: α_k for k = 0, …, n − 1, shape (n,).
      betas: β_k, shape (n,), or one number for all. β_0 is used only for the default of η_0.
      eta0: η_0. None means α_0 / (1 − β_0), which is correct while α and β are constant.

    Returns:
      η_k and c_{k+1} for k = 0, …, n − 1: float64 arrays of shape (n,). They are inf or NaN where
      the recursion has divided by zero or overflowed.

    Raises:
      ValueError: if `alphas` is not of shape (n,) or `betas` does not fit it.

    Examples:
      If α is halved at k = 1, η grows, as η ← (η − ½)·2: 2, 2, 3, 5, … (Figure 1(a)).

      >>> from spa_optax import theory
      >>> eta, c = theory.forward_recursion([1.0, 0.5, 0.5, 0.5], 0.5)
      >>> print(eta, c.round(3))
      [2. 2. 3. 5.] [0.5   0.25  0.167 0.1  ]

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1.
    """
    alpha = np.asarray(alphas, np.float64)
    if alpha.ndim != 1:
        raise ValueError(f"`alphas` must have shape (n,), got {alpha.shape}")
    if np.shape(betas) not in ((), alpha.shape):
        raise ValueError(
            f"`betas` must be a number or have shape {alpha.shape}, got {np.shape(betas)}"
        )
    beta = np.broadcast_to(np.asarray(betas, np.float64), alpha.shape)
    eta = np.empty_like(alpha)
    with np.errstate(all="ignore"):  # deviations grow as 1/β^k, which may overflow
        for k in range(len(alpha)):
            if k > 0:
                eta[k] = (eta[k - 1] - alpha[k - 1]) / beta[k]
            else:
                eta[0] = alpha[0] / (1 - beta[0]) if eta0 is None else eta0
        return eta, alpha / eta
