"""The evaluation of a real export on a real split: counts, slices, champions, and answers that are not numbers."""

import json

import numpy as np
import pytest

from trainer.config import EvaluateConfig, OwnMetric, Slicing, Threshold
from trainer.data.manifest import read_manifest
from trainer.data.reading import load_split
from trainer.errors import BadInput
from trainer.evaluate import evaluate, write_json
from trainer.verdict import judge

TABLE_SLICES = [
    Slicing(by=["label"]),
    Slicing(by=["colour"]),
    Slicing(by=["size"], bins={"size": [-1.0, 1.0]}),
    Slicing(by=["colour", "label"]),
    Slicing(function="own_rules:by_sign"),
]


@pytest.fixture(autouse=True)
def own_rules(tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text(
        "import numpy as np\n"
        "def by_sign(features, labels):\n"
        "    return [None if np.isnan(s) else 'positive' if s > 0 else 'negative' for s in features['size']]\n"
        "def cost(labels, answers):\n    return 10 * np.mean(answers.argmax(axis=1) != labels)\n"
        "def fails(labels, answers):\n    return float('nan')\n"
        "def raises(labels, answers):\n    return {}['price']\n"
        "def takes_one(labels):\n    return 1.0\n"
        "def each(labels, answers):\n    return answers\n"
        "def word(labels, answers):\n    return 'much'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_rules", raising=False)


@pytest.fixture(scope="module")
def found(table):
    examples, model = table
    config = EvaluateConfig(slices=TABLE_SLICES[:4], batch_size=32, min_slice_examples=10)
    return evaluate(config, examples, model, (1, model / "saved_model"))


def test_every_example_of_the_manifest_is_counted_once(table, found):
    split = read_manifest(table[0]).splits["test"]
    assert found["num_examples"] == split.num_examples == np.sum(found["confusion_matrix"])
    assert np.sum(found["confusion_matrix"], axis=1).tolist() == split.label_counts
    assert sum(row["num_examples"] for row in found["calibration"]["bins"]) == split.num_examples


def test_no_metric_depends_on_the_batch_size(table, found):
    examples, model = table
    other = evaluate(EvaluateConfig(batch_size=7), examples, model, None)
    areas = {"roc_auc", "pr_auc"}  # answers differ in their last bits, and two that were alike may change places
    for name, value in found["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, abs=1e-3 if name in areas else 1e-6), name
    assert other["confusion_matrix"] == found["confusion_matrix"]


def test_what_is_measured_is_what_the_signature_answers(table, found):
    import tensorflow as tf

    examples, model = table
    manifest = read_manifest(examples)
    features, labels = load_split(examples, manifest, "test")[:2]
    serve = tf.saved_model.load(str(model / "saved_model")).signatures["serving_default"]
    answers = serve(**{name: tf.constant(values) for name, values in features.items()})
    right = np.mean(answers["class_index"].numpy() == labels)
    assert found["metrics"]["accuracy"] == pytest.approx(right)
    names = np.array(manifest.class_names)[labels]
    assert np.mean(answers["class_name"].numpy().astype(str) == names) == pytest.approx(right)
    assert right > 0.8


def rows(found, slicing):
    return {row["slice"]: row for row in found["slices"] if row["slicing"] == slicing}


def test_slices_take_the_split_apart_without_loss(table, found):
    features = load_split(table[0], read_manifest(table[0]), "test")[0]
    for slicing in range(4):
        assert sum(row["num_examples"] for row in rows(found, slicing).values()) == found["num_examples"]
    assert set(rows(found, 0)) == {"label = big", "label = small"}
    by_colour = rows(found, 1)
    for colour in ("red", "green", "blue"):
        assert by_colour[f"colour = {colour}"]["num_examples"] == (features["colour"] == colour.encode()).sum()
    ranges = rows(found, 2)
    assert set(ranges) == {"size < -1", "-1 ≤ size < 1", "size ≥ 1", "size missing"}
    assert ranges["size missing"]["num_examples"] == np.isnan(features["size"]).sum() > 0
    assert "colour = red, label = big" in rows(found, 3)


def test_a_slice_has_the_metrics_of_its_examples(found):
    recall = {f"label = {row['class']}": row["recall"] for row in found["per_class"]}
    for name, row in rows(found, 0).items():
        assert row["metrics"]["accuracy"] == pytest.approx(recall[name])
        low, high = row["intervals"]["accuracy"]
        assert low <= recall[name] <= high
        assert row["metrics"]["roc_auc"] is None  # there is one class only
    weights = [row["num_examples"] * row["metrics"]["accuracy"] for row in rows(found, 1).values()]
    assert sum(weights) / found["num_examples"] == pytest.approx(found["metrics"]["accuracy"])


def test_small_and_empty_slices_are_stated_and_not_judged(table):
    examples, model = table
    slicing = Slicing(by=["size"], bins={"size": [-50.0, 0.0]}, thresholds={"accuracy": Threshold(value_threshold=0.5)})
    config = EvaluateConfig(thresholds={}, slices=[slicing])
    found = evaluate(config, examples, model, None)
    empty = rows(found, 0)["size < -50"]
    assert (empty["num_examples"], empty["judged"], empty["metrics"]) == (0, False, {})
    open_rules = [rule for rule in judge(config, found)["rules"] if rule["passed"] is None]
    assert [rule["slice"] for rule in open_rules] == ["size missing", "size < -50"]


def test_ones_own_slices_and_metrics(table):
    examples, model = table
    own = {"cost": OwnMetric(function="own_rules:cost", lower_is_better=True)}
    config = EvaluateConfig(own_metrics=own, slices=[TABLE_SLICES[4]])
    found = evaluate(config, examples, model, None)
    assert found["metrics"]["cost"] == pytest.approx(10 * (1 - found["metrics"]["accuracy"]))
    low, high = found["intervals"]["cost"]
    assert low < found["metrics"]["cost"] < high
    assert set(rows(found, 0)) == {"positive", "negative"}
    assert (
        sum(row["num_examples"] for row in found["slices"]) < found["num_examples"]
    )  # those without a size are in none


def test_the_champion_is_measured_on_the_same_examples(found):
    baseline = found["baseline"]
    assert baseline["version"] == 1
    assert baseline["metrics"] == found["metrics"]
    assert baseline["digest"] == found["model_digest"]
    assert all(change["gain"] == 0.0 for change in baseline["changes"].values())
    assert all(row["baseline"]["metrics"] == row["metrics"] for row in found["slices"])


def test_a_champion_for_other_data_is_incompatible_and_says_why(table, digits_model):
    examples, model = table
    baseline = evaluate(EvaluateConfig(), examples, model, (4, digits_model / "saved_model"))["baseline"]
    assert baseline["version"] == 4
    assert "image" in baseline["incompatible"]
    assert "colour" in baseline["incompatible"]


def test_a_champion_that_tells_other_classes_is_incompatible(table, number_table, tmp_path):
    examples, model = table
    other = evaluate(EvaluateConfig(), examples, model, (2, number_table[1] / "saved_model"))["baseline"]
    assert "answers no probabilities" in other["incompatible"]
    renamed = tmp_path / "renamed"
    __import__("shutil").copytree(model / "saved_model", renamed)
    file = renamed / "assets.extra" / "trireme.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"class_names": ["small", "big"]}))
    swapped = evaluate(EvaluateConfig(), examples, model, (3, renamed))["baseline"]
    assert "its class 0 is 'small', the data's is 'big'" in swapped["incompatible"]


def test_a_model_for_other_data_is_refused(table, digits_model):
    with pytest.raises(BadInput, match="no colour, which the data has"):
        evaluate(EvaluateConfig(), table[0], digits_model, None)


def test_answers_that_are_not_numbers_have_no_metrics_and_are_counted(table, tmp_path):
    import keras

    from trainer.export import export_model, reference_examples

    examples, model = table
    manifest = read_manifest(examples)
    broken = keras.saving.load_model(model / "model.keras", compile=False)
    broken.layers[-1].bias.assign([float("nan"), 0.0])
    (tmp_path / "broken").mkdir()
    export_model(broken, manifest, reference_examples(examples, manifest), tmp_path / "broken")
    found = evaluate(EvaluateConfig(), examples, tmp_path / "broken", (1, model / "saved_model"))
    assert found["num_not_finite"] == found["num_examples"]
    assert set(found["metrics"].values()) == {None}
    assert not judge(EvaluateConfig(), found)["blessed"]
    write_json(tmp_path / "evaluation.json", found)  # which refuses NaN
    as_champion = evaluate(EvaluateConfig(), examples, model, (1, tmp_path / "broken" / "saved_model"))
    assert "not finite" in as_champion["baseline"]["incompatible"]
    assert judge(EvaluateConfig(), as_champion)["verdict"] == "baseline_incompatible"


def test_numbers_have_their_metrics_slices_and_mistakes(number_table):
    examples, model = number_table
    config = EvaluateConfig(quantiles=[0.1], slices=[Slicing(by=["colour"])], num_mistakes=5)
    found = evaluate(config, examples, model, (1, model / "saved_model"))
    assert set(found["metrics"]) == {"mean_absolute_error", "root_mean_squared_error", "r2", "pinball_0.1"}
    assert found["metrics"]["r2"] > 0.5
    assert set(found["intervals"]) == set(found["metrics"])
    assert [row["slice"].split(" = ")[0] for row in found["slices"]] == ["colour"] * 3
    gaps = [abs(mistake["label"] - mistake["predicted"]) for mistake in found["mistakes"]]
    assert gaps == sorted(gaps, reverse=True)
    assert set(found["mistakes"][0]["values"]) == {"colour", "size"}
    assert judge(EvaluateConfig(), found)["blessed"]


def test_the_worst_mistakes_are_wrong_and_sure_and_show_what_was_seen(digits_examples, digits_model):
    found = evaluate(EvaluateConfig(num_mistakes=4), digits_examples, digits_model, None)
    assert 0 < len(found["mistakes"]) <= 4
    for mistake in found["mistakes"]:
        assert mistake["label"] != mistake["predicted"]
        assert mistake["probability"] > mistake["label_probability"]
        assert mistake["image"]["shape"] == [8, 8, 1]
    sure = [mistake["probability"] for mistake in found["mistakes"]]
    assert sure == sorted(sure, reverse=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thresholds": {"r2": Threshold(value_threshold=0.1)}}, "evaluate.thresholds.r2: classification has accuracy"),
        (
            {"slices": [Slicing(by=["colour"], thresholds={"r2": Threshold(value_threshold=0)})]},
            "slices.0.thresholds.r2",
        ),
        ({"quantiles": [0.5]}, "the label is a class and has no quantiles"),
        ({"slices": [Slicing(by=["weight"])]}, "slices.0.by = weight: no such feature"),
        ({"slices": [Slicing(by=["colour"], bins={"colour": [1.0]})]}, "which cannot be cut into ranges"),
        ({"slices": [Slicing(function="own_rules:nothing")]}, "has no function nothing"),
        ({"own_metrics": {"cost": OwnMetric(function="nowhere:cost")}}, "own_metrics.cost.function"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_by_its_setting(table, settings, message):
    with pytest.raises(BadInput, match=message.replace(".", r"\.")):
        evaluate(EvaluateConfig(**settings), *table, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"own_metrics": {"cost": OwnMetric(function="own_rules:raises")}},
         r"own_metrics\.cost\.function: raised KeyError at own_rules\.py:\d+: 'price'"),
        ({"own_metrics": {"cost": OwnMetric(function="own_rules:takes_one")}}, "cost.function: raised TypeError.*argument"),
        ({"own_metrics": {"cost": OwnMetric(function="own_rules:each")}}, "cost.function: gave .*must give one number"),
        ({"own_metrics": {"cost": OwnMetric(function="own_rules:word")}}, "cost.function: gave 'much'; must give one number"),
        ({"slices": [Slicing(function="own_rules:raises")]}, r"slices\.0\.function: raised KeyError"),
        ({"slices": [Slicing(function="own_rules:word")]}, r"slices\.0\.function: gave 'much'; must give a name"),
    ],
)  # fmt: skip
def test_ones_own_function_that_fails_is_named_with_its_line(table, config, message):
    examples, model = table
    with pytest.raises(BadInput, match=message):
        evaluate(EvaluateConfig(**config), examples, model, None)


def test_a_metric_of_ones_own_that_is_not_a_number_is_not_defined(table):
    own = {"odd": OwnMetric(function="own_rules:fails")}
    config = EvaluateConfig(own_metrics=own, thresholds={"odd": Threshold(value_threshold=0.0)})
    found = evaluate(config, *table, None)
    assert found["metrics"]["odd"] is None
    assert not judge(config, found)["blessed"]


def test_the_whole_evaluation_is_strict_json(found, tmp_path):
    write_json(tmp_path / "evaluation.json", found)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == json.loads(json.dumps(found))


def test_the_report_shows_it(found):
    from trainer.report import markdown_summary, render

    verdict = judge(EvaluateConfig(), found)
    page = render(found, verdict, [], {"name": "table"})
    for part in ("colour = red", "Calibration", "Precision and recall curves", "Data", "most_frequent"):
        assert part in page
    assert "95\N{NARROW NO-BREAK SPACE}% interval" in markdown_summary(found, verdict)
    assert "Top 2 accuracy" in markdown_summary({**found, "metrics": {"top_k_accuracy": 0.9}, "top_k": 2}, verdict)
