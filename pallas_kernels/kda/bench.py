"""What `python -m pallas_kernels.bench kda` times: `kda_gated` in bfloat16, float32 state, floor of -5."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import accuracy, api
from pallas_kernels.kda.accuracy import INPUTS, WIDE, Errors
from pallas_kernels.kda.api import BUILT, Implementation, kda_gated
from pallas_kernels.kda.cases import REAL, Case
from pallas_kernels.kda.peers import PEERS as PEERS

IMPLEMENTATIONS = tuple(name for name in BUILT if name != "reference")
CASES = REAL


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


def both(implementation: Implementation, case: Case) -> Callable:
    """(inputs) -> ((output, final state), gradients of every input), for ones or given cotangents."""
    run = forward(implementation, case)

    def forward_and_backward(*x, cotangents=None):
        out, pull = jax.vjp(run, *x)
        given = jax.tree.map(jnp.ones_like, out) if cotangents is None else cotangents
        return out, pull(jax.tree.map(lambda d, y: jnp.asarray(d, y.dtype), given, out))

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


def errors(implementations: Sequence[Implementation], peers: Sequence[Any] = ()) -> dict[str, Errors]:
    """Against the definition in float64, of ours and of other libraries' from the same inputs."""

    def program(implementation: Implementation) -> accuracy.Run:
        run = both(implementation, accuracy.CASE)
        return jax.jit(lambda inputs, cotangents: run(*inputs, cotangents=cotangents))

    def theirs(peer, inputs, cotangents):
        inputs = peer.inputs([np.asarray(x.astype(jnp.float32)) for x in inputs])
        return peer.numpy(peer.both(accuracy.CASE, inputs, cotangents)())

    runs: dict[str, accuracy.Run] = {name: program(name) for name in implementations}
    runs |= {peer.name: partial(theirs, peer) for peer in peers}
    return accuracy.errors(runs, program("reference"))
