"""The released checkpoints' format: a directory with config.json and safetensors, sharded or not.

Kimi Linear's and K3's names. Tensors of the vision tower and of MTP layers are skipped, and a
warning lists them; anything else unexpected, or missing, is an error that lists it.
"""

import json
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from k3jax.axes import is_weight
from k3jax.config import ModelConfig
from k3jax.interop.released_config import from_released, to_released
from k3jax.interop.released_names import Tensor, tensors
from k3jax.parameters import shapes

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TEXT_PREFIX = "language_model."  # of the text tensors in multimodal checkpoints
SKIPPED = re.compile(r"^(vision_tower|vision_model|visual|mm_projector|multi_modal_projector|mtp)\.")
PACKED = re.compile(r"weight_(packed|scale)$")


class CheckpointError(ValueError):
    """A directory that does not hold this model: says which file or tensor, and what is wrong."""


class SkippedTensors(UserWarning):
    """Tensors that a text-only load passed over."""


def load(directory: str | Path) -> tuple[ModelConfig, Any]:
    """Reads a released checkpoint.

    Returns:
      (ModelConfig, parameters as plain float32 arrays, float64 where stored so).

    Raises:
      CheckpointError: a missing or damaged file; missing, unexpected or misshapen tensors (all are
        listed); packed weights. ReleasedConfigError: a config.json this model cannot be.
    """
    directory = Path(directory)
    cfg = from_released(_read_json(directory / CONFIG))
    wanted = {tensor.name: tensor for tensor in tensors(cfg)}
    files = _files(directory)
    names = _text_names(files, cfg)
    _compare(directory, wanted, names, files)
    params = jax.tree.map(lambda w: np.zeros(w.value.shape, w.value.dtype), shapes(cfg), is_leaf=is_weight)
    for stored_name, stored in _read_tensors(files, names):
        tensor = wanted[names[stored_name]]
        if tensor.axes == "H":  # A_log: stored in any shape, some shards pad it with heads of no one
            stored = stored.reshape(-1)[: tensor.sizes[0]]
        for part, ours in tensor.to_ours(stored):
            leaf = _at(params, part.path)
            if ours.dtype == np.float64 and leaf.dtype != np.float64:
                _put(params, part.path, leaf := leaf.astype(np.float64))
            leaf[part.index] = ours
    return cfg, jax.tree.map(jnp.asarray, params)


def save(directory: str | Path, cfg: ModelConfig, params: Any, like: str | Path | None = None) -> None:
    """Writes a released checkpoint into a new directory.

    Args:
      directory: must not exist, or be empty.
      params: plain arrays; written as float32 unless `like` says otherwise.
      like: a checkpoint of the same model whose files, names, dtypes and shapes are kept; the
        tensors that a text-only load skips are copied. Saving what was loaded is then bitwise.

    Raises:
      CheckpointError: the directory is in use, or `like` is of another model.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty: nothing is overwritten; choose another directory")
    host = jax.tree.map(np.asarray, params)
    wanted = {tensor.name: tensor for tensor in tensors(cfg)}

    def ours(tensor: Tensor) -> np.ndarray:
        return tensor.to_stored([_at(host, part.path)[part.index] for part in tensor.parts])

    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        if like is None:
            (scratch / CONFIG).write_text(json.dumps(to_released(cfg), indent=1) + "\n")
            save_file({name: np.ascontiguousarray(ours(t)) for name, t in wanted.items()}, scratch / SINGLE)
        else:
            _save_like(scratch, Path(like), cfg, wanted, ours)
        scratch.chmod(0o755)  # mkdtemp's is private
        if directory.exists():
            directory.rmdir()
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_like(scratch: Path, like: Path, cfg: ModelConfig, wanted, ours) -> None:
    files = _files(like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedTensors)  # they are copied, not lost
        names = _text_names(files, cfg)
    _compare(like, wanted, names, files)
    for extra in (CONFIG, INDEX):
        if (like / extra).exists():
            shutil.copyfile(like / extra, scratch / extra)
    for file in files:
        out = {}
        with safe_open(file, framework="numpy") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a mapping)
                out[name] = before = stored.get_tensor(name)
                if name in names:
                    tensor = wanted[names[name]]
                    now = ours(tensor).astype(before.dtype).reshape(-1)
                    out[name] = np.concatenate([now, before.reshape(-1)[now.size :]]).reshape(before.shape)
            save_file(out, scratch / file.name, metadata=stored.metadata())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: not a checkpoint directory") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def _files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: those of its index, or the single one."""
    if (directory / INDEX).exists():
        names = sorted(set(_read_json(directory / INDEX)["weight_map"].values()))
    else:
        names = [SINGLE]
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}")
    return [directory / name for name in names]


def _stored_names(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            with safe_open(file, framework="numpy") as stored:
                yield from stored.keys()
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged or cut off: {error}") from None


def _text_names(files: list[Path], cfg: ModelConfig) -> dict[str, str]:
    """Stored name -> the text model's name for it; warns about what is skipped."""
    names, skipped, packed = {}, [], []
    for stored in _stored_names(files):
        name = stored.removeprefix(TEXT_PREFIX)
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if SKIPPED.match(name) or (layer and int(layer[1]) >= cfg.depth):
            skipped.append(stored)
        elif PACKED.search(name):
            packed.append(stored)
        else:
            names[stored] = name
    if packed:
        raise CheckpointError(f"packed weights (such as MXFP4) are not read yet: {_some(packed)}")
    if skipped:
        message = f"{len(skipped)} tensors of the vision tower or of MTP layers skipped: {_some(skipped)}"
        warnings.warn(message, SkippedTensors, stacklevel=3)
    return names


def _some(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def _fits(shape: tuple[int, ...], tensor: Tensor) -> bool:
    """Whether a stored shape is this tensor's, axes of size 1 aside; A_log may be padded."""
    if tensor.axes == "H":
        return math.prod(shape) >= tensor.sizes[0]
    return [n for n in shape if n != 1] == [n for n in tensor.shape if n != 1]


def _compare(directory: Path, wanted: dict[str, Tensor], names: dict[str, str], files: list[Path]) -> None:
    found = set(names.values())
    missing, unexpected = sorted(set(wanted) - found), sorted(found - set(wanted))
    misshapen = []
    for file in files:
        with safe_open(file, framework="numpy") as stored:
            for name in sorted(set(stored.keys()) & set(names)):
                shape, tensor = tuple(stored.get_slice(name).get_shape()), wanted.get(names[name])
                if tensor is not None and not _fits(shape, tensor):
                    misshapen.append(f"{name} has shape {shape}, not {tensor.shape}")
    if missing or unexpected or misshapen:
        said = [
            f"{kind}: {_some(which)}"
            for kind, which in (("missing", missing), ("unexpected", unexpected))
            if which
        ]
        said += sorted(misshapen)
        raise CheckpointError(f"{directory} does not hold the model of its config.json; {'; '.join(said)}")


def _read_tensors(files: list[Path], names: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    for file in files:
        with safe_open(file, framework="numpy") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a mapping)
                if name in names:
                    x = stored.get_tensor(name)
                    yield name, x.astype(np.float32) if x.dtype in (ml_dtypes.bfloat16, np.float16) else x


def _at(params: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


def _put(params: Any, path: tuple[str, ...], value: Any) -> None:
    _at(params, path[:-1])[path[-1]] = value
