"""Component: a prepared dataset into a trained, exported model, by a job of many pods."""

from kfp import dsl
from kfp.dsl import Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def train_distributed(
    train: str, group: str, seed: int, name: str, root: str, code: str, examples: str, model: Output[Model]
):
    """Trains as `train_model` does. `examples` is where the dataset is: an artifact would be fetched into this pod."""
    from trainer import tasks

    tasks.train_distributed(train, group, seed, name, root, examples, model)
