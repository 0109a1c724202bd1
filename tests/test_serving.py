"""The serving check: passes what trainings export and catches skew, missing signatures, slow and greedy models."""

import json
import shutil

import pytest

from trainer.config import ServingConfig
from trainer.data.manifest import read_manifest
from trainer.serving import check_serving


def failed(found):
    return {finding["check"]: finding["message"] for finding in found["findings"] if not finding["passed"]}


@pytest.fixture(scope="module")
def checked(digits_model):
    return check_serving(ServingConfig(num_requests=20), digits_model)


def test_an_ordinary_export_passes(checked):
    assert failed(checked) == {}
    assert checked["passed"]
    checks = {finding["check"] for finding in checked["findings"]}
    assert "its probabilities are the trainer's" in checks
    assert "it answers image files as their pixels" in checks
    assert "odd images are refused or answered, and harm no other row" in checks
    assert checked["measured"]["latency_64"]["p99_ms"] > 0
    assert checked["measured"]["peak_bytes"] > 100 * 1024**2
    json.dumps(checked, allow_nan=False)


def test_tables_pass_too(table):
    found = check_serving(ServingConfig(num_requests=20), table[1])
    assert failed(found) == {}
    odd = next(finding for finding in found["findings"] if finding["check"].startswith("odd values"))
    assert (
        odd["message"] == "13 cases"
    )  # for each of two columns wrong dtype, wrong shape, left out; three odd values; …


@pytest.fixture
def tampered(digits_model, tmp_path):
    """A copy of the digits' model, whose SavedModel is replaced by the signatures that a test makes."""

    def make(signatures):
        import keras
        import tensorflow as tf

        shutil.copytree(digits_model, tmp_path / "model")
        target = tmp_path / "model" / "saved_model"
        extra = target / "assets.extra"
        shutil.move(extra, tmp_path / "extra")
        shutil.rmtree(target)
        model = keras.saving.load_model(digits_model / "model.keras", compile=False)
        archive = keras.export.ExportArchive()
        archive.track(model)
        spec = tf.TensorSpec([None, 8, 8, 1], tf.uint8, name="image")
        for name, function in signatures(model).items():
            archive.add_endpoint(name, function, input_signature=[{"image": spec}])
        archive.write_out(str(target), verbose=False)
        shutil.move(tmp_path / "extra", extra)
        return tmp_path / "model"

    return make


def test_planted_skew_and_a_missing_signature_are_caught(tampered):
    import tensorflow as tf

    def skewed(model):
        def serve(features):  # somebody scales once more
            darker = tf.cast(tf.cast(features["image"], tf.float32) * 0.9, tf.uint8)
            return {"probabilities": tf.nn.softmax(model({"image": darker}))}

        return {"serving_default": serve}

    found = failed(check_serving(ServingConfig(num_requests=20), tampered(skewed)))
    assert "missing: image_bytes" in found["it has its signatures"]
    assert "largest difference" in found["its probabilities are the trainer's"]


def test_a_slow_and_greedy_model_is_caught(tampered):
    import tensorflow as tf

    def slow(model):
        def serve(features):
            waste = tf.ones([600, 600]) + tf.reduce_mean(tf.cast(features["image"], tf.float32)) * 1e-9
            for _ in range(40):
                waste = tf.linalg.matmul(waste, waste) / 600.0
            probabilities = tf.nn.softmax(model(features))
            return {"probabilities": probabilities + 1e-20 * waste[0, 0]}

        return {"serving_default": serve}

    config = ServingConfig(num_requests=20, max_p50_ms=5.0, max_p99_ms=5.0, max_memory_bytes=50 * 1024**2)
    found = failed(check_serving(config, tampered(slow)))
    assert "the limit is 5 (serving.max_p50_ms)" in found["p50 latency of one example"]
    assert "p99 latency of one example" in found
    assert "the limit is 50 (serving.max_memory_bytes)" in found["it fits into memory"]
    assert "its probabilities are the trainer's" not in found


def test_a_check_that_never_ends_is_ended(digits_model):
    found = check_serving(ServingConfig(timeout_secs=0.2), digits_model)
    assert "longer than 0.2 s" in failed(found)["the process that serves lives"]
    assert not found["passed"]


def test_an_export_that_cannot_be_loaded_says_so(digits_model, tmp_path):
    shutil.copytree(digits_model, tmp_path / "model")
    (tmp_path / "model" / "saved_model" / "saved_model.pb").write_bytes(b"nonsense")
    found = failed(check_serving(ServingConfig(), tmp_path / "model"))
    assert "it loads without the project" in found


def test_without_answers_to_compare_with_nothing_passes(tmp_path):
    (tmp_path / "saved_model").mkdir()
    assert not check_serving(ServingConfig(), tmp_path)["passed"]


def test_image_files_that_are_seen_darker_and_one_hostile_one_that_fails_its_batch_are_caught(
    tampered, digits_examples
):
    """An `image_bytes` that decodes the plain way, as most exports do, and not as the training's images were made."""
    import keras
    import tensorflow as tf

    def plain(model):
        return {"serving_default": lambda features: {"probabilities": tf.nn.softmax(model(features))}}

    folder = tampered(plain)
    model = keras.saving.load_model(folder / "model.keras", compile=False)
    archive = keras.export.ExportArchive()
    archive.track(model)
    manifest = read_manifest(digits_examples)

    def decode(data):
        return tf.cast(0.9 * tf.image.resize(tf.io.decode_image(data, 1, expand_animations=False), (8, 8)), tf.uint8)

    def from_bytes(features):
        pixels = tf.map_fn(decode, features["image"], fn_output_signature=tf.TensorSpec([8, 8, 1], tf.uint8))
        return {"probabilities": tf.nn.softmax(model({"image": pixels})), "ok": tf.ones_like(pixels[:, 0, 0, 0]) > 0}

    raw = {"image": tf.TensorSpec([None, *manifest.features["image"].shape], tf.uint8, name="image")}
    archive.add_endpoint("serving_default", plain(model)["serving_default"], input_signature=[raw])
    archive.add_endpoint(
        "image_bytes", from_bytes, input_signature=[{"image": tf.TensorSpec([None], tf.string, name="image")}]
    )
    shutil.move(folder / "saved_model" / "assets.extra", folder / "extra")
    shutil.rmtree(folder / "saved_model")
    archive.write_out(str(folder / "saved_model"), verbose=False)
    shutil.move(folder / "extra", folder / "saved_model" / "assets.extra")
    found = failed(check_serving(ServingConfig(num_requests=20), folder))
    assert "good and bad images in one batch" in found["odd images are refused or answered, and harm no other row"]
    assert "largest difference" in found["it answers image files as their pixels"]
    assert all(key.startswith(("odd images", "an empty", "it answers image files")) for key in found)
