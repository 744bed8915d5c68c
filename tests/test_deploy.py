"""The manifests under deploy/: what they run is what the command takes, and their parts agree with one another."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import ValidationError

from outrider.cli.serve import app
from outrider.scale.deployment import Options
from outrider.scale.replica import command_of

FOLDER = Path(__file__).parent.parent / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of `outrider serve`, as its command line reads them. Raises for words that it does not know."""
    command = typer.main.get_command(app)
    return dict(command.make_context("serve", list(words)).params)


def here(words: list[str], tmp_path: Path) -> list[str]:
    """With a file of keys of this machine in place of the one that is mounted."""
    (tmp_path / "keys").write_text("alice a-key-of-hers\n")
    return [word.replace("/run/secrets/outrider-keys/keys", str(tmp_path / "keys")) for word in words]


def test_plain_kubernetes(tmp_path: Path) -> None:
    service, replicas, sets = documents("kubernetes.yaml")
    pod = sets["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command, *words = container["args"]
    options = parsed(here(words, tmp_path))
    assert (command, options["host"], options["model_path"]) == ("serve", "0.0.0.0", "smollm2-135m")
    assert container["ports"] == [{"name": "http", "containerPort": options["port"]}]
    assert pod["terminationGracePeriodSeconds"] > options["drain_seconds"]
    assert int(container["resources"]["requests"]["cpu"]) == options["threads"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(options["ledger"].parent), "/run/secrets/outrider-keys", "/models"} == mounted
    assert sets["spec"]["serviceName"] == replicas["metadata"]["name"]
    for one in (service, replicas):
        assert one["spec"]["selector"] == sets["spec"]["template"]["metadata"]["labels"]
    assert pod["initContainers"][0]["args"] == ["pull", options["model_path"]]


def test_kuberay(tmp_path: Path) -> None:
    (ray,) = documents("kuberay.yaml")
    (application,) = yaml.safe_load(ray["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "outrider.scale.ray:app"
    options = Options.model_validate(application["args"])
    words = here(command_of(options.options, "r1")[4:], tmp_path)
    assert parsed(words)["ledger"] == Path("/ledger/audit-r1.db")
    (workers,) = ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert parsed(words)["threads"] == options.cpus == int(container["resources"]["requests"]["cpu"])
    assert workers["maxReplicas"] == options.max_replicas
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > options.drain_seconds + 10


def test_the_serving_template(tmp_path: Path) -> None:
    (template,) = documents("serving-template.yaml")
    inputs = {one["name"]: one["default"] for one in template["spec"]["inputs"]["parameters"]}
    used: set[str] = set()

    def filled(match: re.Match[str]) -> str:
        used.add(match[1])
        return str(inputs[match[1]])

    inner = template["spec"]["template"]
    texts = [inner["spec"], inner["metadata"]["labels"], inner["metadata"]["annotations"]]
    spec, labels, _ = (yaml.safe_load(re.sub(r"\{\{inputs\.parameters\.(\w+)\}\}", filled, text)) for text in texts)
    assert used == inputs.keys()
    assert labels == {"ai.sap.com/resourcePlan": inputs["resourcePlan"]}
    (container,) = spec["predictor"]["containers"]
    (script,) = container["args"]
    words = shlex.split(script.partition("exec outrider serve ")[2])
    options = parsed(here(words, tmp_path))
    assert container["ports"][0]["containerPort"] == options["port"] == container["readinessProbe"]["httpGet"]["port"]
    assert options["model_path"] == inputs["model"]


def test_the_image_begins_the_server(tmp_path: Path) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    (words,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    options = parsed(here(yaml.safe_load(words)[1:], tmp_path))
    assert f"EXPOSE {options['port']}" in text
    assert f"http://127.0.0.1:{options['port']}/health" in text


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"options": "--port 80"}, "options: --port does not belong here"),
        ({"options": ["--api-key=x"]}, "keys come from --api-key-file"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas: 2 is fewer than replicas, 3"),
        ({"replica": 3}, "Extra inputs are not permitted"),
        ({"cpus": 0}, "greater than 0"),
    ],
)
def test_refused_arguments(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Options.model_validate(args)
