"""The update in one operation is Keras' own update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config import TrainConfig, parse
from trainer.optimizer import build_optimizer, update_in_one_operation

IN_ONE = [
    ("adam", {}),
    ("adam", {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 0.1}),
    ("adamw", {"weight_decay": 0.05}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.5, "weight_decay": 0.05}),
]
AS_KERAS_HAS_IT = [("sgd", {}), ("adam", {"amsgrad": True}), ("rmsprop", {}), ("lamb", {}), ("nadam", {})]


def optimizer_of(name, arguments, variables):
    schedule = {"name": "cosine", "warmup_steps": 5}
    config = parse(
        TrainConfig,
        {"optimizer": name, "optimizer_args": arguments, "learning_rate": 0.05, "learning_rate_schedule": schedule},
    )
    optimizer = build_optimizer(config, 40)
    optimizer.build(variables)
    return optimizer


def trained(name, arguments, gradients, *, in_one, traced):
    """Values of the variables and the optimizer's own after the steps."""
    random = np.random.default_rng(1)
    variables = [keras.Variable(random.normal(size=gradient.shape).astype(np.float32)) for gradient in gradients[0]]
    optimizer = optimizer_of(name, arguments, variables)
    if in_one:
        update_in_one_operation(optimizer)
        assert "update_step" in vars(optimizer)
    apply = tf.function(optimizer.apply) if traced else optimizer.apply
    for step in gradients:
        apply([tf.constant(gradient) for gradient in step])
    return [value.numpy() for value in [*variables, *optimizer.variables]]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(("name", "arguments"), IN_ONE)
def test_the_update_in_one_operation_is_that_of_keras(name, arguments, traced):
    random = np.random.default_rng(2)
    gradients = [[random.normal(size=shape).astype(np.float32) for shape in [(3, 4), (4,), (1,)]] for _ in range(30)]
    theirs = trained(name, arguments, gradients, in_one=False, traced=traced)
    ours = trained(name, arguments, gradients, in_one=True, traced=traced)
    for one, other in zip(ours, theirs, strict=True):
        # In float32, 1 - 0.999 is 5e-5 of itself off; Keras takes it in float64.
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=1e-5)
    before = trained(name, arguments, gradients[:1], in_one=True, traced=False)
    assert np.abs(ours[0] - before[0]).max() > 0.1


@pytest.mark.parametrize(("name", "arguments"), AS_KERAS_HAS_IT)
def test_any_other_optimizer_is_left_as_it_is(name, arguments):
    optimizer = optimizer_of(name, arguments, [keras.Variable(np.zeros(3, np.float32))])
    update_in_one_operation(optimizer)
    assert "update_step" not in vars(optimizer)
