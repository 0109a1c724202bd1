"""What was found decides: every rule is tried with findings of machines that are not here."""

from dataclasses import replace

import pytest

from trainer import devices
from trainer.devices import Found, check, describe, driver_version
from trainer.errors import BadInput, WorldFailure

TWO_GPUS = Found(
    requested=2,
    visible=("Tesla T4 (compute 7.5)", "Tesla T4 (compute 7.5)"),
    driver="550.54.15",
    driver_cuda=(12, 4),
    built_cuda="12.9.1",
    built_cudnn="9",
    shm_bytes=1024**3,
)
WITHOUT_CUDA = Found(shm_bytes=24 * 1024**3)


@pytest.mark.parametrize(
    "found",
    [
        TWO_GPUS,
        replace(TWO_GPUS, requested=None),
        replace(TWO_GPUS, requested=1),
        WITHOUT_CUDA,
        replace(WITHOUT_CUDA, driver="550.54.15", driver_cuda=(12, 4)),  # a laptop with a GPU and the CPU wheel
        Found(built_cuda="12.9.1"),  # the GPU image on a machine without GPUs, and nobody asked for one
        replace(TWO_GPUS, requested=None, visible=(), hidden=True),
        replace(TWO_GPUS, driver=None),  # WSL has the driver's library and no /proc/driver
    ],
)
def test_what_fits_is_let_through(found):
    check(found, num_replicas=len(found.visible) or 1)


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (replace(WITHOUT_CUDA, requested=1), BadInput, "built without CUDA: use the gpu variant"),
        (Found(requested=1, built_cuda="12.9.1"), BadInput, "no NVIDIA driver here"),
        (replace(TWO_GPUS, requested=4), BadInput, "4 GPU(s) were asked for and 2 are visible"),
        (replace(TWO_GPUS, visible=(), hidden=True), BadInput, "CUDA_VISIBLE_DEVICES hides them"),
        (replace(TWO_GPUS, driver="470.57", driver_cuda=(11, 4), visible=()), WorldFailure, "to 525.60.13 or newer"),
        (replace(TWO_GPUS, requested=None, visible=()), WorldFailure, "TensorFlow sees no GPU"),
        (replace(TWO_GPUS, shm_bytes=64 * 1024**2), BadInput, "/dev/shm has 64 MB and 2 replicas"),
    ],
)
def test_what_would_run_on_the_cpu_or_fail_later_is_refused_in_one_line(found, kind, words):
    with pytest.raises(kind) as caught:
        check(found, num_replicas=2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_replica_needs_no_shared_memory():
    check(replace(TWO_GPUS, requested=1, shm_bytes=64 * 1024**2), num_replicas=1)


def test_the_log_names_gpus_driver_cuda_shared_memory_and_nccl():
    first, second = describe(replace(TWO_GPUS, nccl={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}))
    assert first == (
        "2 GPU(s): Tesla T4 (compute 7.5), Tesla T4 (compute 7.5); driver 550.54.15 (CUDA up to 12.4); TensorFlow built for"
        " CUDA 12.9.1, cuDNN 9; memory grows as it is needed; /dev/shm 1,024 MB"
    )
    assert second == "NCCL: NCCL_DEBUG=WARN, NCCL_SOCKET_IFNAME=eth0"


def test_a_machine_without_gpus_is_not_spoken_of():
    assert describe(WITHOUT_CUDA) == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC version: 12\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder)\n", "560.35.03"),
        ("something else\n", None),
    ],
)  # fmt: skip
def test_the_driver_says_its_version(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "absent") is None


def test_the_request_must_be_a_number(monkeypatch):
    monkeypatch.setenv(devices.REQUEST_VARIABLE, "two")
    with pytest.raises(BadInput, match="TRIREME_NUM_ACCELERATORS = two: must be a whole number"):
        devices.look()


def test_this_machine_is_looked_at(monkeypatch):
    monkeypatch.setenv(devices.REQUEST_VARIABLE, "3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = devices.look()
    assert found.requested == 3
    assert found.nccl == {"NCCL_DEBUG": "INFO"}
    assert found.shm_bytes > 0
