"""Moves a run in the middle: from one optimizer's state into another's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax._checks import check, check_one_run, is_surely
from spa_optax._core import SPAState, z_0
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._precision import wide_dtype
from spa_optax._second_moment import RMSState, factored_axes
from spa_optax._trees import (
    by_path,
    copy,
    find,
    is_float,
    keys_of,
    kinds_of,
    like,
    only,
    replace,
    scalar_of,
)
from spa_optax._wrappers import PrimalAveragingState

ByPath = dict[str, Array]  # an array for each trained parameter, by its path
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
# The states of optax that hold the count of their schedules.
_COUNTED = (optax.ScaleByScheduleState, *INJECTED)


class Snapshot(NamedTuple):
    """A run in the middle, whatever its optimizer."""

    count: Array  # k
    z: ByPath  # z_k, in 32 bits or more where it is computed
    w: Array  # (params − z_k) / m_k
    eta: Array  # η of the last step, or of the next under Adam
    c: Array  # c, likewise
    mu_y: Array
    nu: ByPath | None  # free of bias
    base: PyTree = None  # the state of a wrapped optimizer


class Given(NamedTuple):
    """What states do not hold: the params, by their paths too, and the arguments of `convert`."""

    params: PyTree
    x: ByPath
    learning_rate: optax.ScalarOrSchedule | None
    momentum: optax.ScalarOrSchedule | None
    nesterov: bool
    averaging: optax.ScalarOrSchedule | None
    b1: Any
    b2: Any
    eps: Any
    weight_power: float
    count: int | None


def convert(
    old_state: PyTree,
    params: PyTree,
    *,
    into: PyTree,
    learning_rate: optax.ScalarOrSchedule | None = None,
    momentum: optax.ScalarOrSchedule | None = None,
    nesterov: bool = False,
    averaging: optax.ScalarOrSchedule | None = None,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_power: float = 2.0,
    count: int | None = None,
) -> PyTree:
    """The state with which another optimizer continues a run.

    Between a member of this package, or a wrapper around a base optimizer, and

        optax.sgd, optax.trace          z = x − w m
        optax.adam, optax.adamw         z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)
        optax.contrib.schedule_free     its z, and b1 = μ_y

    or another member. From `optax.sgd` w is that of the look-ahead of `spa_from_sgdm`; to it, that
    of the state. Second moments are kept, in the form that the new optimizer has, and so is the
    state of a base optimizer.

    From AdamW, the momentum of the next step is AdamW's, except for the effect of the gradient on
    ν. The gradient itself enters with weight c, where AdamW's has (1 − β₁)/(1 − β₁^(k+1)): convert
    after the first 44 steps at β₁ = 0.9, and the two are within 1 %. Weight decay, which has no
    momentum in AdamW, takes about 1/c steps to take full effect.

    On the way back m has the rounding error of x over w. It is large for params of 16 bits or
    fewer, and in float32 where the rate is almost 0 (0.8 % of m, two steps before a cosine ends).

    Args:
      old_state: the state of the run, in any chain or wrapper except `optax.flatten`. For Flax nnx,
        `optimizer.opt_state`.
      params: the current params of that run; from AdamW, better their float32 master copy.
      into: the new optimizer's state from `init`, in any chain or wrapper, also under Flax nnx. It
        may train fewer params, with the others frozen.
      learning_rate: α_k or η_k, a scalar or a schedule of the count k, as the optimizers have it.
        Needed from `optax.sgd`, from and to AdamW, and to Schedule-Free.
      momentum: β_k, a scalar or a schedule of the count k. Needed from `optax.sgd`.
      nesterov: whether that momentum is Nesterov's.
      averaging: c_{k+1} in (0, 1] of the run that has z instead of Adam's first moment. None means
        1 − b1.
      b1: β₁ of Adam, in [0, 1).
      b2: β₂ of both runs, in [0, 1), if they have a second moment.
      eps: ε of both runs, ≥ 0, if they have a second moment.
      weight_power: `weight_lr_power` of `optax.contrib.schedule_free`, ≥ 0.
      count: k, the number of steps taken, if `old_state` does not hold one. `optax.sgd` stores none
        if the learning rate is a number; if momentum is a number too, none is needed.

    Returns:
      `into` with the run, and k as its count and that of its schedules. It shares no buffer with
      the arguments.

    Raises:
      ValueError: if an argument is missing or out of range; if a state holds none of these, or
        several; if the trees do not match; or if `params` are y on one side and x on the other.

    Examples:
      SGD with α = 1 and β = 0.5, after a gradient of 2: x is at 8, and would coast to 6.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import convert, spa_from_sgdm
      >>> sgd, tx = optax.sgd(1.0, momentum=0.5), spa_from_sgdm(1.0, momentum=0.5)
      >>> x = jnp.array(10.0)
      >>> updates, state = sgd.update(jnp.array(2.0), sgd.init(x), x)
      >>> x = optax.apply_updates(x, updates)
      >>> new = convert(state, x, into=tx.init(x), learning_rate=1.0, momentum=0.5)
      >>> print(new.z, optax.tree.get(convert(new, x, into=sgd.init(x)), "trace"))
      6.0 2.0

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and its proof, with
      Adam's directions as gradients under AdamW. Defazio et al., The Road Less Scheduled, 2024,
      arXiv:2405.15682, Section 2.
    """
    check(b1=b1, b2=b2, eps=eps, nesterov=nesterov, weight_power=weight_power, count=count)
    rates = {"learning_rate": learning_rate, "momentum": momentum, "averaging": averaging}
    check(**{name: value for name, value in rates.items() if value is not None})
    hyperparams = (learning_rate, momentum, nesterov, averaging, b1, b2, eps, weight_power, count)
    given = Given(params, x := by_path(params), *hyperparams)
    read, node = _only_of(_READERS, "old_state", old_state)
    run = read(old_state, node, given)
    write, node = _only_of(_WRITERS, "into", into)
    odd = set(by_path(getattr(node, _PARAMS_IN[type(node)]))) - set(run.z)
    if odd & set(x):
        raise ValueError(
            f"`into` must hold only params that `old_state` trains, got {min(odd) or 'its root'}"
        )
    mu_y = getattr(node, "mu_y", getattr(node, "b1", 1.0))
    check_one_run("into", mu_y)
    mismatch = (run.mu_y == 1) != (scalar_of(mu_y) == 1)
    if isinstance(node, optax.contrib.ScheduleFreeState):  # its b1, up to rounding to bfloat16
        wide = [scalar_of(scalar).astype(jnp.float32) for scalar in (run.mu_y, mu_y)]
        mismatch |= jnp.abs(wide[0] - wide[1]) > 2**-8
    if is_surely(mismatch):
        raise ValueError(
            "`into` must have x as params if `old_state` has, or y, as under `gpa` and"
            " Schedule-Free, if it has that, and Schedule-Free must have μ_y as b1, got"
            f" μ_y = {run.mu_y:g} into {scalar_of(mu_y):g}"
        )
    if not is_surely(~mismatch):  # traced: a wrong answer is not silent
        poison = lambda z: jnp.where(mismatch, jnp.nan, z) if is_float(z) else z
        run = run._replace(z={key: poison(z) for key, z in run.z.items()})
    new = write(into, node, given, run)
    return copy(_with_count(new, run.count))


# The field of a state that has a leaf for each parameter.
_PARAMS_IN: dict[Any, str] = {
    optax.contrib.ScheduleFreeState: "z",
    SPAState: "z",
    optax.ScaleByAdamState: "mu",
    optax.TraceState: "trace",
}


def _required(name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"`{name}` must be given for these states, got None")
    return value


def _only_of(kinds: dict[Any, Any], name: str, state: PyTree) -> tuple[Any, Any]:
    """The function for the one optimizer that a state holds, and its node.

    A `ScheduleFreeState` counts before what its base optimizer has, and so does z.
    """
    for kind, function in kinds.items():
        if find(state, kind):
            return function, only(state, kind, name)
    names = ", ".join(f"`{kind.__name__}`" for kind in kinds)
    is_transformation = isinstance(state, optax.GradientTransformation)
    got = "a transformation, not its state" if is_transformation else "none"
    raise ValueError(f"`{name}` must hold one of {names}, got {got}")


# ----------------------------------------------------------------------------------------- readers


def _by_params(tree: PyTree, given: Given) -> ByPath:
    """The leaves of an old state, by the paths that they have in the params."""
    (keys,) = keys_of("old_state", [tree], given.params)
    return dict(zip(keys, map(jnp.asarray, jax.tree.leaves(tree)), strict=True))


def _read_trace(state: PyTree, node: Any, given: Given) -> Snapshot:
    alpha = _required("learning_rate", given.learning_rate)
    beta = _required("momentum", given.momentum)
    counts = find(state, _COUNTED)
    check_one_run("old_state", [of.count for of in counts])
    m = _by_params(node.trace, given)
    moving = jnp.any(jnp.array([jnp.any(leaf != 0) for leaf in m.values()]))
    if given.count is not None:
        k = jnp.asarray(given.count, jnp.int32)
    elif len(counts) == 1:
        k = scalar_of(counts[0].count)
    elif not (callable(alpha) or callable(beta)):
        k = jnp.where(moving, 1, 0)
    else:
        raise ValueError(
            f"`count` must be given where `old_state` does not hold one count, got {len(counts)}"
        )
    if is_surely(moving & (k == 0)):
        raise ValueError("`count` must be >= 1 where `old_state` holds momentum, got 0")
    # w_k, as step k − 1 would have computed it.
    ahead = look_ahead(alpha, beta, k - 1, nesterov=given.nesterov)
    w = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
    eta, c = eta_and_c(ahead, w, nesterov=given.nesterov)

    def z_k(x: Array, m: Array) -> Array:
        z = z_0(x, None)
        return z if not is_float(z) else z - w.astype(z.dtype) * m.astype(z.dtype)

    z = {key: z_k(given.x[key], leaf) for key, leaf in m.items()}
    last = (jnp.where(k == 0, 0, scalar) for scalar in (w, eta, c))
    return Snapshot(k.astype(jnp.int32), z, *last, mu_y=jnp.ones([]), nu=None)


def _read_adam(state: PyTree, node: Any, given: Given) -> Snapshot:
    check_one_run("old_state", node.count)
    k = scalar_of(node.count)
    eta, c = _eta_and_c_of_adam(given, k)
    if is_surely(c <= 0):
        raise ValueError(f"`averaging` must be > 0 to keep z at a finite distance, got {c}")
    # Of the momentum that step k adds AdamW corrects the bias by k + 1.
    m, nu = (
        _without_bias(moment, given, decay, count)
        for moment, decay, count in ((node.mu, given.b1, k + 1), (node.nu, given.b2, k))
    )
    w = eta * (1 - c)

    def z_k(key: str) -> Array:
        z = z_0(given.x[key], None)
        if key not in m:
            return z
        d = m[key] / (jnp.sqrt(nu[key]) + given.eps)
        return z - (w / c).astype(z.dtype) * d.astype(z.dtype)

    z = {key: z_k(key) for key in _by_params(node.mu, given)}
    last = (jnp.where(k == 0, 0, scalar) for scalar in (w, eta, c))
    return Snapshot(k, z, *last, mu_y=jnp.ones([]), nu=nu)


def _read_schedule_free(state: PyTree, node: Any, given: Given) -> Snapshot:
    check_one_run("old_state", node.step_count)
    z = _by_params(node.z, given)
    k = scalar_of(node.step_count) - 1
    mu_y, eta, total = map(scalar_of, (node.b1, node.max_lr, node.weight_sum))
    c = jnp.where(total > 0, eta**given.weight_power / jnp.where(total > 0, total, 1), 0)
    base = node.base_optimizer_state
    nu = _read_second_moment(base, given, k)
    return Snapshot(k, z, eta * (1 - c) * mu_y, eta, c, mu_y, nu, base)


def _read_spa(state: PyTree, node: Any, given: Given) -> Snapshot:
    check_one_run("old_state", node.count)
    z = _by_params(node.z, given)
    k, w, eta, c, mu_y = map(scalar_of, (node.count, node.w, node.eta, node.c, node.mu_y))
    bases = [wrapper.base for wrapper in find(state, PrimalAveragingState)]
    nu = _read_second_moment(state, given, k)
    return Snapshot(k, z, w, eta, c, mu_y, nu, *bases)


_READERS = {
    optax.contrib.ScheduleFreeState: _read_schedule_free,
    SPAState: _read_spa,
    optax.ScaleByAdamState: _read_adam,
    optax.TraceState: _read_trace,
}

# ----------------------------------------------------------------------------------------- writers


def _write_spa(into: PyTree, node: Any, given: Given, run: Snapshot) -> PyTree:
    (keys,) = keys_of("into", [node.z], given.params)
    new = SPAState(run.count, [run.z[key] for key in keys], run.eta, run.c, run.w, run.mu_y)
    into = replace(into, SPAState, lambda node: like(node, new))
    if not find(into, PrimalAveragingState):
        return _with_second_moment(into, given, run)
    place = lambda node: node._replace(base=_with_base(node.base, given, run))
    return replace(into, PrimalAveragingState, place)


def _write_trace(into: PyTree, node: Any, given: Given, run: Snapshot) -> PyTree:
    (keys,) = keys_of("into", [node.trace], given.params)
    known = (run.count > 0) & (run.w > 0)
    w = jnp.where(known, run.w, 1)

    def m(key: str) -> Array:
        distance = _distance(run, given, key)
        return jnp.where(known, distance / w.astype(distance.dtype), 0).astype(given.x[key].dtype)

    leaves = [m(key) if is_float(given.x[key]) else jnp.zeros_like(given.x[key]) for key in keys]
    return replace(into, optax.TraceState, lambda node: like(node, leaves))


def _write_adam(into: PyTree, node: Any, given: Given, run: Snapshot) -> PyTree:
    (keys,) = keys_of("into", [node.mu], given.params)
    k, all_nu = run.count, _required_second_moment(run)
    eta, c = _eta_and_c_of_adam(given, k)
    w = eta * (1 - c)
    c_over_w = jnp.where(w > 0, c / jnp.where(w > 0, w, 1), 0)

    def moments(key: str) -> tuple[Array, Array]:
        if not is_float(given.x[key]):
            return jnp.zeros_like(given.x[key]), jnp.zeros_like(given.x[key])
        distance, nu = _distance(run, given, key), all_nu[key]
        m = c_over_w.astype(distance.dtype) * distance * (jnp.sqrt(nu) + given.eps)
        return _with_bias(m, given.b1, k + 1), _with_bias(nu, given.b2, k)

    pairs = [moments(key) for key in keys]
    state = optax.ScaleByAdamState(k, [m for m, _ in pairs], [nu for _, nu in pairs])  # pyright: ignore[reportArgumentType]
    return replace(into, optax.ScaleByAdamState, lambda node: like(node, state))


def _write_schedule_free(into: PyTree, node: Any, given: Given, run: Snapshot) -> PyTree:
    """The sum of weights is the last weight over c_k."""
    (keys,) = keys_of("into", [node.z], given.params)
    k, rate = run.count, _required("learning_rate", given.learning_rate)
    eta = jnp.where(k > 0, at_count("learning_rate", rate)(k), 0)
    c = run.c.astype(eta.dtype)
    total = jnp.where(c > 0, eta**given.weight_power / jnp.where(c > 0, c, 1), 0)
    base = _with_base(node.base_optimizer_state, given, run)
    z = [run.z[key] for key in keys]
    new = optax.contrib.ScheduleFreeState(run.mu_y, total, k + 1, eta, base, z)
    return replace(into, optax.contrib.ScheduleFreeState, lambda node: like(node, new))


_WRITERS: dict[Any, Any] = {
    optax.contrib.ScheduleFreeState: _write_schedule_free,
    SPAState: _write_spa,
    optax.ScaleByAdamState: _write_adam,
    optax.TraceState: _write_trace,
}


def _distance(run: Snapshot, given: Given, key: str) -> Array:
    """x_k − z_k."""
    x, z = given.x[key], run.z[key]
    dtype = wide_dtype(x, z)
    return x.astype(dtype) - z.astype(dtype)


def _eta_and_c_of_adam(given: Given, k: Array) -> tuple[Array, Array]:
    rate = _required("learning_rate", given.learning_rate)
    c: Any = 1 - given.b1 if given.averaging is None else given.averaging
    return at_count("learning_rate", rate)(k), at_count("averaging", c)(k)


def _with_count(state: PyTree, count: Array) -> PyTree:
    """A state with a new count for its schedules."""
    # Also states with no other field, such as that of `optax.WrappedSchedule`.
    is_counted = lambda node: (
        isinstance(node, _COUNTED) or getattr(node, "_fields", None) == ("count",)
    )

    def counted(node: Any) -> Any:
        if not is_counted(node):
            return node
        inside = {name: _with_count(field, count) for name, field in node._asdict().items()}
        return node._replace(**{**inside, "count": like(node.count, count)})

    return jax.tree.map(counted, state, is_leaf=is_counted)


# --------------------------------------------------------------------------------- second moments


def _without_bias(moment: PyTree, given: Given, decay: Any, k: Array) -> ByPath:
    """A moment as Adam uses it; 0 before the first step."""

    def unbiased(v: Array) -> Array:
        v = v.astype(wide_dtype(v))
        return v / _bias(decay, jnp.maximum(k, 1), v.dtype)

    return {key: unbiased(v) for key, v in by_path(moment).items() if is_float(given.x[key])}


def _with_bias(value: Array, decay: ArrayLike, k: Array) -> Array:
    """A moment as Adam stores it."""
    return value * _bias(decay, k, value.dtype)


def _bias(decay: ArrayLike, k: Array, dtype: Any) -> Array:
    """1 − decay^k."""
    return 1 - jnp.asarray(decay, dtype) ** k.astype(dtype)


def _required_second_moment(run: Snapshot) -> ByPath:
    if run.nu is None:
        raise ValueError("`old_state` must hold a second moment, as `into` does, got none")
    return run.nu


def _second_moment_of(name: str, state: PyTree) -> Any:
    """The node that holds a second moment, full or factored, if there is one."""
    nodes = find(state, (RMSState, optax.FactoredState))
    if len(nodes) > 1:
        raise ValueError(f"`{name}` must hold one second moment, got {len(nodes)}")
    return nodes[0] if nodes else None


def _read_second_moment(state: PyTree, given: Given, k: Array) -> ByPath | None:
    """ν without bias."""
    node = _second_moment_of("old_state", state)
    if node is None:
        return None
    if not isinstance(node, optax.FactoredState):
        return _without_bias(node.nu, given, given.b2, k)
    rows, columns, full = (by_path(tree) for tree in node[1:])

    def nu(key: str) -> Array:
        if full[key].shape == given.x[key].shape:
            return full[key]
        i, j = factored_axes(given.x[key])
        row, column = jnp.expand_dims(rows[key], j), jnp.expand_dims(columns[key], i)
        return row * column / jnp.mean(row, i, keepdims=True)

    return {key: jnp.maximum(nu(key) - jnp.square(given.eps), 0) for key in full}


def _with_second_moment(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    """A state with ν, in the state's own form."""
    old, k = _second_moment_of("into", into), run.count
    if old is None:
        if run.nu is not None:
            raise ValueError("`into` must hold a second moment, as `old_state` does, got none")
        return into
    all_nu = _required_second_moment(run)

    def place(node: Any) -> Any:
        if not isinstance(node, optax.FactoredState):
            nu = [_with_bias(all_nu[key], given.b2, k) for key in by_path(node.nu)]
            return like(node, node._replace(count=k, nu=nu))
        leaves = ([], [], [])
        for key, old in by_path(node.v).items():
            v, none = all_nu[key] + jnp.square(given.eps), jnp.zeros(1)
            new = (none, none, v)
            if old.shape != v.shape:
                i, j = factored_axes(v)
                new = (v.mean(j), v.mean(i), none)
            for of_field, leaf in zip(leaves, new, strict=True):
                of_field.append(leaf)
        return like(node, optax.FactoredState(k, *leaves))  # pyright: ignore[reportArgumentType]

    return replace(into, type(old), place)


def _with_base(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    """The state of a base optimizer: that of the run, if it has the same, or with its ν."""
    if jax.tree.structure(into) == jax.tree.structure(run.base):
        return like(into, run.base)
    if _second_moment_of("into", into) is None and any(map(is_float, jax.tree.leaves(into))):
        raise ValueError(
            "`into` must have a base optimizer of the same kind as `old_state`, got one with"
            f" {kinds_of(into)}"
        )
    return _with_second_moment(into, given, run)
