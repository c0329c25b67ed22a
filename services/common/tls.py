"""Sets up TLS between services, and between services and clients, with certificate files that may
be renewed while processes run.

A certificate names the role of a process, not its address: each role has a DNS name, which a
certificate of that role carries among its alternative names (SAN). The caller checks that the
server has the expected role, and ignores the server's address, because addresses of pods change.
The server accepts only certificates of the same authority, and checks that the caller's role may
call the method (`rpc_handlers`). Between services TLS is always mutual; clients of the public API
need no certificate.

The files are in a directory with the layout of a Kubernetes TLS Secret. When they are renewed, new
connections use the new files, and open connections keep the old ones. Tensors between ranks are not
sent over these connections, and are not encrypted.
"""

import os
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from services.common import rpc
from services.common.mounted import Mounted

FRONTEND = "orcinus-frontend"
SCHEDULER = "orcinus-scheduler"
WORKER = "orcinus-worker"

CHAIN, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
CURRENT = "..data"
"""Name of the symbolic link that points to the present content of a volume that kubelet has
mounted.

An update replaces this link, and not the files.
"""


@dataclass(frozen=True, slots=True)
class _Files:
    """The PEM files of a directory. Their content is compared to detect changes."""

    directory: Path
    chain: bytes
    key: bytes
    authority: bytes | None


@dataclass(frozen=True, slots=True)
class _Identity:
    """The files of one certificate, with an `ssl.SSLContext` that uses them."""

    files: _Files
    context: ssl.SSLContext

    def for_grpc_server(self) -> grpc.ServerCertificateConfiguration:
        files = self.files
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.chain)], files.authority
        )

    def for_grpc_channel(self) -> grpc.ChannelCredentials:
        files = self.files
        return grpc.ssl_channel_credentials(files.authority, files.key, files.chain)


Certificates = Mounted[_Files, _Identity]


def connector(tls_dir: Path | None, *, role: str) -> rpc.Connect:
    """Returns a function that opens channels to peers of the role `role`. If `tls_dir` is None, the
    channels are in plaintext.

    A channel keeps the certificate with which it was opened.

    Raises:
        OSError: the files are missing or broken.
    """
    if tls_dir is None:
        return rpc.connect
    certificates = _certificates(tls_dir, is_mutual=True)

    def connect(address: str, options: Sequence[tuple[str, str | int]] = ()) -> grpc.aio.Channel:
        return rpc.connect(
            address,
            (*options, ("grpc.ssl_target_name_override", role)),
            credentials=certificates.latest().for_grpc_channel(),
        )

    return connect


def server_credentials(
    tls_dir: Path | None, *, require_client_certificate: bool = True
) -> grpc.ServerCredentials | None:
    """Returns the credentials that a gRPC server uses for new connections. Returns None if
    `tls_dir` is None.

    Raises:
        OSError: the files are missing or broken.
    """
    if tls_dir is None:
        return None
    certificates = _certificates(tls_dir, is_mutual=require_client_certificate)
    initial = certificates.latest()
    return grpc.dynamic_ssl_server_credentials(
        initial.for_grpc_server(),
        _changes(certificates, initial),  # type: ignore[arg-type]  # None is allowed
        require_client_authentication=require_client_certificate,
    )


def server_context(tls_dir: Path | None) -> ssl.SSLContext | None:
    """Returns the TLS context that an HTTP server uses for new connections. Returns None if
    `tls_dir` is None.

    Raises:
        OSError: the files are missing or broken.
    """
    if tls_dir is None:
        return None
    certificates = _certificates(tls_dir, is_mutual=False)

    def on_hello(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = certificates.latest().context

    # The callback is called for each connection, also if its client names no server.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = on_hello
    return context


def callers(
    tls_dir: Path | None, table: Mapping[str, Collection[str]]
) -> Mapping[str, Collection[str]] | None:
    """Returns `table`, which has the roles that may call each method. Returns None, for no check,
    if `tls_dir` is None, because callers cannot prove their roles without TLS."""
    return None if tls_dir is None else table


def _changes(
    certificates: Certificates, current: _Identity
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Returns a function that gRPC calls in one of its threads before each handshake, to get a
    renewed certificate.

    The function returns None if the files have not changed.
    """

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        latest = certificates.latest()
        if latest is current:
            return None
        current = latest
        return latest.for_grpc_server()

    return fetch


def _certificates(tls_dir: Path, *, is_mutual: bool) -> Certificates:
    try:
        return Mounted(tls_dir, lambda: _read(tls_dir, is_mutual=is_mutual), _load)
    except ValueError as error:
        raise OSError(str(error)) from error


def _read(tls_dir: Path, *, is_mutual: bool) -> _Files:
    # Resolved once, so that all files are of the same renewal.
    current = tls_dir / CURRENT
    directory = Path(os.path.realpath(current)) if current.is_symlink() else tls_dir
    return _Files(
        directory,
        (directory / CHAIN).read_bytes(),
        (directory / KEY).read_bytes(),
        (directory / AUTHORITY).read_bytes() if is_mutual else None,
    )


def _load(files: _Files) -> _Identity:
    """Loads the files and checks them. The check is needed because gRPC gives no reason when files
    are wrong.

    Raises:
        OSError: the files have changed while they were loaded.
        ValueError: a file is wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    directory = files.directory
    try:
        context.load_cert_chain(directory / CHAIN, directory / KEY, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"{directory}: {CHAIN} and {KEY} are not a certificate and its key: {error}"
        ) from error
    if files.authority is not None:
        try:
            context.load_verify_locations(cadata=files.authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"{directory / AUTHORITY}: no certificates: {error}") from error
    if _read(directory, is_mutual=files.authority is not None) != files:
        raise OSError(f"{directory}: changes while it is read")
    return _Identity(files, context)


def _no_password() -> str:
    raise ValueError("the key is encrypted")
