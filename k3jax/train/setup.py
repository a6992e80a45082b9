"""From a config to what a run works with: mesh, data, optimiser, compiled steps."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from k3jax.axes import make_mesh, partition
from k3jax.config import Config, ConfigError, KdaConfig, MlaConfig, MoeConfig
from k3jax.data import corpus
from k3jax.data.loader import TrainStream, in_batches, train_stream, validation_rows
from k3jax.data.tokens import VOCABULARY
from k3jax.flops import model_flops
from k3jax.layout import describe
from k3jax.memory import device_limit, estimate
from k3jax.optim.build import build
from k3jax.parameters import counts, shapes
from k3jax.train.loss import Sums
from k3jax.train.state import TrainState, abstract
from k3jax.train.step import compiler_options, evaluate_step, train_step
from pallas_kernels.attention import api as attention
from pallas_kernels.grouped_matmul import api as grouped_matmul
from pallas_kernels.kda import api as kda


@dataclass(frozen=True)
class Setup:
    """What a run works with. Batches are cut over the mesh by rows, each process bringing its own."""

    cfg: Config
    mesh: Mesh
    manifest: corpus.Manifest
    optimiser: optax.GradientTransformation
    state: TrainState  # shapes, dtypes and places

    def compile_step(self) -> Callable[[TrainState, Any], tuple[TrainState, Any]]:
        """The training step, compiled once for the only shapes and places it will see."""
        step = jax.jit(partial(train_step, self.cfg, self.optimiser), donate_argnums=0)
        return self._compile(step, self.state, self._batch(self.cfg.data.batch))

    def compile_evaluation(self) -> Callable[[Any, Any], Sums]:
        """`evaluate_step` on micro-batches of validation rows."""
        step = jax.jit(partial(evaluate_step, self.cfg.model))
        return self._compile(step, self.state.params, self._batch(self.rows_at_once))

    def _compile(self, step: Any, *shapes: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return step.lower(*shapes).compile(compiler_options())

    @property
    def rows_at_once(self) -> int:
        """Rows of one micro-batch, over all processes."""
        return self.cfg.data.batch // self.cfg.optim.accumulate

    def _batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        cut = NamedSharding(self.mesh, partition("BT"))
        shape = (rows, self.cfg.data.length)
        whole = dict.fromkeys(("tokens", "targets", "segment_ids"), np.int32) | {"weights": np.float32}
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=cut) for name, dtype in whole.items()}

    def stream(self) -> TrainStream:
        return train_stream(
            self.cfg.data, self.manifest, process=jax.process_index(), processes=jax.process_count()
        )

    def facts(self) -> dict[str, Any]:
        """What will run and where, for run.json and the terminal."""
        cfg = self.cfg
        count = counts(cfg.model)
        devices = jax.devices()
        kind = devices[0].device_kind
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items() if size > 1)
        train = sum(document.size for document in self.manifest.train)
        held_out = sum(document.size for document in self.manifest.held_out)
        return {
            "model": f"{count.total:,} parameters, {count.active:,} active per token",
            "layers": describe(cfg.model),
            "devices": f"{len(devices)} x {kind} ({jax.default_backend()}), processes: {jax.process_count()}",
            "mesh": sizes or "one device",
            "compute": f"{cfg.model.dtype or 'float32'} over float32 masters, remat {cfg.model.remat}",
            "implementations": [f"{op}: {name}" for op, name in self._implementations().items()],
            "memory": estimate(cfg, len(devices)).lines(device_limit()),
            "work": model_flops(cfg.model, cfg.data.length).lines(),
            "data": f"{len(self.manifest.train)} files, {train:,} bytes; held out: "
            f"{len(self.manifest.held_out)} files, {held_out:,} bytes; digest {self.manifest.digest[:12]}",
        }

    def _implementations(self) -> dict[str, str]:
        """Those of `implementations`, and how KDA's cuts the rows of a device where heads are few."""
        chosen = implementations(self.cfg)
        heads = {
            part.heads for layer in self.cfg.model.layers for part in layer if isinstance(part, KdaConfig)
        }
        if heads:
            name, who = chosen["kda"].split(" ", 1)
            cut, whole = NamedSharding(self.mesh, partition("BTH")), (self.rows_at_once, self.cfg.data.length)
            counts = {kda.pieces(name, *cut.shard_shape((*whole, H))) for H in heads}
            if counts != {1}:
                shown = " or ".join(map(str, sorted(counts)))
                chosen["kda"] = f"{name}, each row in {shown} pieces side by side {who}"
        return chosen

    def on_mesh(self, rows: Any) -> Any:
        """This process's rows as its part of global arrays."""
        cut = NamedSharding(self.mesh, partition("BT"))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(cut, x), rows)

    def validation(self) -> list[Any]:
        """The validation rows in micro-batches, on the mesh."""
        rows = self.validation_rows()
        size = self.rows_at_once // jax.process_count()
        return [self.on_mesh(batch) for batch in in_batches(rows, size)]

    def validation_rows(self) -> Any:
        count, processes = self.cfg.run.evaluate_rows, jax.process_count()
        return validation_rows(
            self.cfg.data, self.manifest, count, process=jax.process_index(), processes=processes
        )


def prepare(cfg: Config) -> Setup:
    """Checks everything that can be checked before compiling, and reads the corpus.

    Raises:
      ConfigError: settings that do not fit the devices, the processes or the data, an implementation
        that is not built, a weight that the mesh does not divide. DataError: a corpus not there.
    """
    sizes = cfg.mesh.sizes(jax.device_count())
    if cfg.model.vocabulary < VOCABULARY:
        raise ConfigError(
            f"ModelConfig.vocabulary={cfg.model.vocabulary}: bytes and the begin token need {VOCABULARY}"
        )
    rows, shards = cfg.data.batch // cfg.optim.accumulate, sizes["data"] * sizes["fsdp"] * sizes["expert"]
    if rows % shards:
        raise ConfigError(
            f"DataConfig.batch={cfg.data.batch}: its micro-batches of {rows} rows must divide over "
            f"data x fsdp x expert = {shards} devices"
        )
    if cfg.data.batch % jax.process_count():
        raise ConfigError(f"DataConfig.batch={cfg.data.batch}: a multiple of {jax.process_count()} processes")
    try:
        implementations(cfg)
        mesh = make_mesh(sizes)
        optimiser = build(cfg.optim, shapes(cfg.model), cfg.run.steps)
        state = abstract(cfg, optimiser, mesh)
    except ValueError as error:  # an op, a weight or the optimiser says what does not fit
        raise ConfigError(str(error)) from error
    return Setup(cfg, mesh, corpus.describe(cfg.data), optimiser, state)


def implementations(cfg: Config) -> dict[str, str]:
    """The implementation of each op that will run here, and who chose it.

    Raises:
      ValueError: one that is asked for is not built.
    """
    dtype = cfg.model.dtype or "float32"

    def op_of(part: Any) -> tuple[str, str] | None:
        """(the op that a layer's part calls, the implementation that runs it)"""
        match part:
            case KdaConfig():
                sizes = {"key": part.key, "value": part.value, "dtypes": [dtype]}
                return "kda", kda.choose(part.implementation, **sizes)
            case MlaConfig():
                return "attention", attention.choose(part.implementation)
            case MoeConfig():
                return "grouped_matmul", grouped_matmul.choose(part.implementation)
        return None

    chosen = {}
    for part in {part for layer in cfg.model.layers for part in layer}:
        if (found := op_of(part)) is not None:
            op, name = found
            who = "asked for" if part.implementation else f"best for {jax.default_backend()}"
            chosen[op] = f"{name} ({who})"
    return dict(sorted(chosen.items()))
