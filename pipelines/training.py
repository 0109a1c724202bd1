"""Configuration → Kubeflow pipeline: prepare (→ validate) → train → evaluate, check → judge → (blessed) push; an exit task.

compile_pipeline(config, Path("digits.yaml"))      # the same configuration gives the same bytes
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from kfp import compiler, dsl

from components.check_serving import check_serving
from components.decide_training import decide_training
from components.evaluate_model import evaluate_model
from components.fingerprint_data import fingerprint_data
from components.judge_model import judge_model
from components.prepare_data import prepare_data
from components.push_model import push_model
from components.record_outcome import record_outcome
from components.train_distributed import train_distributed
from components.train_model import train_model
from components.validate_data import validate_data
from pipelines.config import ClusterConfig, Config
from pipelines.pods import dress, dress_training, give_addresses, give_run
from trainer.config import JOB_VARIABLE, SHARDS_FOR_MOST
from trainer.data.fingerprint import source_of
from trainer.data.schema import read_schema
from trainer.errors import BadInput
from trainer.launch.job import literal
from trainer.provenance import source_digest

_LONGEST_SCHEMA_BYTES = 96 * 1024  # Linux starts no process with an argument over 128 KB

SECTIONS = ("data", "train", "evaluate", "serving", "push", "retrain")


def build_pipeline(config: Config) -> Any:
    """The pipeline of a configuration.

    Its parameters are the sections as JSON strings, so that a section can be changed when a run is submitted and a
    step's inputs, which are its cache key, hold nothing but what the step depends on.
    """
    parameters = parameters_of(config)
    notify = notify_of(config)
    gated = config.retrain.when == "data_changed"
    expected = schema_text(config)
    job = config.cluster.job()

    @dsl.pipeline(name=config.name, description=f"Trains {config.train.model} on {config.data.subject}")
    def training(
        data: str = parameters["data"],
        train: str = parameters["train"],
        evaluate: str = parameters["evaluate"],
        serving: str = parameters["serving"],
        push: str = parameters["push"],
        retrain: str = parameters["retrain"],
        group: str = parameters["group"],
        seed: int = parameters["seed"],
        root: str = parameters.get("root"),
        registry: str = parameters.get("registry"),
    ):
        name, run, code = config.name, dsl.PIPELINE_JOB_ID_PLACEHOLDER, code_identity(config)
        cached, retried, others = [], [], []  # the last: they depend on the champion or on files, which no key holds
        outcome = record_outcome(name=name, root=root, run=run, notify=notify)
        others.append(outcome)
        with dsl.ExitHandler(outcome), contextlib.ExitStack() as stack:
            found = ""
            if source_of(config.data) is not None:
                # Servers that do not know it leave the placeholder as it is, or empty: then the window ends when this begins.
                moment = dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER
                fingerprinted = fingerprint_data(data=data, seed=seed, root=root, code=code, run=run, scheduled=moment)
                others.append(fingerprinted)
                retried.append(fingerprinted)
                found = fingerprinted.output
            prepared = prepare_data(data=data, seed=seed, root=root, code=code, source=found)
            examples = prepared.outputs["examples"]
            validated = []
            if config.validate_data is not None:
                validated.append(
                    validate_data(
                        validate=config.validate_data.to_json(),
                        schema=expected,
                        name=name,
                        registry=registry,
                        root=root,
                        run=run,
                        examples=examples,
                    )
                )
                others += validated
            if gated:
                decided = decide_training(
                    retrain=retrain, name=name, registry=registry, root=root, run=run, examples=examples
                )
                others.append(decided)
                retried.append(decided)
                stack.enter_context(dsl.If(decided.outputs["Output"] == True, name="needed"))  # noqa: E712 - becomes CEL
            how = {"train": train, "group": group, "seed": seed, "name": name, "root": root, "code": code}
            if job is None:
                trained = train_model(**how, examples=examples)
            else:
                trained = train_distributed(**how, examples=prepared.outputs["Output"])
            (decided if gated else trained).after(*validated)
            model = trained.outputs["model"]
            measured = evaluate_model(
                evaluate=evaluate, name=name, registry=registry, root=root, run=run, examples=examples, model=model
            )
            evaluation = measured.outputs["evaluation"]
            checked = check_serving(serving=serving, root=root, run=run, model=model)
            judged = judge_model(
                evaluate=evaluate,
                name=name,
                root=root,
                run=run,
                model=model,
                evaluation=evaluation,
                serving_check=checked.outputs["serving_check"],
            )
            with dsl.If(judged.outputs["Output"] == True, name="blessed"):  # noqa: E712 - becomes a CEL expression
                pushed = push_model(
                    push=push,
                    evaluate=evaluate,
                    name=name,
                    registry=registry,
                    root=root,
                    run=run,
                    examples=examples,
                    model=model,
                    evaluation=evaluation,
                    serving_check=checked.outputs["serving_check"],
                    verdict=judged.outputs["verdict"],
                )
        cached += [prepared, trained]
        others += [measured, checked, judged, pushed]
        for task in (*cached, *others):
            task.set_container_image(config.cluster.image)
            dress(task, config.cluster)
        for task in (*retried, prepared, trained, measured, checked, pushed):
            _retry(task, config.cluster)
        for task in cached:
            task.set_caching_options(config.cluster.cache)
        for task in others:
            task.set_caching_options(False)
        if job is None:
            dress_training(trained, config.cluster)
        else:  # its pods are dressed by the template in it
            trained.set_env_variable(JOB_VARIABLE, literal(job.to_json()))
        if config.notify is not None:
            give_addresses(outcome, config.notify)
            for task in cached:  # the others are told their run; it must be no parameter where it would undo the cache
                give_run(task)

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


def parameters_of(config: Config, root: str | None = None) -> dict[str, Any]:
    """Arguments of the pipeline: each section of a step as one JSON string, the seed, and the places that are known."""
    sections = {name: getattr(config, name).to_json() for name in SECTIONS}
    workers = config.cluster.num_workers
    if config.data.min_shards is None and workers > SHARDS_FOR_MOST:
        # Only such groups: another number of workers must not prepare the data again.
        sections["data"] = config.data.model_copy(update={"min_shards": workers}).to_json()
    return {**sections, "group": config.cluster.group().to_json(), "seed": config.seed, **places_of(config, root)}


def code_identity(config: Config) -> str:
    """The source and the image: what else a step depends on, and Kubeflow's cache knows nothing of.

    The cache compares an image by its name only; the source is here because it is what a person changes, and because a
    tag can be moved.
    """
    return f"{source_digest()} in {config.cluster.image}"


def notify_of(config: Config) -> str:
    """The notify section as JSON, with the address of Kubeflow's pages filled in; empty where nobody is told."""
    if config.notify is None:
        return ""
    link = config.notify.run_link or config.kubeflow.host
    return config.notify.model_copy(update={"run_link": link}).to_json()


def places_of(config: Config, root: str | None = None) -> dict[str, str]:
    """Pipeline arguments that say where things are: `root` and `registry`, as far as they are known."""
    root = root or config.cluster.pipeline_root
    registry = config.push.registry or (f"{root.rstrip('/')}/models" if root else None)
    return {key: value for key, value in (("root", root), ("registry", registry)) if value}


def schema_text(config: Config) -> str:
    """The content of `validate_data.schema_file`, which no container could open; empty where there is none.

    Raises:
        BadInput: It cannot be read, or is no schema.
    """
    if config.validate_data is None or config.validate_data.schema_file is None:
        return ""
    file = Path(config.validate_data.schema_file)
    shown = f"validate_data.schema_file = {json.dumps(str(file))}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        looked = f" ({file.absolute()}; a relative path counts from where the command is started)"
        raise BadInput(f"{shown}: cannot be read: {reason}{'' if file.is_absolute() else looked}") from None
    schema = read_schema(text, path=str(file)).to_text()
    if len(schema.encode()) > _LONGEST_SCHEMA_BYTES:
        raise BadInput(
            f"{shown}: has {len(schema.encode()):,} bytes; it travels as an argument, which"
            f" holds {_LONGEST_SCHEMA_BYTES:,}: leave out `values` of features that have many"
        )
    return schema


def _retry(task: dsl.PipelineTask, cluster: ClusterConfig) -> None:
    if cluster.retries:
        # kfp's own longest pause of an hour in total would end the retries of a long training.
        task.set_retry(cluster.retries, backoff_duration="30s", backoff_factor=2.0, backoff_max_duration="86400s")
