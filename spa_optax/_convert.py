"""Moves a run in the middle: from one optimizer's state into another's.

Any momentum is read as an `SPAState`, and written from one. Every other node that both
states hold is copied, or counts on from k.
"""

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax import _checks as checks, _optax_states as of_optax, _trees as trees
from spa_optax._adam import factored_axes
from spa_optax._core import SPAState, is_at_start
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._precision import has_narrow, scaled, wide_dtype
from spa_optax._storage import form_of, tree_of
from spa_optax._trees import by_path, is_trained, scalar_of, with_leaves
from spa_optax._wrappers import (
    Float8MomentumState,
    PrimalAveragingState,
    StochasticRoundingState,
)
from spa_optax._xla import rescale
from spa_optax.diagnostics._track import TrackMomentumState

ByPath = dict[str, Array]  # an array for each parameter, by its path
# The params before, and as x the trained ones in 32 bits or more; y, those that the run
# goes on with; k, the count; nu, ν without bias; and arguments of `convert`.
Job = namedtuple(
    "Job",
    "params x y k nu learning_rate momentum nesterov averaging b1 b2 eps weight_power",
)
# In this order: the base optimizer in a `ScheduleFreeState` may be Adam.
_MOMENTA = (
    optax.contrib.ScheduleFreeState,
    SPAState,
    optax.ScaleByAdamState,
    optax.TraceState,
)
# Wrappers: their fields with the states of what they wrap, and the one that counts the
# steps taken. Other fields are of `into`: injected hyper-parameters, gauges.
_WRAPPERS: dict[Any, tuple[str, str | None]] = {
    optax.MaskedState: ("inner_state", None),
    optax.PartitionState: ("inner_states", None),
    optax.InjectHyperparamsState: ("inner_state", "count"),
    optax.InjectStatefulHyperparamsState: ("hyperparams_states inner_state", "count"),
    optax.MultiStepsState: ("inner_opt_state", "gradient_step"),
    optax.ApplyIfFiniteState: ("inner_state", None),
    optax.ConditionallyTransformState: ("inner_state", "step"),
    optax.ConditionallyMaskState: ("inner_state", "step"),
    optax.contrib.ScheduleFreeState: ("base_optimizer_state", None),
    PrimalAveragingState: ("base average", None),
    StochasticRoundingState: ("base", "count"),
    TrackMomentumState: ("inner", None),
}
# Those of a base optimizer, and the field that holds its state.
_BASES = {
    kind: of[0].split()[0] for kind, of in _WRAPPERS.items() if of[0].startswith("base")
}
_MAY_DIFFER = (*of_optax.SECOND_MOMENTS, *of_optax.SKIPS_UPDATES)
_KNOWN = (*of_optax.DIRECTIONS, *of_optax.MONITORS, *_WRAPPERS, *_MAY_DIFFER)
_KNOWN += (SPAState, Float8MomentumState)


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

    It goes between members of this package, wrappers around the same base optimizer,
    and

        optax.sgd, optax.trace          z = x − w m, if the learning rate comes after m
        optax.adam, optax.adamw     z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)
        optax.contrib.schedule_free     its z, and b1 = μ_y

    From `optax.sgd` w is that of `spa_from_sgdm`; to it, the state's. From AdamW, the
    next step's momentum is AdamW's, except for the gradient's effect on ν. A momentum
    that keeps its form is copied: both runs must have the same kind of optimizer, which
    is not checked.

    Second moments may change their form. Injected hyper-parameters and gauges are those
    of `into`. Directions and bases that both runs hold go on; so do wrappers that skip
    updates: the length of an `optax.MultiSteps` must be the same, which is not checked.
    Other states are refused.

    Args: old_state: the run's state, in any chain or wrapper except `optax.flatten`, or
      of Flax nnx. params: the run's current params, or their float32 master copy: z is
      made from them. into: the new optimizer's state from `init`. It may train fewer
      params, with others frozen. adam: the `optax.adam` or `optax.adamw` of a run, in
      any chain or wrapper. Needed from and to
        these. It is tried out on tiny params, since others have states of the same
        type.
      new_params: the params to go on with, if they are `params` in 16 bits. z keeps
        what is lost.
      learning_rate: α_k or η_k ≥ 0, a scalar or a schedule of the count k. Needed from
        `optax.sgd` and `primal_averaging`, from and to AdamW, and to Schedule-Free,
        unless the form is kept.
      momentum: β_k in [0, 1), as above. Needed from `optax.sgd`.
      nesterov: whether that momentum is Nesterov's.
      averaging: c_{k+1} in (0, 1] of the other run, from and to AdamW. None means 1 −
        b1.
      b1: β₁ of Adam, in [0, 1).
      b2: β₂ of the second moment of both runs, in [0, 1).
      eps: ε of both runs, ≥ 0.
      weight_power: `weight_lr_power` of `optax.contrib.schedule_free`, ≥ 0.
      count: k ≥ 0, the number of steps taken. Needed if `old_state` has none, as that
        of `optax.sgd` with a number as learning rate, unless it is at its start.

    Returns:
      `into` with the run. It shares no buffer with the arguments.

    Raises: ValueError: if an argument is missing or out of range, or `adam` is not
      Adam; if the states do
        not match, or are not known; if counts differ, accumulated gradients would be
        lost, or only one run trains at y. (Under `jax.jit` the last three give NaN.)

    Examples: SGD with α = 1 and β = 0.5, after a gradient of 2: x is at 8, and would
      coast to 6.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import convert, spa_from_sgdm
      >>> sgd, tx = optax.sgd(1.0, momentum=0.5), spa_from_sgdm(1.0, momentum=0.5)
      >>> x = jnp.array(10.0)
      >>> updates, state = sgd.update(jnp.array(2.0), sgd.init(x), x)
      >>> x = optax.apply_updates(x, updates)
      >>> sgdm = {"learning_rate": 1.0, "momentum": 0.5}
      >>> new = convert(state, x, into=tx.init(x), **sgdm, count=1)
      >>> print(new.z, optax.tree.get(convert(new, x, into=sgd.init(x)), "trace"))
      6.0 2.0

    References: Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem
      1 and its proof.
    """
    checks.RATE.optional().check(learning_rate=learning_rate)
    checks.MOMENTUM.optional().check(momentum=momentum)
    checks.AVERAGING.optional().check(averaging=averaging)
    checks.B1.check(b1=b1)
    checks.B2.check(b2=b2)
    checks.EPS.check(eps=eps, weight_power=weight_power)
    checks.FLAG.check(nesterov=nesterov)
    checks.NOT_NEGATIVE_INTEGER.optional().check(count=count)
    new_params = params if new_params is None else new_params
    trees.check_same_tree("new_params", new_params, "params", params, same_nodes=False)
    old, new = (
        _momentum_of("old_state", old_state, params),
        _momentum_of("into", into, params),
    )
    if odd := sorted(by_path(_tree_of(new)).keys() - by_path(_tree_of(old)).keys()):
        raise ValueError(
            f"`into` must hold only params of `old_state`, got {odd[0] or 'its root'}"
        )
    own = [getattr(momentum, "rule_state", ()) for momentum in (new, old)]
    trees.check_same_tree("into.rule_state", own[0], "old_state.rule_state", own[1])
    old_nodes = _nodes_of("old_state", old_state, type(old))
    kept, dropped, added = _matched(old_nodes, _nodes_of("into", into, type(new)))

    x, y, wide = (
        by_path(params),
        by_path(new_params),
        lambda leaf: leaf.astype(wide_dtype(leaf)),
    )
    trained = {
        key: wide(x[key]) for key in by_path(_tree_of(old)) if is_trained(x[key])
    }
    k, differ = _steps_taken(
        old, old_nodes, count, callable(learning_rate) or callable(momentum)
    )
    is_lost = differ | _is_lost(old, new, dropped)
    nu = _read_second_moment([*dropped, old], [*added, new], y, k, b2, eps)
    hyperparams = (
        learning_rate,
        momentum,
        nesterov,
        averaging,
        b1,
        b2,
        eps,
        weight_power,
    )
    job = Job(x, trained, y, k, nu, *hyperparams)
    run: Any = None
    if type(old) is type(new) is not SPAState:
        kept[type(new)] = [old]
    else:
        if optax.ScaleByAdamState in (type(old), type(new)):
            of_optax.check_adam(_required("adam", adam), params, b1, b2, eps)
        if isinstance(old, of_optax.ADAM_OR_TRACE):
            _warn_of_narrow_params(old_state, old, x)
        run = _read(old, job)
        was, is_there = (
            trees.find(of, PrimalAveragingState) for of in (old_state, into)
        )
        if (
            was and not is_there and type(new) in (SPAState, optax.TraceState)
        ):  # where η was 1
            rate = at_count("learning_rate", _required("learning_rate", learning_rate))
            rate = rate(jnp.maximum(k - 1, 0))
            run = run._replace(eta=rate * run.eta, w=rate * run.w)
        elif is_there and not was:  # where η is 1
            run = run._replace(eta=jnp.ones([]), w=jnp.where(k > 0, 1 - run.c, 0))

    def moved(_: str, node: Any) -> Any:
        kind, new_node = _kind_of(node), node
        if kept.get(kind):
            new_node = list(map(by_path(kept[kind].pop(0)).__getitem__, by_path(node)))
        elif kind in (*_MOMENTA, *of_optax.SECOND_MOMENTS):
            new_node = _write(node, run, job)
        elif field := _count_field(kind):
            new_node = node._replace(**{field: k})
        return with_leaves(node, new_node)

    state = _map_nodes(moved, into)
    if not checks.is_surely(~is_lost):
        nan = lambda leaf: (
            jnp.where(is_lost, jnp.nan, leaf) if is_trained(leaf) else leaf
        )
        state = jax.tree.map(nan, state)
    return trees.copy(state)


def _momentum_of(name: str, state: PyTree, params: PyTree) -> Any:
    """The node of a state with the momentum."""
    found = trees.find_one(state, name, *_MOMENTA)
    checks.check_one_run(name, _mu_y_of(found), found._asdict().get("count", ()))
    trees.check_paths(name, [_tree_of(found)], params)
    return found


def _tree_of(momentum: Any) -> PyTree:
    """The tree with a leaf for each parameter."""
    return tree_of(getattr(momentum, of_optax.MOMENTUM.get(type(momentum), "z")))


def _mu_y_of(momentum: Any) -> PyTree:
    return getattr(momentum, "mu_y", getattr(momentum, "b1", 1.0))


def _is_lost(old: Any, new: Any, dropped: list[Any]) -> Array:
    """Raises where momentum or accumulated gradients are lost; whether they are, where
    traced.
    """
    mu_y, new_mu_y = (scalar_of(_mu_y_of(state)).astype(float) for state in (old, new))
    # Schedule-Free keeps its b1, which may be rounded to bfloat16. A member changes its
    # own.
    most = 2**-8 if isinstance(new, optax.contrib.ScheduleFreeState) else 1
    differs = ((mu_y == 1) != (new_mu_y == 1)) | (jnp.abs(mu_y - new_mu_y) > most)
    differs &= not isinstance(old, SPAState) or not isinstance(
        new, SPAState
    )  # `update` compares
    if checks.is_surely(differs):
        rule = (
            "the `interpolation` of `old_state`, 1 for SGD and AdamW, b1 for "
            "Schedule-Free"
        )
        raise ValueError(f"`into` must have {rule}: {mu_y:g}, got {new_mu_y:g}")
    mini_step = sum(
        scalar_of(of.mini_step) for of in trees.find(dropped, optax.MultiStepsState)
    )
    if checks.is_surely(mini_step > 0):
        rule = "must have the `optax.MultiSteps` of `old_state`, or the gradients of"
        raise ValueError(
            f"`into` {rule} {mini_step} batches would be lost, got another or none"
        )
    return differs | (mini_step > 0)


def _steps_taken(
    old: Any, old_nodes: list[Any], count: int | None, has_schedule: bool
) -> Any:
    """The count k, and whether counts are traced and differ."""
    # The `step` of a wrapper that skips updates counts those too.
    fields = [(node, _count_field(type(node))) for node in old_nodes]
    counts = [
        getattr(node, field) for node, field in fields if field not in (None, "step")
    ]
    given = [] if count is None else [jnp.asarray(count)]
    moving = [jnp.any(m != 0) for m in by_path(getattr(old, "trace", ())).values()]
    of_nu = [
        node.count for node in old_nodes if isinstance(node, of_optax.SECOND_MOMENTS)
    ]
    is_new = jnp.all(jnp.array([scalar_of(of) != count for of in counts])) & bool(
        given and counts
    )
    if isinstance(old, optax.TraceState):
        counts = given or counts
    else:
        own = old.step_count - 1 if hasattr(old, "step_count") else old.count
        counts = [own, *counts, *of_nu, *given]
    checks.check_one_run("old_state", counts)
    k, *others = map(scalar_of, counts or [0])
    is_start = not has_schedule and all(checks.is_surely(~of) for of in moving)
    differ = jnp.any(jnp.array([other != k for other in others], bool)) | is_new
    if (not counts and not is_start) or checks.is_surely(differ):
        rule = (
            "where `old_state` of SGD holds none, or be one of several; another "
            "must hold one"
        )
        raise ValueError(
            f"`count` must be given {rule}, got {[*map(int, counts)] or None}"
        )
    has_momentum = (k == 0) & jnp.any(jnp.array(moving, bool))
    if checks.is_surely(has_momentum):
        raise ValueError("`count` must be >= 1 where `old_state` holds momentum, got 0")
    return k.astype(jnp.int32), differ | has_momentum


def _required(name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"`{name}` must be given for these states, got None")
    return value


def _warn_of_narrow_params(old_state: PyTree, old: Any, x: ByPath) -> None:
    """Warns if z would be made from params of fewer bits than the run seems to have."""
    moments = by_path(getattr(old, "nu", _tree_of(old)))
    is_wide = not trees.find(old_state, StochasticRoundingState) and not has_narrow(
        moments
    )
    if is_wide and has_narrow([x[key] for key in moments]):
        rule = (
            "should be the float32 master copy of the run if it has one, as its "
            "float32 moments"
        )
        hint = "suggest: z is made from them. Pass the cast ones as `new_params`."
        warnings.warn(f"`params` {rule} {hint}", stacklevel=3)


def _read(old: Any, job: Job) -> SPAState:
    """The run as SPA. From `optax.trace` η, c and w are of step k − 1, from Adam of the
    next.
    """
    k, x = job.k, job.x
    if isinstance(old, SPAState):
        form, z = form_of(old.z), by_path(tree_of(old.z))
        z = {key: form.value(x[key], z[key]) for key in x}
        z = rescale(
            {i: job.params[i] for i in x}, z, {}, is_at_start(old), form.follows_params
        )
        eta, c, w, mu_y = map(scalar_of, (old.eta, old.c, old.w, old.mu_y))
        return SPAState(k, z, eta, c, w, mu_y, old.rule_state)
    if isinstance(old, optax.contrib.ScheduleFreeState):
        eta = scalar_of(old.max_lr)
        c = _over(eta**job.weight_power, scalar_of(old.weight_sum))
        return SPAState(
            k, by_path(old.z), eta, c, w=eta * (1 - c), mu_y=scalar_of(old.b1)
        )
    if isinstance(old, optax.TraceState):
        alpha = _required("learning_rate", job.learning_rate)
        beta = _required("momentum", job.momentum)
        ahead = look_ahead(alpha, beta, jnp.maximum(k - 1, 0), nesterov=job.nesterov)
        w = scale = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
        (eta, c), m = eta_and_c(ahead, w, nesterov=job.nesterov), by_path(old.trace)
    else:
        (eta, c, w), mu = _scalars_of_adam(job), by_path(old.mu)
        scale = w / c
        m = {key: mu[key].astype(wide_dtype(mu[key])) / _divisor(key, job) for key in x}
    z = {key: x[key] - scaled(scale, m[key], x[key].dtype) for key in x}
    eta, c, w = (jnp.where(k == 0, 0, scalar) for scalar in (eta, c, w))
    return SPAState(k, z, eta, c, w, jnp.ones([]))


def _write(new: Any, run: Any, job: Job) -> Any:
    """A node of `into` with the leaves of the run, which is None if its momentum is
    copied.
    """
    k, kind = job.k, type(new)
    if kind is SPAState:
        form, z = form_of(new.z), by_path(tree_of(new.z))
        trained = [key for key in z if key in job.x]
        z |= {key: form.encode(run.z[key], job.y[key], None, z[key]) for key in trained}
        if checks.is_surely(
            sum(form.out_of_range(z[key]).saturated for key in trained) > 0
        ):
            text = (
                "`into` cannot hold all of z − params, which is clipped: use bfloat16"
            )
            warnings.warn(text, stacklevel=4)
        return run._replace(z=list(z.values()))
    if kind is optax.contrib.ScheduleFreeState:
        # Step k − 1 of Optax reads the rate at count k, which is a count later than
        # elsewhere.
        rate = at_count("learning_rate", _required("learning_rate", job.learning_rate))
        largest = lambda i, so_far: jnp.maximum(so_far, rate(i))
        max_lr = jax.lax.fori_loop(1, k + 1, largest, jnp.zeros_like(rate(k)))
        total = _over(max_lr**job.weight_power, run.c)  # the last weight over c_k
        z = _filled(new.z, run.z)
        return new._replace(
            b1=run.mu_y, weight_sum=total, step_count=k + 1, max_lr=max_lr, z=z
        )
    if (
        kind is optax.FactoredState
    ):  # the means of ν over rows and over columns, or all of it
        leaves, none = [], jnp.zeros(1)
        for key, old in by_path(new.v).items():
            v = job.nu[key] + jnp.square(job.eps)
            if old.shape == v.shape:
                leaves.append((none, none, v))
            else:
                i, j = factored_axes(v)
                leaves.append((v.mean(j), v.mean(i), none))
        return optax.FactoredState(k, *map(list, zip(*leaves, strict=True)))
    if kind is optax.TraceState:
        return new._replace(trace=_filled(new.trace, _momentum(run, run.w, job)))
    biased = {key: v * _bias(job.b2, k, v) for key, v in job.nu.items()}
    new = new._replace(count=k, nu=_filled(new.nu, biased))
    if kind is of_optax.RMSState:
        return new
    _, c, w = _scalars_of_adam(job)
    mu = {key: d * _divisor(key, job) for key, d in _momentum(run, w / c, job).items()}
    return new._replace(mu=_filled(new.mu, mu))


def _momentum(run: SPAState, scale: Array, job: Job) -> ByPath:
    """The m of x − z = scale · m, or 0 if the scale is 0."""
    m = {}
    for key, x in job.x.items():
        dtype = wide_dtype(x, z := run.z[key])
        m[key] = _over(
            x.astype(dtype) - z.astype(dtype), jnp.where(job.k > 0, scale, 0)
        )
    return m


def _scalars_of_adam(job: Job) -> tuple[Array, Array, Array]:
    """η, c and w of the next step."""
    eta = at_count("learning_rate", _required("learning_rate", job.learning_rate))(
        job.k
    )
    c = at_count("averaging", 1 - job.b1 if job.averaging is None else job.averaging)(
        job.k
    )
    if checks.is_surely((c <= 0) | ((eta <= 0) & (job.k > 0))):
        rule = (
            "`averaging` and `learning_rate` must be > 0, for z to hold m at a "
            "finite distance"
        )
        raise ValueError(f"{rule}, got {c} and {eta}")
    return eta, c, eta * (1 - c)


def _divisor(key: str, job: Job) -> Array:
    """By what Adam divides m. For what step k adds it corrects the bias by k + 1."""
    v = job.nu[key]
    return _bias(job.b1, job.k + 1, v) * (jnp.sqrt(v) + job.eps)


def _filled(tree: PyTree, values: ByPath) -> list[Any]:
    """The leaves of a tree, with values where there are some."""
    return [values.get(key, leaf) for key, leaf in by_path(tree).items()]


def _over(a: Array, b: Array) -> Array:
    """The quotient a / b, or 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b).astype(a.dtype))


def _read_second_moment(
    olds: list[Any], news: list[Any], y: ByPath, k: Array, b2: ArrayLike, eps: ArrayLike
) -> ByPath:
    """ν without bias, if there is one that takes another form; 0 before the first
    step.
    """
    is_nu = lambda node: isinstance(
        node, (*of_optax.SECOND_MOMENTS, optax.ScaleByAdamState)
    )
    found, wanted = list(filter(is_nu, olds)), list(filter(is_nu, news))
    if len(found) != len(wanted) or len(found) > 1:
        rule = "must both hold one second moment to convert, or none"
        raise ValueError(
            f"`old_state` and `into` {rule}, got {len(found)} and {len(wanted)}"
        )
    if not found:
        return {}
    if not isinstance(found[0], optax.FactoredState):
        nu = {key: v.astype(wide_dtype(v)) for key, v in by_path(found[0].nu).items()}
        return {key: v / _bias(b2, jnp.maximum(k, 1), v) for key, v in nu.items()}
    rows, columns, nu = map(by_path, found[0][1:])
    for key, v in nu.items():
        if v.shape != y[key].shape:  # ν = row · column / mean
            i, j = factored_axes(y[key])
            row, column = (
                jnp.expand_dims(rows[key], j),
                jnp.expand_dims(columns[key], i),
            )
            mean = jnp.mean(row, i, keepdims=True)
            nu[key] = row / jnp.where(mean > 0, mean, 1) * column
    return {key: jnp.maximum(v - jnp.square(eps), 0) for key, v in nu.items()}


def _bias(decay: ArrayLike, k: Array, moment: Array) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, moment.dtype) ** k.astype(moment.dtype)


def _map_nodes(
    function: Callable[[str, Any], Any], state: PyTree, path: str = ""
) -> PyTree:
    """A state with a function of the path and the value of each node, inner states
    first.
    """

    def replaced(keys: Any, node: Any) -> Any:
        here, fields = (
            path + keystr(keys),
            _WRAPPERS.get(type(node), ("", None))[0].split(),
        )
        inner = {
            f: _map_nodes(function, getattr(node, f), f"{here}.{f}") for f in fields
        }
        # A wrapper is passed without the states inside it.
        own = function(here, node._replace(**dict.fromkeys(fields)) if fields else node)
        return own._replace(**inner) if fields else own

    return tree_map_with_path(
        replaced, state, is_leaf=lambda node: hasattr(node, "_fields")
    )


def _nodes_of(name: str, state: PyTree, momentum: type) -> list[Any]:
    """The nodes of a state but the momentum; raises at one that is not known, outside
    of bases.
    """

    def check(path: str, node: Any) -> Any:
        is_known = isinstance(node, _KNOWN) or _count_field(type(node))
        if not is_known and any(map(trees.is_array, jax.tree.leaves(node))):
            got = f"a `{type(node).__name__}` at {path or 'its root'}"
            raise ValueError(
                f"`{name}` must hold only states that `convert` knows, got {got}"
            )
        return node

    without_base = lambda node: node._replace(**{_BASES[type(node)]: None})
    _map_nodes(check, trees.replace(state, tuple(_BASES), without_base))
    nodes: list[Any] = []
    _map_nodes(lambda _, node: nodes.append(node) or node, state)
    if momentum not in map(type, nodes):
        rule = "must hold its momentum in wrappers that `convert` knows"
        raise ValueError(f"`{name}` {rule}, got one in {trees.kinds_of(state)}")
    return [node for node in nodes if type(node) is not momentum]


def _kind_of(node: Any) -> Any:
    """The type of a node; one for all arrays, JAX's and NumPy's."""
    return type(node) if hasattr(node, "_fields") else jax.Array


def _count_field(kind: Any) -> str | None:
    """The field that counts the steps taken. States with `count` alone belong to
    schedules.
    """
    is_of_schedule = getattr(kind, "_fields", ()) == ("count",)
    return "count" if is_of_schedule else _WRAPPERS.get(kind, ("", None))[1]


def _matched(
    old: list[Any], new: list[Any]
) -> tuple[dict[Any, list[Any]], list[Any], list[Any]]:
    """By their kind, the old nodes that go on; and other old and new ones, which may
    differ.
    """
    kept, dropped, added = {}, [], []
    form = lambda nodes: (
        jax.tree.structure(nodes),
        list(map(np.shape, jax.tree.leaves(nodes))),
    )
    for kind in dict.fromkeys(map(_kind_of, [*old, *new])):
        olds, news = (
            [node for node in of if _kind_of(node) is kind] for of in (old, new)
        )
        if kind not in _MAY_DIFFER and (kind in _WRAPPERS or _count_field(kind)):
            continue
        if form(olds) == form(news):
            kept[kind] = olds
        elif kind in _MAY_DIFFER:
            dropped, added = dropped + olds, added + news
        elif jax.tree.leaves([olds, news]):
            rule = "must have the other states of `old_state`, in the same shapes, got"
            raise ValueError(
                f"`into` {rule} {len(news)} `{kind.__name__}` for {len(olds)}"
            )
    return kept, dropped, added
