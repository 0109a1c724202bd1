"""Progress bears the name of the task that it belongs to, whatever code shows it."""

import json
import os
import subprocess
import sys

from trainer.progress import EVENT_PREFIX, TASK_VARIABLE, progress
from trainer.tasks import _task


def shown(capsys):
    return [json.loads(line.removeprefix(EVENT_PREFIX))["task"] for line in capsys.readouterr().out.splitlines()]


def test_a_training_shows_itself_as_the_task_that_does_it(capsys, monkeypatch):
    monkeypatch.setenv("TRIREME_EVENTS", "1")
    monkeypatch.delenv(TASK_VARIABLE, raising=False)

    def train():
        with progress("train-model", total=1, unit="step") as bar:
            bar.update(1)

    train()
    _task("train-distributed")(train)()
    train()
    assert shown(capsys) == ["train-model", "train-distributed", "train-model"]


def test_a_process_that_a_task_starts_shows_itself_as_that_task(monkeypatch):
    monkeypatch.setenv("TRIREME_EVENTS", "1")
    program = "from trainer.progress import progress\nwith progress('train-model', 1, 'step') as bar: bar.update(1)"
    said = _task("train-distributed")(lambda: subprocess.check_output([sys.executable, "-c", program], text=True))()
    assert json.loads(said.removeprefix(EVENT_PREFIX))["task"] == "train-distributed"
    assert TASK_VARIABLE not in os.environ
