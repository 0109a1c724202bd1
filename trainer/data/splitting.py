"""Which split an example falls into: by position or by a key, the same on every machine and for every seed.

splitter = Splitter({"train": 80, "validation": 10, "test": 10})
splitter.by_position(start=0, count=1000)        # places in splitter.names [1000] uint8
splitter.by_key(["ann", "bob", "ann"])           # equal keys, equal split
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.data.statistics import hash64

_BLOCK = 100


class Splitter:
    """Shares of a whole.

    Args:
        shares: Percent by split; they add up to 100.
    """

    def __init__(self, shares: Mapping[str, int]) -> None:
        self.names = list(shares)
        self._of_percent = np.repeat(np.arange(len(shares), dtype=np.uint8), list(shares.values()))
        assert len(self._of_percent) == _BLOCK, shares

    def by_position(self, start: int, count: int) -> np.ndarray:
        """Splits of `count` consecutive examples [count] uint8.

        Of each hundred examples in a row exactly the share of each split falls there, in an order that is mixed anew for
        every hundred, so that sorted data is cut evenly too.

        Args:
            start: Position of the first, from 0.
            count: How many.
        """
        first, last = start // _BLOCK, (start + count - 1) // _BLOCK
        blocks = [self._block(number) for number in range(first, last + 1)]
        skip = start - first * _BLOCK
        return np.concatenate([*blocks, np.empty(0, np.uint8)])[skip : skip + count]

    def by_key(self, keys: Sequence[str]) -> np.ndarray:
        """Splits of examples by their keys [len(keys)] uint8; shares hold for the keys, on average."""
        places = [hash64(key) * _BLOCK >> 64 for key in keys]
        return self._of_percent[np.array(places, np.int64)] if places else np.empty(0, np.uint8)

    def _block(self, number: int) -> np.ndarray:
        order = np.argsort(mixed(np.arange(_BLOCK, dtype=np.uint64) + np.uint64(number * _BLOCK)), kind="stable")
        return self._of_percent[order]


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Well mixed 64 bits of each number, one to one: the finaliser of splitmix64 (Steele, Lea, Flood, 2014).

    Args:
        numbers: [n] uint64.
    """
    with np.errstate(over="ignore"):
        x = numbers + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
