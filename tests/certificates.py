"""A certificate authority for tests, and directories of certificates in the form in which
Kubernetes mounts Secrets."""

import datetime
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.limits import HANG_S

LIFE = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    @property
    def serial_number(self) -> int:
        """Returns the serial number, which differs between two certificates for the same names."""
        return x509.load_pem_x509_certificate(self.certificate).serial_number


class Authority:
    """A private certificate authority."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: str, password: bytes | None = None) -> Pem:
        """Returns a new certificate for DNS names or IP addresses, for servers and for clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name("a test"), self._name, key.public_key())
            .add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        return Pem(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                encryption,
            ),
        )

    def mount(self, directory: Path, *names: str) -> Pem:
        """Issues a certificate, and puts it, its key and the authority's own certificate into a
        directory."""
        pem = self.issue(*names)
        mount(
            directory,
            {"tls.crt": pem.certificate, "tls.key": pem.key, "ca.crt": self.certificate},
        )
        return pem


def server_context(directory: Path, authority: Authority, *names: str) -> ssl.SSLContext:
    """Puts a new certificate into a directory, and returns the TLS context of a server with this
    certificate."""
    authority.mount(directory, *names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return context


def mount(directory: Path, files: dict[str, bytes]) -> None:
    """Replaces all files of a directory in one atomic step, as kubelet does.

    The files are links into `..data`. This is itself a link, and only this link is replaced.
    """
    directory.mkdir(exist_ok=True)
    renewal = directory / f"..{len(list(directory.glob('..[0-9]*')))}"
    renewal.mkdir()
    for name, content in files.items():
        (renewal / name).write_bytes(content)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data") / name)
    (directory / "..next").symlink_to(renewal.name)
    os.replace(directory / "..next", directory / "..data")


def serial_number_at(address: str, context: ssl.SSLContext, *, name: str | None = None) -> int:
    """Returns the serial number of the certificate that a server shows to a new connection. Blocks
    until the handshake is complete."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC insists on it
    with (
        socket.create_connection((host, int(port)), HANG_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFE)
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
