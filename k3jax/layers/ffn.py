"""The dense gated MLP."""

from flax import linen as nn

from k3jax.axes import Normal, project
from k3jax.config import Activation
from k3jax.layers.activations import glu


class GLU(nn.Module):
    """W_down of a gated unit over `hidden` channels."""

    hidden: int
    activation: Activation
    width: int
    std: float

    @nn.compact
    def __call__(self, x_BTD):
        sizes, init = dict(D=self.width, F=self.hidden), Normal(self.std)
        gate_BTF = project(self, "gate", "D->F", sizes, init, x_BTD)
        up_BTF = project(self, "up", "D->F", sizes, init, x_BTD)
        return project(self, "down", "F->D", sizes, init, glu(self.activation, gate_BTF, up_BTF))
