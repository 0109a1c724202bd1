"""`trireme check --target kubeflow` and `trireme explain-cache`, before a server."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from fake_kfp import FakeKubeflow
from operating import Operator

from pipelines.cache_keys import data_change
from pipelines.targets import kubeflow
from trainer import tasks as trainer_tasks

GROUP = [
    "cluster.launcher=trainjob",
    "cluster.num_workers=4",
    "train.strategy=multi_worker_mirrored",
    "cluster.pipeline_root=null",
]
MIRRORED, SEVERAL = "train.strategy=mirrored", "train.strategy=multi_worker_mirrored"


def gpus(count: int) -> str:
    return f"cluster.gpu={{type: l4, count: {count}}}"


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with FakeKubeflow() as server:
        yield Operator(server, tmp_path, monkeypatch)


def findings(operator: Operator, *words: str) -> dict[str, tuple[str, str]]:
    said = operator("check", "@", "--target", "kubeflow", "--json", *words)
    return {one["subject"]: (one["state"], one["message"]) for one in json.loads(said.out)}


def test_everything_that_a_run_needs_is_looked_at(operator: Operator, gcs: str) -> None:
    found = findings(operator, "--set", f"cluster.pipeline_root={gcs}/trireme")
    assert {
        subject: state for subject, (state, _) in found.items() if subject not in ("dataset", "account")
    } == dict.fromkeys(
        (
            "configuration",
            "image",
            "code",
            "root",
            "hardware",
            "server",
            "pipelines",
            "experiments",
            "runs",
            "schedules",
        ),
        "passed",
    )
    assert found["server"][1] == f"{operator.server.url} answers; version 2.14.0"
    assert found["root"][1].endswith("can be read and written by you")
    from trainer import storage

    assert storage.list_names(f"{gcs}/trireme") == []
    assert operator.server.changes() == []


@pytest.mark.parametrize(
    ("settings", "subject", "state", "message"),
    [
        (["cluster.image=trireme"], "image", "failed", "give a tag or a digest"),
        (["cluster.image=trireme:latest"], "image", "failed", "give a tag or a digest"),
        (["cluster.image=r.example.org:5000/trireme@sha256:" + "0" * 64], "image", "passed", "fixed by its digest"),
        (["validate_data.schema_file=none.json"], "schema", "failed", "none.json; a relative path counts from where the"),
        (["validate_data.schema_file=pyproject.toml"], "schema", "failed", "is not JSON"),
        (["cluster.pipeline_root=/somewhere"], "root", "failed", "is a folder in each pod by itself"),
        (["cluster.pipeline_root=null"], "root", "failed", "name one, such as gs://bucket/trireme"),
        ([gpus(3), MIRRORED], "hardware", "warning", "some wait for the others; take 63 or 66"),
        ([gpus(2), MIRRORED, "cluster.memory=8Gi"], "memory", "warning", "NCCL"),
        ([gpus(4), MIRRORED], "hardware", "passed", "4 GPUs, 16 examples for each"),
        ([gpus(4), "cluster.num_workers=4", SEVERAL], "hardware", "passed", "4 workers with 4 GPUs each, 4 examples"),
        ([gpus(8), "cluster.num_workers=9", SEVERAL], "hardware", "failed", "each of 72 replicas (9 workers"),
        (["cluster.num_workers=2", SEVERAL], "shards", "passed", "each of 2 workers takes its part of every batch"),
        ([*GROUP, "cluster.launcher=local"], "launcher", "warning", "all processes share one pod"),
        ([*GROUP, "cluster.timeout_secs=3600"], "launcher", "passed",
         "a trainjob of 4 pods; the cluster needs the runtime tensorflow-distributed and the role of"
         " manifests/launcher-rbac.yaml for pipeline-runner"),
        ([*GROUP, "cluster.num_workers=1", "train.strategy=auto", "cluster.timeout_secs=3600"], "launcher", "passed",
         "a trainjob of 1 pod;"),
        (GROUP, "launcher", "warning", "a job whose launcher is lost ends after 7 days only"),
        ([*GROUP, "cluster.timeout_secs=3600", "cluster.retries=0"], "launcher", "warning", "nobody takes up the job"),
        (["schedules.w={cron: 0 3 * * *, timezone: Europe/Berlin}"], "schedule", "warning", "after each change of the clocks"),
        (["schedules.w={cron: 0 3 * * *}"], "schedule", "passed", "w runs next at 2027-01-05 03:00 UTC"),
        (["schedules.w={cron: 30 0 1 * *, timezone: Europe/Berlin}"], "schedule", "failed", "the day before"),
    ],
)  # fmt: skip
def test_what_is_not_well_is_found_with_the_remedy(operator: Operator, settings, subject, state, message) -> None:
    found = findings(operator, *(word for setting in settings for word in ("--set", setting)))
    assert found[subject][0] == state, found[subject]
    assert message in found[subject][1]


def test_pods_of_a_job_have_shared_memory_for_nccl_of_their_own(operator: Operator) -> None:
    assert "memory" not in findings(
        operator, *(word for one in [*GROUP, gpus(2), "cluster.memory=8Gi"] for word in ("--set", one))
    )


def test_a_root_that_cannot_be_written_is_found(operator: Operator, gcs: str) -> None:
    found = findings(operator, "--set", "cluster.pipeline_root=gs://nobodys-bucket/x")
    assert found["root"][0] == "failed"


def test_features_are_probed_and_each_that_is_missing_is_named(operator: Operator) -> None:
    operator.server.fail("GET", "recurringruns", status=404, body='{"message": "Not Found"}', times=9)
    operator.server.fail("GET", "experiments", status=403, body='{"message": "not authorized"}', times=9)
    operator.server.fail("GET", "v1beta1/healthz", status=404, times=9)
    said = operator("check", "@", "--target", "kubeflow")
    assert said.code == 2
    assert "failed  schedules: " in said.out
    assert "failed  experiments: " in said.out
    assert "passed  pipelines: can be listed" in said.out
    assert "answers; version unknown" in said.out


def test_a_server_that_keeps_users_apart_needs_a_namespace(operator: Operator) -> None:
    operator.server.multi_user = True
    assert findings(operator)["namespace"] == (
        "failed", "the server keeps users apart; give --namespace or kubeflow.namespace",
    )  # fmt: skip
    assert "namespace" not in findings(operator, "--namespace", "team-a")


def test_a_server_that_does_not_answer_is_a_finding_beside_the_others(operator: Operator) -> None:
    found = findings(operator, "--host", "http://127.0.0.1:9")
    assert found["server"][0] == "failed"
    assert found["image"][0] == "passed"


def explained(operator: Operator, *words: str) -> dict:
    said = operator("explain-cache", "@", "--json", *words)
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_the_key_of_each_task_is_told_part_by_part(operator: Operator) -> None:
    found = explained(operator)
    assert found["compared_with"] is None
    prepare = found["tasks"]["prepare-data"]
    assert prepare["cached"] is True
    assert set(prepare["parts"]) == {"image", "command", "data", "seed", "root", "code", "source"}
    assert found["tasks"]["train-model"]["parts"]["examples"] == "from prepare-data.examples"
    assert found["tasks"]["evaluate-model"]["cached"] is False


def test_offline_the_keys_are_told_and_no_server_is_asked(operator: Operator) -> None:
    said = operator("explain-cache", "@", "--offline")
    assert said.out.startswith("compared with no run\nprepare-data       may come from the cache\n")
    assert operator.server.requests == []


def test_what_changed_since_the_last_run_is_told_setting_by_setting(operator: Operator, monkeypatch) -> None:
    operator("submit", "@")
    operator("submit", "@", "--set", "train.epochs=3")
    found = explained(operator, "--set", "train.epochs=3")["tasks"]
    assert found["prepare-data"]["changes"] == found["train-model"]["changes"] == []
    found = explained(operator, "--set", "train.epochs=5")["tasks"]
    assert found["train-model"]["changes"] == ["train.epochs: 3 → 5"]
    assert found["prepare-data"]["changes"] == []
    found = explained(operator, "--set", "train.epochs=3", "--set", "cluster.image=trireme:0.2.0")["tasks"]
    assert "image: trireme:0.1.0 → trireme:0.2.0" in found["prepare-data"]["changes"]
    for run in operator.server.runs.values():
        run["state"] = "SUCCEEDED"
    text = operator("explain-cache", "@", "--set", "train.epochs=5").out
    assert "train-model        runs again\n    changed  train.epochs: 3 → 5\n" in text
    assert "prepare-data       comes from the cache, if what is made before it does and is still there" in text
    assert "judge-model        always runs" in text


def test_changed_files_are_told_in_words_and_all_that_follows_runs_again(operator: Operator) -> None:
    folder = operator.folder / "data"
    folder.mkdir()
    (folder / "1.csv").write_text("a,label\n1,x\n")
    splits = "splits: {train: 80%, validation: 10%, test: 10%}"
    operator.write(f"data: {{source: csv, path: '{folder}/*.csv', label_key: label, {splits}}}\n")
    operator("submit", "@")
    (run,) = operator.server.runs.values()
    run["state"] = "SUCCEEDED"
    untold = operator("explain-cache", "@").out
    assert "whether the data changed cannot be told from here: the run left no word of its files" in untold
    assert "prepare-data       comes from the cache, if the files are the same, and" in untold
    parameters = run["runtime_config"]["parameters"]
    root = str(operator.folder / "root")
    given = cache_keys_of(operator)["prepare-data"] | parameters
    trainer_tasks.fingerprint_data(given["data"], 0, root, given["code"], run["run_id"], "")

    same = operator("explain-cache", "@").out
    assert "cannot be told" not in same
    assert (
        "prepare-data       comes from the cache, if what is made before it does and is still there; its files are the same"
        in same
    )
    (folder / "1.csv").write_text("a,label\n2,x\n")
    changed = operator("explain-cache", "@").out
    assert (
        f"prepare-data       runs again\n    changed  data changed: {folder}/*.csv: of 1 files at least one is another\n"
        in changed
    )
    assert "train-model        runs again\n    changed  examples: made anew by prepare-data\n" in changed
    assert "evaluate-model     always runs" in changed
    (folder / "2.csv").write_text("a,label\n3,x\n")
    found = explained(operator)["tasks"]
    assert found["prepare-data"]["changes"] == [f"data changed: {folder}/*.csv: 2 files, and then 1"]
    shutil.rmtree(folder)
    assert f"cannot be told from here: there is no {folder}/*.csv on this machine" in operator("explain-cache", "@").out


def cache_keys_of(operator: Operator) -> dict:
    return {name: task["parts"] for name, task in explained(operator, "--offline")["tasks"].items()}


def test_a_window_that_moved_on_is_a_change_of_the_data() -> None:
    then = {"digest": "sha256:1", "until": "2027-01-01", "num_files": 3}
    now = {"digest": "sha256:2", "until": "2027-01-02", "num_files": 3}
    assert data_change("d", then, now) == "data changed: d: the window ends on 2027-01-02, and ended on 2027-01-01"
    assert data_change("d", then, then) is None


def test_another_code_is_told_by_the_beginning_of_its_digest(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator("submit", "@")
    monkeypatch.setattr("pipelines.training.source_digest", lambda: "sha256:" + "f" * 64)
    kubeflow._yaml.cache_clear()
    (change,) = explained(operator)["tasks"]["prepare-data"]["changes"]
    assert re.fullmatch(r"code: sha256:[0-9a-f]{12} in trireme:0.1.0 → sha256:f{12} in trireme:0.1.0", change)


def test_a_task_that_the_compared_run_did_not_finish_is_not_promised_from_the_cache(operator: Operator) -> None:
    operator("submit", "@")
    (run,) = operator.server.runs.values()
    tasks = [{"display_name": "prepare-data", "state": "SUCCEEDED"}, {"display_name": "train-model", "state": "FAILED"}]
    run |= {"state": "FAILED", "run_details": {"task_details": tasks}}
    text = operator("explain-cache", "@").out
    assert "prepare-data       comes from the cache" in text
    assert "train-model        has the same key, but failed in that run" in text
    run["run_details"] = {"task_details": tasks[:1]}
    assert "train-model        has the same key, but did not run in that run" in operator("explain-cache", "@").out
    run["state"] = "RUNNING"
    assert "train-model        has the same key, but has not ended in that run" in operator("explain-cache", "@").out


def test_the_tasks_are_told_in_their_order_and_the_exit_task_last(operator: Operator) -> None:
    tasks = list(explained(operator)["tasks"])
    assert tasks.index("prepare-data") < tasks.index("train-model") < tasks.index("judge-model")
    assert tasks[-1] == "record-outcome"


def test_a_version_with_settings_of_pods_is_compared_too(operator: Operator) -> None:
    operator.write(cluster="  labels: {team: a}\n")
    operator("submit", "@")
    for version in operator.server.versions.values():  # as the server keeps two documents
        version["pipeline_spec"] = {"pipeline_spec": version["pipeline_spec"], "platform_spec": {}}
    assert explained(operator)["tasks"]["train-model"]["changes"] == []


def test_the_command_that_tries_the_bucket_with_the_runs_account_does_what_check_did(
    operator: Operator, gcs: str
) -> None:
    operator.write(cluster="  service_account: trainer\n", kubeflow="  namespace: team-a\n")
    state, message = findings(operator, "--set", f"cluster.pipeline_root={gcs}/trireme")["account"]
    assert state == "warning"
    words = shlex.split(message.partition("inside the cluster only: ")[2])
    assert '--overrides={"spec": {"serviceAccountName": "trainer"}}' in words
    assert {"--image=trireme:0.1.0", "team-a"} < set(words)
    deed = words[words.index("--") + 1 :]
    done = subprocess.run([sys.executable, *deed[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_check_looks_for_the_splits_and_columns_that_are_asked_for(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,a\n2,b\n")
    data = {"source": "csv", "path": str(tmp_path / "a.csv"), "label_key": "lable",
            "splits": {"train": "80%", "validation": "10%", "test": "10%"}}  # fmt: skip
    found = findings(operator, "--set", f"data={json.dumps(data)}")
    assert found["dataset"][0] == "failed"
    assert 'data.label_key = "lable": there is no such column; did you mean label?' in found["dataset"][1]
    found = findings(operator, "--set", f"data={json.dumps(data | {'label_key': 'label'})}")
    assert found["dataset"][0] == "passed"


def test_a_check_ends_as_the_run_would(operator: Operator, gcs: str) -> None:
    there = ("--set", f"cluster.pipeline_root={gcs}/trireme")
    assert operator("check", "@", "--target", "kubeflow", *there).code == 0
    operator.server.fail("GET", "runs", status=500, times=9)
    said = operator("check", "@", "--target", "kubeflow", "--json", *there)
    assert [one["exit_code"] for one in json.loads(said.out) if one["subject"] == "runs"] == [1]
    assert said.code == 1  # the world failed, and nothing has to change
    assert operator("check", "@", "--target", "kubeflow", "--set", "cluster.image=trireme", *there).code == 2


def test_names_of_ones_own_are_tried_beside_the_configuration_file(operator: Operator, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (operator.folder / "prices.py").write_text("def cost(labels, answers): return 0.0")
    operator.write(
        "evaluate:\n  own_metrics:\n    cost: {function: prices:cost}\n  slices: [{function: prizes:cost}]\n"
    )
    found = findings(operator)
    assert found["metric"] == (
        "passed", 'evaluate.own_metrics.cost.function = "prices:cost" is there and takes what it will be given',
    )  # fmt: skip
    state, message = found["slice"]
    assert state == "warning"  # on a cluster the image decides
    assert message.endswith("and among what is installed); trireme:0.1.0 must have it")
    said = operator("check", "@")
    assert said.code == 2
    assert 'failed  slice: evaluate.slices.0.function = "prizes:cost": cannot be imported' in said.out


def test_what_a_builder_of_ones_own_prints_does_not_stand_between_the_findings(operator: Operator, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (operator.folder / "chatty.py").write_text("print('hello')\nfrom trainer.data.digits import Digits as Builder\n")
    found = findings(operator, "--set", "data.name=chatty:Builder")
    assert found["builder"][0] == "passed"
    assert found["dataset"][0] in ("passed", "warning")


def test_a_builder_of_ones_own_that_is_not_there_is_looked_for_once(operator: Operator) -> None:
    said = operator("check", "@", "--set", "data.name=nowhere:Builder")
    assert said.code == 2
    assert 'failed  builder: data.name = "nowhere:Builder": cannot be imported' in said.out
    assert "dataset:" not in said.out


def test_weights_to_begin_with_must_be_there(operator: Operator, gcs: str) -> None:
    from trainer import storage

    storage.write_json(f"{gcs}/earlier/model.keras", 1)
    (operator.folder / "step-00000230").mkdir()
    (operator.folder / "step-00000230" / "variables.index").touch()
    for source in (f"{gcs}/earlier", f"{gcs}/earlier/model.keras", f"{operator.folder}/step-00000230"):
        found = findings(operator, "--set", f"train.warm_start.source={source}")
        assert found["warm start"] == ("passed", f"{source} holds weights")
    for source in (f"{gcs}/nothing", f"{operator.folder}/none.keras", str(operator.folder)):
        state, message = findings(operator, "--set", f"train.warm_start.source={source}")["warm start"]
        assert state == "failed"
        assert message.startswith(
            f'train.warm_start.source = "{source}": is no .keras file, no folder with model.keras'
        )
