"""Types that several modules use."""

from jaxtyping import Array, Bool, Float, Int, UInt32

Scalar = Float[Array, ""]
Flag = Bool[Array, ""]
Count = Int[Array, ""]
Seed = UInt32[Array, ""]  # a random word
ByPath = dict[str, Array]  # an array for each parameter, by its path
