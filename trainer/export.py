"""The trained model as what is served: a SavedModel that takes what a client has, and the `.keras` file beside it.

    export_model(model, manifest, reference, Path("model"))
    # model/saved_model      serving_default, image_bytes; assets.extra/ with metadata and warm-up requests
    # model/model.keras      to go on with in Keras
    # model/reference.npz    real examples and the trainer's own answers, for the serving check

Every preprocessing stands inside, so that a client sends raw values and cannot prepare them differently from the training.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.manifest import Manifest

SAVED_MODEL = "saved_model"
KERAS_FILE = "model.keras"
REFERENCE_FILE = "reference.npz"
METADATA_FILE = "assets.extra/trireme.json"
"""Inside the SavedModel, in the folder that TensorFlow's tools carry along and do not read."""
NUM_REFERENCE = 64


def export_model(model: Any, manifest: Manifest, reference: Mapping[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Writes `saved_model/`, `model.keras` and `reference.npz` into `folder`; the caller makes it appear whole.

    The signature `serving_default` takes each feature by its name, raw, [batch, *shape]. Where the label is a class it
    answers `class_name` [batch] string, `class_index` [batch] int64 and `probabilities` [batch, classes] float32; where
    it is a number, `prediction` [batch] float32.

    Where a feature is an image, and all images are grey or colour, there is `image_bytes` too. It takes each image as the
    bytes of a JPEG, PNG, BMP or WebP file [batch] string, and answers `ok` [batch] bool besides: a row that cannot be
    decoded has `ok` false, an empty class name, class index −1 and zeros, and leaves the other rows alone.

    Args:
        model: A Keras model that keeps the contract of `trainer.spec`.
        manifest: Names the features and the classes.
        reference: Real examples, features by name [n, …]; see `reference_examples`.
        folder: An empty folder.

    Returns:
        The metadata that stands inside the SavedModel, `digest` among it: the model's identity.
    """
    import keras
    import tensorflow as tf

    from trainer.image_bytes import decode_images
    from trainer.warmup import write_warmup

    archive = keras.export.ExportArchive()
    archive.track(model)
    answer = _answer(model, manifest)
    archive.add_endpoint("serving_default", answer, input_signature=[_specs(manifest)])
    images = [name for name, feature in manifest.features.items() if feature.kind == "image"]
    if any(manifest.features[name].shape[-1] not in (1, 3) for name in images):
        images = []  # pixels that no image file holds
    if images:

        def from_bytes(features: dict[str, Any]) -> dict[str, Any]:
            features = dict(features)
            ok = True
            for name in images:
                features[name], _, decoded = decode_images(features[name], manifest.features[name].shape)
                ok = tf.logical_and(ok, decoded)
            return _only_where(ok, answer(features)) | {"ok": ok}

        specs = _specs(manifest) | {name: tf.TensorSpec([None], tf.string, name=name) for name in images}
        archive.add_endpoint("image_bytes", from_bytes, input_signature=[specs])
    archive.write_out(str(folder / SAVED_MODEL), verbose=False)
    model.save(folder / KERAS_FILE)
    metadata = _metadata(model, manifest, ["serving_default", *(["image_bytes"] if images else [])])
    file = folder / SAVED_MODEL / METADATA_FILE
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(metadata, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_warmup(folder / SAVED_MODEL, manifest, images)
    _write_reference(folder / REFERENCE_FILE, model, manifest, reference)
    return metadata


def reference_examples(examples: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Features by name of the first examples that the training saw; the test split stays unseen."""
    import tensorflow as tf

    from trainer.data.records import parser
    from trainer.data.shard_files import shard_files

    files = shard_files(examples, manifest, "train", NUM_REFERENCE)
    records = tf.data.TFRecordDataset(files).batch(NUM_REFERENCE).take(1).map(parser(manifest))
    return {name: values.numpy() for name, values in next(iter(records))[0].items()}


def read_metadata(saved_model: Path) -> dict[str, Any] | None:
    """What a SavedModel says of itself; None where it says nothing, as one that was not exported here."""
    try:
        return json.loads((saved_model / METADATA_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _answer(model: Any, manifest: Manifest) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import tensorflow as tf

    class_names = tf.constant(manifest.class_names)

    def answer(features: dict[str, Any]) -> dict[str, Any]:
        outputs = _outputs(model, features)
        if manifest.task == "regression":
            return {"prediction": outputs[:, 0]}
        probabilities = tf.nn.softmax(outputs)
        index = tf.argmax(probabilities, axis=-1)
        return {"class_name": tf.gather(class_names, index), "class_index": index, "probabilities": probabilities}

    return answer


def _outputs(model: Any, features: dict[str, Any]) -> Any:
    """What the model answers [batch, outputs] float32, for an empty batch too."""
    import tensorflow as tf

    count = tf.shape(next(iter(features.values())))[0]
    extra = tf.cast(tf.equal(count, 0), tf.int32)  # convolutions fail without a row: give them one and take it away

    def padded(values: Any) -> Any:
        row = tf.zeros([1, *values.shape[1:]], values.dtype)
        return tf.concat([values, tf.repeat(row, extra, axis=0)], axis=0)

    outputs = model({name: padded(values) for name, values in features.items()}, training=False)
    return tf.cast(outputs, tf.float32)[:count]  # a model of mixed precision answers float16 or bfloat16


def _only_where(ok: Any, answers: dict[str, Any]) -> dict[str, Any]:
    """Answers of the rows that were understood; of the others nothing that could be taken for one."""
    import tensorflow as tf

    empty = {"class_name": "", "class_index": tf.constant(-1, tf.int64)}
    found = {}
    for name, values in answers.items():
        mask = tf.reshape(ok, [-1] + [1] * (len(values.shape) - 1))
        found[name] = tf.where(mask, values, empty.get(name, tf.zeros([], values.dtype)))
    return found


def _specs(manifest: Manifest) -> dict[str, Any]:
    import tensorflow as tf

    return {
        name: tf.TensorSpec([None, *feature.shape], feature.dtype, name=name)
        for name, feature in manifest.features.items()
    }


def _metadata(model: Any, manifest: Manifest, signatures: list[str]) -> dict[str, Any]:
    from trainer.provenance import versions

    digest = hashlib.sha256()
    identity = [manifest.digest, manifest.class_names, sorted(manifest.features)]
    digest.update(json.dumps(identity, ensure_ascii=False).encode())
    for weights in model.get_weights():  # the files of two exports of one model differ
        digest.update(f"{weights.dtype}{weights.shape}".encode())
        digest.update(np.ascontiguousarray(weights).tobytes())
    return {
        "digest": f"sha256:{digest.hexdigest()}",
        "data_digest": manifest.digest,
        "task": manifest.task,
        "label": manifest.label.name,
        "class_names": manifest.label.class_names,
        "features": {name: feature.model_dump(mode="json") for name, feature in manifest.features.items()},
        "signatures": signatures,
        "versions": versions(),
    }


def _write_reference(file: Path, model: Any, manifest: Manifest, reference: Mapping[str, np.ndarray]) -> None:
    """Real examples and what the model in the trainer's memory answers to them, not the export."""
    import tensorflow as tf

    outputs = np.asarray(model({name: tf.constant(values) for name, values in reference.items()}, training=False))
    outputs = outputs.astype(np.float64)
    if manifest.task == "classification":
        with np.errstate(invalid="ignore"):  # an answer that is not finite stays so; the checks that follow refuse it
            powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        answers = {"probabilities": powers / powers.sum(axis=1, keepdims=True)}
    else:
        answers = {"prediction": outputs[:, 0]}
    columns = {
        f"feature.{name}": values.astype("S") if values.dtype == object else values
        for name, values in reference.items()
    }
    np.savez(file, **columns, **{f"answer.{name}": values for name, values in answers.items()})
