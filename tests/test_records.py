"""Records and frames: the bytes that TensorFlow would write, read back whole, and damage named."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.frames import DamagedFile, FrameWriter, read_frames
from trainer.data.manifest import Feature, Label, Manifest
from trainer.data.records import Encoder, decode, finish, label_entry, parse_example, parser

FEATURES = {
    "picture": Feature(kind="image", shape=(2, 3, 1)),
    "size": Feature(kind="number"),
    "sides": Feature(kind="number", shape=(3,)),
    "word": Feature(kind="text"),
}
floats = st.floats(width=32, allow_nan=False)


def manifest(class_names):
    return Manifest(
        source={}, features=FEATURES, label=Label(name="zlabel", class_names=class_names), weight="weight", splits={},
        statistics_sha256="",
    )  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=6, max_size=6), floats, st.lists(floats, min_size=3, max_size=3), st.text(max_size=300), floats,
       st.integers(0, 2**31 - 1))  # fmt: skip
def test_a_record_is_the_example_that_tensorflow_would_write_and_parse(pixels, size, sides, word, weight, label):
    picture = np.frombuffer(pixels, np.uint8).reshape(2, 3, 1)
    values = {"picture": picture, "size": size, "sides": np.array(sides, np.float32), "word": word, "weight": weight}
    record = finish(Encoder(FEATURES, "weight")(values), label_entry("zlabel", label))
    example = tf.train.Example()
    feature = example.features.feature
    feature["picture"].bytes_list.value.append(pixels)
    feature["size"].float_list.value.append(size)
    feature["sides"].float_list.value.extend(sides)
    feature["word"].bytes_list.value.append(word.encode())
    feature["weight"].float_list.value.append(weight)
    feature["zlabel"].int64_list.value.append(label)
    assert tf.train.Example.FromString(record) == example
    assert record == example.SerializeToString(deterministic=True)  # "zlabel" sorts last, as the label is written
    assert decode(record, FEATURES)["word"] == word
    assert decode(record, FEATURES)["picture"].tolist() == picture.tolist()
    features, labels, weights = parser(manifest(["a"]))(tf.constant([record]))
    assert features["picture"].numpy()[0].tolist() == picture.tolist()
    assert features["size"].numpy()[0] == size
    assert features["sides"].numpy()[0].tolist() == sides
    assert features["word"].numpy()[0] == word.encode()
    assert labels.numpy()[0] == label
    assert weights.numpy()[0] == weight


@settings(deadline=None, max_examples=25)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_a_file_of_records_is_byte_for_byte_what_tensorflow_writes(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("frames")
    with tf.io.TFRecordWriter(str(folder / "theirs")) as theirs, FrameWriter(folder / "ours") as ours:
        for record in records:
            theirs.write(record)
            ours.write(record)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert list(read_frames(folder / "ours")) == records
    assert ours.num_bytes == (folder / "ours").stat().st_size


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    with FrameWriter(tmp_path / "whole") as writer:
        writer.write(b"first")
        writer.write(b"second")
    whole = (tmp_path / "whole").read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(DamagedFile):
            list(read_frames(tmp_path / "damaged"))
    for length in set(range(1, len(whole))) - {len(b"first") + 16}:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(DamagedFile, match="ends within"):
            list(read_frames(tmp_path / "cut"))


integers = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.one_of(st.lists(st.binary(max_size=9)), st.lists(floats), st.lists(integers)),
                       max_size=4))  # fmt: skip
def test_any_example_is_read_as_tensorflow_wrote_it(content):
    example = tf.train.Example()
    for name, values in content.items():
        feature = example.features.feature[name]
        if values and isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif values and isinstance(values[0], float):
            feature.float_list.value.extend(values)
        elif values:
            feature.int64_list.value.extend(values)
    assert parse_example(example.SerializeToString()) == content


@given(st.binary(max_size=60))
def test_what_is_no_example_is_refused_without_a_traceback_of_ours(record):
    try:
        found = parse_example(record)
    except ValueError:
        return
    assert isinstance(found, dict)
