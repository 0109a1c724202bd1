"""`python -m trainer`: what cannot work is refused before any work is done, and leaves nothing behind."""

import os
import signal
from pathlib import Path

import pytest

from pipelines.config import Config
from trainer.__main__ import SECTIONS, main

STEPS = {
    "prepare": [],
    "train": ["--examples", "examples"],
    "evaluate": ["--examples", "examples", "--model", "model"],
    "serve-check": ["--model", "model"],
    "export": ["--examples", "examples", "--keras", "model.keras"],
}


@pytest.fixture
def place(tmp_path, monkeypatch, configuration):
    """A folder with a configuration, an empty folder for each input, a file and a full folder."""
    configuration()
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "model", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "full" / "mine").write_text("x")
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file", "--output = file: is a file; name a folder"),
        ("full", "--output = full: is not empty; name a new folder"),
        ("file/below", "--output = file/below: cannot be made, because"),
        ("", "--output = .: is not empty; name a new folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(place, capsys, step, output, message):
    before = everything(place)
    assert main([step, "config.yaml", *STEPS[step], "--output", output]) == 2
    assert message in capsys.readouterr().err
    assert everything(place) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(place, capsys):
    (place / "full").chmod(0o500)
    assert main(["prepare", "config.yaml", "--output", "full/new"]) == 2
    assert f"because {place}/full may not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "config.yaml", "--examples", "none"], "--examples = none: there is no such folder"),
        (["evaluate", "config.yaml", "--examples", "examples", "--model", "file"], "--model = file: there is no such folder"),
        (["serve-check", "config.yaml", "--model", "none"], "--model = none: there is no such folder"),
        (["prepare", "config.yaml", "--store", "file"], "--store = file: is a file; name a folder"),
        (["prepare", "config.yaml", "--store", "s3://a/b"], "--store = s3://a/b: must be a folder or gs://BUCKET/"),
        (["train", "config.yaml", "--examples", "examples", "--checkpoints", "gs://a/b"], "must be a folder of this machine"),
        (["train", "config.yaml", "--examples", "examples", "--checkpoints", "file"], "--checkpoints = file: is a file"),
        (["train", "config.yaml", "--examples", "examples"], "examples: holds no manifest.json"),
        (["prepare", "config.yaml", "--set", "trian.epochs=3"], "--set: trian = {\"epochs\": 3}: unknown key; did you"),
        (["prepare", "config.yaml", "--set", "seed=many"], "seed = \"many\": must be a whole number from 0 to"),
        (["train", "config.yaml", "--examples", "examples", "--set", "cluster=3"], "cluster = 3: must be a mapping"),
        (["prepare", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_sentence_and_leaves_nothing(place, capsys, words, message):
    before = everything(place)
    assert main([*words, "--output", "new"]) == 2
    assert message in capsys.readouterr().err
    assert everything(place) == before


def test_prepared_data_is_kept_in_a_bucket_that_the_command_names(place, gcs, capfd):
    (place / "table.csv").write_text("size,label\n" + "1,yes\n2,no\n" * 20)
    (place / "config.yaml").write_text(
        "name: a\ndata: {source: csv, path: table.csv, label_key: label,"
        " splits: {train: 60%, validation: null, test: 40%}}\n"
    )
    assert main(["prepare", "config.yaml", "--output", "first", "--store", f"{gcs}/prepared"]) == 0
    assert main(["prepare", "config.yaml", "--output", "second", "--store", f"{gcs}/prepared"]) == 0
    said = capfd.readouterr().out
    assert f"kept for later runs in {gcs}/prepared/" in said
    assert "reusing the prepared data" in said
    assert everything(place / "first") == everything(place / "second")


def test_a_step_that_is_terminated_says_so(place, capsys, monkeypatch):
    monkeypatch.setattr("trainer.__main__._check_places", lambda arguments: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "config.yaml", "--output", "new"])
    assert ended.value.code == 143
    assert capsys.readouterr().err == "trainer: terminated; nothing was left half-written\n"


def test_a_section_that_is_not_one_is_named_with_its_line(place, capsys):
    (place / "config.yaml").write_text("name: a\nevaluat: {}\n")
    assert main(["prepare", "config.yaml", "--output", "new"]) == 2
    assert "config.yaml:2: evaluat = {}: unknown key; did you mean evaluate?" in capsys.readouterr().err


def test_the_steps_know_every_section_of_a_configuration():
    assert set(SECTIONS) == set(Config.model_fields)
