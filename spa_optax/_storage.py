"""How z is kept in a state: itself, or in 16 bits or fewer as its difference from the params.

The form is the type of a node. So the structure of a state, and of its checkpoints, says what the
arrays hold, and a cast changes their precision alone. The update computes in 32 bits or more.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, PyTree

from spa_optax._precision import Seed, rounded, wide_dtype
from spa_optax._trees import (
    by_path,
    check_same_tree,
    is_none,
    is_trained,
    leaves_with_path,
    map_trained,
)
from spa_optax._xla import sharded_like


@dataclasses.dataclass(frozen=True)
class Form:
    """How z is kept. It has functions of a parameter y and its arrays in the state, one a field."""

    node: Any  # the type of the node in the state; None: its tree stands there without one
    follows_params = False  # whether z − y is stored, so that z follows params that are replaced

    def start(self, y: Any, dtype: Any) -> tuple[Array, ...]:
        """z_0 = y_0, without sharing a buffer, so that both can be donated; sharded like y."""
        raise NotImplementedError

    def decode(self, y: Array, *arrays: Array) -> Array:
        """z, or z − y where that is stored, in the dtype to compute in."""
        raise NotImplementedError

    def encode(self, z: Array, y: Array, seed: Seed | None, *old: Array) -> tuple[Array, ...]:
        """The arrays that hold z, in the dtypes of old ones."""
        raise NotImplementedError

    def eps(self, *arrays: Array) -> float:
        """The relative precision of what is stored."""
        return float(jnp.finfo(arrays[0].dtype).eps)

    def num_saturated(self, *arrays: Array) -> Int[Array, ""]:
        """How many elements are at the limit of what can be stored."""
        return jnp.zeros([], jnp.int32)


class Itself(Form):
    """z in 32 bits or more, as it is."""

    def start(self, y: Any, dtype: Any) -> tuple[Array, ...]:
        """A copy."""
        return (jnp.array(y, dtype=dtype, copy=True),)

    def decode(self, y: Array, *arrays: Array) -> Array:
        """A cast."""
        return arrays[0].astype(wide_dtype(y, *arrays))

    def encode(self, z: Array, y: Array, seed: Seed | None, *old: Array) -> tuple[Array, ...]:
        """A cast, or rounded stochastically."""
        return (rounded(z, old[0].dtype, seed),)


@dataclasses.dataclass(frozen=True)
class Difference(Form):
    """z in 16 bits or fewer: z − y in units.

    z itself would be rounded to 2^−8 of the params, and small steps would vanish.
    """

    unit: float
    follows_params = True

    def start(self, y: Any, dtype: Any) -> tuple[Array, ...]:
        """Zeros."""
        return (sharded_like(jnp.zeros_like(y, dtype=dtype), y),)

    def decode(self, y: Array, *arrays: Array) -> Array:
        """The difference."""
        return self.unit * arrays[0].astype(wide_dtype(y))

    def encode(self, z: Array, y: Array, seed: Seed | None, *old: Array) -> tuple[Array, ...]:
        """Saturates. Where z is NaN, y is, so any number will do."""
        return (rounded((z - y.astype(z.dtype)) / self.unit, old[0].dtype, seed, saturates=True),)

    def num_saturated(self, *arrays: Array) -> Int[Array, ""]:
        """How many differences are the dtype's largest number."""
        limit = float(jnp.finfo(arrays[0].dtype).max)
        wide = arrays[0].astype(wide_dtype(*arrays))
        return jnp.sum(jnp.abs(wide) == limit, dtype=jnp.int32)


# Each dtype has a type and a field of its own: checkpoints hold the names of fields, and cast
# arrays to the dtypes of what they are read into.
class BFloat16Difference(NamedTuple):
    """z − y, with the params y."""

    bfloat16: PyTree[Array]


class Float16Difference(NamedTuple):
    """256 (z − y), with the params y, at most 65,504."""

    float16: PyTree[Array]


class E4M3Difference(NamedTuple):
    """256 (z − y), with the params y, at most 448."""

    float8_e4m3fn: PyTree[Array]


class E5M2Difference(NamedTuple):
    """256 (z − y), with the params y, at most 57,344."""

    float8_e5m2: PyTree[Array]


ITSELF = Itself(None)
FORMS: dict[Any, Form] = {
    BFloat16Difference: Difference(BFloat16Difference, 1.0),
    Float16Difference: Difference(Float16Difference, 2.0**-8),  # since exponents have few bits
    E4M3Difference: Difference(E4M3Difference, 2.0**-8),
    E5M2Difference: Difference(E5M2Difference, 2.0**-8),
}


class Storage(NamedTuple):
    """What a `state_dtype` asks for."""

    form: Form
    dtype: Any  # None: that of the params, but float32 for params of 16 bits or fewer

    def dtype_of(self, y: Any) -> Any:
        """The dtype of the arrays of a parameter."""
        dtype = jnp.result_type(y)
        if not is_trained(y):
            return dtype
        if self.dtype is None:
            return jnp.dtype(jnp.float32) if dtype.itemsize <= 2 else dtype
        if not jnp.iscomplexobj(y):
            return jnp.dtype(self.dtype)
        return jnp.dtype(jnp.complex128 if jnp.finfo(self.dtype).bits == 64 else jnp.complex64)


def storage_of(state_dtype: DTypeLike | None) -> Storage:
    """The difference in 16 bits or fewer, otherwise z itself."""
    dtype = None if state_dtype is None else jnp.dtype(state_dtype)
    forms = (form for node, form in FORMS.items() if node._fields == (_name(dtype),))
    return Storage(next(forms, ITSELF), dtype)


def form_of(z: PyTree) -> Form:
    """The form of a stored z."""
    return FORMS.get(type(z), ITSELF)


def trees_of(z: PyTree) -> tuple[PyTree, ...]:
    """The trees of a stored z, each with the structure of the params."""
    return (z,) if form_of(z) is ITSELF else tuple(z)


def init(params: PyTree, storage: Storage) -> PyTree:
    """The stored z_0 = y_0."""

    def start(y: Any) -> tuple[Array | None, ...]:
        if isinstance(y, jax.ShapeDtypeStruct):  # no value yet: the first update takes it
            y = jnp.zeros(y.shape, y.dtype)
        if is_trained(y):
            return storage.form.start(y, storage.dtype_of(y))
        return tuple(None if y is None else jnp.array(y) for _ in range(_num_fields(storage.form)))

    return _by_field(storage.form, start, params)


def decode(params: PyTree, z: PyTree) -> PyTree:
    """z, or z − y where that is stored, in the dtype to compute in; None for integers."""
    return map_stored(lambda form, y, *arrays: form.decode(y, *arrays), params, z)


def z_of(form: Form, y: Array, *arrays: Array) -> Array:
    """The value of z, in the dtype to compute in."""
    decoded = form.decode(y, *arrays)
    return y.astype(decoded.dtype) + decoded if form.follows_params else decoded


def encode(z: PyTree, params: PyTree, seeds: PyTree, old: PyTree) -> PyTree:
    """Stores z in the form and the dtypes of an old one. Integers and leaves without z stay."""
    form = form_of(old)

    def leaf(y: Any, z: Any, seed: Seed | None, *arrays: Any) -> tuple[Any, ...]:
        return arrays if z is None else form.encode(z, y, seed, *arrays)

    return _by_field(form, leaf, params, z, seeds, *trees_of(old))


def map_stored(function: Callable[..., Any], params: PyTree, z: PyTree, *trees: PyTree) -> PyTree:
    """A function of the form, a parameter, its arrays and leaves of other trees.

    The result is None for integers, and where a tree is None.
    """
    of_leaf = lambda *leaves: function(form_of(z), *leaves)
    return map_trained(of_leaf, params, *trees_of(z), *trees)


def check(name: str, z: PyTree, params: PyTree, storage: Storage) -> None:
    """Raises ValueError unless z has the structure of the params, and form and dtypes of `init`.

    With a `state_dtype` of None dtypes may be wider, since params may have been cast afterwards.
    """
    form = form_of(z)
    if form is storage.form:
        check_same_tree(name, trees_of(z)[0], "params", params)
    trees = map(_leaves, trees_of(z))
    for (path, y), *arrays in zip(leaves_with_path(params), *trees, strict=False):
        if not is_trained(y) or arrays[0] is None:
            continue
        dtypes = tuple(jnp.result_type(array) for array in arrays)
        expected = _dtypes(storage, jnp.shape(y), jnp.result_type(y))
        is_wider = storage.dtype is None and all(
            a.itemsize >= b.itemsize for a, b in zip(dtypes, expected, strict=False)
        )
        if form is not storage.form or not (dtypes == expected or is_wider):
            raise ValueError(
                f"`{name}` must be stored as `state_dtype={_name(storage.dtype)}` asks for,"
                f" {_described(storage.form, expected)}, got {_described(form, dtypes)} at"
                f" {path or 'its root'}: use `convert(state, params, into=tx.init(params))`"
            )


def check_readable(name: str, z: PyTree, params: PyTree) -> None:
    """Raises ValueError if arrays have a dtype that their form never has: they have been cast."""
    form, y = form_of(z), by_path(params)
    for path, leaf in (
        by_path(trees_of(z)[0]).items() if isinstance(form, (Itself, Difference)) else ()
    ):
        if not is_trained(leaf):
            continue
        expected = ITSELF if jnp.iscomplexobj(leaf) else storage_of(leaf.dtype).form
        of_complex = jnp.iscomplexobj(y.get(path, leaf))
        if jnp.iscomplexobj(leaf) != of_complex or (expected is not form and not of_complex):
            raise ValueError(
                f"`{name}` must hold z as a `state_dtype` asks for, got {_described(form, ())} in"
                f" {leaf.dtype}: for another `state_dtype` use `convert`"
            )


@functools.cache
def _dtypes(storage: Storage, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    y = jax.ShapeDtypeStruct(shape, dtype)
    start = lambda y: storage.form.start(y, storage.dtype_of(y))
    return tuple(array.dtype for array in jax.eval_shape(start, y))


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_none)


def _name(dtype: Any) -> str:
    return "None" if dtype is None else jnp.dtype(dtype).name


def _described(form: Form, dtypes: Any) -> str:
    kind = "z itself" if form is ITSELF else f"a `{form.node.__name__}`"
    return " in ".join([kind, *([", ".join(map(_name, dtypes))] if dtypes else [])])


def _by_field(form: Form, function: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """A stored z, from a function of the leaves that returns the arrays of each parameter."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    rows = [function(*of) for of in zip(leaves, *map(structure.flatten_up_to, trees), strict=True)]
    columns = zip(*rows, strict=True) if rows else [()] * _num_fields(form)
    fields = map(structure.unflatten, columns)
    return next(fields) if form is ITSELF else form.node(*fields)


def _num_fields(form: Form) -> int:
    return 1 if form is ITSELF else len(form.node._fields)
