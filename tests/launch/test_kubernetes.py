"""launch/*.yaml are valid under Kubernetes' published schema, and set the variables that launch/node.sh reads."""

import copy
import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.lib.launchers import launch_by
from tests.lib.project import ROOT
from verl_ext.config.compose import compose

LAUNCH = ROOT / "launch"
# Fields of kubeflow.org/v1 PyTorchJob, from the models of kubeflow-training 1.9.4; templates are Kubernetes' own.
PYTORCH_JOB = {
    "spec": {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"},
    "runPolicy": {
        *("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend"),
        "ttlSecondsAfterFinished",
    },
    "replica": {"replicas", "restartPolicy", "template"},
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.30", strict=True)


def pods(name: str) -> list[dict[str, Any]]:
    """Return the pod templates of a manifest."""
    last = documents(name)[-1]["spec"]
    if "template" in last:
        return [last["template"]]
    return [replica["template"] for replica in last["pytorchReplicaSpecs"].values()]


def test_the_job_and_its_service_fit_kubernetes_schema():
    service, job = documents("k8s.yaml")
    validate(service)
    validate(job)
    wrong = copy.deepcopy(job)
    wrong["spec"]["completionmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)


def test_the_pytorch_job_fits_its_schema():
    (job,) = documents("pytorchjob.yaml")
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(spec) <= PYTORCH_JOB["spec"]
    assert isinstance(spec["nprocPerNode"], str)
    assert set(spec["runPolicy"]) <= PYTORCH_JOB["runPolicy"]
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert list(spec["pytorchReplicaSpecs"]) == ["Master", "Worker"]
    for replica in spec["pytorchReplicaSpecs"].values():
        assert set(replica) <= PYTORCH_JOB["replica"]
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == ["pytorch"]
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": replica["template"]}
        validate(pod)


def test_the_pods_of_a_job_are_found_by_the_name_that_they_are_given():
    service, job = documents("k8s.yaml")
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    spec, values = job["spec"], environment("k8s.yaml", node="0")
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert values["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert values["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert values["NNODES"] == str(spec["completions"]) == str(spec["parallelism"])


def environment(name: str, node: str) -> dict[str, str]:
    """Return the variables of a manifest's container on one node, with fields filled in as by Kubernetes."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": node,
        "status.podIP": f"10.0.0.{node}",
    }
    (container,) = pods(name)[0]["spec"]["containers"]
    return {
        entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }


OPERATOR = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_PORT": "23456"}
OPERATOR["PET_MASTER_ADDR"] = "verl-ext-sft-master-0"


@pytest.mark.parametrize(("name", "given"), [("k8s.yaml", {}), ("pytorchjob.yaml", OPERATOR)])
def test_a_pod_runs_the_line_of_its_node_with_overrides_that_exist(name, given):
    (container,) = pods(name)[-1]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    variables = {"NPROC_PER_NODE": "8", **given, **environment(name, node="2")}
    code, output, errors = launch_by(LAUNCH.parent / command[0], *command[1:], **variables)
    assert code == 0, errors
    words = shlex.split(output)
    assert {"--nnodes=4", "--nproc_per_node=8", "--local_addr=10.0.0.2"} <= set(words)
    assert "--rdzv_conf=is_host=0" in words or "--node_rank=2" in words
    assert compose(words[words.index("verl_ext.fsdp_sft_trainer") + 1 :]).model.path == "/shared/models/MODEL"
