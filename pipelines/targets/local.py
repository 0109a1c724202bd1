"""Runs the compiled pipeline on this machine with kfp's local runner, and says what became of it.

    outcome = run(config, root=Path("output"), runner="subprocess", show=Display())
    outcome.document["verdict"], outcome.exit_code

A run is a folder `<root>/runs/<name>-<time>-<four letters>` with the compiled `pipeline.yaml`, one log and one record a
task, the artifacts as kfp lays them out, `report.html` and `run.json`. Prepared data, checkpoints and the registry stand
beside the runs, under the root.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipelines.config import Config
from pipelines.stopping import Stopped
from pipelines.targets.containers import Containers
from pipelines.targets.output import TaskOutput
from pipelines.targets.processes import Processes
from trainer.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    BadInput,
    TriremeError,
)
from trainer.provenance import provenance
from trainer.storage import is_remote, join, write_json
from trainer.tasks import RECORDS_FOLDER

RUN_FILE = "run.json"
_EXIT_TASK = "record-outcome"
_FULL_BYTES = 1 << 16  # a task's record and kfp's own file need that much
_STATES = {EXIT_DONE: "succeeded", EXIT_INTERRUPTED: "interrupted", EXIT_PREEMPTED: "preempted"}


@dataclass
class Outcome:
    """How a run ended."""

    document: dict[str, Any]
    """What `run.json` holds."""
    exit_code: int
    """For the process."""
    message: str | None = None
    """What failed, in one sentence, if something did."""


@dataclass
class _Run:
    config: Config
    root: Path
    folder: Path
    output: TaskOutput
    tasks: Containers | Processes
    remote: str | None = None
    exit_codes: list[int] = field(default_factory=list)
    """Of the tasks that ended, in their order, where they are known."""
    started: float = field(default_factory=time.monotonic)


def run(config: Config, root: str | Path, runner: str, display: Any) -> Outcome:
    """Compiles the configuration and executes that very YAML.

    Args:
        config: The run's configuration.
        root: Folder for runs, prepared data, checkpoints and the registry; or a `gs://` prefix, where each task's outputs
            are published as it ends, and prepared data and the registry live. The run itself is then worked on in
            `output/` here.
        runner: `subprocess` or `docker`.
        display: Shows tasks as they go; see `pipelines.targets.output`.

    Raises:
        BadInput: The root cannot be written, or there is no Docker engine.
    """
    if not str(root):
        raise BadInput("--root = : names no folder")
    remote = str(root) if is_remote(root) else None
    root = (Path("output") if remote else Path(root)).expanduser().absolute()
    tasks = Containers(config, root, lambda text: display.said("run", text)) if runner == "docker" else Processes()
    folder = _new_run_folder(config, root)
    work = _Run(config, root, folder, TaskOutput(folder / "logs", display), tasks, remote)
    if tasks.remark:
        display.said("run", tasks.remark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kfp's remarks on images and resources, which mean nothing on this machine
        failure = _execute(work)
    return _conclude(work, failure)


def _new_run_folder(config: Config, root: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = root / "runs" / f"{config.name}-{stamp}-{secrets.token_hex(2)}"
    try:
        for needed in (folder, folder / "logs", folder / "tmp", root / "prepared", root / "models"):
            needed.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--root = {root}: cannot be written: {error.strerror} ({error.filename})") from None
    return folder


def _execute(work: _Run) -> BaseException | None:
    """Runs the pipeline to its end; what stopped it, if anything did."""
    from kfp import components, dsl, local

    from pipelines.training import compile_pipeline, places_of

    package = work.folder / "pipeline.yaml"
    compile_pipeline(work.config, package)
    moment = datetime.now(UTC).isoformat(timespec="seconds")  # kfp's local runner cannot tell it
    text = package.read_text(encoding="utf-8").replace(dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER, moment)
    document, *others = yaml.safe_load_all(text)
    _drop_retries(document)
    work.tasks.adapt(document)
    pipeline = components.load_component_from_text(yaml.safe_dump_all([document, *others]))
    environment = {
        "TRIREME_EVENTS": "1",
        "TRIREME_RUN_DIR": str(work.folder),
        "PYTHONUNBUFFERED": "1",
    }
    if work.remote:
        environment["TRIREME_RUN_URI"] = join(work.remote, "runs", work.folder.name)
    local.init(
        work.tasks.runner(environment),
        pipeline_root=str(work.folder),
        workspace_root=str(work.folder / "tmp" / "workspace"),
        raise_on_error=True,
    )
    # kfp leaves a folder for each task where temporary files go.
    with _environment(environment | {"TMPDIR": str(work.folder / "tmp")}), _stop_signals(work.tasks) as came:
        work.output.starting = partial(_refuse_more, came)
        try:
            with contextlib.redirect_stdout(work.output):
                pipeline(**places_of(work.config, work.remote or str(work.root)))
        except KeyboardInterrupt as error:
            return error
        except Exception as error:
            return Stopped(came[0]) if came else work.tasks.explained(error)
        finally:
            work.exit_codes = work.tasks.end()
            work.output.close()
            shutil.rmtree(work.folder / "tmp", ignore_errors=True)
    return None


def _drop_retries(document: dict[str, Any]) -> None:
    """On a person's own machine a failing task fails at once; the pauses between tries are for clusters."""
    for component in [document["root"], *document["components"].values()]:
        for task in component.get("dag", {}).get("tasks", {}).values():
            task.pop("retryPolicy", None)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _refuse_more(came: list[int], task: str) -> None:
    """kfp goes on with the tasks that do not need one that was stopped. Once a signal came, only the exit task starts."""
    if came and task != _EXIT_TASK:
        raise Stopped(came[0])


@contextlib.contextmanager
def _stop_signals(tasks: Containers | Processes) -> Iterator[list[int]]:
    """The first signal reaches the running task, whose end then ends the run: a training saves before it goes. The second
    one, or one between two tasks, ends the run at once. Answers the signals that came."""
    came: list[int] = []

    def stop(number: int, _: Any) -> None:
        came.append(number)
        if len(came) > 1 or not tasks.forward(number):
            raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in tasks.signals}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(work: _Run, failure: BaseException | None) -> Outcome:
    records = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted((work.folder / RECORDS_FOLDER).glob("*.json"))
    }
    artifacts = _artifacts(work.folder)
    # Where the champion changed meanwhile, the model was judged again, and that is what counts.
    again = artifacts.get("pushed_model")
    verdict = _read(again, "verdict.json") or _read(artifacts.get("verdict"), "verdict.json")
    evaluation = _read(again, "evaluation.json") or _read(artifacts.get("evaluation"), "evaluation.json")
    if failure is None and (silent := _silent(work, records)):  # kfp takes a container that is gone for a success
        failure = RuntimeError(f"{silent} left no record of success")
    decision = _read(artifacts.get("decision"), "decision.json")
    if decision and not decision["train"]:
        verdict = {"verdict": "skipped", "reasons": [decision["reason"]]}
    exit_code, message = _explained(work, records, failure)
    document = {
        "run_dir": str(work.folder),
        "state": _STATES.get(exit_code, "failed"),
        "error": message,
        "verdict": verdict["verdict"] if verdict else None,
        "reasons": verdict["reasons"] if verdict else [],
        "metrics": {"test": evaluation["metrics"]} if evaluation else {},
        "seconds": {**work.output.seconds, "total": round(time.monotonic() - work.started, 3)},
        "artifacts": _shown_artifacts(work, artifacts),
        "digests": {"examples": evaluation["data_digest"] if evaluation else None},
        "config": work.config.model_dump(mode="json"),
        **next((record["provenance"] for record in records.values() if "provenance" in record), provenance()),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    pushed = _read(artifacts.get("pushed_model"), "version.json")
    if pushed:
        document["version"] = pushed["version"]
        document["digests"]["model"] = pushed.get("digest")
    try:
        partial = work.folder / f".{RUN_FILE}.partial"
        partial.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(work.folder / RUN_FILE)
        if work.remote:
            write_json(join(work.remote, "runs", work.folder.name, RUN_FILE), document)
    except TriremeError as error:
        message = f"{message + '; ' if message else ''}{RUN_FILE} could not be published: {error}"
        exit_code = exit_code or EXIT_FAILED
    except OSError as error:
        message = f"{message + '; ' if message else ''}{work.folder / RUN_FILE} could not be written: {error.strerror}"
        exit_code = exit_code or EXIT_FAILED
    return Outcome(document, exit_code, message)


def _explained(work: _Run, records: dict[str, Any], failure: BaseException | None) -> tuple[int, str | None]:
    """Exit code and one sentence that names the task and the cause."""
    if failure is None:
        return EXIT_DONE, None
    failed = [record for record in records.values() if record["status"] == "failed"]
    task = failed[0]["task"] if failed else _silent(work, records) or work.output.task
    log = f"\n  log: {work.folder / 'logs' / f'{task}.log'}" if task else ""
    if isinstance(failure, Stopped) and failure.number == signal.SIGTERM and not failed:
        return EXIT_PREEMPTED, f"ended by SIGTERM in {task or 'no task'}; run again{log}"
    if isinstance(failure, KeyboardInterrupt) and getattr(failure, "number", signal.SIGINT) == signal.SIGINT:
        return EXIT_INTERRUPTED, f"interrupted in {task or 'no task'}" + (
            f": {failed[0]['error']}" if failed else ""
        ) + log
    if failed:
        return failed[0]["exit_code"], f"task {task} failed: {failed[0]['error']}{log}"
    if isinstance(failure, TriremeError):
        return failure.exit_code, str(failure)
    if task and shutil.disk_usage(work.folder).free < _FULL_BYTES:  # it could not leave a record either
        return EXIT_FAILED, f"task {task} failed: No space left on device: {work.folder}{log}"
    if task:
        return EXIT_FAILED, f"task {task} ended without a word{_how(work, task)}{log}"
    return EXIT_FAILED, f"the pipeline could not be run: {failure}"


def _how(work: _Run, task: str) -> str:
    """How a task ended that could not say it itself."""
    code = dict(zip(work.output.seconds, work.exit_codes, strict=False)).get(task)
    if code in (None, 128 + signal.SIGKILL):
        return ": killed, perhaps for want of memory"
    return f", with exit code {code}: see its log, and whether {work.config.cluster.image} is made from Trireme's image"


def _silent(work: _Run, records: dict[str, Any]) -> str | None:
    """The first task that ended and left no record."""
    return next((task for task in work.output.seconds if task not in records), None)


def _artifacts(folder: Path) -> dict[str, Path]:
    """Artifact folders and files by name, as kfp laid them out: <pipeline>-<time>/<task>/<artifact>."""
    found = {}
    for task in sorted(folder.glob("*/*/executor_output.json")):
        try:
            content = json.loads(task.read_text(encoding="utf-8"))
        except ValueError:  # kfp's executor had no room left for it
            continue
        for name, listed in content.get("artifacts", {}).items():
            path = Path(listed["artifacts"][0]["uri"])
            if path.exists():
                found[name] = path
    return found


def _shown_artifacts(work: _Run, artifacts: dict[str, Path]) -> dict[str, str | None]:
    shown: dict[str, str | None] = {}
    for name in ("examples", "model", "report", "pushed_model"):
        shown[name] = str(artifacts[name]) if name in artifacts else None
    if "report" in artifacts:
        report = work.folder / "report.html"
        with contextlib.suppress(OSError):  # no room for a second one: the artifact itself is shown
            shutil.copyfile(artifacts["report"], report)
            shown["report"] = str(report)
    pushed = _read(artifacts.get("pushed_model"), "version.json")
    shown["pushed_model"] = pushed["uri"] if pushed else None
    return shown


def _read(folder: Path | None, name: str) -> Any:
    if folder is None or not (folder / name).is_file():
        return None
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError:  # the disk was full when it was written, and its task has failed
        return None
