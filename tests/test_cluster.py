"""The cluster description: every form in the wild is read, every fault is named before TensorFlow sees it."""

import json
import subprocess
import sys

import pytest

from trainer.cluster import ClusterDescription, describe, explain_lost_peer
from trainer.errors import BadInput


def tf_config(cluster, task_type="worker", index=0, **more):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}} | more)}


def clusterspec(cluster, task_type, index):
    return {"CLUSTER_SPEC": tf_config(cluster, task_type, index, environment="cloud")["TF_CONFIG"]}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "  "},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {}, "environment": "cloud"}'},
        {"TF_CONFIG": '{"cluster": {"worker": []}}'},
        tf_config({"worker": ["a:1"]}),
        tf_config({"chief": ["a:1"]}, "chief"),
        {"JOB_COMPLETION_INDEX": "3"},
        {"TRIREME_JOBSET_NAME": "digits", "TRIREME_NUM_WORKERS": "1", "JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_alone_is_none(environ):
    assert describe(environ) is None


def test_equal_workers_have_worker_0_as_chief():
    zero = describe(tf_config({"worker": ["a:1", "b:2"]}, index=0))
    one = describe(tf_config({"worker": ["a:1", "b:2"]}, index="1"))  # an index in quotes, as shell scripts write it
    assert zero.is_chief
    assert not one.is_chief
    assert (zero.chief_address, one.chief_address) == ("a:1", "a:1")
    assert (one.name, one.address, one.num_workers) == ("worker 1", "b:2", 2)
    assert one.to_tf_config() == {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


@pytest.mark.parametrize("name", ["chief", "master"])
def test_a_chief_without_parameter_servers_is_worker_0(name):
    cluster = {"worker": ["b:1", "c:1"], name: ["a:1"]}
    chief = describe(tf_config(cluster, name, 0))
    last = describe(tf_config(cluster, "worker", 1))
    assert chief.workers == last.workers == ("a:1", "b:1", "c:1")
    assert chief.is_chief
    assert (chief.task_type, chief.task_index) == ("worker", 0)
    assert (last.task_index, last.address) == (2, "c:1")


def test_the_evaluator_is_beside_the_group():
    cluster = {"worker": ["a:1", "b:1"], "evaluator": ["e:1"]}
    evaluator = describe(tf_config(cluster, "evaluator"))
    assert (evaluator.task_type, evaluator.address, evaluator.is_chief) == ("evaluator", "e:1", False)
    assert set(evaluator.members.values()) == {"a:1", "b:1"}
    # TensorFlow lets the evaluator be missing from the cluster that it watches.
    assert describe(tf_config({"worker": ["a:1", "b:1"]}, "evaluator")).address is None
    assert describe(tf_config({"worker": ["a:1"], "evaluator": ["e:1"]}, "worker")).num_workers == 1


def test_parameter_servers_keep_the_chief_apart():
    cluster = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}
    chief = describe(tf_config(cluster, "chief"))
    server = describe(tf_config(cluster, "ps"))
    assert (chief.num_workers, chief.num_parameter_servers, chief.chief_address) == (2, 1, "c:1")
    assert (server.name, server.is_chief) == ("parameter server 0", False)
    assert server.to_tf_config()["cluster"] == {"worker": ["a:1", "b:1"], "chief": ["c:1"], "ps": ["p:1"]}


def test_parameter_servers_without_a_chief_take_the_first_worker():
    cluster = {"worker": ["a:1", "b:1", "c:1"], "ps": ["p:1"]}
    first, second = (describe(tf_config(cluster, "worker", i)) for i in (0, 1))
    assert (first.task_type, first.is_chief, first.workers) == ("chief", True, ("b:1", "c:1"))
    assert (second.task_type, second.task_index, second.address) == ("worker", 0, "b:1")


def test_what_describe_gives_it_reads_again():
    for cluster, task in [
        ({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]}, ("worker", 1)),
        ({"master": ["a:1"], "worker": ["b:1"]}, ("worker", 0)),
        ({"worker": ["a:1", "b:1"], "ps": ["p:1"]}, ("worker", 1)),
    ]:
        description = describe(tf_config(cluster, *task))
        assert describe({"TF_CONFIG": json.dumps(description.to_tf_config())}) == description


def test_numbered_addresses_are_put_in_order():
    assert describe(tf_config({"worker": {"1": "b:1", "0": "a:1"}})).workers == ("a:1", "b:1")


def test_the_sparse_form_of_tfjob_is_completed_from_the_number_of_workers():
    sparse = {"worker": {"1": "job-worker-1.ns.svc:2222"}, "ps": ["job-ps-0.ns.svc:2222"]}
    given = {"TF_CONFIG": json.dumps({"sparseCluster": sparse, "task": {"type": "worker", "index": 1}})}
    found = describe(given | {"TRIREME_NUM_WORKERS": "3"})
    assert found.chief == "job-worker-0.ns.svc:2222"
    assert found.workers == ("job-worker-1.ns.svc:2222", "job-worker-2.ns.svc:2222")
    assert found.parameter_servers == ("job-ps-0.ns.svc:2222",)
    assert found.address == "job-worker-1.ns.svc:2222"
    server = {"sparseCluster": {"worker": {}, "ps": ["job-ps-0.ns.svc:2222"]}, "task": {"type": "ps", "index": 0}}
    other = describe({"TF_CONFIG": json.dumps(server), "TRIREME_NUM_WORKERS": "3"})
    assert other.members == found.members
    with pytest.raises(BadInput, match=r"TF_CONFIG\.sparseCluster = .*enableDynamicWorker.*TRIREME_NUM_WORKERS"):
        describe(given)


def test_vertex_pools_are_chief_workers_servers_evaluator():
    pools = {"workerpool0": ["m:2222"], "workerpool1": ["w0:2222", "w1:2222"]}
    found = describe(clusterspec(pools, "workerpool1", 1))
    assert (found.source, found.workers, found.task_index) == ("CLUSTER_SPEC", ("m:2222", "w0:2222", "w1:2222"), 2)
    full = pools | {"workerpool2": ["p:2222"], "workerpool3": ["e:2222"]}
    found = describe(clusterspec(full, "workerpool0", 0))
    assert (found.chief, found.num_parameter_servers, found.evaluator) == ("m:2222", 1, "e:2222")


def test_tf_config_goes_before_the_others():
    environ = tf_config({"worker": ["a:1", "b:1"]}) | clusterspec({"workerpool0": ["c:1"]}, "workerpool0", 0)
    assert describe(environ).workers == ("a:1", "b:1")
    assert (
        describe(environ | {"TF_CONFIG": "{}"} | clusterspec({"worker": ["x:1", "y:1"]}, "worker", 0)).workers[0]
        == "x:1"
    )


def jobset(index, **more):
    return {"TRIREME_JOBSET_NAME": "digits", "TRIREME_NUM_WORKERS": "2", "JOB_COMPLETION_INDEX": str(index)} | more


def test_equal_jobset_pods_find_each_other_by_stable_names():
    found = describe(jobset(1))
    assert found.workers == ("digits-node-0-0.digits:2222", "digits-node-0-1.digits:2222")
    assert (found.task_type, found.task_index, found.source) == ("worker", 1, "TRIREME_JOBSET_NAME")
    assert describe(jobset(1, TRIREME_PORT="3000")).address == "digits-node-0-1.digits:3000"


def test_one_indexed_job_gives_roles_by_index():
    pods = [describe(jobset(i, TRIREME_NUM_PARAMETER_SERVERS="2")) for i in range(5)]
    assert [pod.name for pod in pods] == ["chief", "worker 0", "worker 1", "parameter server 0", "parameter server 1"]
    assert [pod.address for pod in pods] == [f"digits-node-0-{i}.digits:2222" for i in range(5)]
    assert len({tuple(pod.members.items()) for pod in pods}) == 1


def test_a_jobset_with_a_job_for_each_kind_gives_one_view_to_all():
    more = {"TRIREME_NUM_PARAMETER_SERVERS": "1"}
    pods = [
        describe(jobset(index, TRIREME_REPLICATED_JOB=job, **more))
        for job, index in [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    ]
    assert [pod.address for pod in pods] == [
        "digits-chief-0-0.digits:2222",
        "digits-worker-0-0.digits:2222",
        "digits-worker-0-1.digits:2222",
        "digits-ps-0-0.digits:2222",
    ]
    assert len({tuple(pod.members.items()) for pod in pods}) == 1
    assert describe(jobset(0, TRIREME_REPLICATED_JOB="worker")).name == "worker 1"  # behind the chief's pod


TWO = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{worker"}, r"TF_CONFIG = '\{worker': must be JSON; .*line 1 column 2"),
        ({"TF_CONFIG": "[1]"}, r"TF_CONFIG = '\[1\]': must be an object"),
        (tf_config(["a:1"]), r"TF_CONFIG\.cluster = \['a:1'\]: must be an object"),
        (
            tf_config({"wroker": ["a:1"]}),
            r"TF_CONFIG\.cluster\.wroker = 'wroker': must be one of chief, master, worker",
        ),
        (tf_config(TWO, "boss"), r"TF_CONFIG\.task\.type = 'boss': must be one of"),
        (tf_config(TWO, "ps"), r"TF_CONFIG\.task\.type = 'ps': the cluster has worker only"),
        (tf_config(TWO, index=2), r"TF_CONFIG\.task\.index = 2: must be from 0 to 1: the cluster has 2 of worker"),
        (tf_config(TWO, index=-1), r"TF_CONFIG\.task\.index = -1: must be a whole number from 0"),
        (tf_config(TWO, index=True), r"TF_CONFIG\.task\.index = True: must be a whole number"),
        ({"TF_CONFIG": json.dumps({"cluster": TWO})}, r"TF_CONFIG\.task = None: must say which process this is"),
        (
            {"TF_CONFIG": json.dumps({"cluster": TWO, "task": {"type": "worker"}})},
            r"TF_CONFIG\.task = .*must say which",
        ),
        (tf_config({"worker": ["a:1", "A:1"]}), r"TF_CONFIG\.cluster\.worker\[1\] = 'A:1': is also worker\[0\]"),
        (tf_config({"worker": ["a:1", "b"]}), r"TF_CONFIG\.cluster\.worker\[1\] = 'b': must be host:port"),
        (tf_config({"worker": ["a:1", "grpc://b:1"]}), r"worker\[1\] = 'grpc://b:1': must be host:port"),
        (tf_config({"worker": ["a:1", ":1"]}), r"worker\[1\] = ':1': must be host:port"),
        (tf_config({"worker": ["a:1", "::1:5"]}), r"worker\[1\] = '::1:5': must be host:port"),
        (tf_config({"worker": ["a:1", 7]}), r"worker\[1\] = 7: must be host:port"),
        (tf_config({"worker": ["a:1", "b:0"]}), r"worker\[1\] = 'b:0': port 0 must be from 1 to 65535"),
        (tf_config({"worker": ["a:1", "b:65536"]}), r"worker\[1\] = 'b:65536': port 65536 must be from 1"),
        (tf_config({"worker": {"0": "a:1", "2": "b:1"}}), r"TF_CONFIG\.cluster\.worker = .*1 is missing"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), r"TF_CONFIG\.cluster\.chief = .*there can be one chief only"),
        (
            tf_config({"chief": ["a:1"], "master": ["b:1"]}, "chief"),
            r"cluster\.master = \['b:1'\]: stands beside 'chief'",
        ),
        (tf_config(TWO | {"evaluator": ["e:1", "f:1"]}), r"evaluator = .*there can be one evaluator only"),
        (
            tf_config(TWO | {"evaluator": ["b:1"]}),
            r"evaluator\[0\] = 'b:1': is also worker\[1\].*evaluator does not train",
        ),
        (tf_config({"evaluator": ["e:1"]}, "evaluator"), r"TF_CONFIG\.cluster = .*at least one worker"),
        (tf_config({"worker": ["a:1"], "ps": ["p:1"]}), r"parameter servers need a chief .* and at least one worker"),
        (tf_config({"chief": ["a:1"], "ps": ["p:1"]}, "chief"), r"parameter servers need a chief"),
        (
            clusterspec({"workerpool4": ["a:1"]}, "workerpool4", 0),
            r"CLUSTER_SPEC\.cluster\.workerpool4 = 'workerpool4'",
        ),
        (jobset(2), r"JOB_COMPLETION_INDEX = 2: must be from 0 to 1: the group has 2 processes"),
        (jobset(2, TRIREME_REPLICATED_JOB="worker"), r"JOB_COMPLETION_INDEX = 2: must be below 2, .*'worker'"),
        (jobset(""), r"JOB_COMPLETION_INDEX = '': must be a whole number"),
        (jobset(0, TRIREME_NUM_WORKERS="0"), r"TRIREME_NUM_WORKERS = 0: must be at least 1"),
        (jobset(0, TRIREME_NUM_WORKERS="two"), r"TRIREME_NUM_WORKERS = 'two': must be a whole number"),
        (jobset(0, TRIREME_PORT="70000"), r"TRIREME_PORT = 70000: must be from 1 to 65535"),
        (jobset(0, TRIREME_REPLICATED_JOB="launcher"), r"TRIREME_REPLICATED_JOB = 'launcher': must be node, chief"),
        (jobset(0, TRIREME_JOBSET_NAME="Digits_1"), r"TRIREME_JOBSET_NAME = 'Digits_1': must be the JobSet's name"),
    ],
)
def test_a_fault_is_named_with_variable_value_and_rule(environ, message):
    with pytest.raises(BadInput, match=message):
        describe(environ)


def test_ipv6_addresses_are_read():
    assert describe(tf_config({"worker": ["[::1]:5", "[fe80::2]:5"]})).workers == ("[::1]:5", "[fe80::2]:5")


class UnavailableError(Exception):
    """Named like TensorFlow's, so that the reading of its messages is tested without loading it."""


class DeadlineExceededError(Exception):
    pass


def group(index):
    return ClusterDescription(workers=("a:1", "b:1", "c:1"), task_type="worker", task_index=index)


@pytest.mark.parametrize(
    ("me", "error", "named"),
    [  # the texts are TensorFlow 2.21's, seen when a worker was killed or stopped
        (
            0,
            UnavailableError(
                "Collective ops is aborted by: recvmsg:Connection reset by peer\nAdditional GRPC error information "
                "from remote target /job:worker/replica:0/task:1 while calling /tensorflow.WorkerService/RecvBuf:"
            ),
            "worker 1 (b:1)",
        ),
        (
            0,
            UnavailableError(
                "Collective ops is aborted by: Error reported from /job:worker/task:2: The following tasks are "
                "unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:2"
            ),
            "worker 2 (c:1)",
        ),
        (
            1,
            DeadlineExceededError(
                "Collective ops is aborted by: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat"
            ),
            "worker 0 (a:1)",
        ),
    ],
)
def test_a_broken_collective_names_the_lost_worker(me, error, named):
    failure = explain_lost_peer(error, group(me))
    assert f"worker {me} lost its peer: {named} has died or stopped" in str(failure)


def test_an_error_of_ones_own_is_not_blamed_on_a_peer():
    assert explain_lost_peer(ValueError("Collective ops is aborted by: task:1"), group(0)) is None
    assert explain_lost_peer(UnavailableError("bucket is unavailable"), group(0)) is None


def test_nothing_heavy_is_loaded_to_read_a_description():
    modules = "trainer.cluster, trainer.rendezvous, trainer.launch.local"
    code = f"import sys, {modules}; print('tensorflow' in sys.modules, 'kfp' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
