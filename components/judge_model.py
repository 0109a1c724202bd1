"""Component: an evaluation into a verdict."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Markdown, Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def judge_model(
    evaluate: str,
    name: str,
    root: str,
    run: str,
    model: Input[Model],
    evaluation: Input[Artifact],
    serving_check: Input[Artifact],
    verdict: Output[Artifact],
    report: Output[HTML],
    summary: Output[Markdown],
) -> bool:
    """Applies the thresholds, writes verdict and report, and answers whether the model is blessed."""
    from trainer import tasks

    return tasks.judge_model(evaluate, name, root, run, model, evaluation, serving_check, verdict, report, summary)
