"""TensorBoard's log files, written without TensorBoard: scalars, the graph, and a profile.

board = Board("logs", profile_steps=(100, 110))
board.scalars(step, {"train/loss": 0.3})
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import WorldFailure, reason_of


class Board:
    """Writes event files into one folder; without a folder it does nothing.

    Args:
        folder: A folder or `gs://` prefix; None: nothing is written.
        profile_steps: First and last step (from 1) that the profiler watches. None: it never runs.

    Raises:
        WorldFailure: The folder cannot be made or written.
    """

    def __init__(self, folder: str | None, profile_steps: tuple[int, int] | None = None) -> None:
        self._folder, self._profile = folder, profile_steps if folder else None
        self._profiling = self._graph_written = False
        self._writer = None
        if folder is not None:
            import tensorflow as tf

            try:
                self._writer = tf.summary.create_file_writer(folder)
            except tf.errors.OpError as error:
                raise WorldFailure(
                    f"train.tensorboard_dir = {folder}: cannot be written: {reason_of(error)}"
                ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one point of each named curve."""
        if self._writer is None:
            return
        import tensorflow as tf

        # tf.summary.scalar is part of the tensorboard package; what it writes is this.
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
        )
        with self._writer.as_default():
            for tag, value in values.items():
                tf.summary.write(tag, tf.constant(value, tf.float32), step=step, metadata=metadata)

    def graph(self, make: Callable[[], Any]) -> None:
        """Writes the graph that `make` gives, the first time it is called."""
        if self._writer is None or self._graph_written:
            return
        import tensorflow as tf

        self._graph_written = True
        with self._writer.as_default():
            tf.summary.graph(make())

    def steps_until_profile(self, step: int) -> int | None:
        """How many steps may run after `step` before the profiler must be started or stopped. None: any number."""
        if self._profile is None:
            return None
        first, last = self._profile
        for edge in (first - 1, last):
            if step < edge:
                return edge - step
        return None

    def profile(self, step: int) -> None:
        """Starts or stops the profiler where `step` steps are done."""
        if self._profile is None:
            return
        import tensorflow as tf

        first, last = self._profile
        if not self._profiling and first - 1 <= step < last:
            tf.profiler.experimental.start(self._folder)
            self._profiling = True
        elif self._profiling and step >= last:
            self._stop_profile()

    def flush(self) -> None:
        """Hands on what was written so far, so that a person can look at it."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Ends the files."""
        if self._profiling:
            self._stop_profile()
        if self._writer is not None:
            self._writer.close()

    def _stop_profile(self) -> None:
        import tensorflow as tf

        self._profiling, self._profile = False, None
        tf.profiler.experimental.stop()
