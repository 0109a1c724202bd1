"""Component: a blessed model into the registry."""

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def push_model(
    push: str,
    evaluate: str,
    name: str,
    registry: str,
    root: str,
    run: str,
    examples: Input[Dataset],
    model: Input[Model],
    evaluation: Input[Artifact],
    serving_check: Input[Artifact],
    verdict: Input[Artifact],
    pushed_model: Output[Model],
):
    """Stores the model as the next version and makes it the champion."""
    from trainer import tasks

    tasks.push_model(
        push, evaluate, name, registry, root, run, examples, model, evaluation, serving_check, verdict, pushed_model
    )
