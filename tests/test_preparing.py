"""Preparation under stress: killed anywhere, restarted, shared by processes, with more data than memory should see."""

import resource
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from pyarrow import csv, parquet

from trainer.config import DataConfig, Splits
from trainer.data import parts, shards
from trainer.data.manifest import verify
from trainer.data.prepare import prepare
from trainer.errors import WorldFailure

SPLITS = Splits(train="70%", validation=None, test="30%")


def table(file, num_rows, width=1):
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        out.write("size,words,label\n")
        for row in range(num_rows):
            out.write(f"{row},{f'word{row % 1000} ' * width},{'ab'[row % 2]}\n")


def config(path, **settings):
    return DataConfig(source="csv", path=str(path), label_key="label", splits=SPLITS, **settings)


def everything_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
def test_a_preparation_killed_anywhere_leaves_nothing_or_all_and_the_next_one_ends_alike(tmp_path):
    table(tmp_path / "in" / "t.csv", 40)
    command = [sys.executable, "tests/prepare_killer.py", str(tmp_path / "in" / "t.csv"), str(tmp_path / "runs")]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20


def test_what_was_finished_before_a_failure_is_not_done_again(tmp_path, monkeypatch):
    for number in range(4):
        table(tmp_path / "in" / f"{number}.csv", 30)
    settings = config(tmp_path / "in", min_shards=3)
    done = {"parts": [], "shards": []}
    real_encoder, real_writer = parts.Encoder, shards.FrameWriter

    def encoder(*arguments):
        done["parts"].append(1)
        return real_encoder(*arguments)

    def writer(path):
        if len(done["shards"]) == 2 and not done.get("restarted"):
            raise OSError(28, "No space left on device")
        done["shards"].append(path.name)
        return real_writer(path)

    monkeypatch.setattr(parts, "Encoder", encoder)
    monkeypatch.setattr(shards, "FrameWriter", writer)
    with pytest.raises(WorldFailure, match="store: No space left on device"):
        prepare(settings, 7, tmp_path / "out", tmp_path / "store")
    assert (len(done["parts"]), len(done["shards"])) == (4, 2)
    done["restarted"] = True
    manifest = prepare(settings, 7, tmp_path / "out", tmp_path / "store")
    assert len(done["parts"]) == 4  # none was read a second time
    assert len(done["shards"]) == len(set(done["shards"])) == 6  # nor written
    verify(tmp_path / "out", manifest)
    assert prepare(settings, 7, tmp_path / "whole").digest == manifest.digest


def test_a_part_that_was_damaged_between_two_tries_is_read_again(tmp_path, monkeypatch):
    table(tmp_path / "t.csv", 40)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "FrameWriter", fail)
        with pytest.raises(WorldFailure, match="store: No space left on device"):
            prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out", tmp_path / "store")
    records = next((tmp_path / "store").glob(".*.work/part-00000.records"))
    records.write_bytes(bytes(records.stat().st_size))
    manifest = prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out", tmp_path / "store")
    assert prepare(config(tmp_path / "t.csv"), 7, tmp_path / "whole").digest == manifest.digest


def test_a_process_whose_disk_is_full_says_so_and_leaves_nothing(tmp_path):
    table(tmp_path / "t.csv", 4000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # a full disk that needs no right to mount one
    try:
        with pytest.raises(WorldFailure, match=rf"^{tmp_path}: File too large; nothing is left half-written"):
            prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out", num_workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]


SHARED = """
import sys, threading
from pathlib import Path
from trainer.config import DataConfig, parse_json
from trainer.data import workers
from trainer.data.prepare import prepare
config, folder = parse_json(DataConfig, sys.argv[1]), Path(sys.argv[2])
prepare(config, 7, folder / "forked", num_workers=2)
processes, spawned = workers.subprocess.Popen, []
workers.subprocess.Popen = lambda *a, **k: spawned.append(1) or processes(*a, **k)
timer = threading.Timer(60, print)  # a process with threads is not copied
timer.start()
prepare(config, 7, folder / "spawned", num_workers=2)
timer.cancel()
prepare(config, 7, folder / "alone", num_workers=0)
assert len(spawned) == 2 and "tensorflow" not in sys.modules
"""


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_processes_that_share_the_work_write_the_same_bytes_as_one(tmp_path, form):
    for number in range(5):
        table(tmp_path / "in" / f"{number}.csv", 40)
        if form == "parquet":
            source = tmp_path / "in" / f"{number}.csv"
            parquet.write_table(csv.read_csv(source), source.with_suffix(".parquet"), row_group_size=15)
    settings = config(tmp_path / "in", min_shards=3).model_copy(update={"source": form})
    command = [sys.executable, "-c", SHARED, settings.to_json(), str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100)
    assert everything_in(tmp_path / "forked") == everything_in(tmp_path / "alone")
    assert everything_in(tmp_path / "spawned") == everything_in(tmp_path / "alone")


def test_a_bad_record_that_another_process_meets_is_reported_as_if_it_were_here(tmp_path):
    table(tmp_path / "in" / "a.csv", 40)
    (tmp_path / "in" / "b.csv").write_text("size,words,label\n1,x,a\nmany,x,b\n")
    with pytest.raises(ValueError, match=r"b.csv, row 3: size = 'many' is not a number"):
        prepare(config(tmp_path / "in"), 7, tmp_path / "out", num_workers=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("moment", ["before its job", "with its job"])
def test_a_process_that_is_killed_ends_the_preparation_with_a_word_about_it(moment, tmp_path, monkeypatch):
    from trainer.data import workers

    table(tmp_path / "t.csv", 40)
    real = workers._Processes.run

    def run(self, jobs, advance):
        jobs = list(jobs)
        if moment == "before its job":
            self._processes[0].kill()
            self._listeners[0].join()  # it is gone, and its job will meet a broken pipe
            yield from real(self, jobs, advance)
        else:
            results = real(self, jobs, advance)
            self._processes[0].kill()
            yield from results

    monkeypatch.setattr(workers._Processes, "run", run)
    with pytest.raises(WorldFailure, match="killed, perhaps for want of memory"):
        prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out", num_workers=1)


def test_the_seed_decides_the_order_and_not_the_splits(tmp_path):
    table(tmp_path / "t.csv", 200)
    one = prepare(config(tmp_path / "t.csv"), 1, tmp_path / "one")
    two = prepare(config(tmp_path / "t.csv"), 2, tmp_path / "two")
    assert one.digest != two.digest
    assert one.splits["test"].label_counts == two.splits["test"].label_counts
    assert one.statistics_sha256 == two.statistics_sha256


@pytest.mark.slow
def test_twenty_times_the_data_takes_no_more_memory(tmp_path):
    """Peak of a process that prepares alone; the smaller source fills several runs and shards already."""
    code = (
        "import resource, sys; from pathlib import Path; from trainer.config import *; "
        "from trainer.data import parts; from trainer.data.prepare import prepare\n"
        "parts._RUN_BYTES = 2**20\n"
        "prepare(parse_json(DataConfig, sys.argv[1]), 7, Path(sys.argv[2]), num_workers=0)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for num_rows in (8_000, 160_000):
        table(tmp_path / f"{num_rows}.csv", num_rows, width=25)
        settings = config(tmp_path / f"{num_rows}.csv", shard_bytes=2**20)
        command = [sys.executable, "-c", code, settings.to_json(), str(tmp_path / f"out{num_rows}")]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] <= 1.2 * peaks[0]
