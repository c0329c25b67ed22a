"""Stores the lease of an election as a Lease object of the Kubernetes API."""

from datetime import UTC, datetime, timedelta
from http import HTTPStatus

from kubernetes.aio import client

from services.scheduler.cluster.kubernetes_errors import FAILURES, explain, status_of
from services.scheduler.cluster.lease import LeaseConflict, LeaseRecord, LeaseUnavailable

ADDRESS_ANNOTATION = "orcinus/leader-address"
"""Annotation of the lease that says where its holder listens."""

MODEL_ANNOTATION = "orcinus/model"
"""Annotation of the lease that describes the model that was served last."""

RELEASED_ANNOTATION = "orcinus/released"
"""Annotation of a lease that its last holder has given away."""


class KubernetesLeaseStore:
    """A `LeaseStore` that keeps the lease in a Lease object (`coordination.k8s.io/v1`)."""

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
        """Reads the lease. Raises the errors of `LeaseStore.read`."""
        try:
            lease = await self._api.read_namespaced_lease(
                self._name, self._namespace, _request_timeout=self._call_timeout_s
            )
        except FAILURES as error:
            if status_of(error) == HTTPStatus.NOT_FOUND:
                self._metadata = self._new_metadata()
                return LeaseRecord(holder="", transitions=0, duration_s=0, version="")
            raise LeaseUnavailable(self._explain("get", error)) from error
        return self._record(lease)

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Replaces or creates the lease. Raises the errors of `LeaseStore.write`.

        The lease is replaced and created by a PUT: the API creates a Lease that is not there, and
        refuses to replace a Lease without its version. The right to create by a PUT can be limited
        to one name, unlike the right to create by a POST.
        """
        # Labels, owners and annotations of other programs are written back as they were read. The
        # server refuses the write if the lease has changed since.
        own = {
            ADDRESS_ANNOTATION: record.address,
            MODEL_ANNOTATION: record.model,
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
        except FAILURES as error:
            if _is_conflict(error, record):
                raise LeaseConflict(f"lease {self._name} has been written by another") from error
            raise LeaseUnavailable(
                self._explain("update" if record.version else "create", error)
            ) from error
        return self._record(lease)

    def _record(self, lease: client.V1Lease) -> LeaseRecord:
        metadata = lease.metadata
        if metadata is None or not metadata.resource_version:
            # Every Lease has a version: this is the answer of another server, such as a proxy.
            raise LeaseUnavailable(f"cannot get lease {self._name}: the answer has no version")
        self._metadata = metadata
        spec = lease.spec or client.V1LeaseSpec()
        annotations = metadata.annotations or {}
        return LeaseRecord(
            holder=spec.holder_identity or "",
            transitions=spec.lease_transitions or 0,
            duration_s=spec.lease_duration_seconds or 0,
            version=metadata.resource_version,
            address=annotations.get(ADDRESS_ANNOTATION, ""),
            model=annotations.get(MODEL_ANNOTATION, ""),
            is_released=RELEASED_ANNOTATION in annotations,
            acquire_time=spec.acquire_time,
            renew_time=spec.renew_time,
        )

    def _explain(self, verb: str, error: Exception) -> str:
        return explain(f"{verb} lease {self._namespace}/{self._name}", error)


def _micro_time(time: datetime | None) -> datetime | None:
    """Returns the time in UTC, moved by a microsecond if it is a whole second. The client would
    write a whole second without a fraction, which the API refuses."""
    if time is None:
        return None
    time = time.astimezone(UTC)
    return time if time.microsecond else time + timedelta(microseconds=1)


def _is_conflict(error: Exception, record: LeaseRecord) -> bool:
    """Returns whether a write of a lease failed because the stored lease is not the one from which
    `record` was made.

    This is so if another process has written the lease (409), if the lease was deleted (404), or if
    it exists although the record has no version (422 for the missing version).
    """
    if not isinstance(error, client.ApiException):
        return False
    if error.status == HTTPStatus.NOT_FOUND:
        return bool(record.version)
    if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return not record.version and "metadata.resourceVersion" in (error.body or "")
    return bool(error.status == HTTPStatus.CONFLICT)
