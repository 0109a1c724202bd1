"""Mixed precision: what layers compute in, and the loss scale that keeps float16 gradients from vanishing.

    with compute_in("bfloat16"):
        model = build()

Keras' LossScaleOptimizer looks at the first replica's gradients only: an overflow on another one leaves the scale up and
makes the weights NaN. The scale here is moved by what was found after the gradients of all replicas were added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FIRST_SCALE = 2.0**15
_LARGEST_SCALE = 2.0**24
_STEPS_BEFORE_DOUBLING = 2000


@contextmanager
def compute_in(precision: str) -> Iterator[None]:
    """Layers that are made in the block compute in `precision` and keep float32 weights."""
    import keras

    if precision == "float32":
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{precision}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


class LossScale:
    """The factor of the loss: halved by a step that overflows, doubled after 2,000 steps that do not.

    Micikevicius et al., Mixed Precision Training, 2018. Made and updated inside the strategy's scope, across replicas.

    Attributes:
        variables: `[scale, good_steps]` float32, part of a checkpoint.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        # Every replica writes the same value, so that one of them stands for all.
        self.variables = tf.Variable(
            [_FIRST_SCALE, 0.0],
            trainable=False,
            name="loss_scale",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def factor(self) -> Any:
        """The factor as a scalar float32."""
        return self.variables[0]

    def update(self, finite: Any) -> None:
        """Moves the scale after a step; `finite` says whether every gradient of every replica was a finite number."""
        import tensorflow as tf

        scale, good = self.variables[0], self.variables[1] + 1.0
        grows = good >= _STEPS_BEFORE_DOUBLING
        kept = tf.stack([tf.where(grows, tf.minimum(scale * 2.0, _LARGEST_SCALE), scale), tf.where(grows, 0.0, good)])
        halved = tf.stack([tf.maximum(scale / 2.0, 1.0), 0.0])
        self.variables.assign(tf.where(finite, kept, halved))
