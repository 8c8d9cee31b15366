"""The members of the family that differ in their scalars: `spa`, `spa_from_sgdm` and `gpa`."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray, PyTree

from spa_optax._checks import check, check_one_run, is_surely
from spa_optax._core import (
    Scalars,
    SPAState,
    StochasticRoundingState,
    check_scalars,
    is_at_start,
    transformation,
)
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import look_ahead, sgdm_scalars
from spa_optax._precision import has_narrow, wide_dtype
from spa_optax._storage import check_readable, form_of, trees_of, z_of
from spa_optax._trees import (
    by_path,
    check_same_tree,
    copy,
    find,
    is_float,
    keys_of,
    kinds_of,
    like,
    replace,
    scalar_of,
)
from spa_optax._xla import select


def spa(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.1,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum via primal averaging (SPA).

    With x_k the params, g_k the gradient at x_k and z_0 = x_0, step k = 0, 1, 2, … is

        z_{k+1} = z_k − η_k g_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}

    For constants this is `optax.sgd(η c, momentum=1 − c)`, the same iterates x_k. For schedules see
    `hyperparams_to_sgdm`. To keep the hyper-parameters of SGD+M instead, use `spa_from_sgdm`. The
    params are the point to evaluate and to save; z is in the state.

    Put gradient transforms (clipping, `optax.add_decayed_weights`) before `spa` in a chain. They
    must keep the gradient's sign: after a finished optimizer, such as `optax.sgd(0.1)`, the loss
    climbs, and nothing warns. Do not modify the update after `spa` or around it
    (`optax.contrib.reduce_on_plateau`, `optax.lookahead`): z would not follow, and would pull x
    back. After editing params outside the optimizer, call `reanchor`.

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k. To replace SGD+M with learning
        rate α and momentum β, use η = α/(1 − β): ten times α at β = 0.9.
      averaging: c_{k+1} = 1 − momentum, in [0, 1], a scalar or a schedule of the count k.
      state_dtype: dtype of z. None means the params' dtype, but float32 for params of 16 bits or
        fewer: z is then also their master copy. In 16 bits or fewer the state holds z − params, in
        a node of its own: in float16, float8_e4m3fn and float8_e5m2 up to 255, 1.75 and 224.
        Elements of z that are farther from the params are moved to that limit, and
        `diagnostics.momentum_report` counts them. 8 bits need a `rounding_key`, and for rates below
        1e-4 are too few: use bfloat16. To change it in mid-run use `convert`.
        Under `optax.inject_hyperparams` put it and `rounding_key` into `static_args`.
      rounding_key: PRNG key for unbiased stochastic rounding wherever params or z are stored at
        lower precision. None rounds to nearest; complex values always are. Two optimizers, as in
        `optax.partition`, need two keys, or their bits are the same. The bits do not depend on the
        sharding under `jax.jit`. Replicas under `jax.vmap`, and shards inside
        `jax.shard_map`, share their bits. If that matters, give each its own key, such as
        `jax.random.fold_in(key, jax.lax.axis_index(axis))`, but never along an axis on which
        params are replicated.

    Returns:
      A transformation whose state is an `SPAState`. `update` needs `params`, and keeps their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      With η = 1, c = 0.5 and a gradient of 2: z goes from 10 to 8, and x half of the way to it.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa
      >>> tx = spa(learning_rate=1.0, averaging=0.5)
      >>> params = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(params), params)
      >>> print(state.z, optax.apply_updates(params, updates))
      8.0 9.0

    References:
      Defazio, Momentum via Primal Averaging: Theoretical Insights and Learning Rate Schedules for
      Non-Convex Optimization, 2020, arXiv:2010.00406, Section 2, "The averaging form of momentum".
    """
    check(learning_rate=learning_rate, averaging=averaging)
    check(state_dtype=state_dtype, rounding_key=rounding_key)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def rule(state: SPAState, _: PyTree) -> Scalars:
        eta, c = eta_at(state.count), c_at(state.count)
        # While η = 0 no gradient enters z, and x − z shrinks by 1 − c, as if m were constant.
        return Scalars(eta, c, w=(1 - c) * jnp.where(eta > 0, eta, state.w.astype(eta.dtype)))

    return transformation(rule, state_dtype, rounding_key)


def spa_from_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule = 0.9,
    nesterov: bool = False,
    *,
    horizon: int | None = None,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum, run as primal averaging: `optax.sgd`, with z in the state.

    Takes the hyper-parameters of SGD+M and gives its iterates, for any schedules:

        m_{k+1} = β_k m_k + g_k        x_{k+1} = x_k − α_k m_{k+1}

    through z_k = x_k − w_k m_k, where w_k depends on later α and β:

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i      η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    so that z_k is the point at which x would come to rest if every later gradient were zero. For
    constants, and β > 0, η = α/(1 − β) and c = 1 − β. With Nesterov momentum, α_k β_k replaces α_k
    in these three; then η_k is larger by α_k, and x also moves by −α_k (1 − c_{k+1}) g_k.

    Where schedules cannot be evaluated ahead (`optax.inject_hyperparams`, a schedule edited before
    a run is resumed), z − x is rescaled. The iterates are unchanged, but z need not be the resting
    point. (Neither is it if β or all later α are 0.) Rescaling also scales the rounding error of
    x in z − x, so for 16-bit params prefer schedules. Where a rising rate would magnify that error
    over 2,896 times (float32) or 11 times (bfloat16), momentum restarts from zero. (Where z − x
    is stored there is no such error.) For the place in a chain, and for edited params, see `spa`.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k. A schedule is evaluated under
        `jax.vmap` for counts ahead of k, where NaN and negative values count as 0.
      momentum: β_k in [0, 1), a scalar or a schedule of the count k.
      nesterov: whether to use Nesterov momentum.
      horizon: how many steps to look ahead, at least 1. None means, for a number β, until
        β^horizon < 1e-8 (175 steps at 0.9, at most 32,768). For a schedule or an array it means
        2,000 steps, which is enough up to β = 0.99. With fewer steps the iterates remain exact,
        but z is rescaled. Under `optax.inject_hyperparams` put it into `static_args`.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`.

    Returns:
      A transformation whose state is an `SPAState`. `update` needs `params`, and keeps their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      α = 1, β = 0.5, a gradient of 2, then none: x goes from 10 towards 6, where z is from step 1.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_from_sgdm
      >>> tx = spa_from_sgdm(learning_rate=1.0, momentum=0.5)
      >>> params = jnp.array(10.0)
      >>> state = tx.init(params)
      >>> for gradient in (2.0, 0.0, 0.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(state.z, params)
      6.0 8.0
      6.0 7.0
      6.0 6.5

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1. Its recursion gives
      the same iterates, but its η_k can blow up; the look-ahead is this package's.
    """
    check(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, horizon=horizon)
    check(state_dtype=state_dtype, rounding_key=rounding_key)

    def rule(state: SPAState, params: PyTree) -> Scalars:
        ahead = look_ahead(learning_rate, momentum, state.count, nesterov=nesterov, horizon=horizon)
        return sgdm_scalars(ahead, state.w, is_master=has_narrow(params), nesterov=nesterov)

    return transformation(rule, state_dtype, rounding_key)


def gpa(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule = 0.05,
    interpolation: optax.ScalarOrSchedule = 0.9,
    *,
    state_dtype: DTypeLike | None = None,
    rounding_key: PRNGKeyArray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Generalized primal averaging (GPA): gradients at y, between the average x and z.

    c is 1 − μ_x in the paper, and d_k the incoming update, taken at y_k. Step k = 0, 1, … is

        z_{k+1} = z_k − γ_k d_k
        x_{k+1} = (1 − c_{k+1}) x_k + c_{k+1} z_{k+1}
        y_{k+1} = μ_y x_{k+1} + (1 − μ_y) z_{k+1}

    The params are y; the point to evaluate is x = `eval_params(opt_state, params)`. Only y and z
    are stored, as by `spa`:

        y_{k+1} = y_k + c_{k+1} (z_{k+1} − y_k) − δ_k d_k      δ_k = γ_k (1 − c_{k+1}) (1 − μ_y)

    Special cases:

    - μ_y = 1: `spa`. c = 1: plain steps along the direction, z = x = y.
    - μ_x = μ_y = β with γ = α/(1 − β): Keras's form of Nesterov momentum β. For constants this is
      also `optax.sgd` with Nesterov momentum.
    - Constants: quasi-hyperbolic momentum with β = μ_x and ν = μ_y.
    - Averaging by `schedule_free_averaging`, 1/(k + 1) at a constant rate: Schedule-Free.

    DiLoCo with one worker takes a slow step with momentum μ every H steps. GPA smooths that, with
    μ_x = μ^(1/H). For the usual μ = 0.9:

        H               1        4        8        16       32       64
        averaging       0.1      0.026    0.013    0.0066   0.0033   0.0016

    x is the mean of about 1/c values of z. The defaults suit runs of 300 to 5,000 steps, and
    directions without momentum. μ_y smooths those: a share 1 − μ_y (1 − c) of each enters y at
    once. The authors use H = 32 and μ_y = 0.7, for long runs and directions with their own
    momentum, such as `optax.scale_by_adam`'s.

    After a finished optimizer, such as `optax.adam(1e-3)`, the loss climbs, and nothing warns: use
    `primal_averaging`. For the place in a chain, and for edited params, see `spa`.

    Args:
      learning_rate: γ_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} = 1 − μ_x in [0, 1], a scalar or a schedule of the count k.
      interpolation: μ_y in (0, 1], a scalar or a schedule of the count k, for y_{k+1}. x has the
        rounding error of y, divided by μ_y.
      state_dtype: dtype of z, as for `spa`.
      rounding_key: for stochastic rounding, as for `spa`. 16-bit params need it: rounded to
        nearest, y does not change if c (z − y) − δ d is less than half an ulp.

    Returns:
      A transformation whose state is an `SPAState`. `update` needs `params`, and keeps their dtype.

    Raises:
      ValueError: if an argument is out of range, or, in `update`, the trees differ.

    Examples:
      γ = 1, c = μ_y = 0.5, a gradient of 4: z goes from 10 to 6, x half as far, y midway between.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, gpa
      >>> tx = gpa(learning_rate=1.0, averaging=0.5, interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(y), y)
      >>> y = optax.apply_updates(y, updates)
      >>> print(state.z, eval_params(state, y), y)
      6.0 8.0 7.0

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, 2025,
      arXiv:2512.17131. Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682. Ma, Yarats,
      Quasi-hyperbolic momentum and Adam for deep learning, 2019, arXiv:1810.06801.
    """
    check(learning_rate=learning_rate, averaging=averaging, interpolation=interpolation)
    check(state_dtype=state_dtype, rounding_key=rounding_key)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)
    mu_y_at = at_count("interpolation", interpolation)

    def rule(state: SPAState, _: PyTree) -> Scalars:
        k = state.count
        return gpa_scalars(eta_at(k), c_at(k), mu_y_at(k), state)

    return transformation(rule, state_dtype, rounding_key, mu_y_at)


def gpa_scalars(
    eta: Float[Array, ""], c: Float[Array, ""], mu_y: Float[Array, ""], state: SPAState
) -> Scalars:
    """The scalars of `gpa`, from the μ_y of y_{k+1}; the state has that of y_k."""
    mu_x, before = 1 - c, state.mu_y
    # y_k − z_k = μ_y (x_k − z_k) with the μ_y of y_k. If μ_y changes by a factor ρ, replace μ_x by
    # ρ μ_x.
    same = is_at_start(state) | (mu_y.astype(jnp.float32) == before)
    change = mu_y / jnp.where(before > 0, before, 1).astype(mu_y.dtype) - 1  # ρ − 1
    change -= jnp.where(same, jax.lax.stop_gradient(change), 0)  # its derivative is kept
    w = state.w.astype(eta.dtype)
    return Scalars(
        eta=eta,
        c=c,
        p=c - mu_x * change,
        w=mu_x * jnp.where(eta > 0, mu_y * eta, (1 + change) * w),
        delta=eta * mu_x * (1 + change - mu_y),
        mu_y=mu_y,
    )


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The params to evaluate and to save: x, for any member of the family.

        x_k = y_k + (1/μ_y − 1)(y_k − z_k)      under `gpa`

    Under `spa`, `spa_from_sgdm` and `stochastic_rounding`, x is `params`. Leaves handled by another
    optimizer, or by none, are returned unchanged. Arrays that are unchanged are those of `params`,
    so a step that donates them deletes them: to keep x, copy it, `jax.tree.map(jnp.copy, x)`.

    With Flax nnx, evaluate a clone. `nnx.state` and `nnx.split` return live variables, so the model
    itself could not go back from x to y:

        average = nnx.clone(model)
        x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
        nnx.update(average, x)
        average.eval()

    Args:
      opt_state: a state that holds one of the family, or several that divide the params, in any
        chain or wrapper except `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      params: y_k, the current params of that run.

    Returns:
      x_k, shaped like `params` and of their dtype.

    Raises:
      ValueError: if `opt_state` has no `SPAState`, or batched ones, or z does not fit `params`, or
        was cast to a dtype in which it is stored otherwise.

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
      Defazio et al., Smoothing DiLoCo with Primal Averaging, 2025, arXiv:2512.17131.
    """
    if find(opt_state, StochasticRoundingState) and not find(opt_state, SPAState):
        return params
    states = _states("opt_state", opt_state)
    check_one_run("opt_state", [(state.count, state.mu_y) for state in states])
    x = by_path(params)
    trees = [jax.tree.map(jnp.asarray, trees_of(state.z)) for state in states]
    keys = keys_of("opt_state", [tree for tree, *_ in trees], params)
    for state, of_state, of_z in zip(states, keys, trees, strict=True):
        check_readable("opt_state", state.z, params)
        check_scalars("opt_state", state)
        if is_surely(scalar_of(state.mu_y) == 1):
            continue
        if is_surely(scalar_of(state.mu_y) <= 0):
            raise ValueError("`opt_state` must have a μ_y > 0, got 0: params are z, and x is lost")
        for key, *arrays in zip(of_state, *map(jax.tree.leaves, of_z), strict=True):
            if is_float(x[key]):
                x[key] = _x(x[key], z_of(form_of(state.z), x[key], *arrays), state)
    return jax.tree.unflatten(jax.tree.structure(params), x.values())


def _states(name: str, state: PyTree) -> list[SPAState]:
    states = find(state, SPAState)
    if not states:
        raise ValueError(f"`{name}` must hold an `SPAState`, got {kinds_of(state)}")
    return states


def _x(y: Array, z: Array, state: SPAState) -> Array:
    mu_y = scalar_of(state.mu_y).astype(z.dtype)
    y_wide = y.astype(z.dtype)
    x = y_wide + (1 / mu_y - 1) * (y_wide - z)
    # Params may have been replaced before the first step, and z is not updated until then.
    return select(is_at_start(state), y, x.astype(y.dtype))


def reanchor(spa_state: PyTree, old_params: PyTree, new_params: PyTree) -> PyTree:
    """Shifts z along with params that were edited outside the optimizer.

        z ← z + (x_new − x_old)

    Use it after params were pruned, projected, averaged or reloaded: z would pull them back to
    their old values. With Flax nnx, call it before `nnx.update`, which changes the variables that
    `nnx.state` returned.

    Args:
      spa_state: a state that holds one of the family, as for `eval_params`.
      old_params: the params as the last update left them.
      new_params: the params that replace them.

    Returns:
      `spa_state` with z shifted; momentum is unchanged.

    Raises:
      ValueError: if `spa_state` holds no `SPAState`, the trees differ, or both are the same arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import reanchor, spa
      >>> params = jnp.array([3.0, -1.0])
      >>> pruned = jnp.array([3.0, 0.0])
      >>> print(reanchor(spa(1.0).init(params), params, pruned).z)
      [3. 0.]
    """
    check_same_tree("new_params", new_params, "old_params", old_params, same_nodes=False)
    states = _states("spa_state", spa_state)
    for state in states:
        check_readable("spa_state", state.z, old_params)
    zs = [trees_of(state.z)[0] for state in states]
    keys, _ = (iter(keys_of("spa_state", zs, params)) for params in (old_params, new_params))
    old_leaves, new_leaves = jax.tree.leaves(old_params), jax.tree.leaves(new_params)
    if old_leaves and all(old is new for old, new in zip(old_leaves, new_leaves, strict=True)):
        raise ValueError("`new_params` must not be the arrays of `old_params`: nnx.state is live")
    old, new = by_path(old_params), by_path(new_params)

    def shifted(key: str, z: Array) -> Array:
        if not is_float(z):
            return new[key]
        if not is_float(new[key]):
            got = f"{new[key].dtype} at {key or 'its root'}"
            raise ValueError(f"`new_params` must be floating-point where z is, got {got}")
        dtype = wide_dtype(z, old[key])
        return (z.astype(dtype) + (new[key].astype(dtype) - old[key].astype(dtype))).astype(z.dtype)

    def move(node: SPAState) -> SPAState:
        of_node = next(keys)
        if form_of(node.z).follows_params:
            return node
        z = map(jnp.asarray, jax.tree.leaves(node.z))
        return node._replace(z=like(node.z, list(map(shifted, of_node, z))))

    return copy(replace(spa_state, SPAState, move))
