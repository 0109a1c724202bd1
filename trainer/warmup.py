"""Requests that TensorFlow Serving replays when it loads a model, so that the first client does not wait for compilation.

    write_warmup(saved_model, manifest, images=["image"])      # assets.extra/tf_serving_warmup_requests

The file holds `tensorflow.serving.PredictionLog` records. Their few fields are written here by hand, from
tensorflow_serving/apis/{prediction_log,predict,model}.proto, because the package that has them brings a server's client along.
The values are zeros and empty strings: nobody's example is shipped with a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.data.manifest import Manifest

WARMUP_FILE = "assets.extra/tf_serving_warmup_requests"


def write_warmup(saved_model: Path, manifest: Manifest, images: list[str]) -> None:
    """Writes one request of one example for each signature.

    Args:
        saved_model: The SavedModel's folder.
        manifest: Names the features.
        images: Those that `image_bytes` takes as files.
    """
    import tensorflow as tf

    raw = {name: tf.zeros([1, *feature.shape], feature.dtype) for name, feature in manifest.features.items()}
    requests = [("serving_default", raw)]
    if images:
        files = {name: tf.io.encode_png(raw[name][0])[tf.newaxis] for name in images}
        requests.append(("image_bytes", {**raw, **files}))
    target = saved_model / WARMUP_FILE
    target.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(target)) as writer:
        for signature, inputs in requests:
            writer.write(prediction_log(signature, inputs))


def prediction_log(signature: str, inputs: Mapping[str, Any]) -> bytes:
    """A serialized `PredictionLog` with a `PredictRequest`.

    Args:
        signature: Name of the signature.
        inputs: Tensors by name.
    """
    import tensorflow as tf

    request = _field(1, _field(3, signature.encode()))  # PredictRequest.model_spec.signature_name
    for name in sorted(inputs):
        tensor = tf.make_tensor_proto(inputs[name]).SerializeToString(deterministic=True)
        request += _field(2, _field(1, name.encode()) + _field(2, tensor))  # PredictRequest.inputs
    return _field(6, _field(1, request))  # PredictionLog.predict_log.request


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
