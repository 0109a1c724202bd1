"""Jobs of a preparation, in this process or in several: no pickles, each message is one line of JSON.

    with open_workers(source, config, local, seed, work, folder, num_workers=2) as workers:
        for place, result in workers.run(jobs, advance): ...

A worker is a fork of this process, which is ready at once. Where there are threads or TensorFlow, which a fork would leave
in pieces, it is `python -m trainer.data.workers` and makes the source for itself from the configuration.
"""

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

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


class _Fork:
    """A copy of this process that answers jobs; the face of `subprocess.Popen` as far as it is used here."""

    def __init__(self, workers: Workers, others: Sequence["_Fork"]) -> None:
        jobs, self_stdin = os.pipe()
        self_stdout, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                for signum in (signal.SIGINT, signal.SIGTERM):  # what this process does on them is not for its copies
                    signal.signal(signum, signal.SIG_DFL)
                for other in others:
                    os.close(other.stdin.fileno())  # or its end would not be seen there
                os.close(self_stdin)
                gc.freeze()  # what was there before is not looked through, and so not copied, again and again
                os.dup2(2, 1)  # whatever a library prints is none of our caller's answers
                os.environ["TRIREME_EVENTS"] = "0"
                with os.fdopen(jobs, encoding="utf-8") as given, os.fdopen(answers, "w", encoding="utf-8") as told:
                    _answer_jobs(lambda: workers, given, told)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)  # nothing of what the caller has open or wants to clean up is ours
        os.close(jobs)
        os.close(answers)
        self.stdin = os.fdopen(self_stdin, "w", encoding="utf-8")
        self.stdout = os.fdopen(self_stdout, encoding="utf-8")

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self._pid, 0)


def _spawned(settings: dict[str, Any]) -> subprocess.Popen:
    environment = {**os.environ, "TRIREME_EVENTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.data.workers"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment,
    )  # fmt: skip
    _tell(process, settings)
    return process


def _tell(process: Any, message: dict[str, Any]) -> None:
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # its end is reported by the listener


class _Processes:
    """Runs jobs in other processes; the same face as `Workers`."""

    def __init__(self, here: Workers, settings: dict[str, Any], num_workers: int) -> None:
        self._messages: queue.Queue[tuple[int, dict | None]] = queue.Queue()
        self._processes: list[Any] = []
        if "tensorflow" in sys.modules or threading.active_count() > 1:
            self._processes += [_spawned(settings) for _ in range(num_workers)]
        else:
            for _ in range(num_workers):
                self._processes.append(_Fork(here, self._processes))
        self._listeners = [
            threading.Thread(target=self._listen, args=(number, process), daemon=True)
            for number, process in enumerate(self._processes)
        ]
        for listener in self._listeners:
            listener.start()

    def _listen(self, number: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            if line.startswith("{"):
                self._messages.put((number, json.loads(line)))
        self._messages.put((number, None))

    def run(self, jobs: Sequence[Job], advance: Callable[[int, int], None]) -> Iterator[tuple[int, Any]]:
        """As `Workers.run`; the first jobs begin before anything is asked of what is returned."""
        waiting = list(enumerate(jobs))[::-1]
        doing: dict[int, int] = {}
        for number in range(len(self._processes)):
            self._next(number, waiting, doing)
        return self._results(waiting, doing, advance)

    def _results(
        self, waiting: list[tuple[int, Job]], doing: dict[int, int], advance: Callable[[int, int], None]
    ) -> Iterator[tuple[int, Any]]:
        while doing:
            number, message = self._messages.get()
            if message is None:
                raise WorldFailure(
                    "a process of the preparation ended without a word: killed, perhaps for want of memory;"
                    " run again, what is finished is not done again"
                )
            place = doing.get(number)
            if "errno" in message:
                raise OSError(message["errno"], message["error"])
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
            _tell(self._processes[number], job)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for listener in self._listeners:
            listener.join()  # what a process has still said is read, and nobody reads from what is closed
        for process in self._processes:
            with suppress(BrokenPipeError):  # a job that a killed process did not take is still in the buffer
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
    here = Workers(source, Plan.of(config, seed), work, folder)
    if num_workers == 0:
        yield here
        return
    places = {"work": str(work), "folder": str(folder), "local": str(local) if local else None}
    processes = _Processes(here, {"data": config.to_json(), "seed": seed, **places}, num_workers)
    try:
        yield processes
    finally:
        processes.close()


def serve() -> None:
    """Answers jobs from standard input on standard output, until there are no more."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers

    def workers() -> Workers:
        settings = json.loads(sys.stdin.readline())
        config = parse_json(DataConfig, settings["data"], path="data")
        local = Path(settings["local"]) if settings["local"] else None
        source = open_source(config, local, fetch=False)
        return Workers(source, Plan.of(config, settings["seed"]), Path(settings["work"]), Path(settings["folder"]))

    _answer_jobs(workers, sys.stdin, answers)


def _answer_jobs(workers: Callable[[], Workers], jobs: TextIO, answers: TextIO) -> None:
    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        do = workers().do
        for line in jobs:
            answer(result=do(json.loads(line), lambda count: answer(read=count)))
    except TriremeError as error:
        answer(error=str(error), exit_code=error.exit_code)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a write to an open file: the caller knows where
            answer(error=error.strerror, errno=error.errno)
        else:
            answer(error=f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), exit_code=1)


if __name__ == "__main__":
    serve()
