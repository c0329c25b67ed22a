"""What `make deploy` and `make undeploy` apply and delete, without a cluster."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import K8S, Manifests, render_directory
from tests.limits import HANG_S

STAND_IN = """#!/bin/sh
case "$*" in
  *'get endpoints kubernetes'*) echo '172.18.0.2 172.18.0.3|6443' ;;
  *'get service kubernetes'*) echo '10.96.0.1:443' ;;
  *) exec {kubectl} "$@" ;;
esac
"""
"""A kubectl whose cluster has two API servers."""

REFUSING = """#!/bin/sh
case "$*" in *' get '*) echo Forbidden >&2; exit 1 ;; *) exec {kubectl} "$@" ;; esac
"""


class Composer:
    """The scripts in a copy of the manifests, and a kubectl that they may be given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(K8S, root / "k8s")

    def run(
        self,
        *arguments: str,
        script: str = "compose.sh",
        kubectl: str = STAND_IN,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script."""
        real = shutil.which("kubectl")
        assert real
        stand_in = self.root / "bin" / "kubectl"
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(kubectl.format(kubectl=real))
        stand_in.chmod(0o755)
        return subprocess.run(
            [str(self.root / "k8s" / script), *arguments],
            cwd=self.root,
            env={"PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}", **variables},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def composed(self, verb: str, overlay: str, **variables: str) -> Manifests:
        """Returns what kubectl would apply or delete."""
        done = self.run(verb, overlay, **variables)
        assert done.returncode == 0, done.stderr
        text = render_directory(self.root / "build" / verb)
        return Manifests(list(yaml.load_all(text, yaml.CSafeLoader)))


@pytest.fixture
def composer(tmp_path: Path) -> Composer:
    """The scripts, with nothing composed yet."""
    return Composer(tmp_path)


def images(manifests: Manifests) -> set[str]:
    return {
        container["image"]
        for workload in manifests.services()
        for container in workload.all_containers
    }


def api_rules(manifests: Manifests) -> list[dict[str, Any]]:
    """The ways of the scheduler to the API server."""
    rules: list[dict[str, Any]] = manifests.get("NetworkPolicy", "orcinus-scheduler-api")["spec"][
        "egress"
    ]
    return rules


@pytest.mark.thorough
def test_the_prefix_and_the_tag_that_are_given_reach_every_image(composer: Composer) -> None:
    demo = composer.composed("deploy", "demo", IMAGE_PREFIX="registry.test:5000/a", TAG="7")
    names = ["frontend", "scheduler", "worker", "demo-model"]
    assert images(demo) == {f"registry.test:5000/a/{name}:7" for name in names}


@pytest.mark.thorough
def test_a_worker_for_gpus_keeps_the_end_of_its_tag(composer: Composer) -> None:
    gpu = composer.composed("deploy", "gpu", IMAGE_PREFIX="registry.test/a", TAG="7")
    assert images(gpu) == {
        f"registry.test/a/{name}" for name in ("frontend:7", "scheduler:7", "worker:7-cuda")
    }


def test_images_are_those_of_the_overlay_unless_others_are_given(composer: Composer) -> None:
    names = ["frontend", "scheduler", "worker", "demo-model"]
    assert images(composer.composed("deploy", "demo")) == {
        f"localhost/orcinus/{name}:dev" for name in names
    }


def test_an_overlay_that_nobody_has_edited_is_refused(composer: Composer) -> None:
    done = composer.run("deploy", "gpu")
    assert done.returncode == 1
    assert "registry.invalid" in done.stderr
    assert "IMAGE_PREFIX" in done.stderr


@pytest.mark.parametrize("overlay", ["nobody", "", "../base", "gpu/x"])
def test_an_overlay_that_is_not_there_is_named(composer: Composer, overlay: str) -> None:
    for verb in ("deploy", "undeploy"):
        done = composer.run(verb, overlay)
        assert done.returncode == 1
        assert f"OVERLAY={overlay}:" in done.stderr


def test_the_scheduler_reaches_the_api_server_that_the_cluster_names_and_nothing_else(
    composer: Composer,
) -> None:
    rules = api_rules(composer.composed("deploy", "demo", API_SERVER="auto"))
    assert {
        (peer["ipBlock"]["cidr"], item["port"])
        for rule in rules
        for peer in rule["to"]
        for item in rule["ports"]
    } == {("10.96.0.1/32", 443), ("172.18.0.2/32", 6443), ("172.18.0.3/32", 6443)}


@pytest.mark.thorough
@pytest.mark.parametrize("server", ["fd00::1:6443", "[fd00::1]:6443"])
def test_addresses_may_be_given_and_may_be_of_version_6(composer: Composer, server: str) -> None:
    rules = api_rules(composer.composed("deploy", "demo", API_SERVER=server))
    assert rules == [
        {
            "to": [{"ipBlock": {"cidr": "fd00::1/128"}}],
            "ports": [{"protocol": "TCP", "port": 6443}],
        }
    ]


def test_a_cluster_that_does_not_tell_is_no_reason_to_leave_the_way_open(
    composer: Composer,
) -> None:
    done = composer.run("deploy", "demo", kubectl=REFUSING, API_SERVER="auto")
    assert done.returncode == 1
    assert "API_SERVER" in done.stderr


@pytest.mark.thorough
def test_undeploying_keeps_what_is_somebodys(composer: Composer) -> None:
    kept = {"Namespace", "PersistentVolumeClaim"}
    everything = composer.composed("undeploy", "gpu", ALL="1")
    kinds = [item["kind"] for item in everything.objects]
    assert kept <= set(kinds)
    left = [item["kind"] for item in composer.composed("undeploy", "gpu").objects]
    assert left == [kind for kind in kinds if kind not in kept]


@pytest.mark.thorough
def test_undeploying_keeps_a_class_that_other_pipelines_have(composer: Composer) -> None:
    overlay = composer.root / "k8s" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        "resources: [../demo]\ncomponents: [../../components/priority]\n"
    )
    assert composer.composed("undeploy", "mine", ALL="1").of("PriorityClass")
    assert not composer.composed("undeploy", "mine").of("PriorityClass")


def test_the_grace_period_follows_what_an_overlay_says_of_the_drain(composer: Composer) -> None:
    overlay = composer.root / "k8s" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        """
        namespace: orcinus
        resources: [../demo]
        configMapGenerator:
          - {name: orcinus-frontend-settings, behavior: merge, literals: [ORCINUS_DRAIN_S=1234]}
        """
    )
    frontend = composer.composed("deploy", "mine").workload("frontend")
    assert frontend.pod["terminationGracePeriodSeconds"] == 1234


DEPLOYED = """#!/bin/sh
case "$*" in
  kustomize*) exec {kubectl} "$@" ;;
  get*) echo 'orcinus|orcinus-frontend|orcinus|1234' ;;
  *) echo "$@" ;;
esac
"""
"""A kubectl of a cluster with one Deployment of frontends, which says what it is told to do."""


def test_undeploying_waits_for_streams_before_it_deletes_what_they_need(
    composer: Composer,
) -> None:
    done = composer.run("demo", script="undeploy.sh", kubectl=DEPLOYED)
    said, first, others, lease = done.stdout.splitlines()
    assert "within 1234 s" in said
    options = "--cascade=foreground --timeout 1294s"
    assert first == f"--namespace orcinus delete deployment orcinus-frontend {options}"
    assert others.startswith("delete -k build/undeploy ")
    assert lease == "--namespace orcinus delete lease orcinus-scheduler --ignore-not-found"


def test_undeploying_now_does_not_wait_for_streams(composer: Composer) -> None:
    done = composer.run("demo", script="undeploy.sh", kubectl=DEPLOYED, NOW="1")
    _, pods, others, _ = done.stdout.splitlines()
    assert "delete pods --grace-period 5 " in pods
    assert "instance=orcinus,app.kubernetes.io/component=frontend" in pods
    assert others.startswith("delete -k build/undeploy ")


def test_undeploying_goes_on_where_a_frontend_cannot_end(composer: Composer) -> None:
    lost = DEPLOYED.replace("  *) echo", "  *foreground*) exit 1 ;;\n  *) echo")
    done = composer.run("demo", script="undeploy.sh", kubectl=lost)
    assert done.returncode == 0
    assert "have not ended yet" in done.stderr
    _, others, lease = done.stdout.splitlines()
    assert others.startswith("delete -k build/undeploy ")
    assert lease.endswith("delete lease orcinus-scheduler --ignore-not-found")


def test_undeploying_fails_where_the_lease_cannot_be_named(composer: Composer) -> None:
    unable = DEPLOYED.replace(
        "  kustomize*) exec {kubectl}", "  kustomize*) exit 7; exec {kubectl}"
    )
    done = composer.run("demo", script="undeploy.sh", kubectl=unable)
    assert done.returncode == 7
    assert "delete -k" not in done.stdout  # what names the Lease is deleted later


@pytest.mark.thorough
def test_an_instance_that_the_overlay_is_not_is_refused(composer: Composer) -> None:
    overlay = composer.root / "k8s" / "overlays" / "second"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("resources: [../demo]\nnameSuffix: -b\n")
    assert composer.run("deploy", "second", INSTANCE="orcinus-b").returncode == 0
    done = composer.run("deploy", "second", INSTANCE="orcinus")
    assert done.returncode == 1
    assert "INSTANCE=orcinus: k8s/overlays/second is INSTANCE=orcinus-b" in done.stderr


SCALED = """#!/bin/sh
case "$*" in
  *'get hpa/orcinus-frontend '*|*'get role/orcinus-scheduler-scale '*) {scaler} ;;
  *'get deployment orcinus-'*last-applied*) printf '%s' '{applied}' ;;
  *'get deployment orcinus-'*) printf '{replicas}' ;;
  'apply --server-side --field-manager autoscaling'*) cat >&2 ;;
  'apply --server-side '*) cat ;;
  *) exec {{kubectl}} "$@" ;;
esac
"""
"""A kubectl whose cluster has frontends and workers, and an autoscaler or none. It prints what is
applied: to stderr if the field manager is `autoscaling`, otherwise to stdout."""


def keeping(
    composer: Composer, component: str, *, scaler: str = "", replicas: str = "", applied: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs keep-replicas.sh for the demo with a component. `scaler` is the command that looks for
    the autoscaler, and `applied` what was applied client-side."""
    overlay = composer.root / "k8s" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        f"resources: [../demo]\ncomponents: [../../components/{component}]\n"
    )
    braced = applied.replace("{", "{{").replace("}", "}}")  # `run` formats the text once more
    kubectl = SCALED.format(scaler=scaler or ":", replicas=replicas, applied=braced)
    return composer.run("k8s/overlays/mine", script="keep-replicas.sh", kubectl=kubectl)


@pytest.mark.parametrize(
    ("component", "scaler", "replicas", "kept"),
    [
        ("autoscaling", "", "5", "spec: {replicas: 5}"),
        ("autoscaling", "echo horizontalpodautoscaler/orcinus-frontend", "5", ""),
        ("autoscaling", "", "", ""),
        ("page", "", "5", ""),
        ("pipeline-autoscaling", "", "6", "spec: {replicas: 6}"),
        ("pipeline-autoscaling", "echo role/orcinus-scheduler-scale", "6", ""),
    ],
    ids=[
        "the first autoscaler",
        "another one",
        "nothing deployed",
        "no autoscaler",
        "the first one of workers",
        "another one of workers",
    ],
)
def test_the_first_autoscaler_takes_over_the_replicas_that_run(
    composer: Composer, component: str, scaler: str, replicas: str, kept: str
) -> None:
    done = keeping(composer, component, scaler=scaler, replicas=replicas)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.strip().endswith(kept)
    assert bool(done.stderr) == bool(kept)


def test_an_autoscaler_that_cannot_be_looked_for_is_not_taken_for_none(composer: Composer) -> None:
    done = keeping(composer, "autoscaling", scaler="exit 1", replicas="5")
    assert (done.returncode, done.stderr) == (1, "")


def test_fields_of_a_client_side_apply_get_the_usual_manager_first(composer: Composer) -> None:
    applied: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "orcinus-frontend", "annotations": {"a": "two\nlines"}},
        "spec": {"replicas": 2, "paused": False},
    }
    done = keeping(composer, "autoscaling", replicas="5", applied=json.dumps(applied))
    assert done.returncode == 0, done.stderr
    applied["spec"]["replicas"] = 5
    assert json.loads(done.stdout) == applied
    assert done.stderr.strip().endswith("spec: {replicas: 5}")


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs make in the repository, where nothing is built or pushed: ENGINE only says so."""
    environment = {key: value for key, value in os.environ.items() if key not in GIVEN}
    return subprocess.run(
        ["make", "ENGINE=echo", *arguments],
        cwd=K8S.parent,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


# Another make may run these tests: what it hands down changes what the make under test prints.
GIVEN = {
    "IMAGE_PREFIX",
    "TAG",
    "DEVICE",
    "OVERLAY",
    "API_SERVER",
    "INSTANCE",
    "MAKEFLAGS",
    "MFLAGS",
    "MAKEOVERRIDES",
    "MAKELEVEL",
}


@pytest.mark.parametrize(
    ("arguments", "variables", "given"),
    [
        ((), {}, "IMAGE_PREFIX= TAG= "),
        (("TAG=3",), {}, "IMAGE_PREFIX='localhost/orcinus' TAG='3' "),
        ((), {"IMAGE_PREFIX": "r.test/a"}, "IMAGE_PREFIX='r.test/a' TAG='dev' "),
    ],
    ids=["nothing", "an argument", "the environment"],
)
def test_make_deploy_names_images_only_if_somebody_does(
    arguments: tuple[str, ...], variables: dict[str, str], given: str
) -> None:
    done = make("--dry-run", "deploy", *arguments, **variables)
    asked = "API_SERVER='auto' INSTANCE='orcinus' k8s/compose.sh deploy 'demo'"
    assert done.stdout.startswith(f"{given}{asked}\n")


def test_make_push_pushes_what_make_images_builds() -> None:
    choice = ("IMAGE_PREFIX=r.test/a", "TAG=3", "DEVICE=cuda")
    built = make("--dry-run", "images", "IMAGE_BUILD=build", *choice).stdout
    names = [line.split()[1] for line in built.splitlines() if line.startswith("build ")]
    tagged = ["frontend:3", "scheduler:3", "worker:3-cuda", "demo-model:3"]
    assert names == [f"r.test/a/{name}" for name in tagged]
    assert make("push", *choice).stdout.splitlines() == [f"push {name}" for name in names]


def test_make_push_wants_a_registry() -> None:
    done = make("push")
    assert done.returncode != 0
    assert "names no registry" in done.stdout
