"""Moves a run in the middle: from one optimizer's state into another's.

`convert` finds the node with the momentum in both states, reads it from the old one and
writes it into the new one. Counters count on from k. All other nodes are copied by type
and shape.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from . import _checks
from ._convert_momentum import (
    Run,
    inexact_params,
    momentum_tree,
    read_optax,
    read_spa,
    write_optax,
    write_spa,
)
from ._convert_nodes import (
    carried_into,
    known_nodes,
    of_type,
    steps_taken,
)
from ._dtypes import has_narrow_leaves
from ._hyperparams import SGDM, AdamW
from ._optax_states import CONVERTED_FIELDS, ScaleByRmsWithCountState
from ._state import SPAState
from ._trees import (
    by_path,
    check_not_batched,
    check_paths,
    check_same_tree,
    copy_arrays,
    is_inexact,
    kinds_of,
    scalar_of,
)
from ._types import ByPath
from ._wrappers import PrimalAveragingState, StochasticRoundingState

REQUIREMENTS = {
    "learning_rate": _checks.RATE,
    "momentum": _checks.MOMENTUM,
    "nesterov": _checks.FLAG,
    "b1": _checks.B1,
    "b2": _checks.B2,
    "eps": _checks.EPS,
}


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
    nodes, new_nodes = known_nodes(old_state), known_nodes(into)
    pair = _pair_of(nodes, new_nodes, params)
    k = steps_taken(nodes, count)
    if pair is not None:
        old, new = pair
        of_optax = new_nodes if isinstance(old, SPAState) else nodes
        _check_injected(of_optax, other)
        _warn_of_narrow_params(old, nodes, params)
        run = Run(
            count=k,
            y=inexact_params(old, by_path(params)),
            new_params=by_path(new_params),
            nu=_nu_of(old, new, nodes, new_nodes),
            other=other,
            averaging=averaging,
        )
        read = read_spa if isinstance(old, SPAState) else read_optax
        write = write_spa if isinstance(new, SPAState) else write_optax
        written = write(new, read(old, run), run)
        nodes = _with_momentum(nodes, old, written)
    return copy_arrays(carried_into(into, nodes, k))


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
        _checks.check_averaging(averaging)
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
    given = {} if other is None else other._asdict()
    injecting = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
    for node in of_type(nodes, injecting):
        for name in given.keys() & node.hyperparams.keys():
            value, injected = given[name], node.hyperparams[name]
            if callable(value) or jnp.shape(injected):
                continue
            # The state has rounded it to a dtype of its own.
            rounded = jnp.asarray(value).astype(jnp.result_type(injected))
            ulp = float(jnp.finfo(rounded.dtype).eps) if is_inexact(rounded) else 0.0
            if not jnp.allclose(rounded, injected, rtol=ulp, atol=0):
                raise ValueError(
                    f"`other` must have the {name} that the state injects, "
                    f"{injected:g}, got {value}"
                )


def _pair_of(
    nodes: list[Any], new_nodes: list[Any], params: PyTree
) -> tuple[Any, Any] | None:
    """The old and the new node of a momentum, or None if neither is of the family.

    Raises ValueError unless the first can become the second.
    """
    if not of_type(nodes + new_nodes, SPAState):
        return None
    averages = of_type(nodes, PrimalAveragingState)
    if len(averages) != len(of_type(new_nodes, PrimalAveragingState)):
        raise ValueError(
            "`old_state` and `into` must both be of `primal_averaging`, or neither. To "
            "begin an average in mid-run use "
            "`tx.init(params)._replace(base=old_state)`. To end it go on with "
            "`eval_params(old_state, params)` and `old_state.base`."
        )
    old = _momentum_of("old_state", nodes, new_nodes, params)
    new = _momentum_of("into", new_nodes, nodes, params)
    missing = by_path(momentum_tree(new)).keys() - by_path(momentum_tree(old)).keys()
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
    for kind in CONVERTED_FIELDS:
        found = of_type(nodes, kind)
        if kind is not SPAState and len(found) == len(of_type(other_nodes, kind)):
            continue
        if len(found) > 1:
            raise ValueError(
                f"`{name}` must hold one `{kind.__name__}`, got {len(found)}. Convert "
                "each group of `optax.partition` by itself: `state.inner_states[label]`"
            )
        if found:
            check_not_batched(name, found[0]._asdict().get("count", ()))
            check_paths(name, [momentum_tree(found[0])], params)
            return found[0]
    raise ValueError(
        f"`{name}` must hold the momentum of this package, of `optax.sgd` or of "
        f"`optax.adamw`, in wrappers that `convert` knows, got "
        f"{kinds_of(tuple(nodes))}"
    )


def _nu_of(old: Any, new: Any, nodes: list[Any], new_nodes: list[Any]) -> ByPath:
    """Adam's ν as it is stored, if the run goes from or to AdamW."""
    if optax.ScaleByAdamState not in (type(old), type(new)):
        return {}
    of_spa = nodes if isinstance(old, SPAState) else new_nodes
    found = of_type(of_spa, ScaleByRmsWithCountState)
    if len(found) != 1:
        raise ValueError(
            "`old_state` and `into` must be of `optax.adamw` and "
            '`spa_adamw(second_moment="full")`, got one with '
            f"{kinds_of(tuple(of_spa))}"
        )
    return by_path(found[0].nu if isinstance(old, SPAState) else old.nu)


def _warn_of_narrow_params(old: Any, nodes: list[Any], params: PyTree) -> None:
    """Warns if z would be made from params of fewer bits than the run seems to have."""
    if isinstance(old, SPAState) or of_type(nodes, StochasticRoundingState):
        return
    leaves = by_path(params)
    trained = [leaves[path] for path in by_path(momentum_tree(old))]
    if has_narrow_leaves(trained) and not has_narrow_leaves(
        getattr(old, "nu", momentum_tree(old))
    ):
        _checks.warn(
            "`params` should be the float32 master copy of the run, if it has one: its "
            "moments are in float32, and z is made from `params`. Pass the cast ones "
            "as `new_params`."
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
