"""Storage in buckets, against a real fake-gcs-server, behind a proxy that fails as networks do."""

import gzip
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request

import pytest
from conftest import REPOSITORY
from fake_gcs import Fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_storage import _increment, hostile, tree

from trainer import storage
from trainer.errors import BadInput, TriremeError, WorldFailure
from trainer.storage import bucket, names, service, waiting

BIG = bytes(range(256)) * 12_000  # three megabytes: several blocks


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"graph")
    (folder / "variables" / "variables.index").write_bytes(b"weights")
    (folder / "variables" / "variables.data").write_bytes(BIG)
    (folder / "empty").touch()
    return folder


def put(uri, content, **described):
    """Write an object by a plain request, so that nothing under test has a hand in it."""
    bucket_name, _, name = uri.removeprefix("gs://").partition("/")
    head = json.dumps({"name": name, **described}).encode()
    body = b"--x\r\nContent-Type: application/json\r\n\r\n" + head
    body += b"\r\n--x\r\nContent-Type: text/plain\r\n\r\n" + content + b"\r\n--x--\r\n"
    address = os.environ["STORAGE_EMULATOR_HOST"]
    request = urllib.request.Request(f"{address}/upload/storage/v1/b/{bucket_name}/o?uploadType=multipart", body)
    request.add_header("Content-Type", "multipart/related; boundary=x")
    urllib.request.urlopen(request, timeout=10).close()


def names_sent(faults, method, part):
    """The objects that requests of one kind were for, in order."""
    return [
        urllib.parse.unquote(path.split("/o/")[-1].split("?")[0])
        for m, path, _ in faults.requests
        if m == method and part in path
    ]


# Round trips


def test_publish_then_stage_brings_the_same_files(gcs, model, tmp_path):
    uri = f"{gcs}/a/b"
    assert not storage.exists(uri)
    storage.publish(model, uri, also={"record.json": b"{}"})
    assert storage.exists(uri)
    assert storage.exists(f"{uri}/empty")
    assert not storage.exists(f"{uri}/emp")
    assert storage.list_names(uri) == sorted([*tree(model), "record.json"])
    assert storage.list_folders(f"{gcs}/a") == ["b"]
    assert storage.list_folders(gcs) == ["a"]
    assert storage.digest(f"{uri}/saved_model.pb") == storage.digest(model / "saved_model.pb")
    assert tree(storage.stage(uri, tmp_path / "staged")) == tree(model) | {"record.json": b"{}"}


def test_what_announces_the_folder_is_sent_after_all_it_speaks_of(faults, gcs, model):
    storage.publish(model, f"{gcs}/v", also={"record.json": b"{}", "manifest.json": b"{}"})
    sent = []
    for entry in service.list_entries(gcs.removeprefix("gs://"), "v/"):
        sent.append((entry.generation, entry.name.removeprefix("v/")))
    in_order = [name for _, name in sorted(sent)]
    assert in_order[-4:] == ["saved_model.pb", "record.json", "manifest.json", names.MARKER]


def test_staging_brings_only_the_names_asked_for(faults, gcs, model, tmp_path):
    storage.publish(model, f"{gcs}/v")
    put(f"{gcs}/raw/a", b"1")
    put(f"{gcs}/raw/b", b"2")
    for uri, name, missing in [(f"{gcs}/v", "saved_model.pb", "published without c"), (f"{gcs}/raw", "b", "not there")]:
        faults.requests.clear()
        folder = storage.stage(uri, tmp_path / name, names=[name])
        assert list(tree(folder)) == [name]
        assert [path for _, path, _ in faults.requests if "alt=media" in path and "trireme" not in path] != []
        assert len(faults.requests) <= 3
        with pytest.raises(storage.NotFound, match=missing):
            storage.stage(uri, tmp_path / name, names=["c"])
        with pytest.raises(BadInput, match="refused"):
            storage.stage(uri, tmp_path / name, names=["../c"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "model", "saved_model.pb"]


def test_staging_goes_on_where_a_killed_one_was(faults, gcs, model, tmp_path):
    storage.publish(model, f"{gcs}/v")
    staged = storage.stage(f"{gcs}/v", tmp_path / "staged")
    (staged / "variables" / "variables.data").unlink()
    (staged / "saved_model.pb").write_bytes(b"grapH")  # of the same size
    faults.requests.clear()
    storage.stage(f"{gcs}/v", staged)
    assert tree(staged) == tree(model)
    fetched = names_sent(faults, "GET", "alt=media")
    assert sorted(fetched) == [f"v/{names.MARKER}", "v/saved_model.pb", "v/variables/variables.data"]


def test_a_compressed_object_is_staged_as_the_file_it_holds(gcs, tmp_path):
    put(f"{gcs}/raw/table.csv", gzip.compress(b"a,b\n" * 10_000), contentEncoding="gzip")
    assert storage.list_names(f"{gcs}/raw") == ["table.csv"]
    staged = storage.stage(f"{gcs}/raw", tmp_path / "staged")
    assert tree(staged) == {"table.csv": b"a,b\n" * 10_000}


def test_an_empty_prefix_cannot_be_staged(gcs, tmp_path):
    put(f"{gcs}/folder/", b"")  # what consoles write to show a folder
    with pytest.raises(storage.NotFound, match="nothing to stage"):
        storage.stage(f"{gcs}/folder", tmp_path / "staged")


def test_one_file_is_published_as_one_object_and_never_over_another(gcs, tmp_path):
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    one.write_text("1")
    other.write_text("2")
    storage.publish(one, f"{gcs}/p.html")
    storage.publish(one, f"{gcs}/p.html")
    with pytest.raises(storage.Conflict, match="something else"):
        storage.publish(other, f"{gcs}/p.html")
    storage.stage(gcs, tmp_path / "staged", names=["p.html"])
    assert (tmp_path / "staged" / "p.html").read_text() == "1"


# Whole or not at all


def test_publishing_the_same_again_sends_nothing_and_something_else_is_a_conflict(faults, gcs, model, tmp_path):
    storage.publish(model, f"{gcs}/v")
    faults.requests.clear()
    storage.publish(model, f"{gcs}/v")
    assert names_sent(faults, "POST", "") == []
    (model / "saved_model.pb").write_bytes(b"another graph")
    with pytest.raises(storage.Conflict, match="something else"):
        storage.publish(model, f"{gcs}/v")
    assert storage.stage(f"{gcs}/v", tmp_path / "s").joinpath("saved_model.pb").read_bytes() == b"graph"


def test_what_others_put_there_is_not_published_over(gcs, model):
    put(f"{gcs}/v/saved_model.pb", b"theirs")
    with pytest.raises(storage.Conflict, match="not published with trireme"):
        storage.publish(model, f"{gcs}/v")
    assert storage.list_names(f"{gcs}/v") == ["saved_model.pb"]


def broken_off(uri, model, faults, monkeypatch):
    """Publish until the network goes away for good, in the middle of the objects."""
    faults.append(Fault("status", "POST", "uploadType=", times=0))
    monkeypatch.setattr(waiting, "deadline_secs", 0.5)
    allowed = 1
    real = service.upload

    def upload(*args, **kwargs):
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            faults[-1].times = 10**6
        return real(*args, **kwargs)

    monkeypatch.setattr(service, "upload", upload)
    monkeypatch.setattr(bucket, "NUM_THREADS", 1)
    with pytest.raises(WorldFailure, match="gave up"):
        storage.publish(model, uri)
    faults.clear()
    monkeypatch.undo()


def test_half_a_publication_is_not_there_and_is_completed_by_the_next_try(faults, gcs, model, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        broken_off(f"{gcs}/v", model, faults, patch)
    assert len(storage.list_names(f"{gcs}/v")) == 1
    assert not storage.exists(f"{gcs}/v")
    with pytest.raises(WorldFailure, match="never finished"):
        storage.stage(f"{gcs}/v", tmp_path / "staged")
    assert not (tmp_path / "staged").exists()
    faults.requests.clear()
    storage.publish(model, f"{gcs}/v")
    assert len([path for method, path, _ in faults.requests if method == "POST"]) == 3 + 2  # one object was there
    assert tree(storage.stage(f"{gcs}/v", tmp_path / "staged")) == tree(model)


def test_a_new_publisher_takes_over_from_a_dead_one_and_nothing_of_the_dead_remains(faults, gcs, model, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        broken_off(f"{gcs}/v", model, faults, patch)
    other = tmp_path / "other"
    other.mkdir()
    (other / "b").write_bytes(b"2")
    storage.publish(other, f"{gcs}/v")
    assert tree(storage.stage(f"{gcs}/v", tmp_path / "staged")) == {"b": b"2"}
    assert storage.list_names(f"{gcs}/v") == ["b"]


def test_a_publisher_that_was_taken_over_is_told_and_does_not_finish(gcs, model, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "b").write_bytes(b"2")
    real, barged_in = service.upload, threading.Event()

    def upload(bucket_name, name, *args, **kwargs):
        if name.endswith("variables.data") and not barged_in.is_set():
            barged_in.set()
            storage.publish(other, f"{gcs}/v")
        return real(bucket_name, name, *args, **kwargs)

    monkeypatch.setattr(service, "upload", upload)
    with pytest.raises(storage.Conflict):
        storage.publish(model, f"{gcs}/v")
    assert barged_in.is_set()
    assert tree(storage.stage(f"{gcs}/v", tmp_path / "staged")) == {"b": b"2"}


def test_an_object_altered_after_its_publication_is_not_staged(gcs, model, tmp_path, monkeypatch):
    storage.publish(model, f"{gcs}/v")
    put(f"{gcs}/v/saved_model.pb", b"grapH")
    monkeypatch.setattr(waiting, "deadline_secs", 0.3)
    with pytest.raises(WorldFailure, match=r"saved_model\.pb.*another checksum"):
        storage.stage(f"{gcs}/v", tmp_path / "staged")
    assert "saved_model.pb" not in tree(tmp_path / "staged")


def test_a_deletion_broken_off_leaves_nothing_that_could_be_taken_for_whole(faults, gcs, model, tmp_path, monkeypatch):
    storage.publish(model, f"{gcs}/v")
    storage.publish(model, f"{gcs}/w")
    faults.append(Fault("status", "DELETE", "variables", times=10**6))
    monkeypatch.setattr(waiting, "deadline_secs", 0.3)
    with pytest.raises(WorldFailure):
        storage.delete_prefix(f"{gcs}/v")
    assert not storage.exists(f"{gcs}/v")
    with pytest.raises(WorldFailure, match="never finished"):
        storage.stage(f"{gcs}/v", tmp_path / "staged")
    faults.clear()
    storage.delete_prefix(f"{gcs}/v")
    storage.delete_prefix(f"{gcs}/v")
    assert service.list_entries(gcs.removeprefix("gs://"), "v") == []
    assert storage.exists(f"{gcs}/w")
    with pytest.raises(BadInput, match="whole of"):
        storage.delete_prefix(gcs)


# Names from strangers


def test_hostile_names_in_a_bucket_write_nothing(gcs, tmp_path):
    for number, name in enumerate(["../out", "/etc/out", "a\\b", "a/../../out", "a//b"]):
        put(f"{gcs}/{number}/{name}", b"x")
        with pytest.raises(BadInput, match="refused"):
            storage.stage(f"{gcs}/{number}", tmp_path / "staged")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stated=st.dictionaries(hostile, st.fixed_dictionaries({"bytes": st.integers(), "crc32c": st.text()}), max_size=3)
    | st.dictionaries(hostile, st.none() | st.text(), min_size=1, max_size=2)
    | st.none()
    | st.lists(hostile)
)
def test_no_marker_makes_staging_write_outside_or_fall_over(gcs, tmp_path, monkeypatch, stated):
    monkeypatch.setattr(waiting, "deadline_secs", 0.0)
    marker = json.dumps({"complete": True, "objects": stated}).encode()
    put(f"{gcs}/v/{names.MARKER}", marker)
    (tmp_path / "in").mkdir(exist_ok=True)
    try:
        storage.stage(f"{gcs}/v", tmp_path / "in" / "staged")
        assert stated == {}
    except TriremeError:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] in ([], ["staged"])
    assert tree(tmp_path) == {}


# What passes


def test_a_service_that_cannot_be_reached_is_named_with_the_reason(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    reason = rf"gs://there/x.*in 0\.3 s.*no connection to 127\.0\.0\.1:{port}: .*refused"
    with storage.patience(0.3), pytest.raises(WorldFailure, match=reason):
        storage.exists("gs://there/x")
    with storage.patience(0.3), pytest.raises(WorldFailure, match=reason):
        storage.read_json("gs://there/x")  # over the other of the two ways to it


PASSING = [
    Fault("status", status=503, times=2),
    Fault("status", status=500),
    Fault("status", status=429),
    Fault("status", status=408),
    Fault("reset", times=2),
    Fault("lost_answer"),
]


def again(fault, **where):
    """A fresh copy of a fault, because faults are used up."""
    return Fault(**{**fault.__dict__, **where})


@pytest.mark.parametrize(
    "fault",
    [*PASSING, Fault("truncate", at=0), Fault("truncate", at=2_000_000, times=2), Fault("corrupt")],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.at}",
)
def test_staging_survives(fault, faults, gcs, model, tmp_path):
    storage.publish(model, f"{gcs}/v")
    faults.append(again(fault, method="GET", path="variables.data"))
    faults.append(again(fault, method="GET", path="trireme", at=0))
    assert tree(storage.stage(f"{gcs}/v", tmp_path / "staged")) == tree(model)
    assert not [fault for fault in faults if fault.times]


@pytest.mark.parametrize("fault", [*PASSING, Fault("corrupt_upload")], ids=lambda fault: f"{fault.kind}-{fault.status}")
def test_publishing_survives(fault, faults, gcs, model, tmp_path):
    faults.append(again(fault, method="POST", times=3))
    storage.publish(model, f"{gcs}/v")
    assert faults[0].times == 0
    assert tree(storage.stage(f"{gcs}/v", tmp_path / "staged")) == tree(model)


@pytest.mark.parametrize("fault", [again(fault, method=method) for fault in PASSING for method in ("GET", "DELETE")])
def test_listing_looking_and_deleting_survive(fault, faults, gcs):
    put(f"{gcs}/raw/a", b"1")
    faults.append(again(fault, path="/o"))
    assert storage.list_names(f"{gcs}/raw") == ["a"]
    faults.append(again(fault, path="/o/"))
    assert storage.exists(f"{gcs}/raw/a")
    storage.delete_prefix(f"{gcs}/raw")
    assert not [fault for fault in faults if fault.times]
    assert not storage.exists(f"{gcs}/raw/a")


def test_a_broken_download_goes_on_where_it_broke(faults, gcs, model, tmp_path):
    storage.publish(model, f"{gcs}/v")
    faults.append(Fault("truncate", "GET", "variables.data", at=2_000_000))
    storage.stage(f"{gcs}/v", tmp_path / "staged")
    ranges = [
        headers.get("Range") for _, path, headers in faults.requests if "variables.data" in path and "alt=media" in path
    ]
    assert ranges == [None, "bytes=2000000-"]


def test_a_connection_that_trickles_is_given_up_and_another_goes_on(faults, gcs, model, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "TRICKLE_WINDOW_SECS", 0.2)
    storage.publish(model, f"{gcs}/v")
    faults.append(Fault("trickle", "GET", "variables.data", at=1_000_000))
    assert tree(storage.stage(f"{gcs}/v", tmp_path / "staged")) == tree(model)
    ranges = [
        headers.get("Range") for _, path, headers in faults.requests if "variables.data" in path and "alt=media" in path
    ]
    assert len(ranges) == 2
    assert 1_000_000 <= int(ranges[1].removeprefix("bytes=").removesuffix("-")) < 1_000_400  # not all that trickled


def test_the_service_is_given_the_time_it_asks_for(faults, gcs, monkeypatch):
    pauses = []
    monkeypatch.setattr(service.time, "sleep", pauses.append)
    faults.append(Fault("status", status=429, headers={"Retry-After": "7"}))
    assert storage.read_json(f"{gcs}/x.json") == (None, 0)
    assert pauses == [7.0]


def test_pauses_grow_and_vary(faults, gcs, monkeypatch):
    pauses = []
    monkeypatch.setattr(service.time, "sleep", pauses.append)
    faults.append(Fault("status", times=12))
    storage.read_json(f"{gcs}/x.json")
    assert len(set(pauses)) == 12
    assert all(pause <= 0.2 * 2**number for number, pause in enumerate(pauses))
    assert max(pauses) > 1


def test_at_the_deadline_it_gives_up_and_says_what_was_said_last(faults, gcs, monkeypatch):
    monkeypatch.setattr(waiting, "deadline_secs", 0.5)
    faults.append(Fault("status", times=10**6, text="too much traffic"))
    with pytest.raises(WorldFailure, match=r"x\.json: gave up after \d+ tries in 0.5 s .*503.*too much traffic"):
        storage.read_json(f"{gcs}/x.json")
    assert len(faults.requests) > 1


# What lasts


REFUSED = (
    "trainer@p.iam.gserviceaccount.com does not have storage.objects.get access to the Google Cloud Storage object."
)


@pytest.mark.parametrize(
    ("status", "text", "error", "said"),
    [
        (
            403,
            REFUSED,
            storage.Denied,
            r"gs://bucket-\d+/v/x: trainer@p\.iam\S+com lacks storage\.objects\.get on bucket",
        ),
        (403, "Forbidden", storage.Denied, r"gs://bucket-\d+/v/x: nobody .* lacks storage\.objects\.get on bucket"),
        (401, "Anonymous caller", storage.Denied, r"gs://bucket-\d+/v/x: nobody .* lacks storage\.objects\.get"),
        (404, "No such object", storage.NotFound, r"gs://bucket-\d+/v/x: is not there"),
        (404, "The specified bucket does not exist.", storage.NotFound, r"bucket bucket-\d+ does not exist"),
        (400, "Bad wolf", WorldFailure, r"gs://bucket-\d+/v/x: the service refused \(400\).*Bad wolf"),
    ],
)
def test_a_lasting_refusal_is_explained_and_not_tried_again(status, text, error, said, faults, gcs, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x").touch()
    storage.publish(tmp_path / "m", f"{gcs}/v")
    body = json.dumps({"error": {"code": status, "message": text}})
    faults.append(
        Fault(
            "status", "GET", "v%2Fx", times=10, status=status, text=body, headers={"Content-Type": "application/json"}
        )
    )
    with pytest.raises(error, match=said) as caught:
        storage.stage(f"{gcs}/v", tmp_path / "staged")
    assert type(caught.value) is error
    assert faults[0].times == 9


@pytest.mark.parametrize(
    ("operation", "permission"),
    [
        (lambda uri: storage.list_names(uri), "storage.objects.list"),
        (lambda uri: storage.write_json(uri, 1), "storage.objects.create"),
        (lambda uri: storage.read_json(uri), "storage.objects.get"),
        (lambda uri: storage.delete_prefix(uri), "storage.objects.delete"),
    ],
)
def test_the_missing_permission_is_named_for_each_operation(operation, permission, faults, gcs):
    put(f"{gcs}/x", b"1")
    method = {"delete": "DELETE", "create": "POST"}.get(permission.split(".")[-1], "GET")
    faults.append(Fault("status", method, "/o", times=10, status=403, text="no"))
    with pytest.raises(storage.Denied, match=permission):
        operation(f"{gcs}/x")
    assert faults[0].times == 9


def test_an_account_that_may_read_but_not_list_stages_what_it_can_name(faults, gcs, tmp_path):
    put(f"{gcs}/raw/a", b"1")
    faults.append(Fault("status", "GET", "trireme", times=10, status=403, text="or it may not exist"))
    assert tree(storage.stage(f"{gcs}/raw", tmp_path / "staged", names=["a"])) == {"a": b"1"}


def test_a_bucket_that_does_not_exist_is_named(gcs, tmp_path):
    (tmp_path / "x").write_text("1")
    with pytest.raises(storage.NotFound, match="gs://no-such-bucket"):
        storage.publish(tmp_path / "x", "gs://no-such-bucket/x")
    with pytest.raises(storage.NotFound):
        storage.list_names("gs://no-such-bucket/x")


def test_an_emulator_without_a_scheme_is_refused(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    with pytest.raises(BadInput, match="STORAGE_EMULATOR_HOST"):
        storage.exists("gs://bucket/x")


# JSON under compare-and-swap


def test_a_write_with_an_old_generation_is_refused_and_changes_nothing(gcs):
    uri = f"{gcs}/x.json"
    assert storage.read_json(uri) == (None, 0)
    first = storage.write_json(uri, {"n": 1}, if_generation=0)
    second = storage.write_json(uri, {"n": 2}, if_generation=first)
    for stale in (0, first):
        with pytest.raises(storage.Conflict):
            storage.write_json(uri, {"n": 3}, if_generation=stale)
    assert storage.read_json(uri) == ({"n": 2}, second)
    assert storage.write_json(uri, {"n": 4}) != second


def test_a_swap_whose_answer_was_lost_is_not_taken_for_a_lost_race(faults, gcs):
    uri = f"{gcs}/x.json"
    first = storage.write_json(uri, 1, if_generation=0)
    faults.append(Fault("lost_answer", "POST"))
    second = storage.write_json(uri, 2, if_generation=first)
    assert len([method for method, _, _ in faults.requests if method == "POST"]) == 3
    assert storage.read_json(uri) == (2, second)


def test_four_processes_lose_no_increment(gcs):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(_increment, [(f"{gcs}/n.json", 10)] * 4)
    assert storage.read_json(f"{gcs}/n.json")[0] == 40


def test_a_file_that_changes_between_two_tries_is_not_published(faults, gcs, model, monkeypatch):
    faults.extend([Fault("", "POST", "uploadType"), Fault("reset", "POST", "uploadType")])  # the marker may pass
    monkeypatch.setattr(service.time, "sleep", lambda _: [os.utime(path) for path in model.rglob("*")])
    with pytest.raises(WorldFailure, match=r"changed while it was published"):
        storage.publish(model, f"{gcs}/v")
    assert not storage.exists(f"{gcs}/v")


def test_what_was_published_is_held_against_what_is_there_without_reading_it(gcs, model, tmp_path):
    uri = f"{gcs}/v"
    with pytest.raises(storage.NotFound):
        storage.check_whole(uri)
    storage.publish(model, uri)
    storage.check_whole(uri)
    name = storage.list_names(uri)[0]
    other = tmp_path / "other"
    other.write_text("another content")
    service.delete(gcs.removeprefix("gs://"), f"v/{name}")
    with pytest.raises(WorldFailure, match=f"{name}: is missing"):
        storage.check_whole(uri)
    storage.publish(other, f"{uri}/{name}")
    with pytest.raises(WorldFailure, match=f"{name}: is not what was published"):
        storage.check_whole(uri)
    bucket.write_bytes(f"{uri}/{names.MARKER}", bucket._marker(False, {}), None)
    with pytest.raises(WorldFailure, match="was never finished"):
        storage.check_whole(uri)
    storage.check_whole(str(model))
    with pytest.raises(storage.NotFound):
        storage.check_whole(str(model / "nowhere"))


@pytest.mark.slow
def test_a_publication_killed_anywhere_leaves_nothing_or_all_and_the_next_one_completes_it(gcs, tmp_path):
    (tmp_path / "dataset").mkdir()
    for name in (*(f"train-{number:05}.tfrecord" for number in range(8)), "statistics.json", "manifest.json"):
        (tmp_path / "dataset" / name).write_bytes(name.encode() * 1000)
    command = [sys.executable, "tests/publish_killer.py", str(tmp_path / "dataset"), f"{gcs}/published"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 10
