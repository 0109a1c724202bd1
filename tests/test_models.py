"""Each kind of model learns its task, carries its preprocessing, and is served as it was trained."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config import Augmentation, DataConfig, EvaluateConfig, Splits, TrainConfig
from trainer.data.manifest import Feature, Label, read_manifest
from trainer.data.prepare import prepare
from trainer.data.reading import load_split
from trainer.data.statistics import Collector
from trainer.errors import BadInput
from trainer.evaluate import evaluate
from trainer.loop import fit
from trainer.models import build_model
from trainer.objective import Classification, Regression, objective_of
from trainer.spec import ModelSpec, spec_of

SPLITS = Splits(train="70%", validation="10%", test="20%")


def spec(features, label, **values):
    """A spec whose statistics are those of the values given."""
    counted = {}
    kinds = {name: feature.kind for name, feature in features.items()}
    kinds[label.name] = "number" if label.class_names is None else "category"
    for name, kind in kinds.items():
        counted[name] = Collector(kind)
        counted[name].add(values.get(name, []))
    return ModelSpec(features, label, {name: one.result() for name, one in counted.items()})


CLASSES = Label(name="label", class_names=["a", "b", "c"])
NUMBER = Label(name="label")
IMAGE = {"image": Feature(kind="image", shape=(8, 8, 3))}
TABLE = {"size": Feature(kind="number"), "colour": Feature(kind="category")}
TEXT = {"text": Feature(kind="text")}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table in which two columns, one of them with missing values, tell the class."""
    folder = tmp_path_factory.mktemp("table")
    chance = np.random.default_rng(5)
    rows = []
    for _ in range(400):
        kind = int(chance.integers(3))
        size = "" if chance.random() < 0.1 else f"{chance.normal(100 * kind, 10):.2f}"
        colour = ["red", "green", "blue"][kind] if chance.random() < 0.8 else ""
        rows.append(f"{size},{colour},{'abc'[kind]},{kind * 50 + chance.normal():.3f}")
    (folder / "t.csv").write_text("\n".join(["size,colour,kind,amount", *rows]) + "\n")
    return folder / "t.csv"


def trained(table, folder, label, **settings):
    config = DataConfig(source="csv", path=str(table), splits=SPLITS, label_key=label, input_keys=["size", "colour"])
    prepare(config, 7, folder / "examples")
    train = TrainConfig(model="tabular", epochs=12, global_batch_size=16, learning_rate=1e-2, **settings)
    fit(train, 7, folder / "examples", folder / "model", folder / "checkpoints")
    return evaluate(EvaluateConfig(), folder / "examples", folder / "model", None)


def test_a_table_with_missing_values_is_classified_and_served_raw(table, tmp_path):
    found = trained(table, tmp_path, "kind", class_weights="balanced")
    assert found["metrics"]["accuracy"] > 0.9
    signature = tf.saved_model.load(str(tmp_path / "model" / "saved_model")).signatures["serving_default"]
    answers = signature(size=tf.constant([0.0, np.nan, np.nan]), colour=tf.constant(["", "blue", "never seen"]))
    assert answers["class_name"].numpy()[:2].tolist() == [b"a", b"c"]
    assert np.isfinite(answers["probabilities"].numpy()).all()
    features, _ = load_split(tmp_path / "examples", read_manifest(tmp_path / "examples"), "test")
    keras_file = keras.saving.load_model(tmp_path / "model" / "model.keras", compile=False)
    served = signature(**{name: tf.constant(values) for name, values in features.items()})["probabilities"]
    logits = keras_file({name: tf.constant(values) for name, values in features.items()})
    np.testing.assert_allclose(served, tf.nn.softmax(logits), atol=1e-6)


def test_a_number_is_told_in_its_own_units(table, tmp_path):
    found = trained(table, tmp_path, "amount", keep_best="mean_absolute_error")
    assert found["task"] == "regression"
    assert found["metrics"]["r2"] > 0.8
    history = [json.loads(line) for line in (tmp_path / "model" / "history.jsonl").read_text().splitlines()]
    assert history[-1]["validation_mean_absolute_error"] < 20
    assert "accuracy" not in history[-1]
    signature = tf.saved_model.load(str(tmp_path / "model" / "saved_model")).signatures["serving_default"]
    answer = signature(size=tf.constant([200.0]), colour=tf.constant(["blue"]))["prediction"]
    assert answer.shape == (1,)
    assert abs(float(answer[0]) - 100) < 25


@pytest.mark.parametrize("label", [CLASSES, NUMBER], ids=["classes", "number"])
@pytest.mark.parametrize(
    ("model", "args", "features"),
    [
        ("mlp", {}, IMAGE),
        ("cnn", {"filters": [4]}, IMAGE),
        ("resnet", {"filters": [8, 16], "blocks_per_stage": 1}, IMAGE),
        ("tabular", {}, {**TABLE, **TEXT}),
        ("text", {"filters": 8, "embedding_size": 4}, TEXT),
    ],
)
def test_a_model_takes_raw_features_and_answers_one_output_a_class_or_one_number(model, args, features, label):
    made = spec(features, label, size=[1.0, np.nan], colour=["red", ""], text=["some words", ""])
    built = build_model(TrainConfig(model=model, model_args=args), made)
    batch = {
        "image": tf.zeros((2, 8, 8, 3), tf.uint8), "size": tf.constant([1.0, np.nan]), "colour": tf.constant(["red", ""]),
        "text": tf.constant(["some other words", ""]),
    }  # fmt: skip
    answers = built({name: batch[name] for name in features})
    assert answers.shape == (2, made.num_outputs)
    assert answers.dtype == tf.float32
    assert np.isfinite(answers.numpy()).all()


def test_numbers_are_scaled_by_the_training_split_and_nothing_else():
    from trainer.preprocessing import column

    made = spec({"size": Feature(kind="number")}, NUMBER, size=[10.0, 20.0, 30.0, np.nan])
    inputs = made.inputs()
    layer = keras.Model(inputs, column(made, "size", inputs["size"]))
    answers = layer({"size": tf.constant([20.0, 30.0, np.nan])}).numpy()
    np.testing.assert_allclose(answers, [[0, 0], [1.2247449, 0], [0, 1]], atol=1e-6)


def test_augmentation_changes_images_in_training_and_never_in_answers():
    made = spec(IMAGE, CLASSES)
    made = ModelSpec(made.features, made.label, made.statistics, (Augmentation(layer="RandomFlip", args={"seed": 1}),))
    built = build_model(TrainConfig(model="mlp", augmentation=list(made.augmentation)), made)
    image = {"image": tf.random.stateless_uniform((4, 8, 8, 3), (1, 2), 0, 255, tf.int32)}
    image = {"image": tf.cast(image["image"], tf.uint8)}
    np.testing.assert_array_equal(built(image, training=False), built(image, training=False))
    assert np.abs(built(image, training=True) - built(image, training=False)).max() > 1e-4


@pytest.mark.parametrize(
    ("config", "features", "message"),
    [
        (
            {"model": "cnn"},
            TABLE,
            "needs one image and nothing else, and the data has colour (category), size (number)",
        ),
        ({"model": "tabular"}, IMAGE, "takes no images"),
        (
            {"model": "cnn", "model_args": {"filtres": [3]}},
            IMAGE,
            "train.model_args.filtres: cnn takes no such argument",
        ),
        ({"model": "resnet", "model_args": {"filters": [9]}}, IMAGE, "9 is no multiple of groups = 8"),
        ({"model": "test_models:build_wrong"}, IMAGE, "must answer ['batch', 3]"),
        ({"model": "test_models:build_nothing"}, IMAGE, "build returned NoneType, not a keras.Model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(config, features, message):
    made = spec(dict(sorted(features.items())), CLASSES)
    with pytest.raises(BadInput) as refused:
        build_model(TrainConfig(**config), made)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("augmentation", "message"),
    [
        (Augmentation(layer="RandomFlop"), "Keras has no layer RandomFlop; did you mean RandomFlip?"),
        (Augmentation(layer="RandomFlip", args={"sideways": True}), "RandomFlip cannot be made with"),
    ],
)
def test_an_augmentation_that_cannot_be_is_refused(augmentation, message):
    made = spec(IMAGE, CLASSES)
    made = ModelSpec(made.features, made.label, made.statistics, (augmentation,))
    with pytest.raises(BadInput) as refused:
        build_model(TrainConfig(model="mlp"), made)
    assert message in str(refused.value)


def test_an_augmentation_that_a_model_ignores_is_refused():
    made = spec(IMAGE, CLASSES)
    made = ModelSpec(made.features, made.label, made.statistics, (Augmentation(layer="RandomFlip"),))
    with pytest.raises(BadInput, match="makes no use of it"):
        build_model(TrainConfig(model="test_models:build_plain"), made)


def build_wrong(spec):
    inputs = spec.inputs()
    return keras.Model(
        inputs, keras.layers.Dense(7)(keras.layers.Flatten()(keras.layers.Rescaling(1.0)(inputs["image"])))
    )


def build_nothing(spec):
    return None


def build_plain(spec):
    inputs = spec.inputs()
    x = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(inputs["image"]))
    return keras.Model(inputs, spec.output(x))


def test_losses_and_measures_are_those_of_the_formulas():
    classes = Classification(TrainConfig(label_smoothing=0.1), ["a", "b"], [3, 1])
    logits, labels = np.array([[2.0, 0.0], [0.0, 1.0]], np.float32), np.array([0, 0], np.int32)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -(0.95 * log_p[:, 0] + 0.05 * log_p[:, 1])
    np.testing.assert_allclose(classes.losses(tf.constant(logits), tf.constant(labels)), expected, rtol=1e-6)
    assert classes.measures(tf.constant(logits), tf.constant(labels)).numpy().tolist() == [1.0, 0.0]
    numbers = Regression(2.0)
    outputs, targets = tf.constant([[3.0], [1.0]]), tf.constant([1.0, 1.0])
    assert numbers.losses(outputs, targets).numpy().tolist() == [1.0, 0.0]
    assert numbers.measures(outputs, targets).numpy().tolist() == [2.0, 0.0]


def test_balanced_weights_give_each_class_the_same_weight_in_all():
    counts = [60, 30, 10, 0]
    weights = Classification(TrainConfig(class_weights="balanced"), list("abcd"), counts)._weights
    assert (weights[:3] * counts[:3]).tolist() == pytest.approx([100 / 3] * 3)
    assert weights[3] == 0


@pytest.mark.parametrize(
    ("label", "settings", "message"),
    [
        (NUMBER, {"keep_best": "accuracy"}, "regression has loss and mean_absolute_error"),
        (NUMBER, {"class_weights": "balanced"}, "label is a number and has no classes"),
        (NUMBER, {"label_smoothing": 0.1}, "label is a number and has no classes"),
        (CLASSES, {"keep_best": "mean_absolute_error"}, "classification has loss and accuracy"),
        (CLASSES, {"class_weights": {"z": 2.0}}, "train.class_weights.z: no such class"),
    ],
)
def test_settings_of_another_task_are_refused(label, settings, message):
    with pytest.raises(BadInput) as refused:
        objective_of(spec(IMAGE, label), TrainConfig(**settings))
    assert message in str(refused.value)


def test_a_weight_of_zero_takes_an_example_out_of_the_training(tmp_path):
    """Half the rows are mislabelled and weigh nothing: what is learned is what the others say."""
    rows = []
    for number in range(300):
        size, lies = number % 10, number % 2
        told = "ab"[(size > 4) ^ bool(lies)]
        rows.append(f"{size},{told},{0 if lies else 1}")
    (tmp_path / "t.csv").write_text("\n".join(["size,label,trust", *rows]) + "\n")
    config = DataConfig(
        source="csv", path=str(tmp_path / "t.csv"), splits=SPLITS, label_key="label", weight_key="trust"
    )
    manifest = prepare(config, 7, tmp_path / "examples")
    assert list(manifest.features) == ["size"]
    train = TrainConfig(model="tabular", epochs=15, global_batch_size=16, learning_rate=1e-2, keep_best=None)
    fit(train, 7, tmp_path / "examples", tmp_path / "model", tmp_path / "checkpoints")
    signature = tf.saved_model.load(str(tmp_path / "model" / "saved_model")).signatures["serving_default"]
    answers = signature(size=tf.constant([0.0, 2.0, 7.0, 9.0]))["class_name"].numpy().tolist()
    assert answers == [b"a", b"a", b"b", b"b"]
    assert spec_of(manifest, tmp_path / "examples").num_outputs == 2
