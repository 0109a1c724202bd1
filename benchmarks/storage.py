"""How fast storage moves 200 MB in 20 objects, beside public clients on the same server in the same run.

    python benchmarks/storage.py [--rounds N]

Starts a local fake-gcs-server, lets every client take its turn in every round, and compares best times. A ratio above 1
means that `trainer.storage` is faster than the fastest of the others; at least 0.8 is promised. The others check no
checksum but for google-cloud-storage; ours checks all, and publishes whole or not at all. Exit code 1 if a ratio is less.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from google.cloud import storage as google_storage
from google.cloud.storage import transfer_manager
from requests.adapters import HTTPAdapter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_gcs import make_bucket, start_fake  # noqa: E402

from trainer import storage  # noqa: E402

NUM_OBJECTS, OBJECT_BYTES, NUM_THREADS = 20, 10_000_000, 8
NAMES = [f"shard-{number:05}" for number in range(NUM_OBJECTS)]
BLOCK_BYTES = 1 << 20
PROMISED = 0.8


def in_threads(do):
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(do, NAMES))


class Others:
    """The public clients, each at its best setting found."""

    def __init__(self, address, bucket_name):
        adapter = HTTPAdapter(pool_maxsize=2 * NUM_THREADS)
        self.session = requests.Session()
        self.session.mount("http://", adapter)
        self.bucket = google_storage.Client(project="none").bucket(bucket_name)
        self.reading = f"{address}/download/storage/v1/b/{bucket_name}/o/{{}}%2F{{}}?alt=media"
        self.writing = f"{address}/upload/storage/v1/b/{bucket_name}/o?uploadType=media&name={{}}/{{}}"

    def downloads(self):
        found = {
            "requests, streamed in threads": self.requests_download,
            "google-cloud-storage, single shot in threads": self.google_download,
            "google-cloud-storage, transfer_manager": self.transfer_manager_download,
        }
        return found | ({"curl --parallel": self.curl_download} if shutil.which("curl") else {})

    def uploads(self):
        found = {
            "requests, streamed in threads": self.requests_upload,
            "google-cloud-storage, in threads": self.google_upload,
            "google-cloud-storage, transfer_manager": self.transfer_manager_upload,
        }
        return found | ({"curl --parallel": self.curl_upload} if shutil.which("curl") else {})

    def requests_download(self, prefix, folder):
        def one(name):
            with (
                self.session.get(self.reading.format(prefix, name), stream=True) as answer,
                (folder / name).open("wb") as f,
            ):
                while block := answer.raw.read(BLOCK_BYTES):
                    f.write(block)

        in_threads(one)

    def google_download(self, prefix, folder):
        def one(name):
            self.bucket.blob(f"{prefix}/{name}").download_to_filename(folder / name, single_shot_download=True)

        in_threads(one)

    def transfer_manager_download(self, prefix, folder):
        transfer_manager.download_many_to_path(
            self.bucket,
            NAMES,
            destination_directory=str(folder),
            blob_name_prefix=f"{prefix}/",
            worker_type=transfer_manager.THREAD,
            max_workers=NUM_THREADS,
            download_kwargs={"single_shot_download": True},
            raise_exception=True,
        )

    def curl_download(self, prefix, folder):
        command = ["curl", "-sS", "--no-progress-meter", "--parallel", "--parallel-max", str(NUM_THREADS)]
        for name in NAMES:
            command += ["-o", str(folder / name), self.reading.format(prefix, name)]
        subprocess.run(command, check=True)

    def requests_upload(self, folder, prefix):
        def one(name):
            with (folder / name).open("rb") as file:
                self.session.post(
                    self.writing.format(prefix, name), data=_Blocks(file, OBJECT_BYTES)
                ).raise_for_status()

        in_threads(one)

    def google_upload(self, folder, prefix):
        in_threads(lambda name: self.bucket.blob(f"{prefix}/{name}").upload_from_filename(folder / name))

    def transfer_manager_upload(self, folder, prefix):
        transfer_manager.upload_many_from_filenames(
            self.bucket,
            NAMES,
            source_directory=str(folder),
            blob_name_prefix=f"{prefix}/",
            worker_type=transfer_manager.THREAD,
            max_workers=NUM_THREADS,
            raise_exception=True,
        )

    def curl_upload(self, folder, prefix):
        command = ["curl", "-sS", "--no-progress-meter", "--parallel", "--parallel-max", str(NUM_THREADS)]
        for name in NAMES:
            command += ["-X", "POST", "-H", "Expect:", "-T", str(folder / name), "-o", os.devnull]
            command += [self.writing.format(prefix, name), "--next", "-sS"]
        subprocess.run(command[:-2], check=True)


class _Blocks:
    """A file as a body that is sent in large blocks; with a length, so that requests sends it as it is."""

    def __init__(self, file, size):
        self.file, self.size = file, size

    def __len__(self):
        return self.size

    def __iter__(self):
        while block := self.file.read(BLOCK_BYTES):
            yield block


def race(contenders, rounds, before, after):
    """Let each take a turn in each round, the first one changing; return the best seconds of each."""
    best = {}
    order = list(contenders)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            before()
            began = time.perf_counter()
            contenders[name]()
            took = time.perf_counter() - began
            after()
            best[name] = min(took, best.get(name, took))
    return best


def report(title, best):
    print(f"\n{title}: {NUM_OBJECTS} objects of {OBJECT_BYTES / 1e6:g} MB, best of the rounds")
    for name, took in sorted(best.items(), key=lambda item: item[1]):
        print(f"  {took:6.3f} s  {NUM_OBJECTS * OBJECT_BYTES / took / 1e6:6.0f} MB/s  {name}")
    ratio = min(took for name, took in best.items() if name != "trainer.storage") / best["trainer.storage"]
    print(f"  ratio to the fastest other: {ratio:.2f} (promised: {PROMISED})")
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    work = Path(tempfile.mkdtemp(prefix="bench-storage-"))
    process, address = start_fake(work / "server.log")
    try:
        os.environ["STORAGE_EMULATOR_HOST"] = address
        make_bucket(address, "bench")
        source, staged = work / "source", work / "staged"
        source.mkdir()
        for name in NAMES:
            (source / name).write_bytes(os.urandom(OBJECT_BYTES))
        others = Others(address, "bench")

        def checked():
            for name in NAMES:
                assert (staged / name).stat().st_size == OBJECT_BYTES
            shutil.rmtree(staged)

        storage.publish(source, "gs://bench/down")
        downloads = {name: lambda do=do: do("down", staged) for name, do in others.downloads().items()}
        downloads["trainer.storage"] = lambda: storage.stage("gs://bench/down", staged)
        staging = report("staging", race(downloads, rounds, before=staged.mkdir, after=checked))

        def arrived():
            assert storage.list_names("gs://bench/up") == NAMES
            storage.delete_prefix("gs://bench/up")

        uploads = {name: lambda do=do: do(source, "up") for name, do in others.uploads().items()}
        uploads["trainer.storage"] = lambda: storage.publish(source, "gs://bench/up")
        publishing = report("publishing", race(uploads, rounds, before=lambda: None, after=arrived))
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(work)
    raise SystemExit(0 if min(staging, publishing) >= PROMISED else 1)


if __name__ == "__main__":
    main()
