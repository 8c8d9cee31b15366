"""How a state stores z, and the recursion of primal averaging on one array.

Two codecs, with the same methods, make the step of `YZCoefficients` on what they store.
`ZCodec` stores z, as in the paper. It serves where all params and the state have 32
bits or more: there storing a difference would only add a rounding error. In every other
case `DifferenceCodec` stores d = z − y, the difference from the params y. It keeps
digits that a narrow z would lose, and it follows params that something else moves.

The step is a method of the codec because the two round in different orders. `ZCodec`
makes u of z − y, which has the rounding error of z. `DifferenceCodec` makes u of d, and
stores z − (y + u) after u is rounded, so that d keeps what rounding took.

The params are y: messages and states say params, equations say y. Likewise Optax's
updates are g on the way in, and u on the way out.

The field `z` of a state is a tree of z itself, or a node with a tree of differences.
The type of the node says which. So a cast of the state, as when a checkpoint is
restored into another dtype, cannot change what its numbers mean. In the code `z_field`
is the field, `stored` is one array in it, and z and d are decoded values.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._coefficients import YZCoefficients
from ._rounding import Seed, round_to, round_update
from ._shardings import shard_like, where_sharded
from ._trees import Flag, as_dtype, compute_dtype, has_narrow_leaves, is_inexact
from ._xla import as_stored

# What a step of one array returns: u = y_{k+1} − y_k, in the dtype of y, and the array
# to store for z_{k+1}.
ArrayStep = tuple[Array | None, Array]


class ZMinusParams(NamedTuple):
    """The field `z` of a state that holds z − y."""

    z_minus_params: PyTree


class ZMinusParamsTimes256(NamedTuple):
    """The field `z` of a state that holds 256 (z − y).

    float8_e4m3fn has few exponents. In 256ths its normal numbers, from 2^-6 to 448, are
    differences from 6e-5 to 1.75, as steps like Adam's make them.
    """

    z_minus_params_times_256: PyTree


@dataclasses.dataclass(frozen=True)
class ZCodec:
    """The state stores z itself, where the params and z have 32 bits or more.

    In the initial state z is y, which may have been replaced since `init`, as by
    pretrained params. So all methods that read z must know whether it is the initial
    state.
    """

    description: str = "z itself"  # of what is stored, in messages
    unit: float = 1.0  # the stored array times this is z, or z − y
    stores_difference: bool = False

    def step(
        self,
        y: Array,
        stored: Array,
        g: Array | None,
        yz: YZCoefficients,
        seed: Seed | None,
        is_initial: Flag,
    ) -> ArrayStep:
        """The step of `YZCoefficients`. If g is None, y and z stay.

            z ← z − η g
            y ← y + c_y (z − y) − δ_y g

        If r is not None, z ← y + r (z − y) comes first.
        """
        z = self.decode_z(y, stored, is_initial)
        if g is None:
            return None, z.astype(stored.dtype)
        wide_y, wide_g, yz = as_dtype((y, g, yz), z.dtype)
        if yz.r is not None:
            z = _rescale(wide_y, z, yz.r)
        z = z - yz.eta * wide_g
        wide_u = yz.step_of_y(z - wide_y, wide_g)
        # One seed serves both. At most one of y and z has fewer bits than a step
        # computes in, as float32 params beside a float64 z.
        u = round_update(wide_u, y, seed)
        return u, round_to(z, stored.dtype, seed)

    def wrap(self, tree: PyTree) -> PyTree:
        """The field `z` of a state, from the tree of stored arrays."""
        return tree

    def init(self, y: Any, dtype: Any) -> Array:
        """What is stored of z_0 = y_0: an array of its own, sharded like y."""
        return jnp.array(y, dtype=dtype, copy=True)

    def decode_z(self, y: Array, stored: Array, is_initial: Flag) -> Array:
        """The value of z, in `compute_dtype`."""
        wide_y, z = as_dtype((y, stored), compute_dtype(y, stored))
        return where_sharded(is_initial, wide_y, z)

    def decode_difference(self, y: Array, stored: Array, is_initial: Flag) -> Array:
        """The value of z − y, in `compute_dtype`."""
        z = self.decode_z(y, stored, is_initial)
        return z - y.astype(z.dtype)

    def encode(self, y: Array, z: Array, dtype: Any, seed: Seed | None) -> Array:
        """What is stored of z beside the params y, in a dtype."""
        return round_to(z, dtype, seed)


@dataclasses.dataclass(frozen=True)
class DifferenceCodec:
    """The state stores (z − y)/unit, clipped to the range of its dtype.

    So z moves along if something else moves y. In the initial state it stores 0, and z
    is y also if y was replaced: `is_initial` is not read. The methods are those of
    `ZCodec`, which documents them. Only here does `encode` read y.
    """

    node_type: type
    description: str
    unit: float
    stores_difference: bool = True

    def step(
        self,
        y: Array,
        stored: Array,
        g: Array | None,
        yz: YZCoefficients,
        seed: Seed | None,
        is_initial: Flag,
    ) -> ArrayStep:
        """The same step, of y and d = z − y.

            d ← d − η g
            u = c_y d − δ_y g            rounded so that y + u has the dtype of y
            d ← (y + d) − (y + u)        keeps what rounding took

        If r is not None, d ← r d comes first.
        """
        if g is None:
            return None, stored
        d = self.decode_difference(y, stored, is_initial)
        wide_g, yz = as_dtype((g, yz), d.dtype)
        if yz.r is not None:
            d = yz.r * d
        d = d - yz.eta * wide_g
        wide_u = yz.step_of_y(d, wide_g)
        # One random word of 32 bits serves both. Bfloat16 params use bits 0 to 15. A
        # bfloat16 z − y uses bits 16 to 31, and one in float8 bits 12 to 31. The four
        # that both use shift z by at most 2^-16 of its ulp.
        u = round_update(wide_u, y, seed, use_low_bits=True)
        # u is what the params get, so z keeps what rounding takes from them. In this
        # form XLA for TPUs makes one kernel of it (benchmarks/compiled.py).
        z = y.astype(d.dtype) + d
        return u, self.encode(as_stored(y + u), z, stored.dtype, seed)

    def wrap(self, tree: PyTree) -> PyTree:
        return self.node_type(tree)

    def init(self, y: Any, dtype: Any) -> Array:
        return shard_like(jnp.zeros_like(y, dtype=dtype), y)

    def decode_z(self, y: Array, stored: Array, is_initial: Flag) -> Array:
        d = self.decode_difference(y, stored, is_initial)
        return y.astype(d.dtype) + d

    def decode_difference(self, y: Array, stored: Array, is_initial: Flag) -> Array:
        return self.unit * stored.astype(compute_dtype(y, stored))

    def encode(self, y: Array, z: Array, dtype: Any, seed: Seed | None) -> Array:
        # A NaN may be stored as a number. That is safe: where z is NaN, so is y.
        in_units = (z - y.astype(z.dtype)) / self.unit
        return round_to(in_units, dtype, seed, saturate=True)


@jax.custom_jvp
def _rescale(y: Array, z: Array, r: Array) -> Array:
    """y + r (z − y), but exactly z where r is 1, as in nearly every step.

    XLA on CPU makes a loop for either case, and runs one of them, since the predicate
    is a scalar. The loop for z does not read y, and is as fast as `optax.sgd`.
    """
    return where_sharded(r != 1, y + r * (z - y), z)


@_rescale.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """The derivative of y + r (z − y), since z depends on r at r = 1 too."""
    _, tangent = jax.jvp(lambda y, z, r: y + r * (z - y), primals, tangents)
    return _rescale(*primals), tangent


Z_CODEC = ZCodec()
Z_MINUS_PARAMS_CODEC = DifferenceCodec(ZMinusParams, "z − params", unit=1.0)
Z_MINUS_PARAMS_TIMES_256_CODEC = DifferenceCodec(
    ZMinusParamsTimes256, "256 (z − params)", unit=2.0**-8
)


Codec = ZCodec | DifferenceCodec


def choose_codec(params: PyTree, state_dtype: Any) -> Codec:
    """The codec that `init` takes for params and a `state_dtype`, which may be None."""
    num_bytes = 4 if state_dtype is None else jnp.dtype(state_dtype).itemsize
    if num_bytes == 1:
        return Z_MINUS_PARAMS_TIMES_256_CODEC
    if num_bytes == 2 or has_narrow_leaves(params):
        return Z_MINUS_PARAMS_CODEC
    return Z_CODEC


def codec_of(z_field: PyTree) -> Codec:
    """The codec that a state was made with, by the type of its field `z`."""
    for codec in (Z_MINUS_PARAMS_CODEC, Z_MINUS_PARAMS_TIMES_256_CODEC):
        if isinstance(z_field, codec.node_type):
            return codec
    return Z_CODEC


def stored_tree(z_field: PyTree) -> PyTree:
    """The inverse of `codec.wrap`: what is stored, with the structure of the params."""
    if codec_of(z_field).stores_difference:
        (tree,) = z_field
        return tree
    return z_field


def z_dtype(y: Any, state_dtype: Any) -> Any:
    """The dtype in which a state stores the z of a parameter."""
    if state_dtype is None:
        return compute_dtype(y)
    if jnp.iscomplexobj(y):  # no complex dtype is narrower than complex64
        return compute_dtype(state_dtype, jnp.complex64)
    return state_dtype


def init_z(params: PyTree, state_dtype: Any) -> PyTree:
    """The field `z` of a new state, for z_0 = y_0."""
    codec = choose_codec(params, state_dtype)

    def init_leaf(y):
        if isinstance(y, jax.ShapeDtypeStruct):  # no value yet: the first step takes it
            y = jnp.zeros(y.shape, y.dtype)
        if not is_inexact(y):
            return jnp.array(y)  # keeps the place in the tree; nothing reads its value
        return codec.init(y, z_dtype(y, state_dtype))

    return codec.wrap(jax.tree.map(init_leaf, params))
