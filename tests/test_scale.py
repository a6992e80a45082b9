"""Full K3 on paper: what lowering its training step costs, and that depth costs nothing."""

import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, re, sys, time
from functools import partial
from pathlib import Path
import jax
import numpy as np
from flax import linen as nn
from configs.k3 import config
from k3jax.config import replace
from k3jax.optim.build import build
from k3jax.parameters import shapes
from k3jax.train.state import around
from k3jax.train.step import train_step

began = time.perf_counter()
cfg = config()
cfg = replace(cfg, model=replace(cfg.model, depth=int(sys.argv[1])), data=replace(cfg.data, batch=8))
optimiser = build(cfg.optim, shapes(cfg.model), cfg.run.steps)
state = jax.eval_shape(partial(around, cfg, optimiser), nn.meta.unbox(shapes(cfg.model)))
shape = (cfg.data.batch, cfg.data.length)
kinds = dict.fromkeys(("tokens", "targets", "segment_ids"), np.int32) | {"weights": np.float32}
batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
text = jax.jit(partial(train_step, cfg, optimiser)).lower(state, batch).as_text()
# Not ru_maxrss, which starts at that of the process it was forked from.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({
    "seconds": time.perf_counter() - began,
    "gib": peak / 2**20,
    "lines": text.count(chr(10)),
}))
"""


def lower(depth: int) -> dict[str, float]:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(depth)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_lowering_the_whole_model_is_quick_and_its_text_knows_no_depth():
    full, half = lower(93), lower(45)
    assert full["seconds"] < 60
    assert full["gib"] < 4
    assert full["lines"] == half["lines"]
