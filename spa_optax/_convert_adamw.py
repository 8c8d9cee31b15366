"""Converts states to and from AdamW and Schedule-Free, in mid-run."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax._checks import (
    check_averaging,
    check_b1,
    check_concrete,
    check_one_run,
    check_rate,
    check_second_moment,
    is_surely,
    keys_of,
)
from spa_optax._convert import by_path, copied, like, replace_nodes, with_count
from spa_optax._core import GPAState, SPAState, find, only, scalar_of, z_0
from spa_optax._hyperparams import AtCount, at_count
from spa_optax._precision import is_float, wide_dtype
from spa_optax._second_moment import RMSState, factored_axes

ByPath = dict[str, Array]  # an array for each trained parameter, by its path


def state_from_adamw(
    adamw_state: PyTree,
    params: PyTree,
    *,
    learning_rate: optax.ScalarOrSchedule,
    into: PyTree,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    averaging: optax.ScalarOrSchedule | None = None,
) -> PyTree:
    """The state with which `spa_adamw` continues a run of `optax.adamw`.

        z_k = x_k − η_k (1 − c)/c · m_k / (1 − β₁^(k+1)) / (√ν̂_k + ε)

    The momentum of the next step is then AdamW's, except for the effect of the gradient on ν. The
    gradient itself enters with weight c, where AdamW's has (1 − β₁)/(1 − β₁^(k+1)): convert after
    the first 44 steps at β₁ = 0.9, and the two are within 1 %. ν and the count are kept. Weight
    decay, which has no momentum in AdamW, takes about 1/c steps to take full effect.

    Args:
      adamw_state: a state that holds one `optax.adam`, `optax.adamw` or `optax.scale_by_adam`, in
        any chain or wrapper except `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      params: x_k, the current params of that run, or their float32 master copy.
      learning_rate: η_k as it will be passed to `spa_adamw`, a scalar or a schedule of the count k.
      into: the state of `spa_adamw` from `init`, in any chain or wrapper, also under Flax nnx. Its
        second moment may be full, 16-bit or factored.
      b1: β₁ of that run, in [0, 1).
      b2: β₂ of both runs, in [0, 1).
      eps: ε of both runs, ≥ 0.
      averaging: c_{k+1} in (0, 1] as it will be passed to `spa_adamw`. None means 1 − b1.

    Returns:
      `into` with z, ν, and k as its count and that of its schedules; the rest is unchanged.

    Raises:
      ValueError: if `adamw_state` does not hold exactly one state of Adam, or `into` one of
        `spa_adamw`; if either does not match `params`; or if a number is out of range.

    Examples:
      With m̂/√ν̂ = 4/4, momentum would move x on by 1/2, 1/4, … z is where that ends.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_adamw, state_from_adamw
      >>> x = jnp.array(9.0)
      >>> moments = {"mu": jnp.array(3.0), "nu": jnp.array(0.016), "count": jnp.array(1)}
      >>> state = optax.tree.set(optax.adamw(1.0, b1=0.5).init(x), **moments)
      >>> into = spa_adamw(1.0, averaging=0.5).init(x)
      >>> new = state_from_adamw(state, x, learning_rate=1.0, b1=0.5, into=into)
      >>> print(f"{optax.tree.get(new, 'z'):.3f}")  # m̂ = 3/(1 − 0.5²), ν̂ = 0.016/(1 − 0.999)
      8.000

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1, with Adam's
      directions as gradients.
    """
    eta_at, c_at = _checked(learning_rate, averaging, b1, b2, eps)
    adam, x = only(adamw_state, optax.ScaleByAdamState, "adamw_state"), by_path(params)
    check_one_run("adamw_state", adam.count)
    keys_of("adamw_state", [adam.mu], params)
    k = scalar_of(adam.count)
    eta, c = eta_at(k), c_at(k)
    if is_surely(c <= 0):
        raise ValueError(f"`averaging` must be > 0 to keep z at a finite distance, got {c}")
    # Of the momentum that step k adds AdamW corrects the bias by k + 1.
    m, nu = _without_bias(adam.mu, x, b1, k + 1), _without_bias(adam.nu, x, b2, k)
    w = eta * (1 - c)

    def z_k(key: str) -> Array:
        z = z_0(x[key], None)
        if key not in m:
            return z
        d = m[key] / (jnp.sqrt(nu[key]) + eps)
        return z - (w / c).astype(z.dtype) * d.astype(z.dtype)

    if find(into, GPAState):
        raise ValueError("`into` must be a state of `spa_adamw`, got one of `gpa_adamw`")
    z = {key: z_k(key) for key in _keys_of_z("into", into, params, nu)}
    last = (jnp.where(k == 0, 0, scalar) for scalar in (eta, c, w))
    state = SPAState(k, list(z.values()), *last)
    into = replace_nodes(into, SPAState, lambda node: like(node, state))
    return copied(with_count(_with_second_moment(into, nu, b2, eps, k), k))


def state_to_adamw(
    spa_state: PyTree,
    params: PyTree,
    *,
    learning_rate: optax.ScalarOrSchedule,
    into: PyTree,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    averaging: optax.ScalarOrSchedule | None = None,
) -> PyTree:
    """The state with which `optax.adamw` continues a run of `spa_adamw`.

        m_k / (1 − β₁^(k+1)) = (x_k − z_k) c / (η_k (1 − c)) · (√ν̂_k + ε)

    The reverse of `state_from_adamw`. A factored ν is expanded. If η_k is 0 or c is 1, m is 0.

    Args:
      spa_state: a state that holds one `spa_adamw`, in any chain or wrapper except `optax.flatten`.
        For Flax nnx, `optimizer.opt_state`.
      params: x_k, the current params of that run.
      learning_rate: η_k as it was passed to `spa_adamw`, a scalar or a schedule of the count k.
      into: the state from `init` of one `optax.adam`, `optax.adamw` or `optax.scale_by_adam`, in
        any chain or wrapper, also under Flax nnx.
      b1: β₁ of the new run, in [0, 1).
      b2: β₂ of both runs, in [0, 1).
      eps: ε of both runs, ≥ 0.
      averaging: c_{k+1} in (0, 1] as it was passed to `spa_adamw`. None means 1 − b1.

    Returns:
      `into` with m, ν, and k as its count and that of its schedules; the rest is unchanged.

    Raises:
      ValueError: if `spa_state` does not hold exactly one state of `spa_adamw`, or `into` one of
        Adam; if either does not match `params`; or if a number is out of range.

    Examples:
      One step of 1 with c = 0.5 takes x half of the way to z, with as far to go.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_adamw, state_to_adamw
      >>> tx = spa_adamw(1.0, averaging=0.5, weight_decay=0.0)
      >>> x = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(x), x)
      >>> x = optax.apply_updates(x, updates)
      >>> adamw = optax.adamw(1.0, b1=0.5)
      >>> state = state_to_adamw(state, x, learning_rate=1.0, b1=0.5, into=adamw.init(x))
      >>> print(f"{optax.tree.get(state, 'mu'):.3f}")  # 2 · (1 − 0.5²)
      1.500

    References:
      See `state_from_adamw`.
    """
    eta_at, c_at = _checked(learning_rate, averaging, b1, b2, eps)
    held, x = only(spa_state, SPAState, "spa_state"), by_path(params)
    if find(spa_state, GPAState):
        raise ValueError("`spa_state` must be a state of `spa_adamw`, got one of `gpa_adamw`")
    check_one_run("spa_state", held.count)
    k = scalar_of(held.count)
    eta, c = eta_at(k), c_at(k)
    nu = _second_moment("spa_state", spa_state, x, b2, eps, k)
    keys = _keys_of_z("spa_state", spa_state, params, nu)
    z = dict(zip(keys, map(jnp.asarray, jax.tree.leaves(held.z)), strict=True))
    w = eta * (1 - c)
    c_over_w = jnp.where(w > 0, c / jnp.where(w > 0, w, 1), 0)

    def m_hat(key: str) -> Array:
        dtype = wide_dtype(x[key], z[key])
        d = c_over_w.astype(dtype) * (x[key].astype(dtype) - z[key].astype(dtype))
        return d * (jnp.sqrt(nu[key]) + eps)

    m = {key: m_hat(key) for key in nu}
    adam = only(into, optax.ScaleByAdamState, "into")
    (keys,) = keys_of("into", [adam.mu], params)
    _check_params("into", keys, nu, x)
    stored = lambda moment, decay, k: [
        _with_bias(moment[key], decay, k) if key in moment else jnp.zeros_like(x[key])
        for key in keys
    ]
    state = optax.ScaleByAdamState(k, stored(m, b1, k + 1), stored(nu, b2, k))
    into = replace_nodes(into, optax.ScaleByAdamState, lambda node: like(node, state))
    return copied(with_count(into, k))


def state_from_schedule_free(
    schedule_free_state: PyTree,
    params: PyTree,
    *,
    into: PyTree,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_lr_power: float = 2.0,
) -> PyTree:
    """The state with which `gpa` or `gpa_adamw` continues a run of `optax.contrib.schedule_free`.

    Both have y as params, and store z. b1 (as μ_y), the second moment and the count are kept too.
    With `schedule_free_averaging` as averaging, the run continues unchanged.

    Args:
      schedule_free_state: a state that holds one `ScheduleFreeState`, in any chain or wrapper
        except `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      params: y_k, the current params of that run.
      into: the state of `gpa` or `gpa_adamw` from `init`, in any chain or wrapper, also under Flax
        nnx. If it has a second moment, so must that run.
      b2: β₂ of both runs, in [0, 1), if they have a second moment.
      eps: ε of both runs, ≥ 0, if they have a second moment.
      weight_lr_power: as passed to `optax.contrib.schedule_free`.

    Returns:
      `into` with z, μ_y, ν, and k as its count and that of its schedules; the rest is unchanged.

    Raises:
      ValueError: if `schedule_free_state` does not hold exactly one `ScheduleFreeState`, or `into`
        one `GPAState`, or if either does not match `params`.

    Examples:
      Here x is the mean of two values of z, 9 and 7.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, gpa, state_from_schedule_free
      >>> tx = optax.contrib.schedule_free(optax.sgd(1.0), 1.0, b1=0.5)
      >>> y = jnp.array(10.0)
      >>> state = tx.init(y)
      >>> for gradient in (1.0, 2.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, y)
      ...     y = optax.apply_updates(y, updates)
      >>> new = state_from_schedule_free(state, y, into=gpa(1.0, interpolation=0.5).init(y))
      >>> print(y, new.inner.z, eval_params(new, y))
      7.5 7.0 8.0

    References:
      Defazio et al., The Road Less Scheduled, 2024, arXiv:2405.15682, Section 2.
    """
    check_second_moment(b2, eps)
    held = only(schedule_free_state, optax.contrib.ScheduleFreeState, "schedule_free_state")
    check_one_run("schedule_free_state", held.step_count)
    power = check_concrete("weight_lr_power", weight_lr_power, "finite", math.isfinite)
    only(into, GPAState, "into")
    x = by_path(params)
    (keys,) = keys_of("schedule_free_state", [held.z], params)
    z = dict(zip(keys, jax.tree.leaves(held.z), strict=True))
    of_into = _keys_of_z("into", into, params, {key: x[key] for key in z if is_float(x[key])})
    k = scalar_of(held.step_count) - 1
    mu_y, eta, total = map(scalar_of, (held.b1, held.max_lr, held.weight_sum))
    c = jnp.where(total > 0, eta**power / jnp.where(total > 0, total, 1), 0)
    inner = SPAState(k, [z[key] for key in of_into], eta, c, eta * (1 - c) * mu_y)
    into = replace_nodes(into, GPAState, lambda node: like(node, GPAState(inner, mu_y)))
    if _second_moments(into):
        nu = _second_moment("schedule_free_state", held.base_optimizer_state, x, b2, eps, k)
        into = _with_second_moment(into, nu, b2, eps, k)
    return copied(with_count(into, k))


def state_to_schedule_free(
    gpa_state: PyTree,
    params: PyTree,
    *,
    learning_rate: optax.ScalarOrSchedule,
    into: PyTree,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_lr_power: float = 2.0,
) -> PyTree:
    """The state with which `optax.contrib.schedule_free` continues a run of `gpa` or `gpa_adamw`.

    The reverse of `state_from_schedule_free`. The sum of weights is the last weight over c_k.

    Args:
      gpa_state: a state that holds one `gpa` or `gpa_adamw`, in any chain or wrapper except
        `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      params: y_k, the current params of that run.
      learning_rate: as passed to `optax.contrib.schedule_free`, a scalar or a schedule that does
        not fall.
      into: the state of `optax.contrib.schedule_free` from `init`, in any chain or wrapper, also
        under Flax nnx. If it has a second moment, so must that run.
      b2: β₂ of both runs, in [0, 1), if they have a second moment.
      eps: ε of both runs, ≥ 0, if they have a second moment.
      weight_lr_power: as passed to `optax.contrib.schedule_free`.

    Returns:
      `into` with z, b1, the sum of weights, ν, and the count; the rest is unchanged.

    Raises:
      ValueError: if `gpa_state` does not hold exactly one `GPAState`, or `into` one
        `ScheduleFreeState`, or if either does not match `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import gpa, schedule_free_averaging, state_to_schedule_free
      >>> tx = gpa(1.0, schedule_free_averaging(1.0), interpolation=0.5)
      >>> y = jnp.array(10.0)
      >>> state = tx.init(y)
      >>> for gradient in (1.0, 2.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, y)
      ...     y = optax.apply_updates(y, updates)
      >>> into = optax.contrib.schedule_free(optax.sgd(1.0), 1.0, b1=0.5).init(y)
      >>> new = state_to_schedule_free(state, y, learning_rate=1.0, into=into)
      >>> print(new.z, new.weight_sum, optax.contrib.schedule_free_eval_params(new, y))
      7.0 2.0 8.0

    References:
      See `state_from_schedule_free`.
    """
    check_rate("learning_rate", learning_rate)
    check_second_moment(b2, eps)
    held, x = only(gpa_state, GPAState, "gpa_state"), by_path(params)
    check_one_run("gpa_state", held.inner.count)
    power = check_concrete("weight_lr_power", weight_lr_power, "finite", math.isfinite)
    (keys,) = keys_of("gpa_state", [held.inner.z], params)
    z = dict(zip(keys, jax.tree.leaves(held.inner.z), strict=True))
    old = only(into, optax.contrib.ScheduleFreeState, "into")
    (of_into,) = keys_of("into", [old.z], params)
    _check_params("into", of_into, {key: x[key] for key in z if is_float(x[key])}, x)
    k = scalar_of(held.inner.count)
    eta = jnp.where(k > 0, at_count("learning_rate", learning_rate)(k), 0)
    c = scalar_of(held.inner.c).astype(eta.dtype)
    total = jnp.where(c > 0, eta**power / jnp.where(c > 0, c, 1), 0)
    base = old.base_optimizer_state
    if _second_moments(base):
        nu = _second_moment("gpa_state", gpa_state, x, b2, eps, k)
        base = _with_second_moment(base, nu, b2, eps, k)
    new = optax.contrib.ScheduleFreeState(
        scalar_of(held.mu_y), total, k + 1, eta, base, [z[key] for key in of_into]
    )
    into = replace_nodes(into, optax.contrib.ScheduleFreeState, lambda node: like(node, new))
    return copied(with_count(into, k))


# ---------------------------------------------------------------------------------- moments of Adam


def _checked(
    learning_rate: optax.ScalarOrSchedule,
    averaging: optax.ScalarOrSchedule | None,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
) -> tuple[AtCount, AtCount]:
    """η and c of a count."""
    check_rate("learning_rate", learning_rate)
    check_b1(b1)
    check_second_moment(b2, eps)
    c: Any = 1 - b1 if averaging is None else averaging
    check_averaging(c)
    return at_count("learning_rate", learning_rate), at_count("averaging", c)


def _without_bias(moment: PyTree, x: ByPath, decay: ArrayLike, k: Array) -> ByPath:
    """A moment as Adam uses it; 0 before the first step."""

    def unbiased(v: Array) -> Array:
        v = v.astype(wide_dtype(v))
        return v / _bias(decay, jnp.maximum(k, 1), v.dtype)

    return {key: unbiased(v) for key, v in by_path(moment).items() if is_float(x[key])}


def _with_bias(value: Array, decay: ArrayLike, k: Array) -> Array:
    """A moment as Adam stores it."""
    return value * _bias(decay, k, value.dtype)


def _bias(decay: ArrayLike, k: Array, dtype: Any) -> Array:
    """1 − decay^k."""
    return 1 - jnp.asarray(decay, dtype) ** k.astype(dtype)


def _keys_of_z(name: str, state: PyTree, params: PyTree, trained: ByPath) -> list[str]:
    """The paths of the leaves of z, in their order."""
    (keys,) = keys_of(name, [only(state, SPAState, name).z], params)
    _check_params(name, keys, trained, by_path(params))
    return keys


def _check_params(name: str, keys: list[str], trained: ByPath, x: ByPath) -> None:
    """Raises ValueError unless two states hold the same params; `into` may train fewer."""
    of_state = {key for key in keys if is_float(x[key])}
    odd = of_state - set(trained) if name == "into" else of_state ^ set(trained)
    if odd:
        rule = "hold only params of" if name == "into" else "hold the same params as"
        raise ValueError(
            f"`{name}` must {rule} the other state, got a difference at {min(odd) or 'its root'}"
        )


def _second_moments(state: PyTree) -> list[Any]:
    """The nodes that hold a second moment, full or factored."""
    return find(state, (RMSState, optax.FactoredState))


def _second_moment(
    name: str, state: PyTree, x: ByPath, b2: ArrayLike, eps: ArrayLike, k: Array
) -> ByPath:
    """ν without bias."""
    nodes = _second_moments(state)
    if len(nodes) != 1:
        raise ValueError(f"`{name}` must hold one second moment, got {len(nodes)}")
    if not isinstance(nodes[0], optax.FactoredState):
        return _without_bias(nodes[0].nu, x, b2, k)
    rows, columns, full = (by_path(tree) for tree in nodes[0][1:])

    def nu(key: str) -> Array:
        if full[key].shape == x[key].shape:
            return full[key]
        i, j = factored_axes(x[key])
        row, column = jnp.expand_dims(rows[key], j), jnp.expand_dims(columns[key], i)
        return row * column / jnp.mean(row, i, keepdims=True)

    return {key: jnp.maximum(nu(key) - eps**2, 0) for key in full}


def _with_second_moment(
    into: PyTree, nu: ByPath, b2: ArrayLike, eps: ArrayLike, k: Array
) -> PyTree:
    """A state with ν, given without bias, in the state's own form."""
    nodes = _second_moments(into)
    if len(nodes) != 1:
        raise ValueError(f"`into` must hold one second moment, got {len(nodes)}")

    def place(node: Any) -> Any:
        if not isinstance(node, optax.FactoredState):
            stored = [_with_bias(nu[key], b2, k) for key in by_path(node.nu)]
            return like(node, node._replace(count=k, nu=stored))
        leaves = ([], [], [])
        for key, old in by_path(node.v).items():
            v, none = nu[key] + eps**2, jnp.zeros(1)
            new = (none, none, v)
            if old.shape != v.shape:
                i, j = factored_axes(v)
                new = (v.mean(j), v.mean(i), none)
            for of_field, leaf in zip(leaves, new, strict=True):
                of_field.append(leaf)
        return like(node, optax.FactoredState(k, *leaves))

    return replace_nodes(into, type(nodes[0]), place)
