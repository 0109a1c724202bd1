"""What a client gets: raw arrays and image files answered alike, bad rows marked, metadata and warm-up requests inside."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from trainer.data.manifest import read_manifest
from trainer.data.reading import load_split
from trainer.errors import BadInput
from trainer.export import export_model, read_metadata, reference_examples
from trainer.predict import predict
from trainer.serving import _image_files


@pytest.fixture(scope="module")
def loaded(digits_model):
    import tensorflow as tf

    return tf.saved_model.load(str(digits_model / "saved_model"))


@pytest.fixture(scope="module")
def images(digits_examples):
    return load_split(digits_examples, read_manifest(digits_examples), "test")[0]["image"][:20]


def encoded(pixels, kind, **options):
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, kind, **options)
    return stream.getvalue()


def ask(loaded, files):
    import tensorflow as tf

    answers = loaded.signatures["image_bytes"](image=tf.constant(files, tf.string))
    return {name: values.numpy() for name, values in answers.items()}


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_image_files_are_answered_as_their_pixels(loaded, images, kind):
    import tensorflow as tf

    plain = loaded.signatures["serving_default"](image=tf.constant(images))
    found = ask(loaded, [encoded(image, kind, lossless=True) for image in images])
    assert found["ok"].all()
    np.testing.assert_allclose(found["probabilities"], plain["probabilities"].numpy(), atol=1e-6)
    assert (found["class_name"] == plain["class_name"].numpy()).all()


def test_a_bad_row_is_marked_and_leaves_the_others_alone(loaded, images):
    good = encoded(images[0], "PNG")
    alone = ask(loaded, [good])
    found = ask(loaded, [b"", good, good[:30], b"<svg/>", good])
    assert found["ok"].tolist() == [False, True, False, False, True]
    for row in (1, 4):
        np.testing.assert_allclose(found["probabilities"][row], alone["probabilities"][0], atol=1e-6)
    for row in (0, 2, 3):
        assert (found["class_name"][row], found["class_index"][row]) == (b"", -1)
        assert not found["probabilities"][row].any()


def test_bad_rows_alone_and_no_rows_at_all_are_answered(loaded):
    assert ask(loaded, [b"x", b""])["ok"].tolist() == [False, False]
    assert ask(loaded, [])["probabilities"].shape == (0, 10)


def test_no_rows_of_pixels_have_no_answers(loaded):
    import tensorflow as tf

    assert loaded.signatures["serving_default"](image=tf.zeros([0, 8, 8, 1], tf.uint8))["class_name"].shape == (0,)


def test_a_file_that_claims_to_be_giant_is_refused_by_its_header(loaded, images, tmp_path):
    import time

    claims = [case for case in _image_files(tmp_path, (8, 8, 1)) if "claims" in case["case"]]
    assert len(claims) == 2
    files = [__import__("pathlib").Path(case["file"]).read_bytes() for case in claims]
    assert max(map(len, files)) < 3000
    ask(loaded, files)
    started = time.perf_counter()
    found = ask(loaded, [*files, encoded(images[0], "PNG")])
    assert found["ok"].tolist() == [False, False, True]
    assert time.perf_counter() - started < 0.5  # decoding 13,000 × 13,000 takes seconds


def test_metadata_says_what_the_model_is(digits_model, digits_examples):
    metadata = read_metadata(digits_model / "saved_model")
    manifest = read_manifest(digits_examples)
    assert metadata["class_names"] == manifest.class_names
    assert metadata["data_digest"] == manifest.digest
    assert metadata["signatures"] == ["serving_default", "image_bytes"]
    assert metadata["digest"] == json.loads((digits_model / "train.json").read_text())["model_digest"]
    assert "tensorflow" in json.dumps(metadata["versions"])


def test_two_exports_of_one_model_have_one_digest_and_another_model_another(digits_model, digits_examples, tmp_path):
    import keras

    manifest = read_manifest(digits_examples)
    reference = reference_examples(digits_examples, manifest)
    model = keras.saving.load_model(digits_model / "model.keras", compile=False)
    digests = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.append(export_model(model, manifest, reference, tmp_path / name)["digest"])
        model.layers[-1].bias.assign(model.layers[-1].bias + 1e-6)
    assert digests[0] == read_metadata(digits_model / "saved_model")["digest"]
    assert digests[1] != digests[0]


def test_the_reference_holds_the_trainers_answers_to_examples_of_the_training(digits_model, loaded):
    import tensorflow as tf

    with np.load(digits_model / "reference.npz") as reference:
        wanted, pixels = reference["answer.probabilities"], reference["feature.image"]
    assert len(wanted) == 64
    found = loaded.signatures["serving_default"](image=tf.constant(pixels))["probabilities"].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_warm_up_requests_are_where_tensorflow_serving_looks_and_can_be_asked(digits_model, loaded):
    """Read with a descriptor of the few fields, since the package with the real one is no dependency."""
    import tensorflow as tf

    file = digits_model / "saved_model" / "assets.extra" / "tf_serving_warmup_requests"
    asked = []
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        log = _prediction_log().FromString(record)
        request = log.predict_log.request
        inputs = {name: tf.constant(tf.make_ndarray(tensor)) for name, tensor in request.inputs.items()}
        answers = loaded.signatures[request.model_spec.signature_name](**inputs)
        assert answers["probabilities"].shape == (1, 10)
        asked.append(request.model_spec.signature_name)
    assert asked == ["serving_default", "image_bytes"]


def _prediction_log():
    """`tensorflow.serving.PredictionLog`, as far as it is used."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from tensorflow.core.framework import tensor_pb2

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="warmup_test.proto", package="warmup_test", syntax="proto3")
    file.dependency.append(tensor_pb2.DESCRIPTOR.name)

    def message(name, *fields, into=file.message_type):
        added = into.add(name=name)
        for number, label, kind, title in fields:
            many = field.LABEL_REPEATED if label == "map" else field.LABEL_OPTIONAL
            typed = {"type": field.TYPE_STRING} if kind == "string" else {"type": field.TYPE_MESSAGE, "type_name": kind}
            added.field.add(name=title, number=number, label=many, **typed)
        return added

    message("ModelSpec", (1, "", "string", "name"), (3, "", "string", "signature_name"))
    request = message(
        "PredictRequest",
        (1, "", ".warmup_test.ModelSpec", "model_spec"),
        (2, "map", ".warmup_test.PredictRequest.InputsEntry", "inputs"),
    )
    entry = message("InputsEntry", (1, "", "string", "key"), (2, "", ".tensorflow.TensorProto", "value"),
                    into=request.nested_type)  # fmt: skip
    entry.options.map_entry = True
    message("PredictLog", (1, "", ".warmup_test.PredictRequest", "request"))
    message("PredictionLog", (6, "", ".warmup_test.PredictLog", "predict_log"))
    pool = descriptor_pool.Default()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("warmup_test.PredictionLog"))


def test_tables_and_numbers_are_answered_by_named_columns(table, number_table):
    import tensorflow as tf

    columns = {"size": tf.constant([2.0, float("nan")]), "colour": tf.constant(["red", "never seen"])}
    for (_, model), key in ((table, "class_name"), (number_table, "prediction")):
        served = tf.saved_model.load(str(model / "saved_model"))
        assert list(served.signatures) == ["serving_default"]
        assert served.signatures["serving_default"](**columns)[key].shape == (2,)


def test_a_model_of_mixed_precision_answers_float32(digits_examples, tmp_path):
    import keras
    import tensorflow as tf

    manifest = read_manifest(digits_examples)
    inputs = {"image": keras.Input((8, 8, 1), dtype="uint8", name="image")}
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs["image"]))
    outputs = keras.layers.Dense(10, dtype=keras.DTypePolicy("mixed_bfloat16"))(x)
    export_model(keras.Model(inputs, outputs), manifest, reference_examples(digits_examples, manifest), tmp_path)
    served = tf.saved_model.load(str(tmp_path / "saved_model")).signatures["serving_default"]
    assert served(image=tf.zeros([1, 8, 8, 1], tf.uint8))["probabilities"].dtype == tf.float32


def test_pixels_that_no_image_file_holds_are_served_as_pixels_alone(digits_examples, tmp_path):
    import keras
    import tensorflow as tf

    manifest = read_manifest(digits_examples)
    wide = manifest.features["image"].model_copy(update={"shape": (8, 8, 4)})
    manifest = manifest.model_copy(update={"features": {"image": wide}})
    inputs = {"image": keras.Input((8, 8, 4), dtype="uint8", name="image")}
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs["image"]))
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    metadata = export_model(model, manifest, {"image": np.zeros([2, 8, 8, 4], np.uint8)}, tmp_path)
    assert metadata["signatures"] == ["serving_default"]
    assert list(tf.saved_model.load(str(tmp_path / "saved_model")).signatures) == ["serving_default"]
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(BadInput, match="the model takes images that no file holds"):
        predict(str(tmp_path), tmp_path / "image.png", tmp_path / "out.jsonl")
