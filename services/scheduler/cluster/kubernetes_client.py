"""The Kubernetes API as the scheduler needs it: one lease to keep, some pods to watch, one
Deployment to scale.

Only the modules `kubernetes_…` import the official client. Failed calls raise the exceptions of
`lease.py` and `pod_directory.py`, which distinguish calls that may be tried again from calls that
are not allowed. Pods are read from the API's JSON and not with the client's models, so that a
server that is newer than the client may send fields and values that the client does not know.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any, Self

import aiohttp
from kubernetes.aio import client, config

from services.common.errors import Unavailable
from services.scheduler.cluster.kubernetes_answer import checked
from services.scheduler.cluster.kubernetes_errors import FAILURES, explain, status_of
from services.scheduler.cluster.kubernetes_lease import KubernetesLeaseStore
from services.scheduler.cluster.kubernetes_scale import KubernetesScale
from services.scheduler.cluster.pod_directory import (
    Pod,
    PodChange,
    PodEvent,
    PodsExpired,
    PodsRefused,
    PodState,
    PodsUnavailable,
)

CALL_TIMEOUT_S = 10.0
"""Timeout in seconds of a call that the server answers at once; callers that need the answer sooner
set a shorter timeout around the call."""

WATCH_TIMEOUT_S = 300
"""Seconds that the server keeps a watch open."""

WATCH_GRACE_S = 30.0
"""Seconds that the client waits beyond `WATCH_TIMEOUT_S` for the server to end the watch."""

SILENCE_LIMIT_S = 150.0
"""Seconds without a line after which a watch is taken for dead: servers send bookmarks every
minute."""

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod: an integer, by which a ReplicaSet deletes pods with lower values first."""

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"


class KubernetesClient:
    """Calls one API server: the server of the cluster in which this pod runs, or the server that
    KUBECONFIG names."""

    def __init__(
        self,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        watch_timeout_s: int = WATCH_TIMEOUT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._call_timeout_s = call_timeout_s
        self._watch_timeout_s = watch_timeout_s
        self._silence_limit_s = silence_limit_s
        self._api: client.ApiClient

    async def __aenter__(self) -> Self:
        """Reads the configuration of the client, and does not connect yet.

        Raises:
            Unavailable: there is no configuration.
        """
        self._api = client.ApiClient(await _configuration())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._api.close()

    def lease_store(self, namespace: str, name: str) -> KubernetesLeaseStore:
        """Returns the store of a Lease object. The first write creates a missing object."""
        return KubernetesLeaseStore(self._api, namespace, name, self._call_timeout_s)

    def scale(self, namespace: str, deployment: str) -> KubernetesScale:
        """Returns the store of the number of replicas of a Deployment."""
        return KubernetesScale(self._api, namespace, deployment, self._call_timeout_s)

    async def pod_state(self, namespace: str, name: str, uid: str) -> PodState:
        """Returns whether a pod exists and whether it runs, as the node of the pod has last
        reported.

        Raises:
            PodsUnavailable: the pods could not be listed.
            PodsRefused: this process may not list pods.
        """
        # The pod is found with `list`, since this process has no right to `get` a pod.
        query = [("fieldSelector", f"metadata.name={name}")]
        try:
            async with await _request_pods(
                self._api, namespace, query, self._call_timeout_s
            ) as response:
                items = (await checked(response)).get("items") or []
            return next((_state(item) for item in items if _uid(item) == uid), PodState.GONE)
        except FAILURES as error:
            raise _pods_trouble(f"list pod {name} in namespace {namespace}", error) from error

    async def set_deletion_cost(self, namespace: str, name: str, cost: int) -> None:
        """Annotates a pod with its deletion cost: Kubernetes deletes pods with lower costs first.

        Raises:
            PodsUnavailable: the pod could not be changed.
            PodsRefused: this process may not change pods.
        """
        request = await self._api.param_serialize(
            "PATCH",
            "/api/v1/namespaces/{namespace}/pods/{name}",
            path_params={"namespace": namespace, "name": name},
            header_params={
                "Accept": "application/json",
                "Content-Type": "application/merge-patch+json",
            },
            body={"metadata": {"annotations": {DELETION_COST: str(cost)}}},
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(*request, _request_timeout=self._call_timeout_s)
            async with answer.response as response:
                await checked(response)
        except FAILURES as error:
            raise _pods_trouble(f"change pod {name} in namespace {namespace}", error) from error

    def pods(self, namespace: str, selector: str) -> "KubernetesPods":
        """Returns a source of the pods in `namespace` whose labels match `selector`."""
        return KubernetesPods(
            self._api,
            namespace,
            selector,
            call_timeout_s=self._call_timeout_s,
            watch_timeout_s=self._watch_timeout_s,
            silence_limit_s=self._silence_limit_s,
        )


class KubernetesPods:
    """A `PodSource` of the pods in a namespace that match a label selector."""

    def __init__(
        self,
        api: client.ApiClient,
        namespace: str,
        selector: str,
        *,
        call_timeout_s: float,
        watch_timeout_s: int,
        silence_limit_s: float,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._call_timeout_s = call_timeout_s
        self._watch_timeout_s = watch_timeout_s
        self._silence_limit_s = silence_limit_s

    async def list_pods(self) -> tuple[Sequence[Pod], str]:
        """Returns the pods and the version from which to watch for changes. Raises the errors of
        `PodSource.list_pods`."""
        try:
            response = await self._request({}, self._call_timeout_s)
            async with response:
                answer = await checked(response)
                return [_pod(item) for item in answer.get("items") or ()], _version(answer)
        except FAILURES as error:
            raise self._translated("list", error) from error

    async def watch_pods(self, version: str) -> AsyncIterator[PodEvent]:
        """Yields the changes of the pods since `version`. Raises the errors of
        `PodSource.watch_pods`."""
        try:
            query = {
                "watch": "true",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(self._watch_timeout_s),
            }
            response = await self._request(query, self._watch_timeout_s + WATCH_GRACE_S)
            async with response:
                if response.status != HTTPStatus.OK:
                    await checked(response)
                yield PodEvent(PodChange.NONE, version)
                while line := await self._next_line(response):
                    yield _event(json.loads(line))
        except FAILURES as error:
            if status_of(error) == HTTPStatus.GONE:
                raise PodsExpired from error
            raise self._translated("watch", error) from error

    async def _request(self, query: dict[str, str], timeout_s: float) -> aiohttp.ClientResponse:
        selected = [("labelSelector", self._selector), *query.items()]
        return await _request_pods(self._api, self._namespace, selected, timeout_s)

    async def _next_line(self, response: aiohttp.ClientResponse) -> bytes:
        async with asyncio.timeout(self._silence_limit_s):
            return await response.content.readline()

    def _translated(self, verb: str, error: Exception) -> PodsRefused | PodsUnavailable:
        return _pods_trouble(f"{verb} pods in namespace {self._namespace}", error)


async def _configuration() -> client.Configuration:
    """Returns the address of the API server and this process's credentials. The client reads the
    token file of a pod again when the token is replaced."""
    configuration = client.Configuration()
    try:
        if os.environ.get(IN_CLUSTER):
            config.load_incluster_config(configuration)
            # Inside a cluster, a proxy of the environment is for the way out of it.
            configuration.client_session_kwargs = {"trust_env": False}
        else:
            await config.load_kube_config(
                os.environ.get("KUBECONFIG"),
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, OSError) as error:
        raise Unavailable(
            "no Kubernetes API: this is no pod with a service account's token, and there is no "
            f"usable KUBECONFIG: {error}"
        ) from error
    return configuration


async def _request_pods(
    api: client.ApiClient, namespace: str, query: list[tuple[str, str]], timeout_s: float
) -> aiohttp.ClientResponse:
    # To import the client's CoreV1Api takes longer than to import the scheduler, and 25 MB.
    request = await api.param_serialize(
        "GET",
        "/api/v1/namespaces/{namespace}/pods",
        path_params={"namespace": namespace},
        query_params=query,
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
    )
    answer = await api.call_api(*request, _request_timeout=timeout_s)
    response: aiohttp.ClientResponse = answer.response
    return response


def _event(line: Any) -> PodEvent:
    """Returns the event that one line of a watch describes. Raises `ApiException` if the line
    reports an error, and ValueError if the line is no event."""
    kind, item = _part(line, "type", str), _part(line, "object", dict)
    match kind:
        case "ADDED" | "MODIFIED":
            return PodEvent(PodChange.SET, _version(item), _pod(item))
        case "DELETED":
            return PodEvent(PodChange.DELETED, _version(item), _pod(item))
        case "BOOKMARK":
            return PodEvent(PodChange.NONE, _version(item))
        case "ERROR":
            raise client.ApiException(item.get("code"), item.get("reason"), body=json.dumps(item))
    raise ValueError(f"an event of an unknown type, {kind}")


def _pod(item: Any) -> Pod:
    metadata = _part(item, "metadata", dict)
    status = item.get("status") or {}
    return Pod(
        name=_part(metadata, "name", str),
        uid=_uid(item),
        created=_part(metadata, "creationTimestamp", str),
        phase=status.get("phase") or "",
        ip=status.get("podIP") or "",
        is_terminating=bool(metadata.get("deletionTimestamp")),
    )


def _state(item: Any) -> PodState:
    """Returns the state of a pod. A pod runs if one of its containers runs."""
    statuses = (item.get("status") or {}).get("containerStatuses") or ()
    runs = any("running" in (status.get("state") or {}) for status in statuses)
    return PodState.RUNS if runs else PodState.IDLE


def _uid(item: Any) -> str:
    uid: str = _part(_part(item, "metadata", dict), "uid", str)
    return uid


def _version(item: Any) -> str:
    version: str = _part(_part(item, "metadata", dict), "resourceVersion", str)
    return version


def _part(item: Any, name: str, kind: type[Any]) -> Any:
    """Returns a field that every answer of the API has. Raises ValueError if the field is missing,
    empty or not of the type `kind`, because then another server may have answered."""
    part = item.get(name) if isinstance(item, dict) else None
    if not isinstance(part, kind) or not part:
        raise ValueError(f"{name} is missing in what should be the answer of a Kubernetes API")
    return part


def _pods_trouble(action: str, error: Exception) -> PodsRefused | PodsUnavailable:
    message = explain(action, error)
    if status_of(error) in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return PodsRefused(message)
    return PodsUnavailable(message)
