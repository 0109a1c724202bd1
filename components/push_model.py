"""Component: a blessed model into the registry."""

from kfp import dsl
from kfp.dsl import Artifact, Input, Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def push_model(
    push: str,
    name: str,
    registry: str,
    root: str,
    run: str,
    model: Input[Model],
    evaluation: Input[Artifact],
    verdict: Input[Artifact],
    pushed_model: Output[Model],
):
    """Stores the model as the next version and makes it the champion."""
    from trainer import tasks

    tasks.push_model(push, name, registry, root, run, model, evaluation, verdict, pushed_model)
