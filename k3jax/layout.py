"""Depth as data: which layers are alike, and which runs of them can be one scanned body."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from k3jax.config import BlockAttnRes, FullAttnRes, ModelConfig, Plain


@dataclass(frozen=True)
class Leaf:
    """Equal layers whose parameters are stacked and whose body is compiled once.

    Attributes:
      name: the number of its first layer (from 1) and its parts; the key of its parameters.
      mixer, channel: the config of its parts.
      first: its first layer, from 0. count: how many follow each other.
      times, stride: how often that run recurs, and how many layers apart.
    """

    name: str
    mixer: Any
    channel: Any
    first: int
    count: int
    times: int
    stride: int

    @property
    def repeats(self) -> tuple[int, ...]:
        """The leading axes of its stacked parameters: recurrences, then neighbours; none of size 1."""
        return tuple(n for n in (self.times, self.count) if n > 1)

    @property
    def layers(self) -> np.ndarray:
        """The layer numbers, from 0, in the shape of `repeats`."""
        numbers = np.arange(self.times)[:, None] * self.stride + np.arange(self.count)[None, :]
        return (self.first + numbers).reshape(self.repeats)


@dataclass(frozen=True)
class Group:
    """A pattern of runs that occurs `times` times in a row."""

    times: int
    leaves: tuple[Leaf, ...]


def _cover(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts a sequence into (pattern length, times) with as few runs to compile as possible.

    A pattern costs the number of its runs of equal neighbours, however often it recurs.
    """
    n = len(kinds)
    best: list[tuple[int, int, list[tuple[int, int]]]] = [(0, 0, [])] * (n + 1)
    for i in reversed(range(n)):
        options = []
        for length in range(1, n - i + 1):
            pattern = kinds[i : i + length]
            times = 1
            while kinds[i + times * length : i + (times + 1) * length] == pattern:
                times += 1
            if length > 1 and times == 1:
                continue
            cost = sum(1 for _ in groupby(pattern))
            for used in range(1 if length == 1 else 2, times + 1):
                after = best[i + used * length]
                options.append((cost + after[0], 1 + after[1], [(length, used), *after[2]]))
        best[i] = min(options)
    return best[0][2]


def plan(cfg: ModelConfig) -> tuple[Group, ...]:
    """The stack as groups of scanned runs, in order, whatever the layer list."""
    layers = cfg.layers
    known: list[Any] = []
    for layer in layers:
        if layer not in known:
            known.append(layer)
    kinds = [known.index(layer) for layer in layers]
    digits = len(str(cfg.depth))
    groups, first = [], 0
    for length, times in _cover(kinds):
        leaves, start = [], first
        for kind, run in groupby(kinds[first : first + length]):
            count = len(list(run))
            mixer, channel = known[kind]
            name = f"{start + 1:0{digits}d}_{mixer.kind}_{channel.kind}"
            if length == 1:  # a run of equal neighbours is one leaf, not a recurring single layer
                leaves.append(Leaf(name, mixer, channel, start, times, 1, times))
            else:
                leaves.append(Leaf(name, mixer, channel, start, count, times, length))
            start += count
        groups.append(Group(1 if length == 1 else times, tuple(leaves)))
        first += length * times
    return tuple(groups)


def describe(cfg: ModelConfig) -> str:
    """The plan in a line, such as `kda dense | 2 kda moe | 22 x (mla moe, 3 kda moe) | 2 mla moe`."""

    def leaf(x: Leaf) -> str:
        return f"{f'{x.count} ' if x.count > 1 else ''}{x.mixer.kind} {x.channel.kind}"

    def group(x: Group) -> str:
        runs = ", ".join(map(leaf, x.leaves))
        return f"{x.times} x ({runs})" if x.times > 1 else runs

    return " | ".join(map(group, plan(cfg)))


def opens(cfg: ModelConfig) -> tuple[tuple[bool, bool], ...]:
    """For each layer, whether its mixer and its channel mixer open a block.

    A module that opens one closes the block before it: the sum so far becomes a source. Under
    FullAttnRes every module is a block of its own.
    """
    match cfg.residual:
        case Plain():
            return ((False, False),) * cfg.depth
        case FullAttnRes():
            return ((True, True),) * cfg.depth
        case BlockAttnRes(opens):
            chosen = range(0, cfg.depth, opens) if isinstance(opens, int) else opens
            return tuple((i in chosen, False) for i in range(cfg.depth))


@dataclass(frozen=True)
class BlockFacts:
    """For each (mixer, channel mixer) of a leaf's layers, arrays of shape `repeats` + (2,).

    Attributes:
      opens: whether the module opens a block.
      slot: which entry of the bank is the sum it adds to.
    """

    opens: np.ndarray
    slot: np.ndarray


def block_facts(cfg: ModelConfig, leaf: Leaf) -> BlockFacts:
    opened = np.array(opens(cfg))
    slot = np.cumsum(opened.reshape(-1), dtype=np.int32).reshape(opened.shape)
    return BlockFacts(opened[leaf.layers], slot[leaf.layers])


def bank_size(cfg: ModelConfig) -> int:
    """How many sums the stack makes: the embedding, then one per block. Plain residuals have one."""
    return 1 + int(np.sum(opens(cfg)))
