"""What the comparison of training runs reads of programs and profiles."""

import gzip
import json

from experiments.kda_training.profile import PROFILED, in_scope, shares
from experiments.kda_training.run import draw
from experiments.profiles import device_events

PROGRAM = """
  %fusion.7 = bf16[8] fusion(%p), metadata={op_name="jit(step)/layers/kda_gated/mul" source_file="x.py"}
  ROOT add.2 = f32[8] add(%a, %b), metadata={op_name="jit(step)/transpose(jvp(kda_gated))/add"}
  %dot.1 = f32[8] dot(%a, %b), metadata={op_name="jit(step)/mla/dot"}
"""


def test_instructions_of_the_op_are_found_by_their_scope():
    assert in_scope(PROGRAM) == {"fusion.7", "add.2"}


def test_shares_are_of_device_streams_and_per_step(tmp_path):
    name = lambda kind, pid, tid, word: {"name": kind, "pid": pid, "tid": tid, "args": {"name": word}}
    run = lambda name, ms, pid=1, tid=1, **args: {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "dur": 1e3 * ms, "args": args
    }  # fmt: skip
    events = [
        name("process_name", 1, 0, "/device:GPU:0"), name("process_name", 2, 0, "/host:CPU"),
        name("thread_name", 1, 1, "Stream #13"), name("thread_name", 2, 1, "Stream of words"),
        run("fusion_7", 3, hlo_op="fusion.7"), run("kda_prepare_kernel", 6), run("dot", 9, hlo_op="dot.1"),
        run("memcpy", 1), run("fusion_9", 0.5, hlo_op="command_buffer_3"), run("python", 100, pid=2),
    ]  # fmt: skip
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = shares(device_events(tmp_path), PROGRAM)
    assert found == {"all": 19.5 / PROFILED, "kda": 9 / PROFILED, "unnamed": 1.5 / PROFILED}


def test_curves_are_drawn(tmp_path):
    runs = [{"implementation": x, "seed": 0, "losses": [3.0, 2.0] * 20} for x in ("xla", "mosaic_gpu")]
    draw(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000
