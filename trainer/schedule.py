"""Learning rate by step: a straight warm-up, then constant, half a cosine or a straight line."""

import math

import keras

from trainer.config import LearningRateSchedule


class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """rate(step) = peak · (step + 1) / warmup during the warm-up, then peak · (f + (1 − f) · shape(progress)).

    With f = `final_fraction`, progress from 0 to 1 over the steps after the warm-up, shape = 1, (1 + cos π·progress) / 2 or
    1 − progress. Cosine: Loshchilov and Hutter, SGDR, 2017.

    Args:
        peak: The highest rate.
        config: Shape, warm-up and final fraction.
        total_steps: Steps of the whole training.
    """

    def __init__(self, peak: float, config: LearningRateSchedule, total_steps: int) -> None:
        self._peak, self._config, self._total_steps = peak, config, total_steps

    def __call__(self, step):  # noqa: D102, ANN
        import tensorflow as tf

        config, warmup = self._config, self._config.warmup_steps
        step = tf.cast(step, tf.float32)
        progress = tf.clip_by_value((step - warmup) / max(1, self._total_steps - warmup), 0.0, 1.0)
        shape = {
            "constant": tf.ones_like(progress),
            "cosine": (1.0 + tf.cos(math.pi * progress)) / 2.0,
            "linear": 1.0 - progress,
        }[config.name]
        final = 1.0 if config.name == "constant" else config.final_fraction
        rate = self._peak * (final + (1.0 - final) * shape)
        return tf.where(step < warmup, self._peak * (step + 1.0) / max(1, warmup), rate)

    def get_config(self) -> dict:  # noqa: D102
        return {"peak": self._peak, "config": self._config.model_dump(), "total_steps": self._total_steps}
