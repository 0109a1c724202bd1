"""The trained model as what is served: a SavedModel that takes raw images, and the `.keras` file beside it.

export_model(model, manifest, Path("model"))      # model/saved_model, model/model.keras
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from trainer.data.manifest import Manifest

SAVED_MODEL = "saved_model"
KERAS_FILE = "model.keras"


def export_model(model: Any, manifest: Manifest, folder: Path) -> None:
    """Writes `saved_model/` and `model.keras` into `folder`, each whole or not at all.

    The signature `serving_default` maps `image` [batch, height, width, channels] uint8 to `class_name` [batch] string,
    `class_index` [batch] int64 and `probabilities` [batch, classes] float32.

    Args:
        model: A Keras model from raw images to logits.
        manifest: Names the classes and the image's shape.
        folder: Made where it is missing.
    """
    import keras
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
        archive = keras.export.ExportArchive()
        archive.track(model)
        class_names = tf.constant(manifest.class_names)

        def serve(image: Any) -> dict[str, Any]:
            probabilities = tf.nn.softmax(tf.cast(model(image, training=False), tf.float32))
            index = tf.argmax(probabilities, axis=-1)
            return {"class_name": tf.gather(class_names, index), "class_index": index, "probabilities": probabilities}

        spec = tf.TensorSpec([None, *manifest.image.shape], tf.uint8, name="image")
        archive.add_endpoint("serving_default", serve, input_signature=[spec])
        archive.write_out(str(Path(temporary) / SAVED_MODEL), verbose=False)
        model.save(Path(temporary) / KERAS_FILE)
        for name in (SAVED_MODEL, KERAS_FILE):
            target = folder / name
            if target.is_dir():
                shutil.rmtree(target)
            (Path(temporary) / name).rename(target)
