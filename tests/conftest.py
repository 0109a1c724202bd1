"""Small and real things that many tests share."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from built_image import call, engine, image  # noqa: F401 - fixtures are found by their names
from fake_gcs import faults, gcs, gcs_address  # noqa: F401
from hypothesis import settings
from trained import digits_model, number_table, table  # noqa: F401

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).parent))

if os.environ.get("CI"):  # what lands must not depend on the dice of the day
    settings.register_profile("ci", derandomize=True)
    settings.load_profile("ci")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def tfds_data_dir(tmp_path_factory):
    """Builders that tests prepare go to a folder of this session, never to the home folder; so do copies out of buckets."""
    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder))
        patch.setenv("TRIREME_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="session")
def digits_examples(tmp_path_factory, tfds_data_dir):
    """The digits dataset, prepared."""
    from trainer.config import DataConfig
    from trainer.data.prepare import prepare

    folder = tmp_path_factory.mktemp("digits") / "examples"
    prepare(DataConfig(), seed=7, folder=folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cpu_split_in_time(request):
    """TensorFlow splits the CPU only before its first operation, which may be another test's."""
    if any("three_cpus" in item.fixturenames for item in request.session.items):
        from trainer.strategy import split_cpu

        split_cpu(3)


@pytest.fixture(scope="session")
def three_cpus(_cpu_split_in_time):
    """The CPU as three logical devices, to run several replicas in this process."""
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == 3


@pytest.fixture
def configuration(tmp_path):
    """Writes a configuration file and gives its path; the digits with a small model unless the text says otherwise."""

    def write(text="", name="config.yaml"):
        file = tmp_path / name
        file.write_text(
            text
            or "name: tiny\nseed: 3\ntrain: {model: mlp, epochs: 2}\n"
            "evaluate: {thresholds: {accuracy: {value_threshold: 0.2}}}\n"
        )
        return file

    return write


@pytest.fixture
def predictions():
    """Labels and probabilities of a made-up classifier that is right most of the time."""

    def make(num_examples=200, num_classes=4, seed=0):
        random = np.random.default_rng(seed)
        labels = random.integers(0, num_classes, num_examples)
        scores = random.normal(size=(num_examples, num_classes)) + 2.0 * np.eye(num_classes)[labels]
        probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        return labels, probabilities

    return make
