"""Component: examples from their source into a prepared dataset."""

from kfp import dsl
from kfp.dsl import Dataset, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def prepare_data(data: str, seed: int, root: str, code: str, source: str, examples: Output[Dataset]) -> str:
    """Prepares the dataset that the data section describes, and answers where it is."""
    from trainer import tasks

    return tasks.prepare_data(data, seed, root, source, examples, code)
