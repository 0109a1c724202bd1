"""Splits, keys, shards and digests: properties that hold for any numbers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig, Splits
from trainer.data.prepare import prepare
from trainer.data.shards import Layout, count_shards
from trainer.data.splitting import Splitter, mixed


@st.composite
def shares(draw):
    first = draw(st.integers(1, 98))
    second = draw(st.integers(1, 99 - first))
    return {"train": first, "validation": second, "test": 100 - first - second}


@given(shares(), st.integers(0, 10_000), st.integers(0, 500), st.integers(0, 500))
def test_where_an_example_falls_depends_on_its_position_alone(given_shares, start, first, second):
    splitter = Splitter(given_shares)
    apart = np.concatenate([splitter.by_position(start, first), splitter.by_position(start + first, second)])
    assert apart.tolist() == splitter.by_position(start, first + second).tolist()


@given(shares(), st.integers(0, 1000))
def test_each_hundred_examples_in_a_row_hold_exactly_the_shares(given_shares, block):
    splitter = Splitter(given_shares)
    counts = np.bincount(splitter.by_position(block * 100, 100), minlength=3)
    assert dict(zip(splitter.names, counts.tolist(), strict=True)) == given_shares


@given(shares(), st.lists(st.text(), max_size=50))
def test_equal_keys_fall_into_the_same_split_whatever_stands_around_them(given_shares, keys):
    splitter = Splitter(given_shares)
    alone = [splitter.by_key([key])[0] for key in keys]
    assert splitter.by_key(keys).tolist() == alone


def test_shares_by_key_hold_on_average():
    counts = np.bincount(Splitter({"a": 70, "b": 30}).by_key([f"person {n}" for n in range(20_000)]))
    assert abs(counts[0] / 20_000 - 0.7) < 0.02


@given(st.lists(st.integers(0, 2**64 - 1), unique=True))
def test_mixing_keeps_numbers_apart(numbers):
    assert len(set(mixed(np.array(numbers, np.uint64)).tolist())) == len(numbers)


@given(st.integers(1, 10**7), st.integers(1, 10**12), st.integers(1, 10**9), st.integers(1, 64))
def test_the_number_of_shards_follows_from_size_and_workers(num_examples, num_bytes, shard_bytes, min_shards):
    found = count_shards(num_examples, num_bytes, shard_bytes, min_shards)
    assert 1 <= found <= num_examples
    assert found >= min(min_shards, num_examples)
    assert found in (num_examples, min_shards) or (num_bytes + 64 * num_examples) / found <= shard_bytes


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31 - 1))
def test_every_example_is_in_exactly_one_shard_and_the_digest_repeats(tmp_path_factory, files, min_shards, seed):
    folder = tmp_path_factory.mktemp("shards")
    (folder / "in").mkdir()
    number = 0
    for file in range(files):
        rows = [number + row for row in range(20 + file)]
        number += len(rows)
        text = "size,label\n" + "".join(f"{row},{'ab'[row % 2]}\n" for row in rows)
        (folder / "in" / f"{file}.csv").write_text(text)
    config = DataConfig(
        source="csv", path=str(folder / "in"), label_key="label", min_shards=min_shards,
        splits=Splits(train="50%", validation=None, test="50%"),
    )  # fmt: skip
    manifest = prepare(config, seed, folder / "one")
    assert sum(shard.num_examples for split in manifest.splits.values() for shard in split.shards) == number
    assert all(len(split.shards) == min(min_shards, split.num_examples) for split in manifest.splits.values())
    assert prepare(config, seed, folder / "two").digest == manifest.digest


def test_a_split_is_cut_for_sixteen_workers_where_no_shard_becomes_tiny():
    found = [count_shards(1000, size * 1024**2, 64 * 1024**2, None) for size in (1, 20, 200, 2000)]
    assert found == [1, 5, 16, 32]


def test_shard_names_say_how_many_there_are():
    layout = Layout(["train"], 1, "label", None, {"train": 3})
    assert layout.shard_name("train", 2) == "train-00002-of-00003.tfrecord"
