"""What must hold before long work begins: the model answers one real batch, and strategy and model fit each other.

check_model(trainer, feed, config)      # BadInput with the numbers
"""

import json
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.errors import BadInput, TriremeError, WorldFailure
from trainer.layers import batch_norms, walk
from trainer.own_code import fault_of
from trainer.progress import say
from trainer.step import Trainer

_NUM_EXAMPLES = 2


def check_model(trainer: Trainer, feed: Any, config: TrainConfig, *, strategy_name: str) -> None:
    """Runs two examples forward and backward and looks at what the strategy would do to the model's layers.

    Nothing is changed: no weight, no statistic and no random state.

    Args:
        trainer: The model under its strategy.
        feed: The train split.
        config: The train section.
        strategy_name: What `train.strategy` came to.

    Raises:
        BadInput: The model fails on the batch, breaks its contract, or cannot be trained right under the strategy.
        WorldFailure: The first weights already give a loss that is not finite.
    """
    _check_layers(trainer, feed, config, strategy_name)
    shown = f"train.model = {json.dumps(config.model)}"
    inputs, labels = feed.first(_NUM_EXAMPLES)[:2]
    try:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            outputs = trainer.model(inputs, training=False)
            loss = tf.reduce_mean(trainer.objective.losses(outputs, labels))
        variables = [variable.value for variable in trainer.model.trainable_variables]
        gradients = tape.gradient(loss, variables)
    except TriremeError:
        raise
    except Exception as error:
        raise BadInput(f"{shown}: fails on a batch of {len(labels)} examples: {fault_of(error)}") from error
    if not np.isfinite(float(loss)):
        raise WorldFailure(
            f"{shown}: the loss of the first {len(labels)} examples is {float(loss)} before any step: look at the model's"
            " preprocessing, or at the weights it begins with"
        )
    without = [v.path for v, g in zip(trainer.model.trainable_variables, gradients, strict=True) if g is None]
    if len(without) == len(gradients):
        raise BadInput(f"{shown}: none of its {len(gradients)} trainable weights has a part in the answer")
    if without:
        say(f"warning: the loss does not depend on {', '.join(without[:5])}" + (" …" if len(without) > 5 else ""))


def _check_layers(trainer: Trainer, feed: Any, config: TrainConfig, strategy_name: str) -> None:
    if strategy_name == "central_storage":
        stateful = [layer.name for layer in walk(trainer.model) if layer.trainable and layer.non_trainable_variables]
        if stateful:
            raise BadInput(
                f"train.strategy = central_storage: cannot hold what {len(stateful)} layer(s) change by themselves,"
                f" such as the statistics of BatchNormalization or the random state of Dropout ({', '.join(stateful[:5])});"
                " use mirrored, or a model without them"
            )
    layers = batch_norms(trainer.model)
    if not layers:
        return
    replicas = trainer.strategy.num_replicas_in_sync
    shown = f"{len(layers)} BatchNormalization layer(s), {layers[0].name} first"
    if any(layer.synchronized for layer in layers):
        if config.gradient_accumulation_steps > 1 or config.jit_compile:
            setting = "jit_compile" if config.jit_compile else "gradient_accumulation_steps"
            raise BadInput(f"train.{setting}: does not go with synchronised statistics ({shown})")
        return
    parts = replicas * config.gradient_accumulation_steps
    if parts == 1:
        return
    last = feed.num_examples % config.global_batch_size or config.global_batch_size
    if last < parts:
        raise BadInput(
            f"train.global_batch_size = {config.global_batch_size}: the last step of an epoch has {last} examples for"
            f" {parts} shares, and an empty share has no statistics for {shown}; choose another batch, or"
            " train.sync_batch_norm"
        )
    say(
        f"note: {shown}: statistics are those of each share of {config.global_batch_size // parts} examples, so the result"
        " depends on the number of replicas; train.sync_batch_norm makes it independent"
    )
