"""What `python -m pallas_kernels.bench kda` times: `kda_gated` in bfloat16, float32 state, floor of -5."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import api
from pallas_kernels.kda.api import BUILT, Implementation, kda_gated
from pallas_kernels.kda.cases import REAL, Case, draw_gated
from pallas_kernels.kda.peers import PEERS as PEERS

IMPLEMENTATIONS = tuple(name for name in BUILT if name != "reference")
CASES = REAL
ACCURACY = Case(1, 1024, 16, 128, 128)  # where errors against float64 are taken
INPUTS = ("query", "key", "value", "gate_logits", "beta_logits", "a_log", "dt_bias", "initial_state")
OUTPUTS = ("output", "final_state")
WIDE = {"a_log", "dt_bias", "initial_state"}  # float32 whatever the others are


def why_not(implementation: str) -> str | None:
    """Why an implementation cannot run the cases here; None if it can."""
    key, value = (max(getattr(case, name) for case in CASES.values()) for name in ("K", "V"))
    return api.why_not(implementation, key=key, value=value, dtypes=[jnp.bfloat16])


def inputs(case: Case, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    """On the device, drawn there: the larger cases would take long to send."""
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    shapes = [(B, T, H, K)] * 2 + [(B, T, H, V), (B, T, H, K), (B, T, H), (H,), (H, K), (B, H, K, V)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    kinds = [jnp.float32 if name in WIDE else dtype for name in INPUTS]
    drawn = zip(keys, shapes, kinds, strict=True)
    return tuple(jax.random.normal(key, shape, kind) for key, shape, kind in drawn)


def forward(implementation: Implementation, case: Case) -> Callable:
    """(inputs) -> (output, final state)."""
    ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)

    def run(*x):
        return kda_gated(*x[:7], initial_state=x[7], segment_ids=ids, implementation=implementation)

    return run


def both(implementation: Implementation, case: Case, cotangents: Any = None) -> Callable:
    """(inputs) -> ((output, final state), gradients of every input), for ones or these as cotangents."""
    run = forward(implementation, case)

    def forward_and_backward(*x):
        out, pull = jax.vjp(run, *x)
        if cotangents is None:
            return out, pull(jax.tree.map(jnp.ones_like, out))
        return out, pull(jax.tree.map(lambda d, y: jnp.asarray(d, y.dtype), cotangents, out))

    return forward_and_backward


def traffic(case: Case) -> tuple[int, int]:
    """Bytes that forward, and forward with backward, move at least: all they read and write, once.

    The backward pass reads the inputs again. States are left out: a row has one.
    """
    tokens, moved = case.B * case.T * case.H, 2 * (3 * case.K + case.V) + 2  # q, k, z, v and beta
    value = 2 * case.V
    return tokens * (moved + value), tokens * (3 * moved + 2 * value)


def work(case: Case) -> tuple[int, int]:
    """FLOPs of the definition: decay 1, what memory says 2, correct 2, read 2, per entry of the state."""
    one = 7 * case.B * case.T * case.H * case.K * case.V
    return one, 3 * one


def errors(implementation: Implementation) -> dict[str, float]:
    """Relative L2 error against the definition in float64, of each output and gradient."""
    return distances(_numpy(jax.jit(both(implementation, ACCURACY, cotangents()))(*rounded())))


def peer_errors(peer: Any) -> dict[str, float]:
    """The same of another library's, from the same inputs."""
    inputs = peer.inputs([np.asarray(x.astype(jnp.float32)) for x in rounded()])
    return distances(peer.numpy(peer.both(ACCURACY, inputs, cotangents())()))


def rounded() -> list[jax.Array]:
    """The inputs that errors are taken of."""
    kinds = [jnp.float32 if name in WIDE else jnp.bfloat16 for name in INPUTS]
    return [jnp.asarray(x, kind) for x, kind in zip(draw_gated(ACCURACY), kinds, strict=True)]


def cotangents() -> tuple[np.ndarray, np.ndarray]:
    """Of output and final state, for errors; the first are bfloat16 numbers.

    Ones would not do: all channels of a value would have one gradient, and its one rounding would be found.
    Nor would a state's of the output's size: what a later token asks of a state is its query with the scale,
    1 / K, times the output's. Of more than that, most of all gradients would be the last token's.
    """
    B, T, H, K, V = ACCURACY.B, ACCURACY.T, ACCURACY.H, ACCURACY.K, ACCURACY.V
    normal = np.random.default_rng(1).normal
    output = normal(size=(B, T, H, V)).astype(jnp.bfloat16).astype(np.float32)
    return output, (normal(size=(B, H, K, V)) / K).astype(np.float32)


def distances(found: list[np.ndarray]) -> dict[str, float]:
    """Of outputs and gradients to the definition's in float64."""
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in rounded()]
        wanted = _numpy(jax.jit(both("reference", ACCURACY, cotangents()))(*exact))
    names = (*OUTPUTS, *(f"d {name}" for name in INPUTS))
    size = np.linalg.norm
    return {n: float(size(a - b) / size(b)) for n, a, b in zip(names, found, wanted, strict=True)}


def _numpy(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
