"""The trained model as what is served: a SavedModel that takes raw images, and the `.keras` file beside it.

export_model(model, manifest, Path("model"))      # model/saved_model, model/model.keras
"""

from pathlib import Path
from typing import Any

from trainer.data.manifest import Manifest

SAVED_MODEL = "saved_model"
KERAS_FILE = "model.keras"


def export_model(model: Any, manifest: Manifest, folder: Path) -> None:
    """Writes `saved_model/` and `model.keras` into `folder`; the caller makes it appear whole.

    The signature `serving_default` maps `image` [batch, height, width, channels] uint8 to `class_name` [batch] string,
    `class_index` [batch] int64 and `probabilities` [batch, classes] float32.

    Args:
        model: A Keras model from raw images to logits.
        manifest: Names the classes and the image's shape.
        folder: An empty folder.
    """
    import keras
    import tensorflow as tf

    archive = keras.export.ExportArchive()
    archive.track(model)
    class_names = tf.constant(manifest.class_names)

    def serve(image: Any) -> dict[str, Any]:
        probabilities = tf.nn.softmax(tf.cast(model(image, training=False), tf.float32))
        index = tf.argmax(probabilities, axis=-1)
        return {"class_name": tf.gather(class_names, index), "class_index": index, "probabilities": probabilities}

    spec = tf.TensorSpec([None, *manifest.image.shape], tf.uint8, name="image")
    archive.add_endpoint("serving_default", serve, input_signature=[spec])
    archive.write_out(str(folder / SAVED_MODEL), verbose=False)
    model.save(folder / KERAS_FILE)
