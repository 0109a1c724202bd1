"""What each component does, with its settings as JSON strings and its artifacts as objects that have a `path`.

The bodies in components/ call one function here each, so that everything a task does can be run, tested and debugged
without Kubeflow. Imports of TensorFlow stay inside the functions: only the tasks that need it pay for it.
"""

import contextlib
import functools
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.config import (
    JOB_VARIABLE,
    DataConfig,
    EvaluateConfig,
    GroupConfig,
    JobConfig,
    NotifyConfig,
    PushConfig,
    RetrainConfig,
    ServingConfig,
    TrainConfig,
    ValidateConfig,
    parse_json,
)
from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, BadInput, TriremeError, WorldFailure, reason_of
from trainer.outcome import note, read, withdraw_failure
from trainer.progress import TASK_VARIABLE, say
from trainer.provenance import provenance
from trainer.registry import Conflict, Registry, Version

RECORDS_FOLDER = "tasks"


def _task(name: str) -> Callable:
    """Ends a task with one clear sentence and the right exit code, and leaves a record for whoever watches.

    A task whose work needs neither the root nor the run is told both as `noted_in`, so that the exit task learns why it failed.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def task(*args: Any, noted_in: tuple[str, str] | None = None, **kwargs: Any) -> Any:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its notes on CPU instructions hide our lines
            started = time.monotonic()
            root, run = noted_in or _place(function, args, kwargs)
            new = [one for one in args if hasattr(one, "path") and not Path(one.path).exists()]
            try:
                with _named(name):
                    result = function(*args, **kwargs)
                _publish(name, new)
            except BaseException as error:
                code, message = _explained(error)
                _record(name, {"status": "failed", "exit_code": code, "error": message}, started)
                if root and run:
                    note(root, run, "failure", {"task": name, "error": message.splitlines()[0], "exit_code": code})
                traceback.print_exc()
                print(f"{name}: {message}", file=sys.stderr, flush=True)
                sys.exit(code)
            _record(name, {"status": "succeeded", "exit_code": 0}, started)
            if root and run:
                withdraw_failure(root, run, name)
            return result

        return task

    return decorate


@contextlib.contextmanager
def _named(task: str) -> Iterator[None]:
    """Has progress shown under the task's name, by the processes that it starts too."""
    before = os.environ.get(TASK_VARIABLE)
    os.environ[TASK_VARIABLE] = task
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TASK_VARIABLE, None)
        else:
            os.environ[TASK_VARIABLE] = before


@_task("prepare-data")
def prepare_data(data: str, seed: int, root: str, source: str, examples: Any, code: str = "") -> str:
    """Data section, and what `fingerprint_data` found (empty where it did not run) → prepared dataset in `examples.path`.

    Answers where the dataset is, for those that fetch it themselves.
    """
    from trainer.cached import key_of, remember
    from trainer.data.prepare import prepare

    config = parse_json(DataConfig, data, path="data")
    if ":" not in config.name or config.name.rpartition(":")[2][:1].isdigit():  # not a person's own builder
        _leave_keras_out()
    found = json.loads(source) if source else {}
    again = found.pop("again", "")
    if found and config.window is not None:
        window = config.window.model_copy(update={"until": found["until"]})
        config = config.model_copy(update={"window": window})
    manifest = prepare(config, seed, Path(examples.path), storage.join(root, "prepared"))
    examples.metadata.update(
        digest=manifest.digest,
        task=manifest.task,
        num_classes=len(manifest.class_names),
        **{f"num_{name}_examples": split.num_examples for name, split in manifest.splits.items()},
    )
    if found:
        remember(root, key_of(data, seed, code, found), examples.uri, again)
    return examples.uri


@_task("fingerprint-data")
def fingerprint_data(data: str, seed: int, root: str, code: str, run: str, scheduled: str) -> str:
    """Data section → the last day of its window and a digest of its files, as JSON: what the preparation depends on.

    `scheduled` is the moment for which the run was scheduled, where the server knows it; else the window ends now. Where
    the cache would answer with prepared data that was deleted, `again` is another than the last time, and it does not.
    """
    from trainer.cached import again, key_of
    from trainer.data.fingerprint import digest_of, source_of, wanted_files
    from trainer.data.window import moment_of, settled

    config = settled(parse_json(DataConfig, data, path="data"), moment_of(scheduled) or datetime.now(UTC))
    until = config.window.until if config.window else None
    files = wanted_files(source_of(config) or "", config.window)
    found = {"until": until, "digest": digest_of(files)}
    if root and run:
        note(root, run, "data", {**found, "num_files": len(files)})  # for `trireme explain-cache`
    say(f"{config.subject}: {found['digest'][:23]}" + (f", {config.window.days} days until {until}" if until else ""))
    return json.dumps(found | ({"again": anew} if (anew := again(root, key_of(data, seed, code, found), run)) else {}))


@_task("decide-training")
def decide_training(retrain: str, name: str, registry: str, root: str, run: str, examples: Any, decision: Any) -> bool:
    """Prepared data and the champion → whether to train; where not, the run's outcome says so."""
    from trainer.data.manifest import FILE_NAME, read_manifest

    config = parse_json(RetrainConfig, retrain, path="retrain")
    _present(examples, FILE_NAME)
    digest = read_manifest(Path(examples.path)).digest
    champion = Registry(registry, name).champion()
    same = champion is not None and champion.record.get("data_digest") == digest
    if champion is None:
        reason = "there is no champion yet"
    elif not same:
        reason = f"the data differs from what the champion, version {champion.number}, was trained on"
    else:
        reason = f"the data is what the champion, version {champion.number}, was trained on"
    train = not same or config.force
    if same and config.force:
        reason += ", and retrain.force is set"
    content = {"train": train, "reason": reason, "data_digest": digest}
    Path(decision.path).mkdir(parents=True, exist_ok=True)
    (Path(decision.path) / "decision.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    decision.metadata.update(content)
    if not train:
        note(root, run, "skipped", content)
    say(f"{'training' if train else 'skipped'}: {reason}")
    return train


@_task("validate-data")
def validate_data(
    validate: str, schema: str, name: str, registry: str, examples: Any, anomalies: Any, page: Any
) -> None:
    """Validate section, schema (may be empty) and dataset → `anomalies.json` and a page; an error ends the run."""
    from trainer.data.manifest import read_manifest
    from trainer.data.page import render_statistics
    from trainer.data.prepare import sample
    from trainer.data.schema import read_schema
    from trainer.data.statistics import read_statistics
    from trainer.data.validation import validate as find_anomalies
    from trainer.evaluate import write_json
    from trainer.registry_files import data_of

    config = parse_json(ValidateConfig, validate, path="validate_data")
    folder = Path(examples.path)
    manifest = read_manifest(folder)
    statistics = read_statistics(folder, manifest)
    expected = read_schema(schema, path="schema") if schema else None
    baseline = None
    champions = Registry(registry, name)
    if (champion := champions.champion()) is not None:
        with tempfile.TemporaryDirectory() as staged:
            kept = data_of(champions.fetch(champion.number, Path(staged) / "champion"))
        if kept is not None:
            expected, baseline = expected or kept[0], kept[1]
    if expected is None:
        say("there is no schema and no champion yet: only what the data tells of itself is looked at")
    found = find_anomalies(config, manifest, statistics, expected, baseline)
    Path(anomalies.path).mkdir(parents=True, exist_ok=True)
    write_json(Path(anomalies.path) / "anomalies.json", [anomaly._asdict() for anomaly in found])
    Path(page.path).parent.mkdir(parents=True, exist_ok=True)
    Path(page.path).write_text(
        render_statistics(manifest, statistics, sample(folder, manifest), found), encoding="utf-8"
    )
    for anomaly in found:
        say(f"{anomaly.severity}: {anomaly.check}: {anomaly}")
    errors = [anomaly for anomaly in found if anomaly.severity == "error"]
    if errors:
        raise BadInput(f"the data is not what was expected ({len(errors)} errors): " + "; ".join(map(str, errors[:5])))


@_task("train-model")
def train_model(train: str, group: str, seed: int, name: str, root: str, examples: Any, model: Any) -> None:
    """Train section and prepared dataset → exported model in `model.path`, by one process or by a group of them."""
    from trainer.data.manifest import FILE_NAME

    config = parse_json(TrainConfig, train, path="train")
    processes = parse_json(GroupConfig, group, path="cluster")
    _present(examples, FILE_NAME)
    _describe_model(
        model, config, _trained_here(config, processes, seed, name, root, examples.path, examples.uri, model)
    )


@_task("train-distributed")
def train_distributed(train: str, group: str, seed: int, name: str, root: str, examples: str, model: Any) -> None:
    """What `train_model` does, by a job of many pods; `examples` is where the dataset is, which this task does not hold.

    What the pods are like stands in the environment (`JOB_VARIABLE`). On a person's own machine the processes run beside
    this one instead.
    """
    from trainer.data.manifest import FILE_NAME
    from trainer.launch.distributed import check_places, is_in_cluster, train_on_cluster
    from trainer.launch.worker import WorkerRequest

    config = parse_json(TrainConfig, train, path="train")
    processes = parse_json(GroupConfig, group, path="cluster")
    if not is_in_cluster(os.environ):
        say("a job of many pods is for a cluster: here its processes run on this machine")
        _describe_model(model, config, _trained_here(config, processes, seed, name, root, examples, examples, model))
        return
    from trainer.checkpoint import run_key

    job = parse_json(JobConfig, os.environ.get(JOB_VARIABLE, ""), path=JOB_VARIABLE)
    check_places({"examples": examples, "model": model.uri, "root": root})
    manifest, _ = storage.read_json(storage.join(examples, FILE_NAME))
    if manifest is None:
        raise _deleted_since(examples, FILE_NAME)
    digest = manifest["digest"]
    asked = WorkerRequest(
        train=config,
        group=processes,
        seed=seed,
        examples=examples,
        model=model.uri,
        checkpoints=storage.join(root, f"checkpoints/{name}/{run_key(config, seed, digest)}"),
    )
    _describe_model(model, config, train_on_cluster(asked, job, name, "train-distributed", digest))


def _trained_here(
    config: TrainConfig, processes: GroupConfig, seed: int, name: str, root: str, path: str, uri: str, model: Any
) -> dict[str, Any]:
    """The model in `model.path`, by this process or a group beside it; what its `train.json` holds.

    Path and URI are the prepared data's.
    """
    from trainer.checkpoint import run_key
    from trainer.data.manifest import read_manifest
    from trainer.data.shard_files import leave_in_bucket, without_shards

    examples, manifest = Path(path), read_manifest(Path(path))
    key, mirror = run_key(config, seed, manifest.digest), None
    checkpoints = Path(_local(root, "checkpoints") or tempfile.mkdtemp()) / name / key
    if storage.is_remote(root):  # this machine's disk does not outlive it
        mirror = storage.join(root, f"checkpoints/{name}/{key}")
    if processes.is_several:
        from trainer.launch.training import train_as_group as train_it
    else:
        from trainer.loop import fit as train_it
    with tempfile.TemporaryDirectory() as temporary:
        if config.read_shards == "streamed":
            if not storage.is_remote(uri) and (run := os.environ.get("TRIREME_RUN_URI")):
                uri = storage.join(run, "prepare-data", examples.name)  # where that task's outputs went
            examples = Path(temporary) / "examples"
            without_shards(Path(path), examples, manifest)
            leave_in_bucket(examples, uri)
        return train_it(config, seed, examples, Path(model.path), checkpoints, processes, mirror)


def _describe_model(model: Any, config: TrainConfig, summary: dict[str, Any]) -> None:
    model.metadata.update(
        framework="tensorflow",
        model=config.model,
        num_parameters=summary["num_parameters"],
        epochs=summary["epochs"],
        data_digest=summary["data_digest"],
    )


@_task("evaluate-model")
def evaluate_model(
    evaluate: str, name: str, registry: str, examples: Any, model: Any,
    evaluation: Any, metrics: Any, classification_metrics: Any,
) -> None:  # fmt: skip
    """Evaluate section, dataset and model → `evaluation.json` and Kubeflow's own metrics."""
    from trainer.data.manifest import FILE_NAME
    from trainer.evaluate import EVALUATION_FILE, write_json

    config = parse_json(EvaluateConfig, evaluate, path="evaluate")
    if not config.own_metrics and not any(slicing.function for slicing in config.slices):
        _leave_keras_out()
    _present(examples, FILE_NAME)
    _present(model, "train.json")
    found = _measured(config, Registry(registry, name), Path(examples.path), Path(model.path))
    folder = Path(evaluation.path)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / EVALUATION_FILE, found)
    for metric, value in found["metrics"].items():
        if value is not None:  # Kubeflow's metadata takes finite numbers only
            metrics.log_metric(metric, value)
    if found["task"] == "classification":
        classification_metrics.log_confusion_matrix(found["class_names"], found["confusion_matrix"])
    curve = found.get("roc_micro")
    if curve and curve["fpr"]:
        classification_metrics.log_roc_curve(curve["fpr"], curve["tpr"], curve["thresholds"])
    shown = ", ".join(f"{key} {value:.4f}" for key, value in found["metrics"].items() if value is not None)
    say(f"test, {found['num_examples']:,} examples: {shown}")


@_task("check-serving")
def check_serving(serving: str, model: Any, serving_check: Any) -> None:
    """Serving section and model → `serving.json`: whether the export answers as it should where it will serve."""
    from trainer.evaluate import write_json
    from trainer.serving import SERVING_FILE
    from trainer.serving import check_serving as check

    config = parse_json(ServingConfig, serving, path="serving")
    _present(model, "train.json")
    found = check(config, Path(model.path))
    Path(serving_check.path).mkdir(parents=True, exist_ok=True)
    write_json(Path(serving_check.path) / SERVING_FILE, found)
    for finding in found["findings"]:
        say(f"{'passed' if finding['passed'] else 'FAILED'}: {finding['check']}: {finding['message']}")


@_task("judge-model")
def judge_model(
    evaluate: str,
    name: str,
    root: str,
    run: str,
    model: Any,
    evaluation: Any,
    serving_check: Any,
    verdict: Any,
    report: Any,
    summary: Any,
) -> bool:
    """Evaluate section, evaluation and serving check → the verdict, the report, and whether the model is blessed."""
    from trainer.evaluate import EVALUATION_FILE, write_json
    from trainer.report import markdown_summary
    from trainer.serving import SERVING_FILE
    from trainer.verdict import VERDICT_FILE, judge

    config = parse_json(EvaluateConfig, evaluate, path="evaluate")
    found = _read(evaluation, EVALUATION_FILE)
    checked = _read(serving_check, SERVING_FILE)
    decision = judge(config, found, checked)
    Path(verdict.path).mkdir(parents=True, exist_ok=True)
    write_json(Path(verdict.path) / VERDICT_FILE, decision)  # first: whatever happens to the page, this is known
    _write_text(report, _page(name, config, found, decision, checked, model))
    _write_text(summary, markdown_summary(found, decision))
    _note_verdict(root, run, decision, found, getattr(report, "uri", report.path))
    say(f"{decision['verdict']}: " + "; ".join(decision["reasons"]))
    return decision["blessed"]


@_task("push-model")
def push_model(
    push: str, evaluate: str, name: str, registry: str, root: str, run: str, examples: Any, model: Any, evaluation: Any,
    serving_check: Any, verdict: Any, pushed_model: Any, report: Any,
) -> None:  # fmt: skip
    """A blessed model → the next version in the registry, and the champion.

    Where another run made a champion in the meantime, the model is judged again, against that one; if it is then not
    blessed, its version stays in the registry and the champion stays the champion. Record, model card and page are of the
    judgement that counted: an overtaken version, which never changes, is followed by another with the later judgement.
    """
    from trainer.evaluate import EVALUATION_FILE, write_json
    from trainer.serving import SERVING_FILE
    from trainer.verdict import VERDICT_FILE, judge

    config = parse_json(PushConfig, push, path="push")
    rules = parse_json(EvaluateConfig, evaluate, path="evaluate")
    decision, found = _read(verdict, VERDICT_FILE), _read(evaluation, EVALUATION_FILE)
    checked = _read(serving_check, SERVING_FILE)
    models = Registry(registry, name)
    Path(pushed_model.path).mkdir(parents=True, exist_ok=True)
    while True:
        champion = models.champion()
        if (champion and champion.number) != decision["baseline_version"]:
            found = _measured(rules, models, Path(examples.path), Path(model.path))
            decision = judge(rules, found, checked)
            say(f"judged again: {decision['verdict']}: " + "; ".join(decision["reasons"]))
            write_json(Path(pushed_model.path) / VERDICT_FILE, decision)
            write_json(Path(pushed_model.path) / EVALUATION_FILE, found)
            _note_verdict(root, run, decision, found, getattr(report, "uri", report.path))
        version = _published(models, name, rules, found, decision, checked, model)
        if not decision["blessed"]:
            break
        try:
            models.promote(version.number, decision["baseline_version"], "; ".join(decision["reasons"]))
            break
        except Conflict as conflict:
            say(f"{conflict}")
    _write_text(report, _page(name, rules, found, decision, checked, model))
    pushed_model.metadata.update(version=version.number, promoted=decision["blessed"], registry_uri=version.uri)
    if not decision["blessed"]:
        say(f"version {version.number} is kept and was not promoted: {version.uri}")
        return
    models.retain(config.keep_versions)
    said = {"name": name, "version": version.number, "uri": version.uri, "digest": found["model_digest"]}
    (Path(pushed_model.path) / "version.json").write_text(json.dumps(said) + "\n", encoding="utf-8")
    note(root, run, "pushed", {"version": version.number, "uri": version.uri})
    say(f"promoted: version {version.number} in {version.uri}")


def _published(
    models: Registry,
    name: str,
    rules: EvaluateConfig,
    found: dict[str, Any],
    decision: dict[str, Any],
    checked: dict[str, Any],
    model: Any,
) -> Version:
    """The next version, with a card and a record of this judgement."""
    from trainer.model_card import CARD_FILE, model_card
    from trainer.registry_files import version_folder

    training = _read(model, "train.json")
    with tempfile.TemporaryDirectory() as temporary:
        folder = version_folder(Path(model.path), Path(temporary) / "version")
        (folder / CARD_FILE).write_text(model_card(name, found, decision, training, checked), encoding="utf-8")
        record = {
            "metrics": found["metrics"],
            "intervals": found["intervals"],
            "verdict": decision,
            "data_digest": found["data_digest"],
            "model_digest": found["model_digest"],
            "serving": checked.get("measured", {}),
            "training": training,
            "evaluate": rules.model_dump(mode="json"),
            "run": os.environ.get("TRIREME_RUN_DIR") or os.environ.get("KFP_RUN_ID"),
        }
        return models.publish(folder, record)


def _page(
    name: str,
    config: EvaluateConfig,
    found: dict[str, Any],
    decision: dict[str, Any],
    checked: dict[str, Any],
    model: Any,
) -> str:
    """The HTML page of a judgement."""
    from trainer.report import render

    history = [json.loads(line) for line in (Path(model.path) / "history.jsonl").read_text().splitlines()]
    details = {
        "name": name,
        "training": _read(model, "train.json"),
        "evaluate": config.model_dump(mode="json"),
        "serving": checked.get("measured", {}),
        "digests": decision["digests"],
        **provenance(),
    }
    return render(found, decision, history, details)


def _write_text(artifact: Any, text: str) -> None:
    Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
    Path(artifact.path).write_text(text, encoding="utf-8")


@_task("record-outcome")
def record_outcome(name: str, root: str, run: str, notify: str, state: str, error_message: str, outcome: Any) -> None:
    """How the run ended → `outcome.json`. Runs whatever happened before."""
    content = {"name": name, "state": state, "error": error_message or None, "finished_at": time.time()}
    Path(outcome.path).parent.mkdir(parents=True, exist_ok=True)
    Path(outcome.path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    outcome.metadata.update(state=state)
    note(root, run, "end", content)
    if notify:
        _notify(parse_json(NotifyConfig, notify, path="notify"), content, root, run)
    say(f"{name}: {state.lower()}" + (f": {error_message}" if error_message else ""))


def _publish(name: str, outputs: list[Any]) -> None:
    """Leaves what the task made in the run's place in a bucket, where the run has one."""
    uri = os.environ.get("TRIREME_RUN_URI")
    for artifact in outputs if uri else []:
        path = Path(artifact.path)
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            storage.publish(path, storage.join(uri, name, path.name))


def _note_verdict(root: str, run: str, decision: dict[str, Any], found: dict[str, Any], report: str | None) -> None:
    """Leaves the verdict for those who ask how the run ended."""
    kept = {key: decision[key] for key in ("verdict", "reasons", "data_digest", "baseline_version")}
    note(root, run, "verdict", {**kept, "metrics": found["metrics"], "report": report})


def _leave_keras_out() -> None:
    """Has TensorFlow not load Keras, which takes a third of its import, in a process that is this task and nothing else."""
    if os.environ.get("_KFP_RUNTIME") == "true" and "tensorflow" not in sys.modules:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # names a package that is not there, which TensorFlow takes calmly


def _present(artifact: Any, file: str) -> None:
    """An input that Kubeflow took from its cache may have been deleted since, of which it says nothing.

    Raises:
        WorldFailure: The artifact is not there.
    """
    if not (Path(artifact.path) / file).is_file():
        raise _deleted_since(artifact.uri, file)


def _deleted_since(uri: str, file: str) -> WorldFailure:
    return WorldFailure(
        f"{uri}: holds no {file}; if it came from the cache, it was deleted since: run once with"
        " --set cluster.cache=false, which makes it anew"
    )


def _notify(config: NotifyConfig, ended: dict[str, Any], root: str, run: str) -> None:
    """Tells those who want to know. Nothing that goes wrong here fails the run."""
    from trainer.notify import event_of, send

    try:
        parts = read(root, run)
    except (TriremeError, OSError) as error:
        print(f"warning: what the tasks noted cannot be read: {error}", file=sys.stderr)
        parts = {}
    event = event_of(ended["state"], parts)
    if event is None:
        return
    failure, verdict = parts.get("failure", {}), parts.get("verdict", {})
    facts = {
        "name": ended["name"],
        "run": run,
        "task": failure.get("task") if event == "failed" else None,
        "error": (failure.get("error") or ended["error"]) if event == "failed" else None,
        "reasons": verdict.get("reasons") or ([parts["skipped"]["reason"]] if "skipped" in parts else []),
        "metrics": verdict.get("metrics"),
        "version": parts.get("pushed", {}).get("version"),
        "link": f"{config.run_link.rstrip('/')}/#/runs/details/{run}" if config.run_link else None,
        "report": verdict.get("report"),
    }
    for sentence in send(config, event, facts, os.environ, time.sleep):
        say(sentence)


def _place(function: Callable, args: tuple, kwargs: dict) -> tuple[str | None, str | None]:
    """Root and run that a task was given, as far as it was."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None, None
    return given.get("root"), given.get("run") or os.environ.get("TRIREME_RUN")


def _measured(config: EvaluateConfig, champions: Registry, examples: Path, model: Path) -> dict[str, Any]:
    """The evaluation of a model, and of whoever is champion now."""
    from trainer.evaluate import evaluate

    champion = champions.champion()
    with tempfile.TemporaryDirectory() as staged:
        baseline = None
        if champion is not None:
            say(f"measuring the champion, version {champion.number}, on the same examples")
            baseline = (champion.number, champions.fetch(champion.number, Path(staged) / "champion"))
        return evaluate(config, examples, model, baseline)


def _read(artifact: Any, name: str) -> dict[str, Any]:
    return json.loads((Path(artifact.path) / name).read_text(encoding="utf-8"))


def _local(root: str, folder: str) -> Path | None:
    """A folder under the root, where the root is a folder of this machine."""
    return None if "://" in root else Path(root) / folder


def _explained(error: BaseException) -> tuple[int, str]:
    """Exit code and one sentence for whatever ended a task."""
    if isinstance(error, TriremeError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_PREEMPTED, "interrupted; nothing was left half-written"
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else EXIT_FAILED), f"exited with {error.code}"
    if isinstance(error, OSError) and error.strerror:
        return EXIT_FAILED, f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    if isinstance(error, MemoryError):
        return EXIT_FAILED, "out of memory; lower the batch size or train.cache_bytes, or ask for more (cluster.memory)"
    kind, reason = type(error).__name__, reason_of(error)
    return EXIT_FAILED, kind if reason == kind else f"{kind}: {reason}"


def _record(name: str, fields: dict[str, Any], started: float) -> None:
    """Leaves `tasks/<name>.json` in the run directory, where the task belongs to a local run."""
    folder = os.environ.get("TRIREME_RUN_DIR")
    if not folder:
        return
    record = {"task": name, **fields, "seconds": round(time.monotonic() - started, 3)}
    if "TRIREME_REVISION" in os.environ:  # in an image, whose packages and code whoever watches cannot see
        record["provenance"] = provenance()
    file = Path(folder) / RECORDS_FOLDER / f"{name}.json"
    partial = file.with_name(f".{name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        print(f"{name}: no record could be left in {folder}: {error.strerror}", file=sys.stderr)
