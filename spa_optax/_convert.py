"""Moves a run in the middle: from one optimizer's state into another's.

A momentum is read as a point z and the scalars of a step, and written from them. All
other nodes of a state are copied, if the new state has them too, or count on from k.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, PyTree

from spa_optax import _checks as checks, _trees as trees
from spa_optax._codec import codec_of, tree_of
from spa_optax._core import SPAState, has_taken_no_step
from spa_optax._dtypes import has_narrow, wide_dtype
from spa_optax._hyperparams import at_count
from spa_optax._lookahead import eta_and_c, look_ahead, nonzero_w
from spa_optax._trees import by_path, is_trained, scalar_of
from spa_optax._wrappers import PrimalAveragingState, StochasticRoundingState
from spa_optax.diagnostics._track import TrackMomentumState

ByPath = dict[str, Array]  # an array for each parameter, by its path
# Optax does not export it. (To call `init` here would start JAX at import.)
ScaleByRmsState: Any = type(
    jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())
)


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


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """The fields of a state that hold other states, and the one that counts steps.

    Other fields, such as injected hyper-parameters and gauges, are those of `into`.
    """

    inner: tuple[str, ...] = ()
    count: str | None = None


WRAPPERS: dict[type, Wrapper] = {
    optax.MaskedState: Wrapper(("inner_state",)),
    optax.PartitionState: Wrapper(("inner_states",)),
    optax.InjectHyperparamsState: Wrapper(("inner_state",), "count"),
    optax.InjectStatefulHyperparamsState: Wrapper(
        ("hyperparams_states", "inner_state"), "count"
    ),
    optax.MultiStepsState: Wrapper(("inner_opt_state",), "gradient_step"),
    optax.ApplyIfFiniteState: Wrapper(("inner_state",)),
    PrimalAveragingState: Wrapper(("base", "average")),
    StochasticRoundingState: Wrapper(("base",), "count"),
    TrackMomentumState: Wrapper(("inner",)),
    optax.ScaleByScheduleState: Wrapper(count="count"),
}


class Conversion(NamedTuple):
    """What is known of a run, apart from its momentum."""

    count: Array  # k
    params: ByPath  # x_k
    x: ByPath  # those of them with momentum, in 32 bits or more
    new_params: ByPath  # those to go on with
    nu: ByPath  # Adam's ν as it is stored, if there is one
    other: SGDM | AdamW | None
    averaging: optax.ScalarOrSchedule | None


class Run(NamedTuple):
    """A momentum as primal averaging has it."""

    z: ByPath
    eta: Array
    c: Array
    w: Array
    mu_y: Array


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
    """The state with which another optimizer continues a run. Call it outside
    `jax.jit`.

    It goes between members of this package, and between one of them and

        optax.sgd      z = x − w m
        optax.adamw    z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)

    From `optax.sgd` w is that of `spa_from_sgdm`; to it, the state's. From AdamW to
    `spa_adamw`, the next step's momentum is AdamW's, except for the gradient's effect
    on ν. States of the same type and shapes go on, whatever they are: both runs must
    have the same kind of optimizer there, which is not checked. Counts go on, injected
    hyper-parameters and gauges are those of `into`, and all else is refused.

    Args:
      old_state: the run's state, in any chain, in Optax's and this package's wrappers,
        or of Flax nnx.
      params: the run's current params, or their float32 master copy: z is made from
        them.
      into: the new optimizer's state from `init`. It may train fewer params, with
        others frozen.
      other: the hyper-parameters of Optax's optimizer, old or new, as `SGDM` or
        `AdamW`. Needed from `optax.sgd`, and from and to AdamW, since other optimizers
        have states of the same type.
      averaging: c_{k+1} in (0, 1] of `spa_adamw`, from and to AdamW. None means 1 − b1.
      new_params: the params to go on with, if they are `params` in 16 bits. z keeps
        what is lost.
      count: k ≥ 0, the number of steps taken. Needed from `optax.sgd`, whose momentum
        has no count.

    Returns:
      `into` with the run. It shares no buffer with the arguments.

    Raises:
      ValueError: if an argument is missing, traced or out of range; if the states do
        not match; if counts differ, accumulated gradients would be lost, or only one
        run trains at y.

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
    _check_arguments((old_state, params, into), other, averaging)
    new_params = params if new_params is None else new_params
    trees.check_same_tree("new_params", new_params, "params", params, same_nodes=False)
    old_nodes, new_nodes = _nodes_of(old_state), _nodes_of(into)
    old = _momentum_of("old_state", old_nodes, params)
    new = _momentum_of("into", new_nodes, params)
    _check_pair(old, new, old_nodes, new_nodes)
    k = _steps_taken(old, count)
    if type(old) is type(new) and not isinstance(old, SPAState):
        written: dict[type, Any] = {}
    else:
        run = Conversion(
            count=k,
            params=by_path(params),
            x=_trained_in(old, by_path(params)),
            new_params=by_path(new_params),
            nu=_nu_of(old_nodes),
            other=other,
            averaging=averaging,
        )
        _warn_of_narrow_params(old, old_nodes, run)
        written = _written_nodes(old, new, run)
    copied = _copied_nodes(
        old_nodes, new_nodes, {type(old), *written} if written else {}
    )

    def move(node: Any) -> Any:
        if type(node) in written:
            return trees.with_leaves(node, written[type(node)])
        if copied.get(_kind_of(node)):
            leaves = by_path(copied[_kind_of(node)].pop(0))
            return trees.with_leaves(node, [leaves[path] for path in by_path(node)])
        field = _wrapper_of(node).count
        if field is None:
            return node
        return node._replace(**{field: trees.with_leaves(getattr(node, field), k)})

    return trees.copy(_map_nodes(move, into))


def _check_arguments(
    arrays: PyTree,
    other: SGDM | AdamW | None,
    averaging: optax.ScalarOrSchedule | None,
) -> None:
    """Raises ValueError where an argument is traced or out of its range."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        raise ValueError(
            "`old_state`, `params` and `into` must hold concrete arrays, got traced "
            "ones. Call `convert` outside `jax.jit`."
        )
    if isinstance(other, SGDM):
        checks.MOMENTUM.check(momentum=other.momentum)
        checks.FLAG.check(nesterov=other.nesterov)
    elif isinstance(other, AdamW):
        checks.B1.check(b1=other.b1)
        checks.B2.check(b2=other.b2)
        checks.EPS.check(eps=other.eps)
    elif other is not None:
        raise ValueError(f"`other` must be an `SGDM` or an `AdamW`, got {other!r}")
    if other is not None:
        checks.RATE.check(learning_rate=other.learning_rate)
    if averaging is not None:
        checks.check_averaging(averaging=averaging)


def _map_nodes(function: Callable[[Any], Any], state: PyTree) -> PyTree:
    """A state with a function of each node, inner states first.

    A wrapper is passed without the states inside it.
    """

    def map_node(node: Any) -> Any:
        fields = _wrapper_of(node).inner
        inner = {name: _map_nodes(function, getattr(node, name)) for name in fields}
        outer = node._replace(**dict.fromkeys(fields)) if fields else node
        return function(outer)._replace(**inner) if fields else function(outer)

    return jax.tree.map(map_node, state, is_leaf=lambda node: hasattr(node, "_fields"))


def _nodes_of(state: PyTree) -> list[Any]:
    """The nodes of a state, with None where they held other states."""
    nodes: list[Any] = []
    _map_nodes(lambda node: nodes.append(node) or node, state)
    return nodes


def _wrapper_of(node: Any) -> Wrapper:
    return WRAPPERS.get(type(node), Wrapper())


def _kind_of(node: Any) -> type:
    """The type of a node; one for all arrays, JAX's and NumPy's."""
    return type(node) if hasattr(node, "_fields") else jax.Array


def _momentum_of(name: str, nodes: list[Any], params: PyTree) -> Any:
    """The one node with a momentum that can be converted, or None."""
    for kind in MOMENTA:
        found = [node for node in nodes if type(node) is kind]
        if len(found) > 1:
            raise ValueError(
                f"`{name}` must hold one `{kind.__name__}`, got {len(found)}. Convert "
                "each part of the params by itself."
            )
        if found:
            checks.check_one_run(name, found[0]._asdict().get("count", ()))
            trees.check_paths(name, [_tree_of(found[0])], params)
            return found[0]
    return None


def _tree_of(momentum: Any) -> PyTree:
    """The tree of a momentum, with the structure of the params."""
    return tree_of(getattr(momentum, MOMENTA[type(momentum)].field))


def _trained_in(momentum: Any, params: ByPath) -> ByPath:
    """The params that a momentum trains, in 32 bits or more."""
    trained = {path: params[path] for path in by_path(_tree_of(momentum))}
    return {
        path: x.astype(wide_dtype(x)) for path, x in trained.items() if is_trained(x)
    }


def _nu_of(nodes: list[Any]) -> ByPath:
    """Adam's ν as it is stored, if there is one."""
    kinds = (optax.ScaleByAdamState, ScaleByRmsState)
    found = [by_path(node.nu) for node in nodes if isinstance(node, kinds)]
    return found[0] if len(found) == 1 else {}


def _check_pair(old: Any, new: Any, old_nodes: list[Any], new_nodes: list[Any]) -> None:
    """Raises ValueError unless one momentum, or none, can become the other."""
    if (old is None) != (new is None):
        raise ValueError(
            "`old_state` and `into` must hold the momentum of the family, of "
            "`optax.sgd` or of `optax.adamw`, in wrappers that `convert` knows, got "
            f"{trees.kinds_of(tuple(old_nodes))} and {trees.kinds_of(tuple(new_nodes))}"
        )
    if _has(PrimalAveragingState, old_nodes) != _has(PrimalAveragingState, new_nodes):
        raise ValueError(
            "`old_state` and `into` must both be of `primal_averaging`, or neither. To "
            "begin an average in mid-run use "
            "`tx.init(params)._replace(base=old_state)`."
        )
    kinds = {type(old), type(new)}
    if len(kinds) > 1 and SPAState not in kinds:
        raise ValueError(
            "`into` must hold the kind of momentum of `old_state`, or that of the "
            f"family, got a `{type(new).__name__}` for a `{type(old).__name__}`"
        )
    if old is not None:
        missing = by_path(_tree_of(new)).keys() - by_path(_tree_of(old)).keys()
        if missing:
            raise ValueError(
                "`into` must hold only params of `old_state`, got "
                f"{min(missing) or 'its root'}"
            )
    if kinds == {SPAState, optax.ScaleByAdamState}:
        nodes = old_nodes if isinstance(old, SPAState) else new_nodes
        if not _has(ScaleByRmsState, nodes):
            raise ValueError(
                "`old_state` and `into` must be of `optax.adamw` and of `spa_adamw` "
                'with `second_moment="full"`, got a momentum of the family with '
                f"{trees.kinds_of(tuple(nodes))}"
            )
    for node in old_nodes:
        mini_step = scalar_of(getattr(node, "mini_step", 0))
        if mini_step > 0:
            raise ValueError(
                "`old_state` must not hold accumulated gradients, which would be lost, "
                f"got those of {mini_step} batches. Convert after a step."
            )


def _has(kind: type, nodes: list[Any]) -> bool:
    return any(isinstance(node, kind) for node in nodes)


def _steps_taken(old: Any, count: int | None) -> Array:
    """The count k, that of the momentum or, if it has none, as given."""
    checks.NOT_NEGATIVE_INTEGER.optional().check(count=count)
    own = (
        getattr(old, "count", None)
        if hasattr(old, "_asdict") and "count" in old._fields
        else None
    )
    if own is None:
        if count is None:
            raise ValueError(
                "`count` must be given where the momentum of `old_state` has none, got "
                "None"
            )
        return jnp.asarray(count, jnp.int32)
    k = scalar_of(own)
    if count is not None and count != k:
        raise ValueError(f"`count` must be that of `old_state`, {k}, got {count}")
    return k


def _copied_nodes(
    old_nodes: list[Any], new_nodes: list[Any], converted: Any
) -> dict[type, list[Any]]:
    """By their kind, the old nodes that go on as they are.

    Raises ValueError where one has no counterpart, unless its kind is converted.
    """
    copied: dict[type, list[Any]] = {}
    for kind in dict.fromkeys(map(_kind_of, [*old_nodes, *new_nodes])):
        olds = [node for node in old_nodes if _kind_of(node) is kind]
        news = [node for node in new_nodes if _kind_of(node) is kind]
        if kind in WRAPPERS or kind in converted:
            continue
        if not any(map(trees.is_array, jax.tree.leaves([olds, news]))):
            continue
        if not _have_same_shapes(olds, news):
            raise ValueError(
                "`into` must have the states of `old_state` beside the momentum, in "
                f"the same shapes, got {len(news)} `{kind.__name__}` for {len(olds)}. "
                "Convert into an optimizer that has them too."
            )
        copied[kind] = olds
    return copied


def _have_same_shapes(olds: list[Any], news: list[Any]) -> bool:
    if jax.tree.structure(olds) != jax.tree.structure(news):
        return False
    pairs = zip(jax.tree.leaves(olds), jax.tree.leaves(news), strict=True)
    return all(np.shape(old) == np.shape(new) for old, new in pairs)


def _warn_of_narrow_params(old: Any, old_nodes: list[Any], run: Conversion) -> None:
    """Warns if z would be made from params of fewer bits than the run seems to have."""
    if isinstance(old, SPAState) or _has(StochasticRoundingState, old_nodes):
        return
    moments = getattr(old, "nu", _tree_of(old))
    narrow = [run.params[path] for path in run.x]
    if has_narrow(narrow) and not has_narrow(moments):
        warnings.warn(
            "`params` should be the float32 master copy of the run, if it has one: its "
            "moments are in float32, and z is made from `params`. Pass the cast ones "
            "as `new_params`.",
            stacklevel=3,
        )


def _written_nodes(old: Any, new: Any, run: Conversion) -> dict[type, Any]:
    """The new node of the momentum, and with AdamW that of its second moment."""
    momentum = MOMENTA[type(old)].read(old, run)
    if SPAState in (type(old), type(new)) and type(old) is not type(new):
        mu_y = scalar_of((old if isinstance(old, SPAState) else new).mu_y)
        if mu_y != 1:
            raise ValueError(
                "`interpolation` must be 1 from and to `optax.sgd` and `optax.adamw`, "
                f"got {mu_y:g}"
            )
    written = {type(new): MOMENTA[type(new)].write(new, momentum, run)}
    if isinstance(old, optax.ScaleByAdamState):
        nu = [run.nu[path] for path in by_path(_tree_of(new))]
        written[ScaleByRmsState] = ScaleByRmsState(count=run.count, nu=nu)
    elif isinstance(new, optax.ScaleByAdamState):
        written[ScaleByRmsState] = None  # its ν is AdamW's now
    return written


def _read_spa(old: SPAState, run: Conversion) -> Run:
    codec, is_start = codec_of(old.z), has_taken_no_step(old)
    stored = by_path(tree_of(old.z))
    z = {path: codec.value(run.params[path], stored[path]) for path in run.x}
    if is_start and not codec.follows_params:
        z = run.x
    eta, c, w, mu_y = map(scalar_of, (old.eta, old.c, old.w, old.mu_y))
    return Run(z, eta, c, w, mu_y)


def _write_spa(new: SPAState, momentum: Run, run: Conversion) -> SPAState:
    codec, leaves = codec_of(new.z), by_path(tree_of(new.z))
    for path in leaves.keys() & momentum.z.keys():
        y, dtype = run.new_params[path], leaves[path].dtype
        leaves[path] = codec.encode(momentum.z[path], y, dtype, seed=None)
        largest = float(jnp.finfo(dtype).max)
        if jnp.any(abs(codec.difference(y, leaves[path])) >= codec.unit * largest):
            warnings.warn(
                "`into` should hold z in bfloat16 or wider: z − params is clipped at "
                f"{path or 'its root'}",
                stacklevel=4,
            )
    eta, c, w, mu_y = momentum[1:]
    return SPAState(run.count, list(leaves.values()), eta, c, w, mu_y)


def _read_sgdm(old: optax.TraceState, run: Conversion) -> Run:
    """z = x − w m, with the scalars of step k − 1."""
    if not isinstance(run.other, SGDM):
        raise ValueError(
            "`other` must be `SGDM(learning_rate, momentum)`, those of `old_state`, "
            f"got {run.other!r}"
        )
    alpha, beta, nesterov = run.other
    last = jnp.maximum(run.count - 1, 0)
    ahead = look_ahead(alpha, beta, last, nesterov=nesterov)
    w = nonzero_w(ahead.w, ahead.a, w_k=jnp.zeros_like(ahead.a))
    eta, c = eta_and_c(ahead, w, nesterov=nesterov)
    m = by_path(old.trace)
    z = {
        path: x - w.astype(x.dtype) * m[path].astype(x.dtype)
        for path, x in run.x.items()
    }
    return _from_start(Run(z, eta, c, w, mu_y=jnp.ones([])), run.count)


def _write_sgdm(
    new: optax.TraceState, momentum: Run, run: Conversion
) -> optax.TraceState:
    m = _momentum_over(momentum.w, momentum, run)
    return new._replace(
        trace=[m.get(path, leaf) for path, leaf in by_path(new.trace).items()]
    )


def _read_adamw(old: Any, run: Conversion) -> Run:
    """z = x − (w/c) d, with d the direction m̂ / (√ν̂ + ε) and scalars of the next
    step.
    """
    eta, c, w = _scalars_of_adamw(run)
    mu = by_path(old.mu)
    z = {}
    for path, x in run.x.items():
        d = mu[path].astype(x.dtype) / _divisor(run, path)
        z[path] = x - (w / c).astype(x.dtype) * d
    return _from_start(Run(z, eta, c, w, mu_y=jnp.ones([])), run.count)


def _write_adamw(new: Any, momentum: Run, run: Conversion) -> Any:
    _, c, w = _scalars_of_adamw(run)
    d = _momentum_over(w / c, momentum, run)
    mu = by_path(new.mu) | {path: d[path] * _divisor(run, path) for path in d}
    mu = [mu[path] for path in by_path(new.mu)]
    nu = [run.nu.get(path, leaf) for path, leaf in by_path(new.nu).items()]
    return new._replace(count=run.count, mu=mu, nu=nu)


def _from_start(momentum: Run, k: Array) -> Run:
    """The momentum, with the scalars of a new state if no step was taken."""
    eta, c, w = [jnp.where(k == 0, 0, scalar) for scalar in momentum[1:4]]
    return momentum._replace(eta=eta, c=c, w=w)


def _momentum_over(scale: Array, momentum: Run, run: Conversion) -> ByPath:
    """The m of x − z = scale · m, or 0 if the scale is 0 or no step was taken."""
    scale = jnp.where(run.count > 0, scale, 0)
    divisor = jnp.where(scale == 0, jnp.inf, scale)
    m = {}
    for path, x in run.x.items():
        dtype = wide_dtype(x, momentum.z[path])
        difference = x.astype(dtype) - momentum.z[path].astype(dtype)
        m[path] = difference / divisor.astype(dtype)
    return m


def _scalars_of_adamw(run: Conversion) -> tuple[Array, Array, Array]:
    """η, c and w of the next step of `spa_adamw`."""
    other = run.other
    if not isinstance(other, AdamW):
        raise ValueError(
            "`other` must be `AdamW(learning_rate, b1, b2, eps)`, if the "
            "`ScaleByAdamState` is that of `optax.adamw` or `optax.adam`, got "
            f"{other!r}"
        )
    averaging = 1 - other.b1 if run.averaging is None else run.averaging
    eta = at_count("learning_rate", other.learning_rate)(run.count)
    c = at_count("averaging", averaging)(run.count)
    if c <= 0 or (eta <= 0 and run.count > 0):
        raise ValueError(
            "`averaging` and `learning_rate` must be > 0 for z to hold m at a finite "
            f"distance, got {c} and {eta}"
        )
    return eta, c, eta * (1 - c)


def _divisor(run: Conversion, path: str) -> Array:
    """By what AdamW divides m: its bias for the next step, times √ν̂ + ε."""
    b1, b2, eps = run.other[1:]
    k, nu = run.count, run.nu[path]
    nu = nu.astype(wide_dtype(nu))
    nu_hat = nu / _bias(b2, jnp.maximum(k, 1), nu)
    return _bias(b1, k + 1, nu) * (jnp.sqrt(nu_hat) + eps)


def _bias(decay: ArrayLike, k: Array, moment: Array) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, moment.dtype) ** k.astype(moment.dtype)


class Momentum(NamedTuple):
    """How a state with momentum is read and written."""

    field: str  # with a leaf for each parameter
    read: Callable[[Any, Conversion], Run]
    write: Callable[[Any, Run, Conversion], Any]


# In this order: the base of `primal_averaging` may be AdamW.
MOMENTA: dict[type, Momentum] = {
    SPAState: Momentum("z", _read_spa, _write_spa),
    optax.ScaleByAdamState: Momentum("mu", _read_adamw, _write_adamw),
    optax.TraceState: Momentum("trace", _read_sgdm, _write_sgdm),
}
