"""The output gate that KDA and MLA share."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.axes import Normal, project
from k3jax.config import FullRank, Gate, LowRank, NoGate


def gated(module: nn.Module, gate: Gate, sizes, std: float, x_BTD, y_BTHV):
    """y times the sigmoid of a projection of x, channel by channel (K3 report, eqs. 6 and 7).

    y may be in a higher precision than x; the product is made in it and returned in x's dtype.
    """
    sizes, init = dict(sizes), Normal(std)
    match gate:
        case NoGate():
            return y_BTHV.astype(x_BTD.dtype)
        case FullRank():
            z_BTHV = project(module, "gate", "D->HV", sizes, init, x_BTD)
        case LowRank(rank):
            sizes["R"] = rank
            z_BTR = project(module, "gate_down", "D->R", sizes, init, x_BTD)
            z_BTHV = project(module, "gate_up", "R->HV", sizes, init, z_BTR)
    wide = jnp.promote_types(y_BTHV.dtype, jnp.float32)
    return (y_BTHV.astype(wide) * jax.nn.sigmoid(z_BTHV.astype(wide))).astype(x_BTD.dtype)
