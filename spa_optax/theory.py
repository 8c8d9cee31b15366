"""The paper's theory as functions: Defazio, Momentum via Primal Averaging, arXiv:2010.00406.

Notation: the SPA step k uses η_k and c_{k+1}; f is L-smooth (`smoothness`) with infimum f*
(`f_star`); g_k is the stochastic gradient at x_k; `gap` is f(x_0) − f*. Scalars and arrays
broadcast; all but `forward_recursion` and `audit` may be jitted and vmapped. At c = 1 a limit that
is infinite is inf, and nothing is NaN.

Several formulas are printed with slips in the paper. They stand here corrected, as tests against
the inequalities themselves bear out, and the docstrings say where.
"""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from spa_optax._checks import check_averaging, check_rate, check_steps
from spa_optax._coast import at_count, foreseen_momentum, foreseen_rate, look_ahead
from spa_optax._convert import Foreseen

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _array(*values: ArrayLike) -> list[Float[Array, "..."]]:
    return [jnp.asarray(value, float) for value in values]


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
    """The Lyapunov function of SPA, which a step decreases but for noise and `remainder`.

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
    f_z, f_x, sq_step, eta, c, c_next, L, f_star = _array(
        f_z, f_x, sq_step, eta, c, c_next, smoothness, f_star
    )
    return (
        (f_z - f_star) / eta**2
        + L / eta * (1 / c - 1) * (f_x - f_star)
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
      R_k; 0 where nothing has changed.

    Examples:
      η halved from 1, c = ½: (2·1 − 1·1)·1 + (4 − 1)·2 = 7.

      >>> from spa_optax import theory
      >>> change = {"eta": 0.5, "eta_prev": 1.0, "c": 0.5, "c_prev": 0.5}
      >>> float(theory.remainder(1.0, 2.0, **change, smoothness=1.0))
      7.0

    References:
      arXiv:2010.00406, Section 3.1.
    """
    f_x_prev, f_z, eta, eta_prev, c, c_prev, L, f_star = _array(
        f_x_prev, f_z, eta, eta_prev, c, c_prev, smoothness, f_star
    )
    of_x = L / eta * (1 / c - 1) - L / eta_prev * (1 / c_prev - 1)
    return of_x * (f_x_prev - f_star) + (1 / eta**2 - 1 / eta_prev**2) * (f_z - f_star)


def step_weight(
    *, eta: ArrayLike, eta_prev: ArrayLike, c: ArrayLike, smoothness: ArrayLike
) -> Float[Array, "..."]:
    """The weight of ‖x_k − x_{k−1}‖² in the step equation: helpful where negative.

        (L/2) [(1/c_k − 1 + η_k L)(1/c_k − 1)/η_k² + (L/η_k)(1/c_k − 1)² − 1/(η_{k−1}² c_k²)]

    Args:
      eta: η_k > 0.
      eta_prev: η_{k−1} > 0.
      c: c_k in (0, 1].
      smoothness: L > 0.

    Returns:
      The weight, the factor L/2 included. For constants it is 0 at `max_learning_rate`; for η
      falling by r in one step at `max_decay_ratio`.

    Examples:
      ½ [(1 + 1)·1 + 1·1² − 4] = −½:

      >>> from spa_optax import theory
      >>> float(theory.step_weight(eta=1.0, eta_prev=1.0, c=0.5, smoothness=1.0))
      -0.5

    References:
      arXiv:2010.00406, Section 3.1, the step equation.
    """
    eta, eta_prev, c, L = _array(eta, eta_prev, c, smoothness)
    m = 1 / c - 1
    return L / 2 * ((m + eta * L) * m / eta**2 + L / eta * m**2 - 1 / (eta_prev**2 * c**2))


def max_learning_rate(c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The largest constant η for which the bound holds: `step_weight` ≤ 0.

        η ≤ c (2 − c) / (L (1 − c))

    Sufficient for a worst-case bound, not necessary: with a measured curvature for L, recipes that
    train well have an η several to many times as large.

    Args:
      c: c in [0, 1].
      smoothness: L > 0.

    Returns:
      The limit; inf at c = 1, where the condition is void.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.max_learning_rate(0.5, 1.0), theory.max_learning_rate(1.0, 1.0))
      1.5 inf

    References:
      arXiv:2010.00406, Section 6 and appendix "Telescoping", which print (2 − c)/(L c (1 − c)), and
      Section 4, 2c(2 − c)/(L(1 − c)). Appendix "Augmented Lyapunov" has it right.
    """
    c, L = _array(c, smoothness)
    return c * (2 - c) / (L * (1 - c))


def max_decay_ratio(
    eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike, *, simplified: bool = False
) -> Float[Array, "..."]:
    """The largest r by which η may be divided in one step: `step_weight` ≤ 0 with η_k = η_{k−1}/r.

        r = (√(η²L² + 4) − ηL) / (2 (1 − c))
        simplified:  r = (√(η²L²(1 − c)⁴ + 4(1 − c)) − ηL(1 − c)²) / (2 (1 − c))

    The simplified form is the paper's, by way of η_k L ≤ 1, and not larger where that holds.

    Args:
      eta: η_{k−1} > 0.
      c: c_k in [0, 1].
      smoothness: L > 0.
      simplified: whether to take the paper's form.

    Returns:
      r; below 1 where η is over `max_learning_rate` already and no decay is allowed; inf at c = 1.

    Examples:
      The paper's own example, c = ηL = 0.1, for which it says 1.01:

      >>> from spa_optax import theory
      >>> print(f"{theory.max_decay_ratio(0.1, 0.1, 1.0, simplified=True):.4f}")
      1.0101
      >>> print(f"{theory.max_decay_ratio(0.1, 0.1, 1.0):.4f}")
      1.0569

    References:
      arXiv:2010.00406, Section 6 (Insight 3), where 4(1 − c)c is printed under the root for
      4(1 − c): that would be 0.29 in the example.
    """
    eta, c, L = _array(eta, c, smoothness)
    # Each root times its conjugate: no cancellation, and no 0/0 at c = 1.
    if simplified:
        linear = eta * L * (1 - c) ** 2
        return 2 / (linear + jnp.sqrt(linear**2 + 4 * (1 - c)))
    return 2 / ((1 - c) * (eta * L + jnp.sqrt((eta * L) ** 2 + 4)))


def balanced_averaging(c: ArrayLike, factor: ArrayLike) -> Float[Array, "..."]:
    """The c that keeps the first coefficient of `remainder` at 0 when η is divided by a factor.

        1/c_T = 1 + (1/φ)(1/c_{T−1} − 1)

    Nearly φ c while that is small: increase c when you decrease η.

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
    c, factor = _array(c, factor)
    return c * factor / (c * factor + 1 - c)


def noise_weight(eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The weight of E‖g_k‖² in the step equation with the augmented function, when g ⟂ last step.

        (1 + ηL(1 − c)/(c(2 − c))) L/2

    L/2 is SGD's; L is SPA's without the augmentation. The condition is that
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
    eta, c, L = _array(eta, c, smoothness)
    return (1 + eta * L * (1 - c) / (c * (2 - c))) * L / 2


def augmentation(eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The weight ρ of ‖x_{k+1} − x_k‖² that is added to Λ_{k+1} to make the augmented function.

        ρ = L/(2ηc²) [L(1 − c)/(c(2 − c)) − 1/η]

    It solves ρ(1 − c)² + `step_weight` = ρ, so that Λ + ρ‖x_{k+1} − x_k‖² carries the noise that
    momentum has taken in, as it decays.

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
    eta, c, L = _array(eta, c, smoothness)
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
    """The Lyapunov function of SPA with constants, augmented to account for noise cancelled.

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
      At c = 1 what is left is SGD's, f/η²:

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

    Holds for η ≤ `max_learning_rate`. At `optimal_learning_rate` it is 2G√(LΔ/T) and the middle
    term; at `conservative_learning_rate` (LΔ + G²)/√T and the middle term.

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
    T, eta, c, L, gap, G = _array(num_steps, eta, c, smoothness, gap, grad_bound)
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
    """`sgdm_bound` for gradients of bounded variance, E‖g_k − ∇f(x_k)‖² ≤ σ², not bounded norm.

        [Δ/(ηT) + (L/T)(1/c − 1)Δ + ηLσ²] / (1 − 2ηL)

    E‖g_k‖² = ‖∇f(x_k)‖² + σ², of which the first part is moved to the left. The paper says that
    this can be done and leaves the constants out; these are ours.

    Args:
      num_steps: T ≥ 1.
      eta: η > 0, at most `max_learning_rate`.
      c: c in (0, 1].
      smoothness: L > 0.
      gap: Δ = f(x_0) − f*.
      variance: σ².

    Returns:
      The bound; inf for ηL ≥ ½, where it is void.

    Examples:
      [1/(¼·4) + ¼·1·1 + ¼·1] / ½ = 3:

      >>> from spa_optax import theory
      >>> print(theory.sgdm_variance_bound(4, 0.25, 0.5, smoothness=1.0, gap=1.0, variance=1.0))
      3.0

    References:
      arXiv:2010.00406, appendix "Removing the bounded gradients assumption".
    """
    eta, L, variance = _array(eta, smoothness, variance)
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
    T, eta, L, gap, G = _array(num_steps, eta, smoothness, gap, grad_bound)
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
    T, L, gap, G = _array(num_steps, smoothness, gap, grad_bound)
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
    """The paper's "more realistic" η, which needs to know neither the gap nor G.

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
    T, L = _array(num_steps, smoothness)
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
    f_x, eta, f_star = _array(f_x, eta, f_star)
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
      arXiv:2010.00406, Section 3, where f(z_k) is printed, of which SGD has none.
    """
    f_x, eta, eta_prev, f_star = _array(f_x, eta, eta_prev, f_star)
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
    from below. This is the curvature here, not the L of the theorems, which bounds it everywhere:
    for loss functions of networks there often is none.

    Args:
      loss: a scalar function of the params, twice differentiable.
      params: where to take the Hessian; real floating-point arrays.
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

    η_0 is free, and all but one choice of it blow up: each step multiplies a deviation by 1/β. The
    one is η_0 = Σ_j α_j β_1⋯β_j, which `hyperparams_from_sgdm` finds by looking ahead.

    Args:
      alphas: α_k for k = 0, …, n − 1, shape (n,).
      betas: β_k likewise, or one number for all. β_0 is not used but for the default of η_0.
      eta0: η_0. None means α_0 / (1 − β_0), which is right as long as nothing changes.

    Returns:
      η_k and c_{k+1} for k = 0, …, n − 1: float64 arrays of shape (n,). inf or NaN where the
      recursion has divided by zero or overflowed.

    Raises:
      ValueError: if `alphas` is not of shape (n,) or `betas` does not fit it.

    Examples:
      Dividing α by 2 at k = 1 makes η grow, here as (η − ½)·2: 2, 2, 3, 5, … (Figure 1(a)).

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
    with np.errstate(all="ignore"):  # 1/β^k overflows: that is the recursion's own doing
        for k in range(len(alpha)):
            if k > 0:
                eta[k] = (eta[k - 1] - alpha[k - 1]) / beta[k]
            else:
                eta[0] = alpha[0] / (1 - beta[0]) if eta0 is None else eta0
        return eta, alpha / eta


class Audit(NamedTuple):
    """What a schedule amounts to, step by step: float64 arrays over k = 0, …, n − 1."""

    eta: Float[np.ndarray, " n"]  # η_k
    c: Float[np.ndarray, " n"]  # c_{k+1}, which step k uses
    alpha: Float[np.ndarray, " n"]  # α_k of SGD+M
    beta: Float[np.ndarray, " n"]  # β_k of SGD+M; of SPA, NaN at k = 0: it is free
    remainder_x: Float[np.ndarray, " n"]  # R_k's coefficient of f(x_{k−1}) − f*, over L
    remainder_z: Float[np.ndarray, " n"]  # R_k's coefficient of f(z_k) − f*
    step_weight: Float[np.ndarray, " n"] | None  # None without a smoothness
    max_learning_rate: Float[np.ndarray, " n"] | None
    max_decay_ratio: Float[np.ndarray, " n"] | None  # of η_{k−1}/η_k

    def breaches(self) -> dict[str, Bool[np.ndarray, " n"]]:
        """The steps at which each condition breaks; those that rest on the bound come last."""
        before, after = self.alpha[:-2], self.alpha[2:]
        spike = np.zeros(len(self.alpha), bool)
        spike[1:-1] = (self.alpha[1:-1] > 2 * before) & (self.alpha[1:-1] > 2 * after)
        # Written so that NaN fails. β_0 is free.
        in_range = (self.eta >= 0) & (self.eta < np.inf) & (self.c >= 0) & (self.c <= 1)
        in_range[1:] &= ~np.isnan(self.beta[1:])
        found = {
            "a hyper-parameter is NaN or out of range": ~in_range,
            "α spikes to over twice its neighbours": spike,
            "β is 1 or more": self.beta >= 1,
            "β is negative": self.beta < 0,
            "R_k's first coefficient is positive": self.remainder_x > 0,
            "R_k's second coefficient (SGD's too) is positive": self.remainder_z > 0,
        }
        if self.step_weight is not None and self.max_learning_rate is not None:
            found["the weight of ‖x_k − x_{k−1}‖² is positive"] = self.step_weight > 0
            found["η is over the limit for constants"] = self.eta > self.max_learning_rate
        return found

    def report(self) -> str:
        """The audit in words: what is beyond doubt first, then what rests on the bound."""

        def span(values: np.ndarray) -> str:
            known = values[~np.isnan(values)]
            return f"{known.min():.4g} to {known.max():.4g}" if len(known) else "undefined"

        lines = [
            f"{len(self.eta):,} steps: η {span(self.eta)}, c {span(self.c)}",
            f"as SGD+M: α {span(self.alpha)}, β {span(self.beta)}",
        ]
        lines += self._anticipations()
        by_size = {"first": self.remainder_x, "second": self.remainder_z}
        found = self.breaches()
        out_of_range = next(iter(found.values()))
        num_beyond_doubt = len(found) - (0 if self.step_weight is None else 2)
        for name, steps in list(found.items())[:num_beyond_doubt]:
            if steps.any():
                line = _told(name, steps)
                if name.startswith("R_k"):
                    line += f", largest at {int(np.argmax(by_size[name.split()[1]])):,}"
                lines.append(line)
        if self.max_decay_ratio is not None and not out_of_range.all():
            lines += [
                "By the bound, with this smoothness. Its conditions are sufficient, for the worst",
                "case: recipes that train well have had 3 to 77 times the limit on η.",
            ]
            rest = list(found.items())[num_beyond_doubt:]
            broken = [(name, steps) for name, steps in rest if steps.any()]
            for name, steps in broken:
                lines.append(f"- {_told(name, steps)}")
                k = int(np.argmax(steps))
                if "weight" in name and self.eta[k] != self.eta[max(k - 1, 0)]:
                    ratio, allowed = self.eta[k - 1] / self.eta[k], self.max_decay_ratio[k]
                    lines[-1] += f"; η is divided by {ratio:.4g} there, {allowed:.4g} is allowed"
            if not broken:
                other = "other " if out_of_range.any() else ""
                lines.append(f"- they hold at every {other}step")
        return "\n".join(lines)

    def _drops(self) -> list[tuple[int, int]]:
        """The steps at which α drops by half or more, and those at which c begins to rise ahead."""
        before = np.nan_to_num(self.alpha[:-1])
        largest = before.max(initial=0)
        drops = 1 + np.flatnonzero((self.alpha[1:] < before / 2) & (before > 1e-3 * largest))
        found = []
        for k in drops.tolist():
            ahead = self.c[max(k - 20_000, 0) : k]
            # Rising without a break up to the drop, from where it had stood.
            falls = np.flatnonzero(np.diff(ahead) <= 1e-3 * ahead[1:])
            begin = falls[-1] + 1 if len(falls) else 0
            # A change all at once is no foresight.
            if len(ahead) - begin > 3 and ahead[-1] > 1.1 * ahead[begin]:
                found.append((k, k - len(ahead) + int(begin)))
        return found

    def _anticipations(self) -> list[str]:
        lines = [
            f"c anticipates the drop of α at step {k:,}: over {k - 1 - begin} steps it rises from "
            f"{self.c[begin]:.3g} to {self.c[k - 1]:.3g}"
            for k, begin in self._drops()
        ]
        more = [f"and so it does at {len(lines) - 3} more drops"] if len(lines) > 3 else []
        return lines[:3] + more

    def plot(self) -> "Figure":
        """η, c, α and β over the steps, and α and c close to the first drop that c anticipates.

        Steps that break a condition are marked. Needs matplotlib.
        """
        import matplotlib.pyplot as plt

        drops = self._drops()
        size: Any = {"ncols": 3, "figsize": (13, 5)} if drops else {"ncols": 2, "figsize": (9, 5)}
        figure, axes = plt.subplots(2, sharex="col", layout="constrained", **size)
        # At most some thousand points, but every one at which something changes.
        steps = np.arange(len(self.eta))
        changes = np.abs(np.diff(self.alpha, prepend=self.alpha[0])) > 1e-3 * self.alpha
        keep = (steps % max(1, len(steps) // 2_000) == 0) | changes | np.roll(changes, -1)
        if keep.sum() > 100_000:
            keep = steps % (len(steps) // 50_000) == 0
        values = {"η": self.eta, "c": self.c, "α = ηc": self.alpha, "β": self.beta}
        for axis, (name, value) in zip(axes[:, :2].T.ravel(), values.items(), strict=True):
            axis.plot(steps[keep], value[keep], color="C0")
            axis.set_ylabel(name)
            positive = value[value > 0]
            if len(positive) and positive.max() > 20 * positive.min():
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        _, spikes, overs, *_ = self.breaches().values()
        axes[0, 1].plot(steps[spikes], self.alpha[spikes], "o", color="C3")
        axes[1, 1].plot(steps[overs], self.beta[overs], "o", color="C3")
        for axis in axes[1]:
            axis.set_xlabel("step")
        if drops:
            k, begin = drops[0]
            near = slice(max(begin - 20, 0), k + 20)
            for axis, name in zip(axes[:, 2], ("α = ηc", "c"), strict=True):
                axis.plot(steps[near], values[name][near], marker=".", color="C0")
                axis.set_ylabel(name)
                axis.set_ylim(bottom=0)
            axes[0, 2].set_title(f"close to the drop at step {k:,}")
        return figure


def _change(now: np.ndarray, before: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A difference, 0 where it is within float32 rounding of the hyper-parameters, or not known."""
    rounding = np.abs(now - before) <= 1e-6 * np.maximum(np.abs(now), np.abs(before))
    return np.where(known & ~rounding, now - before, 0)


def _told(name: str, steps: np.ndarray) -> str:
    return f"{name}: first at step {int(np.argmax(steps)):,}, {int(steps.sum()):,} in all"


def audit(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule,
    num_steps: int,
    *,
    smoothness: float | None = None,
) -> Audit:
    """What the theory says of a schedule, step by step.

    For the recipe of SGD+M that you have: `audit(*hyperparams_from_sgdm(α, β), num_steps)`, which
    takes O(n) whatever β.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k that can be vmapped.
      averaging: c_{k+1} in [0, 1], likewise.
      num_steps: how many steps to look at, n ≥ 1.
      smoothness: L, for the conditions of the bound. `estimate_smoothness` tells the curvature at
        one point, which is not the L of the theorem. None leaves those out.

    Returns:
      An `Audit`, with `report()` and `plot()`.

    Raises:
      ValueError: if a number is out of range, or `num_steps` is not an integer.

    Examples:
      Figure 1(e): η divided by 10 and c multiplied by 10, at once, makes α spike for one step.

      >>> from spa_optax import stagewise, theory
      >>> audit = theory.audit(*stagewise(10.0, 0.1, [20]), 100)
      >>> print(audit.report())
      100 steps: η 1 to 10, c 0.1 to 1
      as SGD+M: α 1 to 10, β 0 to 0.9
      α spikes to over twice its neighbours: first at step 19, 1 in all
      R_k's second coefficient (SGD's too) is positive: first at step 20, 1 in all, largest at 20

    References:
      arXiv:2010.00406, Theorem 1, Sections 3.1 (R_k and the step weight), 5 and 6.
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    num_steps = check_steps("num_steps", num_steps)
    if smoothness is not None and not 0 < smoothness < float("inf"):
        raise ValueError(f"`smoothness` must be None or finite and > 0, got {smoothness!r}")
    counts = jnp.arange(num_steps, dtype=jnp.int32)

    def over(name: str, h: optax.ScalarOrSchedule) -> np.ndarray:
        return np.asarray(jax.jit(jax.vmap(at_count(name, h)))(counts), np.float64)

    of_sgdm = [h.sgdm for h in (learning_rate, averaging) if isinstance(h, Foreseen)]
    if len(of_sgdm) == 2 and of_sgdm[0] is of_sgdm[1]:
        rates, momenta = of_sgdm[0]
        alpha, beta = over("learning_rate", rates), over("momentum", momenta)
        w = float(jax.jit(lambda k: look_ahead(rates, momenta, k).coast)(counts[-1]))
        # η_k = α_k + w_{k+1}, w_k = β_k (α_k + w_{k+1}): backward, which is stable. What lies ahead
        # of a step counts as the look-ahead counts it.
        ahead = (foreseen_rate(jnp.asarray(alpha)), foreseen_momentum(jnp.asarray(beta)))
        products = zip(*(np.asarray(h, float)[::-1].tolist() for h in ahead), strict=True)
        coasts = itertools.accumulate(products, lambda w, ab: ab[1] * (ab[0] + w), initial=w)
        eta = alpha + np.array(list(coasts))[-2::-1]
        c = alpha / np.where(eta == 0, 1, eta)
    else:
        eta, c = over("learning_rate", learning_rate), over("averaging", averaging)
        alpha, beta = eta * c, None
    c_now = np.concatenate([c[:1], c[:-1]])  # c_k, with c_0 = c_1
    c_prev = np.concatenate([c_now[:1], c_now[:-1]])
    eta_prev = np.concatenate([eta[:1], eta[:-1]])
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta is None:
            beta = np.where(eta_prev == 0, 0, eta_prev / eta) * (1 - c_now)
            beta[0] = np.nan
        known = (eta > 0) & (eta_prev > 0) & (c_now > 0) & (c_prev > 0)
        inverse = lambda c, eta: (1 / c - 1) / eta
        of_x = _change(inverse(c_now, eta), inverse(c_prev, eta_prev), known)
        of_z = _change(1 / eta**2, 1 / eta_prev**2, known)
        if smoothness is None:
            return Audit(eta, c, alpha, beta, of_x, of_z, None, None, None)
        m = 1 / c_now - 1
        weight = (m + eta * smoothness) * m / eta**2 + smoothness / eta * m**2
        weight = smoothness / 2 * (weight - 1 / (eta_prev * c_now) ** 2)
        # Rounding of 0, as at c = 1 or at the limit, is no breach.
        weight = np.where(np.abs(weight) < 1e-9 * smoothness / (eta_prev * c_now) ** 2, 0, weight)
        root = np.sqrt((eta_prev * smoothness) ** 2 + 4)
        return Audit(
            eta,
            c,
            alpha,
            beta,
            of_x,
            of_z,
            step_weight=np.where(known, weight, 0),
            max_learning_rate=c * (2 - c) / (smoothness * (1 - c)),
            max_decay_ratio=2 / ((1 - c_now) * (eta_prev * smoothness + root)),
        )
