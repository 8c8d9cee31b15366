"""How z is kept in a state: itself, or in 16 bits or fewer as its difference from the params.

The form is the type of a node. So the structure of a state, and of its checkpoints, says what the
arrays hold, and a cast changes their precision alone. The update computes in 32 bits or more.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, PyTree

from spa_optax._precision import Seed, rounded, wide_dtype
from spa_optax._trees import check_same_tree, is_float, is_none, leaves_with_path, map_floats
from spa_optax._xla import sharded_like


class Itself:
    """z in 32 bits or more, as it is. Its tree stands in the state without a node.

    A form has these functions of a parameter y and of its arrays in the state, one of each field.
    """

    _fields = ("z",)
    _make = staticmethod(lambda trees: next(iter(trees)))
    # Whether z − y is stored: z then follows params that are edited or replaced.
    follows_params = False

    @staticmethod
    def start(y: Array, dtype: Any) -> tuple[Array, ...]:
        """z_0 = y_0: a copy, so that both can be donated; unlike zeros, it keeps the sharding."""
        return (jnp.array(y, dtype=dtype, copy=True),)

    @staticmethod
    def decode(y: Array, z: Array) -> Array:
        """z, or z − y where that is stored, in the dtype to compute in."""
        return z.astype(wide_dtype(y, z))

    @staticmethod
    def encode(z: Array, y: Array, seed: Seed | None, old: Array) -> tuple[Array, ...]:
        """The arrays that hold z, in the dtypes of old ones."""
        return (rounded(z, old.dtype, seed),)

    @staticmethod
    def eps(z: Array) -> float:
        """The relative precision of what is stored."""
        return float(jnp.finfo(z.dtype).eps)

    @staticmethod
    def num_saturated(z: Array) -> Int[Array, ""]:
        """How many elements are at the limit of what can be stored."""
        return jnp.zeros([], jnp.int32)


def _start(form: "Form", y: Array, dtype: Any) -> tuple[Array, ...]:
    """Zeros."""
    del form
    return (sharded_like(jnp.zeros_like(y, dtype=dtype), y),)


def _decode(form: "Form", y: Array, value: Array) -> Array:
    """The difference, which is stored in units."""
    return form.unit * value.astype(wide_dtype(y))


def _encode(form: "Form", z: Array, y: Array, seed: Seed | None, old: Array) -> tuple[Array, ...]:
    """Saturates. Where z is NaN, y is, so any number will do."""
    return (rounded((z - y.astype(z.dtype)) / form.unit, old.dtype, seed, saturates=True),)


def _eps(form: "Form", value: Array) -> float:
    """That of the difference."""
    del form
    return float(jnp.finfo(value.dtype).eps)


def _num_saturated(form: "Form", value: Array) -> Int[Array, ""]:
    """How many differences are the dtype's largest number."""
    del form
    limit = float(jnp.finfo(value.dtype).max)
    return jnp.sum(jnp.abs(value.astype(wide_dtype(value))) == limit, dtype=jnp.int32)


# Checkpoints name fields, not types, so the names differ too. They have no base but a tuple, since
# Levanter saves no other NamedTuples.
class Difference(NamedTuple):
    """z in bfloat16: z − y, with the params y.

    z itself would be rounded to 2^−8 of the params, and small steps would vanish.
    """

    difference: PyTree[Array]
    unit = 1.0
    follows_params = True
    start, decode, encode = map(classmethod, (_start, _decode, _encode))
    eps, num_saturated = map(classmethod, (_eps, _num_saturated))


class ScaledDifference(NamedTuple):
    """z in float16 or float8, whose exponents have few bits: 256 (z − y), with the params y."""

    scaled: PyTree[Array]
    unit = 2.0**-8
    follows_params = True
    start, decode, encode = map(classmethod, (_start, _decode, _encode))
    eps, num_saturated = map(classmethod, (_eps, _num_saturated))


Form = Any  # one of these classes, or another with their functions


class Storage(NamedTuple):
    """What a `state_dtype` asks for."""

    form: Form
    dtype: Any  # None: that of the params, but float32 for params of 16 bits or fewer

    def dtype_of(self, y: Any) -> Any:
        """The dtype of the arrays of a parameter."""
        dtype = jnp.result_type(y)
        if not is_float(y):
            return dtype
        if self.dtype is None:
            return jnp.dtype(jnp.float32) if dtype.itemsize <= 2 else dtype
        if not jnp.iscomplexobj(y):
            return jnp.dtype(self.dtype)
        return jnp.dtype(jnp.complex128 if jnp.finfo(self.dtype).bits == 64 else jnp.complex64)


def storage_of(state_dtype: DTypeLike | None) -> Storage:
    """The difference in 16 bits or fewer, otherwise z itself."""
    if state_dtype is None or jnp.dtype(state_dtype).itemsize > 2:
        return Storage(Itself, state_dtype)
    has_all_exponents = jnp.finfo(state_dtype).nexp == jnp.finfo(jnp.float32).nexp
    return Storage(Difference if has_all_exponents else ScaledDifference, state_dtype)


def form_of(z: PyTree) -> Form:
    """The form of a stored z."""
    return type(z) if hasattr(type(z), "follows_params") else Itself


def trees_of(z: PyTree) -> tuple[PyTree, ...]:
    """The trees of a stored z, each with the structure of the params."""
    return (z,) if form_of(z) is Itself else tuple(z)


def init(params: PyTree, storage: Storage) -> PyTree:
    """The stored z_0 = y_0."""

    def start(y: Any) -> tuple[Array | None, ...]:
        if isinstance(y, jax.ShapeDtypeStruct):  # no value yet: the first update takes it
            y = jnp.zeros(y.shape, y.dtype)
        if is_float(y):
            return storage.form.start(y, storage.dtype_of(y))
        return tuple(None if y is None else jnp.array(y) for _ in storage.form._fields)

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
    return map_floats(of_leaf, params, *trees_of(z), *trees)


def check(name: str, z: PyTree, params: PyTree, storage: Storage) -> None:
    """Raises ValueError unless z has the structure of the params, and form and dtypes of `init`.

    With a `state_dtype` of None dtypes may be wider, since params may have been cast afterwards.
    """
    form = form_of(z)
    if form is storage.form:
        check_same_tree(name, trees_of(z)[0], "params", params)
    trees = map(_leaves, trees_of(z))
    for (path, y), *arrays in zip(leaves_with_path(params), *trees, strict=False):
        if not is_float(y) or arrays[0] is None:
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


def check_readable(name: str, z: PyTree) -> None:
    """Raises ValueError if arrays have a dtype that their form never has: they have been cast."""
    form = form_of(z)
    for leaf in jax.tree.leaves(z) if form in (Itself, Difference, ScaledDifference) else ():
        if is_float(leaf) and not jnp.iscomplexobj(leaf):
            dtype = jnp.result_type(leaf)
            if (expected := storage_of(dtype).form) is not form:
                raise ValueError(
                    f"`{name}` must hold z as a `state_dtype` asks for, in {dtype.name} as"
                    f" {_described(expected, ())}, got {_described(form, ())}: for another"
                    " `state_dtype` use `convert`"
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
    kind = "z itself" if form is Itself else f"a `{form.__name__}`"
    return " in ".join([kind, *([", ".join(map(_name, dtypes))] if dtypes else [])])


def _by_field(form: Form, function: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """A stored z, from a function of the leaves that returns the arrays of each parameter."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    rows = [function(*of) for of in zip(leaves, *map(structure.flatten_up_to, trees), strict=True)]
    columns = zip(*rows, strict=True) if rows else [()] * len(form._fields)
    return form._make(map(structure.unflatten, columns))
