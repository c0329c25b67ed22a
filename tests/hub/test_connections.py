"""Sources behind private authorities and proxies are reached, or the message names the trouble."""

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import get_session

from services.hub.authorities import named_authorities
from services.hub.proxies import proxy_for
from services.hub.s3_storage import Bucket
from services.hub.snapshot import connect
from services.hub.source import SourceError
from services.hub.unreachable import unreachable
from tests.addresses import free_address
from tests.certificates import Authority, server_context
from tests.fake_hub import FakeHub, Repository, checkpoint
from tests.fake_proxy import FakeProxy
from tests.fake_s3 import FakeS3
from tests.limits import HANG_S

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PATH = "/api/models/org/model/revision/main"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of a process that nobody has told anything."""
    for name in (*PROXIES, *map(str.upper, PROXIES), *AUTHORITIES, "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(tmp_path: Path, authority: Authority) -> ssl.SSLContext:
    """A server whose authority is in the file `server/ca.crt`."""
    return server_context(tmp_path / "server", authority, "localhost")


@pytest.fixture
def ca(tmp_path: Path, tls: ssl.SSLContext) -> str:
    return str(tmp_path / "server" / "ca.crt")


@pytest.fixture
def hub(tls: ssl.SSLContext) -> Iterator[FakeHub]:
    with FakeHub({"org/model": Repository(checkpoint())}).serving(tls) as serving:
        yield serving


@pytest.fixture
def s3(tls: ssl.SSLContext, environment: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with FakeS3().serving(tls) as serving:
        serving.put("models", "small", {"config.json": b"{}"})
        for name, value in serving.environment(Path("/nowhere")).items():
            if name.startswith("AWS_"):
                environment.setenv(name, value)
        yield serving


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with FakeProxy().serving() as serving:
        yield serving


def trouble_with(hub: FakeHub) -> str:
    """Asks a hub as the library does; returns why it cannot be reached, or nothing."""
    connect(os.environ)
    try:
        assert get_session().get(hub.url + PATH).status_code == 200
    except httpx2.TransportError as error:
        return unreachable(hub.url, error)
    return ""


def listed() -> list[str]:
    return [it.key for it in Bucket("models").objects_in("small")]


@pytest.mark.parametrize("variable", AUTHORITIES)
@pytest.mark.parametrize("kind", ["hub", "s3"])
def test_each_usual_variable_names_an_authority(
    request: pytest.FixtureRequest,
    environment: pytest.MonkeyPatch,
    ca: str,
    tmp_path: Path,
    variable: str,
    kind: str,
) -> None:
    other = tmp_path / "other.crt"
    other.write_bytes(b"# words: \xc3\xa9\n" + Authority("another").certificate)
    environment.setenv(variable, str(tmp_path / "server") if variable.endswith("DIR") else ca)
    environment.setenv(
        "SSL_CERT_FILE" if variable != "SSL_CERT_FILE" else "CURL_CA_BUNDLE", str(other)
    )
    source = request.getfixturevalue(kind)
    if kind == "hub":
        assert trouble_with(source) == ""
    else:
        assert listed() == ["small/config.json"]


def test_a_private_authority_is_named_as_the_reason(hub: FakeHub) -> None:
    trouble = trouble_with(hub)
    assert trouble.startswith(f"{hub.url} cannot be reached: its certificate is refused: ")
    assert trouble.endswith("; name its authority in SSL_CERT_FILE")


def test_the_server_is_named_to_which_an_endpoint_points(hub: FakeHub) -> None:
    connect(os.environ)
    with pytest.raises(httpx2.TransportError) as raised:
        get_session().get(hub.url + PATH)
    trouble = unreachable("https://points.example", raised.value)
    assert trouble.startswith(f"{hub.url} cannot be reached")


def test_a_certificate_for_another_name_is_named_as_the_reason(
    environment: pytest.MonkeyPatch, tmp_path: Path, authority: Authority
) -> None:
    context = server_context(tmp_path / "server", authority, "elsewhere.example")
    environment.setenv("SSL_CERT_FILE", str(tmp_path / "server" / "ca.crt"))
    with FakeHub().serving(context) as hub:
        trouble = trouble_with(hub)
    assert "its certificate is refused: Hostname mismatch" in trouble
    assert "SSL_CERT_FILE" not in trouble, "which is right"


def test_a_private_authority_of_storage_is_named_as_the_reason(s3: FakeS3) -> None:
    with pytest.raises(SourceError) as raised:
        listed()
    assert str(raised.value) == (
        f"s3://models/small: {s3.url} cannot be reached: its certificate is refused: "
        "unknown authority; name its authority in SSL_CERT_FILE"
    )


def test_all_requests_to_storage_trust_the_same_authorities(
    s3: FakeS3, environment: pytest.MonkeyPatch, tmp_path: Path, ca: str
) -> None:
    other = tmp_path / "other.crt"
    other.write_bytes(Authority("another").certificate)
    paths = ssl.get_default_verify_paths()._replace(openssl_cafile=ca)
    environment.setattr(ssl, "get_default_verify_paths", lambda: paths)  # the system trusts it
    environment.setenv("AWS_CA_BUNDLE", str(other))
    assert not Bucket("models").is_encrypted_by_kms("small/config.json")
    environment.setenv("SSL_CERT_FILE", str(other))  # instead of the authorities of the system
    with pytest.raises(SourceError) as raised:
        Bucket("models").is_encrypted_by_kms("small/config.json")
    assert str(raised.value) == (
        f"s3://models/small/config.json: {s3.url} cannot be reached: its certificate is refused: "
        "unable to get local issuer certificate; name its authority in SSL_CERT_FILE"
    )


def test_a_refusal_of_storage_is_told_without_the_signed_url(
    s3: FakeS3, environment: pytest.MonkeyPatch, ca: str
) -> None:
    environment.setenv("SSL_CERT_FILE", ca)
    with pytest.raises(SourceError, match=r"s3://models/none: ") as raised:
        Bucket("models").is_encrypted_by_kms("none")
    assert "Signature" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(None, "No such file or directory", id="missing"),
        pytest.param(b"", "has no certificate in PEM", id="empty"),
        pytest.param(b"x" * 100, "has no certificate in PEM", id="something else"),
        pytest.param(
            b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
            "is malformed",
            id="malformed",
        ),
    ],
)
@pytest.mark.parametrize("variable", [*AUTHORITIES, "AWS_CA_BUNDLE"])
def test_a_file_that_names_no_authority_is_named(
    environment: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    content: bytes | None,
    reason: str,
) -> None:
    directory = tmp_path / "d"
    if content is not None:
        directory.mkdir()
        (directory / "ca.crt").write_bytes(content)
    path = directory if variable.endswith("DIR") else directory / "ca.crt"
    environment.setenv(variable, str(path))
    others = ("AWS_CA_BUNDLE",)
    with pytest.raises(SourceError) as raised:
        named_authorities(os.environ, *others)
    assert str(raised.value).startswith(f"{variable}: ")
    assert str(path) in str(raised.value)
    assert reason in str(raised.value)


@pytest.mark.parametrize("value", ["storage:9000", "http://[::1", "https://"])
def test_an_endpoint_of_storage_that_is_no_url_is_named(
    environment: pytest.MonkeyPatch, value: str
) -> None:
    environment.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(SourceError, match=r"^AWS_ENDPOINT_URL: .* must begin with https://"):
        Bucket("models")


@pytest.mark.parametrize(
    ("variable", "scheme", "kind"),
    [
        ("HTTPS_PROXY", "http", "http"),
        ("https_proxy", "http", "http"),
        ("ALL_PROXY", "http", "http"),
        ("ALL_PROXY", "socks5", "socks"),
        ("HTTPS_PROXY", "socks5h", "socks"),
    ],
)
def test_the_hub_is_reached_by_the_proxy(
    environment: pytest.MonkeyPatch,
    hub: FakeHub,
    proxy: FakeProxy,
    ca: str,
    variable: str,
    scheme: str,
    kind: str,
) -> None:
    environment.setenv("REQUESTS_CA_BUNDLE", ca)
    environment.setenv(variable, f"{scheme}://{proxy.address}")
    assert trouble_with(hub) == ""
    goal = hub.url.removeprefix("https://")
    assert proxy.asked == [(kind, goal)]
    environment.setenv("NO_PROXY", "example.com, localhost")
    assert trouble_with(hub) == ""
    assert proxy.asked == [(kind, goal)]


def test_storage_is_reached_by_the_proxy(
    environment: pytest.MonkeyPatch, s3: FakeS3, proxy: FakeProxy, ca: str
) -> None:
    environment.setenv("AWS_CA_BUNDLE", ca)
    environment.setenv("HTTPS_PROXY", f"http://{proxy.address}")
    assert listed() == ["small/config.json"]
    assert proxy.asked == [("http", s3.url.removeprefix("https://"))]


def test_storage_is_not_reached_by_a_socks_proxy(
    environment: pytest.MonkeyPatch, s3: FakeS3, ca: str
) -> None:
    environment.setenv("SSL_CERT_FILE", ca)
    environment.setenv("ALL_PROXY", "socks5://user:hidden@127.0.0.1:1080")
    with pytest.raises(SourceError, match=r"SOCKS proxy, socks5://127.0.0.1:1080 \(ALL_PROXY\)"):
        Bucket("models")
    environment.setenv("NO_PROXY", "localhost")
    assert listed() == ["small/config.json"]


def test_a_proxy_that_refuses_is_named(
    environment: pytest.MonkeyPatch, hub: FakeHub, proxy: FakeProxy, ca: str
) -> None:
    proxy.password = "right"
    environment.setenv("SSL_CERT_FILE", ca)
    environment.setenv("HTTPS_PROXY", f"http://user:hidden@{proxy.address}")
    assert trouble_with(hub) == (
        f"{hub.url} cannot be reached through the proxy http://{proxy.address} (HTTPS_PROXY): "
        "the proxy answers 407 Proxy Authentication Required"
    )
    environment.setenv("HTTPS_PROXY", f"http://user:right@{proxy.address}")
    assert trouble_with(hub) == ""


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_a_proxy_that_is_away_is_named(
    environment: pytest.MonkeyPatch, hub: FakeHub, scheme: str
) -> None:
    url = f"{scheme}://{free_address()}"
    environment.setenv("ALL_PROXY", url)
    assert trouble_with(hub) == (
        f"{hub.url} cannot be reached through the proxy {url} (ALL_PROXY): Connection refused"
    )


@pytest.mark.parametrize(
    "value",
    [
        *("socks4://a:1", "ftp://u:hidden@a:1", "http://[::1", "http://"),
        "http://user:pa/hidden@a:1",
    ],
)
@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_that_is_not_understood_is_named(
    environment: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    environment.setenv(variable, value)
    for reach in (lambda: connect(os.environ), lambda: Bucket("models")):
        with pytest.raises(SourceError, match=f"^{variable}: must be like http://HOST:PORT") as it:
            reach()
        assert "hidden" not in str(it.value)


@pytest.mark.parametrize(
    ("url", "excepted", "is_used"),
    [
        ("https://hub.example", "", True),
        ("https://hub.example", "example", False),
        ("https://hub.example", ".example", False),
        ("https://hub.example", "*", False),
        ("https://10.1.2.3:9000", "10.0.0.0/8", False),
        ("https://11.1.2.3:9000", "localhost,10.0.0.0/8", True),
        ("http://hub.example", "", False),
    ],
)
def test_a_message_names_no_proxy_that_is_not_used(url: str, excepted: str, is_used: bool) -> None:
    found = proxy_for(url, {"HTTPS_PROXY": "proxy:3128", "no_proxy": excepted})
    assert str(found) == ("http://proxy:3128 (HTTPS_PROXY)" if is_used else "None")


@pytest.mark.parametrize(
    "value", ["http://user:pa/hidden@host:80", "http:/u:hidden@host:80", "u:h@idden@host:80"]
)
def test_a_message_shows_no_password_of_a_proxy(value: str) -> None:
    found = proxy_for("https://hub.example", {"HTTPS_PROXY": value})
    assert str(found) == "http://host:80 (HTTPS_PROXY)"


def test_messages_show_no_password_of_an_endpoint(environment: pytest.MonkeyPatch) -> None:
    assert unreachable("https://u:hidden@hub", OSError("x")) == "https://hub cannot be reached: x"
    environment.setenv("AWS_ENDPOINT_URL", "s3://u:hidden@storage")
    with pytest.raises(SourceError, match="'s3://storage' must begin with"):
        Bucket("models")
    environment.setenv("AWS_ENDPOINT_URL", "https://u:hidden@storage")
    assert Bucket("models").endpoint == "https://storage"


@pytest.mark.thorough
def test_the_command_says_it_in_one_line(hub: FakeHub, ca: str, tmp_path: Path) -> None:
    def fetch(**variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "services.hub", "org/model", "--to", str(tmp_path / "m")],
            env=hub.environment(tmp_path, **variables),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    done = fetch()
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: org/model: {hub.url} cannot be reached: its certificate")
    assert done.stderr.count("\n") == 1
    done = fetch(SSL_CERT_FILE="/nowhere/ca.crt")
    line = "error: SSL_CERT_FILE: /nowhere/ca.crt: No such file or directory\n"
    assert (done.returncode, done.stderr) == (1, line)
    done = fetch(HF_ENDPOINT="hub.example")
    line = "error: org/model: HF_ENDPOINT: 'hub.example' must be like https://HOST\n"
    assert (done.returncode, done.stderr) == (1, line)
    done = fetch(REQUESTS_CA_BUNDLE=ca)
    assert done.returncode == 0, done.stderr
