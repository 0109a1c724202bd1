"""Each component by its own function, on real artifacts of tiny data."""

import json
from pathlib import Path

import pytest
from kfp import dsl

from components.check_serving import check_serving
from components.evaluate_model import evaluate_model
from components.judge_model import judge_model
from components.prepare_data import prepare_data
from components.push_model import push_model
from components.record_outcome import record_outcome
from components.train_model import train_model
from trainer.config import (
    DataConfig,
    EvaluateConfig,
    GroupConfig,
    PushConfig,
    ServingConfig,
    Splits,
    TrainConfig,
    parse,
)

DATA = DataConfig(splits=Splits(train="train[:200]", validation="train[200:250]", test="test[:60]"))
TRAIN = TrainConfig(model="mlp", epochs=2, global_batch_size=32)
SERVING = ServingConfig(num_requests=20)
EASY = parse(EvaluateConfig, {"thresholds": {"accuracy": {"value_threshold": 0.05}}})
HARD = parse(EvaluateConfig, {"thresholds": {"accuracy": {"value_threshold": 1.0}, "loss": {"value_threshold": 1e-9}}})


def artifact(kind, folder, name):
    return kind(name=name, uri=str(folder / name))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The artifacts of one run, each made by its component's function from the ones before."""
    folder = tmp_path_factory.mktemp("components")
    root, registry = str(folder / "root"), str(folder / "registry")
    made = {
        name: artifact(kind, folder, name)
        for name, kind in {
            "examples": dsl.Dataset, "model": dsl.Model, "evaluation": dsl.Artifact, "metrics": dsl.Metrics,
            "classification_metrics": dsl.ClassificationMetrics, "serving_check": dsl.Artifact,
            "verdict": dsl.Artifact, "report": dsl.HTML, "summary": dsl.Markdown, "pushed_model": dsl.Model,
            "final_report": dsl.HTML,
        }.items()
    }  # fmt: skip
    prepare_data.python_func(DATA.to_json(), 7, root, "code", "", made["examples"])
    train_model.python_func(
        TRAIN.to_json(), GroupConfig().to_json(), 7, "tiny", root, "code", made["examples"], made["model"]
    )
    evaluate_model.python_func(
        EASY.to_json(), "tiny", registry, root, "run-1", made["examples"], made["model"], made["evaluation"], made["metrics"],
        made["classification_metrics"],
    )  # fmt: skip
    check_serving.python_func(SERVING.to_json(), root, "run-1", made["model"], made["serving_check"])
    made["blessed"] = judge_model.python_func(
        EASY.to_json(), "tiny", root, "run-1", made["model"], made["evaluation"], made["serving_check"],
        made["verdict"], made["report"], made["summary"],
    )  # fmt: skip
    push_model.python_func(
        PushConfig().to_json(), EASY.to_json(), "tiny", registry, root, "run-1", made["examples"], made["model"],
        made["evaluation"], made["serving_check"], made["verdict"], made["pushed_model"], made["final_report"],
    )  # fmt: skip
    return made | {"folder": folder, "registry": Path(registry)}


def test_prepare_data_says_what_it_prepared(made):
    manifest = json.loads((Path(made["examples"].path) / "manifest.json").read_text())
    assert made["examples"].metadata["digest"] == manifest["digest"]
    assert made["examples"].metadata["num_train_examples"] == 200


def test_train_model_leaves_a_model_and_no_checkpoints(made):
    folder = Path(made["model"].path)
    assert {"saved_model", "model.keras", "history.jsonl", "train.json"} <= {entry.name for entry in folder.iterdir()}
    assert made["model"].metadata["data_digest"] == made["examples"].metadata["digest"]
    assert not list((made["folder"] / "root" / "checkpoints").rglob("step-*"))


def test_evaluate_model_counts_every_test_example_once_and_reports_finite_numbers(made):
    evaluation = json.loads((Path(made["evaluation"].path) / "evaluation.json").read_text())
    assert sum(map(sum, evaluation["confusion_matrix"])) == evaluation["num_examples"] == 60
    assert made["metrics"].metadata["accuracy"] == evaluation["metrics"]["accuracy"]
    json.dumps([made["metrics"].metadata, made["classification_metrics"].metadata], allow_nan=False)
    matrix = made["classification_metrics"].metadata["confusionMatrix"]
    assert sum(sum(row["row"]) for row in matrix["rows"]) == 60


def test_judge_model_answers_one_bool_and_always_writes_verdict_and_report(made, tmp_path):
    assert made["blessed"] is True
    verdict, report = artifact(dsl.Artifact, tmp_path, "verdict"), artifact(dsl.HTML, tmp_path, "report")
    summary = artifact(dsl.Markdown, tmp_path, "summary")
    answer = judge_model.python_func(
        HARD.to_json(), "tiny", str(tmp_path), "run", made["model"], made["evaluation"], made["serving_check"], verdict,
        report, summary,
    )  # fmt: skip
    assert answer is False
    decision = json.loads((Path(verdict.path) / "verdict.json").read_text())
    assert decision["verdict"] == "not_blessed"
    assert any("does not hold" in reason for reason in decision["reasons"])
    assert Path(report.path).read_text().startswith("<!doctype html>")
    assert Path(summary.path).read_text().startswith("# Not blessed")


def test_check_serving_finds_the_export_well_and_says_how_fast_it_is(made):
    found = json.loads((Path(made["serving_check"].path) / "serving.json").read_text())
    assert found["passed"], [finding for finding in found["findings"] if not finding["passed"]]
    assert found["measured"]["latency_1"]["p50_ms"] > 0


def test_push_model_stores_what_tensorflow_serving_reads_and_makes_it_champion(made):
    version = made["registry"] / "tiny" / "1"
    assert {"saved_model.pb", "variables", "model.keras", "record.json"} <= {entry.name for entry in version.iterdir()}
    assert json.loads((made["registry"] / "tiny" / "champion.json").read_text())["champion"] == 1
    assert made["pushed_model"].metadata["registry_uri"] == str(version)


def test_what_became_of_the_run_is_left_under_its_root_for_those_who_ask_later(made):
    from trainer.outcome import read

    found = read(str(made["folder"] / "root"), "run-1")
    assert found["verdict"]["verdict"] == "blessed"
    assert found["verdict"]["metrics"]["accuracy"] == made["metrics"].metadata["accuracy"]
    assert found["pushed"]["version"] == 1


def test_the_pushed_model_answers_raw_images_with_class_names_and_probabilities(made):
    import numpy as np
    import tensorflow as tf

    from trainer.data.manifest import read_manifest
    from trainer.data.reading import load_split

    signature = tf.saved_model.load(str(made["registry"] / "tiny" / "1")).signatures["serving_default"]
    folder = Path(made["examples"].path)
    features, labels = load_split(folder, read_manifest(folder), "test")
    answers = signature(**{name: tf.constant(values) for name, values in features.items()})
    assert answers["probabilities"].shape == (60, 10)
    assert np.allclose(answers["probabilities"].numpy().sum(axis=1), 1.0, atol=1e-5)
    names = [name.decode() for name in answers["class_name"].numpy()]
    assert names == [str(index) for index in answers["class_index"].numpy()]
    accuracy = float(np.mean(answers["class_index"].numpy() == labels))
    assert accuracy == made["metrics"].metadata["accuracy"]


def test_the_keras_file_gives_the_same_answers_as_the_served_model(made):
    import keras
    import numpy as np
    import tensorflow as tf

    version = made["registry"] / "tiny" / "1"
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)
    logits = keras.saving.load_model(version / "model.keras", compile=False)({"image": images})
    served = tf.saved_model.load(str(version)).signatures["serving_default"](image=tf.constant(images))
    np.testing.assert_allclose(served["probabilities"], tf.nn.softmax(logits), atol=1e-6)


def test_record_outcome_records_state_and_error(tmp_path):
    outcome = artifact(dsl.Artifact, tmp_path, "outcome")
    status = dsl.PipelineTaskFinalStatus(
        state="FAILED", pipeline_job_resource_name="job", pipeline_task_name="train-model", error_code=1,
        error_message="no space left",
    )  # fmt: skip
    record_outcome.python_func("tiny", str(tmp_path), "run", "", status, outcome)
    content = json.loads(Path(outcome.path).read_text())
    assert (content["name"], content["state"], content["error"]) == ("tiny", "FAILED", "no space left")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (prepare_data, ('{"name": 3}', 7, "root", "code", "", None), "data.name = 3: must be text"),
        (prepare_data, ("{", 7, "root", "code", "", None), "is not JSON"),
        (
            train_model,
            ('{"epochs": 0}', "{}", 7, "tiny", "root", "code", None, None),
            "train.epochs = 0: must be at least 1",
        ),
    ],
)
def test_a_component_refuses_bad_settings_with_one_sentence_and_exit_code_2(function, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        function.python_func(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_batch_larger_than_the_split_is_refused_with_the_numbers(made, tmp_path, capsys):
    config = TRAIN.model_copy(update={"global_batch_size": 201})
    with pytest.raises(SystemExit) as ended:
        train_model.python_func(
            config.to_json(),
            GroupConfig().to_json(),
            7,
            "tiny",
            str(tmp_path),
            "code",
            made["examples"],
            artifact(dsl.Model, tmp_path, "model"),
        )
    assert ended.value.code == 2
    assert "train.global_batch_size = 201: the train split has 200 examples" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
