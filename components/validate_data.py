"""Component: a prepared dataset held against what was expected of it."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Dataset, Input, Output


@dsl.component(base_image="trireme", install_kfp_package=False)
def validate_data(
    validate: str,
    schema: str,
    name: str,
    registry: str,
    root: str,
    run: str,
    examples: Input[Dataset],
    anomalies: Output[Artifact],
    page: Output[HTML],
):
    """Writes the anomalies and a page of statistics, and ends the run where one is an error."""
    from trainer import tasks

    tasks.validate_data(validate, schema, name, registry, examples, anomalies, page, noted_in=(root, run))
