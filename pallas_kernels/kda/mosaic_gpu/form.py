"""What a call gives the kernels: raw inputs, as `kda_gated` takes them, or finished ones, as `kda`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.decay import HALF, QUARTER
from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, LOG2E, MATRIX, ROWS, columns, load

UNIT = 2.0**-10  # of log-decays to base 2 in float16, so that slow ones are not subnormal
LOWEST = -26.7  # nats: e^-26.7 is nothing beside any other term, and e^(3 x 26.7) fits bfloat16
SMALLEST = 1e-12  # write strength: what it writes is nothing, and its gradient is divided by it


class Raw(NamedTuple):
    """Queries and keys to be normalised, logits of write strengths and of bounded gates."""

    lower_bound: float

    raw = True
    own = QUARTER  # tokens of the tiles in which all pairs are one product; a floor of -5 allows 16
    joined = (QUARTER, HALF)  # tokens of the blocks whose pairs of blocks have a product each
    together = HALF  # tokens of blocks whose pairs are together in gradients

    def gates(self, z_BTHK, beta_logits_BTH, a_log_H, dt_bias_HK):
        """(what the kernels make decays of, beta, each head's rate, its bias)"""
        wide = lambda x: x.astype(jnp.float32)
        return z_BTHK, jax.nn.sigmoid(wide(beta_logits_BTH)), jnp.exp(wide(a_log_H)), wide(dt_bias_HK)

    def gradients(self, dz_BTHK, beta_dbeta_BTH, beta_BTH, drate_H):
        """Of the arguments of `gates`, from those of logits, and of beta times beta."""
        d_beta_logits_BTH = beta_dbeta_BTH * (1 - beta_BTH)  # beta's logit moves it by beta (1 - beta)
        return dz_BTHK, d_beta_logits_BTH, drate_H, jnp.sum(dz_BTHK, axis=(0, 1), dtype=jnp.float32)

    def steps(self, z_s, bias_K, rate):
        """Log-decays in units; 1 / x is the square of rsqrt(x)."""
        slope, part = rate * -LOG2E, UNIT / (-self.lower_bound * LOG2E)
        x = lax.rsqrt(part + jnp.exp2(load(z_s) * slope + columns(bias_K * slope + math.log2(part))))
        return x * -x

    def through(self, dg, z_s, bias_K, rate):
        """(gradient of logits, that of the rate for each token) from that of log-decays."""
        z = load(z_s) + columns(bias_K)
        e = jnp.minimum(jnp.exp2(z * (rate * -LOG2E)), 1e37)
        s = jnp.square(lax.rsqrt(1.0 + e))
        dz = dg * (s * (s * e)) * (rate * self.lower_bound)
        return dz, jnp.sum(dz * z, axis=1)


class Finished(NamedTuple):
    """Queries and keys as they are, log-decays without a floor, write strengths."""

    raw = False
    own = 4
    joined = (4, 8, QUARTER, HALF)
    together = QUARTER

    def gates(self, g_BTHK, beta_BTH):
        """As `Raw.gates`; log-decays in units, float16 in the guise of bfloat16."""
        g = jnp.maximum(g_BTHK.astype(jnp.float32), LOWEST)
        bits = lax.bitcast_convert_type((g * (LOG2E / UNIT)).astype(jnp.float16), jnp.bfloat16)
        H, K = g_BTHK.shape[2:]
        beta = jnp.maximum(beta_BTH.astype(jnp.float32), SMALLEST)
        return bits, beta, jnp.ones(H), jnp.zeros((H, K))

    def gradients(self, dg_BTHK, beta_dbeta_BTH, beta_BTH, drate_H):
        return dg_BTHK, jnp.where(beta_BTH > 0, beta_dbeta_BTH / beta_BTH, 0)

    def steps(self, z_s, bias_K, rate):
        return lax.bitcast_convert_type(plgpu.layout_cast(z_s[...], MATRIX), jnp.float16)

    def through(self, dg, z_s, bias_K, rate):
        return dg, plgpu.layout_cast(jnp.zeros(CHUNK, jnp.float32), ROWS)


Form = Raw | Finished
