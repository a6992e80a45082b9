"""What every array axis is called, where it is cut, and the weights that know their own axes.

No other file names a mesh axis. One string declares a weight, and everything about it follows:

    "D->[H]K"   reads D, writes H x K: shape, einsum, sharding, and one Muon matrix D x K per head
    "E:L->F"    one L x F matrix per expert
    "HV->D"     one matrix of (H V) rows
    "HK"        no arrow: not a matrix
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# letter: (name, the mesh axes that cut it)
AXES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "B": ("batch", ("data", "fsdp", "expert")),
    "T": ("length", ("context",)),
    "D": ("embed", ()),
    "H": ("heads", ("tensor",)),
    "K": ("key", ()),
    "V": ("value", ()),
    "R": ("rank", ()),
    "C": ("compressed", ()),  # MLA's key-value latent
    "A": ("latent_and_shared", ()),  # MLA's latent beside the shared key, as one projection writes them
    "E": ("experts", ("expert",)),
    "L": ("latent", ()),
    "F": ("hidden", ("tensor",)),
    "Y": ("vocabulary", ("tensor",)),
    "W": ("taps", ()),
    "N": ("layers", ()),
}
# A matrix is cut over fsdp along the first of these that it has; vectors and taps stay whole.
FSDP_ORDER = ("experts", "embed", "latent", "rank", "compressed", "heads")
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")

Rule = Literal["muon", "adamw", "balance"]


class Init(Protocol):
    """What a weight is drawn from: hashable, and its str is what `k3jax params` prints.

    `elementwise` promises that entry i of a flat draw depends on the key and i alone, so that a long
    draw begins with every shorter one.
    """

    @property
    def elementwise(self) -> bool: ...

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array: ...


@dataclass(frozen=True)
class Normal:
    """N(0, std^2), whatever the fan-in."""

    std: float
    elementwise = True

    def __call__(self, key, shape, dtype):
        return self.std * jax.random.normal(key, shape, dtype)

    def __str__(self):
        return f"N(0, {self.std:g}^2)"


@dataclass(frozen=True)
class Uniform:
    """Uniform on [-bound, bound)."""

    bound: float
    elementwise = True

    def __call__(self, key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -self.bound, self.bound)

    def __str__(self):
        return f"U(-{self.bound:g}, {self.bound:g})"


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float
    elementwise = True

    def __call__(self, key, shape, dtype):
        return jnp.full(shape, self.value, dtype)

    def __str__(self):
        return f"{self.value:g}"


class Weight(nn.LogicallyPartitioned):
    """A boxed parameter that knows its axes, its matrix and who moves it.

    Attributes beside those of the box:
      reads, writes: names of the axes a matrix contracts and makes; empty if it is not a matrix.
      apart: names of the axes along which matrices stand side by side.
      rule: "muon", "adamw" or "balance" (moved by its balancing rule alone).
      decayed: whether AdamW decays it (Muon always does).
      init: what it is drawn from.
    """

    reads: tuple[str, ...] = struct.field(default=(), pytree_node=False)
    writes: tuple[str, ...] = struct.field(default=(), pytree_node=False)
    apart: tuple[str, ...] = struct.field(default=(), pytree_node=False)
    rule: Rule | None = struct.field(default=None, pytree_node=False)
    decayed: bool = struct.field(default=False, pytree_node=False)
    init: Init = struct.field(default=Constant(0.0), pytree_node=False)


def is_weight(x: object) -> bool:
    return isinstance(x, Weight)


@dataclass(frozen=True)
class Spec:
    """A parsed weight string."""

    letters: str  # the array's axes in order
    reads: str
    writes: str
    apart: str  # the axes along which matrices stand side by side

    @classmethod
    def parse(cls, text: str) -> "Spec":
        each, _, rest = text.rpartition(":")
        blocks = "".join(piece.split("]")[0] for piece in rest.split("[")[1:])
        rest = rest.replace("[", "").replace("]", "")
        reads, arrow, writes = rest.partition("->")
        letters = each + reads + writes
        if set(letters) - set(AXES) or len(set(letters)) != len(letters):
            raise ValueError(f"weight {text!r}: each axis once, out of {''.join(AXES)}")
        return cls(letters, reads if arrow else "", writes, each + blocks)

    def einsum(self) -> str:
        return f"BT{self.reads},{self.letters}->BT{self.writes}"


def _names(letters: str) -> tuple[str, ...]:
    return tuple(AXES[c][0] for c in letters)


def make_weight(
    key: jax.Array,
    spec: str,
    sizes: Mapping[str, int],
    init: Init,
    rule: Rule | None = None,
    *,
    decayed: bool = False,
) -> Weight:
    """A float32 weight drawn from `init`; a matrix goes to Muon unless `rule` says otherwise.

    Raises:
      ValueError: a string that does not parse, or no `rule` for what is not a matrix.
    """
    parsed = Spec.parse(spec)
    if rule is None and not parsed.writes:
        raise ValueError(f"weight {spec!r} is not a matrix: name its rule, 'adamw' or 'balance'")
    shape = tuple(sizes[c] for c in parsed.letters)
    w = Weight(
        jax.ShapeDtypeStruct(shape, jnp.float32),
        _names(parsed.letters),
        reads=_names(parsed.reads),
        writes=_names(parsed.writes),
        apart=_names(parsed.apart),
        rule=rule or "muon",
        decayed=decayed or (rule or "muon") == "muon",
        init=init,
    )
    return draw(key, w)


def stacked(w: Weight, layers: tuple[int, ...]) -> Weight:
    """The box of shapes of `layers` such weights, stacked in front."""
    names = (AXES["N"][0],) * len(layers) + w.names
    return w.replace(names=names, value=jax.ShapeDtypeStruct((*layers, *w.value.shape), w.value.dtype))


def draw(key: jax.Array, w: Weight) -> Weight:
    """A box of shapes with values drawn; on the current mesh, each device draws its own share."""
    shape, dtype = w.value.shape, w.value.dtype
    if isinstance(key, Tracer):  # inside eval_shape or jit: who calls decides where it goes
        return w.replace(value=w.init(key, shape, dtype))
    mesh = jax.sharding.get_mesh()
    if not mesh.empty and mesh.size > 1:
        return w.replace(value=_draw(w.init, shape, dtype, weight_shardings(w, mesh))(key))
    if not w.init.elementwise:
        return w.replace(value=_draw(w.init, shape, dtype, None)(key))
    # A model has a hundred shapes; rounded up, it has a dozen draws to compile.
    size = math.prod(shape)
    flat = _draw(w.init, (1 << max(size - 1, 255).bit_length(),), dtype, None)(key)
    return w.replace(value=jnp.asarray(np.asarray(flat)[:size].reshape(shape)))


@cache
def _draw(init: Init, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> Callable:
    """One compiled draw for all weights that are alike."""
    return jax.jit(lambda key: init(key, shape, dtype), out_shardings=sharding)


def weight(
    module: nn.Module, name: str, spec: str, sizes: Mapping[str, int], init: Init, rule=None, **kw
) -> Any:
    """Declares `make_weight(...)` as a parameter of `module` and returns its array."""
    # Flax compares a parameter that is there with what `init` would give: the shape is all it needs.
    init = init if module.is_initializing() else Constant(0.0)
    return module.param(name, lambda key: make_weight(key, spec, sizes, init, rule, **kw))


def project(
    module: nn.Module,
    name: str,
    spec: str,
    sizes: Mapping[str, int],
    init: Init,
    x_BTD,
    rule=None,
    precision=None,
):
    """x through the linear map `spec`, computed in x's dtype.

    What fsdp cuts is gathered here, after the cast: rows stay where they are, and weights come.
    """
    parsed = Spec.parse(spec)
    w = shard(weight(module, name, spec, sizes, init, rule).astype(x_BTD.dtype), parsed.letters)
    return jnp.einsum(parsed.einsum(), x_BTD, w, precision=precision)


# ---- meshes ----


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (all by default) with the axes of MESH_AXES, sizes as given."""
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes[name] for name in MESH_AXES)
    if math.prod(shape) != len(devices):
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh {shown} has {math.prod(shape)} places for {len(devices)} devices")
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES)


def weight_cuts(w: Weight) -> tuple[tuple[str, ...], ...]:
    """The mesh axes over each axis of a weight: AXES' own, and fsdp along its first FSDP_ORDER axis."""
    cuts: dict[Any, tuple[str, ...]] = dict(AXES.values())
    matrix = bool(w.writes) or AXES["Y"][0] in w.names
    over_fsdp = next((name for name in FSDP_ORDER if name in w.names), None) if matrix else None
    return tuple(cuts[name] + (("fsdp",) if name == over_fsdp else ()) for name in w.names)


def weight_shardings(weights: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each boxed weight.

    Raises:
      ValueError: a mesh axis does not divide the weight's axis; names both.
    """

    def sharding(path, w: Weight) -> NamedSharding:
        cuts = weight_cuts(w)
        for name, size, axes in zip(w.names, w.value.shape, cuts, strict=True):
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                where = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(f"{where}: axis {name}={size} does not divide over {'x'.join(axes)}={parts}")
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in cuts)))

    return jax.tree_util.tree_map_with_path(sharding, weights, is_leaf=is_weight)


def partition(letters: str) -> PartitionSpec:
    """The PartitionSpec of an activation; `_` is an axis that is never cut."""
    return PartitionSpec(*(AXES[c][1] or None if c != "_" else None for c in letters))


def least(letter: str) -> int:
    """The smallest size of an activation's axis that the current mesh divides."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in AXES[letter][1])


def shard(x: jax.Array, letters: str) -> jax.Array:
    """Pins x to its axes' places on the current mesh; does nothing where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(letters))
