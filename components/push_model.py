"""Component: a blessed model into the registry."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Dataset, Input, Model, Output


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
    report: Output[HTML],
):
    """Stores the model as the next version and makes it the champion."""
    from trainer import tasks

    judged = (evaluation, serving_check, verdict)
    tasks.push_model(push, evaluate, name, registry, root, run, examples, model, *judged, pushed_model, report)
