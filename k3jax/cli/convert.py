"""Rewrite a released checkpoint: a new directory with config.json and safetensors.

    k3jax convert SOURCE TARGET
    k3jax convert SOURCE TARGET --like RELEASED

Without --like everything goes into one file of float32; with it, files, names and dtypes are those of
RELEASED, and its tensors that are no part of a text model are copied.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import jax

from k3jax.config import ModelConfig
from k3jax.interop import huggingface


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a released checkpoint's directory")
    parser.add_argument("target", metavar="TARGET", type=Path, help="a directory that is new or empty")
    parser.add_argument(
        "--like", metavar="DIR", type=Path, help="a released checkpoint to follow in files and dtypes"
    )


def run(args: argparse.Namespace) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", huggingface.SkippedTensors)
        cfg, params = read(args.source)
    for warning in caught:
        if warning.category is huggingface.SkippedTensors:
            print(f"skipped: {warning.message}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    huggingface.save(args.target, cfg, params, args.like)
    print(f"{args.target}: {sum(x.size for x in jax.tree.leaves(params)):,} parameters of {cfg.depth} layers")


def read(source: Path) -> tuple[ModelConfig, Any]:
    """(the model, its parameters as plain arrays) in a directory, by the format it has.

    Raises:
      CheckpointError: none that is known.
    """
    return huggingface.load(source)
