"""A process's place in its group: join the others, and say whom one lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.cluster import ClusterDescription, configure_collective_timeouts, explain_lost_peer
from trainer.config import GroupConfig, TrainConfig
from trainer.errors import TriremeError
from trainer.preemption import StopSignals
from trainer.progress import be_quiet, say
from trainer.rendezvous import wait_for_peers
from trainer.strategy import build_strategy, chosen_strategy


def join_group(
    config: TrainConfig,
    description: ClusterDescription | None,
    group: GroupConfig,
    stop: StopSignals,
    *,
    serves: bool = False,
) -> Any:
    """The strategy, once all processes that it needs are there; None for a process that serves a chief."""
    if description is not None:
        chosen_strategy(config, 0, description)  # a strategy that does not fit is refused before anybody is waited for
        if not description.is_chief:
            be_quiet()
        wait_for_peers(description, group.start_timeout_secs, report=say)
        configure_collective_timeouts(description)
    if serves:
        return None
    strategy = build_strategy(config, description)
    stop.take_back()
    return strategy


@contextmanager
def lost_peers_named(description: ClusterDescription | None) -> Iterator[None]:
    """TensorFlow's report of a broken collective becomes one sentence with the lost worker's name."""
    try:
        yield
    except TriremeError:
        raise
    except Exception as error:
        explained = explain_lost_peer(error, description) if description is not None else None
        if explained is None:
            raise
        raise explained from error
