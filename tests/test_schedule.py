import jax
import numpy as np
import pytest

from k3jax.config import Cosine, OptimConfig, Wsd
from k3jax.optim.schedule import learning_rate

PEAK = 3e-3


def rates(schedule, steps, beyond=0):
    rate = learning_rate(OptimConfig(lr=PEAK, schedule=schedule), steps)
    return np.asarray(jax.jit(jax.vmap(rate))(np.arange(steps + beyond)))


@pytest.mark.parametrize("schedule", [Cosine, Wsd])
@pytest.mark.parametrize(("steps", "warm"), [(1000, 10), (250, 2), (149, 1), (2, 1)])
def test_ends(schedule, steps, warm):
    rate = rates(schedule(warmup=0.01, final=0.1), steps)
    np.testing.assert_allclose(rate[:warm], PEAK * np.arange(1, warm + 1) / warm, rtol=1e-5)
    np.testing.assert_allclose(rate[-1], 0.1 * PEAK, rtol=1e-5)
    assert np.all(np.diff(rate[warm - 1 :]) <= 0)
    assert np.all(rate > 0)


def test_cosine_is_half_way_down_in_the_middle():
    rate = rates(Cosine(warmup=0.01, final=0.2), 1001)
    middle = (9 + 1000) / 2
    np.testing.assert_allclose(np.interp(middle, np.arange(1001), rate), 0.6 * PEAK, rtol=1e-4)


def test_wsd_stays_then_falls_in_a_line():
    rate = rates(Wsd(warmup=0.1, decay=0.2, final=0.0), 100)
    np.testing.assert_allclose(rate[9:80], PEAK, rtol=1e-6)
    np.testing.assert_allclose(rate[79:], PEAK * np.linspace(1, 0, 21), rtol=1e-4, atol=1e-9)


def test_no_warm_up_starts_at_the_peak():
    assert rates(Cosine(warmup=0.0), 10)[0] == np.float32(PEAK)


@pytest.mark.parametrize("schedule", [Cosine(), Wsd(), Wsd(warmup=0.0, decay=0.0)], ids=repr)
def test_one_step_is_at_the_peak(schedule):
    np.testing.assert_allclose(rates(schedule, 1), [PEAK], rtol=1e-6)


@pytest.mark.parametrize("schedule", [Cosine(warmup=1.0), Wsd(warmup=1.0, decay=0.0)], ids=repr)
def test_warm_up_all_the_way(schedule):
    np.testing.assert_allclose(rates(schedule, 5), PEAK * np.arange(1, 6) / 5, rtol=1e-5)


@pytest.mark.parametrize("schedule", [Cosine(), Wsd()], ids=repr)
def test_steps_past_the_end_keep_the_last_rate(schedule):
    rate = rates(schedule, 100, beyond=50)
    np.testing.assert_allclose(rate[100:], rate[99], rtol=1e-6)


def test_a_run_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="0 steps"):
        learning_rate(OptimConfig(), 0)
