"""The momentum of a run: read from one optimizer's state, written into another's.

`Momentum` is what lies between them, as the family has it: z, and the last step. A new
optimizer whose momentum `convert` should know belongs in `CONVERTED_FIELDS` of
`_optax_states.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from . import _checks
from ._codec import codec_of, unwrap
from ._dtypes import wide_dtype
from ._hyperparams import SGDM, AdamW, as_schedule
from ._optax_states import CONVERTED_FIELDS
from ._sgdm import eta_and_c, look_ahead, nonzero_w
from ._state import SPAState, z_is_still_y
from ._trees import by_path, is_inexact, scalar_of, with_leaves
from ._types import ByPath, Scalar


class Run(NamedTuple):
    """What is known of a run, apart from its momentum."""

    count: Array  # k
    y: ByPath  # the params with momentum, in 32 bits or more
    new_params: ByPath  # those to go on with
    nu: ByPath  # Adam's ν as it is stored, if the run goes from or to AdamW
    other: SGDM | AdamW | None  # the argument of `convert`
    averaging: optax.ScalarOrSchedule | None


class Momentum(NamedTuple):
    """The momentum of a run as the family has it."""

    z: ByPath  # z_k, in the dtype to compute in
    eta: Scalar  # of the last step, as in `SPAState`; from AdamW, of the next one
    c: Scalar
    w: Scalar
    mu_y: Scalar


class MomentumScale(NamedTuple):
    """How Optax's momentum m says where z is: x − z = w · m / divisor."""

    eta: Array  # η, c and w of the step
    c: Array
    w: Array
    divisors: ByPath  # none for SGD


def momentum_tree(node: Any) -> PyTree:
    """The momentum of a node of a state, with a leaf for each parameter."""
    return unwrap(getattr(node, CONVERTED_FIELDS[type(node)]))


def inexact_params(node: Any, params: ByPath) -> ByPath:
    """The params that have a momentum in a node, in 32 bits or more."""
    found = {path: params[path] for path in by_path(momentum_tree(node))}
    return {path: x.astype(wide_dtype(x)) for path, x in found.items() if is_inexact(x)}


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
    w = nonzero_w(ahead.resting_w, ahead.a, w=jnp.zeros_like(ahead.a))
    eta, c = eta_and_c(ahead, w)
    return MomentumScale(eta, c, w, divisors={})


def _scale_of_adamw(run: Run) -> MomentumScale:
    """x − z = w/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε), with the scalars of step k.

    Without a gradient step k of AdamW moves x by −η β₁ m / (1 − β₁^(k+1)) / (√ν̂ + ε),
    and that of `spa_adamw` by −c (x − z). With c = 1 − β₁ and w = η (1 − c) both are
    the same. ν is that of step k − 1, and so is its bias.
    """
    k, other = run.count, run.other
    if not isinstance(other, AdamW):
        raise ValueError(
            "`other` must be `AdamW(learning_rate, b1, b2, eps)`, if the "
            "`ScaleByAdamState` is that of `optax.adamw` or `optax.adam`, got "
            f"{other!r}"
        )
    averaging: Any = 1 - other.b1 if run.averaging is None else run.averaging
    eta = as_schedule("learning_rate", other.learning_rate)(k)
    c = as_schedule("averaging", averaging)(k)
    if c <= 0 or (eta <= 0 and k > 0):
        raise ValueError(
            "`averaging` and `learning_rate` must be > 0 for z to hold m at a finite "
            f"distance, got {c} and {eta}"
        )

    def divisor(nu):
        nu = nu.astype(wide_dtype(nu))
        nu_hat = nu / _bias(other.b2, jnp.maximum(k, 1), nu.dtype)
        size = _bias(other.b1, k + 1, nu.dtype) * (jnp.sqrt(nu_hat) + other.eps)
        return c.astype(nu.dtype) * size

    divisors = {path: divisor(nu) for path, nu in run.nu.items()}
    return MomentumScale(eta, c, eta * (1 - c), divisors)


def _bias(decay: ArrayLike, k: Array, dtype: Any) -> Array:
    """1 − decay^k, by which Adam divides a moment."""
    return 1 - jnp.asarray(decay, dtype) ** k.astype(dtype)


def read_spa(old: SPAState, run: Run) -> Momentum:
    """The momentum of a state of the family."""
    codec, stored = codec_of(old.z), by_path(unwrap(old.z))
    z_is_y = z_is_still_y(old)
    z = {path: codec.z(x, stored[path], z_is_y) for path, x in run.y.items()}
    return Momentum(z, old.eta, old.c, old.w, old.mu_y)


def write_spa(new: SPAState, momentum: Momentum, run: Run) -> SPAState:
    """A new state of the family, with the momentum."""
    codec, stored = codec_of(new.z), by_path(unwrap(new.z))
    for path in stored.keys() & momentum.z.keys():
        y, dtype = run.new_params[path], stored[path].dtype
        stored[path] = codec.store(momentum.z[path], y, dtype, seed=None)
        largest = float(jnp.finfo(dtype).max)
        is_at_limit = jnp.abs(stored[path].astype(wide_dtype(y))) >= largest
        if codec.follows_params and jnp.any(is_at_limit):
            _checks.warn(
                "`into` should hold z in bfloat16 or wider: z − params is clipped at "
                f"{path or 'its root'}"
            )
    scalars = {
        field: with_leaves(getattr(new, field), getattr(momentum, field))
        for field in ("eta", "c", "w", "mu_y")
    }
    count = with_leaves(new.count, run.count)
    z = with_leaves(new.z, list(stored.values()))
    return new._replace(count=count, z=z, **scalars)


def read_optax(old: Any, run: Run) -> Momentum:
    """The momentum of a state of Optax: z = x − w · m / divisor."""
    is_sgdm = isinstance(old, optax.TraceState)
    eta, c, w, divisors = _scale_of_sgdm(run) if is_sgdm else _scale_of_adamw(run)
    m, z = by_path(momentum_tree(old)), {}
    for path, x in run.y.items():
        divisor = divisors.get(path, 1)
        z[path] = x - w.astype(x.dtype) * (m[path].astype(x.dtype) / divisor)
    if run.count == 0:
        if any(jnp.any(leaf != 0) for leaf in m.values()):
            raise ValueError(
                "`count` must be >= 1 where `old_state` holds momentum, got 0"
            )
        eta = c = w = jnp.zeros([])  # as `init` makes them
    return Momentum(z, eta, c, w, mu_y=jnp.ones([]))


def write_optax(new: Any, momentum: Momentum, run: Run) -> Any:
    """A new state of Optax: m = (x − z) / w · divisor, or 0 if w is 0."""
    is_adamw = isinstance(new, optax.ScaleByAdamState)
    if is_adamw:
        *_, w, divisors = _scale_of_adamw(run)
    else:  # the state's w need not be that of `spa_from_sgdm`
        w, divisors = scalar_of(momentum.w), {}
    m = by_path(momentum_tree(new))
    inverse = jnp.where(w == 0, 0, 1 / jnp.where(w == 0, 1, w))
    for path in m.keys() & run.y.keys():
        x, z = run.y[path], momentum.z[path]
        dtype = wide_dtype(x, z)
        x_minus_z = x.astype(dtype) - z.astype(dtype)
        m[path] = inverse.astype(dtype) * x_minus_z * divisors.get(path, 1)
    tree = with_leaves(momentum_tree(new), list(m.values()))
    if not is_adamw:
        return optax.TraceState(tree)
    nu = [run.nu.get(path, leaf) for path, leaf in by_path(new.nu).items()]
    return new._replace(
        count=with_leaves(new.count, run.count), mu=tree, nu=with_leaves(new.nu, nu)
    )
