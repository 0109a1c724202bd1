"""The containers of a local run: what they are given, and how a signal reaches the task inside.

    containers = Containers(config, root)
    containers.runner({"TRIREME_EVENTS": "1"})   # for kfp.local.init
    containers.forward(signal.SIGTERM)           # True: a task got it
    containers.end()                             # whatever is left of them

A task finds the root, the folders that its configuration names and the host's TFDS data under the same names as on the
host, belongs to the person who started the run, and reaches the bucket that the host reaches, an emulator included.
"""

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelines.config import Config
from trainer.errors import BadInput
from trainer.provenance import source

RUN_LABEL = "trireme.run"
CODE_LABEL = "trireme.code.digest"

_NO_ENGINE = "no Docker engine answers ({}): {}"
_PASSED_ON = ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT", "NO_GCE_CHECK")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SHELLS = ("sh", "dash", "bash")  # kfp's shell would die of the signal and take the task with it
_FORWARD = f"""\
import os, pathlib, sys
for process in pathlib.Path("/proc").iterdir():
    if process.name.isdigit() and int(process.name) != os.getpid():
        try:
            if (process / "comm").read_text().strip() not in {_SHELLS}:
                os.kill(int(process.name), int(sys.argv[1]))
        except OSError:
            pass  # it ended meanwhile
"""


class Containers:
    """The containers of one run, told from all others by a label.

    Attributes:
        signals: What ends a run early and is forwarded to its task: a container hears nothing of a terminal's Ctrl-C.
        remark: What is to be said of the image's code, if anything.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, config: Config, root: Path) -> None:
        """Looks for the engine and the image.

        Raises:
            BadInput: No engine answers, or it does not have the image and cannot fetch it by that name.
        """
        self._config, self._root = config, root
        self._label = f"{RUN_LABEL}={secrets.token_hex(8)}"
        self._client = connect()
        found = image_labels(self._client, config.cluster.image)
        if found is None and "/" not in config.cluster.image:
            raise BadInput(
                f"cluster.image = {config.cluster.image}: the Docker engine has no such image; build it with `make image`"
                " (`make image VARIANT=cpu` without GPUs)"
            )
        remark = None if found is None else code_remark(found)
        self.remark = f"the image {config.cluster.image} {remark}" if remark else None

    def adapt(self, pipeline: dict[str, Any]) -> None:
        """The compiled pipeline runs as it is."""

    def runner(self, environment: Mapping[str, str]) -> Any:
        """kfp's runner with all that a task needs, and with these variables."""
        import docker
        from kfp import local

        environment = {**environment} | {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        mounts = [docker.types.Mount(str(folder), str(folder), type="bind") for folder in self._folders()]
        if credentials := _credentials():
            environment["GOOGLE_APPLICATION_CREDENTIALS"] = str(credentials)
            mounts.append(docker.types.Mount(str(credentials), str(credentials), type="bind", read_only=True))
        tfds = _tfds_folder()
        tfds.mkdir(parents=True, exist_ok=True)
        environment["TFDS_DATA_DIR"] = str(tfds)
        options: dict[str, Any] = {}
        if urlsplit(os.environ.get("STORAGE_EMULATOR_HOST", "")).hostname in _LOOPBACK:
            options["network_mode"] = "host"  # the host's loopback is where the emulator listens
        if accelerator := self._config.cluster.accelerator:
            options["device_requests"] = [docker.types.DeviceRequest(count=accelerator.count, capabilities=[["gpu"]])]
            options["shm_size"] = "1g"  # several GPUs exchange gradients through it, and Docker's own choice is 64 MB
        return local.DockerRunner(
            environment=environment,
            mounts=mounts,
            labels=dict([self._label.split("=")]),
            user=f"{os.getuid()}:{os.getgid()}",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            **options,
        )

    def explained(self, error: Exception) -> Exception:
        """What a person can do about an error of the engine, where that is known; else the error."""
        if "could not select device driver" in str(error):
            return BadInput(
                "cluster.accelerator: this Docker engine hands out no GPUs: install NVIDIA's container toolkit beside it, or"
                " train on the CPU with --set cluster.accelerator=null"
            )
        return error

    def forward(self, number: int) -> bool:
        """Sends a signal to the task in each running container; whether there was one."""
        running = self._client.containers.list(ignore_removed=True, filters={"label": self._label})
        for container in running:
            with contextlib.suppress(Exception):  # it ended meanwhile
                container.exec_run(["python3", "-c", _FORWARD, str(int(number))])
        return bool(running)

    def end(self) -> None:
        """Ends and removes every container of the run."""
        for container in self._client.containers.list(all=True, ignore_removed=True, filters={"label": self._label}):
            with contextlib.suppress(Exception):  # the engine is removing it already
                container.remove(force=True)
        self._client.close()

    def _folders(self) -> list[Path]:
        """The root, the host's TFDS data, and the absolute paths in the configuration that are there."""
        named = (Path(text) for text in _texts(self._config.model_dump(mode="json")) if text.startswith("/"))
        return list(dict.fromkeys([self._root, _tfds_folder(), *(path for path in named if path.exists())]))


def connect(remedy: str = "start one, or run without --runner docker") -> Any:
    """A client of the Docker engine that DOCKER_HOST or the default socket names.

    Args:
        remedy: What to do where none answers.

    Raises:
        BadInput: No engine answers, or the `docker` package is not installed.
    """
    address = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    if address.scheme == "unix" and not Path(address.path).is_socket():
        raise BadInput(_NO_ENGINE.format(f"there is no {address.path}", remedy))
    try:
        import docker

        client = docker.from_env()
        client.ping()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(_NO_ENGINE.format(reason, remedy)) from None
    return client


def image_labels(client: Any, image: str) -> dict[str, str] | None:
    """Labels of an image that the engine has; None where it has none of that name."""
    import docker

    try:
        return dict(client.images.get(image).labels)
    except docker.errors.ImageNotFound:
        return None


def code_remark(labels: Mapping[str, str]) -> str | None:
    """What is to be said of the code inside an image; None: it is this checkout's."""
    inside, here = labels.get(CODE_LABEL), source()["digest"]
    if inside == here:
        return None
    if not inside:
        return f"does not say which code it holds (label {CODE_LABEL}); build it with `make image`"
    return f"holds other code ({_short(inside)}) than this checkout ({_short(here)}); build it again with `make image`"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _tfds_folder() -> Path:
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser().absolute()


def _credentials() -> Path | None:
    """The file of Google's application default credentials, where there is one."""
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    file = Path(named or "~/.config/gcloud/application_default_credentials.json").expanduser().absolute()
    return file if file.is_file() else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
