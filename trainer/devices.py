"""The accelerators that are really here, against those that were asked for: said once, refused in one line.

    found = look()                    # what TensorFlow, the driver, /dev/shm and the environment say
    check(found, num_replicas=2)      # BadInput or WorldFailure instead of a silent run on the CPU
    for line in describe(found):
        say(line)

What was found is plain data, so that the rules can be tried on a machine without a GPU.
"""

import ctypes
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import BadInput, WorldFailure

REQUEST_VARIABLE = "TRIREME_NUM_ACCELERATORS"
"""Says inside a task how many GPUs the pipeline asked for; set when the pipeline is compiled."""

# A CUDA release runs on every driver that knows the release's major version: the first one that does, by NVIDIA's
# "CUDA Compatibility" guide, table of minor version compatibility.
_FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_SHM = "/dev/shm"  # noqa: S108 - looked at, not written to
_DEFAULT_SHM_BYTES = 64 * 1024**2  # what Docker and Kubernetes give when nobody says otherwise


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one process sees of its machine's GPUs."""

    requested: int | None = None
    """GPUs that were asked for; None: nobody said."""
    visible: tuple[str, ...] = ()
    """The GPUs that TensorFlow sees, each with its name and compute capability."""
    driver: str | None = None
    """Version of the NVIDIA driver, such as `550.54.15`; None: there is none."""
    driver_cuda: tuple[int, int] | None = None
    """Highest CUDA version that the driver knows; None: the driver's library is not here."""
    built_cuda: str | None = None
    """CUDA version that TensorFlow was built for; None: it was built without CUDA."""
    built_cudnn: str | None = None
    """cuDNN version that TensorFlow was built for."""
    shm_bytes: int | None = None
    """Size of `/dev/shm`; None: there is none."""
    hidden: bool = False
    """Whether CUDA_VISIBLE_DEVICES hides every GPU."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """The NCCL_* settings of the environment."""


def look() -> Found:
    """Asks TensorFlow, the driver, the file system and the environment. Starts no GPU."""
    import tensorflow as tf

    built = tf.sysconfig.get_build_info()
    visible = tuple(_named(gpu) for gpu in tf.config.list_physical_devices("GPU"))
    shm = Path(_SHM)
    return Found(
        requested=_requested(os.environ),
        visible=visible,
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        driver_cuda=_driver_cuda(),
        built_cuda=built.get("cuda_version") if built.get("is_cuda_build") else None,
        built_cudnn=built.get("cudnn_version") if built.get("is_cuda_build") else None,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        nccl={key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")},
    )


def check(found: Found, num_replicas: int) -> None:
    """Refuses what would fail later, or would run on the CPU without a word.

    Args:
        found: What `look` answers.
        num_replicas: Replicas that exchange gradients on this machine.

    Raises:
        BadInput: What was asked for and what the image or the container offers do not fit.
        WorldFailure: The machine's driver is too old.
    """
    wanted = found.requested
    if wanted and found.built_cuda is None:
        raise BadInput(
            f"{wanted} GPU(s) were asked for and this TensorFlow was built without CUDA: use the gpu variant of the image"
        )
    if found.built_cuda is None or (found.hidden and not wanted):
        return
    if wanted and found.driver is None and found.driver_cuda is None:
        raise BadInput(
            f"{wanted} GPU(s) were asked for and there is no NVIDIA driver here: run the container with --gpus all, or on"
            " a node that offers them"
        )
    if found.driver_cuda is not None and found.driver_cuda[0] < _major(found.built_cuda):
        needed = _FIRST_DRIVERS.get(_major(found.built_cuda))
        raise WorldFailure(
            f"the NVIDIA driver {found.driver or ''} knows CUDA up to {_dotted(found.driver_cuda)} and this TensorFlow needs"
            f" {found.built_cuda}: update the driver of the host" + (f" to {needed} or newer" if needed else "")
        )
    if wanted is not None and len(found.visible) < wanted:
        raise BadInput(
            f"{wanted} GPU(s) were asked for and {len(found.visible)} are visible"
            + (": CUDA_VISIBLE_DEVICES hides them" if found.hidden else ": look at CUDA_VISIBLE_DEVICES and at --gpus")
        )
    if found.driver_cuda is not None and not found.visible:
        raise WorldFailure(
            f"there is an NVIDIA driver {found.driver or ''} and TensorFlow sees no GPU: pass one to the container (--gpus"
            " all), or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU"
        )
    several = len(found.visible) > 1 and num_replicas > 1
    if several and found.shm_bytes is not None and found.shm_bytes <= _DEFAULT_SHM_BYTES:
        raise BadInput(
            f"{_SHM} has {found.shm_bytes // 1024**2} MB and {num_replicas} replicas exchange gradients through it: give"
            " the container --shm-size=1g, or the pod a memory-backed volume there"
        )


def describe(found: Found) -> list[str]:
    """What is worth a line in the log: nothing on a machine without GPUs."""
    if not found.visible:
        return []
    shm = f"no {_SHM}" if found.shm_bytes is None else f"{_SHM} {found.shm_bytes // 1024**2:,} MB"
    known = f" (CUDA up to {_dotted(found.driver_cuda)})" if found.driver_cuda else ""
    lines = [
        f"{len(found.visible)} GPU(s): {', '.join(found.visible)}; driver {found.driver or 'unknown'}{known}; TensorFlow"
        f" built for CUDA {found.built_cuda}, cuDNN {found.built_cudnn}; memory grows as it is needed; {shm}"
    ]
    if found.nccl:
        lines.append("NCCL: " + ", ".join(f"{key}={value}" for key, value in found.nccl.items()))
    return lines


def driver_version(file: Path) -> str | None:
    """The version in what the kernel module says of itself; None where there is no such file."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1] if match else None


def _driver_cuda() -> tuple[int, int] | None:
    try:
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _requested(environment: Mapping[str, str]) -> int | None:
    text = environment.get(REQUEST_VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise BadInput(f"{REQUEST_VARIABLE} = {text}: must be a whole number")
    return int(text)


def _named(gpu: Any) -> str:
    import tensorflow as tf

    details = tf.config.experimental.get_device_details(gpu)
    capability = details.get("compute_capability")
    name = details.get("device_name", gpu.name)
    return f"{name} (compute {_dotted(capability)})" if capability else name


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
