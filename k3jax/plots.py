"""Pictures of a run, from its records alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from k3jax.train.rundir import RunDirectory

BLUE, RED, GREY = "#2b6cb0", "#c53030", "#718096"


def draw(run: RunDirectory) -> list[Path]:
    """Draws every picture that the run's records allow; returns their paths."""
    steps = latest(run, "step")
    checks = latest(run, "validation")
    arrays = run.arrays()
    last = arrays[max(arrays)] if arrays else {}
    pictures: dict[str, tuple[bool, Callable[[Any], None]]] = {
        "loss": (bool(steps), lambda ax: _loss(ax, steps, checks)),
        "learning_rate": (bool(steps), lambda ax: _learning_rate(ax, steps)),
        "expert_load": ("load" in last and last["load"].size > 1, lambda ax: _expert_load(ax, last["load"])),
        "balance": (any("max_vio" in x for x in steps), lambda ax: _balance(ax, steps)),
        "attnres_weights": ("read" in last, lambda ax: _reads(ax, last["read"])),
        "decay_half_lives": ("half_life" in last, lambda ax: _half_lives(ax, last)),
    }
    run.plots.mkdir(exist_ok=True)
    drawn = []
    for name, (possible, paint) in pictures.items():
        if not possible:
            continue
        figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
        paint(ax)
        figure.savefig(run.plots / f"{name}.png", dpi=130)
        plt.close(figure)
        drawn.append(run.plots / f"{name}.png")
    return drawn


def latest(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    """A run's records of one kind in order of step; where a step was made twice, the later one."""
    found = {record["step"]: record for record in run.records() if record["kind"] == kind}
    return [found[step] for step in sorted(found)]


def _columns(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    have = [record for record in records if name in record]
    return [record["step"] for record in have], [record[name] for record in have]


def _loss(ax, steps, checks) -> None:
    ax.plot(*_columns(steps, "loss"), color=BLUE, lw=0.9, label="training")
    if checks:
        ax.plot(*_columns(checks, "loss"), color=RED, marker="o", ms=4, label="validation")
        ax.axhline(checks[-1]["bigram"], color=GREY, ls="--", lw=1, label="byte-bigram model")
    ax.set(xlabel="step", ylabel="nats per token", title="Loss")
    ax.legend(frameon=False)


def _learning_rate(ax, steps) -> None:
    ax.plot(*_columns(steps, "lr"), color=BLUE)
    ax.set(xlabel="step", ylabel="learning rate", title="Learning rate")
    ax.set_ylim(bottom=0)


def _expert_load(ax, load_NE) -> None:
    share = load_NE / np.maximum(load_NE.mean(axis=1, keepdims=True), 1)
    image = ax.imshow(share, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    ax.figure.colorbar(image, label="load / mean load")
    ax.set(xlabel="expert", ylabel="MoE layer", title="Expert load at the last validation")
    ax.set_yticks(range(len(share)), range(1, len(share) + 1))


def _balance(ax, steps) -> None:
    ax.plot(*_columns(steps, "max_vio"), color=RED, lw=0.9, label="worst layer")
    ax.plot(*_columns(steps, "mean_vio"), color=BLUE, lw=0.9, label="mean of layers")
    ax.set(xlabel="step", ylabel="MaxVio", title="Balance: largest load / mean load - 1")
    ax.set_yscale("log")
    ax.legend(frameon=False)


def _reads(ax, read_NS) -> None:
    shown = np.where(read_NS > 0, read_NS, np.nan)
    image = ax.imshow(
        shown.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest", origin="lower"
    )
    ax.figure.colorbar(image, label="mean weight")
    ax.set(
        xlabel="read (two a layer, then the final one)",
        ylabel="source",
        title="Attention Residuals: who reads what",
    )
    names = ["embedding", *[f"block {i}" for i in range(1, read_NS.shape[1])]]
    ax.set_yticks(range(len(names)), names)


def _half_lives(ax, last) -> None:
    layers, half_lives = last["half_life_layer"], last["half_life"]
    ax.boxplot(
        [half_lives[i].reshape(-1) for i in range(len(layers))],
        tick_labels=[str(layer) for layer in layers],
        whis=(0, 100),
        medianprops={"color": RED},
    )
    ax.set_yscale("log")
    ax.set(
        xlabel="KDA layer",
        ylabel="half-life, tokens",
        title="Decay half-lives at zero gate logits, all channels",
    )
