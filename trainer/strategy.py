"""Name → `tf.distribute.Strategy`, checked against the devices and the cluster that are really there.

    strategy = build_strategy(config, description)      # BadInput before TensorFlow does any work

Nothing is changed silently: what cannot be had is refused, with the numbers.
"""

import os
from collections.abc import Mapping
from typing import Any

from trainer.cluster import ClusterDescription
from trainer.config import TrainConfig
from trainer.devices import REQUEST_VARIABLE
from trainer.errors import BadInput


def build_strategy(
    config: TrainConfig, description: ClusterDescription | None = None, environ: Mapping[str, str] = os.environ
) -> Any:
    """The strategy that `train.strategy` names. Must come before TensorFlow touches a device.

    Args:
        config: The train section.
        description: The processes that train together; None: this one is alone.
        environ: Environment variables.

    Raises:
        BadInput: The strategy does not fit the devices or the cluster.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    name = chosen_strategy(config, len(gpus), description)
    _check_accelerators(name, config, len(gpus), environ)
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if name == "default":
        return tf.distribute.get_strategy()
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("/gpu:0" if gpus else "/cpu:0")
    if name == "tpu":
        return _tpu_strategy(environ)
    if name == "multi_worker_mirrored":
        return _multi_worker_strategy(config, description)
    if name == "parameter_server":
        return tf.distribute.ParameterServerStrategy(_resolver(description))
    devices = _local_devices(config, len(gpus))
    if name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=_cross_device_ops(config, len(gpus)))


def chosen_strategy(config: TrainConfig, num_gpus: int, description: ClusterDescription | None) -> str:
    """The strategy's name, with `auto` resolved and the cluster's size checked.

    Raises:
        BadInput: The strategy is for one process and the cluster has several, or the other way round.
    """
    workers = description.num_workers if description else 1
    servers = description.num_parameter_servers if description else 0
    name = config.strategy
    if name == "auto":
        if servers:
            name = "parameter_server"
        elif workers > 1:
            name = "multi_worker_mirrored"
        else:
            name = "mirrored" if num_gpus > 1 else "one_device"
    shown = f"train.strategy = {name}"
    if name == "parameter_server":
        if not servers:
            raise BadInput(f"{shown}: needs parameter servers, and the cluster has 0 (cluster.num_parameter_servers)")
    elif servers:
        raise BadInput(f"{shown}: the cluster has {servers} parameter server(s) that it would not use")
    elif name == "multi_worker_mirrored":
        if workers < 2:
            raise BadInput(f"{shown}: needs at least 2 workers, and there is 1 (cluster.num_workers)")
    elif workers > 1:
        raise BadInput(
            f"{shown}: trains in one process, and the cluster has {workers} workers; use multi_worker_mirrored"
        )
    return name


def split_cpu(num_devices: int) -> None:
    """Splits the CPU into logical devices `/cpu:0` and on.

    Raises:
        BadInput: TensorFlow has started with fewer.
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


def _check_accelerators(name: str, config: TrainConfig, num_gpus: int, environ: Mapping[str, str]) -> None:
    """A GPU image that silently trains on the CPU, or on one of eight, is the classic fault."""
    asked = environ.get(REQUEST_VARIABLE, "")
    if asked.isdecimal() and name != "tpu" and int(asked) > num_gpus:
        raise BadInput(
            f"cluster.accelerator.count = {asked}: TensorFlow sees {num_gpus} GPU(s); use an image with TensorFlow for"
            " GPUs, and look at the node's driver and device plugin"
        )
    if config.num_virtual_devices and num_gpus:
        raise BadInput(
            f"train.num_virtual_devices = {config.num_virtual_devices}: is for machines without accelerators, and this"
            f" one has {num_gpus}"
        )
    if config.cross_device == "nccl" and num_gpus < 2:
        raise BadInput(f"train.cross_device = nccl: adds between GPUs, and TensorFlow sees {num_gpus}")
    if config.communication == "nccl" and num_gpus < 1:
        raise BadInput(f"train.communication = nccl: adds between GPUs, and TensorFlow sees {num_gpus}")


def _local_devices(config: TrainConfig, num_gpus: int) -> list[str]:
    if num_gpus:
        return [f"/gpu:{index}" for index in range(num_gpus)]
    num_devices = config.num_virtual_devices or 1
    if config.num_virtual_devices is not None:
        split_cpu(num_devices)
    return [f"/cpu:{index}" for index in range(num_devices)]


def _cross_device_ops(config: TrainConfig, num_gpus: int) -> Any:
    import tensorflow as tf

    # Between CPUs the collective operations that mirrored chooses by itself fail with several steps in one graph call.
    name = config.cross_device if config.cross_device != "auto" else ("nccl" if num_gpus > 1 else "one_device")
    return {
        "one_device": tf.distribute.ReductionToOneDevice,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "nccl": tf.distribute.NcclAllReduce,
    }[name]()


def _multi_worker_strategy(config: TrainConfig, description: ClusterDescription | None) -> Any:
    import tensorflow as tf

    implementation = {
        "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
        "ring": tf.distribute.experimental.CommunicationImplementation.RING,
        "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    }[config.communication]
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=config.bytes_per_pack, implementation=implementation
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=_resolver(description), communication_options=options
    )


def _resolver(description: ClusterDescription | None) -> Any:
    import tensorflow as tf

    assert description is not None, "chosen_strategy lets no such strategy through without a cluster"
    cluster = {
        kind: addresses for kind, addresses in description.to_tf_config()["cluster"].items() if kind != "evaluator"
    }
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=description.task_type, task_id=description.task_index, rpc_layer="grpc"
    )


def _tpu_strategy(environ: Mapping[str, str]) -> Any:
    import tensorflow as tf

    visible = len(tf.config.list_physical_devices("TPU"))
    if not visible and not environ.get("TPU_NAME"):
        raise BadInput(
            "train.strategy = tpu: TensorFlow sees 0 TPU devices and TPU_NAME is not set; use a TPU node, or mirrored"
        )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(environ.get("TPU_NAME") or "local")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"train.strategy = tpu: the TPU cannot be reached ({reason})") from error
    return tf.distribute.TPUStrategy(resolver)
