"""The values of the chart: each with its type, its meaning and, from the base, its default.

`values.yaml` and `values.schema.json` are made of these classes. The docstring below a value stands
beside it in both.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from k8s.chart.kustomize import Objects
from k8s.chart.switches import MODEL_SWITCHES, OPTIONAL
from services.common.settings import PREFIX, ServiceSettings
from services.frontend.settings import FrontendSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings

Digest = Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")]
_QUANTITY = r"[0-9]+(\.[0-9]+)?([kMGTPE]i?)?"
Quantity = Annotated[str, StringConstraints(pattern=rf"^{_QUANTITY}$")]
Setting = str | bool | int | float
AnyObject = dict[str, Any]


class Group(BaseModel):
    """Values that belong together. Other names than those of a group are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class Image(Group):
    """Images of all processes."""

    registry: str = "localhost/orcinus"
    """Where images are pulled from: the part of their names before `/frontend`, `/worker` …"""
    tag: str = ""
    """Tag of all images; empty for the version of the chart. With `components.gpu`, workers have
    the tag with `-cuda` behind it."""
    digests: dict[Literal["frontend", "scheduler", "worker", "demo-model"], Digest] = Field(
        default_factory=dict
    )
    """Digests by the name of an image, `sha256:…`; they win over the tag."""
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When nodes pull images."""
    pullSecrets: list[AnyObject] = []
    """References to Secrets for the registry, such as `{name: registry}`."""


class Claim(Group):
    """A claim to storage that pods of many nodes can mount."""

    size: Quantity
    """Size of the claim."""
    storageClassName: str = ""
    """Class of its storage; empty for the cluster's default."""


class ModelClaim(Claim):
    """The claim that holds checkpoints, for `claim` and `fetch`."""

    existing: str = ""
    """Name of a claim that is there already; empty to make one."""


class Model(Group):
    """The checkpoint that is served."""

    from_: Literal[("demo", *MODEL_SWITCHES)] = Field("demo", alias="from")  # type: ignore[valid-type]
    """Where the checkpoint comes from: `demo` is the image of the demo model, `fetch` the Hugging
    Face Hub or S3, `claim` a volume that you fill, `image` an OCI image."""
    path: str = ""
    """Directory of the checkpoint in the pods, `/models/…`; empty for the one that fits `from` and
    `source`."""
    source: str = ""
    """For `fetch`: `ORG/NAME@COMMIT` or `s3://BUCKET/PREFIX`; empty for a small model."""
    region: str = ""
    """For `fetch` from S3: the region."""
    endpoint: str = ""
    """For `fetch` from other storage than AWS's: its URL."""
    image: str = ""
    """For `image`: the OCI image with the checkpoint; empty for the demo model."""
    claim: ModelClaim


class Pods(Group):
    """Pods of a service."""

    resources: dict[Literal["requests", "limits"], dict[str, str | int | float]] = Field(
        default_factory=dict
    )
    """Requests and limits that replace those of the manifests, by their names."""
    nodeSelector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: list[AnyObject] = []
    """Tolerations beside those of the manifests."""
    podAnnotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods beside those of the manifests."""
    extraEnv: list[AnyObject] = []
    """Environment variables beside those of the manifests, as in a container."""
    extraVolumes: list[AnyObject] = []
    """Volumes beside those of the manifests, as in a pod."""
    extraVolumeMounts: list[AnyObject] = []
    """Mounts beside those of the manifests, as in a container."""


class Service(Group):
    """The Service that clients reach."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Kind of the Service."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations, such as those that a cloud's load balancer is set up by."""


class Frontend(Pods):
    """Frontends: HTTP and gRPC for clients."""

    replicas: int = Field(ge=1)
    """Number of frontends, unless `components.autoscaling` is on."""
    service: Service = Service()


class Scheduler(Pods):
    """Schedulers: one leads, and the others stand by."""

    replicas: int = Field(ge=1)
    """Number of schedulers."""


class Worker(Pods):
    """Workers: each computes one stage of a pipeline."""

    sharedMemory: Annotated[str, StringConstraints(pattern=rf"^({_QUANTITY})?$")] = ""
    """Size of `/dev/shm`, a volume in memory that counts towards the memory limit: 128 MiB, and
    ORCINUS_KV_MEMORY for each rank. Empty for the size in the manifests, 400Mi without
    `components.tensorParallel` and `components.gpu`."""


class Autoscaling(Group):
    """Bounds for `components.autoscaling`."""

    minReplicas: int = Field(ge=1)
    """Least number of frontends."""
    maxReplicas: int = Field(ge=1)
    """Largest number of frontends."""


class Monitoring(Group):
    """Where `components.monitoring` expects the Prometheus operator."""

    namespace: str
    """Namespace of Prometheus, from which pods may be scraped."""
    release: str
    """Label `release` by which Prometheus selects monitors and rules."""


class ApiServer(Group):
    """An address of the cluster's API server."""

    cidr: str
    """Address with the number of its bits, such as `10.0.0.1/32`."""
    port: int = Field(ge=1, le=65535)
    """Port, such as 6443."""


class NetworkPolicies(Group):
    """Rules that deny every connection which the system does not need."""

    enabled: bool = True
    """Whether there are NetworkPolicies. They hold for all pods of the namespace."""
    apiServers: list[ApiServer] = []
    """Addresses that schedulers may reach the API server at; empty for ports 443 and 6443 of every
    address."""


class Values(Group):
    """All values of the chart. The defaults are those of `k8s/base`."""

    image: Image = Image()
    model: Model
    stages: int = Field(ge=1)
    """Number of stages that the layers are divided among. Each pipeline has a worker for each."""
    pipelines: int = Field(1, ge=0)
    """Number of pipelines, unless `components.pipelineAutoscaling` is on."""
    spares: int = Field(0, ge=0)
    """Number of workers beyond those of all pipelines, which replace lost ones at once. They form
    no pipeline, however many they are."""
    listenHost: str
    """Address at which each process listens."""
    frontend: Frontend
    scheduler: Scheduler
    worker: Worker = Worker()
    weightCache: Claim
    """The claim of `components.weightCache`."""
    autoscaling: Autoscaling
    monitoring: Monitoring
    networkPolicies: NetworkPolicies = NetworkPolicies()


_EXCLUDED = (("istio", "linkerd"),)
_NEEDED = (("certManager", "mtls"),)


def _rules() -> dict[str, Any]:
    """Returns the rules of JSON schema on components that need or exclude one another."""

    def on(name: str) -> dict[str, Any]:
        return {"properties": {name: {"const": True}}, "required": [name]}

    return {
        "allOf": [
            *({"if": on(name), "then": on(needed)} for name, needed in _NEEDED),
            *({"not": {"allOf": [on(one), on(other)]}} for one, other in _EXCLUDED),
        ]
    }


def components() -> type[Group]:
    """Returns the class of the values that switch components on."""
    fields: dict[str, Any] = {
        name: (bool, Field(False, description=f"The component `{switch.component}`."))
        for name, switch in OPTIONAL.items()
    }
    made: type[Group] = create_model(
        "Components",
        __base__=Group,
        __doc__="Kustomize components that are used, see docs/operations/deploy.md.",
        **fields,
    )
    made.model_config["json_schema_extra"] = _rules()
    return made


def settings() -> type[Group]:
    """Returns the class of the values that are settings of the services."""
    kinds: Mapping[str, type[ServiceSettings]] = {
        "frontend": FrontendSettings,
        "scheduler": SchedulerSettings,
        "worker": WorkerSettings,
    }
    fields: dict[str, Any] = {
        name: (
            dict[str, Setting],
            Field(
                default_factory=dict,
                description=f"Environment variables of the {name}, such as {PREFIX}LOG_LEVEL.",
                json_schema_extra={"propertyNames": _variables(kind)},
            ),
        )
        for name, kind in kinds.items()
    }
    about = "Settings that win over those of the manifests, see docs/settings.md."
    return create_model("Settings", __base__=Group, __doc__=about, **fields)


def _variables(kind: type[ServiceSettings]) -> dict[str, Any]:
    """Returns the rule of JSON schema that a name is a setting's variable, or one of others."""
    names = [f"{PREFIX}{name}".upper() for name in kind.model_fields]
    return {"anyOf": [{"enum": names}, {"not": {"pattern": f"^{PREFIX}"}}]}


def all_values() -> type[Values]:
    """Returns the class of all values: those above, and those that follow from others' lists."""
    made: type[Values] = create_model(
        "AllValues",
        __base__=Values,
        __doc__=Values.__doc__,
        components=(components(), components()()),
        settings=(settings(), settings()()),
        global_=(AnyObject, Field(default_factory=dict, alias="global", description="Helm's own.")),
    )
    return made


def defaults(base: Objects, objects: Objects) -> Values:
    """Returns the values by which the chart makes what the base has. `objects` are those of the
    base with all components whose figures are values."""
    claim = _claim(objects, "orcinus-model")
    scaler = objects["HorizontalPodAutoscaler", "orcinus-frontend"]["spec"]
    pipeline = objects["ConfigMap", "orcinus-pipeline"]["data"]
    scraped_from = objects["NetworkPolicy", "orcinus-metrics"]["spec"]["ingress"][0]["from"][0]
    return all_values().model_validate(
        {
            "model": {"claim": claim},
            "stages": int(pipeline["ORCINUS_N_STAGES"]),
            "listenHost": pipeline["LISTEN_HOST"],
            **{
                name: {"replicas": base["Deployment", f"orcinus-{name}"]["spec"]["replicas"]}
                for name in ("frontend", "scheduler")
            },
            "weightCache": _claim(objects, "orcinus-weight-cache"),
            "autoscaling": {name: scaler[name] for name in ("minReplicas", "maxReplicas")},
            "monitoring": {
                "namespace": scraped_from["namespaceSelector"]["matchLabels"][
                    "kubernetes.io/metadata.name"
                ],
                "release": objects["PodMonitor", "orcinus"]["metadata"]["labels"]["release"],
            },
        }
    )


def _claim(objects: Objects, name: str) -> dict[str, str]:
    spec = objects["PersistentVolumeClaim", name]["spec"]
    return {"size": spec["resources"]["requests"]["storage"]}
