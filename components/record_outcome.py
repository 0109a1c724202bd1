"""Component: how the run ended. Runs always."""

from kfp import dsl
from kfp.dsl import Artifact, Output, PipelineTaskFinalStatus


@dsl.component(base_image="trireme", install_kfp_package=False)
def record_outcome(
    name: str, root: str, run: str, notify: str, status: PipelineTaskFinalStatus, outcome: Output[Artifact]
):
    """Records the state of the run and the error that ended it, and tells those who want to know."""
    from trainer import tasks

    tasks.record_outcome(name, root, run, notify, status.state, status.error_message or "", outcome)
