"""The relatives of SPA: gradients at another point than x, and Adam's directions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, DTypeLike, PRNGKeyArray, PyTree

from spa_optax._checks import (
    check_averaging,
    check_dtype,
    check_interpolation,
    check_key,
    check_rate,
    check_same_tree,
    check_second_moment,
    is_none,
    is_plain_number,
    keys_of,
)
from spa_optax._coast import at_count
from spa_optax._convert import by_path, find
from spa_optax._transform import (
    GPAState,
    SPAState,
    Step,
    is_at_start,
    is_float,
    primal_averaging,
    spa,
    wide_dtype,
)


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
    - Schedule-Free at a constant rate with averaging(k) = 1/(k + 1). Where the rate changes,
      Schedule-Free weights z_{k+1} by the square of the largest rate so far: c_{k+1} is its share
      in the sum of weights. (Under x64 write `1 / (k + 1.0)`: `1 / (k + 1)` is a float32.)

    It smooths what DiLoCo does with one worker, whose slow weights take a step of momentum μ every
    H steps: momentum that decays by μ in H steps is μ_x = μ^(1/H). With its usual μ = 0.9

        H               1        4        8        16       32       64
        averaging       0.1      0.026    0.013    0.0066   0.0033   0.0016

    The defaults are those of the authors' code, H = 32 and μ_y = 0.7, for directions that have
    momentum of their own, such as `optax.scale_by_adam`'s. x then is the mean of some 300 values of
    z: for runs of a few thousand steps average over fewer. Where the direction has no momentum μ_y
    has to do its smoothing, since 1 − μ_y (1 − c) of each direction enters y at once: 0.9 is the
    default of `gpa_adamw`, as of Schedule-Free.

    As to chains, and params edited outside the optimizer, see `spa`.

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
      ValueError: if a number is out of range, `state_dtype` is no real floating-point dtype, or, in
        `update`, `params` is missing or the trees differ.

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
    f32 = lambda scalar: scalar.astype(jnp.float32)

    def step(state: SPAState, is_master: bool, *, mu_y: Array, mu_y_held: Array) -> Step:
        del is_master
        eta, c = eta_at(state.count), c_at(state.count)
        mu_x = 1 - c
        # y_k − z_k is μ_y (x_k − z_k) for the μ_y that y_k was made with. Where that was another it
        # counts ρ times, as if μ_x were ρ μ_x.
        same = is_at_start(state) | (f32(mu_y) == mu_y_held)
        change = mu_y / jnp.where(mu_y_held > 0, mu_y_held, 1).astype(mu_y.dtype) - 1  # ρ − 1
        change -= jnp.where(same, jax.lax.stop_gradient(change), 0)  # its derivative is no less
        held = state.coast.astype(eta.dtype)
        return Step(
            eta=eta,
            c=c - mu_x * change,
            coast=mu_x * jnp.where(eta > 0, mu_y * eta, (1 + change) * held),
            delta=eta * mu_x * (1 + change - mu_y),
        )

    def init_fn(params: PyTree) -> GPAState:
        inner: Any = spa(0.0, state_dtype=state_dtype).init(params)
        return GPAState(inner, f32(mu_y_at(inner.count)))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, GPAState]:
        del extra_args
        if not isinstance(state, GPAState):
            raise ValueError(f"`state` must be a `GPAState`, got {type(state).__name__}")
        count = jnp.asarray(state.inner.count)
        mu_y = mu_y_at(count)
        now = functools.partial(step, mu_y=mu_y, mu_y_held=jnp.asarray(state.mu_y))
        core = primal_averaging(now, state_dtype, rounding_key)
        updates, inner, _ = core.advance(updates, state.inner, params)
        inner = inner._replace(c=f32(c_at(count)))  # and not ρ's
        return updates, GPAState(inner, f32(mu_y))

    # As in `spa`.
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


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
      >>> from spa_optax import eval_params, gpa
      >>> tx = gpa(learning_rate=1.0, averaging=lambda k: 1 / (k + 1), interpolation=0.5)
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
    mu_y = jnp.asarray(*jax.tree.leaves(mu_y)).astype(dtype)  # under Flax nnx a variable
    y_wide = y.astype(dtype)
    x = y_wide + (1 / mu_y - 1) * (y_wide - z.astype(dtype))
    # Before the first step params may have been replaced, and z has not heard of it.
    return jnp.where(is_at_start(inner), y, x.astype(y.dtype))


def spa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with its first moment by primal averaging: `spa` of Adam's direction.

    With λ the weight decay, the direction d_k is

        ν_{k+1} = β₂ ν_k + (1 − β₂) g_k²
        d_k = g_k / (√(ν_{k+1} / (1 − β₂^{k+1})) + ε) + λ x_k

    and the rest is `spa`. It differs from AdamW in that it averages the steps that Adam has scaled,
    where AdamW scales an average of gradients, and in that momentum starts from 0 without a
    correction of its bias. Rates and momenta are on the scale of AdamW's: averaging stands for
    1 − b1, and steps for the mean of the last 1/c directions, times the learning rate.

    In memory it has z in the place of the first moment and, for params of 16 bits or fewer, of the
    float32 master copy too: 10 bytes a parameter with a float32 ν, 8 with z in bfloat16, and 12 for
    float32 params. AdamW takes 14 with a master copy, 12 with float32 params, and 10 with float32
    params and `mu_dtype=jnp.bfloat16`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, a scalar, or a schedule where `optax.add_decayed_weights` takes one. It
        is decoupled, and multiplied by the learning rate, as in `optax.adamw`.
      mask: which params to decay, as for `optax.adamw`: a tree of booleans, or a function of the
        params that returns one.
      state_dtype: dtype of z, as for `spa`. ν has at least 32 bits.
      rounding_key: for stochastic rounding, as for `spa`.

    Under `optax.inject_hyperparams` name `rounding_key`, and `mask` where it is a function, in its
    `static_args`, and for params of 16 bits set `hyperparam_dtype` to float32, as for
    `optax.adamw`: in bfloat16 a β₂ of 0.999 is 1.

    Returns:
      A transformation, a chain, whose `update` needs `params`; its updates have the params' dtype.
      Params are the point to evaluate and to save.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is no real floating-point dtype, or, in
        `update`, `params` is missing or the trees differ.

    Examples:
      The first direction is the gradient's sign: z goes from 10 to 9, and x a tenth of the way.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_adamw
      >>> tx = spa_adamw(learning_rate=1.0, weight_decay=0.0)
      >>> params = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(params), params)
      >>> print(f"{optax.tree.get(state, 'z'):.3f} {optax.apply_updates(params, updates):.3f}")
      9.000 9.900

    References:
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2019, arXiv:1711.05101. Defazio,
      Momentum via Primal Averaging, 2020, arXiv:2010.00406, Section 2.
    """
    last = spa(learning_rate, averaging, state_dtype=state_dtype, rounding_key=rounding_key)
    return optax.chain(_adamw_direction(b2, eps, weight_decay, mask), last)


def gpa_adamw(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.0033,
    interpolation: optax.ScalarOrSchedule = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with its first moment by generalized primal averaging: `gpa` of Adam's direction.

    The direction is that of `spa_adamw`, at y, and the rest is `gpa`. With averaging(k) = 1/(k + 1)
    and a constant rate it is `optax.contrib.schedule_free_adamw`, with b1 = μ_y.

    The authors' own GPA-AdamW differs twice. It has Adam's first moment as well, a buffer more,
    which `optax.chain(optax.scale_by_adam(), gpa(1e-3))` has too. And it decays z, by
    z ← (1 − γλ) z, where here λ y is part of the direction: these are different iterates.

    Args:
      learning_rate: γ_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k; see `gpa` for its scale.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k. 1 − μ_y (1 − c) of each
        direction enters y at once, as 1 − b1 in AdamW.
      b2: β₂ in [0, 1), of the second moment.
      eps: ε ≥ 0.
      weight_decay: λ ≥ 0, as for `spa_adamw`, of y.
      mask: which params to decay, as for `spa_adamw`.
      state_dtype: dtype of z, as for `spa`. ν has at least 32 bits.
      rounding_key: for stochastic rounding, which params of 16 bits need here: see `gpa`.

    As to `optax.inject_hyperparams`, see `spa_adamw`.

    Returns:
      A transformation, a chain, whose `update` needs `params`; its updates have the params' dtype.
      `eval_params` gives the point to evaluate and to save.

    Raises:
      ValueError: if a number is out of range, `state_dtype` is no real floating-point dtype, or, in
        `update`, `params` is missing or the trees differ.

    Examples:
      The first direction is the gradient's sign: z goes from 10 to 9, x half of the way to it, and
      y half of the way from there.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, gpa_adamw
      >>> tx = gpa_adamw(1.0, averaging=0.5, interpolation=0.5, weight_decay=0.0)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(y), y)
      >>> y = optax.apply_updates(y, updates)
      >>> print(f"{optax.tree.get(state, 'z'):.3f} {eval_params(state, y):.3f} {y:.3f}")
      9.000 9.500 9.250

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, 2025,
      arXiv:2512.17131. Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2019,
      arXiv:1711.05101.
    """
    last = gpa(
        learning_rate,
        averaging,
        interpolation,
        state_dtype=state_dtype,
        rounding_key=rounding_key,
    )
    return optax.chain(_adamw_direction(b2, eps, weight_decay, mask), last)


def _adamw_direction(
    b2: ArrayLike,
    eps: ArrayLike,
    weight_decay: optax.ScalarOrSchedule,
    mask: PyTree | Callable[[PyTree], PyTree] | None,
) -> optax.GradientTransformationExtraArgs:
    """That of AdamW without a first moment, in 32 bits or more, as is its state."""
    check_second_moment(b2, eps)
    check_rate("weight_decay", weight_decay)
    # A scalar of NumPy would make a float64 of ν, where there are any.
    b2, eps = (float(v) if is_plain_number(v) else v for v in (b2, eps))  # pyright: ignore[reportArgumentType]
    inner = optax.chain(
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),  # pyright: ignore[reportArgumentType]
    )

    def widened(x: Any) -> Any:
        if not is_float(x):
            return None
        dtype = jnp.result_type(x)
        if dtype.itemsize <= 2:
            dtype = jnp.float32
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype)
        return jnp.asarray(x, dtype)

    def init_fn(params: PyTree) -> Any:
        return inner.init(jax.tree.map(widened, params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("`params` must be passed to `update`, which starts from x, got None")
        check_same_tree("updates", updates, "params", params)
        wide_updates, params = jax.tree.map(widened, (updates, params))
        with jax.numpy_dtype_promotion("standard"):  # optax raises β₂ to the power of an integer
            directions, state = inner.update(wide_updates, state, params, **extra_args)
        of_others = lambda d, g: g if d is None else d
        return jax.tree.map(of_others, directions, updates, is_leaf=is_none), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
