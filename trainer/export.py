"""The trained model as what is served: a SavedModel that takes raw features, and the `.keras` file beside it.

export_model(model, manifest, Path("model"))      # model/saved_model, model/model.keras
"""

from pathlib import Path
from typing import Any

from trainer.data.manifest import Manifest

SAVED_MODEL = "saved_model"
KERAS_FILE = "model.keras"


def export_model(model: Any, manifest: Manifest, folder: Path) -> None:
    """Writes `saved_model/` and `model.keras` into `folder`; the caller makes it appear whole.

    The signature `serving_default` takes each feature by its name, raw, [batch, *shape]. Where the label is a class it
    answers `class_name` [batch] string, `class_index` [batch] int64 and `probabilities` [batch, classes] float32; where
    it is a number, `prediction` [batch] float32.

    Args:
        model: A Keras model that keeps the contract of `trainer.spec`.
        manifest: Names the features and the classes.
        folder: An empty folder.
    """
    import keras
    import tensorflow as tf

    archive = keras.export.ExportArchive()
    archive.track(model)
    class_names = tf.constant(manifest.class_names, tf.string)

    def serve(features: dict[str, Any]) -> dict[str, Any]:
        outputs = tf.cast(model(features, training=False), tf.float32)
        if manifest.task == "regression":
            return {"prediction": outputs[:, 0]}
        probabilities = tf.nn.softmax(outputs)
        index = tf.argmax(probabilities, axis=-1)
        return {"class_name": tf.gather(class_names, index), "class_index": index, "probabilities": probabilities}

    specs = {
        name: tf.TensorSpec([None, *feature.shape], feature.dtype, name=name)
        for name, feature in manifest.features.items()
    }
    archive.add_endpoint("serving_default", serve, input_signature=[specs])
    archive.write_out(str(folder / SAVED_MODEL), verbose=False)
    model.save(folder / KERAS_FILE)
