"""Component: an export asked in a fresh process, as a server would ask it."""

from kfp import dsl
from kfp.dsl import Artifact, Input, Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def check_serving(serving: str, root: str, run: str, model: Input[Model], serving_check: Output[Artifact]):
    """Compares the export's answers with the trainer's, sends hostile input, and measures latency and memory."""
    from trainer import tasks

    tasks.check_serving(serving, model, serving_check, noted_in=(root, run))
