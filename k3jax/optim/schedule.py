"""The learning rate of every step."""

import optax

from k3jax.config import Cosine, OptimConfig


def learning_rate(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """The rate of each of `steps` steps, counted from 0.

    With W = warmup * steps, rounded and at least 1, step i < W has (i + 1) / W of the peak: the first
    step already moves, and step W - 1 is the first at the peak. From there Cosine falls to `final` of
    the peak at the last step, steps - 1; Wsd stays, then falls there in a line over the last
    decay * steps, rounded and at least 1 unless decay is 0. Where warm-up leaves no step to fall in,
    the last step is at the peak. Later steps keep the last rate.

    Returns:
      A function of the step (int or scalar array) to a float32 scalar.

    Raises:
      ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps: at least 1 is needed")
    schedule, peak = cfg.schedule, cfg.lr
    warm = min(max(1, round(schedule.warmup * steps)), steps)
    rise = optax.linear_schedule(peak / warm, peak, warm - 1)
    room = steps - warm
    if isinstance(schedule, Cosine):
        fall = optax.cosine_decay_schedule(peak, max(1, room), alpha=schedule.final)
        return optax.join_schedules([rise, fall], [warm - 1])
    down = min(max(schedule.decay > 0, round(schedule.decay * steps)), room)
    fall = optax.linear_schedule(peak, peak * schedule.final, down)
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warm - 1, steps - 1 - down])
