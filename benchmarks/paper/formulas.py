"""The paper's formulas as functions, its misprints corrected (arXiv:2010.00406).

    z_{k+1} = z_k − η_k g_k
    x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}      z_0 = x_0

    symbol                     argument     unit   range
    η_k, the learning rate     eta          x²/f   > 0
    c_k, the averaging         c            1      in (0, 1]; c_0 = c_1
    L, the smoothness          smoothness   f/x²   > 0; ‖∇f(x) − ∇f(y)‖ ≤ L ‖x − y‖
    f(x_k) − f*, f(z_k) − f*   f_x, f_z     f      ≥ 0; or over any lower bound of f
    Δ = f(x_0) − f*            gap          f      ≥ 0
    ‖x_{k+1} − x_k‖²           sq_step      x²     ≥ 0
    G, the size of gradients   grad_bound   f/x    ≥ 0
    T, the number of steps     num_steps    1      ≥ 1

`_prev` is index k − 1, `_next` k + 1; E is over the gradient g_k at x_k. At c = 1, SGD,
infinite limits are inf, not NaN. Arrays broadcast. All but `forward_recursion` can be
jitted and vmapped.
"""

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from bounds import max_learning_rate, step_weight, weight_of_f_x
from jaxtyping import Array, ArrayLike as Real, Float
from numpy.typing import ArrayLike
from optax import ScalarOrSchedule

from spa_optax import _arguments
from spa_optax._arguments import as_schedule
from spa_optax._schedules import SPAHyperparams, as_vectorized
from spa_optax._trees import is_known_true

Reals = Float[Array, "..."]

__all__ = [
    "forward_recursion",
    "lyapunov",
    "max_decay_ratio",
    "max_learning_rate",
    "momentum_drop",
    "noise_weight",
    "remainder",
    "sgdm_bound",
    "step_weight",
]


def _arrays(**values: Real) -> list[Reals]:
    """Raises ValueError where a value that is not traced is out of its range."""
    arrays = {name: jnp.asarray(value, float) for name, value in values.items()}
    for name, array in arrays.items():
        low, high = 0, np.inf
        if name == "num_steps":
            low = 1
        elif name.startswith(("f_", "sq_")):
            low = -np.inf
        elif name in ("c", "c_prev", "c_next"):
            high = 1
        if is_known_true(jnp.any(~((array >= low) & (array <= high)))):
            raise ValueError(
                f"`{name}` must be in [{low}, {high}], got {values[name]!r}"
            )
    return list(arrays.values())


def lyapunov(
    f_z: Real,
    f_x: Real,
    sq_step: Real,
    *,
    eta: Real,
    c: Real,
    c_next: Real,
    smoothness: Real,
    augmented: bool = False,
) -> Reals:
    """The Lyapunov function Λ_{k+1} (`f_z` is of z_{k+1}), and the step equation, for k
    ≥ 1.

        Λ_{k+1} = [f(z_{k+1}) − f*]/η_k² + (L/η_k)(1/c_k − 1)[f(x_k) − f*]
                  + w ‖x_{k+1} − x_k‖²
              w = L/(2 η_k² c_{k+1}²); augmented: times η/`max_learning_rate`
        (‖∇f(x_k)‖² + ‖∇f(z_k)‖²)/(2η_k)
            ≤ Λ_k − E Λ_{k+1} + L E‖g_k‖² + R_k + `step_weight` · ‖x_k − x_{k−1}‖²

    Section 3. If augmented (Insight 1; constant η and c), the last term is 0 and
    `noise_weight` replaces L. The paper's base case divides f(x_0) − E f(z_1) by η_0,
    and should divide by η_0².

    >>> known = {"eta": 0.5, "c": 0.5, "c_next": 0.5, "smoothness": 1.0}
    >>> print(*[lyapunov(3.0, 3.0, 3.0, **known, augmented=a) for a in (False, True)])
    42.0 26.0
    >>> # 3/½² + (1/½)(2 − 1)·3 + 3 w, where w is 1/(2·¼·¼) = 8, and 8·½/1½ = 2⅔
    """
    f_z, f_x, sq_step = _arrays(f_z=f_z, f_x=f_x, sq_step=sq_step)
    eta, c, c_next, L = _arrays(eta=eta, c=c, c_next=c_next, smoothness=smoothness)
    w = L / (2 * eta**2 * c_next**2)
    if augmented:
        w *= eta / max_learning_rate(c_next, L)
    return f_z / eta**2 + L * weight_of_f_x(eta, c) * f_x + w * sq_step


def remainder(
    f_x_prev: Real,
    f_z: Real,
    *,
    eta: Real,
    eta_prev: Real,
    c: Real,
    c_prev: Real,
    smoothness: Real,
) -> Reals:
    """The error R_k that a change of η or c adds to the step equation (Section 3.1).

        R_k = [(L/η_k)(1/c_k − 1) − (L/η_{k−1})(1/c_{k−1} − 1)] [f(x_{k−1}) − f*]
              + [1/η_k² − 1/η_{k−1}²] [f(z_k) − f*]

    SGD's R_k is the second term, of f(x_k), for which Section 3 prints f(z_k). Section
    5's title (Insight 2) should read "Increase c_k": the first term is 0 if (1/c_k −
    1)/η_k is constant.

    >>> known = {"eta": 0.5, "eta_prev": 1, "c": 0.5, "c_prev": 0.5, "smoothness": 1}
    >>> print(remainder(1, 2, **known))  # (2·1 − 1·1)·1 + (4 − 1)·2
    7.0
    """
    f_x_prev, f_z, L = _arrays(f_x_prev=f_x_prev, f_z=f_z, smoothness=smoothness)
    eta, eta_prev, c, c_prev = _arrays(eta=eta, eta_prev=eta_prev, c=c, c_prev=c_prev)
    of_x = L * (weight_of_f_x(eta, c) - weight_of_f_x(eta_prev, c_prev))
    return of_x * f_x_prev + (1 / eta**2 - 1 / eta_prev**2) * f_z


def noise_weight(eta: Real, c: Real, smoothness: Real) -> Reals:
    """(1 + η/`max_learning_rate`) L/2, the weight of E‖g_k‖² with the augmented
    function.

    Where E⟨∇f(x_k), x_k − x_{k−1}⟩ = 0. At small η momentum adds −L/2 to L (Insight 1:
    L/2).

    >>> print(noise_weight(0.75, 0.5, 1.0))  # (1 + ¾/1½)·½
    0.75
    """
    eta, c, L = _arrays(eta=eta, c=c, smoothness=smoothness)
    return (1 + eta / max_learning_rate(c, L)) * L / 2


def max_decay_ratio(
    eta: Real, c: Real, smoothness: Real, *, simplified: bool = False
) -> Reals:
    """The largest r by which one step may divide η: `step_weight` ≤ 0 at η_k = η/r, η =
    η_{k−1}.

        r = (√(η²L² + 4) − ηL) / (2 (1 − c))
        simplified:  r = (√(η²L²(1 − c)⁴ + 4(1 − c)) − ηL(1 − c)²) / (2 (1 − c))

    Section 6 (Insight 3) simplifies by η_k L ≤ 1. Under the root it prints 4(1 − c)c:
    0.29 below.

    >>> rs = [max_decay_ratio(0.1, 0.1, 1, simplified=s) for s in (False, True)]
    >>> print(*[f"{r:.4f}" for r in rs])
    1.0569 1.0101
    """
    eta, c, L = _arrays(eta=eta, c=c, smoothness=smoothness)
    # The conjugates, which have no 0/0 at c = 1.
    if simplified:
        linear = eta * L * (1 - c) ** 2
        return 2 / (linear + jnp.sqrt(linear**2 + 4 * (1 - c)))
    return 2 / ((1 - c) * (eta * L + ((eta * L) ** 2 + 4) ** 0.5))


def sgdm_bound(
    num_steps: Real,
    eta: Real,
    c: Real,
    *,
    smoothness: Real,
    gap: Real,
    grad_bound: Real,
    growth: Real = 0.0,
) -> Reals:
    """A bound on the mean of ½(‖∇f(x_k)‖² + ‖∇f(z_k)‖²) over T steps; η ≤
    `max_learning_rate`.

        [Δ/(ηT) + (L/T)(1/c − 1)Δ + ηLG²] / (1 − 2κηL)     if E‖g_k‖² ≤ G² + κ‖∇f(x_k)‖²

    κ is `growth`: G bounds the gradients at κ = 0, their standard deviation at κ = 1.
    At κ = 0 it is least at η = √(Δ/(TLG²)). For SGD's bound pass c = 1 and G/√2.
    (Appendix "Telescoping"; "SGD reference proof" prints the noise of T steps for a sum
    over T + 1.)

    >>> # 1 + (2 − 1)/4 + ¼
    >>> sgdm_bound(4, 0.25, 0.5, smoothness=1, gap=1, grad_bound=1).item()
    1.5
    """
    T, eta, c, L = _arrays(num_steps=num_steps, eta=eta, c=c, smoothness=smoothness)
    gap, G, growth = _arrays(gap=gap, grad_bound=grad_bound, growth=growth)
    bound = gap / (eta * T) + L / T * (1 / c - 1) * gap + eta * L * G**2
    left = 1 - 2 * growth * eta * L
    return jnp.where(left > 0, bound / left, jnp.inf)


def forward_recursion(
    alphas: ArrayLike, betas: ArrayLike, *, eta0: float | None = None
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The paper's own map from SGD+M to SPA, forward in k, in float64: all η_k and all
    c_{k+1}.

        η_{k+1} = (η_k − α_k) / β_{k+1}    c_{k+1} = α_k / η_k     η_0 = α_0 / (1 − β_0)

    Theorem 1; its appendix prints z_0 = 0 for z_0 = x_0, and c_0 for c_1. The default
    of η_0 is for constants. Only Σ_j α_j β_1⋯β_j, as in `hyperparams_from_sgdm`, keeps
    η bounded in general.

    >>> eta, c = forward_recursion([1.0, 0.5, 0.5, 0.5], 0.5)  # η_{k+1} = (η_k − α_k)·2
    >>> print(eta, c.round(3))
    [2. 2. 3. 5.] [0.5   0.25  0.167 0.1  ]
    """
    alpha, beta = np.asarray(alphas, np.float64), np.asarray(betas, np.float64)
    if alpha.ndim != 1 or beta.shape not in ((), alpha.shape):
        rule = "`alphas` must have shape (n,), `betas` that or none"
        raise ValueError(f"{rule}, got {alpha.shape} and {beta.shape}")
    with np.errstate(all="ignore"):  # deviations grow as 1/β^k, which may overflow
        beta = np.broadcast_to(beta, alpha.shape)
        eta = alpha / (1 - beta) if eta0 is None else np.full_like(alpha, eta0)
        for k in range(1, len(alpha)):
            eta[k] = (eta[k - 1] - alpha[k - 1]) / beta[k]
        return eta, alpha / eta


def momentum_drop(
    learning_rate: ScalarOrSchedule,
    averaging: ScalarOrSchedule,
    step: int,
    *,
    hold: Literal["eta", "alpha"] = "eta",
    step_divisor: float | None = None,
) -> SPAHyperparams:
    """Raises c to 1 from a step on, which removes momentum: x_k = z_k
    (arXiv:2010.00406, Figure 3).

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      step: the first k ≥ 1 at which c_k is 1; with a `step_divisor`, at which it has
        risen.
      hold: "eta", and α = ηc of SGD+M rises by 1/c (Figure 1(d)); or "alpha", and η
        falls by c.
      step_divisor: of c per step, > 1, from `step` on until c is 1. None means an
        abrupt change.

    Returns:
      Two schedules: `spa(*momentum_drop(...))`.

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      >>> from formulas import momentum_drop
      >>> eta, c = momentum_drop(1.0, 0.25, 2, hold="alpha")
      >>> print([f"{eta(k)} {c(k)}" for k in range(3)])
      ['1.0 0.25', '0.25 1.0', '0.25 1.0']
    """
    _arguments.NOT_NEGATIVE.check(learning_rate=learning_rate)
    _arguments.check_averaging(averaging=averaging)
    _arguments.POSITIVE_INTEGER.check(step=step)
    _arguments.one_of("eta", "alpha").check(hold=hold)
    _arguments.ABOVE_1.optional().check(step_divisor=step_divisor)
    eta_at, c_at = (
        as_schedule("learning_rate", learning_rate),
        as_schedule("averaging", averaging),
    )

    def c(k: Array) -> Float[Array, ""]:
        num_rises = jnp.maximum(k + 2 - step, 0)  # of c_{k+1}
        if step_divisor is None:
            return jnp.where(num_rises > 0, 1, c_at(k))
        log_ratio = num_rises.astype(float) * math.log(step_divisor)
        ratio = jnp.exp(jnp.minimum(log_ratio, 80))  # finite, so that a c of 0 stays
        return jnp.minimum(c_at(k) * ratio, 1)

    def eta_for_alpha(k: Array) -> Float[Array, ""]:
        before, now = c_at(k), c(k)
        return eta_at(k) * jnp.where(
            before == now, 1, before / jnp.where(now > 0, now, 1)
        )

    return SPAHyperparams(
        as_vectorized(eta_at if hold == "eta" else eta_for_alpha), as_vectorized(c)
    )
