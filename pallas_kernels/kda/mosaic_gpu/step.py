"""One token of every row, the states changed in place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.decay import bounded, unbounded
from pallas_kernels.kda.mosaic_gpu.warpgroup import PARAMS, TILE, channels, load, pad, up

# A thread holds four neighbouring columns of every eighth row, a warp two whole rows: accesses to shared
# memory are 16 bytes wide and touch every bank as often, and sums over rows are a thread's own but for one
# shuffle and one exchange between warps.
STATE: Any = plgpu.Layout.TILED(
    plgpu.Tiling(((8, TILE), (2, TILE), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
KEYS, VALUES = STATE.reduce(1), STATE.reduce(0)


def _kernel(scale, lower_bound, *refs):
    """64 value channels of one head of one row (README.md)."""
    (
        q_g, k_g, z_g, bias_g, v_g, beta_g, a_log_g, S_g, o_g,
        q_s, k_s, z_s, bias_s, v_s, S_s, o_s, vectors, state,
    ) = refs  # fmt: skip
    b, h, c = (lax.axis_index(name) for name in ("row", "head", "tile"))
    mine = channels(c)
    for source, target in (
        (q_g.at[b, h], q_s),
        (k_g.at[b, h], k_s),
        (z_g.at[b, h], z_s),
        (bias_g.at[h], bias_s),
        (v_g.at[b, h, mine], v_s),
    ):
        plgpu.copy_gmem_to_smem(source, target, vectors)
    plgpu.copy_gmem_to_smem(S_g.at[b, h, :, mine], S_s, state)
    beta = jax.nn.sigmoid(beta_g[b, h].astype(jnp.float32))
    rate = jnp.exp(a_log_g[h].astype(jnp.float32))

    # All that needs no state is done while it is under way.
    plgpu.barrier_wait(vectors)
    unit = lambda x: x * lax.rsqrt(jnp.sum(jnp.square(x)) + 1e-6)
    q, k = unit(load(q_s, KEYS)), unit(load(k_s, KEYS))
    both = jnp.sum(q * k)
    z = load(z_s, KEYS) + load(bias_s, KEYS)
    kept = jnp.exp2(unbounded(z, rate) if lower_bound is None else bounded(z, rate, lower_bound))

    spread = lambda x, axis: plgpu.layout_cast(lax.broadcast_in_dim(x, S_s.shape, (axis,)), STATE)
    plgpu.barrier_wait(state)
    S = load(S_s, STATE) * spread(kept, 0)
    said, read = (jnp.sum(S * spread(x, 0), axis=0) for x in (k, q))
    written = beta * (load(v_s, VALUES) - said)
    S_s[...] = S + spread(k, 0) * spread(written, 1)
    o_s[...] = (scale * (read + both * written)).astype(o_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(S_s, S_g.at[b, h, :, mine])
    plgpu.copy_smem_to_gmem(o_s, o_g.at[b, h, mine])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@jax.custom_jvp
def _constants(tree):
    """The same, which cannot be differentiated."""
    return tree


@_constants.defjvp
def _no_derivative(*_):
    raise NotImplementedError("kda_step: implementation='mosaic_gpu' has no derivative; 'xla' has one")


def _step(inputs, S_BHKV, scale, lower_bound, interpret):
    """Of whole tiles: (output, new state)."""
    B, H, K, V = S_BHKV.shape
    vectors, v = inputs[:4], inputs[4]
    launch = plgpu.kernel(
        partial(_kernel, scale, lower_bound),
        out_type=jax.ShapeDtypeStruct((B, H, V), v.dtype),
        scratch_types=[
            *(plgpu.SMEM((K,), x.dtype) for x in vectors), plgpu.SMEM((TILE,), v.dtype),
            plgpu.SMEM((K, TILE), jnp.float32), plgpu.SMEM((TILE,), v.dtype),
            plgpu.Barrier(num_arrivals=len(vectors) + 1), plgpu.Barrier(),
        ],
        grid=(B, H, V // TILE), grid_names=("row", "head", "tile"),
        kernel_name="kda_step", compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    # A reference is an operand and a result in the same memory: XLA copies it only if the caller keeps it.
    state = jax.new_ref(S_BHKV)
    o_BHV = launch(*inputs, state)
    return o_BHV, jax.freeze(state)


def kda_step(q, k, v, z, beta_logits, a_log, dt_bias, S, scale, lower_bound, interpret=None):
    """`pallas_kernels.kda.kda_step` with every argument given, of at most 128 channels, S in float32.

    Channels are padded to 64 or 128, which copies the state where there are fewer. `interpret` is what
    Pallas takes under this name, to run without a GPU.
    """
    B, H, K, V = S.shape
    keys, values = up(K), up(V)
    inputs = (
        *(pad(x, B, H, keys) for x in (q, k, z)), pad(dt_bias.astype(jnp.float32), H, keys),
        pad(v, B, H, values), beta_logits, a_log,
    )  # fmt: skip
    inputs, S_BHKV = _constants((inputs, pad(S, B, H, keys, values)))
    o_BHV, S_BHKV = _step(inputs, S_BHKV, scale, lower_bound, interpret)
    return o_BHV[:, :, :V], S_BHKV[:, :, :K, :V]
