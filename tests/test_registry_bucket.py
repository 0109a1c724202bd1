"""The registry of models in a bucket: held to the same as on disk in tests/test_registry.py."""

import multiprocessing

import pytest
from fake_gcs import Fault
from test_registry import AFTER, BEFORE, NOON, assert_one_order, kill_everywhere, promote_many

from trainer import storage
from trainer.errors import BadInput
from trainer.registry import Conflict, Registry


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"graph")
    (folder / "variables" / "variables.index").write_bytes(b"weights")
    return folder


@pytest.fixture
def registry(gcs):
    return Registry(f"{gcs}/models", "digits", now=lambda: NOON)


def test_the_layout_is_the_one_on_disk(registry, model, gcs, tmp_path):
    version = registry.publish(model, {"run": "r1"})
    on_disk = Registry(tmp_path / "models", "digits").publish(model, {"run": "r1"})
    assert version.uri == f"{gcs}/models/digits/1"
    assert version.record == on_disk.record
    assert storage.list_names(f"{gcs}/models") == storage.list_names(tmp_path / "models")
    assert registry.versions() == [version]
    assert storage.list_names(registry.fetch(1, tmp_path / "fetched")) == storage.list_names(on_disk.uri)


def test_promotions_rollbacks_and_retention_work_as_on_disk(registry, model):
    for _ in range(5):
        registry.publish(model, {})
    assert registry.champion() is None
    registry.promote(1, None, "one")
    registry.promote(2, 1, "two")
    with pytest.raises(Conflict, match="champion is now 2, not 1"):
        registry.promote(3, 1, "three")
    assert registry.rollback("two is bad").number == 1
    assert registry.champion().number == 1
    assert [event["action"] for event in registry.history()] == ["promote", "promote", "rollback"]
    assert registry.retain(keep_newest=1) == [3, 4]
    assert [version.number for version in registry.versions()] == [1, 2, 5]
    assert storage.list_folders(registry.uri) == ["1", "2", "5"]
    with pytest.raises(BadInput, match="no version 3"):
        registry.promote(3, 1, "three")
    assert registry.publish(model, {}).number == 6
    assert registry.verify() == []


def test_verify_names_what_differs(registry, model):
    for _ in range(3):
        registry.publish(model, {})
    storage.write_json(f"{registry.uri}/1/saved_model.pb", "other")
    storage.delete_prefix(f"{registry.uri}/2/variables/variables.index")
    storage.write_json(f"{registry.uri}/3/stranger", 1)
    found = registry.verify()
    assert [finding.split(": ")[:3] for finding in found] == [
        ["version 1", "saved_model.pb", "differs"],
        ["version 2", "variables/variables.index", "is missing"],
        ["version 3", "stranger", "was not published with it"],
    ]


def test_a_promotion_whose_answer_was_lost_is_on_record_once(faults, gcs, model):
    registry = Registry(f"{gcs}/models", "m")
    registry.publish(model, {})
    faults.append(Fault("lost_answer", "POST", times=1))
    assert registry.promote(1, None, "x").number == 1
    assert len(registry.history()) == 1


def test_a_promotion_that_landed_unheard_and_was_overtaken_is_no_lost_race(registry, model, monkeypatch):
    for _ in range(2):
        registry.publish(model, {})
    real = storage.write_json
    overtaken = []

    def write_json(uri, value, if_generation=None):
        generation = real(uri, value, if_generation)  # lands
        if not overtaken:
            overtaken.append(True)
            registry.promote(2, 1, "quick")  # so that the nonce of the first is not there any more
            raise Conflict("answer lost, tried again, refused")
        return generation

    monkeypatch.setattr(storage, "write_json", write_json)
    assert registry.promote(1, None, "slow").number == 1
    assert [event["reason"] for event in registry.history()] == ["slow", "quick"]


def publish_many(base, model, times):
    return [Registry(base, "m").publish(model, {}).number for _ in range(times)]


def test_publishers_never_share_a_number(gcs, model):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        taken = pool.starmap(publish_many, [(gcs, model, 4)] * 4)
    assert sorted(number for some in taken for number in some) == list(range(1, 17))
    assert Registry(gcs, "m").verify() == []
    assert len(Registry(gcs, "m").versions()) == 16


@pytest.mark.slow
def test_of_200_promotions_by_8_processes_none_is_lost(gcs, model):
    registry = Registry(gcs, "m")
    for _ in range(3):
        registry.publish(model, {})
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pool.starmap(promote_many, [(gcs, worker, 25) for worker in range(8)])
    assert_one_order(registry, workers=8, times=25)


@pytest.mark.parametrize("operation", AFTER)
def test_killed_before_any_request_an_operation_leaves_the_old_or_the_new_state(operation, gcs, model, tmp_path):
    left, seen = kill_everywhere(operation, model, gcs)
    assert len(left) > 3
    assert seen[0] == BEFORE
    assert seen[-1] == AFTER[operation]
    assert all(one in (BEFORE, AFTER[operation]) for one in seen)
    for root, (numbers, *_) in zip(left, seen, strict=True):  # whoever comes next goes on; a dead one's number is lost
        Registry(root, "m").fetch(numbers[-1], tmp_path / "fetched" / root.rpartition("/")[2])
        assert Registry(root, "m").publish(model, {}).number in (numbers[-1] + 1, numbers[-1] + 2)
