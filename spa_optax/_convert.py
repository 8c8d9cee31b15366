"""Moves a run in the middle: from one optimizer's state into another's.

A state is a tree of nodes. `convert` finds the node with the momentum in both states,
reads the old one as an `SPAState` whose z is a dict of arrays by path, and writes the
new one from it. Counters count on from k. All other nodes are copied by type and shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax import _checks as checks
from spa_optax._codec import codec_of, tree_of
from spa_optax._core import SPAState, has_taken_no_step
from spa_optax._dtypes import has_16_bits, wide_dtype
from spa_optax._float8 import Float8MomentumState
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._trees import (
    by_path,
    check_one_run,
    check_paths,
    check_same_tree,
    copy_arrays,
    is_trained,
    kinds_of,
    scalar_of,
    with_leaves,
)
from spa_optax._wrappers import PrimalAveragingState, StochasticRoundingState
from spa_optax.diagnostics._guard import GuardParamsState
from spa_optax.diagnostics._track import TrackMomentumState

ByPath = dict[str, Array]  # an array for each parameter, by its path
# Optax does not export it. (To call `init` here would start JAX at import.)
ScaleByRmsWithCountState: Any = type(
    jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())
)
# The fields of wrappers that hold other states. Their other fields, such as injected
# hyper-parameters and gauges, are those of `into`.
INNER_FIELDS: dict[type, tuple[str, ...]] = {
    optax.MaskedState: ("inner_state",),
    optax.PartitionState: ("inner_states",),
    optax.InjectHyperparamsState: ("inner_state",),
    optax.InjectStatefulHyperparamsState: ("hyperparams_states", "inner_state"),
    optax.MultiStepsState: ("inner_opt_state",),
    optax.ApplyIfFiniteState: ("inner_state",),
    PrimalAveragingState: ("base", "average"),
    StochasticRoundingState: ("base",),
    Float8MomentumState: ("base",),
    TrackMomentumState: ("inner",),
    GuardParamsState: ("inner",),
}
# The fields that count the steps taken.
COUNT_FIELDS: dict[type, str] = {
    optax.InjectHyperparamsState: "count",
    optax.InjectStatefulHyperparamsState: "count",
    optax.MultiStepsState: "gradient_step",
    StochasticRoundingState: "count",
    Float8MomentumState: "count",
    SPAState: "count",
    optax.ScaleByAdamState: "count",
    ScaleByRmsWithCountState: "count",
}
REQUIREMENTS = {
    "learning_rate": checks.RATE,
    "momentum": checks.MOMENTUM,
    "nesterov": checks.FLAG,
    "b1": checks.B1,
    "b2": checks.B2,
    "eps": checks.EPS,
}
# The states with a momentum, and its field. Beside one of the family others are copied.
MOMENTUM_FIELDS: dict[type, str] = {
    SPAState: "z",
    optax.ScaleByAdamState: "mu",
    optax.TraceState: "trace",
}


class SGDM(NamedTuple):
    """The hyper-parameters of `optax.sgd` with momentum, for `convert`."""

    learning_rate: optax.ScalarOrSchedule  # α_k
    momentum: optax.ScalarOrSchedule  # β_k
    nesterov: bool = False


class AdamW(NamedTuple):
    """The hyper-parameters of `optax.adamw` or `optax.adam`, for `convert`."""

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike = 0.9
    b2: ArrayLike = 0.999
    eps: ArrayLike = 1e-8


class Run(NamedTuple):
    """What is known of a run, apart from its momentum."""

    count: Array  # k
    y: ByPath  # the params with momentum, in 32 bits or more
    new_params: ByPath  # those to go on with
    nu: ByPath  # Adam's ν as it is stored, if the run goes from or to AdamW
    other: SGDM | AdamW | None  # the argument of `convert`
    averaging: optax.ScalarOrSchedule | None


class MomentumScale(NamedTuple):
    """How Optax's momentum m says where z is: x − z = scale · m / divisor."""

    eta: Array  # η, c and w of the step
    c: Array
    w: Array
    scale: Array
    divisors: ByPath  # none for SGD


def convert(
    old_state: PyTree,
    params: PyTree,
    *,
    into: PyTree,
    other: SGDM | AdamW | None = None,
    averaging: optax.ScalarOrSchedule | None = None,
    new_params: PyTree | None = None,
    count: int | None = None,
) -> PyTree:
    """The state with which another optimizer continues a run.

    It goes between members of this package, and between one of them and

        optax.sgd      z = x − w m
        optax.adamw    z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)

    From `optax.sgd` w is computed as in `spa_from_sgdm`. To `optax.sgd` w is the one in
    the `SPAState`. From AdamW to `spa_adamw`, the next step's momentum is AdamW's,
    except for the gradient's effect on ν.

    Other states of the same type and shapes are copied: whether both runs have the same
    kind of optimizer there is not checked. Step counts go on from k. Injected
    hyper-parameters, gauges and the counts of `optax.apply_if_finite` are those of
    `into`. A state that has no counterpart is refused. Call it outside `jax.jit`.

    Args:
      old_state: the run's state, in any chain, in wrappers of Optax and of this
        package, or of Flax nnx.
      params: the run's current params, or their float32 master copy: z is made from
        them.
      into: the new optimizer's state from `init`. It may train fewer params, with
        others frozen.
      other: the hyper-parameters of Optax's optimizer: `SGDM` from `optax.sgd`, and
        `AdamW` from and to `optax.adamw`. It also says that a state of Adam's type is
        AdamW's, since other optimizers have such states.
      averaging: c_{k+1} in (0, 1] of `spa_adamw`, a scalar or a schedule of the count
        k, from and to AdamW. None means 1 − b1.
      new_params: the params to go on with, if they are `params` in 16 bits. z keeps
        what is lost.
      count: k ≥ 0, the number of steps taken. Needed if `old_state` has none, as that
        of `optax.sgd` with a number as learning rate.

    Returns:
      `into` with the run. It shares no buffer with the arguments.

    Raises:
      ValueError: if an argument is missing, traced or out of range; if the states do
        not match; if counts differ, accumulated gradients would be lost, or a run at a
        μ_y below 1 would go on in Optax.

    Examples:
      SGD with α = 1 and β = 0.5, after a gradient of 2: x is at 8, and would coast to
      6.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import SGDM, convert, spa_from_sgdm
      >>> sgd, tx = optax.sgd(1.0, momentum=0.5), spa_from_sgdm(1.0, momentum=0.5)
      >>> x = jnp.array(10.0)
      >>> updates, state = sgd.update(jnp.array(2.0), sgd.init(x), x)
      >>> x = optax.apply_updates(x, updates)
      >>> new = convert(state, x, into=tx.init(x), other=SGDM(1.0, 0.5), count=1)
      >>> print(new.z, optax.tree.get(convert(new, x, into=sgd.init(x)), "trace"))
      6.0 2.0

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and its
      proof.
    """
    new_params = params if new_params is None else new_params
    arguments = (old_state, params, into, other, averaging, new_params, count)
    _check_arguments(arguments, other, averaging)
    check_same_tree("new_params", new_params, "params", params, same_nodes=False)
    nodes, new_nodes = _nodes_of(old_state), _nodes_of(into)
    pair = _pair_of(nodes, new_nodes, params)
    k = _steps_taken(nodes, count)
    if pair is not None:
        old, new = pair
        _check_injected(new_nodes if isinstance(old, SPAState) else nodes, other)
        _warn_of_narrow_params(old, nodes, params)
        run = Run(
            count=k,
            y=_trained(old, by_path(params)),
            new_params=by_path(new_params),
            nu=_nu_of(old, new, nodes, new_nodes),
            other=other,
            averaging=averaging,
        )
        momentum = (
            _read_spa(old, run) if isinstance(old, SPAState) else _read_optax(old, run)
        )
        write = _write_spa if isinstance(new, SPAState) else _write_optax
        nodes = _with_momentum(nodes, old, write(new, momentum, run))
    return copy_arrays(_filled(into, nodes, k))


def _check_arguments(
    arguments: PyTree, other: object, averaging: optax.ScalarOrSchedule | None
) -> None:
    """Raises ValueError where an argument is traced or out of its range."""
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise ValueError(
                "`old_state`, `params`, `into` and all other arguments must hold "
                f"arrays, got a `{type(leaf).__name__}`. Call `convert` outside "
                "`jax.jit`, `jax.vmap` and `jax.eval_shape`."
            )
    if averaging is not None:
        checks.check_averaging(averaging=averaging)
    if other is None:
        return
    if not isinstance(other, (SGDM, AdamW)):
        raise ValueError(
            "`other` must be `SGDM(learning_rate, momentum)` or "
            f"`AdamW(learning_rate)`, got {other!r}"
        )
    for name, value in other._asdict().items():
        REQUIREMENTS[name].check(**{name: value})


def _check_injected(nodes: list[Any], other: SGDM | AdamW | None) -> None:
    """Raises ValueError if a state injects other numbers than `other` has."""
    hyperparams = {} if other is None else other._asdict()
    injecting = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
    for node in _find(nodes, injecting):
        for name, value in node.hyperparams.items():
            given = hyperparams.get(name, value)
            if callable(given) or jnp.shape(value):
                continue
            if not jnp.allclose(given, value, rtol=1e-2):  # it may be in bfloat16
                raise ValueError(
                    f"`other` must have the {name} that the state injects, {value:g}, "
                    f"got {given}"
                )


def _map_nodes(function: Callable[[Any], Any], state: PyTree) -> PyTree:
    """A state with a function of each node. A wrapper comes after its inner states.

    It is passed without them.
    """

    def map_node(node: Any) -> Any:
        fields = INNER_FIELDS.get(type(node), ())
        inner = {field: _map_nodes(function, getattr(node, field)) for field in fields}
        if not inner:
            return function(node)
        return function(node._replace(**dict.fromkeys(fields)))._replace(**inner)

    return jax.tree.map(map_node, state, is_leaf=lambda node: hasattr(node, "_fields"))


def _nodes_of(state: PyTree) -> list[Any]:
    """The nodes of a state, wrappers among them."""
    nodes: list[Any] = []

    def collect(node: Any) -> Any:
        nodes.append(node)
        return node

    _map_nodes(collect, state)
    return nodes


def _find(nodes: list[Any], kind: Any) -> list[Any]:
    return [node for node in nodes if isinstance(node, kind)]


def _count_field(node: Any) -> str | None:
    """The field that counts the steps taken. Optax's schedules have it alone."""
    if getattr(node, "_fields", ()) == ("count",):
        return "count"
    return COUNT_FIELDS.get(type(node))


def _steps_taken(nodes: list[Any], count: object) -> Array:
    """The count k. Raises ValueError unless all counts agree, between two steps."""
    checks.NOT_NEGATIVE_INTEGER.optional().check(count=count)
    counts = [] if count is None else [count]
    for node in nodes:
        field = _count_field(node)
        if field is not None:
            counts.append(getattr(node, field))
    check_one_run("old_state", counts)
    values = sorted({int(scalar_of(value)) for value in counts})
    if len(values) != 1:
        raise ValueError(
            "`count` must be the number of steps taken, and all counts in `old_state` "
            f"must be the same, got {values or None}. Pass `count=k` if `old_state` "
            "has none."
        )
    for node in _find(nodes, optax.MultiStepsState):
        mini_step = scalar_of(node.mini_step)
        if mini_step > 0:
            raise ValueError(
                "`old_state` must not hold accumulated gradients, which would be lost, "
                f"got those of {mini_step} batches. Convert when `mini_step` is 0."
            )
    return jnp.asarray(values[0], jnp.int32)


def _pair_of(
    nodes: list[Any], new_nodes: list[Any], params: PyTree
) -> tuple[Any, Any] | None:
    """The old and the new node of a momentum, or None if neither is of the family.

    Raises ValueError unless the first can become the second.
    """
    if not _find(nodes + new_nodes, SPAState):
        return None
    averages = _find(nodes, PrimalAveragingState)
    if len(averages) != len(_find(new_nodes, PrimalAveragingState)):
        raise ValueError(
            "`old_state` and `into` must both be of `primal_averaging`, or neither. To "
            "begin an average in mid-run use "
            "`tx.init(params)._replace(base=old_state)`. To end it go on with "
            "`eval_params(old_state, params)` and `old_state.base`."
        )
    old = _momentum_of("old_state", nodes, new_nodes, params)
    new = _momentum_of("into", new_nodes, nodes, params)
    missing = by_path(_tree_of(new)).keys() - by_path(_tree_of(old)).keys()
    if missing:
        raise ValueError(
            "`into` must train only what `old_state` trains, got "
            f"{min(missing) or 'its root'}. Freeze it with `optax.partition`."
        )
    if not isinstance(new, SPAState) and scalar_of(old.mu_y) != 1:
        raise ValueError(
            "`old_state` must have an interpolation of 1 to go on in `optax.sgd` or "
            f"`optax.adamw`, got {scalar_of(old.mu_y):g}"
        )
    return old, new


def _momentum_of(
    name: str, nodes: list[Any], other_nodes: list[Any], params: PyTree
) -> Any:
    """The one node with the momentum: of the family, or else of Optax.

    A kind of Optax's that both states hold equally often is not translated but copied.
    """
    for kind in MOMENTUM_FIELDS:
        found = _find(nodes, kind)
        if kind is not SPAState and len(found) == len(_find(other_nodes, kind)):
            continue
        if len(found) > 1:
            raise ValueError(
                f"`{name}` must hold one `{kind.__name__}`, got {len(found)}. Convert "
                "each group of `optax.partition` by itself: `state.inner_states[label]`"
            )
        if found:
            check_one_run(name, found[0]._asdict().get("count", ()))
            check_paths(name, [_tree_of(found[0])], params)
            return found[0]
    raise ValueError(
        f"`{name}` must hold the momentum of this package, of `optax.sgd` or of "
        f"`optax.adamw`, in wrappers that `convert` knows, got "
        f"{kinds_of(tuple(nodes))}"
    )


def _tree_of(momentum: Any) -> PyTree:
    """The tree of a momentum, with a leaf for each parameter."""
    return tree_of(getattr(momentum, MOMENTUM_FIELDS[type(momentum)]))


def _trained(momentum: Any, params: ByPath) -> ByPath:
    """The params that have a momentum, in 32 bits or more."""
    found = {path: params[path] for path in by_path(_tree_of(momentum))}
    return {path: x.astype(wide_dtype(x)) for path, x in found.items() if is_trained(x)}


def _nu_of(old: Any, new: Any, nodes: list[Any], new_nodes: list[Any]) -> ByPath:
    """Adam's ν as it is stored, if the run goes from or to AdamW."""
    if optax.ScaleByAdamState not in (type(old), type(new)):
        return {}
    beside_z = nodes if isinstance(old, SPAState) else new_nodes
    found = _find(beside_z, ScaleByRmsWithCountState)
    if len(found) != 1:
        raise ValueError(
            "`old_state` and `into` must be of `optax.adamw` and "
            '`spa_adamw(second_moment="full")`, got one with '
            f"{kinds_of(tuple(beside_z))}"
        )
    return by_path(found[0].nu if isinstance(old, SPAState) else old.nu)


def _warn_of_narrow_params(old: Any, nodes: list[Any], params: PyTree) -> None:
    """Warns if z would be made from params of fewer bits than the run seems to have."""
    if isinstance(old, SPAState) or _find(nodes, StochasticRoundingState):
        return
    leaves = by_path(params)
    trained = [leaves[path] for path in by_path(_tree_of(old))]
    if has_16_bits(trained) and not has_16_bits(getattr(old, "nu", _tree_of(old))):
        checks.warn(
            "`params` should be the float32 master copy of the run, if it has one: its "
            "moments are in float32, and z is made from `params`. Pass the cast ones "
            "as `new_params`."
        )


def _scale_of_sgdm(run: Run) -> MomentumScale:
    """x − z = w m, with the scalars of step k − 1."""
    if not isinstance(run.other, SGDM):
        raise ValueError(
            "`other` must be `SGDM(learning_rate, momentum, nesterov)`, with the "
            f"hyper-parameters of `optax.sgd`, got {run.other!r}"
        )
    alpha, beta, nesterov = run.other
    last = jnp.maximum(run.count - 1, 0)
    ahead = look_ahead(alpha, beta, last, nesterov=nesterov)
    w = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
    eta, c = eta_and_c(ahead, w, nesterov=nesterov)
    return MomentumScale(eta, c, w, scale=w, divisors={})


def _scale_of_adamw(run: Run) -> MomentumScale:
    """x − z = w/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε), with the scalars of step k.

    m is divided as step k will divide it. ν is that of step k − 1, and so is its bias.
    """
    k, other = run.count, run.other
    if not isinstance(other, AdamW):
        raise ValueError(
            "`other` must be `AdamW(learning_rate, b1, b2, eps)`, if the "
            "`ScaleByAdamState` is that of `optax.adamw` or `optax.adam`, got "
            f"{other!r}"
        )
    averaging: Any = 1 - other.b1 if run.averaging is None else run.averaging
    eta = at_count("learning_rate", other.learning_rate)(k)
    c = at_count("averaging", averaging)(k)
    if c <= 0 or (eta <= 0 and k > 0):
        raise ValueError(
            "`averaging` and `learning_rate` must be > 0 for z to hold m at a finite "
            f"distance, got {c} and {eta}"
        )

    def divisor(nu: Array) -> Array:
        nu = nu.astype(wide_dtype(nu))
        nu_hat = nu / _bias(other.b2, jnp.maximum(k, 1), nu.dtype)
        return _bias(other.b1, k + 1, nu.dtype) * (jnp.sqrt(nu_hat) + other.eps)

    w = eta * (1 - c)
    divisors = {path: divisor(nu) for path, nu in run.nu.items()}
    return MomentumScale(eta, c, w, scale=w / c, divisors=divisors)


def _bias(decay: ArrayLike, k: Array, dtype: Any) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, dtype) ** k.astype(dtype)


def _read_spa(old: SPAState, run: Run) -> SPAState:
    """The state with the values of z, by path."""
    codec, stored = codec_of(old.z), by_path(tree_of(old.z))
    is_start = has_taken_no_step(old)
    z = {path: codec.z(x, stored[path], is_start) for path, x in run.y.items()}
    return old._replace(z=z)


def _write_spa(new: SPAState, momentum: SPAState, run: Run) -> SPAState:
    """The new state with the momentum, its z as the new state holds it."""
    codec, stored = codec_of(new.z), by_path(tree_of(new.z))
    for path in stored.keys() & momentum.z.keys():
        y, dtype = run.new_params[path], stored[path].dtype
        stored[path] = codec.store(momentum.z[path], y, dtype, seed=None)
        largest = codec.unit * float(jnp.finfo(dtype).max)
        d = codec.z_minus_y(y, stored[path], has_taken_no_step(momentum))
        if jnp.any(jnp.abs(d) >= largest):
            checks.warn(
                "`into` should hold z in bfloat16 or wider: z − params is clipped at "
                f"{path or 'its root'}"
            )
    scalars = with_leaves(new._replace(z=()), momentum._replace(z=()))
    return scalars._replace(z=with_leaves(new.z, list(stored.values())))


def _read_optax(old: Any, run: Run) -> SPAState:
    """z = x − scale · m / divisor."""
    is_sgdm = isinstance(old, optax.TraceState)
    eta, c, w, scale, divisors = (
        _scale_of_sgdm(run) if is_sgdm else _scale_of_adamw(run)
    )
    stored, z = by_path(_tree_of(old)), {}
    for path, x in run.y.items():
        m = stored[path].astype(x.dtype) / divisors.get(path, 1)
        z[path] = x - scale.astype(x.dtype) * m
    if run.count == 0:
        if any(jnp.any(m != 0) for m in stored.values()):
            raise ValueError(
                "`count` must be >= 1 where `old_state` holds momentum, got 0"
            )
        eta = c = w = jnp.zeros([])  # as `init` makes them
    return SPAState(count=run.count, z=z, eta=eta, c=c, w=w, mu_y=jnp.ones([]))


def _write_optax(new: Any, momentum: SPAState, run: Run) -> Any:
    """m = (x − z) / scale · divisor, or 0 if the scale is 0."""
    is_adamw = isinstance(new, optax.ScaleByAdamState)
    if is_adamw:
        *_, scale, divisors = _scale_of_adamw(run)
    else:  # the state's w need not be that of `spa_from_sgdm`
        scale, divisors = scalar_of(momentum.w), {}
    stored = by_path(_tree_of(new))
    inverse = jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))
    for path in stored.keys() & run.y.keys():
        x, z = run.y[path], momentum.z[path]
        dtype = wide_dtype(x, z)
        m = inverse.astype(dtype) * (x.astype(dtype) - z.astype(dtype))
        stored[path] = m * divisors.get(path, 1)
    m = with_leaves(_tree_of(new), list(stored.values()))
    if not is_adamw:
        return optax.TraceState(m)
    nu = [run.nu.get(path, leaf) for path, leaf in by_path(new.nu).items()]
    return new._replace(
        count=with_leaves(new.count, run.count), mu=m, nu=with_leaves(new.nu, nu)
    )


def _with_momentum(nodes: list[Any], old: Any, written: Any) -> list[Any]:
    """The old nodes with the momentum, and AdamW's ν, as the new state holds them."""
    nodes = [node for node in nodes if node is not old]
    if isinstance(old, optax.ScaleByAdamState):
        nodes.append(ScaleByRmsWithCountState(count=old.count, nu=old.nu))
    if isinstance(written, optax.ScaleByAdamState):
        nodes = [
            node for node in nodes if not isinstance(node, ScaleByRmsWithCountState)
        ]
    return [*nodes, written]


def _filled(into: PyTree, nodes: list[Any], k: Array) -> PyTree:
    """A state with the arrays of old nodes of the same types, and the count k."""
    remaining = list(filter(_is_copied, nodes))

    def fill(node: Any) -> Any:
        if _is_copied(node):
            return _take(remaining, node)
        field = _count_field(node)
        if field is None:
            return node
        return node._replace(**{field: with_leaves(getattr(node, field), k)})

    state = _map_nodes(fill, into)
    if remaining:
        raise ValueError(
            "`into` must hold all states of `old_state` beside the momentum, got none "
            f"for its {kinds_of(tuple(remaining))}. Build it from an optimizer "
            "with the same chain."
        )
    return state


def _is_copied(node: Any) -> bool:
    """Whether a node has arrays, and is neither a wrapper nor a schedule's count."""
    is_count = getattr(node, "_fields", ()) == ("count",)
    return bool(_shapes(node)) and not is_count and type(node) not in INNER_FIELDS


def _shapes(node: Any) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in by_path(node).items()}


def _take(nodes: list[Any], new: Any) -> Any:
    """A new node with the arrays of the first old one that fits, which is taken out."""
    shapes = _shapes(new)
    for i, node in enumerate(nodes):
        is_same_kind = type(node) is type(new) or not hasattr(new, "_fields")
        if is_same_kind and shapes.items() <= _shapes(node).items():
            leaves = by_path(nodes.pop(i))
            return with_leaves(new, [leaves[path] for path in shapes])
    raise ValueError(
        "`into` must hold only states of `old_state` beside the momentum, in the same "
        f"shapes, got a `{type(new).__name__}` with {shapes}. Build it from an "
        "optimizer with the same chain, masks and options."
    )
