"""Generalized primal averaging: gradients at y instead of x."""

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
    check_one_run,
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

    Let c = 1 − μ_x, with μ_x and μ_y as in the paper, and let d_k be the incoming update, taken at
    y_k. Step k = 0, 1, 2, … is

        z_{k+1} = z_k − γ_k d_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}

    The params are y; the point to evaluate is x = `eval_params(opt_state, params)`. In terms of y
    this is the update of `spa` with one more scalar, for the same memory:

        y_{k+1} = y_k + c_{k+1} (z_{k+1} − y_k) − δ_k d_k      δ_k = γ_k (1 − c_{k+1}) (1 − μ_y)

    Special cases:

    - μ_y = 1: `spa`. c = 1: plain steps along the direction, z = x = y.
    - μ_x = μ_y = β with γ = α/(1 − β): Keras's form of Nesterov momentum β. For constants this is
      also `optax.sgd` with Nesterov momentum.
    - Constants: quasi-hyperbolic momentum with β = μ_x and ν = μ_y.
    - Averaging by `schedule_free_averaging`, 1/(k + 1) at a constant rate: Schedule-Free.

    GPA is a smooth form of DiLoCo with one worker, whose slow weights take a step with momentum μ
    every H steps. A decay by μ in H steps is μ_x = μ^(1/H). With the usual μ = 0.9:

        H               1        4        8        16       32       64
        averaging       0.1      0.026    0.013    0.0066   0.0033   0.0016

    The defaults are those of the authors' code, H = 32 and μ_y = 0.7, for directions with their own
    momentum, such as `optax.scale_by_adam`'s. x is then the mean of some 300 values of z: for runs
    of a few thousand steps, average over fewer. A fraction 1 − μ_y (1 − c) of each direction enters
    y at once. If the direction has no momentum, μ_y must smooth it: `gpa_adamw` and Schedule-Free
    use 0.9.

    Directions come from `optax.scale_by_adam()` and the like. After a finished optimizer, such as
    `optax.adam(1e-3)`, which has the minus sign already, the loss climbs, and nothing warns. For
    the place in a chain, and for params edited outside the optimizer, see `spa`.

    Args:
      learning_rate: γ_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} = 1 − μ_x in [0, 1], a scalar or a schedule of the count k.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k, for y_{k+1}. x has the
        rounding error of y over μ_y.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. 16-bit params need it: rounded to
        nearest, y does not change if c (z − y) − δ d is less than half an ulp.

    Returns:
      A transformation whose `update` needs `params`. Its state is a `GPAState`; its updates have
      the params' dtype.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is not a real floating-point dtype, or,
        in `update`, `params` is missing or the trees differ.

    Examples:
      With γ = 1, c = 0.5, μ_y = 0.5 and a gradient of 4: z goes from 10 to 6, x half of the way to
      z, and y is midway between x and z.

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
    check_key(rounding_key)
    check_dtype(state_dtype)

    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)
    mu_y_at = at_count("interpolation", interpolation)

    def init_fn(params: PyTree) -> GPAState:
        inner = init(params, state_dtype, rounding_key)
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
        """`advance`, from y_k to y_{k+1}. The extra argument `observe` is called with x's step."""
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
    """The scalars of `gpa`, from the μ_y of y_{k+1} and that of y_k (held)."""
    mu_x = 1 - c
    # y_k − z_k = μ_y (x_k − z_k) with the μ_y of y_k. If μ_y has changed by a factor ρ, it counts ρ
    # times, as if μ_x were ρ μ_x.
    same = is_at_start(inner) | (mu_y.astype(jnp.float32) == mu_y_held)
    change = mu_y / jnp.where(mu_y_held > 0, mu_y_held, 1).astype(mu_y.dtype) - 1  # ρ − 1
    change -= jnp.where(same, jax.lax.stop_gradient(change), 0)  # its derivative is kept
    held = inner.coast.astype(eta.dtype)
    return Scalars(
        eta=eta,
        c=c,
        p=c - mu_x * change,
        coast=mu_x * jnp.where(eta > 0, mu_y * eta, (1 + change) * held),
        delta=eta * mu_x * (1 + change - mu_y),
    )


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The params to evaluate and to save: x, for any member of the family.

        x_k = y_k + (1/μ_y − 1)(y_k − z_k)      under `gpa`

    Under `spa` and `spa_from_sgdm`, x is `params`. Leaves handled by another optimizer, or by none,
    are returned unchanged. (μ_y is stored in float32.)

    With Flax nnx, evaluate a clone. `nnx.state` and `nnx.split` return live variables, so the model
    itself could not go back from x to y:

        average = nnx.clone(model)
        x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
        nnx.update(average, x)
        average.eval()

    Args:
      opt_state: a state that holds one of the family, or several that divide the params among them,
        in any chain or wrapper that keeps the tree of params (`optax.masked`, `optax.partition`,
        `optax.MultiSteps`, but not `optax.flatten`). For Flax nnx, `optimizer.opt_state`.
      params: y_k, the current params of that run.

    Returns:
      x_k, shaped like `params` and of their dtype.

    Raises:
      ValueError: if `opt_state` holds no state of the family or is a batch of states, or if its z
        does not match `params`.

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
    if not states and find(params, (GPAState, SPAState)):
        raise ValueError("`opt_state` comes first and `params` second, got them swapped")
    if not states:
        is_node = lambda node: hasattr(node, "_fields") or not isinstance(node, tuple)
        found = sorted(
            {type(node).__name__ for node in jax.tree.leaves(opt_state, is_leaf=is_node)}
        )
        raise ValueError(
            "`opt_state` must hold a state of `spa`, `spa_from_sgdm`, `gpa` or an alias of theirs,"
            f" got {', '.join(found) or 'none'}. Other optimizers are evaluated at their params"
        )
    pairs = [state if isinstance(state, GPAState) else (state, None) for state in states]
    check_one_run("opt_state", [(state.count, mu_y) for state, mu_y in pairs])
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
    # Params may have been replaced before the first step, and z is not updated until then.
    return jnp.where(is_at_start(inner), y, x.astype(y.dtype))
