"""What a training step holds on each device, from shapes alone, before anything is allocated.

Nothing is compiled or run: the gradient is traced for one device's rows, and what its forward pass
leaves for the backward pass is added up. So every remat policy and every mixer is covered, one's own
included. Only `working` is a guess, and says so.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh

from k3jax.axes import MESH_AXES, Weight, is_weight, weight_shardings
from k3jax.config import AdamW, Config, ConfigError, ModelConfig, OptimConfig
from k3jax.layout import bank_size, plan
from k3jax.model import K3
from k3jax.parameters import shapes
from k3jax.segments import Segments
from k3jax.unit import Unit

# Fusion makes a module's work smaller than the sum of its live arrays, copies and loops make it larger.
# With this factor XLA's temporaries were 0.45 to 1.0 of the estimate on an H200, 0.8 to 1.8 on CPUs.
SLACK = 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: the float32 masters. gradients: theirs, twice where micro-batches add up.
      moments: of the optimiser: one array for Muon, two for AdamW.
      reports: what layers count during a step, such as histograms of router scores.
      saved: what the forward pass keeps for the backward one, sources of Attention Residuals once.
      logits: those of a micro-batch, and their gradient.
      working: the backward pass of one module at a time, an estimate.
      update: the optimiser's own work on the updates.
    """

    parameters: int
    gradients: int
    moments: int
    reports: int
    saved: int
    logits: int
    working: int
    update: int

    @property
    def total(self) -> int:
        """At the peak. Logits are gone before the stack's backward pass, activations before the update."""
        kept = self.parameters + self.gradients + self.moments + self.reports
        return kept + max(self.saved + max(self.logits, self.working), self.update)

    def lines(self, limit: int | None = None) -> list[str]:
        """For people: the total beside `limit`, the device's own, and the parts."""
        beside = "" if limit is None else f" of {human(limit)}"
        warning = ": too much" if limit is not None and self.total > limit else ""
        parts = ", ".join(f"{x.name} {human(getattr(self, x.name))}" for x in fields(self))
        return [f"about {human(self.total)}{beside} a device{warning}", parts]


def human(size: float) -> str:
    """A number of bytes: 1536 is "1.5 KiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.3g} {unit}"
    return f"{size:.0f} B"


def device_limit() -> int | None:
    """The bytes that this process may take on one of its devices; None where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def estimate(cfg: Config, devices: int) -> Memory:
    """What a training step of `cfg` needs on each of `devices` devices.

    Raises:
      ConfigError: the mesh does not fit the devices, or the rows do not divide over it.
      ValueError: a mesh axis that does not divide a weight's axis.
    """
    sizes = cfg.mesh.sizes(devices)
    shards, rows = sizes["data"] * sizes["fsdp"] * sizes["expert"], cfg.data.batch // cfg.optim.accumulate
    if rows % shards:
        at_once = f"its micro-batches of {rows} rows must divide over {shards} devices"
        raise ConfigError(f"DataConfig.batch={cfg.data.batch}: {at_once}")
    mesh: Any = AbstractMesh(tuple(sizes[name] for name in MESH_AXES), MESH_AXES)
    boxes = shapes(cfg.model)
    places = jax.tree.leaves(weight_shardings(boxes, mesh))
    weights = jax.tree.leaves(boxes, is_leaf=is_weight)
    mine = [4 * math.prod(place.shard_shape(w.value.shape)) for w, place in zip(weights, places, strict=True)]
    moments = sum(size * _moments(cfg.optim, w) for w, size in zip(weights, mine, strict=True))
    largest = max(size for w, size in zip(weights, mine, strict=True) if w.writes)

    # One device's own rows, on no mesh: what it computes is what any other does.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        rows, length = rows // shards, cfg.data.length
        saved, reports = _forward(cfg.model, boxes, rows, length)
        working = max(_modules(cfg.model, sizes["fsdp"] > 1, rows, length))
    wide = 8 if cfg.model.dtype == "float64" else 4
    times = 1 if cfg.optim.accumulate == 1 else 2
    return Memory(
        parameters=sum(mine),
        gradients=times * sum(mine),
        moments=moments,
        reports=times * reports,
        saved=saved,
        logits=2 * rows * length * cfg.model.vocabulary * wide,
        working=working,
        update=sum(mine) + 2 * largest,  # the updates; an array's momentum and the products of its matrices
    )


def _moments(cfg: OptimConfig, w: Weight) -> int:
    """How many arrays like `w` the optimiser keeps."""
    two = isinstance(cfg.matrices, AdamW)
    return {"muon": 2 if two else 1, "adamw": 2, "balance": 0}[w.rule or "adamw"]


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _apply(module: nn.Module, params: Any, *inputs: Any) -> Any:
    return module.apply({"params": params}, *inputs)


def _forward(cfg: ModelConfig, boxes: Any, rows: int, length: int) -> tuple[int, int]:
    """(bytes kept for the backward pass beside the inputs, bytes of the layers' reports)."""
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def forward(params, tokens, segment_ids):
        def run(params):
            out = _apply(K3(cfg), params, tokens, segment_ids)
            return (out.logits, out.penalty), out.reports

        _, pull, reports = jax.vjp(run, params, has_aux=True)
        inputs = {id(x) for x in jax.tree.leaves((params, tokens, segment_ids))}
        return [x for x in jax.tree.leaves(pull) if id(x) not in inputs], reports

    saved, reports = jax.eval_shape(forward, nn.meta.unbox(boxes), ids, ids)
    return _bytes(saved), _bytes(reports)


def _modules(cfg: ModelConfig, gathered: bool, rows: int, length: int) -> Iterator[int]:
    """Bytes that the backward pass of each kind of module takes for itself."""
    dtype = jnp.dtype(cfg.dtype or "float32")
    wide = jnp.promote_types(dtype, jnp.float32)
    shape = (bank_size(cfg), rows, length, cfg.width)
    bank, y = (jax.ShapeDtypeStruct(shape[at:], dtype) for at in (0, 1))
    zeros = lambda dtype: jnp.zeros(shape[1:3], dtype)
    segments = jax.eval_shape(lambda: Segments(zeros(jnp.int32), zeros(jnp.bool_)))
    carried = math.prod(shape) * (dtype.itemsize + wide.itemsize)  # the sources, and their gradient
    leaves = [leaf for group in plan(cfg) for leaf in group.leaves]
    for part in {part: None for leaf in leaves for part in (leaf.mixer, leaf.channel)}:
        unit, place = Unit(part, cfg), (jnp.bool_(True), jnp.int32(0), None)
        token = jax.ShapeDtypeStruct((shape[0], 1, 1, cfg.width), dtype)
        init = lambda bank, unit=unit, place=place: unit.init(jax.random.key(0), bank, *place, None)
        params = nn.meta.unbox(jax.eval_shape(init, token)["params"])

        def backward(params, bank, segments, cotangents, unit=unit, place=place):
            run = lambda params, bank: _apply(unit, params, bank, *place, segments)
            _, pull, _ = jax.vjp(run, params, bank, has_aux=True)
            return pull(cotangents)

        cotangents = (y, jax.ShapeDtypeStruct((), wide))
        traced = jax.make_jaxpr(backward)(params, bank, segments, cotangents)
        # Cut parameters are put together for the module at hand.
        yield carried + SLACK * live_bytes(traced.jaxpr) + gathered * _bytes(params)


def live_bytes(jaxpr: Jaxpr) -> int:
    """The most bytes alive at once beside the inputs, if every operation wrote its result in turn."""
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last |= {v: i for v in eqn.invars if not isinstance(v, Literal)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}
    alive: dict[Any, int] = {}
    now = most = 0
    for i, eqn in enumerate(jaxpr.eqns):
        inner = max((live_bytes(x) for x in _inside(eqn.params)), default=0)
        for v in eqn.outvars:
            if v in last:  # what nothing reads is not made
                alive[v] = _bytes(v.aval)
                now += alive[v]
        most = max(most, now + inner)
        for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
            if last[v] == i:
                now -= alive.pop(v, 0)  # an input is not ours to drop
    return most


def _inside(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The programs that an operation runs: the body of a loop, the branches of a choice."""
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, Jaxpr):
                yield x
