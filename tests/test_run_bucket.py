"""`trireme run --root gs://…`: what a run makes goes through the bucket, even on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from trainer.registry import Registry
from trainer.storage import exists, list_names, read_json

CONFIG = """\
name: table
seed: 3
data:
  source: csv
  path: t.csv
  label_key: label
  splits: {train: 60%, validation: 20%, test: 20%}
validate_data: {min_examples_per_class: 5}
train: {model: tabular, epochs: 4, global_batch_size: 16, learning_rate: 1e-2}
evaluate: {thresholds: {accuracy: {value_threshold: 0.6}}}
"""


@pytest.mark.slow
def test_a_run_leaves_everything_in_the_bucket_and_another_machine_goes_on_from_there(gcs, tmp_path):
    documents = []
    for machine in ("one", "two"):
        folder = tmp_path / machine
        folder.mkdir()
        rows = "".join(f"{number % 10},{'ab'[number % 10 > 4]}\n" for number in range(300))
        (folder / "t.csv").write_text("size,label\n" + rows)
        (folder / "table.yaml").write_text(CONFIG)
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.cli", "run", "table.yaml", "--root", f"{gcs}/root", "--json"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout.splitlines()[-1]))
        assert ("reusing the prepared data" in done.stdout + done.stderr) == (machine == "two")
    assert documents[0]["digests"]["examples"] == documents[1]["digests"]["examples"]
    registry = Registry(f"{gcs}/root/models", "table")
    assert registry.champion() is not None
    for document in documents:
        run = f"{gcs}/root/runs/{Path(document['run_dir']).name}"
        assert read_json(f"{run}/run.json")[0]["state"] == "succeeded"
        assert "saved_model/saved_model.pb" in list_names(f"{run}/train-model/model")
        for output in ("prepare-data/examples", "validate-data/anomalies", "judge-model/verdict"):
            assert exists(f"{run}/{output}")
