"""A person's own functions: where they are looked for, and what is found out about them before anything is trained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from trainer.config import DataConfig, EvaluateConfig, OwnMetric, Slicing, TrainConfig
from trainer.errors import BadInput
from trainer.own_code import check_call, look_beside, own_function
from trainer.own_trial import names_to_try, try_own

MONEY = """\
print("what a module prints is no answer")
def build(spec, units=3, *, depth): ...
def cost(labels, answers): return 0.0
def of_one(labels): return 0.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A configuration's folder, with modules of one's own, that is not where anybody works."""
    monkeypatch.setenv("TRIREME_CODE_FOLDERS", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in {
        "money": MONEY,
        "leaves": "import sys; sys.exit(3)",
        "dies": "import os; os._exit(9)",
        "sleeps": "import time; time.sleep(600)",
        "needs": "import a_package_of_the_image",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    look_beside(tmp_path / "run.yaml")
    return tmp_path


def test_a_module_beside_the_configuration_file_is_found_in_the_processes_that_are_started(folder, tmp_path_factory):
    script = "from trainer.own_code import own_function; print(own_function('money:cost', setting='s')([], []))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        cwd=tmp_path_factory.mktemp("elsewhere"), env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout.endswith("0.0\n")


def test_the_working_directory_comes_before_the_configuration_files_folder(folder, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("here")
    (here / "money.py").write_text("def cost(labels, answers): return 1.0")
    monkeypatch.chdir(here)
    assert own_function("money:cost", setting="s")([], []) == 1.0


def test_a_module_that_is_nowhere_is_refused_with_the_folders_that_were_searched(folder):
    with pytest.raises(BadInput) as refused:
        own_function("nowhere:cost", setting="evaluate.own_metrics.cost.function")
    assert str(refused.value).startswith(
        "evaluate.own_metrics.cost.function = \"nowhere:cost\": cannot be imported: No module named 'nowhere' (looked in "
    )
    assert f"{Path.cwd()}, {folder}, on PYTHONPATH" in str(refused.value)


def test_a_configuration_file_by_a_roundabout_path_names_its_folder_plainly(folder):
    (folder / "else").mkdir()
    look_beside(folder / "else" / ".." / "run.yaml")
    assert os.environ["TRIREME_CODE_FOLDERS"] == str(folder.resolve())


def test_a_module_that_exits_is_refused(folder):
    with pytest.raises(BadInput, match=r"cannot be imported: leaves exits \(with 3\)"):
        own_function("leaves:cost", setting="train.model")


def test_functions_whose_parameters_nobody_can_tell_are_let_be():
    check_call(dict.fromkeys, None, setting="s", takes="labels")


def test_where_nothing_is_of_ones_own_nothing_is_started():
    assert names_to_try(DataConfig(), TrainConfig(optimizer="SGD"), EvaluateConfig()) == {}


def trials(*, longest_secs=120.0, data=None, evaluate=None, **train):
    found = try_own(DataConfig(**data or {}), TrainConfig(**train), EvaluateConfig(**evaluate or {}), longest_secs)
    return {trial.setting: trial for trial in found}


def test_every_name_of_ones_own_is_tried_and_held_against_how_it_will_be_called(folder):
    found = trials(
        model="money:build",
        evaluate={
            "own_metrics": {"cost": OwnMetric(function="money:cost"), "one": OwnMetric(function="money:of_one")},
            "slices": [Slicing(function="money:nothing"), Slicing(function="needs:f")],
        },
    )
    assert found["evaluate.own_metrics.cost.function"].fault is None
    assert {setting: trial.fault for setting, trial in found.items() if trial.fault and not trial.is_missing} == {
        "train.model": 'train.model = "money:build": is called with spec and train.model_args, and has the parameters'
        " (spec, units=3, *, depth): missing a required argument: 'depth'",
        "evaluate.own_metrics.one.function": 'evaluate.own_metrics.one.function = "money:of_one": is called with labels'
        " and answers, and has the parameters (labels): too many positional arguments",
        "evaluate.slices.0.function": 'evaluate.slices.0.function = "money:nothing": money has no function nothing',
    }
    assert found["evaluate.slices.1.function"].is_missing
    assert "No module named 'a_package_of_the_image'" in found["evaluate.slices.1.function"].fault


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("dies:f", "ended the process that tried it, with exit code 9"),
        ("sleeps:f", "took longer than 6 s; what takes long belongs into the function, not into its module"),
    ],
)
def test_a_module_that_ends_the_process_or_hangs_is_named_and_harms_nobody(folder, model, fault):
    assert trials(model=model, longest_secs=6.0)["train.model"].fault == f"train.model = {json.dumps(model)}: {fault}"


def test_optimizers_and_builders_are_made_by_keras_and_tensorflow_datasets_themselves(folder):
    found = trials(optimizer="adamw", optimizer_args={"beta_9": 1}, data={"name": "money:cost"})
    assert found["data.name"].fault == 'data.name = "money:cost": money has no dataset builder cost'
    assert found["train.optimizer"].fault.startswith('train.optimizer_args = {"beta_9": 1}: adamw does not take them')
    found = trials(optimizer="adamx", data={"name": "trainer.data.digits:Digits"})
    assert found["data.name"].fault is None
    assert found["train.optimizer"].fault.startswith('train.optimizer = "adamx": must be one of adadelta, adafactor')
    assert trials(optimizer="nadam")["train.optimizer"].fault is None
