"""Name → `tf.distribute.Strategy`, checked against the devices that are really there."""

from typing import Any

from trainer.config import TrainConfig
from trainer.errors import BadInput


def build_strategy(config: TrainConfig) -> Any:
    """The strategy that `train.strategy` names. Must come before TensorFlow touches a device.

    Raises:
        BadInput: The devices cannot be had any more because TensorFlow has started already.
    """
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    if config.strategy == "default":
        return tf.distribute.get_strategy()
    if config.strategy == "one_device":
        return tf.distribute.OneDeviceStrategy("/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0")
    devices = None
    if config.num_virtual_devices is not None:
        split_cpu(config.num_virtual_devices)
        devices = [f"/cpu:{index}" for index in range(config.num_virtual_devices)]
    elif not tf.config.list_physical_devices("GPU"):
        devices = ["/cpu:0"]
    # Without GPUs the collective operations that mirrored chooses by itself fail with several steps in one graph call.
    cross_device_ops = None if devices is None else tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=cross_device_ops)


def split_cpu(num_devices: int) -> None:
    """Splits the CPU into logical devices `/cpu:0` and on.

    Raises:
        BadInput: TensorFlow has started with another number.
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
    except RuntimeError:
        have = len(tf.config.list_logical_devices("CPU"))
        if have < num_devices:
            raise BadInput(
                f"train.num_virtual_devices = {num_devices}: this process has already started TensorFlow with {have}"
            ) from None
