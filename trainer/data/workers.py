"""Jobs of a preparation, in this process or in several: no pickles, each message is one line of JSON.

    with open_workers(config, seed, work, folder, num_workers=2) as workers:
        for job, result in workers.run(jobs, advance): ...

A worker is `python -m trainer.data.workers`; it makes the source for itself from the configuration.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import DataConfig, parse_json
from trainer.data.parts import Plan, write_part
from trainer.data.shards import Layout, write_shard
from trainer.data.source import Source
from trainer.data.sources import open_source
from trainer.errors import EXIT_BAD_INPUT, BadInput, TriremeError, WorldFailure

Job = dict[str, Any]
"""`{"part": 3}`, or `{"layout": {…}, "split": "train", "shard": 0}`."""


class Workers:
    """Runs jobs one after another, here."""

    def __init__(self, source: Source, plan: Plan, work: Path, folder: Path) -> None:
        self._source, self._plan, self._work, self._folder = source, plan, work, folder

    def run(self, jobs: Sequence[Job], advance: Callable[[int, int], None]) -> Iterator[tuple[int, Any]]:
        """Yields the place of each job and its result as it ends.

        Args:
            jobs: What is to be done.
            advance: Called with a job's place and the examples it has read.

        Raises:
            BadInput: A record or a file is bad.
            WorldFailure: A disk is full, or a worker was killed.
        """
        for place, job in enumerate(jobs):
            yield place, self.do(job, lambda count, place=place: advance(place, count))

    def do(self, job: Job, advance: Callable[[int], None]) -> Any:
        """One job's result."""
        if "part" in job:
            return write_part(self._source, job["part"], self._plan, self._work, advance)
        layout = Layout(**job["layout"])
        return write_shard(layout, job["split"], job["shard"], self._work, self._folder).model_dump()


class _Processes:
    """Runs jobs in other processes; the same face as `Workers`."""

    def __init__(self, settings: dict[str, Any], num_workers: int) -> None:
        environment = {**os.environ, "TRIREME_EVENTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
        )
        self._messages: queue.Queue[tuple[int, dict | None]] = queue.Queue()
        self._processes = []
        for number in range(num_workers):
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer.data.workers"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment,
            )  # fmt: skip
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(number, process), daemon=True).start()
            self._tell(number, settings)

    def _listen(self, number: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            if line.startswith("{"):
                self._messages.put((number, json.loads(line)))
        self._messages.put((number, None))

    def _tell(self, number: int, message: dict[str, Any]) -> None:
        stream = self._processes[number].stdin
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except BrokenPipeError:
            pass  # its end is reported by the listener

    def run(self, jobs: Sequence[Job], advance: Callable[[int, int], None]) -> Iterator[tuple[int, Any]]:
        """As `Workers.run`."""
        waiting = list(enumerate(jobs))[::-1]
        doing: dict[int, int] = {}
        for number in range(len(self._processes)):
            self._next(number, waiting, doing)
        while doing:
            number, message = self._messages.get()
            if message is None:
                raise WorldFailure(
                    "a process of the preparation ended without a word: killed, perhaps for want of memory;"
                    " run again, what is finished is not done again"
                )
            place = doing.get(number)
            if "error" in message:
                kind = BadInput if message["exit_code"] == EXIT_BAD_INPUT else WorldFailure
                raise kind(message["error"])
            if "read" in message:
                advance(place, message["read"])
                continue
            del doing[number]
            self._next(number, waiting, doing)
            yield place, message["result"]

    def _next(self, number: int, waiting: list[tuple[int, Job]], doing: dict[int, int]) -> None:
        if waiting:
            doing[number], job = waiting.pop()
            self._tell(number, job)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@contextmanager
def open_workers(
    source: Source, config: DataConfig, local: Path | None, seed: int, work: Path, folder: Path, num_workers: int
) -> Iterator[Any]:
    """Workers for the block's time.

    Args:
        source: The source, for the jobs that are done here.
        config: Its configuration, for other processes.
        local: Where files of a bucket were staged; None where they are here anyway.
        seed: Seed of the permutation.
        work: Folder of the parts.
        folder: Folder of the shards.
        num_workers: Other processes; 0: none.
    """
    if num_workers == 0:
        yield Workers(source, Plan.of(config, seed), work, folder)
        return
    places = {"work": str(work), "folder": str(folder), "local": str(local) if local else None}
    processes = _Processes({"data": config.to_json(), "seed": seed, **places}, num_workers)
    try:
        yield processes
    finally:
        processes.close()


def serve() -> None:
    """Answers jobs from standard input on standard output, until there are no more."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        settings = json.loads(sys.stdin.readline())
        config = parse_json(DataConfig, settings["data"], path="data")
        local = Path(settings["local"]) if settings["local"] else None
        source = open_source(config, local, fetch=False)
        plan = Plan.of(config, settings["seed"])
        workers = Workers(source, plan, Path(settings["work"]), Path(settings["folder"]))
        for line in sys.stdin:
            answer(result=workers.do(json.loads(line), lambda count: answer(read=count)))
    except TriremeError as error:
        answer(error=str(error), exit_code=error.exit_code)
    except OSError as error:
        answer(error=f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), exit_code=1)


if __name__ == "__main__":
    serve()
