"""Reading: every example once in every epoch, whatever the batch, replicas, workers, files and place to go on from."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from trainer.config import DataConfig, Splits, TrainConfig
from trainer.data.manifest import read_manifest
from trainer.data.prepare import prepare
from trainer.data.reading import MemoryFeed, StreamFeed, open_feed
from trainer.data.records import parser
from trainer.errors import BadInput

NUM_ROWS = 1000
TRAIN = 900


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A table sorted by class, in five shards; its texts are from 1 to 40 words long."""
    folder = tmp_path_factory.mktemp("reading")
    rows = [f"{n},{' '.join(['word'] * (1 + n * 7 % 40))},{n * 10 // NUM_ROWS}" for n in range(NUM_ROWS)]
    (folder / "t.csv").write_text("\n".join(["number,text,label", *rows]) + "\n")
    config = DataConfig(
        source="csv", path=str(folder / "t.csv"), label_key="label", min_shards=5, kinds={"text": "text"},
        splits=Splits(train="90%", validation=None, test="10%"),
    )  # fmt: skip
    prepare(config, 7, folder / "examples")
    return folder / "examples"


def opened(examples, **settings):
    settings = {"global_batch_size": 64, **settings}
    return open_feed(
        examples, read_manifest(examples), "train", seed=3, config=TrainConfig(**settings), shuffle=True
    )  # fmt: skip


def streamed(examples, buffer_examples):
    manifest = read_manifest(examples)
    files = [str(examples / shard.name) for shard in manifest.splits["train"].shards]
    return StreamFeed(files, TRAIN, parser(manifest), 3, buffer_examples=buffer_examples)


def numbers(iterator, steps):
    """Numbers of so many batches; nobody reads past the end of an epoch."""
    return [batch[0]["number"].numpy().astype(int).tolist() for batch in itertools.islice(iterator, steps)]


def epoch_of(feed, epoch, start=0, batch_size=64):
    """Numbers in the order of an epoch, batch by batch."""
    if feed.streams:
        iterator = feed.iterator(tf.distribute.get_strategy(), batch_size, epoch, start, epoch + 1)
        return numbers(iterator, -(-(TRAIN - start) // batch_size))
    return [
        taken(feed, epoch, low, batch_size)["number"].astype(int).tolist() for low in range(start, TRAIN, batch_size)
    ]


def taken(feed, epoch, low, batch_size=64):
    """The features of one batch of a feed in memory."""
    count = tf.constant(min(batch_size, TRAIN - low), tf.int64)
    features = feed.take(tf.constant(epoch), tf.constant(low, tf.int64), count)[0]
    return {name: values.numpy() for name, values in features.items()}


def feeds(examples):
    return {
        "memory": opened(examples),
        "bucketed": opened(examples, bucket_texts=True),
        "stream": streamed(examples, 100),
        "stream in order": streamed(examples, 0),
    }


@pytest.mark.parametrize("kind", ["memory", "bucketed", "stream", "stream in order"])
def test_an_epoch_holds_every_example_once_and_repeats_and_goes_on_from_any_batch(examples, kind):
    feed = feeds(examples)[kind]
    whole = epoch_of(feed, 2)
    assert [len(batch) for batch in whole] == [64] * 14 + [4]
    assert len({number for batch in whole for number in batch}) == TRAIN
    assert epoch_of(feeds(examples)[kind], 2) == whole
    assert epoch_of(feed, 2, start=5 * 64) == whole[5:]
    assert (epoch_of(feed, 3) == whole) == (kind == "stream in order")


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["stream", "stream in order"])
def test_workers_share_each_batch_exactly_whatever_the_number_of_files(examples, kind, num_workers):
    """Each worker reads by itself, as in a cluster; together they hold the batches that one would have had."""
    feed = feeds(examples)[kind]
    whole = epoch_of(feed, 1)

    class Strategy:
        num_replicas_in_sync = num_workers
        cluster_resolver = None

        def __init__(self, worker):
            self.worker = worker

        def distribute_datasets_from_function(self, make):
            context = tf.distribute.InputContext(num_workers, self.worker, num_workers)
            return make(context)

    parts = [numbers(feed.iterator(Strategy(worker), 64, 1, 0, 2), -(-TRAIN // 64)) for worker in range(num_workers)]
    assert [list(itertools.chain(*shares)) for shares in zip(*parts, strict=True)] == whole


def distance_from_the_whole(batches):
    """Mean distance of a batch's class histogram from that of the split; a perfect shuffle of batches of 64 gives 0.27."""
    expected = 0.1
    return np.mean(
        [np.abs(np.bincount(np.array(batch) // 100, minlength=10) / 64 - expected).sum() for batch in batches[:-1]]
    )


@pytest.mark.parametrize("kind", ["memory", "bucketed", "stream", "stream in order"])
def test_a_table_sorted_by_class_is_mixed_as_well_as_by_a_full_shuffle(examples, kind):
    order = np.random.default_rng(0).permutation(np.arange(NUM_ROWS))[:TRAIN]
    ideal = distance_from_the_whole([order[low : low + 64] for low in range(0, TRAIN, 64)])
    assert distance_from_the_whole(epoch_of(feeds(examples)[kind], 1)) < 1.35 * ideal


def test_texts_of_a_batch_are_of_about_the_same_length(examples):
    def padding(feed):
        wasted = []
        for low in range(0, TRAIN, 64):
            lengths = [len(text.split()) for text in taken(feed, 0, low)["text"]]
            wasted.append(1 - np.mean(lengths) / max(lengths))
        return np.mean(wasted)

    assert padding(opened(examples)) > 0.4
    assert padding(opened(examples, bucket_texts=True)) < 0.1


def test_a_split_beyond_the_stated_budget_is_streamed_with_a_buffer_in_bytes(examples):
    assert isinstance(opened(examples), MemoryFeed)
    feed = opened(examples, cache_bytes=1000, shuffle_buffer_bytes=20_000)
    assert isinstance(feed, StreamFeed)
    size = read_manifest(examples).splits["train"].num_bytes / TRAIN
    assert feed._buffer == int(20_000 / (size + 64))
    with pytest.raises(BadInput, match=r"train.bucket_texts = true: the train split has .* is not held in memory"):
        opened(examples, cache_bytes=1000, bucket_texts=True)


def test_answers_to_a_text_do_not_depend_on_the_texts_beside_it(examples):
    from trainer.models import build_model
    from trainer.spec import spec_of

    manifest = read_manifest(examples)
    only_text = manifest.model_copy(update={"features": {"text": manifest.features["text"]}})
    model = build_model(TrainConfig(model="text"), spec_of(only_text, examples))
    alone = model({"text": tf.constant(["word word"])}).numpy()
    beside = model({"text": tf.constant(["word word", "word " * 30, ""])}).numpy()
    np.testing.assert_allclose(beside[0], alone[0], atol=1e-6)
    assert np.isfinite(model({"text": tf.constant(["", ""])}).numpy()).all()
