"""Generalized primal averaging: gradients at another point than x."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, PRNGKeyArray, PyTree

from spa_optax._checks import (
    check_averaging,
    check_dtype,
    check_interpolation,
    check_key,
    check_rate,
    keys_of,
)
from spa_optax._convert import by_path
from spa_optax._core import (
    Decay,
    GPAState,
    Observe,
    Scalars,
    SPAState,
    advance,
    find,
    init,
    is_at_start,
    map_trained,
    scalar_of,
)
from spa_optax._hyperparams import AtCount, at_count
from spa_optax._precision import is_float, wide_dtype


def gpa(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.0033,
    interpolation: optax.ScalarOrSchedule = 0.7,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Generalized primal averaging (GPA): gradients at y, between the average x and z.

    With c = 1 − μ_x, μ_x and μ_y the paper's, and d_k the direction that the chain hands it, taken
    at y_k, step k = 0, 1, 2, … is

        z_{k+1} = z_k − γ_k d_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}

    The params are y; x, the point to evaluate, is `eval_params(opt_state, params)`. In terms of y
    it is the update of `spa` with one more scalar, for the same memory:

        y_{k+1} = y_k + c_{k+1} (z_{k+1} − y_k) − δ_k d_k      δ_k = γ_k (1 − c_{k+1}) (1 − μ_y)

    What else it is:

    - `spa` at μ_y = 1, and the direction's own method, z = x = y, at c = 1.
    - Nesterov momentum β in the form of Keras, at μ_x = μ_y = β with γ = α/(1 − β). For constants
      this is `optax.sgd` with Nesterov momentum, too.
    - Quasi-hyperbolic momentum with β = μ_x and ν = μ_y, for constants.
    - Schedule-Free with the averaging of `schedule_free_averaging`: 1/(k + 1) at a constant rate.

    It smooths what DiLoCo does with one worker, whose slow weights take a step of momentum μ every
    H steps: momentum that decays by μ in H steps is μ_x = μ^(1/H). With its usual μ = 0.9

        H               1        4        8        16       32       64
        averaging       0.1      0.026    0.013    0.0066   0.0033   0.0016

    The defaults are those of the authors' code, H = 32 and μ_y = 0.7, for directions that have
    momentum of their own, such as `optax.scale_by_adam`'s. x then is the mean of some 300 values of
    z: for runs of a few thousand steps average over fewer. Where the direction has no momentum μ_y
    has to do its smoothing, since 1 − μ_y (1 − c) of each direction enters y at once: 0.9 is the
    default of `gpa_adamw`, as of Schedule-Free.

    For the place in a chain, and for params edited outside the optimizer, see `spa`.

    Args:
      learning_rate: γ_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} = 1 − μ_x in [0, 1], a scalar or a schedule of the count k.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k, for y_{k+1}. x is known
        to the rounding of y over μ_y.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. With params of 16 bits it is needed:
        rounded to nearest, y stays where c (z − y) − δ d is less than half an ulp.

    Returns:
      A transformation whose `update` needs `params`. Its state is a `GPAState`; its updates have
      the params' dtype.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is not a real floating-point dtype, or,
        in `update`, `params` is missing or the trees differ.

    Examples:
      With γ = 1, c = 0.5, μ_y = 0.5 and a gradient of 4: z goes from 10 to 6, x half of the way to
      it, and y half of the way from there.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, gpa
      >>> tx = gpa(learning_rate=1.0, averaging=0.5, interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(y), y)
      >>> y = optax.apply_updates(y, updates)
      >>> print(state.inner.z, eval_params(state, y), y)
      6.0 8.0 7.0

    References:
      Defazio, Mishchenko, Raman, Shi, Lin, Smoothing DiLoCo with Primal Averaging for Faster
      Training of LLMs, 2025, arXiv:2512.17131. Defazio et al., The Road Less Scheduled, 2024,
      arXiv:2405.15682. Ma, Yarats, Quasi-hyperbolic momentum and Adam for deep learning, 2019,
      arXiv:1810.06801.
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    check_interpolation(interpolation)
    check_dtype(state_dtype)
    check_key(rounding_key)

    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)
    mu_y_at = at_count("interpolation", interpolation)

    def init_fn(params: PyTree) -> GPAState:
        inner = init(params, state_dtype)
        return GPAState(inner, mu_y_at(inner.count).astype(jnp.float32))

    update = GPAUpdate(eta_at, c_at, mu_y_at, rounding_key)
    # As in `spa`.
    return optax.GradientTransformationExtraArgs(init_fn, update)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, eq=False)
class GPAUpdate:
    """The `update` of `gpa`."""

    eta_at: AtCount
    c_at: AtCount
    mu_y_at: AtCount
    rounding_key: PRNGKeyArray | None
    decay: Decay | None = None

    def __call__(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        observe: Observe | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, GPAState]:
        """`advance`, from y_k to y_{k+1}. `observe`, an extra argument, is told of x's step."""
        del extra_args
        if not isinstance(state, GPAState):
            raise ValueError(f"`state` must be a `GPAState`, got {type(state).__name__}")
        mu_y, mu_y_held = self.mu_y_at(jnp.asarray(state.inner.count)), jnp.asarray(state.mu_y)

        def rule(inner: SPAState, _: PyTree) -> Scalars:
            eta, c = self.eta_at(inner.count), self.c_at(inner.count)
            return gpa_scalars(eta, c, mu_y, mu_y_held, inner)

        updates, inner, step = advance(
            updates, state.inner, params, rule, self.rounding_key, self.decay
        )
        if observe is not None:  # z_k − y_k is μ_y (z_k − x_k)
            over_mu_y = lambda leaf: leaf / mu_y_held.astype(leaf.dtype)
            d, rounding = (map_trained(over_mu_y, tree) for tree in (step.distance, step.rounding))
            observe(step._replace(distance=d, rounding=rounding, p=inner.c, delta=None))
        return updates, GPAState(inner, mu_y.astype(jnp.float32))


def gpa_scalars(eta: Array, c: Array, mu_y: Array, mu_y_held: Array, inner: SPAState) -> Scalars:
    """The scalars of `gpa`, from μ_y for y_{k+1} and the μ_y that y_k was made with."""
    mu_x = 1 - c
    # y_k − z_k is μ_y (x_k − z_k) for the μ_y that y_k was made with. Where that was another it
    # counts ρ times, as if μ_x were ρ μ_x.
    same = is_at_start(inner) | (mu_y.astype(jnp.float32) == mu_y_held)
    change = mu_y / jnp.where(mu_y_held > 0, mu_y_held, 1).astype(mu_y.dtype) - 1  # ρ − 1
    change -= jnp.where(same, jax.lax.stop_gradient(change), 0)  # its derivative is no less
    held = inner.coast.astype(eta.dtype)
    return Scalars(
        eta=eta,
        c=c,
        p=c - mu_x * change,
        coast=mu_x * jnp.where(eta > 0, mu_y * eta, (1 + change) * held),
        delta=eta * mu_x * (1 + change - mu_y),
    )


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The params to evaluate and to save, x, of any member of the family.

        x_k = y_k + (1/μ_y − 1)(y_k − z_k)      under `gpa`

    Under `spa` and `spa_from_sgdm` they are `params` themselves. Parameters of another optimizer,
    or of none, are returned unchanged. (μ_y is kept as a float32.)

    With Flax nnx evaluate a clone. `nnx.state` and `nnx.split` return live variables, so that there
    would be no way back from x to y in the model itself:

        average = nnx.clone(model)
        x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
        nnx.update(average, x)
        average.eval()

    Args:
      opt_state: a state that holds one of the family, or several that share the params among them,
        in any chain or wrapper that leaves the tree of params as it is (`optax.masked`,
        `optax.partition` and `optax.MultiSteps` do, `optax.flatten` does not). Of Flax nnx,
        `optimizer.opt_state`.
      params: y_k, where that run stands.

    Returns:
      x_k, shaped like `params` and of their dtype.

    Raises:
      ValueError: if `opt_state` holds no state of the family, its z is not like `params`, or it is
        a batch of states.

    Examples:
      Under Schedule-Free averaging x is the mean of all z so far: here of 9 and 7.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, gpa, schedule_free_averaging
      >>> tx = gpa(1.0, averaging=schedule_free_averaging(1.0), interpolation=0.5)
      >>> params = jnp.array(10.0)
      >>> state = tx.init(params)
      >>> for gradient in (1.0, 2.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, eval_params(state, params))
      7.5 8.0

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, 2025,
      arXiv:2512.17131.
    """
    states = find(opt_state, (GPAState, SPAState))
    if not states:
        raise ValueError(
            "`opt_state` must hold a state of `spa`, `spa_from_sgdm`, `gpa` or an alias of theirs,"
            f" got {type(opt_state).__name__}"
        )
    pairs = [state if isinstance(state, GPAState) else (state, None) for state in states]
    if any(jnp.shape(leaf) for s, mu_y in pairs for leaf in jax.tree.leaves((s.count, mu_y))):
        raise ValueError(
            "`opt_state` must be of one run, got a batch of them, for which there is `jax.vmap`"
        )
    x = by_path(params)
    keys = keys_of("opt_state", [state.z for state, _ in pairs], params)
    for (state, mu_y), of_state in zip(pairs, keys, strict=True):
        for key, z in zip(of_state, jax.tree.leaves(state.z), strict=True):
            if mu_y is not None and is_float(x[key]):
                x[key] = _x(x[key], jnp.asarray(z), state, mu_y)
    return jax.tree.unflatten(jax.tree.structure(params), x.values())


def _x(y: Array, z: Array, inner: SPAState, mu_y: PyTree) -> Array:
    dtype = wide_dtype(y, z)
    mu_y = scalar_of(mu_y).astype(dtype)
    y_wide = y.astype(dtype)
    x = y_wide + (1 / mu_y - 1) * (y_wide - z.astype(dtype))
    # Before the first step params may have been replaced, and z has not heard of it.
    return jnp.where(is_at_start(inner), y, x.astype(y.dtype))
