"""Other libraries' KDA on the same card, to be timed beside ours: what `--peer` of the benchmark names.

They need PyTorch with CUDA and a library of their own, which nothing else here does.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pallas_kernels.kda.cases import Case


class FlashLinearAttention:
    """`chunk_kda` of flash-linear-attention (Triton): gate, norms and beta inside, forward and backward.

    Its backward pass makes w, u, decayed queries and keys, states and what was written again, or with `keep`
    (its `disable_recompute`) has them from the forward pass. Ours keeps the first four.

    Raises:
      ImportError: it, or PyTorch with CUDA, is not installed.
    """

    def __init__(self, keep: bool = False):
        self.name, self._keep = "fla_kept" if keep else "fla", keep
        os.environ["FLA_CACHE_RESULTS"] = "0"  # it tunes in this run, whatever an earlier one left on disk
        try:
            self._torch: Any = importlib.import_module("torch")
            self._op = importlib.import_module("fla.ops.kda").chunk_kda
        except ImportError as error:
            raise ImportError(f"{error}; it needs torch, fla-core and flash-linear-attention") from error
        if not self._torch.cuda.is_available():
            raise ImportError("it needs PyTorch with CUDA")

    def wait(self, _: Any = None) -> None:
        """Returns when the card has done everything asked for."""
        self._torch.cuda.synchronize()

    def inputs(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """The arguments of `kda_gated` in order, the initial state last."""
        torch = self._torch
        kinds = [torch.bfloat16] * 5 + [torch.float32] * 3
        put = lambda x, kind: torch.tensor(x, dtype=torch.float32, device="cuda").to(kind).requires_grad_()
        return [put(x, kind) for x, kind in zip(arrays, kinds, strict=True)]

    def random(self, case: Case) -> list[Any]:
        """Inputs of a case, drawn on the card."""
        torch = self._torch
        B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
        shapes = [(B, T, H, K)] * 2 + [(B, T, H, V), (B, T, H, K), (B, T, H), (H,), (H, K), (B, H, K, V)]
        kinds = [torch.bfloat16] * 5 + [torch.float32] * 3
        drawn = zip(shapes, kinds, strict=True)
        return [torch.randn(shape, dtype=kind, device="cuda", requires_grad=True) for shape, kind in drawn]

    def forward(self, case: Case, inputs: Sequence[Any]) -> Callable[[], Any]:
        """() -> (output, final state)"""
        *tokens, a_log, dt_bias, state = inputs
        options: dict[str, Any] = {"initial_state": state}
        if case.segment_ids is not None:  # rows of several sequences start from nothing there
            (ids,) = case.segment_ids
            starts = np.flatnonzero(np.diff(ids, prepend=-1))
            ends = self._torch.tensor([*starts, case.T], dtype=self._torch.long, device="cuda")
            options = {"cu_seqlens": ends}

        def run():
            return self._op(
                *tokens, A_log=a_log, dt_bias=dt_bias.reshape(-1), output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                safe_gate=True, lower_bound=-5.0, disable_recompute=self._keep, **options,
            )  # fmt: skip

        return run

    def both(self, case: Case, inputs: Sequence[Any], cotangents: Any = None) -> Callable[[], Any]:
        """() -> ((output, final state), gradients of every input), for ones or these as cotangents."""
        run, torch = self.forward(case, inputs), self._torch
        wanted = inputs if case.segment_ids is None else inputs[:-1]

        def forward_and_backward():
            out = run()
            given = [torch.ones_like(x) for x in out]
            if cotangents is not None:
                given = [
                    torch.tensor(d, device="cuda").to(x.dtype) for d, x in zip(cotangents, out, strict=True)
                ]
            return out, torch.autograd.grad(out, wanted, given)

        return forward_and_backward

    def numpy(self, out: Any) -> list[np.ndarray]:
        """Everything in `out`, in order, in float64."""
        return [x.detach().double().cpu().numpy() for x in _leaves(out)]

    def replayed(self, run: Callable[[], Any]) -> Callable[[], None]:
        """`run` as a CUDA graph: without the launches, which bind it at small shapes."""
        torch = self._torch
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # compiles and tunes
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def extra_bytes(self, run: Callable[[], Any]) -> int:
        """The most memory held during a run, beside inputs and outputs."""
        torch = self._torch
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in _leaves(out))


def _leaves(tree: Any) -> list[Any]:
    return [y for x in tree for y in _leaves(x)] if isinstance(tree, tuple | list) else [tree]


PEERS = {"fla": FlashLinearAttention, "fla_kept": partial(FlashLinearAttention, keep=True)}
