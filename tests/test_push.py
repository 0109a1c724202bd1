"""A blessed model becomes champion; one that was overtaken is judged again against the new champion."""

import json
import shutil
from types import SimpleNamespace

import pytest

from trainer import tasks
from trainer.config import EvaluateConfig, PushConfig, Threshold
from trainer.registry import Registry

RULES = EvaluateConfig(thresholds={"accuracy": Threshold(value_threshold=0.5, change_threshold=0.0)})


def artifact(path):
    return SimpleNamespace(path=str(path), metadata={}, log_metric=lambda *_: None)


class Run:
    """The tasks after the training, on one model, with their artifacts in a folder."""

    def __init__(self, folder, registry, examples, model, rules=RULES):
        names = (
            "evaluation",
            "metrics",
            "serving_check",
            "verdict",
            "report.html",
            "summary.md",
            "pushed_model",
            "final.html",
        )
        self.artifacts = {name: artifact(folder / name) for name in names}
        self.examples, self.model, self.registry = artifact(examples), artifact(model), str(registry)
        self.rules = rules.to_json()
        self.artifacts["curves"] = SimpleNamespace(log_confusion_matrix=lambda *_: 0, log_roc_curve=lambda *_: 0)
        (folder / "serving_check").mkdir(parents=True)
        good = {"passed": True, "findings": [{"check": "it loads", "passed": True, "message": "yes"}], "measured": {}}
        (folder / "serving_check" / "serving.json").write_text(json.dumps(good))

    def evaluate_and_judge(self):
        a = self.artifacts
        tasks.evaluate_model(
            self.rules, "digits", self.registry, self.examples, self.model, a["evaluation"], a["metrics"], a["curves"]
        )
        return tasks.judge_model(
            self.rules,
            "digits",
            self.registry,
            "run",
            self.model,
            a["evaluation"],
            a["serving_check"],
            a["verdict"],
            a["report.html"],
            a["summary.md"],
        )

    def push(self):
        a = self.artifacts
        tasks.push_model(
            PushConfig().to_json(), self.rules, "digits", self.registry, self.registry, "run", self.examples,
            self.model, a["evaluation"], a["serving_check"], a["verdict"], a["pushed_model"], a["final.html"],
        )  # fmt: skip
        return a["pushed_model"].metadata


@pytest.fixture(scope="module")
def worse_model(digits_model, digits_examples, tmp_path_factory):
    """The digits' model with noise in its weights: good enough for a value threshold, worse than the other."""
    import keras

    from trainer.data.manifest import read_manifest
    from trainer.export import export_model, reference_examples

    folder = tmp_path_factory.mktemp("worse")
    shutil.copytree(digits_model, folder / "model")
    for name in ("saved_model", "reference.npz", "model.keras"):
        path = folder / "model" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    model = keras.saving.load_model(digits_model / "model.keras", compile=False)
    keras.utils.set_random_seed(1)
    kernel = model.layers[-1].kernel
    kernel.assign(kernel + 0.35 * keras.random.normal(kernel.shape))
    manifest = read_manifest(digits_examples)
    export_model(model, manifest, reference_examples(digits_examples, manifest), folder / "model")
    return folder / "model"


def test_a_blessed_model_becomes_the_champion_with_all_that_is_known_of_it(tmp_path, digits_examples, digits_model):
    run = Run(tmp_path / "run", tmp_path / "models", digits_examples, digits_model)
    assert run.evaluate_and_judge() is True
    assert run.push()["promoted"] is True
    models = Registry(tmp_path / "models", "digits")
    champion = models.champion()
    assert champion.number == 1
    assert champion.record["verdict"]["blessed"]
    assert champion.record["model_digest"] == json.loads((digits_model / "train.json").read_text())["model_digest"]
    assert champion.record["intervals"]["accuracy"][0] > 0.5
    folder = tmp_path / "models" / "digits" / "1"
    assert (folder / "saved_model.pb").is_file()
    assert (folder / "assets.extra" / "tf_serving_warmup_requests").is_file()
    card = (folder / "MODEL_CARD.md").read_text()
    for part in ("# digits", "one of 10 classes", "`mlp`", champion.record["data_digest"], "Blessed", "accuracy ≥ 0.5"):
        assert part in card
    assert models.verify() == []


def test_the_loser_of_two_runs_is_judged_again_and_stays_out_if_it_is_worse(
    tmp_path, digits_examples, digits_model, worse_model, capsys
):
    better, worse = (
        Run(tmp_path / name, tmp_path / "models", digits_examples, model)
        for name, model in (("better", digits_model), ("worse", worse_model))
    )
    assert worse.evaluate_and_judge()  # both are blessed while there is no champion
    assert better.evaluate_and_judge()
    assert better.push()["promoted"]
    pushed = worse.push()
    assert (pushed["promoted"], pushed["version"]) == (False, 2)
    models = Registry(tmp_path / "models", "digits")
    assert models.champion().number == 1
    assert [version.number for version in models.versions()] == [1, 2]  # kept, with its record
    again = json.loads((tmp_path / "worse" / "pushed_model" / "verdict.json").read_text())
    assert (again["verdict"], again["baseline_version"]) == ("not_blessed", 1)
    assert not (tmp_path / "worse" / "pushed_model" / "version.json").exists()
    assert "judged again: not_blessed" in capsys.readouterr().out
    kept = models.version(2)
    assert (kept.record["verdict"]["verdict"], kept.record["verdict"]["baseline_version"]) == ("not_blessed", 1)
    card = (tmp_path / "models" / "digits" / "2" / "MODEL_CARD.md").read_text()
    page = (tmp_path / "worse" / "final.html").read_text()
    for text in (card, page):
        assert "not blessed" in text.lower()
        assert "better than champion version 1" in text
    assert "not blessed" not in (tmp_path / "worse" / "report.html").read_text().lower()
    noted = json.loads((tmp_path / "models" / "outcomes" / "run" / "verdict.json").read_text())
    assert (noted["verdict"], noted["report"]) == ("not_blessed", str(tmp_path / "worse" / "final.html"))


def test_the_loser_becomes_champion_after_all_if_it_is_better(tmp_path, digits_examples, digits_model, worse_model):
    better, worse = (
        Run(tmp_path / name, tmp_path / "models", digits_examples, model)
        for name, model in (("better", digits_model), ("worse", worse_model))
    )
    assert better.evaluate_and_judge()
    assert worse.evaluate_and_judge()
    assert worse.push()["promoted"]
    assert better.push()["promoted"]
    models = Registry(tmp_path / "models", "digits")
    assert models.champion().number == 2
    assert [event["version"] for event in models.history()] == [1, 2]
    assert "better than champion version 1" in models.history()[-1]["reason"]


def test_a_version_that_is_overtaken_between_publishing_and_promoting_is_followed_by_one_with_the_later_judgement(
    tmp_path, digits_examples, digits_model, worse_model, monkeypatch
):
    better, worse = (
        Run(tmp_path / name, tmp_path / "models", digits_examples, model)
        for name, model in (("better", digits_model), ("worse", worse_model))
    )
    assert worse.evaluate_and_judge()
    assert better.evaluate_and_judge()
    publish, published = Registry.publish, []

    def overtaken(registry, folder, record):
        version = publish(registry, folder, record)
        published.append(version.number)
        if len(published) == 1:
            better.push()
        return version

    monkeypatch.setattr(Registry, "publish", overtaken)
    assert worse.push()["promoted"] is False
    models = Registry(tmp_path / "models", "digits")
    assert models.champion().number == 2
    verdicts = {version.number: version.record["verdict"]["verdict"] for version in models.versions()}
    assert verdicts == {1: "blessed", 2: "blessed", 3: "not_blessed"}
    assert worse.artifacts["pushed_model"].metadata["version"] == 3
    assert models.verify() == []


def test_a_verdict_is_written_even_if_the_page_cannot_be(tmp_path, digits_examples, digits_model, monkeypatch):
    run = Run(tmp_path / "run", tmp_path / "models", digits_examples, digits_model)
    monkeypatch.setattr("trainer.report.render", lambda *_: 1 / 0)
    with pytest.raises(SystemExit):
        run.evaluate_and_judge()
    assert json.loads((tmp_path / "run" / "verdict" / "verdict.json").read_text())["verdict"] == "blessed"


def test_a_failed_serving_check_keeps_a_good_model_out(tmp_path, digits_examples, digits_model):
    run = Run(tmp_path / "run", tmp_path / "models", digits_examples, digits_model)
    bad = {"passed": False, "findings": [{"check": "it loads in time", "passed": False, "message": "90 s"}]}
    (tmp_path / "run" / "serving_check" / "serving.json").write_text(json.dumps(bad))
    assert run.evaluate_and_judge() is False
    verdict = json.loads((tmp_path / "run" / "verdict" / "verdict.json").read_text())
    assert verdict["reasons"][0] == "serving check: it loads in time does not hold: 90 s"


def test_a_broken_record_stops_no_run_unless_it_is_the_champions(tmp_path, digits_examples, digits_model, capsys):
    first, second, third = (
        Run(tmp_path / name, tmp_path / "models", digits_examples, digits_model)
        for name in ("first", "second", "third")
    )
    assert first.evaluate_and_judge()
    assert first.push()["version"] == 1
    models = Registry(tmp_path / "models", "digits")
    broken = models.publish(digits_model, {}).number
    spoil(tmp_path / "models" / "digits" / str(broken))
    assert second.evaluate_and_judge()
    pushed = second.push()
    assert (pushed["version"], pushed["promoted"], models.champion_number()) == (3, True, 3)
    spoil(tmp_path / "models" / "digits" / "3")
    with pytest.raises(SystemExit):
        third.evaluate_and_judge()
    assert "3/record.json: is not JSON" in (told := capsys.readouterr().err)
    assert "version 3 is the champion: promote another, roll back or restore it" in told.splitlines()[-1]


def spoil(version):
    """A record that was cut off."""
    (version / "record.json").unlink()
    (version / "record.json").write_text("{")
