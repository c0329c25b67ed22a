"""A Kubernetes API on a real socket. It has at most one lease, some pods, and the scale of one
Deployment.

The API keeps the rules that matter. Every change has a version. A lease is replaced only if the
request has the newest version, and is created by a PUT without a version. A watch starts at a
version, and is refused if that version has been compacted away. A test causes faults with fields
and methods: errors, delays, dropped connections.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

NAMESPACE = "orcinus"
LEASE = "orcinus-scheduler"
DEPLOYMENT = "orcinus-worker"
TOKEN = "first-token"

Object = dict[str, Any]

RUNNING: Object = {"running": {"startedAt": "2026-11-20T10:00:00Z"}}
"""State of a container that runs."""


@dataclass
class FakeKubernetes:
    """The state of one API server, and the faults that it simulates."""

    token: str = TOKEN
    """The only token that the API accepts."""

    errors: dict[str, int] = field(default_factory=dict)
    """Statuses with which requests are refused, by verb: get, create, update, list, watch, patch;
    for the scale, get-scale and patch-scale."""

    slow: dict[str, float] = field(default_factory=dict)
    """Seconds by which answers are delayed, by verb. The request still takes effect at once."""

    watch_errors: list[int] = field(default_factory=list)
    """Codes of the `ERROR` events with which the next watches begin."""

    requests: list[str] = field(default_factory=list)
    """The verbs of all requests, in order."""

    n_sent: int = 0
    """Number of events that watches have sent."""

    version: int = 100
    compacted: int = 0
    lease: Object | None = None
    pods: dict[str, Object] = field(default_factory=dict)
    n_replicas: int | None = None
    """Replicas of the Deployment; None if there is no Deployment."""
    on_scale: Callable[[int], None] = lambda _: None
    """Called when a client has set the number of replicas."""
    host: str = ""
    _events: list[tuple[int, Object]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _watches: set[web.StreamResponse] = field(default_factory=set)
    _transports: set[asyncio.Transport] = field(default_factory=set)
    _stopping: bool = False

    @property
    def n_watches(self) -> int:
        """Number of watches that are open."""
        return len(self._watches)

    def create_lease(self, **spec: Any) -> None:
        """Creates the lease. `spec` has the fields of its `spec`. Without them, the lease is empty,
        as after applying a manifest without a `spec`."""
        self.version += 1
        metadata = {
            "name": LEASE,
            "namespace": NAMESPACE,
            "uid": f"lease-{self.version}",
            "resourceVersion": str(self.version),
            "creationTimestamp": "2026-11-20T10:00:00Z",
            "annotations": {"made-by": "a manifest"},
            "managedFields": [
                {
                    "manager": "kubectl",
                    "operation": "Update",
                    "apiVersion": "coordination.k8s.io/v1",
                    "time": "2026-11-20T10:00:00Z",
                    "fieldsType": "FieldsV1",
                    "fieldsV1": {"f:metadata": {"f:annotations": {".": {}}}},
                }
            ],
        }
        self.lease = {
            "kind": "Lease",
            "apiVersion": "coordination.k8s.io/v1",
            "metadata": metadata,
            "spec": spec,
        }

    def set_pod(self, name: str, **changes: Any) -> None:
        """Creates or changes a pod. The arguments are the arguments of `pod`."""
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self._publish(kind, pod(name, **changes))

    def delete_pod(self, name: str) -> None:
        """Removes a pod, and tells watches so."""
        self._publish("DELETED", dict(self.pods[name]))

    def bookmark(self) -> None:
        """Sends watches a bookmark: an event that has only a new version."""
        self.version += 1
        metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
        self._tell({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}})

    def send_garbage(self) -> None:
        """Sends watches an event of an unknown type."""
        self.version += 1
        self._tell({"type": "GREETING", "object": {"kind": "Pod", "metadata": {}}})

    def compact(self) -> None:
        """Forgets all earlier versions, so that a watch cannot start from them."""
        self.version += 1
        self.compacted = self.version
        self._events.clear()

    def drop_connections(self) -> None:
        """Aborts all connections at once, also in the middle of an answer."""
        for transport in self._transports:
            transport.abort()

    def end_watches(self) -> None:
        """Ends all watches without an error, as a server does when the time limit of a watch is
        reached."""
        self._watches.clear()
        self._wake()

    def _publish(self, kind: str, item: Object) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        name = item["metadata"]["name"]
        if kind == "DELETED":
            del self.pods[name]
        else:
            self.pods[name] = item
        self._tell({"type": kind, "object": item})

    def _tell(self, event: Object) -> None:
        self._events.append((self.version, event))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _begin(self, request: web.Request, verb: str) -> web.Response | None:
        """Records and checks a request at the beginning of a handler. Returns the refusal if the
        request is refused, otherwise None."""
        self.requests.append(verb)
        if request.transport is not None:
            self._transports.add(request.transport)
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}":
            return _status(401, "Unauthorized")
        code = self.errors.get(verb)
        if code is not None:
            return _status(code, f"this server cannot {verb} today")
        return None

    async def get_lease(self, request: web.Request) -> web.Response:
        """Handles a request to read the lease."""
        answer = await self._begin(request, "get")
        if answer is None and self.lease is None:
            answer = _status(404, f'leases.coordination.k8s.io "{LEASE}" not found')
        answer = answer or web.json_response(self.lease)
        await asyncio.sleep(self.slow.get("get", 0))
        return answer

    async def put_lease(self, request: web.Request) -> web.Response:
        """Handles a request to create the lease or to replace it. Replacing requires its newest
        version."""
        answer = await self._begin(request, "create" if self.lease is None else "update")
        body = await request.json()
        if answer is None:
            answer = self._replace_lease(body)
        await asyncio.sleep(self.slow.get("update", 0))
        return answer

    def _replace_lease(self, body: Object) -> web.Response:
        for name in ("acquireTime", "renewTime"):
            time = body["spec"].get(name)
            if time is not None and "." not in time:
                return _status(400, f'parsing time "{time}" as "2006-01-02T15:04:05.000000Z07:00"')
        sent = body["metadata"]
        if self.lease is None:
            if "uid" in sent:
                return _status(409, "Precondition failed: UID in precondition")
            self.create_lease()
            assert self.lease is not None
            self.lease |= {"metadata": self.lease["metadata"] | sent, "spec": body["spec"]}
            return web.json_response(self.lease, status=201)
        known = self.lease["metadata"]
        if "resourceVersion" not in sent:
            return _status(422, "metadata.resourceVersion: must be specified for an update")
        if sent.get("uid", known["uid"]) != known["uid"]:
            return _status(409, "Precondition failed: UID in precondition")
        if sent["resourceVersion"] != known["resourceVersion"]:
            return _status(409, "the object has been modified")
        self.version += 1
        self.lease = self.lease | body
        self.lease["metadata"] = sent | {
            "uid": known["uid"],
            "resourceVersion": str(self.version),
        }
        return web.json_response(self.lease)

    async def patch_pod(self, request: web.Request) -> web.Response:
        """Handles a merge patch of the annotations of a pod."""
        answer = await self._begin(request, "patch")
        if answer is not None:
            return answer
        item = self.pods.get(request.match_info["name"])
        if item is None:
            return _status(404, "pods not found")
        if request.content_type != "application/merge-patch+json":
            return _status(415, "the body of the request was in an unknown format")
        patch = await request.json()
        annotations = item["metadata"].get("annotations", {}) | patch["metadata"]["annotations"]
        metadata = item["metadata"] | {"annotations": annotations}
        self._publish("MODIFIED", item | {"metadata": metadata})
        return web.json_response(item)

    async def get_scale(self, request: web.Request) -> web.Response:
        """Handles a request to read the number of replicas."""
        refusal = await self._begin(request, "get-scale")
        await asyncio.sleep(self.slow.get("get-scale", 0))
        return refusal or self._scale()

    async def patch_scale(self, request: web.Request) -> web.Response:
        """Handles a request to set the number of replicas."""
        refusal = await self._begin(request, "patch-scale")
        if request.content_type != "application/merge-patch+json":
            return _status(415, f"the media type {request.content_type} is not supported")
        if refusal is None and self.n_replicas is not None:
            self.n_replicas = int((await request.json())["spec"]["replicas"])
            self.on_scale(self.n_replicas)
        await asyncio.sleep(self.slow.get("patch-scale", 0))
        return refusal or self._scale()

    def _scale(self) -> web.Response:
        """Returns the answer with the scale of the Deployment. The number of replicas is left out
        if it is 0, as by a real API server."""
        if self.n_replicas is None:
            return _status(404, f'deployments.apps "{DEPLOYMENT}" not found')
        return web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": DEPLOYMENT, "namespace": NAMESPACE},
                "spec": {"replicas": self.n_replicas} if self.n_replicas else {},
                "status": {"replicas": len(self.pods), "selector": "app=worker"},
            }
        )

    async def get_pods(self, request: web.Request) -> web.StreamResponse:
        """Handles a request to list or to watch pods."""
        is_watch = request.query.get("watch", "").lower() == "true"
        verb = "watch" if is_watch else "list"
        answer = await self._begin(request, verb)
        await asyncio.sleep(self.slow.get(verb, 0))
        if answer is not None:
            return answer
        if is_watch:
            return await self._watch(request)
        items = [item for item in self.pods.values() if _selects(request, item)]
        return web.json_response(
            {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items or None,
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self.compacted:
            return _status(410, "too old resource version")
        timeout_s = int(request.query["timeoutSeconds"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if self.watch_errors:
            item = _failure(self.watch_errors.pop(0), "too old resource version")
            await response.write(_line({"type": "ERROR", "object": item}))
            return response
        self._watches.add(response)
        try:
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                async with asyncio.timeout(timeout_s):
                    await self._send_events(request, response, since)
        finally:
            self._watches.discard(response)
        return response

    async def _send_events(
        self, request: web.Request, response: web.StreamResponse, since: int
    ) -> None:
        while response in self._watches and not self._stopping:
            news = self._news
            for version, event in list(self._events):
                if version > since and _selects(request, event["object"]):
                    await response.write(_line(event))
                    self.n_sent += 1
                    since = version
            if news is self._news:
                await news.wait()

    def stop(self) -> None:
        """Ends the watches, so that the server can stop."""
        self._stopping = True
        self._wake()


def pod(
    name: str,
    *,
    ip: str | None = None,
    uid: str | None = None,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    created: str = "2026-11-20T10:00:00Z",
    deleted: str | None = None,
    states: Sequence[Object] = (),
) -> Object:
    """Returns a pod as the API describes it. `states` are the states of its containers."""
    metadata: Object = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": uid or f"{name}-uid",
        "creationTimestamp": created,
        "labels": {"app": "worker"} | (labels or {}),
    }
    if deleted:
        metadata["deletionTimestamp"] = deleted
    status: Object = {"phase": phase, "inventedByALaterVersion": {"yes": True}}
    if states:
        status["containerStatuses"] = [{"state": state} for state in states]
    if ip:
        status["podIP"] = ip
    return {"metadata": metadata, "spec": {"containers": [{"name": "worker"}]}, "status": status}


@contextlib.asynccontextmanager
async def fake_kubernetes(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeKubernetes]:
    """Serves an API with an empty lease and no pods on loopback."""
    api = FakeKubernetes()
    api.create_lease()
    app = web.Application()
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{LEASE}"
    app.router.add_get(lease, api.get_lease)
    app.router.add_put(lease, api.put_lease)
    scale = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{DEPLOYMENT}/scale"
    app.router.add_get(scale, api.get_scale)
    app.router.add_patch(scale, api.patch_scale)
    app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods", api.get_pods)
    app.router.add_patch(f"/api/v1/namespaces/{NAMESPACE}/pods/{{name}}", api.patch_pod)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    api.host = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield api
    finally:
        api.stop()
        await runner.cleanup()


def write_kubeconfig(api: FakeKubernetes, directory: Path) -> Path:
    """Writes a kubeconfig with the URL and the token of the API, and returns its path."""
    path = directory / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "clusters": [{"name": "fake", "cluster": {"server": api.host}}],
        "users": [{"name": "fake", "user": {"token": api.token}}],
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def _selects(request: web.Request, item: Object) -> bool:
    labels = item["metadata"].get("labels")
    if labels is None:
        return True  # not of a pod
    if "fieldSelector" in request.query:
        return request.query["fieldSelector"] == f"metadata.name={item['metadata']['name']}"
    wanted = request.query.get("labelSelector", "")
    return all(
        labels.get(key) == value
        for key, _, value in (part.partition("=") for part in wanted.split(",") if part)
    )


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _failure(code: int, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


def _status(code: int, message: str) -> web.Response:
    return web.json_response(_failure(code, message), status=code)
