"""The registry from the command line, on disk."""

import json
import shutil

import pytest

from pipelines.cli import main
from trainer import storage
from trainer.registry import Registry


def filled(base, tmp_path):
    """Three versions, the first two of which were promoted."""
    models = Registry(base, "digits")
    for number in (1, 2, 3):
        folder = tmp_path / f"export-{number}"
        folder.mkdir()
        (folder / "saved_model.pb").write_bytes(b"graph %d" % number)
        verdict = {"verdict": "blessed", "reasons": ["accuracy ≥ 0.5 holds: it is 0.9"]}
        record = {"metrics": {"accuracy": 0.9 + number / 100, "roc_auc": None}, "verdict": verdict}
        models.publish(folder, {**record, "intervals": {"accuracy": [0.8, 0.99]}})
    models.promote(1, None, "first")
    models.promote(2, 1, "better")
    return base


@pytest.fixture
def registry(tmp_path):
    return filled(tmp_path / "models", tmp_path)


def run(capsys, registry, *words):
    code = main(["models", *words, "--registry", str(registry)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_list_names_the_models_and_their_versions(registry, capsys):
    assert run(capsys, registry, "list") == (0, "digits                  champion 2\n", "")
    code, out, _ = run(capsys, registry, "list", "digits")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["1", "blessed", "accuracy", "0.9100"],
        ["*", "2", "blessed", "accuracy", "0.9200"],
        ["3", "blessed", "accuracy", "0.9300"],
    ]
    rows = json.loads(run(capsys, registry, "list", "digits", "--json")[1])
    assert [row["champion"] for row in rows] == [False, True, False]


def test_show_tells_what_is_on_record(registry, capsys):
    _, out, _ = run(capsys, registry, "show", "digits")
    for part in ("digits version 2", "accuracy 0.9200 (0.8000 to 0.9900)", "accuracy ≥ 0.5 holds", "1 → 2: better"):
        assert part in out
    shown = json.loads(run(capsys, registry, "show", "digits", "1", "--json")[1])
    assert (shown["version"], [event["action"] for event in shown["history"]]) == (1, ["promote", "promote"])


def test_promote_and_rollback_move_the_champion_and_are_recorded(registry, capsys):
    assert run(capsys, registry, "promote", "digits", "3", "--reason", "by hand")[0] == 0
    assert Registry(registry, "digits").champion().number == 3
    code, out, _ = run(capsys, registry, "rollback", "digits", "--reason", "complaints")
    assert (code, "version 2 is champion again" in out) == (0, True)
    assert [event["reason"] for event in Registry(registry, "digits").history()][-2:] == ["by hand", "complaints"]


def test_a_registry_in_a_bucket_answers_as_one_on_disk(gcs, tmp_path, capsys):
    base = filled(f"{gcs}/models", tmp_path)
    assert run(capsys, base, "list") == (0, "digits                  champion 2\n", "")
    assert run(capsys, base, "rollback", "digits", "--reason", "complaints")[0] == 0
    assert "digits version 1" in run(capsys, base, "show", "digits")[1]
    assert run(capsys, base, "verify", "digits")[0] == 0


def test_verify_finds_a_changed_file_and_fails(registry, capsys):
    assert run(capsys, registry, "verify", "digits") == (0, "digits: every version is as it was published\n", "")
    file = registry / "digits" / "2" / "saved_model.pb"
    file.chmod(0o644)
    file.write_bytes(b"something else")
    code, out, _ = run(capsys, registry, "verify", "digits")
    assert code == 1
    assert out.startswith("version 2: saved_model.pb: differs")
    assert run(capsys, registry, "verify", "digits", "1")[0] == 0
    Registry(registry, "digits").promote(1, 2, "back")
    code, _, err = run(capsys, registry, "promote", "digits", "2", "--reason", "again")
    assert (code, "version 2: saved_model.pb: differs" in err) == (1, True)


RECORDS = {
    '{"metrics": {"acc': "record.json: is not JSON",
    "[]": "record.json: must hold an object",
    '{"files": {}}': "record.json: has no digest",
    '{"files": {"a": 1}, "digest": "x"}': "record.json: files must give `bytes` and `sha256` of each file",
    '{"files": {}, "digest": "x", "metrics": 3}': "record.json: metrics must be an object",
    '{"files": {}, "digest": "x", "metrics": {"accuracy": "high"}}': "record.json: metrics must be numbers",
    None: "record.json: is missing, so it is no version",
}


@pytest.mark.parametrize(("text", "wrong"), RECORDS.items())
def test_a_broken_record_is_named_and_hides_no_other_version(registry, capsys, text, wrong):
    broken = registry / "digits" / "1" / "record.json"
    broken.unlink()
    if text is not None:
        broken.write_text(text)
    assert_one_is_broken(registry, capsys, wrong)


def test_a_broken_record_in_a_bucket_is_named_too(gcs, tmp_path, capsys):
    base = filled(f"{gcs}/models", tmp_path)
    storage.write_json(f"{base}/digits/1/record.json", [])
    assert_one_is_broken(base, capsys, "record.json: must hold an object")
    storage.delete_prefix(f"{base}/digits/1/record.json")
    assert_one_is_broken(base, capsys, "record.json: is missing, so it is no version")


def assert_one_is_broken(registry, capsys, wrong):
    """Version 1 is; 2 is champion."""
    reason = ["--reason", "r"]
    code, out, err = run(capsys, registry, "list", "digits")
    assert (code, err) == (1, "")
    first, *others = out.splitlines()
    assert first.startswith(f"     1  BROKEN        {wrong}")
    assert [line.split()[-1] for line in others] == ["0.9200", "0.9300"]
    code, out, _ = run(capsys, registry, "list", "digits", "--json")
    assert (code, [bool(row["broken"]) for row in json.loads(out)]) == (1, [True, False, False])
    code, out, _ = run(capsys, registry, "verify", "digits")
    assert (code, out.count("\n")) == (1, 1)
    assert out.startswith(f"version 1: {wrong}")
    for words in (["show", "digits", "1"], ["promote", "digits", "1", *reason], ["rollback", "digits", *reason]):
        code, out, err = run(capsys, registry, *words)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"1/{wrong}" in err
        assert ("restore it, or promote another one" in err) == (words[0] != "show")
    assert run(capsys, registry, "list")[:2] == (0, "digits                  champion 2\n")
    assert run(capsys, registry, "show", "digits")[0] == 0


def test_a_broken_champion_is_marked_and_another_can_be_promoted(registry, tmp_path, capsys):
    Registry(registry, "other").publish(tmp_path / "export-1", {})
    record = registry / "digits" / "2" / "record.json"
    record.unlink()
    record.write_text("{")
    code, out, _ = run(capsys, registry, "list")
    assert code == 1
    assert out.splitlines()[0].startswith("digits                  champion 2  BROKEN: ")
    assert out.splitlines()[1] == "other                   champion –"
    assert "\n*    2  BROKEN        record.json: is not JSON" in run(capsys, registry, "list", "digits")[1]
    code, _, err = run(capsys, registry, "show", "digits")
    assert (code, "version 2 is the champion: promote another, roll back or restore it" in err) == (1, True)
    assert run(capsys, registry, "promote", "digits", "3", "--reason", "2 is broken")[0] == 0
    assert run(capsys, registry, "list")[0] == 0


def test_a_champion_that_is_gone_does_not_hide_the_others(registry, capsys):
    shutil.rmtree(registry / "digits" / "2")
    code, out, err = run(capsys, registry, "list", "digits")
    assert (code, len(out.splitlines()), err) == (1, 2, "trireme: the champion, version 2, is not there\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "digit"), "has no model digit (there are: digits)"),
        (("show", "digits", "9"), "has no version 9"),
        (("promote", "digits", "2", "--reason", "x"), "version 2 is the champion already"),
        (("promote", "digits", "3", "--reason", " "), "--reason: is empty; give it a value"),
        (("promote", "digits", "8", "--reason", "x"), "has no version 8"),
    ],
)
def test_what_is_not_there_is_said(registry, capsys, words, message):
    code, out, err = run(capsys, registry, *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("words", [["list"], ["show", "m"], ["verify", "m"], ["promote", "m", "1", "--reason", "r"]])
def test_a_registry_that_is_not_there_is_no_empty_one(tmp_path, capsys, words):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert main(["models", *words, "--registry", str(tmp_path / "none")]) == 2
    assert "none: there is no such folder" in capsys.readouterr().err
    assert main(["models", *words, "--registry", str(tmp_path / "file")]) == 2
    assert "file: is a file" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    if words == ["list"]:
        assert main(["models", "list", "--registry", str(tmp_path / "empty")]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/empty holds no models\n"
