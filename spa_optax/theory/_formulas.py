"""The formulas of Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, corrected.

    z_{k+1} = z_k − η_k g_k      x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}      z_0 = x_0

    symbol                        argument      unit    range
    η_k, the learning rate        eta           x²/f    > 0
    c_k, the averaging            c             1       in (0, 1], 0 too in `max_…`; c_0 = c_1
    L, the smoothness             smoothness    f/x²    > 0; ‖∇f(x) − ∇f(y)‖ ≤ L ‖x − y‖
    f(x_k) − f*, f(z_k) − f*      f_x, f_z      f       ≥ 0; any lower bound of f will do for f*
    Δ = f(x_0) − f*               gap           f       ≥ 0
    ‖x_{k+1} − x_k‖²              sq_step       x²      ≥ 0
    G, the size of gradients      grad_bound    f/x     ≥ 0
    T, the number of steps        num_steps     1       ≥ 1

`_prev` is index k − 1, `_next` k + 1. g_k is the stochastic gradient at x_k, and E the expectation
over it. At c = 1 SPA is SGD; there infinite limits are inf, and nothing is NaN. Scalars and arrays
broadcast; results are JAX arrays. All functions but `forward_recursion` can be jitted and vmapped.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from spa_optax._checks import POSITIVE_INTEGER, is_surely

# The arithmetic alone, which the audit evaluates in NumPy's float64. The ratio is the conjugate.
_weight_of_f_x = lambda eta, c: (1 / c - 1) / eta  # over L
_max_learning_rate = lambda c, L: c * (2 - c) / (L * (1 - c))
_max_decay_ratio = lambda eta, c, L: 2 / ((1 - c) * (eta * L + ((eta * L) ** 2 + 4) ** 0.5))


_AT_LEAST = {"num_steps": 1, **dict.fromkeys(("eta", "c", "smoothness"), 0)}
_AT_LEAST |= dict.fromkeys(("gap", "grad_bound", "growth"), 0)


def _arrays(**values: ArrayLike) -> list[Float[Array, "..."]]:
    """Raises ValueError where a value that is not traced is out of its range."""
    arrays = {name: jnp.asarray(value, float) for name, value in values.items()}
    for name, array in arrays.items():
        symbol = name.removesuffix("_prev").removesuffix("_next")
        low, high = _AT_LEAST.get(symbol, -math.inf), 1 if symbol == "c" else math.inf
        if is_surely(jnp.any(~((array >= low) & (array <= high)))):
            rule = f">= {low}" if high > 1 else f"in [{low}, {high}]"
            raise ValueError(f"`{name}` must be {rule}, got {values[name]!r}")
    return list(arrays.values())


def lyapunov(
    f_z: ArrayLike,
    f_x: ArrayLike,
    sq_step: ArrayLike,
    *,
    eta: ArrayLike,
    c: ArrayLike,
    c_next: ArrayLike,
    smoothness: ArrayLike,
    augmented: bool = False,
) -> Float[Array, "..."]:
    """The Lyapunov function Λ_{k+1} (`f_z` is of z_{k+1}). It falls, up to noise and `remainder`.

        Λ_{k+1} = [f(z_{k+1}) − f*]/η_k² + (L/η_k)(1/c_k − 1)[f(x_k) − f*] + w ‖x_{k+1} − x_k‖²
              w = L/(2 η_k² c_{k+1}²); augmented: w = L²(1 − c)/(2ηc³(2 − c)), the paper's w + ρ

        (‖∇f(x_k)‖² + ‖∇f(z_k)‖²)/(2η_k)          (the step equation, for k ≥ 1)
            ≤ Λ_k − E Λ_{k+1} + L E‖g_k‖² + R_k + `step_weight` · ‖x_k − x_{k−1}‖²

    The augmented function (Section 4, Insight 1; appendix "Augmented Lyapunov") is for constant η
    and c. In the step equation `noise_weight` then replaces L, and the last term is gone. At c = 1
    it is SGD's, for any η_k: [f(x_{k+1}) − f*]/η_k². (Section 3.)

    Examples:
      3/½² + (1/½)(2 − 1)·3 + 3w = 18 + 3w, where w = 1/(2·¼·¼) = 8, augmented ½/(2·½·⅛·1½) = 2⅔:

      >>> from spa_optax import theory
      >>> known = {"eta": 0.5, "c": 0.5, "c_next": 0.5, "smoothness": 1.0}
      >>> print(*[theory.lyapunov(3.0, 3.0, 3.0, **known, augmented=a) for a in (False, True)])
      42.0 26.0
    """
    f_z, f_x, sq_step = _arrays(f_z=f_z, f_x=f_x, sq_step=sq_step)
    eta, c, c_next, L = _arrays(eta=eta, c=c, c_next=c_next, smoothness=smoothness)
    w = L / (2 * eta**2 * c_next**2)
    if augmented:
        w = L**2 * (1 - c_next) / (2 * eta * c_next**3 * (2 - c_next))
    return f_z / eta**2 + L * _weight_of_f_x(eta, c) * f_x + w * sq_step


def remainder(
    f_x_prev: ArrayLike,
    f_z: ArrayLike,
    *,
    eta: ArrayLike,
    eta_prev: ArrayLike,
    c: ArrayLike,
    c_prev: ArrayLike,
    smoothness: ArrayLike,
) -> Float[Array, "..."]:
    """The error R_k that a change of η or c adds to the step equation (`lyapunov`; Section 3.1).

        R_k = [(L/η_k)(1/c_k − 1) − (L/η_{k−1})(1/c_{k−1} − 1)] [f(x_{k−1}) − f*]
              + [1/η_k² − 1/η_{k−1}²] [f(z_k) − f*]

    The second term is SGD's R_k, of f(x_k), for which Section 3 prints f(z_k). The first is 0 while
    (1/c_k − 1)/η_k is constant, as under `stagewise(averaging_rule="balance")`: c rises as η falls.
    The title of Section 5 (Insight 2), "Reduce c_k", should read "increase".

    Examples:
      >>> from spa_optax import theory
      >>> known = {"eta": 0.5, "eta_prev": 1, "c": 0.5, "c_prev": 0.5, "smoothness": 1}
      >>> print(theory.remainder(1, 2, **known))  # (2·1 − 1·1)·1 + (4 − 1)·2
      7.0
    """
    f_x_prev, f_z = _arrays(f_x_prev=f_x_prev, f_z=f_z)
    eta, eta_prev, c, c_prev, L = _arrays(
        eta=eta, eta_prev=eta_prev, c=c, c_prev=c_prev, smoothness=smoothness
    )
    of_x = L * (_weight_of_f_x(eta, c) - _weight_of_f_x(eta_prev, c_prev))
    return of_x * f_x_prev + (1 / eta**2 - 1 / eta_prev**2) * f_z


def _step_weight(eta: Any, eta_prev: Any, c: Any, L: Any) -> Any:
    m = 1 / c - 1
    return L / 2 * ((m + eta * L) * m / eta**2 + L / eta * m**2 - 1 / (eta_prev**2 * c**2))


def step_weight(
    *, eta: ArrayLike, eta_prev: ArrayLike, c: ArrayLike, smoothness: ArrayLike
) -> Float[Array, "..."]:
    """The weight of ‖x_k − x_{k−1}‖² in the step equation (`lyapunov`): helpful where negative.

        (L/2) [(1/c_k − 1 + η_k L)(1/c_k − 1)/η_k² + (L/η_k)(1/c_k − 1)² − 1/(η_{k−1}² c_k²)]

    It is 0 at `max_learning_rate` (η constant), and if η falls by `max_decay_ratio`. (Section 3.1.)

    Examples:
      >>> from spa_optax import theory
      >>> known = {"eta": 1.0, "eta_prev": 1.0, "c": 0.5, "smoothness": 1.0}
      >>> print(theory.step_weight(**known))  # ½ [(1 + 1)·1 + 1·1² − 4]
      -0.5
    """
    return _step_weight(*_arrays(eta=eta, eta_prev=eta_prev, c=c, smoothness=smoothness))


def noise_weight(eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The weight of E‖g_k‖² in the step equation with the augmented function (`lyapunov`).

        (1 + ηL(1 − c)/(c(2 − c))) L/2

    It is L, as without augmentation, at `max_learning_rate`, and L/2, SGD's, at c = 1. In between,
    it assumes ⟨∇f(x_k), x_k − x_{k−1}⟩ = 0, as on average when noise dominates. For small η
    momentum adds −L/2 to L, and Section 4 (Insight 1) prints L/2. (Appendix "Augmented Lyapunov".)

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.noise_weight(0.75, 0.5, 1.0), theory.noise_weight(9.0, 1.0, 1.0))
      0.75 0.5
    """
    eta, c, L = _arrays(eta=eta, c=c, smoothness=smoothness)
    return (1 + eta * L * (1 - c) / (c * (2 - c))) * L / 2


def max_learning_rate(c: ArrayLike, smoothness: ArrayLike) -> Float[Array, "..."]:
    """The largest constant η for which `sgdm_bound` holds: `step_weight` ≤ 0.

        η ≤ c (2 − c) / (L (1 − c))

    Section 6 and appendix "Telescoping" print (2 − c)/(Lc(1 − c)), Section 4 2c(2 − c)/(L(1 − c)).
    The limit is for the worst case: with L measured, recipes that train well are far above it.

    Examples:
      >>> from spa_optax import theory
      >>> print(theory.max_learning_rate(0.5, 1.0), theory.max_learning_rate(1.0, 1.0))
      1.5 inf
    """
    return _max_learning_rate(*_arrays(c=c, smoothness=smoothness))


def max_decay_ratio(
    eta: ArrayLike, c: ArrayLike, smoothness: ArrayLike, *, simplified: bool = False
) -> Float[Array, "..."]:
    """The largest r by which one step may divide η: `step_weight` ≤ 0 at η_k = η/r, η = η_{k−1}.

        r = (√(η²L² + 4) − ηL) / (2 (1 − c))
        simplified:  r = (√(η²L²(1 − c)⁴ + 4(1 − c)) − ηL(1 − c)²) / (2 (1 − c))

    Section 6 (Insight 3) simplifies by η_k L ≤ 1, where r is not larger. It prints 4(1 − c)c under
    the root, which gives 0.29 in its example (below), not 1.01. Where η is over
    `max_learning_rate`, r is below 1: no decay is allowed.

    Examples:
      >>> from spa_optax import theory
      >>> print(f"{theory.max_decay_ratio(0.1, 0.1, 1.0):.4f}")  # (√4.01 − 0.1)/1.8
      1.0569
      >>> print(f"{theory.max_decay_ratio(0.1, 0.1, 1.0, simplified=True):.4f}")
      1.0101
    """
    eta, c, L = _arrays(eta=eta, c=c, smoothness=smoothness)
    if not simplified:
        return _max_decay_ratio(eta, c, L)
    linear = eta * L * (1 - c) ** 2  # conjugate, and no 0/0 at c = 1
    return 2 / (linear + jnp.sqrt(linear**2 + 4 * (1 - c)))


def sgdm_bound(
    num_steps: ArrayLike,
    eta: ArrayLike,
    c: ArrayLike,
    *,
    smoothness: ArrayLike,
    gap: ArrayLike,
    grad_bound: ArrayLike,
    growth: ArrayLike = 0.0,
) -> Float[Array, "..."]:
    """A bound on the mean of ½(‖∇f(x_k)‖² + ‖∇f(z_k)‖²) over T steps with constant η and c.

        [Δ/(ηT) + (L/T)(1/c − 1)Δ + ηLG²] / (1 − 2κηL)      if E‖g_k‖² ≤ G² + κ‖∇f(x_k)‖²

    It holds for η ≤ `max_learning_rate`, which is not checked, and is inf for 2κηL ≥ 1. κ ≥ 0 is
    `growth`: G bounds the gradients at κ = 0, and their standard deviation at κ = 1 (the paper has
    no constants there). With κ = 0 it is least at η = √(Δ/(TLG²)); the paper's "more realistic" η
    is 1/(L√T). SGD's bound has ½ηLG²: pass c = 1 and G/√2. It is least at √(2Δ/(TLG²)). The paper
    prints SGD's sum over k = 0, …, T with the noise of T steps. (Appendices "Telescoping" and "SGD
    reference proof".)

    Examples:
      >>> from spa_optax import theory
      >>> known = {"smoothness": 1.0, "gap": 1.0, "grad_bound": 1.0}
      >>> print(theory.sgdm_bound(4, 0.25, 0.5, **known))  # 1/(¼·4) + (1/4)(2 − 1) + ¼
      1.5
    """
    T, eta, c, L = _arrays(num_steps=num_steps, eta=eta, c=c, smoothness=smoothness)
    gap, G, growth = _arrays(gap=gap, grad_bound=grad_bound, growth=growth)
    bound = gap / (eta * T) + L / T * (1 / c - 1) * gap + eta * L * G**2
    left = 1 - 2 * growth * eta * L
    return jnp.where(left > 0, bound / left, jnp.inf)


def estimate_smoothness(
    loss: Callable[[PyTree], ArrayLike], params: PyTree, *, key: Array, num_iterations: int = 100
) -> Float[Array, ""]:
    """The largest |eigenvalue| of the Hessian of a loss, by power iteration.

        v ← Hv/‖Hv‖      |λ| ≈ ‖Hv‖, from below

    An iteration is one Hessian-vector product (Pearlmutter, Fast Exact Multiplication by the
    Hessian, 1994). The result is the curvature at `params`, whereas the paper's L bounds it
    everywhere. For the loss of a network there is often no such L.

    Args:
      loss: a scalar function of the params, twice differentiable.
      params: the point at which to take the Hessian, a tree of real floating-point arrays.
      key: a key of `jax.random`, for the first direction.
      num_iterations: at least 1.

    Examples:
      >>> import jax
      >>> from spa_optax import theory
      >>> loss = lambda p: (3 * p["x"] ** 2 - 5 * p["y"] ** 2) / 2
      >>> L = theory.estimate_smoothness(loss, {"x": 1.0, "y": 1.0}, key=jax.random.key(0))
      >>> print(f"{L:.3f}")
      5.000
    """
    POSITIVE_INTEGER.check(num_iterations=num_iterations)
    params = jax.tree.map(jnp.asarray, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            got = f"{leaf.dtype} at {jax.tree_util.keystr(path) or 'its root'}"
            raise ValueError(f"`params` must be real floating-point arrays, got {got}")

    def iterate(v: PyTree, _: None) -> tuple[PyTree, Float[Array, ""]]:
        norm = optax.tree.norm(v)
        v = jax.tree.map(lambda leaf: leaf / jnp.where(norm > 0, norm, 1), v)
        hessian_v = jax.jvp(jax.grad(loss), (params,), (v,))[1]
        return hessian_v, jnp.asarray(optax.tree.norm(hessian_v))

    return jax.lax.scan(iterate, optax.tree.random_like(key, params), length=num_iterations)[1][-1]


def forward_recursion(
    alphas: npt.ArrayLike, betas: npt.ArrayLike, *, eta0: float | None = None
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The paper's own map from SGD+M to SPA, forward in k, in float64: all η_k and all c_{k+1}.

        η_{k+1} = (η_k − α_k) / β_{k+1}      c_{k+1} = α_k / η_k

    Only η_0 = Σ_j α_j β_1⋯β_j, for which `hyperparams_from_sgdm` looks ahead, keeps η bounded:
    from any other the error grows by 1/β per step. (Theorem 1. The appendix
    prints z_0 = 0 for z_0 = x_0, and in the base case c_0 for c_1.)

    Args:
      alphas: α_k for k = 0, …, n − 1, shape (n,).
      betas: β_k, shape (n,), or one number for all. β_0 is used only for the default of η_0.
      eta0: η_0. None means α_0 / (1 − β_0), which is correct while α and β are constant.

    Examples:
      >>> from spa_optax import theory
      >>> eta, c = theory.forward_recursion([1.0, 0.5, 0.5, 0.5], 0.5)  # η_{k+1} = (η_k − α_k)·2
      >>> print(eta, c.round(3))
      [2. 2. 3. 5.] [0.5   0.25  0.167 0.1  ]
    """
    alpha, beta = np.asarray(alphas, np.float64), np.asarray(betas, np.float64)
    if alpha.ndim != 1:
        raise ValueError(f"`alphas` must have shape (n,), got {alpha.shape}")
    if beta.shape not in ((), alpha.shape):
        raise ValueError(f"`betas` must be a number or have shape {alpha.shape}, got {beta.shape}")
    beta = np.broadcast_to(beta, alpha.shape)
    with np.errstate(all="ignore"):  # deviations grow as 1/β^k, which may overflow
        eta = alpha / (1 - beta) if eta0 is None else np.full_like(alpha, eta0)
        for k in range(1, len(alpha)):
            eta[k] = (eta[k - 1] - alpha[k - 1]) / beta[k]
        return eta, alpha / eta
