"""Configuration → Kubeflow pipeline: prepare (→ validate) → train → evaluate, check → judge → (blessed) push; an exit task.

compile_pipeline(config, Path("digits.yaml"))      # the same configuration gives the same bytes
"""

import tempfile
from pathlib import Path
from typing import Any

from components.check_serving import check_serving
from components.evaluate_model import evaluate_model
from components.judge_model import judge_model
from components.prepare_data import prepare_data
from components.push_model import push_model
from components.record_outcome import record_outcome
from components.train_model import train_model
from components.validate_data import validate_data
from kfp import compiler, dsl
from trainer.data.schema import read_schema
from trainer.devices import REQUEST_VARIABLE
from trainer.errors import BadInput

from pipelines.config import ClusterConfig, Config


def build_pipeline(config: Config) -> Any:
    """The pipeline of a configuration.

    Its parameters are the sections as JSON strings, so that a section can be changed when a run is submitted and a
    step's inputs, which are its cache key, hold nothing but what the step depends on.
    """
    places = places_of(config)
    expected = _schema_text(config)

    @dsl.pipeline(name=config.name, description=f"Trains {config.train.model} on {config.data.subject}")
    def training(
        data: str = config.data.to_json(),
        train: str = config.train.to_json(),
        evaluate: str = config.evaluate.to_json(),
        serving: str = config.serving.to_json(),
        push: str = config.push.to_json(),
        group: str = config.cluster.group().to_json(),
        seed: int = config.seed,
        root: str = places.get("root"),
        registry: str = places.get("registry"),
    ):
        name = config.name
        outcome = record_outcome(name=name)
        with dsl.ExitHandler(outcome):
            prepared = prepare_data(data=data, seed=seed, root=root)
            trained = train_model(
                train=train, group=group, seed=seed, name=name, root=root, examples=prepared.outputs["examples"]
            )
            validated = []
            if config.validate_data is not None:
                validated.append(
                    validate_data(
                        validate=config.validate_data.to_json(),
                        schema=expected,
                        name=name,
                        registry=registry,
                        examples=prepared.outputs["examples"],
                    )
                )
                trained.after(*validated)
            measured = evaluate_model(
                evaluate=evaluate,
                name=name,
                registry=registry,
                examples=prepared.outputs["examples"],
                model=trained.outputs["model"],
            )
            checked = check_serving(serving=serving, model=trained.outputs["model"])
            judged = judge_model(
                evaluate=evaluate,
                name=name,
                model=trained.outputs["model"],
                evaluation=measured.outputs["evaluation"],
                serving_check=checked.outputs["serving_check"],
            )
            with dsl.If(judged.outputs["Output"] == True, name="blessed"):  # noqa: E712 - becomes a CEL expression
                pushed = push_model(
                    push=push,
                    evaluate=evaluate,
                    name=name,
                    registry=registry,
                    examples=prepared.outputs["examples"],
                    model=trained.outputs["model"],
                    evaluation=measured.outputs["evaluation"],
                    serving_check=checked.outputs["serving_check"],
                    verdict=judged.outputs["verdict"],
                )
        for task in (prepared, *validated, trained, measured, checked, judged, pushed, outcome):
            task.set_container_image(config.cluster.image)
        for task in (prepared, trained, measured, checked, pushed):
            _retry(task, config.cluster)
        for task in (prepared, trained):
            task.set_caching_options(config.cluster.cache)
        for task in (
            *validated,
            measured,
            checked,
            judged,
            pushed,
            outcome,
        ):  # these depend on the champion, which no cache key holds
            task.set_caching_options(False)
        _give_resources(trained, config.cluster)

    return training


def compile_pipeline(config: Config, file: Path) -> None:
    """Writes the pipeline of a configuration as Kubeflow's YAML, whole or not at all.

    Raises:
        BadInput: The file cannot be written.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise BadInput(f"--output = {file}: must end in .yaml")
    try:
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=file.parent) as folder:
            compiled = Path(folder) / "pipeline.yaml"
            compiler.Compiler().compile(build_pipeline(config), str(compiled))
            compiled.replace(file)
    except OSError as error:
        raise BadInput(f"--output = {file}: cannot be written: {error.strerror}") from None


def places_of(config: Config, root: str | None = None) -> dict[str, str]:
    """Pipeline arguments that say where things are: `root` and `registry`, as far as they are known."""
    root = root or config.cluster.pipeline_root
    registry = config.push.registry or (f"{root.rstrip('/')}/models" if root else None)
    return {key: value for key, value in (("root", root), ("registry", registry)) if value}


def _schema_text(config: Config) -> str:
    """The content of `validate_data.schema_file`, which no container could open; empty where there is none.

    Raises:
        BadInput: It cannot be read, or is no schema.
    """
    if config.validate_data is None or config.validate_data.schema_file is None:
        return ""
    file = Path(config.validate_data.schema_file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise BadInput(f"validate_data.schema_file = {file}: cannot be read: {reason}") from None
    return read_schema(text, path=str(file)).to_text()


def _retry(task: dsl.PipelineTask, cluster: ClusterConfig) -> None:
    if cluster.retries:
        # kfp's own longest pause of an hour in total would end the retries of a long training.
        task.set_retry(cluster.retries, backoff_duration="30s", backoff_factor=2.0, backoff_max_duration="86400s")


def _give_resources(task: dsl.PipelineTask, cluster: ClusterConfig) -> None:
    if cluster.cpu:
        task.set_cpu_request(cluster.cpu)
    if cluster.memory:
        task.set_memory_request(cluster.memory)
        task.set_memory_limit(cluster.memory)
    if cluster.accelerator:
        task.set_accelerator_type(cluster.accelerator.type)
        task.set_accelerator_limit(cluster.accelerator.count)
        if "gpu" in cluster.accelerator.type:
            # A GPU image that trains on the CPU all the same is the classic fault: the trainer counts what it sees.
            task.set_env_variable(REQUEST_VARIABLE, str(cluster.accelerator.count))
