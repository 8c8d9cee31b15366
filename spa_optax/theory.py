"""The paper's theory as functions: Defazio, Momentum via Primal Averaging, arXiv:2010.00406."""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike


def forward_recursion(
    alphas: ArrayLike, betas: ArrayLike, *, eta0: float | None = None
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
