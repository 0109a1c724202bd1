"""Manifests that strangers made: read or refused, and never a way out of the folder."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig, Splits
from trainer.data.manifest import Manifest, read_manifest, verify
from trainer.data.prepare import prepare
from trainer.data.statistics import read_statistics
from trainer.errors import BadInput, TriremeError

HOSTILE = st.sampled_from(
    ["../outside", "/etc/passwd", "train-00000-of-00001.tfrecord/../../x", "", "\0", "a\nb", "..", ".", "\ud800"]
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5), HOSTILE
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("manifest")
    (made / "t.csv").write_text("size,label\n" + "".join(f"{row},{'ab'[row % 2]}\n" for row in range(20)))
    splits = Splits(train="50%", validation=None, test="50%")
    prepare(DataConfig(source="csv", path=str(made / "t.csv"), label_key="label", splits=splits), 7, made / "examples")
    return made / "examples"


def places(value, place=()):
    """Every place in nested plain data."""
    yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*place, key))


def replaced(value, place, new):
    if not place:
        return new
    copied = value.copy()
    copied[place[0]] = replaced(value[place[0]], place[1:], new)
    return copied


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_manifest_is_read_or_refused(folder, data):
    """With a digest that agrees, because whoever alters a manifest can write that too."""
    file = folder / "manifest.json"
    whole = file.read_text()
    content = json.loads(whole)
    changed = replaced(content, data.draw(st.sampled_from(list(places(content)))), data.draw(VALUES))
    try:
        if isinstance(changed, dict):
            changed["digest"] = Manifest.model_validate_json(json.dumps(changed)).content_digest()
    except ValueError:
        pass  # no manifest, whatever its digest
    before = sorted(folder.parent.rglob("*"))
    try:
        file.write_text(json.dumps(changed))
        verify(folder, read_manifest(folder))
    except TriremeError:
        pass
    finally:
        file.write_text(whole)
    assert sorted(folder.parent.rglob("*")) == before


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 10**6))
def test_a_manifest_with_other_bytes_is_refused(folder, some, place):
    file = folder / "manifest.json"
    whole = file.read_bytes()
    place %= len(whole)
    changed = whole[:place] + some + whole[place + len(some) :]
    file.write_bytes(changed)
    try:
        if json_of(changed) == json_of(whole):
            read_manifest(folder)
        else:
            with pytest.raises(BadInput, match=r"manifest.json"):
                read_manifest(folder)
    finally:
        file.write_bytes(whole)


def json_of(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "name", ["../train-00000-of-00001.tfrecord", "/etc/passwd", "train-00000-of-00001.tfrecord\n", "x/y"]
)
def test_a_shard_is_never_a_path(folder, name):
    content = json.loads((folder / "manifest.json").read_text())
    content["splits"]["train"]["shards"][0]["name"] = name
    with pytest.raises(ValueError, match="name"):
        Manifest.model_validate_json(json.dumps(content))


def test_statistics_that_are_no_text_are_refused(folder):
    manifest, file = read_manifest(folder), folder / "statistics.json"
    whole = file.read_bytes()
    file.write_bytes(b"\x80" + whole)
    with pytest.raises(BadInput, match=r"statistics.json: was altered: it is not UTF-8"):
        read_statistics(folder, manifest)
    file.write_bytes(whole)
