"""Component: a prepared dataset into a trained, exported model."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def train_model(
    train: str, group: str, seed: int, name: str, root: str, code: str, examples: Input[Dataset], model: Output[Model]
):
    """Trains the model that the train section describes and exports it. `code` is only part of the cache's key."""
    from trainer import tasks

    tasks.train_model(train, group, seed, name, root, examples, model)
