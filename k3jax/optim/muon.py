"""Per-Head Muon: momentum, orthogonalised block by block, as an Optax transformation.

Which axes of an array make a matrix is read off the weight's own declaration, so a stack of layers,
a row of heads and a crowd of experts are one batched product: nothing loops over them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from k3jax import config
from k3jax.axes import Weight, is_weight, weight_cuts

# p(s) = a s + b s^3 + c s^5, applied five times, takes 0.003..1 to 0.68..1.20 (Jordan's choice).
QUINTIC = (3.4445, -4.7750, 2.0315)
# Added to a matrix's norm, so that a zero gradient gives a zero update.
EPS = 1e-8


@dataclass(frozen=True)
class Blocks:
    """Positions of an array's axes: those that make one matrix, and those along which matrices lie."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, w: Weight, split: str) -> "Blocks":
        """The matrices of `w` under config.Muon's `split`.

        Raises:
          ValueError: taking the heads apart leaves a matrix without rows or columns.
        """
        apart, heads = set(w.apart), {"heads"}
        apart = {"matrix": apart - heads, "head": apart, "every_head": apart | heads}[split]
        place = lambda names: tuple(w.names.index(name) for name in names if name not in apart)
        rows, columns = place(w.reads), place(w.writes)
        if not rows or not columns:
            shown = f"reads {list(w.reads)}, writes {list(w.writes)}, apart {sorted(apart)}"
            raise ValueError(f"{shown}: one side of Muon's matrix is empty; rule 'adamw' fits")
        batch = tuple(i for i in range(len(w.names)) if i not in rows + columns)
        return cls(batch, rows, columns)

    def sizes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """(batch sizes, rows, columns) of an array of this shape."""
        rows, columns = (math.prod(shape[i] for i in axes) for axes in (self.rows, self.columns))
        return tuple(shape[i] for i in self.batch), rows, columns

    def gather(self, x: jax.Array) -> jax.Array:
        """x as [*batch, rows, columns]. Batch axes stay separate: merging them would unshard them."""
        batch, rows, columns = self.sizes(x.shape)
        return x.transpose(self.batch + self.rows + self.columns).reshape(*batch, rows, columns)

    def scatter(self, y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `gather` for an array of this shape."""
        order = self.batch + self.rows + self.columns
        back = tuple(order.index(i) for i in range(len(order)))
        return y.reshape(tuple(shape[i] for i in order)).transpose(back)


def per_weight(make: Callable[[Weight], Any], weights: Any) -> Any:
    """The tree of make(weight) for a tree of boxed weights.

    Raises:
      ValueError: a leaf that is not a Weight, or one that `make` refuses; the message has its path.
    """

    def named(path, w):
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        if not is_weight(w):
            raise ValueError(f"{where}: a {type(w).__name__}, not a Weight: nothing says who moves it")
        try:
            return make(w)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    return jax.tree_util.tree_map_with_path(named, weights, is_leaf=is_weight)


def newton_schulz(x: jax.Array, steps: int, operand: Any, pin: Callable = lambda x: x) -> jax.Array:
    """Drives the singular values of every matrix in x towards 1 by Jordan's quintic iteration.

    Args:
      x: [..., rows, columns], float32 or wider.
      steps: how often; one rolled loop whatever the number.
      operand: the dtype in which products take their operands; they sum in x's dtype.
      pin: places the iterate on the current mesh, at the start of every step.

    Returns:
      An array like x, with U S V^T for each of its matrices U S0 V^T; zero where a matrix is zero.
    """
    a, b, c = QUINTIC
    # Accelerators round float32 operands to fewer bits unless told that float32 is meant.
    exact = None if operand == jnp.bfloat16 else jax.lax.Precision.HIGHEST

    def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        left, right = left.astype(operand), right.astype(operand)
        return jnp.einsum(equation, left, right, precision=exact, preferred_element_type=x.dtype)

    # p(X) = (a + b G + c G^2) X with G = X X^T, or the mirror image with X^T X: whichever is smaller.
    if x.shape[-2] <= x.shape[-1]:
        gram, apply = "...ij,...kj->...ik", lambda g, x: product("...ik,...kj->...ij", g, x)
    else:
        gram, apply = "...ki,...kj->...ij", lambda g, x: product("...ik,...kj->...ij", x, g)

    def step(_, x):
        x = pin(x)
        g = product(gram, x, x)
        return a * x + apply(b * g + c * product("...ik,...kj->...ij", g, g), x)

    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    return jax.lax.fori_loop(0, steps, step, x / (norm + EPS))


def placement(w: Weight, blocks: Blocks, mesh: jax.sharding.AbstractMesh) -> PartitionSpec:
    """Where the `gather`ed matrices of `w` are iterated, so that little or nothing travels.

    A mesh axis that cuts matrices goes to the first batch axis it divides: whole matrices are spread
    over devices. Where there is none it cuts the longer side, and a step sums Gram matrices only.
    (Left where the weight has it, a step moves up to three arrays of the weight's size.)
    """
    cuts = [[axis for axis in axes if mesh.shape[axis] > 1] for axes in weight_cuts(w)]
    batch, rows, columns = blocks.sizes(w.value.shape)
    sizes = (*batch, rows, columns)
    longer = len(batch) + (columns >= rows)
    places = [*(cuts[i] for i in blocks.batch), [], []]
    for axis in (axis for i in blocks.rows + blocks.columns for axis in cuts[i]):
        for i in (*range(len(batch)), longer):
            if sizes[i] % math.prod(mesh.shape[name] for name in (*places[i], axis)) == 0:
                places[i].append(axis)
                break
    return PartitionSpec(*(tuple(names) or None for names in places))


def _orthogonalise(x: jax.Array, w: Weight, blocks: Blocks, cfg: config.Muon) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    pin = lambda y: y
    if not mesh.empty:
        # Pinned within the loop, as sharding otherwise flows into it from the weight's own cut.
        pin = partial(jax.lax.with_sharding_constraint, shardings=placement(w, blocks, mesh))
    operand = x.dtype if x.dtype == jnp.float64 else jnp.dtype(cfg.precision)
    y = newton_schulz(blocks.gather(x), cfg.steps, operand, pin)
    # U V^T has RMS max(rows, columns)^-1/2; this makes it cfg.scale, AdamW's (Moonlight, section 2.2).
    _, rows, columns = blocks.sizes(x.shape)
    return cfg.scale * math.sqrt(max(rows, columns)) * blocks.scatter(y, x.shape)


def muon(cfg: config.Muon, weights: Any) -> optax.GradientTransformation:
    """Muon in Moonlight's form (arXiv 2502.16982), head by head as the K3 report's section 2.5 has it.

    m <- momentum m + g, and the update is scale sqrt(max(rows, columns)) NS(g + momentum m) for each
    block. It points uphill and knows no rate and no decay: `k3jax.optim.build` adds them. Momentum is
    in the parameters' dtype, which should be float32 or wider. A float64 parameter stays so.

    Args:
      cfg: momentum, steps, `split`, `scale` and the products' operand dtype.
      weights: the boxed weights (values may be ShapeDtypeStructs), a tree like the parameters'.

    Raises:
      ValueError: a leaf is not a Weight or has no matrix under cfg.split; names it.
    """

    def prepare(w: Weight) -> Callable[[jax.Array], jax.Array]:
        shape = jax.ShapeDtypeStruct(w.value.shape, w.value.dtype)  # keeps no array alive
        return partial(_orthogonalise, w=w.replace(value=shape), blocks=Blocks.of(w, cfg.split), cfg=cfg)

    prepared = per_weight(prepare, weights)
    orthogonalise = optax.stateless(lambda updates, _: jax.tree.map(lambda f, x: f(x), prepared, updates))
    return optax.chain(optax.trace(cfg.momentum, nesterov=True), orthogonalise)
