"""Moves a run in the middle: from one optimizer's state into another's."""

import itertools
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax._checks import (
    AVERAGING,
    B1,
    B2,
    EPS,
    FLAG,
    MOMENTUM,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INTEGER,
    RATE,
    check_one_run,
    is_surely,
)
from spa_optax._core import SPAState
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._nodes import (
    base_of,
    count_field,
    is_momentum,
    map_nodes,
    matched,
    nodes_of,
    signature,
    with_base,
)
from spa_optax._optax_states import ADAM_OR_TRACE, SECOND_MOMENTS, RMSState
from spa_optax._precision import scaled, wide_dtype
from spa_optax._second_moment import factored_axes
from spa_optax._storage import form_of, storage_of, trees_of, z_of
from spa_optax._trees import (
    by_path,
    check_same_tree,
    copy,
    find_one,
    is_trained,
    keys_of,
    scalar_of,
    with_leaves,
)
from spa_optax._wrappers import StochasticRoundingState

ByPath = dict[str, Array]  # an array for each trained parameter, by its path
Given = SimpleNamespace  # x, the params by their paths, k, and the arguments of `convert`


class Snapshot(NamedTuple):
    """A run in the middle, whatever its optimizer."""

    count: Array  # k
    z: ByPath  # z_k, in 32 bits or more where it is computed
    w: Array  # (params − z_k) / m_k
    eta: Array  # η of the last step, or of the next under Adam
    c: Array  # c, likewise
    mu_y: Array
    nu: ByPath | None  # free of bias


def convert(
    old_state: PyTree,
    params: PyTree,
    *,
    into: PyTree,
    new_params: PyTree | None = None,
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

        optax.sgd, optax.trace          z = x − w m, if the learning rate comes after m
        optax.adam, optax.adamw         z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)
        optax.contrib.schedule_free     its z, and b1 = μ_y

    From `optax.sgd` w is that of `spa_from_sgdm`; to `optax.sgd` it is the state's. A momentum that
    keeps its form is copied.

    Everything else in the two states must be known, and is

        copied       second moments; directions, which both runs must have; the same base optimizer
        converted    a second moment that takes another form
        copied if    both runs have it: `optax.MultiSteps` and other wrappers that skip updates.
                     A new `MultiSteps` starts between two updates, at k.
        set to k     counts of schedules, `optax.inject_hyperparams` and the like
        of `into`    injected hyper-parameters, gauges

    Directions that are known: those in `optax` except L-BFGS and line searches, `optax.add_noise`,
    `optax.contrib.reduce_on_plateau`, and `float8_momentum`. Others raise ValueError.

    Adamax, Adopt, RAdam, Yogi, NAdam(W) and LAMB keep a state of the same type as Adam's, and the
    state alone does not show it. Convert only runs of `optax.adam` and `optax.adamw`, without
    Nesterov momentum: an error is raised only for moments that Adam cannot have.

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
      params: the run's current params. If it has a float32 master copy, pass that: z is made from
        them. A warning is given where the moments are wider than the params.
      into: the new optimizer's state from `init`, in any chain or wrapper, also under Flax nnx. It
        may train fewer params, with the others frozen.
      new_params: the params with which the run goes on, if they are not `params` but these cast to
        16 bits. A `Difference` keeps what they lose.
      learning_rate: α_k or η_k, a scalar or a schedule of the count k, as the optimizers have it.
        Needed from `optax.sgd`, from and to AdamW, and to Schedule-Free, unless the momentum
        keeps its form.
      momentum: β_k, a scalar or a schedule of the count k. Needed from `optax.sgd`.
      nesterov: whether that momentum is Nesterov's.
      averaging: c_{k+1} in (0, 1] of the other run, from and to AdamW. None means 1 − b1.
      b1: β₁ of Adam, in [0, 1).
      b2: β₂ of both runs, in [0, 1), if they have a second moment.
      eps: ε of both runs, ≥ 0, if they have a second moment.
      weight_power: `weight_lr_power` of `optax.contrib.schedule_free`, ≥ 0.
      count: k, the number of steps taken. Needed if `old_state` has none, as that of `optax.sgd`
        with a number as learning rate, unless it is at its start.

    Returns:
      `into` with the run, and k as its count and that of its schedules. It shares no buffer with
      the arguments.

    Raises:
      ValueError: if an argument is missing or out of range; if a state holds none of these
        momenta, several, or a state that is not known; if the trees, directions or second moments
        do not match; if accumulated gradients would be lost; or if only one run trains at y. (Under
        `jax.jit` the last two give NaN.)

    Examples:
      SGD with α = 1 and β = 0.5, after a gradient of 2: x is at 8, and would coast to 6.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import convert, spa_from_sgdm
      >>> sgd, tx = optax.sgd(1.0, momentum=0.5), spa_from_sgdm(1.0, momentum=0.5)
      >>> x = jnp.array(10.0)
      >>> updates, state = sgd.update(jnp.array(2.0), sgd.init(x), x)
      >>> x = optax.apply_updates(x, updates)
      >>> new = convert(state, x, into=tx.init(x), learning_rate=1.0, momentum=0.5, count=1)
      >>> print(new.z, optax.tree.get(convert(new, x, into=sgd.init(x)), "trace"))
      6.0 2.0

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and its proof, with
      Adam's directions as gradients under AdamW. Defazio et al., The Road Less Scheduled, 2024,
      arXiv:2405.15682, Section 2.
    """
    rates = {"learning_rate": learning_rate, "momentum": momentum, "averaging": averaging}
    others = {"b1": b1, "b2": b2, "eps": eps, "nesterov": nesterov, "weight_power": weight_power}
    RATE.optional().check(learning_rate=learning_rate)
    MOMENTUM.optional().check(momentum=momentum)
    AVERAGING.optional().check(averaging=averaging)
    B1.check(b1=b1)
    B2.check(b2=b2)
    EPS.check(eps=eps)
    NOT_NEGATIVE.check(weight_power=weight_power)
    FLAG.check(nesterov=nesterov)
    NOT_NEGATIVE_INTEGER.optional().check(count=count)
    new_params = params if new_params is None else new_params
    check_same_tree("new_params", new_params, "params", params, same_nodes=False)
    given = Given(x=by_path(params), y=by_path(new_params), count=count, **others, **rates)
    node, new_node = find_one(old_state, "old_state", *_FORMATS), find_one(into, "into", *_FORMATS)
    for name, of in (("old_state", node), ("into", new_node)):
        in_float8 = lambda leaf: is_trained(leaf) and leaf.dtype.itemsize == 1
        if any(map(in_float8, jax.tree.leaves(momentum_tree(of)))) and type(of) is not SPAState:
            raise ValueError(f"`{name}` must hold its momentum in 16 bits or more, got 8")
    (_, read, _), (_, _, write) = _FORMATS[type(node)], _FORMATS[type(new_node)]
    keys_of("old_state", [momentum_tree(node)], params)
    misfit = _check_mu_y(node, new_node)
    (keys,) = keys_of("into", [momentum_tree(new_node)], params)
    if odd := sorted(set(keys) - set(by_path(momentum_tree(node)))):
        raise ValueError(f"`into` must hold only params of `old_state`, got {odd[0] or 'its root'}")
    # The same base optimizer goes on as it is. Every other state must be known.
    base, new_base = base_of(old_state), base_of(into)
    if is_same_base := base is not None and signature([base]) == signature([new_base]):
        old_state, into = with_base(old_state, None), with_base(into, None)
    old, new = nodes_of("old_state", old_state, node), nodes_of("into", into, new_node)
    kept, rest = matched(old, new)
    unkept = [of for place, of in enumerate(new) if place not in kept]
    given.nu = _second_moment_to_convert([*rest, node], [*unkept, new_node])
    misfit |= _check_accumulation(rest)
    given.k = _steps_taken(node, old, new_node, new, given)
    is_same = type(node) is type(new_node) is not SPAState
    run: Any = None
    if not is_same or not (given.nu is None or given.nu is node):
        _warn_of_narrow_params(node, old, given)
        run = read(node, by_path(momentum_tree(node)), given)
        run = run._replace(z={key: run.z[key] for key in keys})
    places = itertools.count()

    def moved(_: str, of: Any) -> Any:
        place = next(places)
        if is_momentum(of, new_node):
            values = by_path(node)
            new = [values[path] for path in by_path(of)] if is_same else write(of, given, run)
            nan = lambda leaf: jnp.where(misfit, jnp.nan, leaf) if is_trained(leaf) else leaf
            return with_leaves(of, new if is_surely(~misfit) else jax.tree.map(nan, new))
        if place in kept:
            return with_leaves(of, kept[place])
        if isinstance(of, SECOND_MOMENTS):
            return with_leaves(of, _write_second_moment(of, given, run))
        field = count_field(of)
        return of._replace(**{field: with_leaves(getattr(of, field), given.k)}) if field else of

    state = map_nodes(moved, into)
    return copy(with_base(state, with_leaves(new_base, base)) if is_same_base else state)


def momentum_tree(node: Any) -> PyTree:
    """The tree of an optimizer's state that has a leaf for each parameter."""
    field, _, _ = _FORMATS[type(node)]
    tree = getattr(node, field)
    return trees_of(tree)[0] if field == "z" else tree


def _check_mu_y(node: Any, new_node: Any) -> Array:
    """Raises if only one run trains at y; whether it does, if that is traced."""
    of_node = lambda of: getattr(of, "mu_y", getattr(of, "b1", 1.0))
    for name, of in (("old_state", node), ("into", new_node)):
        check_one_run(name, of_node(of), of._asdict().get("count", ()))
    old, new = (scalar_of(of_node(of)).astype(float) for of in (node, new_node))
    misfit = (old == 1) != (new == 1)
    if isinstance(new_node, optax.contrib.ScheduleFreeState):  # b1, up to rounding to bfloat16
        misfit |= jnp.abs(old - new) > 2**-8
    if is_surely(misfit):
        if old == 1:
            raise ValueError(
                "`into` must keep the momentum of `old_state`, that of AdamW's b1 or SGD's: pass"
                f" `interpolation=1.0`, got {new:g}"
            )
        raise ValueError(
            "`into` must have the params of `old_state`, x (μ_y = 1) or y, and Schedule-Free the"
            f" same μ_y as its b1, got μ_y = {old:g} into {new:g}"
        )
    return misfit


# -------------------------------------------------------------------------- what else states hold


def _second_moment_to_convert(olds: list[Any], news: list[Any]) -> Any:
    """The node with a second moment that takes another form, if there is one."""
    is_nu = lambda of: isinstance(of, (*SECOND_MOMENTS, optax.ScaleByAdamState))
    found = [("old_state", list(filter(is_nu, olds))), ("into", list(filter(is_nu, news)))]
    (few, fewer), (many, more) = sorted(found, key=lambda of: len(of[1]))
    if len(more) > 1:
        raise ValueError(f"`{many}` must hold one second moment to convert, got {len(more)}")
    if len(fewer) < len(more):
        raise ValueError(f"`{few}` must hold a second moment, as `{many}` does, got none")
    return found[0][1][0] if more else None


def _check_accumulation(rest: list[Any]) -> Array:
    """Raises if `convert` would lose accumulated gradients; whether it would, if that is traced."""
    steps = [scalar_of(of.mini_step) for of in rest if isinstance(of, optax.MultiStepsState)]
    is_lost = jnp.any(jnp.array([step != 0 for step in steps], bool))
    if is_surely(is_lost):
        raise ValueError(
            "`into` must have the `optax.MultiSteps` of `old_state` in the middle of an"
            f" accumulation, got another or none at a mini_step of {steps[0]}"
        )
    return is_lost


def _steps_taken(node: Any, old: list[Any], new_node: Any, new: list[Any], given: Given) -> Array:
    """The count k."""
    if isinstance(node, optax.contrib.ScheduleFreeState):
        return _scalars(node.step_count)[0] - 1
    if not isinstance(node, optax.TraceState):
        return _scalars(node.count)[0]
    # The `step` of a wrapper that skips updates counts those too.
    fields = [(of, count_field(of)) for of in old]
    counts = _scalars(*(getattr(of, field) for of, field in fields if field not in (None, "step")))
    moving = jnp.any(jnp.array([jnp.any(m != 0) for m in by_path(node.trace).values()], bool))
    if given.count is not None:
        k = jnp.asarray(given.count, jnp.int32)
    elif counts and not is_surely(jnp.any(jnp.array(counts) != counts[0])):
        k = counts[0].astype(jnp.int32)
    elif not (callable(given.learning_rate) or callable(given.momentum)) and (
        is_surely(~moving)  # at the start
        or (isinstance(new_node, optax.TraceState) and not any(map(count_field, new)))
    ):
        k = jnp.where(moving, 1, 0)
    else:
        raise ValueError("`count` must be given where `old_state` does not hold one, got None")
    if is_surely(moving & (k == 0)):
        raise ValueError("`count` must be >= 1 where `old_state` holds momentum, got 0")
    return k


def _required(given: Given, name: str) -> Any:
    if getattr(given, name) is None:
        raise ValueError(f"`{name}` must be given for these states, got None")
    return getattr(given, name)


# ----------------------------------------------------------------------------------------- readers


def _scalars(*values: PyTree) -> list[Array]:
    check_one_run("old_state", values)
    return [scalar_of(value) for value in values]


def _snapshot(
    given: Given, scalars: tuple[Array, ...], scale: Array, m: ByPath, nu: ByPath | None
) -> Snapshot:
    """The run at z_k = x_k − scale · m. The scalars are w, η and c, which are 0 at the start."""
    x = {key: given.x[key] for key in m}
    z = {key: x.astype(storage_of(None).dtype_of(x)) for key, x in x.items()}
    z |= {key: z[key] - scaled(scale, m[key], z[key].dtype) for key in m if is_trained(z[key])}
    w, eta, c = (jnp.where(given.k == 0, 0, scalar) for scalar in scalars)
    return Snapshot(given.k, z, w, eta, c, jnp.ones([]), nu)


def _read_trace(node: Any, m: ByPath, given: Given) -> Snapshot:
    alpha, beta = _required(given, "learning_rate"), _required(given, "momentum")
    # w_k, as step k − 1 would have computed it.
    ahead = look_ahead(alpha, beta, given.k - 1, nesterov=given.nesterov)
    w = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
    scalars = (w, *eta_and_c(ahead, w, nesterov=given.nesterov))
    return _snapshot(given, scalars, w, m, _read_second_moment(given))


def _read_adam(node: Any, mu: ByPath, given: Given) -> Snapshot:
    k = given.k
    w, eta, c = _scalars_of_adam(given, k)
    if is_surely(c <= 0):
        raise ValueError(f"`averaging` must be > 0 to keep z at a finite distance, got {c}")
    _check_moments_of_adam(node, given)
    # Of the momentum that step k adds AdamW corrects the bias by k + 1.
    m = _without_bias(mu, given, given.b1, k + 1)
    nu = _without_bias(by_path(node.nu), given, given.b2, k)
    d = {key: m[key] / (jnp.sqrt(nu[key]) + given.eps) for key in m}
    return _snapshot(given, (w, eta, c), w / c, mu | d, nu)


def _check_moments_of_adam(node: Any, given: Given) -> None:
    """Raises if no gradients give these moments, by the inequality of Cauchy and Schwarz.

    (Σ_j (1 − β₁) β₁^j g_j)² ≤ (1 − β₁)²/(1 − β₂) Σ_j (β₁²/β₂)^j · Σ_j (1 − β₂) β₂^j g_j²
    """
    b1, b2 = (jnp.asarray(b, jnp.float32) for b in (given.b1, given.b2))
    limit = (1 - b1) ** 2 / (1 - b2) / (1 - b1**2 / b2)
    pairs = zip(jax.tree.leaves(node.mu), jax.tree.leaves(node.nu), strict=True)
    # In 16 bits ν may be far off. 1.1 and 1e-30 are for rounding and underflow.
    excess = [
        jnp.any(jnp.square(jnp.abs(m)).astype(v.dtype) > scaled(1.1 * limit, v, v.dtype) + 1e-30)
        for m, v in pairs
        if is_trained(v) and v.dtype.itemsize >= 4
    ]
    if is_surely(jnp.any(jnp.array(excess, bool)) & (b1**2 < b2)):
        raise ValueError(
            "`old_state` must be of `optax.adam` or `optax.adamw` with the given `b1` and `b2`, got"
            " moments that these cannot have"
        )


def _warn_of_narrow_params(node: Any, old: list[Any], given: Given) -> None:
    """Warns if z would be made from params of fewer bits than the run seems to have."""
    if not isinstance(node, ADAM_OR_TRACE) or any(
        type(of) is StochasticRoundingState for of in old
    ):
        return
    moments = by_path(getattr(node, "nu", momentum_tree(node)))
    bits = lambda leaf: leaf.dtype.itemsize * 8 if is_trained(leaf) else 0
    if any(0 < bits(given.x[key]) <= 16 < bits(moment) for key, moment in moments.items()):
        warnings.warn(
            "`params` should be the float32 master copy of the run if it has one, as its float32"
            " moments suggest: z is made from them. Cast the params after `convert`.",
            stacklevel=3,
        )


def _read_schedule_free(node: Any, z: ByPath, given: Given) -> Snapshot:
    mu_y, eta, total = _scalars(node.b1, node.max_lr, node.weight_sum)
    c = jnp.where(total > 0, eta**given.weight_power / jnp.where(total > 0, total, 1), 0)
    nu = _read_second_moment(given)
    return Snapshot(given.k, z, eta * (1 - c), eta, c, mu_y, nu)


def _read_spa(node: Any, z: ByPath, given: Given) -> Snapshot:
    w, eta, c, mu_y = _scalars(node.w, node.eta, node.c, node.mu_y)
    others = [by_path(tree) for tree in trees_of(node.z)[1:]]
    wide = lambda key: z_of(form_of(node.z), given.x[key], z[key], *(of[key] for of in others))
    z = {key: wide(key) if is_trained(given.x[key]) else leaf for key, leaf in z.items()}
    return Snapshot(given.k, z, w, eta, c, mu_y, _read_second_moment(given))


# ----------------------------------------------------------------------------------------- writers


def _write_trace(node: Any, given: Given, run: Snapshot) -> PyTree:
    known = (run.count > 0) & (run.w > 0)
    w = jnp.where(known, run.w, 1)

    def m(key: str) -> Array:
        x, distance = given.x[key], _x_minus_z(run, given, key)
        m = jnp.where(known, distance / w.astype(distance.dtype), 0)
        return m.astype(x.dtype) if is_trained(x) else jnp.zeros_like(x)

    return list(map(m, run.z))


def _write_adam(node: Any, given: Given, run: Snapshot) -> PyTree:
    k, all_nu = run.count, run.nu or {}
    if is_surely(
        (scalar_of(node.count) == 0)
        & jnp.any(jnp.array([jnp.any(v != 0) for v in by_path(node.nu).values()], bool))
    ):
        raise ValueError("`into` must be of `optax.adam` or `optax.adamw`, got a ν_0 that is not 0")
    w, _, c = _scalars_of_adam(given, k)
    c_over_w = jnp.where(w > 0, c / jnp.where(w > 0, w, 1), 0)

    def moments(key: str) -> tuple[Array, Array]:
        if not is_trained(given.x[key]):
            return jnp.zeros_like(given.x[key]), jnp.zeros_like(given.x[key])
        distance, nu = _x_minus_z(run, given, key), all_nu[key]
        m = scaled(c_over_w, distance, distance.dtype) * (jnp.sqrt(nu) + given.eps)
        return m * _bias(given.b1, k + 1, m), nu * _bias(given.b2, k, nu)

    pairs = [moments(key) for key in run.z]
    return [k, *(m for m, _ in pairs), *(nu for _, nu in pairs)]


def _write_schedule_free(node: Any, given: Given, run: Snapshot) -> PyTree:
    """The sum of weights is the last weight over c_k.

    Step k − 1 of Optax reads the rate at count k, which is a count later than elsewhere.
    """
    k, rate = run.count, at_count("learning_rate", _required(given, "learning_rate"))
    largest = lambda i, so_far: jnp.maximum(so_far, rate(i))
    max_lr = rate(jnp.ones_like(k))
    if callable(given.learning_rate):
        max_lr = jax.lax.fori_loop(2, k + 1, largest, max_lr)
    max_lr = jnp.where(k > 0, max_lr, 0)
    c = run.c.astype(max_lr.dtype)
    total = jnp.where(c > 0, max_lr**given.weight_power / jnp.where(c > 0, c, 1), 0)
    return node._replace(
        b1=run.mu_y, weight_sum=total, step_count=k + 1, max_lr=max_lr, z=list(run.z.values())
    )


def _write_spa(node: Any, given: Given, run: Snapshot) -> PyTree:
    form, trees = form_of(node.z), jax.tree.map(jnp.asarray, trees_of(node.z))
    z = [
        form.encode(run.z[key], given.y[key], None, *old) if is_trained(run.z[key]) else old
        for key, *old in zip(run.z, *map(jax.tree.leaves, trees), strict=True)
    ]
    saturated = [form.num_saturated(*arrays) for arrays in z if is_trained(arrays[0])]
    if is_surely(jnp.any(jnp.array(saturated) > 0)):
        warnings.warn("z is farther from `params` than `into` can hold: it is cut", stacklevel=4)
    return SPAState(run.count, list(zip(*z, strict=True)), run.eta, run.c, run.w, run.mu_y)


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
    wide = {key: v.astype(wide_dtype(v)) for key, v in moment.items() if is_trained(given.x[key])}
    return {key: v / _bias(decay, jnp.maximum(k, 1), v) for key, v in wide.items()}


def _bias(decay: ArrayLike, k: Array, moment: Array) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, moment.dtype) ** k.astype(moment.dtype)


def _read_second_moment(given: Given) -> ByPath | None:
    """ν without bias, unless it goes on as it is."""
    node = given.nu
    if node is None:
        return None
    if isinstance(node, RMSState):
        return _without_bias(by_path(node.nu), given, given.b2, given.k)
    rows, columns, full = (by_path(tree) for tree in node[1:])

    def nu(key: str) -> Array:
        if full[key].shape == given.x[key].shape:
            return full[key]
        i, j = factored_axes(given.x[key])
        row, column = jnp.expand_dims(rows[key], j), jnp.expand_dims(columns[key], i)
        return row * column / jnp.mean(row, i, keepdims=True)

    return {key: jnp.maximum(nu(key) - jnp.square(given.eps), 0) for key in full}


def _write_second_moment(node: Any, given: Given, run: Snapshot) -> list[Array]:
    """The leaves of a node for a second moment, with ν in its own form."""
    all_nu = run.nu or {}
    if isinstance(node, RMSState):
        nu = (all_nu[key] for key in by_path(node.nu))
        return [run.count, *(v * _bias(given.b2, run.count, v) for v in nu)]

    def factors(key: str, old: Array) -> tuple[Array, Array, Array]:
        v, none = all_nu[key] + jnp.square(given.eps), jnp.zeros(1)
        if old.shape == v.shape:
            return none, none, v
        i, j = factored_axes(v)
        return v.mean(j), v.mean(i), none

    of_leaves = [factors(key, old) for key, old in by_path(node.v).items()]
    return [run.count, *(factor[i] for i in range(3) for factor in of_leaves)]
