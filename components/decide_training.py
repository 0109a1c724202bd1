"""Component: prepared data and the champion's record into whether to train. Never cached."""

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def decide_training(
    retrain: str, name: str, registry: str, root: str, run: str, examples: Input[Dataset], decision: Output[Artifact]
) -> bool:
    """Answers whether the data differs from what the champion was trained on."""
    from trainer import tasks

    return tasks.decide_training(retrain, name, registry, root, run, examples, decision)
