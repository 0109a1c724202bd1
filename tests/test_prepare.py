"""Preparation: every example once, the same bytes anywhere, whole or not at all."""

import collections
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from conftest import REPOSITORY

from trainer.config import DataConfig, Splits
from trainer.data import tfds_source
from trainer.data.manifest import read_manifest, verify
from trainer.data.prepare import prepare
from trainer.data.reading import load_split
from trainer.errors import BadInput, WorldFailure
from trainer.storage import list_names, publish

TINY = DataConfig(splits=Splits(train="train[:40]", validation="train[40:60]", test="test[:30]"))


def everything_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_every_example_of_the_source_is_prepared_once(digits_examples):
    from sklearn.datasets import load_digits

    manifest = read_manifest(digits_examples)
    source = load_digits()
    expected = collections.Counter(
        (np.rint(image * (255 / 16)).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(source.images, source.target, strict=True)
    )
    found = collections.Counter()
    for split in manifest.splits:
        features, labels = load_split(digits_examples, manifest, split)
        assert len(labels) == manifest.splits[split].num_examples
        assert np.bincount(labels, minlength=10).tolist() == manifest.splits[split].label_counts
        found.update((image.tobytes(), int(label)) for image, label in zip(features["image"], labels, strict=True))
    assert found == expected


def test_the_same_source_and_configuration_give_the_same_bytes_in_another_process(tmp_path):
    prepare(TINY, 7, tmp_path / "here")
    code = (
        "from pathlib import Path; from trainer.config import *; from trainer.data.prepare import prepare\n"
        f"prepare(parse_json(DataConfig, {TINY.to_json()!r}), 7, Path({str(tmp_path / 'there')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True)
    assert everything_in(tmp_path / "here") == everything_in(tmp_path / "there")


def test_records_are_permuted_and_the_seed_decides_how(tmp_path):
    one = prepare(TINY, 1, tmp_path / "one")
    two = prepare(TINY, 2, tmp_path / "two")
    assert one.digest != two.digest
    orders = [
        load_split(tmp_path / name, manifest, "train")[0]["image"] for name, manifest in (("one", one), ("two", two))
    ]
    assert not np.array_equal(*orders)
    assert sorted(map(bytes, orders[0])) == sorted(map(bytes, orders[1]))


def test_prepared_data_is_reused_when_its_content_is_the_same_and_only_then(tmp_path, capfd):
    store = tmp_path / "prepared"
    first = prepare(TINY, 7, tmp_path / "first", store)
    assert prepare(TINY, 7, tmp_path / "second", store) == first
    assert f"reusing the prepared data {first.digest}" in capfd.readouterr().out
    assert everything_in(tmp_path / "first") == everything_in(tmp_path / "second")
    prepare(TINY, 8, tmp_path / "third", store)
    assert "reusing" not in capfd.readouterr().out


def test_damaged_prepared_data_is_not_reused_but_made_again(tmp_path, capfd):
    store = tmp_path / "prepared"
    first = prepare(TINY, 7, tmp_path / "first", store)
    shard = next(store.glob("*/train-*"))
    content = bytearray(shard.read_bytes())
    content[30] ^= 1
    shard.unlink()  # its other name, in the run before, keeps the good bytes
    shard.write_bytes(content)
    second = prepare(TINY, 7, tmp_path / "second", store)
    assert "was altered" in capfd.readouterr().out
    assert second == first
    verify(tmp_path / "second", second)
    verify(shard.parent, read_manifest(shard.parent))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes instead of"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "was altered"),
    ],
)
def test_a_shard_that_is_missing_short_or_altered_is_found_and_named(tmp_path, damage, message):
    manifest = prepare(TINY, 7, tmp_path / "examples")
    shard = tmp_path / "examples" / manifest.splits["test"].shards[0].name
    damage(shard)
    with pytest.raises(WorldFailure, match=message) as failure:
        verify(tmp_path / "examples", manifest)
    assert shard.name in str(failure.value)


def test_a_manifest_that_was_altered_or_leads_outside_its_folder_is_refused(tmp_path):
    prepare(TINY, 7, tmp_path / "examples")
    file = tmp_path / "examples" / "manifest.json"
    original = file.read_text()
    file.write_text(original.replace('"num_examples": 40', '"num_examples": 41'))
    with pytest.raises(BadInput, match="was altered"):
        read_manifest(tmp_path / "examples")
    file.write_text(original.replace("train-00000-of-00001.tfrecord", "../../etc/passwd"))
    with pytest.raises(BadInput, match=r"shards\.0\.name"):
        read_manifest(tmp_path / "examples")
    with pytest.raises(BadInput, match="holds no manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(name="digitz"), 'data.name = "digitz": no such dataset; did you mean digits?'),
        (DataConfig(name="digits:9.9.9"), "data.name"),
        (DataConfig(splits=Splits(test="tests")), 'data.splits.test = "tests"'),
        (DataConfig(splits=Splits(test="train[80%:]")), "shares 143 examples of train with data.splits.train"),
        (DataConfig(splits=Splits(validation="train[:10]", test="test")), "shares 10 examples of train"),
        (DataConfig(input_keys=["picture"]), 'data.input_keys = "picture": digits has no such feature'),
        (DataConfig(label_key="image", input_keys=["label"]), "is Image, neither a class nor a number"),
        (DataConfig(name="mnist", download=False), "is not in"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused_with_the_rule(tmp_path, config, message):
    with pytest.raises(BadInput) as refused:
        prepare(config, 7, tmp_path / "examples")
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_that_cannot_be_fetched_is_named_with_the_reason_and_what_to_do(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed}")  # no way to the world
    monkeypatch.setattr(tfds_source, "_DOWNLOAD_RETRIES", 0)
    with pytest.raises(WorldFailure) as failure:
        prepare(DataConfig(name="mnist", data_dir=str(tmp_path / "tfds")), 7, tmp_path / "examples")
    said = str(failure.value)
    assert f"mnist/3.0.1 is not in {tmp_path / 'tfds'}/mnist/3.0.1 and could not be fetched: no connection to" in said
    assert "refused" in said
    assert "set data.data_dir to a folder that has it" in said
    assert "Max retries" not in said
    assert not (tmp_path / "examples").exists()


def test_preparation_that_fails_midway_leaves_nothing_where_the_dataset_should_be(tmp_path, monkeypatch):
    from trainer.data import shards

    def fail(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(shards, "finish", fail)
    with pytest.raises(OSError, match="No space left"):
        prepare(TINY, 7, tmp_path / "examples")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left"):
        prepare(TINY, 7, tmp_path / "examples", tmp_path / "prepared")
    assert not (tmp_path / "examples").exists()
    assert all(entry.name.startswith(".") for entry in (tmp_path / "prepared").iterdir())


def test_images_are_resized_where_the_configuration_says_so(tmp_path):
    manifest = prepare(TINY.model_copy(update={"image_size": (12, 10)}), 7, tmp_path / "examples")
    features, _ = load_split(tmp_path / "examples", manifest, "test")
    assert features["image"].shape == (30, 12, 10, 1)


def test_other_builders_take_the_same_road(tmp_path):
    """With made-up content: the real metadata and features, random values, the same examples in every split."""
    splits = Splits(train="train", validation=None, test="test")
    found = {}
    with tfds.testing.mock_data(num_examples=12):
        for name in ("mnist", "cifar10", "imdb_reviews", "titanic"):
            found[name] = prepare(DataConfig(name=name, splits=splits), 7, tmp_path / name)
            batch = load_split(tmp_path / name, found[name], "train")
            assert {key: values.shape for key, values in batch[0].items()} == {
                key: (12, *feature.shape) for key, feature in found[name].features.items()
            }
            assert batch[1].max() < len(found[name].class_names)
    assert found["mnist"].features["image"].shape == (28, 28, 1)
    assert found["cifar10"].features["image"].shape == (32, 32, 3)
    assert found["imdb_reviews"].features["text"].kind == "text"
    kinds = {name: feature.kind for name, feature in found["titanic"].features.items()}
    assert kinds["age"] == "number"
    assert kinds["embarked"] == "category"
    assert "survived" not in kinds


@pytest.mark.parametrize(
    ("name", "kinds", "task", "num_classes", "num_examples"),
    [
        ("diabetes", {"number"}, "regression", 0, 442),
        ("mnist5k", {"image"}, "classification", 10, 5000),
        ("penguins", {"number", "category"}, "classification", 3, 344),
        ("reviews", {"text"}, "classification", 2, 2000),
    ],
)
def test_the_data_of_every_example_is_made_from_what_packages_carry(
    tmp_path, name, kinds, task, num_classes, num_examples
):
    from pipelines.config import load_config

    manifest = prepare(load_config(REPOSITORY / "configs" / f"{name}.yaml").data, 7, tmp_path / "out")
    assert {feature.kind for feature in manifest.features.values()} == kinds
    assert (manifest.task, len(manifest.class_names)) == (task, num_classes)
    assert sum(split.num_examples for split in manifest.splits.values()) == num_examples


def test_features_of_a_nested_builder_are_chosen_by_their_path(tmp_path):
    class Nested(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "person": {
                    "age": np.float32,
                    "town": tfds.features.Text(),
                    "scores": tfds.features.Tensor(shape=(3,), dtype=np.int32),
                },
                "weight": np.float32,
                "label": np.float64,
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, 8), "test": self._generate_examples(8, 12)}

        def _generate_examples(self, low, high):
            for number in range(low, high):
                person = {"age": number / 2, "town": f"town {number}", "scores": [number] * 3}
                yield number, {"person": person, "weight": number + 1, "label": number * 10.0}
            if low == 0:
                yield "unlabelled", {"person": person, "weight": 1, "label": np.nan}

    Nested(data_dir=tmp_path / "tfds").download_and_prepare()
    config = DataConfig(
        path=str(tmp_path / "tfds" / "nested" / "1.0.0"),
        splits=Splits(train="train", validation=None, test="test"),
        input_keys=["person/age", "person/town", "person/scores"],
        label_key="label",
        weight_key="weight",
        kinds={"person/town": "category"},
    )
    with pytest.raises(BadInput, match=r"row \d: the label label is missing"):
        prepare(config, 7, tmp_path / "examples")
    manifest = prepare(config.model_copy(update={"on_bad_record": "skip"}), 7, tmp_path / "examples")
    assert manifest.num_skipped == 1
    assert {name: (feature.kind, feature.shape) for name, feature in manifest.features.items()} == {
        "person_age": ("number", ()),
        "person_town": ("category", ()),
        "person_scores": ("number", (3,)),
    }
    assert manifest.task == "regression"
    features, labels, weights = load_split(tmp_path / "examples", manifest, "train")
    assert sorted(labels.tolist()) == [number * 10.0 for number in range(8)]
    assert (weights == labels / 10 + 1).all()
    assert (features["person_scores"] == (labels / 10)[:, np.newaxis]).all()
    assert features["person_town"].tolist() == [b"town %d" % (label / 10) for label in labels]


def test_builders_in_a_bucket_are_brought_and_new_ones_are_put_there(gcs, tmp_path, monkeypatch, capfd):
    here = prepare(TINY, 7, tmp_path / "here")
    monkeypatch.setenv("TRIREME_CACHE_DIR", str(tmp_path / "one"))
    there = TINY.model_copy(update={"data_dir": f"{gcs}/builders"})
    with pytest.raises(BadInput, match=f"digits/1.0.0 is not in {gcs}/builders/digits/1.0.0; allow the download"):
        prepare(there.model_copy(update={"download": False}), 7, tmp_path / "nothing")
    assert prepare(there, 7, tmp_path / "made").digest == here.digest
    assert "digits/1.0.0/dataset_info.json" in list_names(f"{gcs}/builders")
    monkeypatch.setenv("TRIREME_CACHE_DIR", str(tmp_path / "two"))  # another machine
    found = there.model_copy(update={"download": False})
    assert prepare(found, 7, tmp_path / "found").digest == here.digest
    by_path = found.model_copy(update={"data_dir": None, "path": f"{gcs}/builders/digits/1.0.0"})
    assert prepare(by_path, 7, tmp_path / "by path").digest == here.digest
    with pytest.raises(BadInput, match="holds nothing"):
        prepare(found.model_copy(update={"data_dir": None, "path": f"{gcs}/nowhere"}), 7, tmp_path / "nothing")


def test_a_version_that_only_the_bucket_has_is_found_there(gcs, tmp_path, monkeypatch):
    """As after an update of the package that makes another version."""
    monkeypatch.setenv("TRIREME_CACHE_DIR", str(tmp_path / "one"))
    prepare(TINY.model_copy(update={"data_dir": str(tmp_path / "builders")}), 7, tmp_path / "made")
    made = tmp_path / "builders" / "digits" / "1.0.0"
    made.rename(made.with_name("0.9.0"))
    info = made.with_name("0.9.0") / "dataset_info.json"
    info.write_text(info.read_text().replace('"1.0.0"', '"0.9.0"'))
    publish(tmp_path / "builders", f"{gcs}/builders")
    old = TINY.model_copy(update={"data_dir": f"{gcs}/builders", "name": "digits:0.9.0", "download": False})
    assert prepare(old, 7, tmp_path / "old").source["version"] == "0.9.0"
