"""Matrix products in a narrow dtype, accumulated in float32 or more: the one way all ops make them."""

import jax
import jax.numpy as jnp


def wide_einsum(subscripts: str, a, b, dtype=None):
    """An einsum of two operands cast to `dtype` (a's by default), with float32 or wider results.

    On CPU the operands are widened first, which changes no value: XLA's own CPU kernels for bfloat16
    operands with float32 results now and then return garbage (jax 0.10.2 and 0.12.0, AVX512-BF16;
    the same call twice differs, infinities among it), and float32 ones do not.
    """
    dtype = a.dtype if dtype is None else dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    if jax.default_backend() == "cpu":
        a, b = a.astype(wide), b.astype(wide)
    return jnp.einsum(subscripts, a, b, preferred_element_type=wide)
