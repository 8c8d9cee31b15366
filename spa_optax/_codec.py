"""How a state holds z, and the recursion of primal averaging on one array.

`Coefficients` has the recursion, and the `step` of two codecs computes it. The state
holds z itself where all params and the state have 32 bits or more, as in the paper:
there a difference would only add rounding. In every other case the state holds z − y,
the difference from the params y. A difference keeps digits that a narrow z would lose,
and it follows params that something else moves.

The type of a node says which of the two a state holds. So a cast of the state, as when
a checkpoint is restored into another dtype, cannot change what its numbers mean.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from spa_optax._dtypes import Flag, Scalar, has_narrow, wide_dtype
from spa_optax._rounding import Seed, round_update, rounded
from spa_optax._trees import by_path, is_trained
from spa_optax._xla import rescale, select, sharded_like


class Coefficients(NamedTuple):
    """The scalars of one step of y and z, for gradients g.

        z ← y + r (z − y)
        z ← z − η g
        y ← y + p (z − y) − δ_y g

    If the params y are x, p is c_{k+1}, and without Nesterov momentum δ_y is 0. A field
    that is None leaves its term out of the program.
    """

    eta: Scalar
    p: Scalar
    delta_y: Scalar | None  # None: 0
    r: Scalar | None  # None: 1
    is_start: Flag  # whether no step was taken: z is y then, even if y was replaced


class ArrayStep(NamedTuple):
    """What a step makes of one array. One without a gradient stays."""

    u: Array | None  # y_{k+1} − y_k, in the params' dtype
    stored: Array | None  # what the state holds of z_{k+1}


class Codec(abc.ABC):
    """How a state holds z beside the params y, and one step of both."""

    name: str  # of what is held, in messages
    follows_params: bool  # whether z moves along if something else moves y
    unit: float = 1.0  # of the numbers that are held

    @abc.abstractmethod
    def node(self, tree: PyTree) -> PyTree:
        """What stands in the state for a tree of arrays."""

    @abc.abstractmethod
    def start(self, y: Any, dtype: Any) -> Array:
        """What is held of z_0 = y_0: an array of its own, sharded like y."""

    @abc.abstractmethod
    def difference(self, y: Array, stored: Array, is_start: Flag) -> Array:
        """z − y, in the dtype to compute in."""

    @abc.abstractmethod
    def value(self, y: Array, stored: Array, is_start: Flag) -> Array:
        """z, in the dtype to compute in."""

    @abc.abstractmethod
    def encode(self, z: Array, y: Array, dtype: Any, seed: Seed | None) -> Array:
        """What is held of z, in a dtype."""

    @abc.abstractmethod
    def step(
        self, y: Array, stored: Array, g: Array, s: Coefficients, seed: Seed | None
    ) -> ArrayStep:
        """One step of y and z, from `Coefficients`."""


class Itself(Codec):
    """The state holds z itself, in 32 bits or more, beside such params."""

    name = "z itself"
    follows_params = False

    def node(self, tree):
        return tree

    def start(self, y, dtype):
        return jnp.array(y, dtype=dtype, copy=True)

    def value(self, y, stored, is_start):
        dtype = wide_dtype(y, stored)
        return select(is_start, y.astype(dtype), stored.astype(dtype))

    def difference(self, y, stored, is_start):
        z = self.value(y, stored, is_start)
        return z - y.astype(z.dtype)

    def encode(self, z, y, dtype, seed):
        return rounded(z, dtype, seed)

    def step(self, y, stored, g, s, seed):
        z = stored.astype(wide_dtype(y, stored))
        wide_y, g, s = as_dtype((y, g, s), z.dtype)
        if s.r is None:
            z = select(s.is_start, wide_y, z)
        else:
            z = rescale(wide_y, z, jnp.where(s.is_start, 0, s.r))
        z = z - s.eta * g
        u = s.p * (z - wide_y)
        if s.delta_y is not None:
            u = u - s.delta_y * g
        # The params take the low bits of each random word, and z the high ones.
        u = round_update(u, y, seed, low_bits=True)
        return ArrayStep(u, rounded(z, stored.dtype, seed))


@dataclasses.dataclass(frozen=True)
class Difference(Codec):
    """The state holds (z − y)/unit, at most its dtype's largest number.

    Before the first step it is 0, so z is y also if y was replaced.
    """

    node_type: Callable[[PyTree], PyTree]
    name: str
    unit: float
    follows_params = True

    def node(self, tree):
        return self.node_type(tree)

    def start(self, y, dtype):
        return sharded_like(jnp.zeros_like(y, dtype=dtype), y)

    def value(self, y, stored, is_start):
        d = self.difference(y, stored, is_start)
        return y.astype(d.dtype) + d

    def difference(self, y, stored, is_start):
        return self.unit * stored.astype(wide_dtype(y, stored))

    def encode(self, z, y, dtype, seed):
        # Where z is NaN, y is NaN too, so any number will do.
        units = (z - y.astype(z.dtype)) / self.unit
        return rounded(units, dtype, seed, saturates=True)

    def step(self, y, stored, g, s, seed):
        d = self.difference(y, stored, s.is_start)
        g, s = as_dtype((g, s), d.dtype)
        if s.r is not None:
            d = s.r * d
        d = d - s.eta * g
        u = s.p * d
        if s.delta_y is not None:
            u = u - s.delta_y * g
        # As above: low bits for the params, high ones for z.
        u = round_update(u, y, seed, low_bits=True)
        # u was rounded, so z keeps what the params lose. (z − (y + u) is d − u. Written
        # so, XLA for TPUs would make two kernels of it.)
        z, new_y = y.astype(d.dtype) + d, y + u
        return ArrayStep(u, self.encode(z, new_y, stored.dtype, seed))


def as_dtype(tree: PyTree, dtype: Any) -> PyTree:
    """Numbers in a dtype."""
    return jax.tree.map(lambda x: x if x.dtype == bool else x.astype(dtype), tree)


class ZMinusParams(NamedTuple):
    """Stands in a state for a tree of z − y."""

    z_minus_params: PyTree


class ZMinusParamsTimes256(NamedTuple):
    """Stands in a state for a tree of 256 (z − y), since float8 has few exponents."""

    z_minus_params_times_256: PyTree


ITSELF = Itself()
DIFFERENCE = Difference(ZMinusParams, "z − params", unit=1.0)
DIFFERENCE_IN_256THS = Difference(
    ZMinusParamsTimes256, "256 (z − params)", unit=2.0**-8
)


def codec_for(params: PyTree, state_dtype: Any) -> Codec:
    """How a state holds the z of params, with a `state_dtype` or None."""
    num_bytes = 4 if state_dtype is None else jnp.dtype(state_dtype).itemsize
    if num_bytes == 1:
        return DIFFERENCE_IN_256THS
    return DIFFERENCE if num_bytes == 2 or has_narrow(params) else ITSELF


def codec_of(z: PyTree) -> Codec:
    """How a state holds the z that stands in it."""
    if isinstance(z, ZMinusParams):
        return DIFFERENCE
    return DIFFERENCE_IN_256THS if isinstance(z, ZMinusParamsTimes256) else ITSELF


def tree_of(z: PyTree) -> PyTree:
    """The tree of what stands in a state for z, with the structure of the params."""
    return z if codec_of(z) is ITSELF else z[0]


def dtype_for(y: Any, state_dtype: Any) -> Any:
    """The dtype in which a state holds the z of a parameter."""
    if state_dtype is None:
        return wide_dtype(y)
    if not jnp.iscomplexobj(y):
        return state_dtype
    has_64_bits = jnp.finfo(state_dtype).bits == 64
    return jnp.dtype(jnp.complex128 if has_64_bits else jnp.complex64)


def init_z(params: PyTree, state_dtype: Any) -> PyTree:
    """What stands in a new state for z_0 = y_0."""
    codec = codec_for(params, state_dtype)

    def start(y: Any) -> Array:
        if isinstance(y, jax.ShapeDtypeStruct):  # no value yet: the first step takes it
            y = jnp.zeros(y.shape, y.dtype)
        if not is_trained(y):
            return jnp.array(y)
        return codec.start(y, dtype_for(y, state_dtype))

    return codec.node(jax.tree.map(start, params))


def check_codec(name: str, z: PyTree, params: PyTree, state_dtype: Any) -> None:
    """Raises ValueError unless z is held as `init` would hold it beside params."""
    found, expected = codec_of(z), codec_for(params, state_dtype)
    if found is not expected:
        raise ValueError(
            f"`{name}` must hold {expected.name}, for the dtypes of `params` and for "
            f"`state_dtype={state_dtype}`, got {found.name}. Use `convert(state, "
            "params, into=tx.init(new_params), new_params=new_params)`, where `params` "
            "are those that the state was made for."
        )
    params_by_path = by_path(params)
    for path, leaf in by_path(tree_of(z)).items():
        if not is_trained(y := params_by_path.get(path, leaf)):
            continue
        dtype = jnp.result_type(dtype_for(y, state_dtype))
        # Without a `state_dtype` params may have been cast to fewer bits afterwards.
        is_wider = state_dtype is None and leaf.dtype.itemsize >= dtype.itemsize
        if leaf.dtype != dtype and not is_wider:
            raise ValueError(
                f"`{name}` must be in {dtype}, for `state_dtype={state_dtype}`, got "
                f"{leaf.dtype} at {path or 'its root'}. Use `convert(state, params, "
                "into=tx.init(params))`."
            )


def check_not_cast(name: str, z: PyTree) -> None:
    """Raises ValueError if z itself was cast to 16 bits."""
    if codec_of(z) is ITSELF and has_narrow(z):
        raise ValueError(
            f"`{name}` must hold z in 32 bits or more, got 16 or fewer. Use "
            "`convert(state, params, into=tx.init(params))`."
        )
