"""Everything that can be chosen: frozen dataclasses, checked when they are made. Imports no jax.

A mechanism is chosen by a type (`residual=BlockAttnRes(12)`), and settings that mean nothing under
a choice do not exist under it. Each union below lists the built-in choices of one field; where a
protocol stands beside them, any frozen dataclass that satisfies it may be passed instead.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable


class ConfigError(ValueError):
    """A setting that cannot be used: says which field, its value, and what is allowed."""


def _require(config: object, name: str, ok: bool, allowed: str) -> None:
    if not ok:
        value = getattr(config, name)
        raise ConfigError(f"{type(config).__name__}.{name}={value!r}: {allowed}")


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        _require(config, name, whole and value >= 1, "a whole number of at least 1 is needed")


def _one_of(config: object, name: str, allowed: Any) -> None:
    names = get_args(allowed)
    _require(config, name, getattr(config, name) in names, f"one of {', '.join(map(repr, names))}")


def _within(config: object, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(config, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and (low < value if open_low else low <= value) and value <= high
    _require(config, name, inside, f"a number in {'(' if open_low else '['}{low}, {high}]")


# ---- what mixers and channel mixers are made of ----


@dataclass(frozen=True)
class Bounded:
    """g = floor * sigmoid(e^A z): K3's log-decay, never below `floor` nats a token (eq. 5)."""

    floor: float = -5.0

    def __post_init__(self):
        _within(self, "floor", -1e4, -1e-6)

    @property
    def lower_bound(self) -> float | None:
        """What `pallas_kernels.kda.log_decay` calls the floor."""
        return self.floor


@dataclass(frozen=True)
class Unbounded:
    """g = -e^A softplus(z): Kimi Linear's log-decay."""

    lower_bound: ClassVar[float | None] = None


Decay = Bounded | Unbounded


@dataclass(frozen=True)
class FullRank:
    """An output gate sigmoid(W x), W of full rank (K3)."""


@dataclass(frozen=True)
class LowRank:
    """An output gate sigmoid(W_b W_a x) through `rank` channels (Kimi Linear: the head dim)."""

    rank: int

    def __post_init__(self):
        _positive(self, "rank")


@dataclass(frozen=True)
class NoGate:
    """No output gate."""


Gate = FullRank | LowRank | NoGate


@dataclass(frozen=True)
class NoPE:
    """No positional encoding (K3, Kimi Linear)."""


@dataclass(frozen=True)
class RoPE:
    """Rotary positions on MLA's shared dims (K2)."""

    theta: float = 50000.0

    def __post_init__(self):
        _within(self, "theta", 1.0, 1e12, open_low=True)


Positions = NoPE | RoPE


@dataclass(frozen=True)
class Situ:
    """b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2): at most b1 b2 in size (eq. 12)."""

    gate: float = 4.0
    up: float = 25.0

    def __post_init__(self):
        _within(self, "gate", 0, 1e9, open_low=True)
        _within(self, "up", 0, 1e9, open_low=True)


@dataclass(frozen=True)
class Swiglu:
    """g sigmoid(g) * u."""


Activation = Situ | Swiglu


# ---- token mixers ----

KdaImplementation = Literal["reference", "xla", "mosaic_tpu", "mosaic_gpu", "triton"]
AttentionImplementation = Literal["reference", "xla"]
GroupedMatmulImplementation = Literal["reference", "xla"]


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention. `rate_init` is e^A at the start: 1 (the report) or uniform in [1, 16]
    (the released code)."""

    heads: int
    key: int = 128
    value: int = 128
    taps: int = 4
    decay: Decay = field(default_factory=Bounded)
    gate: Gate = field(default_factory=FullRank)
    rate_init: Literal["one", "uniform"] = "one"
    implementation: KdaImplementation | None = None

    kind = "kda"

    def __post_init__(self):
        _positive(self, "heads", "key", "value", "taps")
        _require(self, "decay", isinstance(self.decay, Decay), "Bounded(floor) or Unbounded()")
        _require(self, "gate", isinstance(self.gate, Gate), "FullRank(), LowRank(rank) or NoGate()")
        _one_of(self, "rate_init", Literal["one", "uniform"])
        if self.implementation is not None:
            _one_of(self, "implementation", KdaImplementation)


@dataclass(frozen=True)
class MlaConfig:
    """Gated multi-head latent attention. A head's query and key have `key` dims of its own and
    `shared` dims whose key all heads share."""

    heads: int
    key: int = 128
    shared: int = 64
    value: int = 128
    latent: int = 512
    query_rank: int | None = 1536
    gate: Gate = field(default_factory=FullRank)
    positions: Positions = field(default_factory=NoPE)
    implementation: AttentionImplementation | None = None

    kind = "mla"

    def __post_init__(self):
        _positive(self, "heads", "key", "shared", "value", "latent")
        if self.query_rank is not None:
            _positive(self, "query_rank")
        _require(self, "gate", isinstance(self.gate, Gate), "FullRank(), LowRank(rank) or NoGate()")
        _require(self, "positions", isinstance(self.positions, Positions), "NoPE() or RoPE(theta)")
        rotary = isinstance(self.positions, RoPE)
        _require(self, "shared", not (rotary and self.shared % 2), "even under RoPE, which turns pairs")
        if self.implementation is not None:
            _one_of(self, "implementation", AttentionImplementation)


@runtime_checkable
class Mixer(Protocol):
    """A token mixer of your own: a frozen dataclass with these methods, passed as `linear` or `full`.

    `init` returns a (nested) dict whose leaves are made by `k3jax.axes.make_weight`, so that every
    one knows its axes and its optimiser. `apply` gets those leaves as plain arrays.
    """

    @property
    def kind(self) -> str:
        """A short name, which the parameters of such layers carry."""
        ...

    def init(self, key: Any, width: int, std: float) -> Any:
        """Parameters from a jax.random key."""
        ...

    def apply(self, params: Any, x_BTD: Any, state: Any, segments: Any) -> tuple[Any, Any, Any]:
        """(y_BTD, the state after the last real token, a `k3jax.report.Report`). See `k3jax.segments`."""
        ...

    def empty_state(self, batch: int, width: int, dtype: Any) -> Any:
        """The state before any token."""
        ...

    def flops(self, width: int, length: int) -> float:
        """Forward floating-point operations per token in a row of `length` tokens."""
        ...

    def context_rule(self) -> Literal["state", "gather", "none"]:
        """How pieces of one row on several devices meet: by their states, by a gather, or never."""
        ...


# ---- channel mixers ----


@dataclass(frozen=True)
class DenseConfig:
    """A gated MLP over the full width."""

    hidden: int
    activation: Activation = field(default_factory=Situ)

    kind = "dense"

    def __post_init__(self):
        _positive(self, "hidden")
        _require(self, "activation", isinstance(self.activation, Activation), "Situ(gate, up) or Swiglu()")


@dataclass(frozen=True)
class Quantile:
    """Quantile Balancing (eq. 14): each bias is the quantile of its expert's margins, read off a
    histogram of `bins`; `ema` is the past's weight in the quantile (0: this step alone)."""

    bins: int = 1000
    ema: float = 0.0

    def __post_init__(self):
        _positive(self, "bins")
        _within(self, "ema", 0.0, 0.9999)


@dataclass(frozen=True)
class Sign:
    """DeepSeek-V3's rule: each bias moves by `step` towards the mean load."""

    step: float = 1e-3

    def __post_init__(self):
        _within(self, "step", 0.0, 1.0, open_low=True)


@dataclass(frozen=True)
class Auxiliary:
    """A loss of weight * E/k * sum_j (load share_j * mean score share_j), row by row."""

    weight: float = 1e-2

    def __post_init__(self):
        _within(self, "weight", 0.0, 100.0, open_low=True)


@dataclass(frozen=True)
class Unbalanced:
    """Nothing balances the experts."""


@runtime_checkable
class BalanceRule(Protocol):
    """A balancing rule of your own: a frozen dataclass with these methods, passed as `balance`.

    Statistics are additive: they are summed over micro-batches, devices and processes, and never
    see padding. The bias they lead to is used from the next step on.
    """

    def local_stats(self, scores_ME: Any, cutoff_M: Any, bias_E: Any, real_M: Any) -> Any:
        """A pytree of sums over M tokens. `cutoff_M` is the best biased score not chosen."""
        ...

    def update(self, bias_E: Any, stats: Any, load_E: Any, memory: Any) -> tuple[Any, Any]:
        """(the next bias, the next memory) from one step's summed statistics and loads."""
        ...

    def empty_memory(self, experts: int) -> Any:
        """What the rule keeps between steps, a pytree of arrays; None if nothing."""
        ...


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts over the full width, beside `shared` always-active ones (K2, Kimi Linear)."""

    experts: int
    active: int
    hidden: int
    shared: int = 1
    scale: float = 1.0
    normalise: bool = True
    activation: Activation = field(default_factory=Situ)
    balance: "Quantile | Sign | Auxiliary | Unbalanced | BalanceRule" = field(default_factory=Quantile)
    implementation: GroupedMatmulImplementation | None = None

    kind = "moe"

    def __post_init__(self):
        _positive(self, "experts", "active", "hidden")
        _require(self, "shared", isinstance(self.shared, int) and self.shared >= 0, "0 or more")
        fits = self.active < self.experts
        _require(self, "active", fits, f"below experts={self.experts}: a cutoff needs one more")
        _within(self, "scale", 0, 1e6, open_low=True)
        _require(self, "activation", isinstance(self.activation, Activation), "Situ(gate, up) or Swiglu()")
        built_in = isinstance(self.balance, Quantile | Sign | Auxiliary | Unbalanced)
        allowed = "Quantile(), Sign(), Auxiliary(), Unbalanced() or a BalanceRule of your own"
        _require(self, "balance", built_in or isinstance(self.balance, BalanceRule), allowed)
        if self.implementation is not None:
            _one_of(self, "implementation", GroupedMatmulImplementation)


@dataclass(frozen=True)
class LatentMoeConfig(MoeConfig):
    """Stable LatentMoE (eq. 11): routed experts over `latent` channels, between W_down and W_up.

    `norm` is what the aggregate passes before W_up; "none" is an ablation.
    """

    latent: int = field(kw_only=True)
    norm: Literal["rms", "none"] = field(default="rms", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        _positive(self, "latent")
        _one_of(self, "norm", Literal["rms", "none"])


Channel = DenseConfig | MoeConfig


# ---- the residual stream ----


@dataclass(frozen=True)
class Plain:
    """x + f(norm(x))."""


@dataclass(frozen=True)
class BlockAttnRes:
    """Block Attention Residuals: every module reads a softmax over the finished blocks' sums.

    `opens` lists the 0-based layers that open a block; an int is short for every so many. Layer 0
    always opens one.
    """

    opens: int | tuple[int, ...] = 12

    def __post_init__(self):
        if isinstance(self.opens, int):
            _positive(self, "opens")
        else:
            ordered = list(self.opens) == sorted(set(self.opens))
            _require(self, "opens", ordered and self.opens[:1] == (0,), "rising layer numbers from 0")


@dataclass(frozen=True)
class FullAttnRes:
    """Attention Residuals over every module's own output."""


Residual = Plain | BlockAttnRes | FullAttnRes

# What the forward pass keeps for the backward one, beside each module's input: everything, the
# outputs of matrix products, those of the sequence ops alone, or nothing.
Remat = Literal["none", "products", "ops", "module"]
Dtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A stack of `depth` layers, each a token mixer and a channel mixer.

    `full_layers` says which layers (1-based) have the `full` mixer, the others have `linear`; an
    int n is short for every n-th layer and the last one, K3's and Kimi Linear's own rule. Layers
    1 to `dense_layers` have the `dense` channel mixer, the others `moe`. A part that no layer uses
    is None.
    `dtype` is what activations and matrix products are computed in; None: what the parameters are.
    """

    width: int
    vocabulary: int
    depth: int
    linear: "KdaConfig | MlaConfig | Mixer | None" = None
    full: "KdaConfig | MlaConfig | Mixer | None" = None
    dense: DenseConfig | None = None
    moe: MoeConfig | None = None
    full_layers: int | tuple[int, ...] = 4
    dense_layers: int = 1
    residual: Residual = field(default_factory=BlockAttnRes)
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    dtype: Dtype | None = None
    remat: Remat = "ops"

    def __post_init__(self):
        _positive(self, "width", "vocabulary", "depth")
        for name in ("linear", "full"):
            mixer = getattr(self, name)
            ok = mixer is None or isinstance(mixer, KdaConfig | MlaConfig | Mixer)
            _require(self, name, ok, "KdaConfig, MlaConfig, a Mixer of your own, or None")
        _require(self, "dense", isinstance(self.dense, DenseConfig | None), "a DenseConfig or None")
        _require(self, "moe", isinstance(self.moe, MoeConfig | None), "MoeConfig, LatentMoeConfig or None")
        layers = self.full_layers
        if isinstance(layers, int):
            _positive(self, "full_layers")
        else:
            inside = all(1 <= i <= self.depth for i in layers)
            rising = list(layers) == sorted(set(layers))
            _require(self, "full_layers", inside and rising, f"rising layer numbers in 1..{self.depth}")
        dense = isinstance(self.dense_layers, int) and 0 <= self.dense_layers <= self.depth
        _require(self, "dense_layers", dense, f"a whole number in 0..depth={self.depth}")
        _require(self, "residual", isinstance(self.residual, Residual), "Plain, BlockAttnRes or FullAttnRes")
        if isinstance(self.residual, BlockAttnRes) and not isinstance(self.residual.opens, int):
            last = self.residual.opens[-1] < self.depth
            _require(self, "residual", last, f"a block cannot open beyond the last layer, {self.depth - 1}")
        _within(self, "norm_eps", 0.0, 1.0, open_low=True)
        _within(self, "init_std", 0.0, 10.0, open_low=True)
        if self.dtype is not None:
            _one_of(self, "dtype", Dtype)
        _one_of(self, "remat", Remat)
        for number, parts in enumerate(self._parts(), 1):
            for name in parts:
                _require(self, name, getattr(self, name) is not None, f"layer {number} has this part")

    def _parts(self) -> list[tuple[str, str]]:
        full = self.full_layers
        if isinstance(full, int):
            full = {i for i in range(1, self.depth + 1) if i % full == 0 or i == self.depth}
        mixer = lambda i: "full" if i in full else "linear"
        channel = lambda i: "dense" if i <= self.dense_layers else "moe"
        return [(mixer(i), channel(i)) for i in range(1, self.depth + 1)]

    @property
    def layers(self) -> tuple[tuple[Any, Any], ...]:
        """The (mixer, channel) configs of every layer, in order."""
        return tuple((getattr(self, mixer), getattr(self, channel)) for mixer, channel in self._parts())


# ---- the optimiser ----


@dataclass(frozen=True)
class Muon:
    """Nesterov momentum, orthogonalised block by block (Moonlight's form).

    `split`: "matrix" takes each projection whole (K2), "head" the query, key and value projections
    head by head (K3), "every_head" the output gates and output projections too.
    `scale` is the RMS of an update's entries at learning rate 1, AdamW's usual one.
    """

    momentum: float = 0.95
    steps: int = 5
    split: Literal["matrix", "head", "every_head"] = "head"
    scale: float = 0.2
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        _within(self, "momentum", 0.0, 0.9999)
        _positive(self, "steps")
        _one_of(self, "split", Literal["matrix", "head", "every_head"])
        _within(self, "scale", 0.0, 10.0, open_low=True)
        _one_of(self, "precision", Literal["float32", "bfloat16"])


@dataclass(frozen=True)
class AdamW:
    """AdamW; for the weights that Muon leaves to it, or for all."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self):
        _within(self, "b1", 0.0, 0.9999)
        _within(self, "b2", 0.0, 0.99999)
        _within(self, "eps", 0.0, 1.0, open_low=True)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up over a share of the steps, then a half cosine down to `final` of the peak."""

    warmup: float = 0.01
    final: float = 0.1

    def __post_init__(self):
        _within(self, "warmup", 0.0, 1.0)
        _within(self, "final", 0.0, 1.0)


@dataclass(frozen=True)
class Wsd:
    """Warm-up, a plateau, then a linear decay over the last `decay` share of the steps."""

    warmup: float = 0.01
    decay: float = 0.2
    final: float = 0.1

    def __post_init__(self):
        _within(self, "warmup", 0.0, 1.0)
        _within(self, "decay", 0.0, 1.0)
        _within(self, "final", 0.0, 1.0)
        _require(self, "decay", self.warmup + self.decay <= 1, "warmup + decay of at most 1")


Schedule = Cosine | Wsd


@dataclass(frozen=True)
class OptimConfig:
    """How parameters move. `matrices` is the rule for the stack's matrices; `adam` moves the rest.

    `clip` bounds the gradient's global norm; `qk_clip` the largest attention logit of an MLA head
    (K2's tau); None turns either off. `z_loss` weighs log^2 of the softmax normaliser.
    `accumulate` micro-batches make one step. The report publishes none of the rates: these are ours.
    """

    lr: float = 2e-3
    matrices: Muon | AdamW = field(default_factory=Muon)
    adam: AdamW = field(default_factory=AdamW)
    weight_decay: float = 0.1
    schedule: Schedule = field(default_factory=Cosine)
    clip: float | None = 1.0
    qk_clip: float | None = 100.0
    z_loss: float = 0.0
    accumulate: int = 1

    def __post_init__(self):
        _within(self, "lr", 0.0, 100.0, open_low=True)
        _require(self, "matrices", isinstance(self.matrices, Muon | AdamW), "Muon() or AdamW()")
        _require(self, "adam", isinstance(self.adam, AdamW), "an AdamW()")
        _within(self, "weight_decay", 0.0, 10.0)
        _require(self, "schedule", isinstance(self.schedule, Schedule), "Cosine() or Wsd()")
        for name in ("clip", "qk_clip"):
            if getattr(self, name) is not None:
                _within(self, name, 0.0, 1e9, open_low=True)
        _within(self, "z_loss", 0.0, 1.0)
        _positive(self, "accumulate")


# ---- data, devices, the run ----


@dataclass(frozen=True)
class StandardLibrary:
    """The sources of the running Python's own standard library: no site-packages, no tests."""


@dataclass(frozen=True)
class Files:
    """The files below `root` that match `pattern` (pathlib's glob), each one document."""

    root: str
    pattern: str = "**/*.txt"

    def __post_init__(self):
        _require(self, "root", bool(self.root), "a folder")
        _require(self, "pattern", bool(self.pattern), "a glob pattern such as '**/*.txt'")


Corpus = StandardLibrary | Files


@dataclass(frozen=True)
class DataConfig:
    """What is read: documents of a corpus as bytes, packed into rows of `length` tokens.

    `batch` is the number of rows in one optimiser step, over all processes and micro-batches.
    `held_out` is the share of files kept for validation, chosen by name alone.
    """

    corpus: Corpus = field(default_factory=StandardLibrary)
    length: int = 512
    batch: int = 8
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self):
        _require(self, "corpus", isinstance(self.corpus, Corpus), "StandardLibrary() or Files(root, pattern)")
        _positive(self, "length", "batch")
        _within(self, "held_out", 0.0, 0.5, open_low=True)
        _require(self, "seed", isinstance(self.seed, int) and self.seed >= 0, "a whole number of at least 0")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each named axis; `data=None` takes all that the other axes leave.

    data: copies of the parameters. fsdp: parameters cut, gathered layer by layer. expert, context
    and tensor: not built yet, so they must be 1.
    """

    data: int | None = None
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        if self.data is not None:
            _positive(self, "data")
        _positive(self, "fsdp", "expert", "context", "tensor")
        for name in ("expert", "context", "tensor"):
            _require(self, name, getattr(self, name) == 1, "1: this axis is not built yet")

    def sizes(self, devices: int) -> dict[str, int]:
        """Axis sizes over `devices` devices, outermost first.

        Raises:
          ConfigError: the product of the axes is not the number of devices.
        """
        rest = {name: getattr(self, name) for name in ("fsdp", "expert", "context", "tensor")}
        product = 1
        for size in rest.values():
            product *= size
        data = devices // product if self.data is None else self.data
        sizes = {"data": data, **rest}
        if data * product != devices:
            shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
            needed = f"a multiple of {product}" if self.data is None else f"{data * product}"
            raise ConfigError(f"MeshConfig: {shown} needs {needed} devices, and there are {devices}")
        return sizes


@dataclass(frozen=True)
class RunConfig:
    """One run: how long, how often it looks up, what it keeps. All intervals are in steps."""

    name: str = "run"
    steps: int = 1000
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 200
    evaluate_rows: int = 64
    checkpoint_every: int = 200
    keep: int = 2

    def __post_init__(self):
        plain = bool(self.name) and "/" not in self.name and self.name not in (".", "..")
        _require(self, "name", plain, "a plain folder name")
        _positive(self, "steps", "log_every", "evaluate_every", "evaluate_rows", "checkpoint_every", "keep")
        _require(self, "seed", isinstance(self.seed, int) and self.seed >= 0, "a whole number of at least 0")


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self):
        for name, kind in [
            ("model", ModelConfig),
            ("optim", OptimConfig),
            ("data", DataConfig),
            ("mesh", MeshConfig),
            ("run", RunConfig),
        ]:
            _require(self, name, isinstance(getattr(self, name), kind), f"a {kind.__name__}")
        rows, parts = self.data.batch, self.optim.accumulate
        if rows % parts:
            raise ConfigError(f"DataConfig.batch={rows}: a multiple of OptimConfig.accumulate={parts}")
        shards = self.mesh.fsdp * (self.mesh.data or 1)
        if (rows // parts) % shards:
            raise ConfigError(
                f"DataConfig.batch={rows}: its micro-batches of {rows // parts} rows must divide over "
                f"data x fsdp = {shards} devices"
            )


def replace(config: Any, **changes: Any) -> Any:
    """dataclasses.replace, under one name for config files."""
    return dataclasses.replace(config, **changes)


Ablations = Mapping[str, Any]
