"""The registry of models, on disk. tests/test_registry_bucket.py holds it to the same in a bucket."""

import multiprocessing
import os
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainer import storage
from trainer.errors import BadInput, WorldFailure
from trainer.registry import Conflict, Registry

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"graph")
    (folder / "variables" / "variables.index").write_bytes(b"weights")
    return folder


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "models", "digits", now=lambda: NOON)


def test_a_version_lies_where_tf_serving_looks_and_says_what_it_holds(registry, model, tmp_path):
    version = registry.publish(model, {"run": "r1", "metrics": {"accuracy": 0.9}})
    folder = tmp_path / "models" / "digits" / "1"
    assert Path(version.uri) == folder
    assert storage.list_names(folder) == ["record.json", "saved_model.pb", "variables/variables.index"]
    assert version.record["run"] == "r1"
    assert version.record["files"]["saved_model.pb"] == {
        "bytes": 5,
        "sha256": "eef93e1d14482804277fca0172464032d1a4fdbcc338524059fa1e861454ad4d",
    }
    assert registry.versions() == [version]
    assert registry.version(1) == version
    assert registry.fetch(1, tmp_path / "unused") == folder
    assert [path.name for path in folder.parent.iterdir() if path.name[0] != "."] == ["1"]


def test_numbers_grow_by_one_and_the_same_model_twice_is_two_versions(registry, model):
    assert [registry.publish(model, {}).number for _ in range(3)] == [1, 2, 3]
    digests = {version.record["digest"] for version in registry.versions()}
    assert len(digests) == 1


def test_an_empty_registry_has_no_champion(registry):
    assert registry.champion() is None
    assert registry.versions() == []
    assert registry.history() == []
    assert registry.verify() == []
    with pytest.raises(BadInput, match="no earlier champion"):
        registry.rollback("why not")


def test_a_promotion_against_an_old_champion_is_a_conflict_and_changes_nothing(registry, model):
    for _ in range(3):
        registry.publish(model, {})
    assert registry.promote(1, None, "the first").number == 1
    registry.promote(2, 1, "better")
    with pytest.raises(Conflict, match="champion is now 2, not 1"):
        registry.promote(3, 1, "better too")
    with pytest.raises(Conflict, match="champion is now 2, not None"):
        registry.promote(3, None, "the first too")
    assert registry.champion().number == 2
    assert len(registry.history()) == 2


def test_only_a_version_that_is_there_and_is_not_champion_is_promoted(registry, model):
    registry.publish(model, {})
    with pytest.raises(BadInput, match="no version 7"):
        registry.promote(7, None, "x")
    registry.promote(1, None, "x")
    with pytest.raises(BadInput, match="champion already"):
        registry.promote(1, 1, "x")


def test_rollback_is_one_recorded_step_and_each_goes_further_back(registry, model):
    for _ in range(4):
        registry.publish(model, {})
    registry.promote(1, None, "one")
    registry.promote(2, 1, "two")
    registry.promote(3, 2, "three")
    assert registry.rollback("three is bad").number == 2
    assert {key: value for key, value in registry.history()[-1].items() if key != "id"} == {
        "action": "rollback",
        "version": 2,
        "previous": 3,
        "reason": "three is bad",
        "time": "2026-01-02T12:00:00.000+00:00",
    }
    registry.promote(4, 2, "four")
    assert registry.rollback("four is bad").number == 2
    assert registry.rollback("so is two").number == 1
    with pytest.raises(BadInput, match="no earlier champion"):
        registry.rollback("and one?")
    assert registry.champion().number == 1
    assert [(event["action"], event["previous"], event["version"]) for event in registry.history()] == [
        ("promote", None, 1),
        ("promote", 1, 2),
        ("promote", 2, 3),
        ("rollback", 3, 2),
        ("promote", 2, 4),
        ("rollback", 4, 2),
        ("rollback", 2, 1),
    ]


def test_verify_names_what_differs(registry, model):
    for _ in range(5):
        registry.publish(model, {})
    assert registry.verify() == []
    folder = Path(registry.uri)
    (folder / "1" / "saved_model.pb").write_bytes(b"grapH")
    (folder / "2" / "variables" / "variables.index").unlink()
    (folder / "3" / "stranger").touch()
    record = (folder / "4" / "record.json").read_text()
    (folder / "4" / "record.json").write_text(record.replace('"bytes": 5', '"bytes": 6'))
    findings = registry.verify()
    assert len(findings) == 4
    for finding, (version, name, found) in zip(
        findings,
        [
            (1, "saved_model.pb", "differs"),
            (2, "variables/variables.index", "missing"),
            (3, "stranger", "not published"),
            (4, "record.json", "not the one"),
        ],
        strict=True,
    ):
        assert f"version {version}: {name}" in finding
        assert found.split()[-1] in finding
    assert registry.verify(5) == []
    assert registry.verify(1) == findings[:1]
    with pytest.raises(BadInput, match="no version 6"):
        registry.verify(6)


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_verify_goes_on_past_a_record_that_cannot_be_read(registry, model, text):
    for _ in range(3):
        registry.publish(model, {})
    record = Path(registry.uri, "1", "record.json")
    record.unlink() if text is None else record.write_text(text)
    Path(registry.uri, "3", "saved_model.pb").write_bytes(b"grapH")
    findings = registry.verify()
    assert [finding[:9] for finding in findings] == ["version 1", "version 3"]
    assert ("record.json: is missing" if text is None else "1: record.json: ") in findings[0]
    assert registry.verify(1) == findings[:1]


def test_a_damaged_version_does_not_become_champion_by_hand(registry, model):
    for _ in range(3):
        registry.publish(model, {})
    registry.promote(1, None, "first")
    registry.promote(2, 1, "better", verified=True)
    for number in (1, 3):
        Path(registry.uri, str(number), "saved_model.pb").unlink()
    with pytest.raises(WorldFailure, match=r"version 3: saved_model\.pb: is missing"):
        registry.promote(3, 2, "by hand", verified=True)
    with pytest.raises(WorldFailure, match=r"version 1: saved_model\.pb: is missing"):
        registry.rollback("complaints")
    assert (registry.champion().number, len(registry.history())) == (2, 2)


def test_after_the_champion_was_deleted_by_hand_another_can_be_promoted(registry, model):
    for _ in range(2):
        registry.publish(model, {})
    registry.promote(1, None, "first")
    storage.delete_prefix(registry.version(1).uri)
    registry.promote(2, registry.champion_number(), "the first is gone", verified=True)
    assert registry.champion().number == 2


def test_a_champion_deleted_by_hand_is_a_failure_and_not_an_absence(registry, model):
    registry.publish(model, {})
    registry.promote(1, None, "x")
    storage.delete_prefix(registry.version(1).uri)
    with pytest.raises(WorldFailure, match="version 1, is not there"):
        registry.champion()


def test_retain_keeps_the_newest_and_all_that_ever_were_champion(registry, model):
    for _ in range(8):
        registry.publish(model, {})
    registry.promote(2, None, "x")
    registry.promote(3, 2, "x")
    registry.rollback("x")
    assert registry.retain(keep_newest=2) == [1, 4, 5, 6]
    assert [version.number for version in registry.versions()] == [2, 3, 7, 8]
    assert storage.list_folders(registry.uri) == ["2", "3", "7", "8"]
    assert registry.retain(keep_newest=2) == []
    assert registry.publish(model, {}).number == 9
    for gone in (lambda: registry.promote(4, 2, "x"), lambda: registry.fetch(4, "x"), lambda: registry.verify(4)):
        with pytest.raises(BadInput, match="no version 4"):
            gone()
    with pytest.raises(BadInput, match="keep_newest 0"):
        registry.retain(0)


def test_what_is_retired_is_never_promoted_even_if_its_files_are_still_there(registry, model):
    for _ in range(2):
        registry.publish(model, {})
    _, generation = storage.read_json(storage.join(registry.uri, "champion.json"))
    assert generation == 0
    storage.write_json(
        storage.join(registry.uri, "champion.json"), {"champion": None, "history": [], "retired": [1]}, if_generation=0
    )  # a call of retain that was killed before it deleted
    with pytest.raises(BadInput, match="no version 1"):
        registry.promote(1, None, "x")
    assert [version.number for version in registry.versions()] == [2]
    registry.retain(1)
    assert storage.list_folders(registry.uri) == ["2"]


def test_nobody_can_promote_what_is_about_to_be_deleted(registry, model, monkeypatch):
    for _ in range(2):
        registry.publish(model, {})
    real, refused = storage.delete_prefix, []

    def delete_prefix(uri):
        with pytest.raises(BadInput, match="no version 1"):
            registry.promote(1, None, "quick")
        refused.append(uri)
        real(uri)

    monkeypatch.setattr(storage, "delete_prefix", delete_prefix)
    assert registry.retain(1) == [1]
    assert refused == [f"{registry.uri}/1"]


def test_what_was_promoted_a_moment_before_it_would_be_retired_is_kept(registry, model, monkeypatch):
    for _ in range(3):
        registry.publish(model, {})
    real, promoted = storage.write_json, []

    def write_json(uri, value, if_generation=None):
        if not promoted:
            promoted.append(1)
            registry.promote(1, None, "quick")
        return real(uri, value, if_generation)

    monkeypatch.setattr(storage, "write_json", write_json)
    assert registry.retain(1) == [2]
    assert registry.champion().number == 1
    assert registry.verify() == []


def test_what_cannot_be_read_is_neither_counted_nor_deleted_and_the_next_number_is_free(registry, model):
    for _ in range(4):
        registry.publish(model, {})
    record = Path(registry.uri, "2", "record.json")
    record.unlink()
    record.write_text("{")
    assert registry.publish(model, {}).number == 5
    registry.promote(5, None, "beside a broken one")
    assert registry.retain(keep_newest=2) == [1, 3]
    assert storage.list_folders(registry.uri) == ["2", "4", "5"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 200])
def test_a_name_that_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(BadInput, match="registry name"):
        Registry(tmp_path, name)


def test_a_record_cannot_claim_its_own_digests(registry, model):
    with pytest.raises(BadInput, match="files"):
        registry.publish(model, {"files": {}})
    (model / "record.json").write_text("{}")
    with pytest.raises(BadInput, match=r"record\.json"):
        registry.publish(model, {})


def test_a_damaged_pointer_is_named_and_not_overwritten(registry, model):
    registry.publish(model, {})
    pointer = Path(registry.uri) / "champion.json"
    pointer.write_text('{"champion": 1}')
    with pytest.raises(BadInput, match=r"champion\.json"):
        registry.promote(1, None, "x")
    assert pointer.read_text() == '{"champion": 1}'


def promote_many(base, worker, times):
    """Promote `times` times, each time another version than the champion, whoever else does the same."""
    registry = Registry(base, "m")
    choose = random.Random(worker)
    done = 0
    while done < times:
        champion = registry.champion()
        candidate = choose.choice([number for number in (1, 2, 3) if champion is None or number != champion.number])
        try:
            registry.promote(candidate, champion and champion.number, f"{worker}:{done}")
            done += 1
        except Conflict:
            pass


def assert_one_order(registry, workers, times):
    """Hold a history to this: each promotion is there once, each follows on the one before, the last is champion."""
    history = registry.history()
    assert sorted(event["reason"] for event in history) == sorted(
        f"{w}:{n}" for w in range(workers) for n in range(times)
    )
    champions = [None, *(event["version"] for event in history)]
    assert [event["previous"] for event in history] == champions[:-1]
    assert registry.champion().number == champions[-1]


def test_of_200_promotions_by_8_processes_none_is_lost(model, tmp_path):
    registry = Registry(tmp_path / "r", "m")
    for _ in range(3):
        registry.publish(model, {})
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pool.starmap(promote_many, [(tmp_path / "r", worker, 25) for worker in range(8)])
    assert_one_order(registry, workers=8, times=25)


def state(root):
    """What a reader sees of a registry."""
    registry = Registry(root, "m")
    champion = registry.champion()
    return (
        [version.number for version in registry.versions()],
        champion and champion.number,
        [event["reason"] for event in registry.history()],
        registry.verify(),
    )


BEFORE = ([1, 2, 3], 1, ["a", "b"], [])
AFTER = {
    "publish": ([1, 2, 3, 4], 1, ["a", "b"], []),
    "promote": ([1, 2, 3], 2, ["a", "b", "killer"], []),
    "rollback": ([1, 2, 3], 3, ["a", "b", "killer"], []),
    "retain": ([1, 3], 1, ["a", "b"], []),
}


def kill_everywhere(operation, model, results):
    """Run killer.py; return the registries it left, and what a reader sees of each."""
    killer = [sys.executable, str(Path(__file__).with_name("killer.py")), operation, str(model), str(results)]
    project = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    deaths = int(subprocess.run(killer, check=True, stdout=subprocess.PIPE, text=True, env=project).stdout)
    left = [storage.join(results, str(nth)) for nth in range(1, deaths + 2)]
    return left, [state(root) for root in left]


@pytest.mark.parametrize("operation", AFTER)
def test_killed_anywhere_an_operation_leaves_the_old_or_the_new_state(operation, model, tmp_path):
    left, seen = kill_everywhere(operation, model, tmp_path / "dead")
    assert len(left) > 5
    assert seen[0] == BEFORE
    assert seen[-1] == AFTER[operation]
    assert all(one in (BEFORE, AFTER[operation]) for one in seen)
    for root, (numbers, *_) in zip(left, seen, strict=True):  # whoever comes next goes on, and no number was lost
        assert Registry(root, "m").publish(model, {}).number == numbers[-1] + 1
