"""Every ablation of the tiny config trains: on the same rows, the second loss is lower than the first.

One program each; tests/test_step.py has the same switches in a few mixtures, which take less time.
"""

import jax
import numpy as np
import pytest

from configs import tiny
from tests.small import small, steps

pytestmark = pytest.mark.slow
LISTED = {"listed_layers"}  # names layers that only tiny's own stack has


@pytest.mark.parametrize("name", tiny.ABLATIONS)
def test_an_ablation_trains(name):
    cfg = tiny.ABLATIONS[name](tiny.config() if name in LISTED else small())
    before, after, reports = steps(cfg, 2, same_rows=True)
    assert all(bool(report["finite"]) for report in reports)
    assert float(reports[1]["loss"]) < float(reports[0]["loss"])
    pairs = zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
    moved = [np.any(np.asarray(old != new)) for old, new in pairs]
    assert sum(moved) > len(moved) / 2
