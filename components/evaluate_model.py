"""Component: a model and the champion measured on the test split."""

from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def evaluate_model(
    evaluate: str,
    name: str,
    registry: str,
    root: str,
    run: str,
    examples: Input[Dataset],
    model: Input[Model],
    evaluation: Output[Artifact],
    metrics: Output[Metrics],
    classification_metrics: Output[ClassificationMetrics],
):
    """Measures the exported model, and the champion on the same examples."""
    from trainer import tasks

    tasks.evaluate_model(
        evaluate, name, registry, examples, model, evaluation, metrics, classification_metrics, noted_in=(root, run)
    )
