"""Folders of images and files of records, here and in a bucket."""

import io
import json
import os

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from test_storage_bucket import put

from trainer.config import DataConfig, RecordFeature, Splits
from trainer.data.frames import FrameWriter
from trainer.data.prepare import BAD_RECORDS_FILE, prepare
from trainer.data.reading import load_split
from trainer.data.statistics import read_statistics
from trainer.data.tfrecord_source import TfrecordSource
from trainer.errors import BadInput

SHARES = Splits(train="60%", validation=None, test="40%")
GIVEN = Splits(train="train", validation=None, test="test")


def pictures(folder, count=10, size=(6, 4), ending="png"):
    """Each image is filled with its number; classes by its parity."""
    for number in range(count):
        place = folder / ("odd" if number % 2 else "even")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number * 3,) * 3).save(place / f"{number}.{ending}")


def folder_config(path, **settings):
    return DataConfig(source="image_folder", path=str(path), **settings)


def test_every_image_of_a_folder_is_prepared_once_with_its_class(tmp_path):
    pictures(tmp_path / "in")
    (tmp_path / "in" / ".DS_Store").write_bytes(b"hidden")
    (tmp_path / "in" / "odd" / "Thumbs.db").write_bytes(b"of Windows")
    (tmp_path / "in" / "desktop.ini").write_bytes(b"of Windows")
    manifest = prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "out")
    assert manifest.class_names == ["even", "odd"]
    assert manifest.features["image"].shape == (4, 6, 3)
    found = {}
    for split in manifest.splits:
        features, labels = load_split(tmp_path / "out", manifest, split)
        found |= {int(image[0, 0, 0]) // 3: label for image, label in zip(features["image"], labels, strict=True)}
    assert found == {number: number % 2 for number in range(10)}


def test_splits_that_are_folders_stay_what_they_are_and_sizes_are_counted(tmp_path):
    pictures(tmp_path / "in" / "train", 8)
    pictures(tmp_path / "in" / "test", 4, size=(8, 8))
    config = folder_config(tmp_path / "in", splits=GIVEN, image_size=(3, 3), image_channels=1)
    manifest = prepare(config, 7, tmp_path / "out")
    assert {name: split.num_examples for name, split in manifest.splits.items()} == {"train": 8, "test": 4}
    assert manifest.features["image"].shape == (3, 3, 1)
    sizes = read_statistics(tmp_path / "out", manifest).splits["test"]["image"].values
    assert [(size.value, size.count) for size in sizes] == [("8×8", 4)]


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"no image at all", "is no JPEG, PNG, BMP or WebP file"), (b"", "is no JPEG, PNG, BMP or WebP file"),
     (b"GIF89a rather", "is no JPEG, PNG, BMP or WebP file"), ("cut", "is not a readable image"),
     ("large", "has 9×9 pixels, not 4×6; set data.image_size")],
)  # fmt: skip
def test_an_image_that_cannot_be_used_is_named(tmp_path, content, fault):
    pictures(tmp_path / "in")
    bad = tmp_path / "in" / "odd" / "99.png"
    if content == "cut":
        content = (tmp_path / "in" / "odd" / "1.png").read_bytes()[:-30]
    if content == "large":
        Image.new("RGB", (9, 9)).save(bad)
    else:
        bad.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "failed")
    assert f"odd/99.png: {fault}" in str(refused.value)
    manifest = prepare(folder_config(tmp_path / "in", splits=SHARES, on_bad_record="skip"), 7, tmp_path / "out")
    assert manifest.num_skipped == 1
    assert json.loads((tmp_path / "out" / BAD_RECORDS_FILE).read_text())["file"] == "odd/99.png"


def test_a_small_file_that_claims_to_be_huge_is_refused_before_it_is_unpacked(tmp_path):
    pictures(tmp_path / "in")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "in" / "odd" / "bomb.png")
    with pytest.raises(BadInput, match=r"bomb.png: has more than 33,554,432 pixels"):
        prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "out")


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    pictures(tmp_path / "in", size=(4, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (6, 4)).save(tmp_path / "in" / "odd" / "turned.jpg", exif=exif)
    manifest = prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "out")
    assert manifest.features["image"].shape == (6, 4, 3)
    assert manifest.num_skipped == 0


@pytest.mark.parametrize(
    ("make", "splits", "message"),
    [
        (lambda folder: None, SHARES, "does not exist"),
        (lambda folder: folder.mkdir(), SHARES, "there are no image_folder files"),
        (lambda folder: pictures(folder / "train"), GIVEN, 'data.splits.test = "test": matches no file'),
        (lambda folder: pictures(folder / "train"), SHARES, "should stand in a folder named after its class"),
    ],
)
def test_a_folder_that_is_laid_out_otherwise_is_refused(tmp_path, make, splits, message):
    make(tmp_path / "in")
    with pytest.raises(BadInput) as refused:
        prepare(folder_config(tmp_path / "in", splits=splits), 7, tmp_path / "out")
    assert message in str(refused.value)


def test_links_to_folders_are_followed_and_those_that_lead_back_are_not(tmp_path):
    pictures(tmp_path / "in")
    (tmp_path / "in" / "odd").rename(tmp_path / "elsewhere")
    (tmp_path / "in" / "odd").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "even" / "loop").symlink_to("..")
    manifest = prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "out")
    assert manifest.class_names == ["even", "odd"]
    assert sum(split.num_examples for split in manifest.splits.values()) == 10


@pytest.mark.parametrize("target", ["nowhere.png", "link.png"])
def test_a_link_that_leads_to_no_file_is_named_and_not_left_out(tmp_path, target):
    pictures(tmp_path / "in")
    (tmp_path / "in" / "odd" / "link.png").symlink_to(target)
    with pytest.raises(BadInput, match=r"odd/link.png: is a link that leads to no file"):
        prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "out")


def test_a_class_whose_name_is_not_utf8_is_refused(tmp_path):
    pictures(tmp_path / "in")
    (tmp_path / "in" / "odd").rename(tmp_path / "in" / os.fsdecode(b"\xff"))
    with pytest.raises(BadInput, match=r"udcff/1.png': the name of the class is not valid UTF-8"):
        prepare(folder_config(tmp_path / "in", splits=SHARES), 7, tmp_path / "out")


def example(number):
    made = tf.train.Example()
    feature = made.features.feature
    feature["pixels"].bytes_list.value.append(bytes([number] * 8))
    feature["sides"].float_list.value.extend([number, number / 2])
    feature["word"].bytes_list.value.append(f"word {number}".encode())
    feature["label"].int64_list.value.append(number % 3)
    return made


def record_config(path, **settings):
    return DataConfig(
        source="tfrecord", path=str(path), splits=SHARES, label_key="label", kinds={"pixels": "image", "word": "text"},
        record_features={
            "pixels": RecordFeature(type="bytes", shape=(2, 4, 1)),
            "sides": RecordFeature(type="float32", shape=(2,)),
            "word": RecordFeature(type="bytes"),
            "label": RecordFeature(type="int64"),
        },
        **settings,
    )  # fmt: skip


def write_records(file, records):
    with FrameWriter(file) as writer:
        for record in records:
            writer.write(record)


def test_records_of_examples_are_taken_over_by_their_description(tmp_path):
    write_records(tmp_path / "a.tfrecord", [example(number).SerializeToString() for number in range(20)])
    manifest = prepare(record_config(tmp_path), 7, tmp_path / "out")
    assert manifest.class_names == ["0", "1", "2"]
    features, labels = load_split(tmp_path / "out", manifest, "train")
    assert (features["sides"][:, 0] % 3 == labels).all()
    assert (features["pixels"][:, 1, 3, 0] == features["sides"][:, 0]).all()
    assert features["word"].tolist() == [b"word %d" % number for number in features["sides"][:, 0]]


def test_a_bad_record_among_good_ones_is_named_by_its_number(tmp_path):
    records = [example(number).SerializeToString() for number in range(20)]
    short = example(20)
    short.features.feature["pixels"].bytes_list.value[0] = b"short"
    without = example(21)
    del without.features.feature["sides"]
    records[5:5] = [b"no example", without.SerializeToString(), short.SerializeToString()]
    write_records(tmp_path / "a.tfrecord", records)
    manifest = prepare(record_config(tmp_path, on_bad_record="skip"), 7, tmp_path / "out")
    listed = [json.loads(line) for line in (tmp_path / "out" / BAD_RECORDS_FILE).read_text().splitlines()]
    assert [(one["file"], one["row"]) for one in listed] == [("a.tfrecord", 6), ("a.tfrecord", 7), ("a.tfrecord", 8)]
    assert "sides" in listed[1]["reason"]
    assert listed[2]["reason"] == "pixels has 5 bytes, and [2, 4, 1] needs 8"
    assert sum(split.num_examples for split in manifest.splits.values()) == 20


def test_records_read_many_at_a_time_hold_what_they_hold_one_by_one(tmp_path, monkeypatch):
    chance = np.random.default_rng(3)
    records = []
    for number in range(900):
        made = example(number % 250)
        made.features.feature["pixels"].bytes_list.value[0] = chance.bytes(8)
        made.features.feature["label"].int64_list.value[0] = number % 7 if number < 800 else 1_234_567 + number % 2
        made.features.feature["weight"].float_list.value.append(-1 if number == 300 else number)
        del made.features.feature["word"]
        records.append(made.SerializeToString())
    (tmp_path / "in").mkdir()
    write_records(tmp_path / "in" / "a.tfrecord", records)
    settings = record_config(tmp_path / "in", on_bad_record="skip", weight_key="weight")
    described = {key: value for key, value in settings.record_features.items() if key != "word"}
    described["weight"] = RecordFeature(type="float32")
    settings = settings.model_copy(update={"record_features": described, "kinds": {"pixels": "image"}})
    together = []
    real = TfrecordSource._all_alike
    monkeypatch.setattr(TfrecordSource, "_all_alike", lambda *a: together.append(real(*a)) or together[-1])
    many = prepare(settings, 7, tmp_path / "many")
    learnt, with_a_bad_one, alike, with_long_labels = (chunk is not None for chunk in together)
    assert (learnt, with_a_bad_one, alike, with_long_labels) == (False, False, True, False)
    monkeypatch.setattr(TfrecordSource, "_all_alike", lambda *a: None)
    assert prepare(settings, 7, tmp_path / "one").digest == many.digest
    assert many.num_skipped == 1
    assert many.class_names == [*"0123456", "1234567", "1234568"]


def test_a_record_with_an_infinite_number_is_a_bad_one(tmp_path):
    records = [example(number) for number in range(20)]
    records[3].features.feature["sides"].float_list.value[1] = float("inf")
    write_records(tmp_path / "a.tfrecord", [record.SerializeToString() for record in records])
    with pytest.raises(BadInput, match=r"a.tfrecord, row 4: sides is not finite"):
        prepare(record_config(tmp_path), 7, tmp_path / "out")


def test_a_file_of_records_that_ends_too_soon_or_is_empty_is_named(tmp_path):
    file = tmp_path / "a.tfrecord"
    write_records(file, [example(number).SerializeToString() for number in range(20)])
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(BadInput, match=r"a.tfrecord, row 20: ends within record 20; nothing after it can be read"):
        prepare(record_config(tmp_path), 7, tmp_path / "out")
    file.write_bytes(b"")
    with pytest.raises(BadInput, match=r"a.tfrecord: holds no records"):
        prepare(record_config(tmp_path), 7, tmp_path / "out")


def test_files_in_a_bucket_give_the_same_dataset_as_files_here(gcs, tmp_path):
    rows = "".join(f"{number},{'ab'[number % 2]}\n" for number in range(40))
    (tmp_path / "in").mkdir()
    for name in ("one.csv", "two.csv"):
        (tmp_path / "in" / name).write_text("size,label\n" + rows)
        put(f"{gcs}/in/{name}", ("size,label\n" + rows).encode())
    put(f"{gcs}/in/notes.txt", b"not a table")
    found = [
        prepare(DataConfig(source="csv", path=f"{place}/in", label_key="label", splits=SHARES), 7, tmp_path / name)
        for place, name in ((tmp_path, "here"), (gcs, "there"))
    ]
    assert found[0].digest == found[1].digest
    one = DataConfig(source="csv", path=f"{gcs}/in/t*.csv", label_key="label", splits=SHARES)
    assert sum(split.num_examples for split in prepare(one, 7, tmp_path / "one").splits.values()) == 40
    with pytest.raises(BadInput, match="there are no such files"):
        prepare(one.model_copy(update={"path": f"{gcs}/elsewhere"}), 7, tmp_path / "none")


def test_prepared_data_is_found_in_a_bucket_by_a_machine_that_never_saw_it(gcs, tmp_path, capfd):
    rows = "".join(f"{number},{'ab'[number % 2]}\n" for number in range(40))
    found = []
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "t.csv").write_text("size,label\n" + rows)
        config = DataConfig(source="csv", path=str(tmp_path / machine / "t.csv"), label_key="label", splits=SHARES)
        found.append(prepare(config, 7, tmp_path / machine / "out", f"{gcs}/prepared"))
        assert ("reusing the prepared data" in capfd.readouterr().out) == (machine == "two")
    assert found[0] == found[1]
    here, there = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "out").iterdir()} for name in ("one", "two")
    )
    assert here == there
    assert sorted(entry.name for entry in (tmp_path / "two").iterdir()) == ["out", "t.csv"]


def test_encoded_images_in_records_are_decoded_and_resized_and_the_broken_one_is_named(tmp_path):
    records = [example(number) for number in range(10)]
    for number, record in enumerate(records):
        stream = io.BytesIO()
        Image.new("RGB", (6, 4), (number * 9,) * 3).save(stream, "PNG")
        record.features.feature["pixels"].bytes_list.value[0] = stream.getvalue() if number != 3 else b"\x89PNG"
    write_records(tmp_path / "a.tfrecord", [record.SerializeToString() for record in records])
    config = record_config(tmp_path, on_bad_record="skip")
    pixels = RecordFeature(type="bytes", shape=(2, 3, 3), encoded=True)
    config = config.model_copy(update={"record_features": {**config.record_features, "pixels": pixels}})
    manifest = prepare(config, 7, tmp_path / "out")
    assert json.loads((tmp_path / "out" / BAD_RECORDS_FILE).read_text())["row"] == 4
    features, _ = load_split(tmp_path / "out", manifest, "train")
    assert features["pixels"].shape[1:] == (2, 3, 3)
    assert (features["pixels"] == 9 * features["sides"][:, 0, None, None, None]).all()
    sizes = read_statistics(tmp_path / "out", manifest).splits["train"]["pixels"].values
    assert [(size.value, size.count) for size in sizes] == [("4×6", len(features["sides"]))]
