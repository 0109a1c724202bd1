"""How many steps one call of the compiled loop runs: about half a second's worth, so that signals and the display wait no
longer than that and Python costs nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_PER_LOOP = 0.5
_FIRST_STEPS = 8
_MOST_STEPS_PER_LOOP = 512


class Pace:
    """Measures calls and says how many steps the next one runs.

    Args:
        fixed: Steps of every call. None: chosen by the clock.
        clock: Seconds that only grow.

    Attributes:
        steps: How many the next call runs at most.
        seconds: What the last call took.
    """

    def __init__(self, fixed: int | None, clock: Callable[[], float]) -> None:
        self._fixed, self._clock = fixed, clock
        self.steps = fixed or _FIRST_STEPS
        self.seconds = 0.0
        self._calls = 0

    @contextmanager
    def measured(self, num_steps: int) -> Iterator[None]:
        """Measures one call of `num_steps` steps."""
        started = self._clock()
        yield
        self.seconds = self._clock() - started
        self._calls += 1
        if self._calls > 1 and self._fixed is None:  # the first call compiles
            wanted = _SECONDS_PER_LOOP * num_steps / max(self.seconds, 1e-6)
            self.steps = int(min(max(1, wanted), self.steps * 4, _MOST_STEPS_PER_LOOP))
