"""The containers of a local run: what they are given, and how a signal reaches the task inside.

    containers = Containers(config, root, say)
    containers.runner({"TRIREME_EVENTS": "1"})   # for kfp.local.init
    containers.forward(signal.SIGTERM)           # True: a task got it
    containers.end()                             # whatever is left of them; their exit codes

A task finds the root, the folders that its configuration names and the host's TFDS data under the same names as on the
host, belongs to the person who started the run, and reaches the bucket that the host reaches, an emulator included.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelines.config import Config
from trainer.errors import BadInput, TriremeError, WorldFailure
from trainer.provenance import source

RUN_LABEL = "trireme.run"
CODE_LABEL = "trireme.code.digest"

_NO_ENGINE = "no Docker engine answers at {} ({}): start one, or run without --runner docker"
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

    def __init__(self, config: Config, root: Path, say: Callable[[str], None]) -> None:
        """Looks for the engine, the image, which is fetched where it has to be, and GPUs where they are asked for.

        Raises:
            BadInput: No engine answers, it has no such image, or no such GPUs.
            WorldFailure: The image's registry or the engine does not do its part.
        """
        self._config, self._root = config, root
        self._label = f"{RUN_LABEL}={secrets.token_hex(8)}"
        self._client = connect()
        self._began = time.time()
        image = config.cluster.image
        found = image_labels(self._client, image)
        if found is None and "/" not in image:
            raise BadInput(
                f"cluster.image = {image}: the Docker engine has no such image; build it with `make image`"
                " (`make image VARIANT=cpu` without GPUs)"
            )
        if found is None:
            say(f"fetching the image {image} …")
            found = _fetch(self._client, image)
        self._devices = self._try_devices()
        remark = code_remark(found)
        self.remark = f"the image {image} {remark}" if remark else None

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
        options = dict(self._devices)
        if urlsplit(os.environ.get("STORAGE_EMULATOR_HOST", "")).hostname in _LOOPBACK:
            options["network_mode"] = "host"  # the host's loopback is where the emulator listens
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
        """What a person can do about an error of the engine; any other error as it is."""
        return _explained(error) or error

    def forward(self, number: int) -> bool:
        """Sends a signal to the task in each running container; whether there was one."""
        running = self._client.containers.list(ignore_removed=True, filters={"label": self._label})
        for container in running:
            with contextlib.suppress(Exception):  # it ended meanwhile
                container.exec_run(["python3", "-c", _FORWARD, str(int(number))])
        return bool(running)

    def end(self) -> list[int]:
        """Ends and removes every container of the run; exit codes of those that had ended, in that order.

        An engine that is gone has nothing left to end, and says nothing."""
        import docker

        codes: list[int] = []
        with contextlib.suppress(*_engine_errors()):
            died = self._client.events(
                since=f"{self._began:.6f}", until=f"{time.time():.6f}", decode=True,
                filters={"type": "container", "event": "die", "label": self._label},
            )  # fmt: skip
            codes = [int(event["Actor"]["Attributes"]["exitCode"]) for event in died]
            mine = {"all": True, "ignore_removed": True, "filters": {"label": self._label}}
            for _ in range(20):  # one that is just being started or removed cannot be removed at once
                if not (found := self._client.containers.list(**mine)):
                    break
                for container in found:
                    with contextlib.suppress(docker.errors.APIError):
                        container.remove(force=True)
                time.sleep(0.1)
        self._client.close()
        return codes

    def _try_devices(self) -> dict[str, Any]:
        """Arguments of `docker run` for the GPUs that the configuration asks for, once the engine has handed them out.

        Raises:
            BadInput: It has none, or too few.
        """
        import docker

        accelerator = self._config.cluster.accelerator
        if accelerator is None:
            return {}
        options = {
            "device_requests": [docker.types.DeviceRequest(count=accelerator.count, capabilities=[["gpu"]])],
            "shm_size": "1g",  # several GPUs exchange gradients through it, and Docker's own choice is 64 MB
        }
        tried = self._client.containers.create(
            self._config.cluster.image, entrypoint=["true"], network_mode="none", **options
        )
        try:
            tried.start()
        except docker.errors.APIError as error:
            raise BadInput(
                f"cluster.accelerator: this Docker engine does not hand out {accelerator.count} GPU(s) ({_said(error)}):"
                " install NVIDIA's container toolkit beside it, or train on the CPU with --set cluster.accelerator=null"
            ) from None
        finally:
            tried.remove(force=True)
        return options

    def _folders(self) -> list[Path]:
        """The root, the host's TFDS data, and the absolute paths in the configuration that are there."""
        named = (Path(text) for text in _texts(self._config.model_dump(mode="json")) if text.startswith("/"))
        return list(dict.fromkeys([self._root, _tfds_folder(), *(path for path in named if path.exists())]))


def connect() -> Any:
    """A client of the Docker engine that DOCKER_HOST or the default socket names.

    Raises:
        BadInput: No engine answers, or the `docker` package is not installed.
    """
    named = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    address = urlsplit(named)
    if address.scheme == "unix" and not Path(address.path).is_socket():
        raise BadInput(_NO_ENGINE.format(named, f"there is no {address.path}"))
    try:
        import docker

        client = docker.from_env()
        client.ping()
    except Exception as error:
        raise BadInput(
            _NO_ENGINE.format(named, str(error).splitlines()[0] if str(error) else type(error).__name__)
        ) from None
    return client


def image_labels(client: Any, image: str) -> dict[str, str] | None:
    """Labels of an image that the engine has; None where it has none of that name.

    Raises:
        WorldFailure: The engine does not say.
    """
    import docker

    try:
        return dict(client.images.get(image).labels)
    except docker.errors.ImageNotFound:
        return None
    except _engine_errors() as error:
        raise _explained(error) from None


def _fetch(client: Any, image: str) -> dict[str, str]:
    import docker

    try:
        return dict(client.images.pull(image).labels)
    except docker.errors.APIError as error:
        kind = BadInput if isinstance(error, docker.errors.NotFound) else WorldFailure
        raise kind(f"cluster.image = {image}: the Docker engine cannot fetch it: {_said(error)}") from None
    except _engine_errors() as error:
        raise _explained(error) from None


def _engine_errors() -> tuple[type[Exception], ...]:
    """What the engine's client raises; where the connection breaks, its library for HTTP shows through."""
    import docker
    import requests

    return docker.errors.DockerException, requests.exceptions.RequestException


def _explained(error: Exception) -> TriremeError | None:
    """The engine's error as one line with what to do; None for an error that is not the engine's."""
    import docker

    if isinstance(error, docker.errors.APIError):
        return WorldFailure(f"the Docker engine refused: {_said(error)}")
    if isinstance(error, _engine_errors()):
        return WorldFailure(
            "the Docker engine does not answer any more: look after it and run again; a training goes on from its last"
            " checkpoint"
        )
    return None


def _said(error: Any) -> str:
    """The engine's own words in an error, on one line."""
    return " ".join(str(error.explanation or error).split())


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
