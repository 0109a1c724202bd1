"""The tasks of a local run as child processes of this one; the counterpart of `pipelines.targets.containers`."""

import contextlib
import signal
from collections.abc import Mapping
from typing import Any

from trainer.devices import REQUEST_VARIABLE

_SHELLS = ("sh", "dash", "bash")  # kfp's shell would die of the signal and leave the task behind


class Processes:
    """Child processes; a terminal's Ctrl-C reaches them without our help.

    Attributes:
        signals: What ends a run early and is forwarded to its task.
        remark: Nothing is to be said: the code is this process's own.
    """

    signals = (signal.SIGTERM,)
    remark = None

    def adapt(self, pipeline: dict[str, Any]) -> None:
        """Takes the request for GPUs out: a training takes those that this machine has, be it none."""
        for executor in pipeline["deploymentSpec"]["executors"].values():
            container = executor["container"]
            container["env"] = [entry for entry in container.get("env", []) if entry["name"] != REQUEST_VARIABLE]

    def runner(self, _: Mapping[str, str]) -> Any:
        """kfp's runner; the children inherit this process's variables."""
        from kfp import local

        return local.SubprocessRunner(use_venv=False)

    def explained(self, error: Exception) -> Exception:
        """The error itself."""
        return error

    def forward(self, number: int) -> bool:
        """Sends a signal to the running task; whether there was one."""
        import psutil

        pending, told = psutil.Process().children(), False
        while pending:
            child = pending.pop()
            with contextlib.suppress(psutil.Error):
                if child.name() in _SHELLS:
                    pending += child.children()
                else:  # a task tells its own processes, once: a second signal would end them at once
                    child.send_signal(number)
                    told = True
        return told

    def end(self) -> list[int]:
        """Nothing is left of a process that ended; kfp keeps its exit code to itself."""
        return []
