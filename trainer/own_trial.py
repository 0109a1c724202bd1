"""What a person's own names lead to, tried in a process of its own before anything is trained.

for trial in try_own(data, train, evaluate):           # Trial("train.model", "money:build", None), …
    ...

Importing a person's module may load TensorFlow, take long, print, or end the process: here it does so to a child.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import DataConfig, EvaluateConfig, LearningRateSchedule, TrainConfig, parse
from trainer.errors import BadInput

LONGEST_SECS = 120.0
"""TensorFlow's own import takes a few seconds, half a minute on a busy machine."""

_SURE_OPTIMIZERS = ("adam", "adamw", "rmsprop", "sgd")
"""Without arguments there is nothing to try, and Keras need not be loaded."""


class Trial(NamedTuple):
    """One name that was tried."""

    setting: str
    """Its dotted path."""
    value: str
    """The name."""
    fault: str | None
    """What is wrong, beginning with the path. None: nothing."""
    is_missing: bool = False
    """Whether a module is not on this machine, where the image may have it."""


def names_to_try(data: DataConfig, train: TrainConfig, evaluate: EvaluateConfig) -> dict[str, str]:
    """Names by dotted path of which the configuration's own rules cannot say whether they lead anywhere."""
    found = {}
    if data.source == "tfds" and data.name.partition(":")[2].isidentifier():
        found["data.name"] = data.name
    if ":" in train.model or "." in train.model or train.model_args:
        found["train.model"] = train.model
    if train.optimizer_args or train.optimizer.lower() not in _SURE_OPTIMIZERS:
        found["train.optimizer"] = train.optimizer
    for name, metric in evaluate.own_metrics.items():
        found[f"evaluate.own_metrics.{name}.function"] = metric.function
    for index, slicing in enumerate(evaluate.slices):
        if slicing.function is not None:
            found[f"evaluate.slices.{index}.function"] = slicing.function
    return found


def try_own(
    data: DataConfig, train: TrainConfig, evaluate: EvaluateConfig, longest_secs: float = LONGEST_SECS
) -> list[Trial]:
    """Imports what the sections name and holds it against how it will be called; starts no process where there is nothing.

    Args:
        data: The data section.
        train: The train section.
        evaluate: The evaluate section.
        longest_secs: After so long the child is ended, and the name that it was busy with is at fault.

    Returns:
        One trial a name, in the order of `names_to_try`; those after one that ended the process are not among them.
    """
    names = names_to_try(data, train, evaluate)
    if not names:
        return []
    with tempfile.TemporaryDirectory() as temporary:
        request, answers, errors = (Path(temporary) / name for name in ("request.json", "answers.jsonl", "errors.txt"))
        sections = {"data": data, "train": train, "evaluate": evaluate}
        request.write_text(json.dumps({key: one.model_dump(mode="json") for key, one in sections.items()}))
        answers.touch()
        command = [sys.executable, "-m", __name__, str(request), str(answers)]
        # A child that loads TensorFlow needs no GPU to find out whether a name leads anywhere.
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        said = ""
        try:
            with errors.open("wb") as file:  # no pipe: a process that the module started would keep it open
                done = subprocess.run(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
                    timeout=longest_secs, check=False,
                )  # fmt: skip
            how = f"ended the process that tried it, with exit code {done.returncode}"
            said = next(iter(errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]), "")
        except subprocess.TimeoutExpired:
            how = f"took longer than {longest_secs:g} s; what takes long belongs into the function, not into its module"
        tried = [Trial(*json.loads(line)) for line in answers.read_text(encoding="utf-8").splitlines()]
    if len(tried) < len(names):
        setting = list(names)[len(tried)]
        shown = f"{setting} = {json.dumps(names[setting])}: {how}"
        tried.append(Trial(setting, names[setting], f"{shown}: {said}" if said else shown))
    return tried


def _attempts(data: DataConfig, train: TrainConfig, evaluate: EvaluateConfig) -> dict[str, Callable[[], Any]]:
    """How each setting is tried."""
    from trainer.own_code import check_call, own_function

    def builder() -> None:
        from trainer.data.tfds_source import find_own_builder

        find_own_builder(data.name)

    def model() -> None:
        from trainer.models import find_build

        find_build(train)

    def optimizer() -> None:
        from trainer.optimizer import build_optimizer

        # The schedule's steps depend on the data, and its settings were looked at.
        build_optimizer(train.model_copy(update={"learning_rate_schedule": LearningRateSchedule()}), 1)

    def function(setting: str, path: str, takes: str) -> None:
        shown = f"{setting} = {json.dumps(path)}"
        check_call(own_function(path, setting=setting), None, None, setting=shown, takes=takes)

    found: dict[str, Callable[[], Any]] = {"data.name": builder, "train.model": model, "train.optimizer": optimizer}
    for setting, path in names_to_try(data, train, evaluate).items():
        takes = "labels and answers" if "own_metrics" in setting else "features and labels"
        found.setdefault(setting, lambda setting=setting, path=path, takes=takes: function(setting, path, takes))
    return found


def _answers(sections: dict[str, Any]) -> Iterator[Trial]:
    data, train, evaluate = (
        parse(kind, sections[key], path=key)
        for key, kind in (("data", DataConfig), ("train", TrainConfig), ("evaluate", EvaluateConfig))
    )
    attempts = _attempts(data, train, evaluate)
    for setting, value in names_to_try(data, train, evaluate).items():
        fault, is_missing = None, False
        try:
            attempts[setting]()
        except BadInput as error:
            fault, is_missing = str(error), isinstance(error.__context__, ModuleNotFoundError)
        except Exception as error:  # whatever it is, the name does not lead to something that works
            fault = f"{setting} = {json.dumps(value)}: {type(error).__name__}: {error}"
        yield Trial(setting, value, fault, is_missing)


def _main(request: str, answers: str) -> None:
    with Path(answers).open("a", encoding="utf-8") as file:
        for trial in _answers(json.loads(Path(request).read_text(encoding="utf-8"))):
            file.write(json.dumps(trial) + "\n")
            file.flush()  # whoever waits sees how far it came, whatever ends this process


if __name__ == "__main__":
    _main(*sys.argv[1:])
