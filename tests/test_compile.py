"""The compiled pipeline: the same bytes each time, and what the cluster is asked for."""

import json
import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY

from pipelines.cli import main
from pipelines.config import load_config
from pipelines.training import compile_pipeline, parameters_of
from trainer.errors import BadInput


@pytest.fixture
def compiled(configuration, tmp_path):
    def compile_with(*settings):
        file = tmp_path / "pipeline.yaml"
        compile_pipeline(load_config(configuration(), settings), file)
        return next(iter(yaml.safe_load_all(file.read_text())))

    return compile_with


def tasks_of(spec):
    tasks = dict(spec["root"]["dag"]["tasks"])
    for component in spec["components"].values():
        tasks |= component.get("dag", {}).get("tasks", {})
    return tasks


def test_compiling_twice_in_two_processes_gives_the_same_bytes(tmp_path):
    written = []
    for hash_seed in ("1", "2"):
        file = tmp_path / f"{hash_seed}.yaml"
        command = [sys.executable, "-m", "pipelines.cli", "compile", "configs/digits.yaml", "-o", str(file)]
        subprocess.run(command, cwd=REPOSITORY, check=True, env={"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"})
        written.append(file.read_bytes())
    assert written[0] == written[1]
    assert b"prepare-data" in written[0]


def test_nothing_is_installed_when_a_container_starts(compiled):
    assert "pip install" not in json.dumps(compiled())


def test_each_section_is_one_json_string_and_reaches_its_own_steps_only(compiled):
    spec = compiled("train.epochs=9")
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert json.loads(parameters["train"]["defaultValue"])["epochs"] == 9
    takers = {
        section: {
            name for name, task in tasks_of(spec).items() if section in task.get("inputs", {}).get("parameters", {})
        }
        for section in ("data", "train", "evaluate", "serving", "push")
    }
    assert takers == {
        "data": {"prepare-data"},
        "train": {"train-model"},
        "evaluate": {"evaluate-model", "judge-model", "push-model"},
        "serving": {"check-serving"},
        "push": {"push-model"},
    }


def test_the_exit_task_runs_whatever_happened(compiled):
    outcome = tasks_of(compiled())["record-outcome"]
    assert outcome["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_training_asks_for_what_the_cluster_section_says(compiled):
    spec = compiled(
        "cluster.image=example/trireme:7",
        "cluster.cpu='4'",
        "cluster.memory=16Gi",
        "cluster.accelerator={type: nvidia.com/gpu, count: 2}",
        "train.strategy=mirrored",
        "cluster.retries=5",
    )
    executors = spec["deploymentSpec"]["executors"]
    resources = executors["exec-train-model"]["container"]["resources"]
    assert resources["resourceCpuRequest"] == "4"
    assert resources["resourceMemoryRequest"] == resources["resourceMemoryLimit"] == "16Gi"
    assert resources["accelerator"]["resourceCount"] == "2"
    assert resources["accelerator"]["resourceType"] == "nvidia.com/gpu"
    assert {executor["container"]["image"] for executor in executors.values()} == {"example/trireme:7"}
    tasks = tasks_of(spec)
    assert tasks["train-model"]["retryPolicy"]["maxRetryCount"] == 5
    assert "resources" not in executors["exec-prepare-data"]["container"]


GROUP = ("cluster.num_workers=4", "train.strategy=multi_worker_mirrored", "cluster.pipeline_root=gs://bucket/root")


@pytest.mark.parametrize("launcher", ["trainjob", "tfjob"])
def test_a_training_of_many_pods_takes_the_place_of_the_one_pods(compiled, launcher):
    gpu = ("cluster.gpu={type: nvidia-l4, count: 2}", "cluster.memory=8Gi", "cluster.timeout_secs=3600")
    one, many = (compiled(*GROUP, *gpu, f"cluster.launcher={kind}") for kind in ("local", launcher))
    before, after = tasks_of(one)["train-model"], tasks_of(many)["train-distributed"]
    assert tasks_of(one).keys() - tasks_of(many).keys() == {"train-model"}
    assert tasks_of(many).keys() - tasks_of(one).keys() == {"train-distributed"}
    for spec, name in ((one, "train-model"), (many, "train-distributed")):
        assert spec["components"][f"comp-{name}"]["outputDefinitions"]["artifacts"].keys() == {"model"}
        model = tasks_of(spec)["evaluate-model"]["inputs"]["artifacts"]["model"]["taskOutputArtifact"]
        assert model == {"outputArtifactKey": "model", "producerTask": name}
    inputs = after["inputs"]["parameters"]
    assert inputs.keys() - before["inputs"]["parameters"].keys() == {"examples"}  # the cache compares no pod's settings
    assert "artifacts" not in after["inputs"]  # an artifact would be fetched into the launching pod
    assert inputs["examples"]["taskOutputParameter"] == {"outputParameterKey": "Output", "producerTask": "prepare-data"}
    assert after["cachingOptions"] == before["cachingOptions"]
    assert after["retryPolicy"] == before["retryPolicy"]
    (variable,) = many["deploymentSpec"]["executors"]["exec-train-distributed"]["container"]["env"]
    assert variable["name"] == "TRIREME_JOB"
    job = json.loads(variable["value"])
    assert (job["launcher"], job["deadline_secs"]) == (launcher, 3600)
    assert job["pod"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": "2"}


def test_the_launching_pod_asks_for_no_accelerator_and_no_time_limit(configuration, tmp_path):
    settings = ("cluster.gpu={type: nvidia-l4}", "cluster.memory=8Gi", "cluster.shared_memory=1Gi",
                "cluster.cpu='4'", "cluster.timeout_secs=900", "cluster.launcher=trainjob",
                "cluster.tolerations=[{operator: Exists}]")  # fmt: skip
    compile_pipeline(load_config(configuration(), [*GROUP, *settings]), tmp_path / "p.yaml")
    spec, *others = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
    container = spec["deploymentSpec"]["executors"]["exec-train-distributed"]["container"]
    assert "resources" not in container
    assert [one["name"] for one in container["env"]] == ["TRIREME_JOB"]
    for other in others:
        pods = other["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        assert "exec-train-distributed" not in pods


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("cluster.pipeline_root=/data",), 'cluster.pipeline_root = "/data": the pods of a trainjob fetch the data'),
        (("cluster.pull_policy=Always",), 'cluster.pull_policy = "Always": cannot be said of a TrainJob'),
        (("cluster.gang=kueue",), 'cluster.gang = "kueue": admits what waits in one of its queues'),
        (("cluster.queue=vision",), 'cluster.queue = "vision": is of Kueue or Volcano: say which'),
        (("cluster.gang=volcano",), 'cluster.gang = "volcano": a TrainJob\'s scheduler stands in its runtime'),
        (("cluster.launcher=tfjob", "cluster.runtime=mine"), 'cluster.runtime = "mine": is a TrainJob\'s'),
        (
            ("cluster.launcher=local", "cluster.topology=zone"),
            "is for a job of many pods, and cluster.launcher is local",
        ),
        (
            ("cluster.num_workers=1000", "cluster.num_parameter_servers=2", "train.strategy=parameter_server"),
            "cluster.num_workers = 1000: makes 1003 pods with 2 parameter servers, and at most 1000",
        ),
        (("cluster.pipeline_root=gs://",), 'cluster.pipeline_root = "gs://": must be a folder, or gs:// with a bucket'),
        (
            ("cluster.memory=2Gi", "cluster.shared_memory=2Gi"),
            'cluster.shared_memory = "2Gi": counts as memory, of which cluster.memory allows 2Gi',
        ),
        (("cluster.timeout_secs=99999999999",), "cluster.timeout_secs = 99999999999: must be at most 2147483647"),
        (
            ("cluster.volumes=[{name: mine, path: /tmp}]",),
            "is taken by the pods' scratch folder",
        ),
        (("cluster.launcher=jobset",), "cluster.launcher = \"jobset\": must be one of 'local', 'trainjob' or 'tfjob'"),
    ],
)
def test_what_a_job_of_many_pods_cannot_do_is_refused(configuration, tmp_path, capsys, settings, message):
    words = [word for setting in (*GROUP, "cluster.launcher=trainjob", *settings) for word in ("--set", setting)]
    assert main(["compile", str(configuration()), "-o", str(tmp_path / "p.yaml"), *words]) == 2
    assert message in capsys.readouterr().err


def test_only_steps_that_depend_on_nothing_but_their_inputs_are_cached(compiled):
    cached = {name for name, task in tasks_of(compiled()).items() if task.get("cachingOptions", {}).get("enableCache")}
    assert {"prepare-data", "train-model"} <= cached
    assert not cached & {"evaluate-model", "judge-model", "push-model", "record-outcome"}
    uncached = tasks_of(compiled("cluster.cache=false"))
    assert not uncached["train-model"].get("cachingOptions", {}).get("enableCache")


def test_the_places_are_asked_for_when_the_configuration_names_none(compiled):
    parameters = compiled()["root"]["inputDefinitions"]["parameters"]
    assert "defaultValue" not in parameters["root"]
    parameters = compiled("cluster.pipeline_root=gs://bucket/runs/")["root"]["inputDefinitions"]["parameters"]
    assert parameters["registry"]["defaultValue"] == "gs://bucket/runs/models"


@pytest.mark.parametrize("target", ["missing/p.yaml", "p.txt"])
def test_an_output_that_cannot_be_written_is_refused(configuration, tmp_path, capsys, target):
    assert main(["compile", str(configuration()), "-o", str(tmp_path / target)]) == 2
    assert "trireme: --output = " in capsys.readouterr().err
    assert not (tmp_path / target).exists()


def test_only_a_large_group_of_workers_prepares_the_data_anew(configuration):
    def data_of(num_workers, *settings):
        settings = [f"cluster.num_workers={num_workers}", "train.strategy=multi_worker_mirrored", *settings]
        return json.loads(parameters_of(load_config(configuration(), settings))["data"])

    assert data_of(2) == data_of(16)
    assert data_of(17)["min_shards"] == 17
    assert data_of(17, "data.min_shards=3")["min_shards"] == 3


def test_the_pipeline_holds_the_schema_itself_and_refuses_one_that_no_argument_can_hold(compiled, tmp_path):
    def compiled_with(values):
        label = {"kind": "category", "values": values}
        schema = {"features": {}, "label_name": "label", "label": label}
        (tmp_path / "schema.json").write_text(json.dumps(schema))
        return compiled(f"validate_data={{schema_file: {tmp_path}/schema.json}}")

    given = tasks_of(compiled_with(["a", "b"]))["validate-data"]["inputs"]["parameters"]["schema"]
    assert json.loads(given["runtimeValue"]["constant"])["label"]["values"] == ["a", "b"]
    with pytest.raises(BadInput, match=r'schema.json": has 1[0-9]{2},[0-9]{3} bytes'):
        compiled_with([f"{number:060}" for number in range(2000)])
