"""Moves a run in the middle: from one optimizer's state into another's.

A state holds those of many transforms, of Optax and of this package. `convert` finds
the one with the momentum in both runs, reads it in the old run and writes it in the new
one. Between the two there are the last `Step` and z, by path. Counters count on from k.
All other states are copied by type and shape.
"""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, PyTree

from . import _arguments
from ._checks import (
    check_paths,
    check_same_tree,
    check_state_type,
    check_wide_scalars,
)
from ._codec import codec_of, stored_tree
from ._convert_states import (
    CONVERTED_FIELDS,
    ScaleByRmsWithCountState,
    check_one_run,
    check_wrappers,
    copy_into,
    filter_states,
    list_states,
    names_of_states,
    steps_taken,
)
from ._schedules import AdamWHyperparams, SGDMHyperparams
from ._sgdm import ensure_positive_w, eta_and_c, evaluate_sgdm
from ._state import SPAState, is_initial, mu_y_of
from ._trees import (
    Count,
    Scalar,
    arrays_by_path,
    as_scalar,
    compute_dtype,
    copy_arrays,
    field_of,
    is_inexact,
    place,
    replace_leaves,
)
from ._wrappers import PrimalAveragingState

ArraysByPath = dict[str, Array]  # an array for each parameter, by its path
REQUIREMENTS = {  # of each field of `hyperparams`
    "learning_rate": _arguments.NOT_NEGATIVE,
    "momentum": _arguments.FRACTION_BELOW_1,
    "nesterov": _arguments.BOOLEAN,
    "b1": _arguments.FRACTION_BELOW_1.with_type(_arguments.SCALAR),
    "b2": _arguments.B2,
    "eps": _arguments.NOT_NEGATIVE.with_type(_arguments.SCALAR),
}


class Step(NamedTuple):
    """The last step, as an `SPAState` records it."""

    count: Count  # k, the number of steps taken
    eta: Scalar  # η_{k−1}
    c: Scalar  # c_k
    w: Scalar  # w_k: x − z = w m
    mu_y: Scalar  # μ_y, of y_k


class Run(NamedTuple):
    """What reading the old momentum and writing the new one need beside it."""

    count: Count  # k
    y: ArraysByPath  # the params with momentum, in 32 bits or more
    new_params: ArraysByPath  # those to go on with
    nu: ArraysByPath  # Adam's ν as it is stored, if the run goes from or to AdamW
    hyperparams: SGDMHyperparams | AdamWHyperparams | None  # the argument of `convert`
    averaging: optax.ScalarOrSchedule | None


def convert(
    old_state: PyTree,
    params: PyTree,
    *,
    into: PyTree,
    hyperparams: SGDMHyperparams | AdamWHyperparams | None = None,
    averaging: optax.ScalarOrSchedule | None = None,
    new_params: PyTree | None = None,
    count: int | None = None,
) -> PyTree:
    """The state with which another optimizer continues a run.

    The new optimizer may be

    - the old one, with another `state_dtype`, or with params in another dtype;
    - `spa_from_sgdm` or `spa` from `optax.sgd`, and back: z = x − w m;
    - `spa_adamw` with a full ν from `optax.adamw`, and back:
      z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε).

    From `optax.sgd` w is computed as in `spa_from_sgdm`. To `optax.sgd` w is the one in
    the `SPAState`. From AdamW to `spa_adamw`, the next step's momentum is AdamW's if
    `averaging` is 1 − b1, except for the gradient's effect on ν.

    Other states of the same type and shapes are copied: whether both runs have the same
    kind of optimizer there is not checked. Arrays outside of named tuples need the same
    keys and fields. Step counts go on from k. Injected hyper-parameters, gauges and the
    counts of `optax.apply_if_finite` are those of `into`. A state that has no
    counterpart is refused. Call it outside `jax.jit`.

    Args:
      old_state: the run's state, in any chain, in wrappers of Optax and of this
        package but `guard_params`, or of Flax nnx.
      params: the run's current params, or their float32 master copy: z is made from
        them.
      into: the new optimizer's state from `init`. It may train fewer params, with
        others frozen.
      hyperparams: those of Optax's optimizer: `SGDMHyperparams` from `optax.sgd`, and
        `AdamWHyperparams` from and to `optax.adamw`, whose `eps_root` must be 0. It
        also says that a state of Adam's type is AdamW's. Others have such states, too,
        such as NAdam (`nesterov=True`), and would be converted wrongly. In other
        conversions only checked.
      averaging: c_{k+1} in (0, 1] of `spa_adamw`, a scalar or a schedule of the count
        k, from and to AdamW. None means 1 − b1. Ignored in other conversions.
      new_params: the params to go on with, if they are `params` in another dtype. z
        keeps what is lost, but for a float64 z before the first step.
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
      >>> from spa_optax import SGDMHyperparams, convert, spa_from_sgdm
      >>> sgd, tx = optax.sgd(1.0, momentum=0.5), spa_from_sgdm(1.0, momentum=0.5)
      >>> x = jnp.array(10.0)
      >>> updates, state = sgd.update(jnp.array(2.0), sgd.init(x), x)
      >>> x = optax.apply_updates(x, updates)
      >>> other = SGDMHyperparams(1.0, 0.5)
      >>> new = convert(state, x, into=tx.init(x), hyperparams=other, count=1)
      >>> print(new.z, optax.tree.get(convert(new, x, into=sgd.init(x)), "trace"))
      6.0 2.0

      From a float32 checkpoint to bfloat16 params, whose cast cuts off 0.001:

      >>> import jax
      >>> tx = spa_from_sgdm(
      ...     1.0, state_dtype=jnp.bfloat16, rounding_key=jax.random.key(0)
      ... )
      >>> x = jnp.array(1.001)
      >>> y = x.astype(jnp.bfloat16)
      >>> state = convert(tx.init(x), x, into=tx.init(y), new_params=y)
      >>> print(y, f"{state.z.z_minus_params:.4f}")
      1 0.0010

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and its
      proof.
    """
    new_params = params if new_params is None else new_params
    _check_arguments(hyperparams, averaging, old_state, params, into, new_params, count)
    check_same_tree("new_params", new_params, "params", params, same_nodes=False)
    old_states, new_states = list_states(old_state), list_states(into)
    pair = _find_pair(old_states, new_states, params)
    k = steps_taken(old_states, count)
    if pair is not None:
        old, new = pair
        optax_states = new_states if isinstance(old, SPAState) else old_states
        _check_injected(optax_states, hyperparams)
        y = _inexact_params(old, arrays_by_path(params))
        run = Run(
            count=k,
            y=y,
            new_params=arrays_by_path(new_params),
            nu=_find_nu(old, new, old_states, new_states, y.keys()),
            hyperparams=hyperparams,
            averaging=averaging,
        )
        read = _read_spa if isinstance(old, SPAState) else _read_optax
        step, z = read(old, run)
        written = WRITERS[type(new)](new, step, z, run)
        # `copy_into` finds states by type. So the written one joins the old states, in
        # place of the momentum that it was made of.
        old_states = _replace_momentum(old_states, old, written)
    check_wrappers(old_states + new_states)
    return copy_arrays(copy_into(into, old_states, k))


def _check_arguments(
    hyperparams: object, averaging: optax.ScalarOrSchedule | None, *others: PyTree
) -> None:
    """Raises ValueError where an argument is traced or out of its range."""
    for leaf in jax.tree.leaves((hyperparams, averaging, others)):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise ValueError(
                "`old_state`, `params`, `into` and all other arguments must hold "
                f"arrays, got a `{type(leaf).__name__}`. Call `convert` outside "
                "`jax.jit`, `jax.vmap` and `jax.eval_shape`."
            )
    if averaging is not None:
        _arguments.check_averaging(averaging)
    if hyperparams is None:
        return
    if not isinstance(hyperparams, (SGDMHyperparams, AdamWHyperparams)):
        raise ValueError(
            "`hyperparams` must be `SGDMHyperparams(learning_rate, momentum)` or "
            f"`AdamWHyperparams(learning_rate)`, got {hyperparams!r}"
        )
    for name, value in hyperparams._asdict().items():
        REQUIREMENTS[name].check(**{name: value})


def _check_injected(
    states: list[Any], hyperparams: SGDMHyperparams | AdamWHyperparams | None
) -> None:
    """Raises ValueError if a state injects other numbers than `hyperparams` has."""
    given = {} if hyperparams is None else hyperparams._asdict()
    injecting = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
    for state in filter_states(states, injecting):
        for name in given.keys() & state.hyperparams.keys():
            value, injected = given[name], state.hyperparams[name]
            if callable(value) or jnp.shape(injected):
                continue
            # The state has rounded it to a dtype of its own.
            value = jnp.asarray(value).astype(jnp.result_type(injected))
            ulp = float(jnp.finfo(value.dtype).eps) if is_inexact(value) else 0.0
            if not jnp.allclose(value, injected, rtol=ulp, atol=0):
                raise ValueError(
                    f"`hyperparams` must have the {name} that the state injects, "
                    f"{injected:g}, got {value}"
                )


def _find_pair(
    old_states: list[Any], new_states: list[Any], params: PyTree
) -> tuple[Any, Any] | None:
    """The states with the momentum, or None if neither is of the family.

    Raises ValueError unless the first can become the second.
    """
    if not filter_states(old_states + new_states, SPAState):
        return None
    averaging_states = filter_states(old_states, PrimalAveragingState)
    if len(averaging_states) != len(filter_states(new_states, PrimalAveragingState)):
        raise ValueError(
            "`old_state` and `into` must both be of `primal_averaging`, or neither. To "
            "begin an average in mid-run use "
            "`tx.init(params)._replace(base_state=old_state)`, and set the `count` of "
            "its `spa_state`. To end it go on with `eval_params(old_state, params)` "
            "and `old_state.base_state`."
        )
    old = _find_state("old_state", old_states, new_states, params)
    new = _find_state("into", new_states, old_states, params)
    missing = (
        arrays_by_path(_converted_tree(new)).keys()
        - arrays_by_path(_converted_tree(old)).keys()
    )
    if missing:
        raise ValueError(
            "`into` must train only what `old_state` trains, got "
            f"{place(min(missing))}. Freeze it with `optax.partition`."
        )
    if not isinstance(new, SPAState) and mu_y_of(old) != 1:
        raise ValueError(
            "`old_state` must have an interpolation of 1 to go on in `optax.sgd` or "
            f"`optax.adamw`, got {mu_y_of(old):g}"
        )
    return old, new


def _find_state(
    name: str, states: list[Any], other_states: list[Any], params: PyTree
) -> Any:
    """The state to translate, of the first type of `CONVERTED_FIELDS` that there is.

    A type of Optax's that both states hold equally often is skipped. It belongs to a
    part that both share, so it is copied.
    """
    for state_type in CONVERTED_FIELDS:
        found = filter_states(states, state_type)
        num_others = len(filter_states(other_states, state_type))
        is_shared = state_type is not SPAState and len(found) == num_others
        if found and not is_shared:
            if len(found) > 1:
                raise ValueError(
                    f"`{name}` must hold one `{state_type.__name__}`, got "
                    f"{len(found)}. Convert each group of `optax.partition` by itself: "
                    "`state.inner_states[label]`"
                )
            _check_found(name, found[0], params)
            return found[0]
    raise ValueError(
        f"`{name}` must hold the momentum of this package, of `optax.sgd` or of "
        f"`optax.adamw`, in wrappers that `convert` knows, got "
        f"{names_of_states(states)}"
    )


def _check_found(name: str, state: Any, params: PyTree) -> None:
    """Raises ValueError unless a state is whole, of one run, and of the params."""
    check_state_type(name, state, type(state))
    if isinstance(state, SPAState):
        check_wide_scalars(name, state)
    check_one_run(name, field_of(state, "count", default=()))
    check_paths(name, [_converted_tree(state)], params)


def _find_nu(
    old: Any,
    new: Any,
    old_states: list[Any],
    new_states: list[Any],
    paths: Set[str],
) -> ArraysByPath:
    """Adam's ν as it is stored, if the run goes from or to AdamW.

    Raises ValueError if a parameter of `paths` that keeps its momentum has none.
    """
    if optax.ScaleByAdamState not in (type(old), type(new)):
        return {}
    spa_states = old_states if isinstance(old, SPAState) else new_states
    found = filter_states(spa_states, ScaleByRmsWithCountState)
    if len(found) != 1:
        raise ValueError(
            "`old_state` and `into` must be of `optax.adamw` and "
            '`spa_adamw(second_moment="full")`, got one with '
            f"{names_of_states(spa_states)}"
        )
    nu = arrays_by_path(found[0].nu if isinstance(old, SPAState) else old.nu)
    kept = paths & arrays_by_path(_converted_tree(new)).keys()
    if missing := kept - nu.keys():
        raise ValueError(
            "`old_state` must hold a second moment of every parameter with a momentum, "
            f"got none of {place(min(missing))}"
        )
    return nu


def _replace_momentum(states: list[Any], old: Any, written: Any) -> list[Any]:
    """The old states with the momentum, and AdamW's ν, as the new state holds them."""
    states = [state for state in states if state is not old]
    # AdamW keeps ν beside its momentum, and `spa_adamw` in a state of its own.
    if isinstance(old, optax.ScaleByAdamState):
        states.append(ScaleByRmsWithCountState(count=old.count, nu=old.nu))
    if isinstance(written, optax.ScaleByAdamState):
        states = [
            state for state in states if not isinstance(state, ScaleByRmsWithCountState)
        ]
    return [*states, written]


def _converted_tree(state: Any) -> PyTree:
    """Optax's momentum, by parameter, or what an `SPAState` stores of z."""
    tree = getattr(state, CONVERTED_FIELDS[type(state)])
    return stored_tree(tree) if isinstance(state, SPAState) else tree


def _inexact_params(state: Any, params: ArraysByPath) -> ArraysByPath:
    """The params that have a momentum in a state, in 32 bits or more."""
    found = {path: params[path] for path in arrays_by_path(_converted_tree(state))}
    return {
        path: y.astype(compute_dtype(y)) for path, y in found.items() if is_inexact(y)
    }


def _step_of_sgdm(run: Run) -> tuple[Step, ArraysByPath]:
    """Step k − 1 as that of SPA, and the scales s in x − z = s m: w for all."""
    if not isinstance(run.hyperparams, SGDMHyperparams):
        raise ValueError(
            "`hyperparams` must be `SGDMHyperparams(learning_rate, momentum, "
            f"nesterov)`, those of `optax.sgd`, got {run.hyperparams!r}"
        )
    alpha, beta, nesterov = run.hyperparams
    last = jnp.maximum(run.count - 1, 0)
    sgdm = evaluate_sgdm(alpha, beta, last, nesterov=nesterov)
    w = ensure_positive_w(sgdm.next_resting_w, sgdm.a, w=jnp.zeros_like(sgdm.a))
    eta, c = eta_and_c(sgdm, w)
    return Step(run.count, eta, c, w, mu_y=jnp.ones([])), dict.fromkeys(run.y, w)


def _step_of_adamw(run: Run) -> tuple[Step, ArraysByPath]:
    """Step k as that of `spa_adamw`, and the scales s in x − z = s m.

        s = w / (c (1 − β₁^(k+1)) (√ν̂ + ε))

    Unlike those of SGD they are of step k, so that the next step has AdamW's momentum:
    without a gradient step k of AdamW moves x by −η β₁ m / (1 − β₁^(k+1)) / (√ν̂ + ε),
    and that of `spa_adamw` by −c (x − z). With c = 1 − β₁ and w = η (1 − c) both are
    the same. ν is that of step k − 1, and so is its bias.
    """
    k, adamw = run.count, run.hyperparams
    if not isinstance(adamw, AdamWHyperparams):
        raise ValueError(
            "`hyperparams` must be `AdamWHyperparams(learning_rate, b1, b2, eps)`, if "
            "the `ScaleByAdamState` is that of `optax.adamw` or `optax.adam`, got "
            f"{adamw!r}"
        )
    averaging: Any = 1 - adamw.b1 if run.averaging is None else run.averaging
    eta = _arguments.as_schedule("learning_rate", adamw.learning_rate)(k)
    c = _arguments.as_schedule("averaging", averaging)(k)
    if c <= 0 or (eta <= 0 and k > 0):
        raise ValueError(
            "`averaging` and `learning_rate` must be > 0 for z to hold m at a finite "
            f"distance, got {c} and {eta}"
        )

    w = eta * (1 - c)  # as in `fill_next_w`

    def scale(nu):
        nu = nu.astype(compute_dtype(nu))
        nu_hat = nu / _bias_correction(adamw.b2, jnp.maximum(k, 1), nu.dtype)
        bias = _bias_correction(adamw.b1, k + 1, nu.dtype)
        return (w / c).astype(nu.dtype) / (bias * (jnp.sqrt(nu_hat) + adamw.eps))

    scales = {path: scale(run.nu[path]) for path in run.y if path in run.nu}
    return Step(run.count, eta, c, w, mu_y=jnp.ones([])), scales


def _bias_correction(decay: ArrayLike, k: Array, dtype: Any) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, dtype) ** k.astype(dtype)


def _read_spa(old: SPAState, run: Run) -> tuple[Step, ArraysByPath]:
    """The last step, and z itself."""
    codec, state_is_initial = codec_of(old.z), is_initial(old)
    stored_by_path = arrays_by_path(stored_tree(old.z))
    z = {
        path: codec.decode_z(y, stored_by_path[path], state_is_initial)
        for path, y in run.y.items()
    }
    return Step(old.count, old.eta, old.c, old.w, old.mu_y), z


def _write_spa(new: SPAState, step: Step, z: ArraysByPath, run: Run) -> SPAState:
    """The new state: z, encoded beside the new params, and the last step."""
    codec, stored_by_path = codec_of(new.z), arrays_by_path(stored_tree(new.z))
    for path in stored_by_path.keys() & z.keys():
        y, dtype = run.new_params[path], stored_by_path[path].dtype
        stored_by_path[path] = codec.encode(y, z[path], dtype, seed=None)
        limit = float(jnp.finfo(dtype).max)
        is_at_limit = jnp.abs(stored_by_path[path].astype(compute_dtype(y))) >= limit
        if codec.stores_difference and jnp.any(is_at_limit):
            _arguments.warn(
                "`into` should hold z in bfloat16 or wider: z − params is clipped at "
                f"{place(path)}"
            )
    stored = list(stored_by_path.values())
    return replace_leaves(new, SPAState(z=stored, **step._asdict()))


def _read_optax(old: Any, run: Run) -> tuple[Step, ArraysByPath]:
    """The last step, and z = x − s m. In Optax the params are x."""
    if isinstance(old, optax.TraceState):
        step, scales = _step_of_sgdm(run)
    else:
        step, scales = _step_of_adamw(run)
    m, z = arrays_by_path(_converted_tree(old)), {}
    for path, x in run.y.items():
        z[path] = x - scales[path].astype(x.dtype) * m[path].astype(x.dtype)
    if run.count == 0:
        if any(jnp.any(leaf != 0) for leaf in m.values()):
            raise ValueError(
                "`count` must be >= 1 where `old_state` holds momentum, got 0"
            )
        zero = jnp.zeros([])
        step = Step(run.count, eta=zero, c=zero, w=zero, mu_y=step.mu_y)  # as of `init`
    return step, z


def _write_trace(
    new: optax.TraceState, step: Step, z: ArraysByPath, run: Run
) -> optax.TraceState:
    """The momentum of SGD: m = (x − z) / w."""
    scales = dict.fromkeys(run.y, as_scalar(step.w))
    return optax.TraceState(_momentum_like(new.trace, z, scales, run))


def _write_adam(
    new: optax.ScaleByAdamState, _: Step, z: ArraysByPath, run: Run
) -> optax.ScaleByAdamState:
    """The moments of AdamW. Its hyper-parameters fix w: that of the run is not read."""
    _, scales = _step_of_adamw(run)
    nu = [run.nu.get(path, leaf) for path, leaf in arrays_by_path(new.nu).items()]
    return new._replace(
        count=replace_leaves(new.count, run.count),
        mu=_momentum_like(new.mu, z, scales, run),
        nu=replace_leaves(new.nu, nu),
    )


def _momentum_like(
    tree: PyTree, z: ArraysByPath, scales: ArraysByPath, run: Run
) -> PyTree:
    """m = (x − z) / s, or 0 if s is 0, in place of the momentum of a tree."""
    m = arrays_by_path(tree)
    for path in m.keys() & run.y.keys():
        x, s = run.y[path], scales[path]  # in Optax the params are x
        dtype = compute_dtype(x, z[path])
        x_minus_z = x.astype(dtype) - z[path].astype(dtype)
        divisor = jnp.where(s == 0, 1, s).astype(dtype)
        m[path] = jnp.where(s == 0, 0, x_minus_z / divisor)
    return replace_leaves(tree, list(m.values()))


WRITERS: dict[type, Callable[..., Any]] = {
    SPAState: _write_spa,
    optax.TraceState: _write_trace,
    optax.ScaleByAdamState: _write_adam,
}
