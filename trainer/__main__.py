"""One step at a time without Kubeflow, with the same sections of the same file.

    python -m trainer prepare  configs/digits.yaml --output examples
    python -m trainer train    configs/digits.yaml --examples examples --output model
    python -m trainer evaluate configs/digits.yaml --examples examples --model model --output evaluation
    python -m trainer serve-check configs/digits.yaml --model model --output serving
    python -m trainer export   configs/digits.yaml --examples examples --keras model/model.keras --output exported
    python -m trainer train-worker '{"train": …}'     # what each pod of a training on Kubernetes runs

Each output folder appears whole or not at all.
"""

import argparse
import json
import os
import re
import signal
import sys
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import (
    OVERRIDDEN,
    DataConfig,
    EvaluateConfig,
    GroupConfig,
    Problem,
    Section,
    ServingConfig,
    TrainConfig,
    parse,
    suggestion,
)
from trainer.config_file import override, read_config_file
from trainer.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    BadInput,
    TriremeError,
    WorldFailure,
)
from trainer.own_code import look_beside

S = TypeVar("S", bound=Section)
SECTIONS = (
    *("name", "seed", "data", "validate_data", "train", "evaluate", "serving", "push", "retrain", "cluster"),
    *("kubeflow", "schedules", "notify"),
)
"""Every key of a configuration file; the steps here read their own and no others."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs one step and answers its exit code."""
    arguments = _parser().parse_args(words)
    code = _run(arguments)
    if arguments.step is _train_worker:
        from trainer.launch.worker import exit_code_for_operator

        return exit_code_for_operator(code, arguments.request)
    return code


def _run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # The first process of a container does not die of SIGTERM by itself. A training takes over once it can save.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PREEMPTED))
    try:
        _check_places(arguments)
        if "config" in arguments:
            look_beside(arguments.config)
        arguments.step(arguments)
    except TriremeError as error:
        print("\n".join(f"trainer: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("trainer: interrupted; nothing was left half-written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit:
        print("trainer: terminated; nothing was left half-written", file=sys.stderr)
        raise
    except OSError as error:
        if error.strerror is None:
            raise
        print(f"trainer: {error.strerror}: {error.filename}", file=sys.stderr)
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Runs one step of a training, without Kubeflow."
    )
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)

    def step(name: str, function: Any, summary: str, *folders: tuple[str, str]) -> argparse.ArgumentParser:
        added = steps.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        added.add_argument("config", type=Path, metavar="CONFIG", help="configuration file")
        added.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
                           help="override a setting; may be repeated")  # fmt: skip
        for flag, meaning in folders:
            added.add_argument(flag, type=Path, required=True, metavar="PATH", help=meaning)
        added.set_defaults(step=function)
        return added

    examples = ("--examples", "folder of a prepared dataset")
    output = ("--output", "folder that the result goes to; must not exist or be empty")
    prepare = step("prepare", _prepare, "write a prepared dataset", output)
    prepare.add_argument("--store", metavar="PATH",
                         help="folder or gs:// prefix of datasets prepared before, to reuse them")  # fmt: skip
    train = step("train", _train, "train and export a model", examples, output)
    train.add_argument("--checkpoints", type=Path, metavar="PATH",
                       help="folder of this training's checkpoints (default: OUTPUT.checkpoints)")  # fmt: skip
    train.add_argument("--mirror", metavar="URI", help="gs:// prefix that checkpoints are copied to")
    step("evaluate", _evaluate, "measure a model, judge it and write the report", examples,
         ("--model", "folder of a trained model"), output)  # fmt: skip
    step("serve-check", _serve_check, "ask an export in a fresh process, as a server would ask it",
         ("--model", "folder of a trained model"), output)  # fmt: skip
    step("export", _export, "make a SavedModel of a .keras file", examples, ("--keras", "the .keras file"), output)
    worker = steps.add_parser("train-worker", help="do one pod's part of a training on Kubernetes",
                              description="Do one pod's part of a training on Kubernetes (docs/kubernetes.md).")  # fmt: skip
    worker.add_argument("request", metavar="REQUEST", help="what the group is asked to do, as JSON")
    worker.set_defaults(step=_train_worker)
    return parser


def _check_places(arguments: argparse.Namespace) -> None:
    """Refuses what is not there, and what the step could not write to in the end, before the work is done.

    Raises:
        BadInput: Names the flag and the folder.
    """
    for flag in ("examples", "model"):
        folder = getattr(arguments, flag, None)
        if folder is not None and not folder.is_dir():
            raise BadInput(f"--{flag} = {folder}: there is no such folder")
    for flag in ("output", "store", "checkpoints"):
        folder = getattr(arguments, flag, None)
        if folder is None:
            continue
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(folder)):  # a path has lost one of the slashes
            if flag == "store" and folder.startswith("gs://"):
                continue
            wanted = "a folder or gs://BUCKET/…" if flag == "store" else "a folder of this machine"
            raise BadInput(f"--{flag} = {folder}: must be {wanted}")
        folder = Path(folder)
        shown = f"--{flag} = {folder}"
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{shown}: is a file; name a folder")
        if flag == "output" and folder.is_dir() and any(folder.iterdir()):
            raise BadInput(f"{shown}: is not empty; name a new folder")
        place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            reason = "may not be written" if place.is_dir() else "is a file"
            raise BadInput(f"{shown}: cannot be made, because {place} {reason}")


def _root(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int]]:
    """The whole configuration, of which a step reads its own section, and where each setting stands."""
    data, lines = read_config_file(arguments.config)
    data = override(data, arguments.overrides, lines)
    for name in data:
        if name not in SECTIONS:
            rule = f"unknown key{suggestion(name, SECTIONS)}"
            where = "--set" if lines.get(name) == OVERRIDDEN else f"{arguments.config}:{lines.get(name, 1)}"
            raise BadInput(f"{where}: {Problem(name, data[name], rule)}")
    return data, lines


def _section(arguments: argparse.Namespace, model: type[S], name: str) -> tuple[S, int]:
    """A section of the configuration file, and the seed."""
    data, lines = _root(arguments)
    seed = data.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise BadInput(str(Problem("seed", seed, f"must be a whole number from 0 to {2**31 - 1}")))
    return parse(model, data.get(name) or {}, path=name, lines=lines, source=str(arguments.config)), seed


def _prepare(arguments: argparse.Namespace) -> None:
    from trainer.data.prepare import prepare

    config, seed = _section(arguments, DataConfig, "data")
    prepare(config, seed, arguments.output, arguments.store)


def _train(arguments: argparse.Namespace) -> None:
    from trainer.loop import fit

    config, seed = _section(arguments, TrainConfig, "train")
    checkpoints = arguments.checkpoints or arguments.output.with_name(arguments.output.name + ".checkpoints")
    fit(config, seed, arguments.examples, arguments.output, checkpoints, _group(arguments), arguments.mirror)


def _train_worker(arguments: argparse.Namespace) -> None:
    from trainer.launch.worker import train_worker
    from trainer.progress import TASK_VARIABLE

    os.environ.setdefault(TASK_VARIABLE, "train-distributed")  # the task whose log shows what the pods say
    train_worker(arguments.request)


def _group(arguments: argparse.Namespace) -> GroupConfig:
    """What the cluster section says of the processes that train together."""
    data, lines = _root(arguments)
    cluster = data.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise BadInput(str(Problem("cluster", cluster, "must be a mapping of settings")))
    known = {key: value for key, value in cluster.items() if key in GroupConfig.model_fields}
    return parse(GroupConfig, known, path="cluster", lines=lines, source=str(arguments.config))


def _evaluate(arguments: argparse.Namespace) -> None:
    from trainer.atomic import aside
    from trainer.evaluate import EVALUATION_FILE, evaluate, write_json
    from trainer.progress import say
    from trainer.provenance import provenance
    from trainer.report import render
    from trainer.verdict import VERDICT_FILE, judge

    config, _ = _section(arguments, EvaluateConfig, "evaluate")
    found = evaluate(config, arguments.examples, arguments.model, champion=None)
    decision = judge(config, found)
    history = [json.loads(line) for line in (arguments.model / "history.jsonl").read_text().splitlines()]
    with aside(arguments.output) as partial:
        write_json(partial / EVALUATION_FILE, found)
        write_json(partial / VERDICT_FILE, decision)
        page = render(found, decision, history, {"evaluate": config.model_dump(mode="json"), **provenance()})
        (partial / "report.html").write_text(page, encoding="utf-8")
    for metric, value in found["metrics"].items():
        say(f"{metric} {'not defined' if value is None else format(value, '.4f')}")
    say(f"{decision['verdict']}: " + "; ".join(decision["reasons"]))


def _serve_check(arguments: argparse.Namespace) -> None:
    from trainer.atomic import aside
    from trainer.evaluate import write_json
    from trainer.progress import say
    from trainer.serving import SERVING_FILE, check_serving

    config, _ = _section(arguments, ServingConfig, "serving")
    found = check_serving(config, arguments.model)
    with aside(arguments.output) as partial:
        write_json(partial / SERVING_FILE, found)
    for finding in found["findings"]:
        say(f"{'passed' if finding['passed'] else 'FAILED'}: {finding['check']}: {finding['message']}")
    if not found["passed"]:
        raise WorldFailure(f"the serving check failed; {arguments.output / SERVING_FILE} has what was found")


def _export(arguments: argparse.Namespace) -> None:
    import keras

    from trainer.atomic import aside
    from trainer.data.manifest import read_manifest
    from trainer.export import export_model, reference_examples

    manifest = read_manifest(arguments.examples)
    if not zipfile.is_zipfile(arguments.keras):
        raise BadInput(f"--keras = {arguments.keras}: is no .keras file, or cannot be read")
    try:
        model = keras.saving.load_model(arguments.keras, compile=False)
    except (ValueError, OSError) as error:
        raise BadInput(f"--keras = {arguments.keras}: cannot be read: {str(error).splitlines()[0]}") from None
    with aside(arguments.output) as partial:
        export_model(model, manifest, reference_examples(arguments.examples, manifest), partial)


if __name__ == "__main__":
    code = main()
    if getattr(sys.modules.get("trainer.parameter_server"), "coordinators", None):
        # The coordinator's destructor waits for a lost worker for ever. All is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
