"""The Kubernetes API as the scheduler needs it: one lease to keep, some pods to watch.

Only this module imports the official client. Failed calls raise the exceptions of `lease.py` and
`pod_directory.py`, which say whether a call may be tried again or is not allowed. Pods are read
from the API's JSON and not with the client's models, so that a server that is newer than the client
may send fields and values that the client does not know.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, Self

import aiohttp
from kubernetes.aio import client, config

from services.common.errors import Unavailable
from services.scheduler.cluster.lease import LeaseConflict, LeaseRecord, LeaseUnavailable
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

ADDRESS_ANNOTATION = "orcinus/leader-address"
"""Annotation of the lease that says where its holder listens."""

RELEASED_ANNOTATION = "orcinus/released"
"""Annotation of a lease that its last holder has given away."""

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"

_FAILURES = (
    client.ApiException,
    config.ConfigException,  # a token file that is being replaced
    aiohttp.ClientError,
    OSError,  # TimeoutError among them
    ValueError,  # a malformed answer: errors of JSON and pydantic are ValueErrors
)


class KubernetesClient:
    """Connections to one API server: the server of the cluster in which this pod runs, or the
    server that KUBECONFIG names."""

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
        """Reads the configuration; nothing is connected yet.

        Raises:
            Unavailable: there is no configuration.
        """
        self._api = client.ApiClient(await _configuration())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._api.close()

    def lease_store(self, namespace: str, name: str) -> "KubernetesLeaseStore":
        """Returns the store of a Lease object; the first write creates it."""
        return KubernetesLeaseStore(self._api, namespace, name, self._call_timeout_s)

    async def pod_state(self, namespace: str, name: str, uid: str) -> PodState:
        """Returns whether a pod is there and runs, as its node has last reported.

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
                items = (await _checked(response)).get("items") or []
            return next((_state(item) for item in items if _uid(item) == uid), PodState.GONE)
        except _FAILURES as error:
            raise _pods_trouble(f"list pod {name} in namespace {namespace}", error) from error

    def pods(self, namespace: str, selector: str) -> "KubernetesPods":
        """Returns the pods that have certain labels."""
        return KubernetesPods(
            self._api,
            namespace,
            selector,
            call_timeout_s=self._call_timeout_s,
            watch_timeout_s=self._watch_timeout_s,
            silence_limit_s=self._silence_limit_s,
        )


class KubernetesLeaseStore:
    """A `LeaseStore` on an object of `coordination.k8s.io/v1`."""

    def __init__(
        self, api: client.ApiClient, namespace: str, name: str, call_timeout_s: float
    ) -> None:
        self._api = client.CoordinationV1Api(api)
        self._namespace = namespace
        self._name = name
        self._call_timeout_s = call_timeout_s
        self._metadata = self._new_metadata()

    def _new_metadata(self) -> client.V1ObjectMeta:
        return client.V1ObjectMeta(name=self._name, namespace=self._namespace)

    async def read(self) -> LeaseRecord:
        """Reads the lease; raises as `LeaseStore.read`."""
        try:
            lease = await self._api.read_namespaced_lease(
                self._name, self._namespace, _request_timeout=self._call_timeout_s
            )
        except _FAILURES as error:
            if _status(error) == HTTPStatus.NOT_FOUND:
                self._metadata = self._new_metadata()
                return LeaseRecord(holder="", transitions=0, duration_s=0, version="")
            raise LeaseUnavailable(self._explain("get", error)) from error
        return self._record(lease)

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Replaces or creates the lease; raises as `LeaseStore.write`.

        Both are a PUT: the API creates a Lease that is not there, and refuses to replace one
        without its version. The right to create by a PUT can be limited to one name, unlike the
        right to create by a POST.
        """
        # Labels, owners and annotations of other programs are written back as they were read. The
        # server refuses the write if the lease has changed since.
        own = {
            ADDRESS_ANNOTATION: record.address,
            RELEASED_ANNOTATION: "true" if record.is_released else "",
        }
        annotations = {**(self._metadata.annotations or {}), **own}
        metadata = self._metadata.model_copy(
            update={
                "resource_version": record.version or None,
                "annotations": {key: text for key, text in annotations.items() if text},
            }
        )
        spec = client.V1LeaseSpec(
            holder_identity=record.holder,
            lease_transitions=record.transitions,
            lease_duration_seconds=record.duration_s,
            acquire_time=_micro_time(record.acquire_time),
            renew_time=_micro_time(record.renew_time),
        )
        try:
            lease = await self._api.replace_namespaced_lease(
                self._name,
                self._namespace,
                client.V1Lease(metadata=metadata, spec=spec),
                _request_timeout=self._call_timeout_s,
            )
        except _FAILURES as error:
            if _is_conflict(error, record):
                raise LeaseConflict(f"lease {self._name} has been written by another") from error
            raise LeaseUnavailable(
                self._explain("update" if record.version else "create", error)
            ) from error
        return self._record(lease)

    def _record(self, lease: client.V1Lease) -> LeaseRecord:
        metadata = lease.metadata
        if metadata is None or not metadata.resource_version:
            # A write without a version would overwrite any other process's write.
            raise LeaseUnavailable(f"cannot get lease {self._name}: the answer has no version")
        self._metadata = metadata
        spec = lease.spec or client.V1LeaseSpec()
        return LeaseRecord(
            holder=spec.holder_identity or "",
            transitions=spec.lease_transitions or 0,
            duration_s=spec.lease_duration_seconds or 0,
            version=metadata.resource_version,
            address=(metadata.annotations or {}).get(ADDRESS_ANNOTATION, ""),
            is_released=RELEASED_ANNOTATION in (metadata.annotations or {}),
            acquire_time=spec.acquire_time,
            renew_time=spec.renew_time,
        )

    def _explain(self, verb: str, error: Exception) -> str:
        return _explain(f"{verb} lease {self._namespace}/{self._name}", error)


class KubernetesPods:
    """A `PodSource` on the pods of a namespace."""

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
        """Lists the pods; raises as `PodSource.list_pods`."""
        try:
            response = await self._request({}, self._call_timeout_s)
            async with response:
                answer = await _checked(response)
                return [_pod(item) for item in answer.get("items") or ()], _version(answer)
        except _FAILURES as error:
            raise self._translated("list", error) from error

    async def watch_pods(self, version: str) -> AsyncIterator[PodEvent]:
        """Yields changes of the pods; raises as `PodSource.watch_pods`."""
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
                    await _checked(response)
                yield PodEvent(PodChange.NONE, version)
                while line := await self._next_line(response):
                    yield _event(json.loads(line))
        except _FAILURES as error:
            if _status(error) == HTTPStatus.GONE:
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


async def _checked(response: aiohttp.ClientResponse) -> Any:
    """Returns the JSON of an answer; raises ApiException if the answer reports an error."""
    text = await response.text()
    if response.status != HTTPStatus.OK:
        raise client.ApiException(response.status, response.reason, body=text)
    return json.loads(text)


def _event(line: Any) -> PodEvent:
    """Returns the event that one line of a watch describes."""
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
    """Returns the state of a pod: it runs if one of its containers runs."""
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
    """Returns a field that every answer of the API has; raises ValueError if the field is missing,
    since then another server may have answered."""
    part = item.get(name) if isinstance(item, dict) else None
    if not isinstance(part, kind) or not part:
        raise ValueError(f"{name} is missing in what should be the answer of a Kubernetes API")
    return part


def _micro_time(time: datetime | None) -> datetime | None:
    """Returns the time in UTC, moved by a microsecond if it is a whole second. The client would
    write a whole second without a fraction, which the API refuses."""
    if time is None:
        return None
    time = time.astimezone(UTC)
    return time if time.microsecond else time + timedelta(microseconds=1)


def _status(error: Exception) -> int | None:
    return error.status if isinstance(error, client.ApiException) else None


def _is_conflict(error: Exception, record: LeaseRecord) -> bool:
    """Returns whether a write of a lease failed because the lease is not what `record` was made
    from: another process has written it (409), it was deleted (404), or it is there although the
    record has no version (422 for the missing version)."""
    if not isinstance(error, client.ApiException):
        return False
    if error.status == HTTPStatus.NOT_FOUND:
        return bool(record.version)
    if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return not record.version and "metadata.resourceVersion" in (error.body or "")
    return bool(error.status == HTTPStatus.CONFLICT)


def _pods_trouble(action: str, error: Exception) -> PodsRefused | PodsUnavailable:
    message = _explain(action, error)
    if _status(error) in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return PodsRefused(message)
    return PodsUnavailable(message)


def _explain(action: str, error: Exception) -> str:
    """Returns the reason of a failure in one line. It contains the message of the API server, if
    there is one, since that message names the account and the right that the account lacks."""
    if not isinstance(error, client.ApiException):
        return f"cannot {action}: {str(error) or type(error).__name__}"
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, LookupError, TypeError):
        message = error.reason
    return f"cannot {action}: {error.status} {message}"
