"""Moves a run in the middle: from one optimizer's state into another's."""

import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax import _checks as checks, _nodes as nodes, _trees as trees
from spa_optax._checks import is_surely
from spa_optax._core import SPAState
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._optax_states import ADAM_OR_TRACE, SECOND_MOMENTS, RMSState
from spa_optax._precision import scaled, wide_dtype
from spa_optax._probe import check_adam
from spa_optax._second_moment import factored_axes
from spa_optax._storage import form_of, tree_of
from spa_optax._trees import by_path, is_trained, scalar_of, with_leaves
from spa_optax._wrappers import StochasticRoundingState

ByPath = dict[str, Array]  # an array for each trained parameter, by its path
Job = SimpleNamespace  # the arguments of `convert`, with x and y by their paths, k and the old ν


class Snapshot(NamedTuple):
    """A run in the middle, whatever its optimizer."""

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
    adam: optax.GradientTransformation | optax.MultiSteps | None = None,
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
    keeps its form is copied: both runs must have the same kind of optimizer, which is not checked.
    Everything else in the two states must be known, and is

        copied       second moments; directions, which both runs must have; the same base optimizer
        converted    a second moment that takes another form
        copied if    both runs have it: `optax.MultiSteps` and other wrappers that skip updates
        set to k     counts of schedules, `optax.inject_hyperparams` and the like
        of `into`    injected hyper-parameters, gauges

    Directions that are known: those in `optax` except L-BFGS and line searches, `optax.add_noise`,
    `optax.contrib.reduce_on_plateau`, and `float8_momentum`. Two `optax.MultiSteps` of different
    lengths look alike: do not change the length in the middle of an accumulation.

    From AdamW, the next step's momentum is AdamW's, except for the gradient's effect on ν. The
    gradient itself enters with weight c, where AdamW's has (1 − β₁)/(1 − β₁^(k+1)). On the way
    back from a z of more than 16 bits m has the rounding error of x, divided by w.

    Args:
      old_state: the run's state, in any chain or wrapper except `optax.flatten`. For Flax nnx,
        `optimizer.opt_state`.
      params: the run's current params. If it has a float32 master copy, pass that: z is made from
        them. A warning is given where the moments are wider than the params.
      into: the new optimizer's state from `init`, in any chain or wrapper, also under Flax nnx. It
        may train fewer params, with the others frozen.
      adam: the optimizer, `optax.adam` or `optax.adamw` in any chain or wrapper. Needed from and
        to these. It is tried out on tiny params, since others have states of the same type.
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
      ValueError: if an argument is missing or out of range; if `adam` is not Adam; if a state holds
        none of these momenta, several, or a state that is not known; if the trees, directions,
        second moments or a member's `rule_state` do not match; if accumulated gradients would be
        lost; or if only one run trains at y. (Under `jax.jit` the last two give NaN.)

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
    given = {"learning_rate": learning_rate, "momentum": momentum, "averaging": averaging}
    given |= {"b1": b1, "b2": b2, "eps": eps, "nesterov": nesterov, "weight_power": weight_power}
    checks.RATE.optional().check(learning_rate=learning_rate)
    checks.MOMENTUM.optional().check(momentum=momentum)
    checks.AVERAGING.optional().check(averaging=averaging)
    checks.B1.check(b1=b1)
    checks.B2.check(b2=b2)
    checks.EPS.check(eps=eps)
    checks.NOT_NEGATIVE.check(weight_power=weight_power)
    checks.FLAG.check(nesterov=nesterov)
    checks.NOT_NEGATIVE_INTEGER.optional().check(count=count)
    new_params = params if new_params is None else new_params
    trees.check_same_tree("new_params", new_params, "params", params, same_nodes=False)
    old, new = _momentum_of("old_state", old_state), _momentum_of("into", into)
    trees.keys_of("old_state", [_tree_of(old)], params)
    (keys,) = trees.keys_of("into", [_tree_of(new)], params)
    if odd := sorted(set(keys) - set(by_path(_tree_of(old)))):
        raise ValueError(f"`into` must hold only params of `old_state`, got {odd[0] or 'its root'}")
    own, new_own = (getattr(state, "rule_state", ()) for state in (old, new))
    if nodes.signature([own]) != nodes.signature([new_own]):
        structures = f"{jax.tree.structure(new_own)} for {jax.tree.structure(own)}"
        raise ValueError(f"`into` must have the `rule_state` of `old_state`, got {structures}")
    # The same base optimizer goes on as it is. Every other state must be known.
    base, new_base = nodes.base_of(old_state), nodes.base_of(into)
    keeps_base = base is not None and nodes.signature([base]) == nodes.signature([new_base])
    if keeps_base:
        old_state, into = nodes.with_base(old_state, None), nodes.with_base(into, None)
    old_nodes = nodes.nodes_of("old_state", old_state, old)
    new_nodes = nodes.nodes_of("into", into, new)
    kept, others = nodes.matched(old_nodes, new_nodes)
    started = [node for node, old_node in zip(new_nodes, kept, strict=True) if old_node is None]
    is_lost = _check_mu_y(old, new) | _check_accumulation(others)
    keeps_form = type(old) is type(new) is not SPAState
    if not keeps_form and (_is_adam(old) or _is_adam(new)):
        check_adam(adam, params, b1, b2, eps)
    job = Job(x=by_path(params), y=by_path(new_params), rule_state=own, **given)
    job.nu = _second_moment_to_convert([*others, old], [*started, new])
    job.k = _steps_taken(old, old_nodes, new, new_nodes, job, count)
    run: Any = None
    if not (keeps_form and (job.nu is None or job.nu is old)):
        _warn_of_narrow_params(old, old_nodes, job)
        run = _FORMATS[type(old)].read(old, by_path(_tree_of(old)), job)
        run = run._replace(z={key: run.z[key] for key in keys})
    goes_on = iter(kept)

    def moved(_: str, node: Any) -> Any:
        old_node, field = next(goes_on), nodes.count_field(node)
        if nodes.is_momentum(node, new):
            copied = lambda: list(map(by_path(old).__getitem__, by_path(node)))
            leaves = copied() if keeps_form else _FORMATS[type(new)].write(node, job, run)
            nan = lambda leaf: jnp.where(is_lost, jnp.nan, leaf) if is_trained(leaf) else leaf
            return with_leaves(node, jax.tree.map(nan, leaves))
        if old_node is not None:
            return with_leaves(node, old_node)
        if isinstance(node, SECOND_MOMENTS):
            return with_leaves(node, _write_second_moment(node, job, run))
        return node._replace(**{field: with_leaves(getattr(node, field), job.k)}) if field else node

    state = nodes.map_nodes(moved, into)
    return trees.copy(nodes.with_base(state, with_leaves(new_base, base)) if keeps_base else state)


def _momentum_of(name: str, state: PyTree) -> Any:
    """The node of a state with the momentum."""
    found = trees.find_one(state, name, *_FORMATS)
    in_float8 = lambda leaf: is_trained(leaf) and leaf.dtype.itemsize == 1
    if type(found) is not SPAState and any(map(in_float8, jax.tree.leaves(_tree_of(found)))):
        raise ValueError(f"`{name}` must hold its momentum in 16 bits or more, got 8")
    checks.check_one_run(name, _mu_y_of(found), found._asdict().get("count", ()))
    return found


def _tree_of(momentum: Any) -> PyTree:
    """The tree with a leaf for each parameter."""
    return tree_of(getattr(momentum, _FORMATS[type(momentum)].field))


def _mu_y_of(momentum: Any) -> PyTree:
    return getattr(momentum, "mu_y", getattr(momentum, "b1", 1.0))


def _is_adam(momentum: Any) -> bool:
    return isinstance(momentum, optax.ScaleByAdamState)


def _any(conditions: Iterable[Array]) -> Array:
    return jnp.any(jnp.array([jnp.any(condition) for condition in conditions], bool))


def _check_mu_y(old: Any, new: Any) -> Array:
    """Raises if only one run trains at y; whether it does, if that is traced."""
    mu_y, new_mu_y = (scalar_of(_mu_y_of(state)).astype(float) for state in (old, new))
    differs = (mu_y == 1) != (new_mu_y == 1)
    if isinstance(new, optax.contrib.ScheduleFreeState):  # b1, up to rounding to bfloat16
        differs |= jnp.abs(mu_y - new_mu_y) > 2**-8
    if is_surely(differs):
        raise ValueError(
            "`into` must train at the params of `old_state`: at x, as AdamW and SGD do, by"
            " `interpolation=1.0`, or at y, and Schedule-Free with the same μ_y as its b1, got"
            f" μ_y = {mu_y:g} into {new_mu_y:g}"
        )
    return differs


# -------------------------------------------------------------------------- what else states hold


def _second_moment_to_convert(olds: list[Any], news: list[Any]) -> Any:
    """The old node with a second moment that takes another form, if there is one."""
    is_nu = lambda node: isinstance(node, (*SECOND_MOMENTS, optax.ScaleByAdamState))
    found = [("old_state", list(filter(is_nu, olds))), ("into", list(filter(is_nu, news)))]
    (few, fewer), (many, more) = sorted(found, key=lambda side: len(side[1]))
    if len(more) > 1:
        raise ValueError(f"`{many}` must hold one second moment to convert, got {len(more)}")
    if len(fewer) < len(more):
        raise ValueError(f"`{few}` must hold a second moment, as `{many}` does, got none")
    return found[0][1][0] if more else None


def _check_accumulation(lost: list[Any]) -> Array:
    """Raises if `convert` would lose accumulated gradients; whether it would, if that is traced."""
    steps = [scalar_of(node.mini_step) for node in lost if isinstance(node, optax.MultiStepsState)]
    if is_surely(is_lost := _any(step != 0 for step in steps)):
        raise ValueError(
            "`into` must have the `optax.MultiSteps` of `old_state` in the middle of an"
            f" accumulation, got another or none at a mini_step of {steps[0]}"
        )
    return is_lost


def _steps_taken(
    old: Any, old_nodes: list[Any], new: Any, new_nodes: list[Any], job: Job, count: int | None
) -> Array:
    """The count k."""
    if isinstance(old, optax.contrib.ScheduleFreeState):
        return _scalars(old.step_count)[0] - 1
    if not isinstance(old, optax.TraceState):
        return _scalars(old.count)[0]
    # The `step` of a wrapper that skips updates counts those too.
    fields = [(node, nodes.count_field(node)) for node in old_nodes]
    counts = _scalars(*(getattr(node, f) for node, f in fields if f not in (None, "step")))
    moving = _any(m != 0 for m in by_path(old.trace).values())
    has_schedule = callable(job.learning_rate) or callable(job.momentum)
    counts_nothing = isinstance(new, optax.TraceState) and not any(
        map(nodes.count_field, new_nodes)
    )
    if count is not None:
        k = jnp.asarray(count, jnp.int32)
    elif counts and not is_surely(_any(other != counts[0] for other in counts)):
        k = counts[0].astype(jnp.int32)
    elif not has_schedule and (is_surely(~moving) or counts_nothing):
        k = jnp.where(moving, 1, 0)
    else:
        raise ValueError("`count` must be given where `old_state` does not hold one, got None")
    if is_surely(moving & (k == 0)):
        raise ValueError("`count` must be >= 1 where `old_state` holds momentum, got 0")
    return k


def _required(job: Job, name: str) -> Any:
    if getattr(job, name) is None:
        raise ValueError(f"`{name}` must be given for these states, got None")
    return getattr(job, name)


def _warn_of_narrow_params(old: Any, old_nodes: list[Any], job: Job) -> None:
    """Warns if z would be made from params of fewer bits than the run seems to have."""
    moments = by_path(getattr(old, "nu", _tree_of(old)))
    bits = lambda leaf: leaf.dtype.itemsize * 8 if is_trained(leaf) else 0
    is_rounded = any(type(node) is StochasticRoundingState for node in old_nodes)
    if (
        isinstance(old, ADAM_OR_TRACE)
        and not is_rounded
        and any(0 < bits(job.x[key]) <= 16 < bits(moment) for key, moment in moments.items())
    ):
        warnings.warn(
            "`params` should be the float32 master copy of the run if it has one, as its float32"
            " moments suggest: z is made from them. Cast the params after `convert`.",
            stacklevel=3,
        )


# ----------------------------------------------------------------------------------------- readers


def _scalars(*values: PyTree) -> list[Array]:
    checks.check_one_run("old_state", values)
    return [scalar_of(value) for value in values]


def _read_optax(old: Any, m: ByPath, job: Job) -> Snapshot:
    """The run at z = x − scale · m. At the start w, η and c are 0."""
    w, eta, c = _scalars_of_adam(job) if _is_adam(old) else _scalars_of_sgd(job)
    if _is_adam(old) and is_surely(c <= 0):
        raise ValueError(f"`averaging` must be > 0 to keep z at a finite distance, got {c}")
    nu, scale = _read_second_moment(job), w / c if _is_adam(old) else w

    def z(key: str) -> Array:
        if not is_trained(x := job.x[key]):
            return x
        x = x.astype(wide_dtype(x))
        d = m[key].astype(wide_dtype(m[key])) / _divisor(old, job, nu, key)
        return x - scaled(scale, d, x.dtype)

    z_k = {key: z(key) for key in m}
    w, eta, c = (jnp.where(job.k == 0, 0, scalar) for scalar in (w, eta, c))
    return Snapshot(z_k, w, eta, c, jnp.ones([]), nu)


def _scalars_of_sgd(job: Job) -> tuple[Array, Array, Array]:
    """w, η and c of step k − 1, as it would have computed them."""
    alpha, beta = _required(job, "learning_rate"), _required(job, "momentum")
    ahead = look_ahead(alpha, beta, job.k - 1, nesterov=job.nesterov)
    w = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
    return w, *eta_and_c(ahead, w, nesterov=job.nesterov)


def _scalars_of_adam(job: Job) -> tuple[Array, Array, Array]:
    """w, η and c of the next step."""
    eta = at_count("learning_rate", _required(job, "learning_rate"))(job.k)
    c = at_count("averaging", 1 - job.b1 if job.averaging is None else job.averaging)(job.k)
    return eta * (1 - c), eta, c


def _divisor(momentum: Any, job: Job, nu: ByPath | None, key: str) -> ArrayLike:
    """By what Adam divides m. For what step k adds it corrects the bias by k + 1."""
    if not _is_adam(momentum):
        return 1.0
    v = (nu or {})[key]
    return _bias(job.b1, job.k + 1, v) * (jnp.sqrt(v) + job.eps)


def _read_schedule_free(old: Any, z: ByPath, job: Job) -> Snapshot:
    mu_y, eta, total = _scalars(old.b1, old.max_lr, old.weight_sum)
    c = jnp.where(total > 0, eta**job.weight_power / jnp.where(total > 0, total, 1), 0)
    return Snapshot(z, eta * (1 - c), eta, c, mu_y, _read_second_moment(job))


def _read_spa(old: Any, z: ByPath, job: Job) -> Snapshot:
    value = form_of(old.z).value
    z = {k: value(job.x[k], leaf) if is_trained(job.x[k]) else leaf for k, leaf in z.items()}
    w, eta, c, mu_y = _scalars(old.w, old.eta, old.c, old.mu_y)
    return Snapshot(z, w, eta, c, mu_y, _read_second_moment(job))


# ----------------------------------------------------------------------------------------- writers


def _write_optax(new: Any, job: Job, run: Snapshot) -> PyTree:
    """The m of x − z = scale · m, or 0 if the scale is 0."""
    w, _, c = _scalars_of_adam(job) if _is_adam(new) else (run.w, run.eta, jnp.ones_like(run.w))
    known = (job.k > 0) & (w > 0) & (c > 0)
    scale = jnp.where(known, w / jnp.where(known, c, 1), 1)

    def m(key: str) -> Array:
        x, z = job.x[key], run.z[key]
        if not is_trained(x):
            return jnp.zeros_like(x)
        distance = x.astype(wide_dtype(x, z)) - z.astype(wide_dtype(x, z))
        m = jnp.where(known, distance / scale.astype(distance.dtype), 0)
        return m * _divisor(new, job, run.nu, key)

    mu, nu = list(map(m, run.z)), run.nu or {}
    biased = [nu[key] * _bias(job.b2, job.k, nu[key]) if key in nu else job.x[key] for key in run.z]
    return [job.k, mu, biased] if _is_adam(new) else mu


def _write_schedule_free(new: Any, job: Job, run: Snapshot) -> PyTree:
    """The sum of weights is the last weight over c_k.

    Step k − 1 of Optax reads the rate at count k, which is a count later than elsewhere.
    """
    rate = at_count("learning_rate", _required(job, "learning_rate"))
    largest = lambda i, so_far: jnp.maximum(so_far, rate(i))
    max_lr = jax.lax.fori_loop(1, job.k + 1, largest, jnp.zeros_like(rate(job.k)))
    c = run.c.astype(max_lr.dtype)
    total = jnp.where(c > 0, max_lr**job.weight_power / jnp.where(c > 0, c, 1), 0)
    z = list(run.z.values())
    return new._replace(b1=run.mu_y, weight_sum=total, step_count=job.k + 1, max_lr=max_lr, z=z)


def _write_spa(new: Any, job: Job, run: Snapshot) -> PyTree:
    form, stored = form_of(new.z), map(jnp.asarray, jax.tree.leaves(new.z))
    z = [
        form.encode(run.z[key], job.y[key], None, old) if is_trained(run.z[key]) else old
        for key, old in zip(run.z, stored, strict=True)
    ]
    saturated = [form.num_saturated(leaf) for leaf in z if is_trained(leaf)]
    if is_surely(_any(number > 0 for number in saturated)):
        warnings.warn("z is farther from `params` than `into` can hold: it is cut", stacklevel=4)
    return [job.k, z, run.eta, run.c, run.w, run.mu_y, job.rule_state]


class Format(NamedTuple):
    """How a state with momentum is read and written."""

    field: str  # with a leaf for each parameter
    read: Any
    write: Any


# A `ScheduleFreeState` counts before what its base optimizer has, and so does z.
_FORMATS: dict[Any, Format] = {
    optax.contrib.ScheduleFreeState: Format("z", _read_schedule_free, _write_schedule_free),
    SPAState: Format("z", _read_spa, _write_spa),
    optax.ScaleByAdamState: Format("mu", _read_optax, _write_optax),
    optax.TraceState: Format("trace", _read_optax, _write_optax),
}


# --------------------------------------------------------------------------------- second moments


def _without_bias(moment: ByPath, decay: Any, k: Array) -> ByPath:
    """A moment as Adam uses it; 0 before the first step."""
    wide = {key: v.astype(wide_dtype(v)) for key, v in moment.items() if is_trained(v)}
    return {key: v / _bias(decay, jnp.maximum(k, 1), v) for key, v in wide.items()}


def _bias(decay: ArrayLike, k: Array, moment: Array) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, moment.dtype) ** k.astype(moment.dtype)


def _read_second_moment(job: Job) -> ByPath | None:
    """ν without bias, unless it goes on as it is."""
    if job.nu is None:
        return None
    if not isinstance(job.nu, optax.FactoredState):
        return _without_bias(by_path(job.nu.nu), job.b2, job.k)
    rows, columns, full = (by_path(tree) for tree in job.nu[1:])

    def nu(key: str) -> Array:
        if full[key].shape == job.x[key].shape:
            return full[key]
        i, j = factored_axes(job.x[key])
        row, column = jnp.expand_dims(rows[key], j), jnp.expand_dims(columns[key], i)
        return row * column / jnp.mean(row, i, keepdims=True)

    return {key: jnp.maximum(nu(key) - jnp.square(job.eps), 0) for key in full}


def _write_second_moment(new: Any, job: Job, run: Snapshot) -> list[Any]:
    """The leaves of a node for a second moment, with ν in its own form."""
    all_nu = run.nu or {}
    if isinstance(new, RMSState):
        nu = (all_nu[key] for key in by_path(new.nu))
        return [job.k, *(v * _bias(job.b2, job.k, v) for v in nu)]

    def factors(key: str, old: Array) -> tuple[Array, Array, Array]:
        v, none = all_nu[key] + jnp.square(job.eps), jnp.zeros(1)
        if old.shape == v.shape:
            return none, none, v
        i, j = factored_axes(v)
        return v.mean(j), v.mean(i), none

    return [job.k, *zip(*(factors(key, old) for key, old in by_path(new.v).items()), strict=True)]
