"""Storage in plain folders, and the rules for names that folders and buckets share."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer import storage
from trainer.errors import BadInput, TriremeError
from trainer.storage import disk, names


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"graph")
    (folder / "variables" / "variables.index").write_bytes(b"weights")
    return folder


# Names


HOSTILE = ["", "/etc/passwd", "..", "a/../b", "../x", "./x", "a//b", "a/", "a\\b", "C:\\x", "a\nb", "a\0b", "\ud800"]


@pytest.mark.parametrize(
    "name", [*HOSTILE, "x" * 256, "x/" * 600 + "x", ".trireme-published.json", "a/.trireme-1.part"]
)
def test_a_name_that_could_lead_astray_is_refused(name):
    with pytest.raises(BadInput, match="refused"):
        storage.checked_name(name)


hostile = st.lists(st.sampled_from(["..", ".", "", "a", "b", "\\", "out", "/", "é", "x" * 255, "\0"]), max_size=6).map(
    "/".join
) | st.text(max_size=30)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=hostile)
def test_no_name_makes_a_path_outside_the_folder(tmp_path, name):
    inside = tmp_path / "in"
    inside.mkdir(exist_ok=True)
    (inside / "out").unlink(missing_ok=True)
    (inside / "out").symlink_to(tmp_path)  # a link that leads out waits for its victim
    try:
        path = names.place(inside, name)
    except (TriremeError, FileExistsError):
        return
    assert path.parent.resolve().is_relative_to(inside.resolve())
    path.parent.joinpath("probe").touch()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in"]


def test_a_file_that_is_also_a_folder_is_refused():
    with pytest.raises(BadInput, match="file and the folder of 'a/b/c'"):
        names.checked_names(["a/b/c", "a/b"])


@pytest.mark.parametrize(
    ("base", "parts", "joined"),
    [
        ("gs://b", ("x", "1"), "gs://b/x/1"),
        ("gs://b/p/", ("x/y",), "gs://b/p/x/y"),
        ("/models", ("x",), "/models/x"),
        ("/", ("x",), "/x"),
        ("rel/", (), "rel"),
    ],
)
def test_join_appends_names(base, parts, joined):
    assert storage.join(base, *parts) == joined


def test_join_refuses_to_climb():
    with pytest.raises(BadInput):
        storage.join("gs://b/p", "..", "other")


def test_only_folders_and_gs_are_known():
    assert storage.is_remote("gs://bucket/x")
    assert not storage.is_remote(Path("/x"))
    with pytest.raises(BadInput, match="s3"):
        storage.is_remote("s3://bucket/x")
    with pytest.raises(BadInput, match="names no bucket"):
        storage.exists("gs:///x")
    for bucket in ("Mine", "a!b", "-a", "a.", ".."):
        with pytest.raises(BadInput, match="no bucket is called"):
            storage.exists(f"gs://{bucket}/x")


def test_plain_folders_load_neither_google_nor_tensorflow(tmp_path):
    script = """
import sys
from trainer import storage
from trainer.registry import Registry
root, model = sys.argv[1:]
registry = Registry(root, "m")
registry.publish(model, {})
registry.promote(1, None, "first")
storage.stage(registry.champion().uri, root + "/staged")
assert registry.verify() == []
loaded = {name.split(".")[0] for name in sys.modules} & {"google", "google_crc32c", "tensorflow", "kfp", "requests"}
assert not loaded, loaded
"""
    model = tmp_path / "model"
    model.mkdir()
    (model / "saved_model.pb").write_bytes(b"graph")
    project = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "r"), str(model)], check=True, env=project)


# JSON under compare-and-swap


def test_what_is_not_there_has_no_value_and_generation_zero(tmp_path):
    assert storage.read_json(tmp_path / "x.json") == (None, 0)


def test_a_write_with_an_old_generation_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "x.json"
    first = storage.write_json(path, {"n": 1}, if_generation=0)
    second = storage.write_json(path, {"n": 2}, if_generation=first)
    for stale in (0, first):
        with pytest.raises(storage.Conflict):
            storage.write_json(path, {"n": 3}, if_generation=stale)
    assert storage.read_json(path) == ({"n": 2}, second)
    assert storage.write_json(path, "anything") not in (0, first, second)


def test_an_edit_by_hand_is_a_change(tmp_path):
    path = tmp_path / "x.json"
    generation = storage.write_json(path, {"n": 1})
    path.write_text('{"n": 7}')
    with pytest.raises(storage.Conflict):
        storage.write_json(path, {"n": 2}, if_generation=generation)


def test_what_is_not_json_is_refused_with_its_path(tmp_path):
    (tmp_path / "x.json").write_bytes(b'{"n": \xff')
    with pytest.raises(BadInput, match=r"x\.json"):
        storage.read_json(tmp_path / "x.json")
    with pytest.raises(ValueError, match="Out of range float"):
        storage.write_json(tmp_path / "y.json", float("nan"))
    assert not (tmp_path / "y.json").exists()


def _increment(path, times):
    for _ in range(times):
        while True:
            value, generation = storage.read_json(path)
            try:
                storage.write_json(path, (value or 0) + 1, if_generation=generation)
                break
            except storage.Conflict:
                pass


def test_four_processes_lose_no_increment(tmp_path):
    path = str(tmp_path / "n.json")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(_increment, [(path, 25)] * 4)
    assert storage.read_json(path)[0] == 100


def test_a_reader_never_sees_half_a_value(tmp_path):
    path = tmp_path / "x.json"
    storage.write_json(path, [])
    writing = threading.Event()

    def write():
        for number in range(30):
            storage.write_json(path, [number] * 20_000)
        writing.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not writing.is_set():
        assert len(set(storage.read_json(path)[0])) <= 1
    writer.join()


# Staging and publishing


def test_publish_then_stage_brings_the_same_files(model, tmp_path):
    storage.publish(model, tmp_path / "there" / "v", also={"record.json": b"{}"})
    assert storage.list_names(tmp_path / "there" / "v") == [
        "record.json",
        "saved_model.pb",
        "variables/variables.index",
    ]
    staged = storage.stage(tmp_path / "there" / "v", tmp_path / "staged")
    assert tree(staged) == tree(model) | {"record.json": b"{}"}


def test_staging_brings_only_the_names_asked_for(model, tmp_path):
    storage.stage(model, tmp_path / "staged", names=["variables/variables.index"])
    assert tree(tmp_path / "staged") == {"variables/variables.index": b"weights"}
    with pytest.raises(storage.NotFound, match="nowhere"):
        storage.stage(model, tmp_path / "staged", names=["nowhere"])
    with pytest.raises(BadInput, match="refused"):
        storage.stage(model, tmp_path / "staged", names=["../model/saved_model.pb"])


def test_staging_again_brings_only_what_changed(model, tmp_path):
    staged = storage.stage(model, tmp_path / "staged")
    kept = (staged / "saved_model.pb").stat().st_ino
    changed = (staged / "variables" / "variables.index").stat().st_ino
    (model / "variables" / "variables.index").write_bytes(b"other weights")
    storage.stage(model, staged)
    assert (staged / "saved_model.pb").stat().st_ino == kept
    assert (staged / "variables" / "variables.index").stat().st_ino != changed
    assert tree(staged) == tree(model)


def test_staging_never_follows_a_link_out_of_the_folder(model, tmp_path):
    outside, staged = tmp_path / "outside", tmp_path / "staged"
    outside.mkdir()
    staged.mkdir()
    (staged / "variables").symlink_to(outside)
    with pytest.raises(BadInput, match="leads out"):
        storage.stage(model, staged)
    assert tree(outside) == {}


def test_publishing_the_same_again_does_nothing_and_something_else_is_a_conflict(model, tmp_path):
    target = tmp_path / "v"
    storage.publish(model, target)
    inode = target.stat().st_ino
    storage.publish(model, target)
    assert target.stat().st_ino == inode
    before = tree(target)
    (model / "saved_model.pb").write_bytes(b"another graph")
    with pytest.raises(storage.Conflict, match="something else"):
        storage.publish(model, target)
    assert tree(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "v"]


def test_one_file_is_published_as_one_file_and_never_over_another(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")
    storage.publish(one, tmp_path / "p")
    storage.publish(one, tmp_path / "p")
    with pytest.raises(storage.Conflict):
        storage.publish(other, tmp_path / "p")
    assert (tmp_path / "p").read_text() == "1"


def test_what_cannot_be_published_is_refused_before_anything_is_written(model, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, also, said in [
        (tmp_path / "empty", {}, "is empty"),
        (tmp_path / "nowhere", {}, "no such folder"),
        (model, {"saved_model.pb": b""}, "is added"),
        (model, {"../x": b""}, "refused"),
    ]:
        with pytest.raises(BadInput, match=said):
            storage.publish(source, tmp_path / "out" / "v", also)
    (model / "linked").symlink_to(tmp_path / "empty")
    with pytest.raises(BadInput, match="symbolic link to a folder"):
        storage.publish(model, tmp_path / "out" / "v")
    assert not (tmp_path / "out").exists()


def _publish_numbered(model, root):
    return [storage.publish_numbered(model, root) for _ in range(5)]


def test_publishers_never_share_a_number(model, tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        taken = pool.starmap(_publish_numbered, [(model, tmp_path / "m")] * 4)
    assert sorted(number for some in taken for number in some) == list(range(1, 21))
    assert all(tree(tmp_path / "m" / str(number)) == tree(model) for number in range(1, 21))


def test_a_number_is_not_used_again_after_its_folder_is_gone(model, tmp_path):
    assert [storage.publish_numbered(model, tmp_path / "m") for _ in range(2)] == [1, 2]
    storage.delete_prefix(tmp_path / "m" / "2")
    assert storage.publish_numbered(model, tmp_path / "m") == 3


def test_leftovers_of_the_killed_are_invisible_and_swept_after_a_day(model, tmp_path):
    left = names.aside(model, "part")
    left.write_bytes(b"half")
    assert storage.list_names(model) == ["saved_model.pb", "variables/variables.index"]
    disk.sweep(model)
    assert left.exists()
    disk.sweep(model, now=time.time() + 25 * 3600)
    assert not left.exists()
    assert len(storage.list_names(model)) == 2


def test_delete_removes_all_of_it_and_refuses_the_root(model):
    storage.delete_prefix(model)
    storage.delete_prefix(model)
    assert not storage.exists(model)
    assert list(model.parent.iterdir()) == []
    with pytest.raises(BadInput, match="whole of"):
        storage.delete_prefix("/")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(model, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(storage.Denied, match=str(tmp_path)):
        storage.publish(model, tmp_path / "v")


def test_a_disk_that_fails_is_explained(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TriremeError, match="file"):
        storage.publish(model, tmp_path / "file" / "v")
    with pytest.raises(TriremeError, match="file"):
        storage.write_json(tmp_path / "file" / "x.json", json.loads("1"))
