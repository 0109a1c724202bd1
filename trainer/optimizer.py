"""The optimizer that the train section names, its learning rate, and the clipping that comes before it.

Keras' own clipping, averaging, accumulation and loss scaling are not used: under several replicas they act before the
replicas' gradients are added, or fail.
"""

import inspect
import json
import math
from typing import Any

from trainer.config import TrainConfig
from trainer.errors import BadInput, reason_of

_NO_OPTIMIZERS = {
    "Optimizer",
    "LossScaleOptimizer",  # train.precision
    "MultiOptimizer",
    "OptimizerMap",
}
"""What `keras.optimizers` holds besides those that a name and arguments make."""


def build_optimizer(config: TrainConfig, total_steps: int) -> Any:
    """The Keras optimizer that the section names, with its learning-rate schedule.

    Args:
        config: The train section.
        total_steps: Steps of the whole training, over which the schedule stretches.

    Raises:
        BadInput: Keras has no such optimizer, or it does not take the arguments.
    """
    import keras

    schedule = config.learning_rate_schedule
    rate: Any = scaled_learning_rate(config)
    if schedule.name != "constant" or schedule.warmup_steps:
        from trainer.schedule import WarmupSchedule

        rate = WarmupSchedule(rate, schedule, total_steps)
    classes = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    known = {kind.__name__.lower(): kind for kind in classes if kind.__name__ not in _NO_OPTIMIZERS}
    kind = known.get(config.optimizer.lower())
    if kind is None:
        raise BadInput(f"train.optimizer = {json.dumps(config.optimizer)}: must be one of {', '.join(sorted(known))}")
    _check_arguments(config, kind)
    try:
        return kind(**{**config.optimizer_args, "learning_rate": rate})  # Keras' own look-up by name misses some
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"train.optimizer_args = {json.dumps(config.optimizer_args)}: {config.optimizer} does not take them"
            f" ({reason_of(error)})"
        ) from None


def _check_arguments(config: TrainConfig, kind: type) -> None:
    """Refuses values of another type than an argument's default; Keras would fail over them in the first step."""
    for name, parameter in inspect.signature(kind).parameters.items():
        value, default = config.optimizer_args.get(name), parameter.default
        if value is None or default is None or default is parameter.empty:
            continue
        numbers = not isinstance(default, bool | str) and isinstance(value, int | float) and not isinstance(value, bool)
        if not numbers and type(value) is not type(default):
            raise BadInput(
                f"train.optimizer_args.{name} = {json.dumps(value)}: must be a {type(default).__name__}, such as"
                f" {config.optimizer}'s own {json.dumps(default)}"
            )


def take_summed_gradients(optimizer: Any) -> None:
    """Has the optimizer take gradients as they are, for they are summed over the replicas already.

    Its own addition would send each of them over the network a second time, which doubles what a step waits for.
    """
    name = "_all_reduce_sum_gradients"  # Keras has no public switch
    assert hasattr(optimizer, name), f"this version of Keras adds gradients elsewhere than in {name}"
    setattr(optimizer, name, lambda gradients_and_variables: gradients_and_variables)


def update_in_one_operation(optimizer: Any) -> None:
    """Has Adam, AdamW, and SGD with momentum update each variable by TensorFlow's one operation for it.

    Keras' own step is a dozen operations a variable, each of which goes through memory again (docs/decisions/0014).
    The formulas are the same, in the same order:

    - Adam: m += (1 − β₁)(g − m); v += (1 − β₂)(g² − v); w −= lr·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m/(√v + ε)
    - momentum: a = μ·a − lr·g; w += a, or μ·a − lr·g (Nesterov)

    Any other optimizer is left as it is. Not for variables on parameter servers.
    """
    import keras
    import tensorflow as tf

    step = type(optimizer).update_step
    if step is keras.optimizers.Adam.update_step and not optimizer.amsgrad:

        def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
            index, dtype = optimizer._get_variable_index(variable), variable.dtype
            number = keras.ops.cast(optimizer.iterations + 1, dtype)
            beta_1, beta_2 = tf.constant(optimizer.beta_1, dtype), tf.constant(optimizer.beta_2, dtype)
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=optimizer._momentums[index].value.handle,
                v=optimizer._velocities[index].value.handle,
                beta1_power=tf.pow(beta_1, number),
                beta2_power=tf.pow(beta_2, number),
                lr=tf.cast(learning_rate, dtype),
                beta1=beta_1,
                beta2=beta_2,
                epsilon=tf.constant(optimizer.epsilon, dtype),
                grad=tf.cast(gradient, dtype),
            )

    elif step is keras.optimizers.SGD.update_step and optimizer.momentum:

        def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
            index, dtype = optimizer._get_variable_index(variable), variable.dtype
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle,
                accum=optimizer.momentums[index].value.handle,
                lr=tf.cast(learning_rate, dtype),
                grad=tf.cast(gradient, dtype),
                momentum=tf.constant(optimizer.momentum, dtype),
                use_nesterov=optimizer.nesterov,
            )

    else:
        return
    optimizer.update_step = update


def scaled_learning_rate(config: TrainConfig) -> float:
    """The peak learning rate for this batch: rate · b (`linear`) or rate · √b, b = global batch / base batch.

    Linear: Goyal et al., Accurate, Large Minibatch SGD, 2017. Square root: Krizhevsky, One weird trick, 2014.
    """
    if config.learning_rate_scaling == "none" or config.base_batch_size is None:
        return config.learning_rate
    ratio = config.global_batch_size / config.base_batch_size
    return config.learning_rate * (ratio if config.learning_rate_scaling == "linear" else math.sqrt(ratio))


def clip(gradients: list[Any], config: TrainConfig) -> list[Any]:
    """Clips summed gradients as the configuration says; the same formulas as `tf.clip_by_*`."""
    import tensorflow as tf

    if config.clip_value is not None:
        return [tf.clip_by_value(gradient, -config.clip_value, config.clip_value) for gradient in gradients]
    if config.clip_norm is not None:
        return [tf.clip_by_norm(gradient, config.clip_norm) for gradient in gradients]
    if config.clip_global_norm is not None:
        return tf.clip_by_global_norm(gradients, config.clip_global_norm)[0]
    return gradients
