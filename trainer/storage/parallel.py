"""Do one thing to many items in threads; the first failure stops what has not begun and is raised."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each(do: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """Return `[do(item) for item in items]`, computed by up to `num_threads` threads.

    Raises:
        Exception: Whatever the first failing call raised.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="storage") as pool:
        futures = [pool.submit(do, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
    for future in futures:
        if not future.cancelled() and (error := future.exception()):
            raise error
    return [future.result() for future in futures]
