"""Moves a run in the middle: from one optimizer's state into another's."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax._checks import check, check_one_run, is_surely
from spa_optax._core import SPAState, StochasticRoundingState, times
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._optax_states import INJECTED, MOMENTUM, SECOND_MOMENTS, RMSState
from spa_optax._precision import wide_dtype
from spa_optax._second_moment import factored_axes
from spa_optax._storage import form_of, storage_of, trees_of
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
from spa_optax._wrappers import Float8MomentumState, PrimalAveragingState

ByPath = dict[str, Array]  # an array for each trained parameter, by its path
Given = SimpleNamespace  # x, the params by their paths, and the arguments of `convert`
# The state of a direction in a chain, which a run keeps as it is.
_DIRECTIONS = (Float8MomentumState, *MOMENTUM, optax.ScaleByRmsState)


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

    Between a member of this package, or a wrapper around a base optimizer, and another member or

        optax.sgd, optax.trace          z = x − w m
        optax.adam, optax.adamw         z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)
        optax.contrib.schedule_free     its z, and b1 = μ_y

    From `optax.sgd` w is that of `spa_from_sgdm`; to `optax.sgd` it is the state's.
    Second moments, in the new optimizer's form, are kept, and so is the state of a base optimizer
    and of other directions in a chain, such as `optax.ema`.

    From AdamW, the next step's momentum is AdamW's, except for the gradient's effect on ν. The
    gradient itself enters with weight c, where AdamW's has (1 − β₁)/(1 − β₁^(k+1)): within 1 %
    after 44 steps at β₁ = 0.9. Weight decay, which has no momentum in AdamW, takes about 1/c steps
    to take full effect.

    On the way back from a z of more than 16 bits m has the rounding error of x, divided by w. It is
    large for params of 16 bits or fewer, and in float32 where the rate is almost 0: 0.8 % of m, two
    steps before a cosine ends.

    Args:
      old_state: the run's state, in any chain or wrapper except `optax.flatten`. For Flax nnx,
        `optimizer.opt_state`.
      params: the run's current params; from AdamW, better their float32 master copy.
      into: the new optimizer's state from `init`, in any chain or wrapper, also under Flax nnx. It
        may train fewer params, with the others frozen.
      learning_rate: α_k or η_k, a scalar or a schedule of the count k, as the optimizers have it.
        Needed from `optax.sgd`, from and to AdamW, and to Schedule-Free.
      momentum: β_k, a scalar or a schedule of the count k. Needed from `optax.sgd`.
      nesterov: whether that momentum is Nesterov's.
      averaging: c_{k+1} in (0, 1] of the other run, from and to AdamW. None means 1 − b1.
      b1: β₁ of Adam, in [0, 1).
      b2: β₂ of both runs, in [0, 1), if they have a second moment.
      eps: ε of both runs, ≥ 0, if they have a second moment.
      weight_power: `weight_lr_power` of `optax.contrib.schedule_free`, ≥ 0.
      count: k, the number of steps taken, if `old_state` has none, as that of `optax.sgd` with a
        number as learning rate. Needed there if momentum is a schedule.

    Returns:
      `into` with the run, and k as its count and that of its schedules. It shares no buffer with
      the arguments.

    Raises:
      ValueError: if an argument is missing or out of range; if a state holds none of these, or
        several; if the trees or other directions do not match; or if only one run trains at y.

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
    rates = {"learning_rate": learning_rate, "momentum": momentum, "averaging": averaging}
    others = {"b1": b1, "b2": b2, "eps": eps, "nesterov": nesterov, "weight_power": weight_power}
    check(count=count, **others, **{name: h for name, h in rates.items() if h is not None})
    given = Given(x=by_path(params), count=count, **others, **rates)
    node, new_node = only(old_state, "old_state", *_FORMATS), only(into, "into", *_FORMATS)
    for name, of in (("old_state", node), ("into", new_node)):
        in_float8 = lambda leaf: is_float(leaf) and leaf.dtype.itemsize == 1
        if any(map(in_float8, jax.tree.leaves(z_or_m(of)))) and type(of) is not SPAState:
            raise ValueError(f"`{name}` must hold its momentum in 16 bits or more, got 8")
    (_, read, _), (_, _, write) = _FORMATS[type(node)], _FORMATS[type(new_node)]
    keys_of("old_state", [z_or_m(node)], params)
    run = read(old_state, node, by_path(z_or_m(node)), given)
    mu_y = getattr(new_node, "mu_y", getattr(new_node, "b1", 1.0))
    check_one_run("into", mu_y)
    (keys,) = keys_of("into", [z_or_m(new_node)], params)
    if odd := sorted(set(keys) - set(run.z)):
        raise ValueError(f"`into` must hold only params of `old_state`, got {odd[0] or 'its root'}")
    old_mu_y, new_mu_y = (scalar_of(scalar).astype(float) for scalar in (run.mu_y, mu_y))
    mismatch = (old_mu_y == 1) != (new_mu_y == 1)
    if isinstance(new_node, optax.contrib.ScheduleFreeState):  # b1, up to rounding to bfloat16
        mismatch |= jnp.abs(old_mu_y - new_mu_y) > 2**-8
    if is_surely(mismatch):
        raise ValueError(
            "`into` must have the params of `old_state`, x (μ_y = 1) or y, and Schedule-Free the"
            f" same μ_y as its b1, got μ_y = {old_mu_y:g} into {new_mu_y:g}"
        )
    fits = is_surely(~mismatch)  # or is traced: a wrong answer is not silent
    into_run = _with_directions(into, new_node, old_state, node)
    checked = lambda z: z if fits or not is_float(z) else jnp.where(mismatch, jnp.nan, z)
    run = run._replace(z={key: checked(run.z[key]) for key in keys})
    return copy(like(into, _with_count(write(into_run, given, run), run.count)))


def z_or_m(node: Any) -> PyTree:
    """The tree of an optimizer's state that has a leaf for each parameter."""
    field, _, _ = _FORMATS[type(node)]
    tree = getattr(node, field)
    return trees_of(tree)[0] if field == "z" else tree


def _with_directions(into: PyTree, new_node: Any, old_state: PyTree, node: Any) -> PyTree:
    """A state with the directions of the run that stand beside its momentum."""
    # Bases are found too, so that their own directions are not.
    kinds = (*_DIRECTIONS, PrimalAveragingState, optax.contrib.ScheduleFreeState)
    is_direction = lambda of, momentum: of is not momentum and isinstance(of, _DIRECTIONS)
    old = [of for of in find(old_state, kinds) if is_direction(of, node)]
    new = [of for of in find(into, kinds) if is_direction(of, new_node)]
    shapes = lambda nodes: [(type(of), list(map(jnp.shape, jax.tree.leaves(of)))) for of in nodes]
    if shapes(old) != shapes(new):
        names = " and ".join(kinds_of(tuple(nodes)) for nodes in (old, new))
        raise ValueError(f"`into` must have the other directions of `old_state`, got {names}")
    rest = iter(old)
    take = lambda of: like(of, next(rest)) if is_direction(of, new_node) else of
    return replace(into, kinds, take)


def _with_count(state: PyTree, count: Array) -> PyTree:
    """A state with a new count for its schedules."""
    # States with no other field are those of `optax.scale_by_schedule` and `optax.WrappedSchedule`.
    is_counted = lambda node: (
        isinstance(node, (*INJECTED, StochasticRoundingState, Float8MomentumState))
        or getattr(node, "_fields", 0) == ("count",)
    )

    def counted(node: Any) -> Any:
        if not is_counted(node):
            return node
        inside = {name: _with_count(field, count) for name, field in node._asdict().items()}
        return node._replace(**inside | {"count": count})

    return jax.tree.map(counted, state, is_leaf=is_counted)


def _required(given: Given, name: str) -> Any:
    if getattr(given, name) is None:
        raise ValueError(f"`{name}` must be given for these states, got None")
    return getattr(given, name)


# ----------------------------------------------------------------------------------------- readers


def _scalars(*values: PyTree) -> list[Array]:
    check_one_run("old_state", values)
    return [scalar_of(value) for value in values]


def _snapshot(
    given: Given, k: Array, scalars: tuple[Array, ...], scale: Array, m: ByPath, nu: ByPath | None
) -> Snapshot:
    """The run at z_k = x_k − scale · m. The scalars are w, η and c, which are 0 at the start."""
    x = {key: given.x[key] for key in m}
    z = {key: x.astype(storage_of(None).dtype_of(x)) for key, x in x.items()}
    z |= {key: z[key] - times(scale, m[key], z[key].dtype) for key in m if is_float(z[key])}
    w, eta, c = (jnp.where(k == 0, 0, scalar) for scalar in scalars)
    return Snapshot(k, z, w, eta, c, jnp.ones([]), nu)


def _read_trace(state: PyTree, node: Any, m: ByPath, given: Given) -> Snapshot:
    alpha, beta = _required(given, "learning_rate"), _required(given, "momentum")
    counted = find(state, (optax.ScaleByScheduleState, *INJECTED))
    counts = _scalars(*(of.count for of in counted))
    moving = jnp.any(jnp.array([jnp.any(leaf != 0) for leaf in m.values()]))
    if given.count is not None:
        k = jnp.asarray(given.count, jnp.int32)
    elif len(counts) == 1:
        k = counts[0]
    elif not (callable(alpha) or callable(beta)):
        k = jnp.where(moving, 1, 0)
    else:
        raise ValueError("`count` must be given where `old_state` does not hold one, got None")
    if is_surely(moving & (k == 0)):
        raise ValueError("`count` must be >= 1 where `old_state` holds momentum, got 0")
    # w_k, as step k − 1 would have computed it.
    ahead = look_ahead(alpha, beta, k - 1, nesterov=given.nesterov)
    w = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
    scalars = (w, *eta_and_c(ahead, w, nesterov=given.nesterov))
    return _snapshot(given, k.astype(jnp.int32), scalars, w, m, None)


def _read_adam(state: PyTree, node: Any, mu: ByPath, given: Given) -> Snapshot:
    (k,) = _scalars(node.count)
    w, eta, c = _scalars_of_adam(given, k)
    if is_surely(c <= 0):
        raise ValueError(f"`averaging` must be > 0 to keep z at a finite distance, got {c}")
    # Of the momentum that step k adds AdamW corrects the bias by k + 1.
    m = _without_bias(mu, given, given.b1, k + 1)
    nu = _without_bias(by_path(node.nu), given, given.b2, k)
    d = {key: m[key] / (jnp.sqrt(nu[key]) + given.eps) for key in m}
    return _snapshot(given, k, (w, eta, c), w / c, mu | d, nu)


def _read_schedule_free(state: PyTree, node: Any, z: ByPath, given: Given) -> Snapshot:
    step_count, mu_y, eta, total = _scalars(node.step_count, node.b1, node.max_lr, node.weight_sum)
    k = step_count - 1
    c = jnp.where(total > 0, eta**given.weight_power / jnp.where(total > 0, total, 1), 0)
    base = node.base_optimizer_state
    nu = _read_second_moment(base, given, k)
    return Snapshot(k, z, eta * (1 - c) * mu_y, eta, c, mu_y, nu, base)


def _read_spa(state: PyTree, node: Any, z: ByPath, given: Given) -> Snapshot:
    k, w, eta, c, mu_y = _scalars(node.count, node.w, node.eta, node.c, node.mu_y)
    bases = [wrapper.base for wrapper in find(state, PrimalAveragingState)]
    others = [by_path(tree) for tree in trees_of(node.z)[1:]]
    wide = lambda key: form_of(node.z).decode(given.x[key], z[key], *(of[key] for of in others))
    z = {key: wide(key) if is_float(leaf) else leaf for key, leaf in z.items()}
    return Snapshot(k, z, w, eta, c, mu_y, _read_second_moment(state, given, k), *bases)


# ----------------------------------------------------------------------------------------- writers


def _write_trace(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    known = (run.count > 0) & (run.w > 0)
    w = jnp.where(known, run.w, 1)

    def m(key: str) -> Array:
        x, distance = given.x[key], _x_minus_z(run, given, key)
        m = jnp.where(known, distance / w.astype(distance.dtype), 0)
        return m.astype(x.dtype) if is_float(x) else jnp.zeros_like(x)

    return replace(into, optax.TraceState, lambda _: list(map(m, run.z)))


def _write_adam(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    k, all_nu = run.count, _required_second_moment(run)
    w, _, c = _scalars_of_adam(given, k)
    c_over_w = jnp.where(w > 0, c / jnp.where(w > 0, w, 1), 0)

    def moments(key: str) -> tuple[Array, Array]:
        if not is_float(given.x[key]):
            return jnp.zeros_like(given.x[key]), jnp.zeros_like(given.x[key])
        distance, nu = _x_minus_z(run, given, key), all_nu[key]
        m = times(c_over_w, distance, distance.dtype) * (jnp.sqrt(nu) + given.eps)
        return m * _bias(given.b1, k + 1, m), nu * _bias(given.b2, k, nu)

    pairs = [moments(key) for key in run.z]
    new = [k, *(m for m, _ in pairs), *(nu for _, nu in pairs)]
    return replace(into, optax.ScaleByAdamState, lambda _: new)


def _write_schedule_free(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    """The sum of weights is the last weight over c_k."""
    k, rate = run.count, at_count("learning_rate", _required(given, "learning_rate"))
    eta = jnp.where(k > 0, rate(k), 0)
    c = run.c.astype(eta.dtype)
    total = jnp.where(c > 0, eta**given.weight_power / jnp.where(c > 0, c, 1), 0)

    def new(node: Any) -> Any:
        base, z = _with_base(node.base_optimizer_state, given, run), list(run.z.values())
        return optax.contrib.ScheduleFreeState(run.mu_y, total, k + 1, eta, base, z)

    return replace(into, optax.contrib.ScheduleFreeState, new)


def _write_spa(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    def new(node: SPAState) -> SPAState:
        form, trees = form_of(node.z), jax.tree.map(jnp.asarray, trees_of(node.z))
        z = [
            form.encode(run.z[key], given.x[key], None, *old) if is_float(run.z[key]) else old
            for key, *old in zip(run.z, *map(jax.tree.leaves, trees), strict=True)
        ]
        return SPAState(run.count, list(zip(*z, strict=True)), run.eta, run.c, run.w, run.mu_y)

    into = replace(into, SPAState, new)
    if not find(into, PrimalAveragingState):
        return _with_second_moment(into, given, run)
    with_base = lambda node: node._replace(base=_with_base(node.base, given, run))
    return replace(into, PrimalAveragingState, with_base)


# For each state its field with a leaf for each parameter, its reader and its writer. A
# `ScheduleFreeState` counts before what its base optimizer has, and so does z.
_FORMATS: dict[Any, tuple[str, Any, Any]] = {
    optax.contrib.ScheduleFreeState: ("z", _read_schedule_free, _write_schedule_free),
    SPAState: ("z", _read_spa, _write_spa),
    optax.ScaleByAdamState: ("mu", _read_adam, _write_adam),
    optax.TraceState: ("trace", _read_trace, _write_trace),
}


def _x_minus_z(run: Snapshot, given: Given, key: str) -> Array:
    """x_k − z_k."""
    x, z = given.x[key], run.z[key]
    dtype = wide_dtype(x, z)
    return x.astype(dtype) - z.astype(dtype)


def _scalars_of_adam(given: Given, k: Array) -> tuple[Array, Array, Array]:
    """w, η and c of the next step."""
    eta = at_count("learning_rate", _required(given, "learning_rate"))(k)
    c = at_count("averaging", 1 - given.b1 if given.averaging is None else given.averaging)(k)
    return eta * (1 - c), eta, c


# --------------------------------------------------------------------------------- second moments


def _without_bias(moment: ByPath, given: Given, decay: Any, k: Array) -> ByPath:
    """A moment as Adam uses it; 0 before the first step."""
    wide = {key: v.astype(wide_dtype(v)) for key, v in moment.items() if is_float(given.x[key])}
    return {key: v / _bias(decay, jnp.maximum(k, 1), v) for key, v in wide.items()}


def _bias(decay: ArrayLike, k: Array, moment: Array) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, moment.dtype) ** k.astype(moment.dtype)


def _required_second_moment(run: Snapshot) -> ByPath:
    if run.nu is None:
        raise ValueError("`old_state` must hold a second moment, as `into` does, got none")
    return run.nu


def _second_moment_of(name: str, state: PyTree) -> Any:
    """The node that holds a second moment, full or factored, if there is one."""
    return only(state, name, SECOND_MOMENTS) if find(state, SECOND_MOMENTS) else None


def _read_second_moment(state: PyTree, given: Given, k: Array) -> ByPath | None:
    """ν without bias."""
    node = _second_moment_of("old_state", state)
    if node is None:
        return None
    if isinstance(node, RMSState):
        return _without_bias(by_path(node.nu), given, given.b2, k)
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
    node = _second_moment_of("into", into)
    if node is None and run.nu is None:
        return into
    if node is None:
        raise ValueError("`into` must hold a second moment, as `old_state` does, got none")
    all_nu = _required_second_moment(run)

    def factors(key: str, old: Array) -> tuple[Array, Array, Array]:
        v, none = all_nu[key] + jnp.square(given.eps), jnp.zeros(1)
        if old.shape == v.shape:
            return none, none, v
        i, j = factored_axes(v)
        return v.mean(j), v.mean(i), none

    if isinstance(node, RMSState):
        nu = (all_nu[key] for key in by_path(node.nu))
        new = [run.count, *(v * _bias(given.b2, run.count, v) for v in nu)]
    else:
        of_leaves = [factors(key, old) for key, old in by_path(node.v).items()]
        new = [run.count, *(factor[i] for i in range(3) for factor in of_leaves)]
    return replace(into, type(node), lambda _: new)


def _with_base(into: PyTree, given: Given, run: Snapshot) -> PyTree:
    """The state of a base optimizer: that of the run, if it has the same, or with its ν."""
    if jax.tree.structure(into) == jax.tree.structure(run.base):
        return run.base
    if _second_moment_of("into", into) is None and any(map(is_float, jax.tree.leaves(into))):
        raise ValueError("`into` must have the base optimizer of `old_state`, got another kind")
    return _with_second_moment(into, given, run)
