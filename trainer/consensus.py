"""One decision for all workers: the chief's clock, and anybody's SIGTERM, reach every worker at the same step.

    workers = Consensus(strategy, description)
    stop, steps = workers.add([float(asked), steps if workers.is_chief else 0.0])

A worker that stopped, saved or left alone would leave the others waiting in a collective for ever. With one worker nothing
is exchanged.
"""

from collections.abc import Sequence
from typing import Any

from trainer.cluster import ClusterDescription


def add_over_processes(strategy: Any, values: Any, local_replicas: int) -> Any:
    """The sum of every process's values, inside a graph or not.

    Args:
        strategy: The strategy that all processes share.
        values: This process's own, a tensor.
        local_replicas: Replicas of each process.
    """
    import tensorflow as tf

    def replica(own: Any) -> Any:
        context = tf.distribute.get_replica_context()
        first = tf.equal(context.replica_id_in_sync_group % local_replicas, 0)  # one replica speaks for each process
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(first, own, tf.zeros_like(own)))

    return strategy.experimental_local_results(strategy.run(replica, args=(values,)))[0]


class Consensus:
    """Sums of numbers over the workers of a synchronous group; every worker must call in the same order.

    Args:
        strategy: The strategy that all workers share.
        description: Who trains; None: this process is alone.

    Attributes:
        num_workers: Processes that must agree.
        is_chief: Whether this process saves, writes and speaks.
    """

    def __init__(self, strategy: Any, description: ClusterDescription | None) -> None:
        import tensorflow as tf

        synchronous = description is not None and not description.parameter_servers
        self.num_workers = description.num_workers if description is not None and synchronous else 1
        self.is_chief = description is None or description.is_chief
        if self.num_workers == 1:
            return
        local = strategy.num_replicas_in_sync // self.num_workers

        self._add = tf.function(lambda values: add_over_processes(strategy, values, local))

    def add(self, values: Sequence[float]) -> list[float]:
        """The sums of the workers' values, the same on all of them."""
        if self.num_workers == 1:
            return list(values)
        import tensorflow as tf

        return self._add(tf.constant(values, tf.float64)).numpy().tolist()

    def from_chief(self, value: int) -> int:
        """The chief's number, on every worker."""
        return int(self.add([float(value) if self.is_chief else 0.0])[0])

    def wait(self) -> None:
        """Returns when every worker has come here."""
        self.add([0.0])
