"""The overlay that `docs/operations/deploy.md` shows renders to what the page says of it."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.k8s.manifests import K8S, Manifests, render_directory

PAGE = (K8S.parent / "docs" / "operations" / "deploy.md").read_text(encoding="utf-8")
PAGES = sorted((K8S.parent / "docs" / "operations").glob("*.md"))
FILES = dict(re.findall(r"^`(k8s/overlays/mine/\S+)`\n\n((?:    .*\n|\n)+)", PAGE, flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_give_kubectl_to_read_is_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for given in re.findall(r"kubectl .*-f - <<'?END'?\n((?:    .*\n)+?)    END\n", text):
        item = yaml.safe_load(textwrap.dedent(given).replace("$n", "3"))
        assert {"apiVersion", "kind", "metadata", "spec"} == set(item)
        assert not given.lstrip().startswith("{")  # kubectl would take it for JSON


def write_overlay(root: Path) -> Path:
    """Writes the overlay of the page below `root`, beside the base, and returns its directory."""
    (root / "k8s").mkdir()
    for name in ("base", "components"):
        (root / "k8s" / name).symlink_to(K8S / name)
    assert len(FILES) == 2
    for path, text in FILES.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text), encoding="utf-8")
    return root / "k8s" / "overlays" / "mine"


def test_the_settings_of_the_overlay_win_over_those_of_its_components(tmp_path: Path) -> None:
    made = render_directory(write_overlay(tmp_path))
    manifests = Manifests([*yaml.safe_load_all(made)])
    pipeline = manifests.config("orcinus-pipeline")
    assert pipeline["MODEL_SOURCE"] == "s3://my-bucket/llama-3.1-8b"
    assert pipeline["ORCINUS_MODEL"] == "/models/llama-3.1-8b"
    assert manifests.config("orcinus-worker-settings")["ORCINUS_KV_MEMORY"] == "4GiB"
    worker = manifests.workload("worker")
    assert worker.container["resources"]["limits"] == {"memory": "14Gi", "ephemeral-storage": "1Gi"}
    assert worker.item["spec"]["replicas"] == int(pipeline["ORCINUS_N_STAGES"])
    [shm] = [it for it in worker.item["spec"]["template"]["spec"]["volumes"] if it["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "4300Mi"  # 4 GiB of keys and values, and 128 MiB


def test_the_page_names_what_is_read_of_the_common_config_map() -> None:
    key = r"configMapKeyRef: \{name: orcinus-pipeline, key: (\w+)"
    read = {name for path in K8S.rglob("*.yaml") for name in re.findall(key, path.read_text())}
    rule = PAGE.partition("- The ConfigMap `orcinus-pipeline` has")[2].partition("\n- ")[0]
    assert set(re.findall(r"`([A-Z_]+)`", rule)) == read


def shown(page: str, start: str) -> str:
    """Returns the indented lines of a page of `docs/operations` that begin with `start`."""
    text = (K8S.parent / "docs" / "operations" / page).read_text(encoding="utf-8")
    [lines] = re.findall(rf"^    {re.escape(start)}.*\n(?:    .*\n|\n(?=    ))*", text, flags=re.M)
    return textwrap.dedent(lines)


def test_the_patch_for_a_registry_reaches_every_pod(tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path)
    file = overlay / "kustomization.yaml"
    items = yaml.safe_load(file.read_text(encoding="utf-8"))
    items["patches"] += yaml.safe_load(shown("deploy.md", "- target: {kind: Deployment}"))
    file.write_text(yaml.safe_dump(items), encoding="utf-8")
    manifests = Manifests([*yaml.safe_load_all(render_directory(overlay))])
    for name in ("frontend", "scheduler", "worker"):
        pod = manifests.workload(name).item["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_the_patch_for_cert_manager_names_the_issuer_of_clients(tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path)
    file = overlay / "kustomization.yaml"
    items = yaml.safe_load(file.read_text(encoding="utf-8"))
    items |= yaml.safe_load(shown("secure.md", "components: [../../components/mtls,"))
    file.write_text(yaml.safe_dump(items), encoding="utf-8")
    made = [*yaml.safe_load_all(render_directory(overlay))]
    [certificate] = [
        item["spec"]
        for item in made
        if item["kind"] == "Certificate" and item["metadata"]["name"] == "orcinus-public-tls"
    ]
    assert certificate["dnsNames"] == ["llm.example.org"]
    assert certificate["issuerRef"] == {"kind": "ClusterIssuer", "name": "letsencrypt"}
    assert certificate["secretName"] == "orcinus-public-tls"
