"""Shards that lie in a bucket: brought once a machine and checked, or read there by TensorFlow itself."""

import os
import shutil
import time

import gcs_for_tensorflow
import pytest

from trainer.config import DataConfig, Splits, TrainConfig
from trainer.data.manifest import read_manifest, verify, verify_shards
from trainer.data.prepare import prepare
from trainer.data.reading import open_feed
from trainer.data.shard_files import bring, cache_folder, leave_in_bucket, locked, shard_files, without_shards
from trainer.errors import BadInput, WorldFailure
from trainer.storage import Denied, list_names, publish


def table(file, num_rows=900):
    rows = "".join(f"{row},{'ab'[row % 2]}\n" for row in range(num_rows))
    file.write_text("number,label\n" + rows)
    return DataConfig(
        source="csv", path=str(file), label_key="label", min_shards=4,
        splits=Splits(train="80%", validation=None, test="20%"),
    )  # fmt: skip


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """A prepared table in four shards a split, and a cache that holds nothing."""
    monkeypatch.setenv("TRIREME_CACHE_DIR", str(tmp_path / "cache"))
    prepare(table(tmp_path / "t.csv"), 7, tmp_path / "examples")
    return tmp_path / "examples"


def downloads(faults):
    """Names of the shards that were asked for, and none twice."""
    asked = [path for method, path, _ in faults.requests if method == "GET" and "alt=media" in path]
    faults.requests.clear()
    shards = [path.split("%2F")[-1].split("?")[0] for path in asked if "tfrecord" in path]
    assert len(shards) == len(set(shards))
    return set(shards)


def names_of(manifest, split):
    return [shard.name for shard in manifest.splits[split].shards]


def test_only_the_shards_asked_for_come_and_once_a_machine_whatever_the_folder(faults, gcs, examples, tmp_path):
    manifest = read_manifest(examples)
    for place in ("one", "two"):
        publish(examples, f"{gcs}/{place}")
    train = names_of(manifest, "train")
    bring(f"{gcs}/one", tmp_path / "a", manifest, ["manifest.json", "statistics.json", *train])
    assert downloads(faults) == set(train)
    verify(tmp_path / "a", manifest, ["train"])
    assert not [name for name in names_of(manifest, "test") if (tmp_path / "a" / name).exists()]
    bring(f"{gcs}/two", tmp_path / "b", manifest, list_names(f"{gcs}/two"))  # another folder, another prefix
    assert downloads(faults) == set(names_of(manifest, "test"))
    verify(tmp_path / "b", manifest)


def test_a_staging_that_failed_goes_on_and_a_damaged_file_comes_anew(faults, gcs, examples, tmp_path):
    manifest = read_manifest(examples)
    publish(examples, f"{gcs}/one")
    train = names_of(manifest, "train")
    fault = faults_of(faults, train[2])
    with pytest.raises(Denied):
        bring(f"{gcs}/one", tmp_path / "a", manifest, train)
    assert not (tmp_path / "a").exists()
    there = {file.name for file in cache_folder().glob("*/*.tfrecord")}
    assert train[2] not in there
    fault.times = 0
    faults.requests.clear()
    bring(f"{gcs}/one", tmp_path / "a", manifest, train)
    assert downloads(faults) == set(train) - there
    kept = next(cache_folder().glob(f"*/{train[1]}"))
    kept.write_bytes(kept.read_bytes()[::-1])
    bring(f"{gcs}/one", tmp_path / "b", manifest, train)
    assert downloads(faults) == {train[1]}
    for shard in manifest.splits["train"].shards:
        assert shard_files(tmp_path / "b", manifest, "train", 1) == [str(tmp_path / "b" / train[0])]
        assert (tmp_path / "b" / shard.name).read_bytes() == (examples / shard.name).read_bytes()


def test_what_nothing_asked_for_in_thirty_days_leaves_the_cache_and_its_links_stay(gcs, examples, tmp_path):
    manifest = read_manifest(examples)
    publish(examples, f"{gcs}/one")
    train = names_of(manifest, "train")
    bring(f"{gcs}/one", tmp_path / "a", manifest, train)
    (kept,) = cache_folder().glob("[!.]*")
    other, busy, young = (cache_folder() / name for name in ("other", "busy", "young"))
    for folder in (other, busy, young):
        shutil.copytree(kept, folder)
    month_ago = time.time() - 31 * 24 * 3600
    for folder in (kept, other, busy):
        os.utime(folder, (month_ago, month_ago))
    with locked(cache_folder() / ".busy.lock", "never said"):
        bring(f"{gcs}/one", tmp_path / "b", manifest, train)
    assert {folder.name for folder in cache_folder().glob("[!.]*")} == {kept.name, "busy", "young"}
    verify_shards(tmp_path / "a", manifest.splits["train"].shards)


def faults_of(faults, name):
    from fake_gcs import Fault

    faults.append(Fault("status", method="GET", path=name, status=403, times=100))
    return faults[-1]


def test_a_second_run_that_finds_its_data_in_the_bucket_does_not_download_it_again(faults, gcs, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_CACHE_DIR", str(tmp_path / "cache"))
    settings = table(tmp_path / "t.csv")
    found = [prepare(settings, 7, tmp_path / "first", f"{gcs}/prepared")]
    faults.requests.clear()
    found.append(prepare(settings, 7, tmp_path / "second", f"{gcs}/prepared"))
    assert len(downloads(faults)) == 8
    found.append(prepare(settings, 7, tmp_path / "third", f"{gcs}/prepared"))
    assert not downloads(faults)
    assert len({manifest.digest for manifest in found}) == 1
    verify(tmp_path / "third", found[0])


def test_where_the_shards_are_and_how_they_are_to_be_read_must_agree(examples, tmp_path, monkeypatch):
    manifest = read_manifest(examples)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)

    def opened(folder, **settings):
        return open_feed(folder, manifest, "train", seed=1, config=TrainConfig(**settings), shuffle=True)

    assert not opened(examples).streams
    with pytest.raises(BadInput, match=r"train.read_shards = streamed: the shards of .*examples are /"):
        opened(examples, read_shards="streamed")
    without_shards(examples, tmp_path / "remote", manifest)
    with pytest.raises(BadInput, match="which is no bucket"):
        leave_in_bucket(tmp_path / "remote", str(examples))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with pytest.raises(WorldFailure, match="knows nothing of STORAGE_EMULATOR_HOST"):
        leave_in_bucket(tmp_path / "remote", "gs://bucket/examples")


@pytest.mark.slow
@pytest.mark.skipif(gcs_for_tensorflow.missing() is not None, reason=str(gcs_for_tensorflow.missing()))
def test_training_on_shards_that_tensorflow_reads_in_the_bucket_equals_training_on_shards_here(examples, tmp_path):
    shutil.copytree(examples, tmp_path / "objects" / "bucket" / "prepared" / "numbers")
    (tmp_path / "server").mkdir()
    command = ["tests/streamed_training.py", str(examples), str(tmp_path)]
    told = gcs_for_tensorflow.run_inside(command, tmp_path / "server", tmp_path / "objects")
    assert "numbers/train-00000-of-00004.tfrecord: has" in told
