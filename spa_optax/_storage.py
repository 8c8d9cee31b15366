"""How z is kept in a state: itself, or in 16 bits or fewer as its difference from the
params.

The form is the type of a node. So the structure of a state, and of its checkpoints,
says what the arrays hold, and a cast changes only their precision. The update computes
in 32 bits or more.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from spa_optax._precision import Seed, rounded, wide_dtype
from spa_optax._trees import by_path, is_none, is_trained
from spa_optax._xla import sharded_like


class OutOfRange(NamedTuple):
    """How many elements of a stored difference are not in its dtype's normal range."""

    saturated: Float[Array, "*n"] | float = 0.0  # at the limit of what can be stored
    subnormal: Float[Array, "*n"] | float = (
        0.0  # below, where spacing is constant, but not 0
    )
    nonzero: Float[Array, "*n"] | float = (
        0.0  # all but zeros; 0 where none can be subnormal
    )


class Form(NamedTuple):
    """How the z of a parameter y is kept: itself, or z − y in units, which
    saturates.
    """

    node: Callable[
        [PyTree], PyTree
    ]  # the type of its node in the state; z itself has none
    unit: float | None = None  # of z − y; None: z itself

    @property
    def follows_params(self) -> bool:
        """Whether z − y is stored, so that z follows params that are replaced."""
        return self.unit is not None

    def start(self, y: Any, dtype: Any) -> Array:
        """z_0 = y_0, without sharing a buffer, so that both can be donated; sharded
        like y.
        """
        if self.unit is None:
            return jnp.array(y, dtype=dtype, copy=True)
        return sharded_like(jnp.zeros_like(y, dtype=dtype), y)

    def decode(self, y: Array, stored: Array) -> Array:
        """z, or z − y where that is stored, in the dtype to compute in."""
        if self.unit is None:
            return stored.astype(wide_dtype(y, stored))
        return self.unit * stored.astype(wide_dtype(y))

    def value(self, y: Array, stored: Array) -> Array:
        """The value of z, in the dtype to compute in."""
        decoded = self.decode(y, stored)
        return y.astype(decoded.dtype) + decoded if self.follows_params else decoded

    def encode(self, z: Array, y: Array, seed: Seed | None, old: Array) -> Array:
        """What is stored of z, in the dtype of an old one."""
        if self.unit is None:
            return rounded(z, old.dtype, seed)
        # Where z is NaN, y is, so any number will do.
        return rounded(
            (z - y.astype(z.dtype)) / self.unit, old.dtype, seed, saturates=True
        )

    def eps(self, stored: Array) -> float:
        """The relative precision of what is stored."""
        return float(jnp.finfo(stored.dtype).eps)

    def out_of_range(self, stored: Array) -> OutOfRange:
        """How many elements are too large or too small."""
        if self.unit is None:
            return OutOfRange()
        size, narrow = (
            jnp.abs(stored.astype(wide_dtype(stored))),
            jnp.finfo(stored.dtype),
        )
        rows = lambda where: jnp.sum(
            jnp.atleast_1d(where), -1, jnp.int32
        )  # all may be over 2^31
        count = lambda where: jnp.sum(rows(where).astype(jnp.float32))
        saturated, tiny = count(size == float(narrow.max)), float(narrow.tiny)
        if narrow.minexp == jnp.finfo(size.dtype).minexp:  # bfloat16
            return OutOfRange(saturated)
        return OutOfRange(saturated, count((size > 0) & (size < tiny)), count(size > 0))


# Each dtype has a node and a field of its own: checkpoints hold names, and cast what
# they restore.
BFloat16Difference = namedtuple("BFloat16Difference", "bfloat16")
Float16Difference = namedtuple("Float16Difference", "float16")
E4M3Difference = namedtuple("E4M3Difference", "float8_e4m3fn")
E5M2Difference = namedtuple("E5M2Difference", "float8_e5m2")

ANY: Any = object()  # any state_dtype
ITSELF = Form(lambda tree: tree)
FORMS: dict[Any, Form] = {BFloat16Difference: Form(BFloat16Difference, 1.0)}
for _node in (Float16Difference, E4M3Difference, E5M2Difference):
    FORMS[_node] = Form(_node, 2.0**-8)  # 256 (z − y), since exponents have few bits


def form_for(state_dtype: Any) -> Form:
    """The form that a `state_dtype` asks for: the difference in 16 bits or fewer,
    otherwise z.
    """
    return next(
        (form for n, form in FORMS.items() if n._fields == (str(state_dtype),)), ITSELF
    )


def dtype_for(state_dtype: Any, y: Any) -> Any:
    """The dtype that a `state_dtype` asks for, for a parameter."""
    if state_dtype is None:
        return wide_dtype(y)
    if not jnp.iscomplexobj(y):
        return state_dtype
    return jnp.dtype(
        jnp.complex128 if jnp.finfo(state_dtype).bits == 64 else jnp.complex64
    )


def form_of(z: PyTree) -> Form:
    """The form of a stored z."""
    return FORMS.get(type(z), ITSELF)


def tree_of(z: PyTree) -> PyTree:
    """The tree of a stored z, with the structure of the params."""
    return z if form_of(z) is ITSELF else z[0]


def init(params: PyTree, state_dtype: Any) -> PyTree:
    """The stored z_0 = y_0."""
    form = form_for(state_dtype)

    def start(y: Any) -> Array:
        if isinstance(
            y, jax.ShapeDtypeStruct
        ):  # no value yet: the first update takes it
            y = jnp.zeros(y.shape, y.dtype)
        return (
            form.start(y, dtype_for(state_dtype, y)) if is_trained(y) else jnp.array(y)
        )

    return form.node(jax.tree.map(start, params))


def encode(z: PyTree, params: PyTree, seeds: PyTree, old: PyTree) -> PyTree:
    """Stores z in the form and the dtypes of an old one. Integers and leaves without z
    stay.
    """
    form = form_of(old)
    leaf = lambda y, z, seed, old: old if z is None else form.encode(z, y, seed, old)
    return form.node(
        jax.tree.map(leaf, params, z, seeds, tree_of(old), is_leaf=is_none)
    )


def check_stored(name: str, z: PyTree, params: PyTree, state_dtype: Any = ANY) -> None:
    """Raises ValueError unless z has the form and dtypes that a `state_dtype` asks for.

    With None dtypes may be wider, since params may have been cast afterwards. With ANY
    only arrays that were cast to a dtype which their form never has are refused.
    """
    form, by_name = form_of(z), by_path(params)
    kind = lambda form: "z itself" if form is ITSELF else f"a `{form.node.__name__}`"
    for path, leaf in by_path(tree_of(z)).items():
        if not is_trained(y := by_name.get(path, leaf)):
            continue
        if state_dtype is ANY:
            asked, rule = form_for(leaf.dtype), "a `state_dtype` asks for"
            is_complex = jnp.iscomplexobj(leaf)
            fits = (
                is_complex if jnp.iscomplexobj(y) else form is asked and not is_complex
            )
        else:
            asked, dtype = (
                form_for(state_dtype),
                jnp.result_type(dtype_for(state_dtype, y)),
            )
            is_wider = state_dtype is None and leaf.dtype.itemsize >= dtype.itemsize
            fits = form is asked and (leaf.dtype == dtype or is_wider)
            rule = f"`state_dtype={state_dtype}` asks for, {kind(asked)} in {dtype}"
        if not fits:
            got = f"{kind(form)} in {leaf.dtype} at {path or 'its root'}"
            how = "use `convert(state, params, into=tx.init(params))`"
            raise ValueError(f"`{name}` must be stored as {rule}, got {got}: {how}")
