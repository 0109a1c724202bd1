"""Run where `gs://` leads to a fake: training on shards that stay in a bucket, beside training on the same shards here.

python streamed_training.py EXAMPLES FOLDER
"""

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.config import GroupConfig, TrainConfig
from trainer.data.manifest import read_manifest
from trainer.data.reading import open_feed
from trainer.data.shard_files import leave_in_bucket, without_shards
from trainer.errors import WorldFailure
from trainer.tasks import train_model

URI = "gs://bucket/prepared/numbers"


def wait_for_server():
    for _ in range(200):
        try:
            socket.create_connection(("storage.googleapis.com", 443), 1).close()
            return
        except OSError:
            time.sleep(0.05)


def trained(examples, folder, uri, **settings):
    config = TrainConfig(model="tabular", epochs=2, global_batch_size=64, cache_bytes=0, **settings)
    artifacts = [SimpleNamespace(path=str(path), uri=at, metadata={}) for path, at in ((examples, uri), (folder, ""))]
    train_model(config.to_json(), GroupConfig().to_json(), 3, "numbers", str(folder.parent / "root"), *artifacts)
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]


def numbers(folder, manifest, **settings):
    config = TrainConfig(global_batch_size=64, **settings)
    feed = open_feed(folder, manifest, "train", seed=3, config=config, shuffle=True)
    return feed, feed.first(500)[0]["number"].numpy()


def main(examples, folder):
    wait_for_server()
    manifest = read_manifest(examples)
    remote = folder / "remote"
    without_shards(examples, remote, manifest)
    assert not list(remote.glob("*.tfrecord"))
    leave_in_bucket(remote, URI)
    for cache_bytes in (0, 2**30):
        feed, found = numbers(remote, manifest, read_shards="streamed", cache_bytes=cache_bytes)
        assert feed.streams == (cache_bytes == 0)
        assert np.array_equal(found, numbers(examples, manifest, cache_bytes=cache_bytes)[1])
    assert trained(remote, folder / "one", URI, read_shards="streamed") == trained(
        examples, folder / "two", "", read_shards="staged"
    )

    shards = manifest.splits["train"].shards
    longer = shards[0].model_copy(update={"num_bytes": shards[0].num_bytes + 1})
    gone = shards[0].model_copy(update={"name": "train-00007-of-00008.tfrecord"})
    for wrong, said in ((longer, "bytes instead of"), (gone, "TensorFlow cannot read it")):
        split = manifest.splits["train"].model_copy(update={"shards": [wrong, *shards[1:]]})
        other = manifest.model_copy(update={"splits": manifest.splits | {"train": split}})
        with pytest.raises(WorldFailure, match=said) as refused:
            numbers(remote, other, read_shards="streamed")
        print(refused.value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
