"""Checkpoints come from S3-compatible storage, whole and once, whatever happens on the way."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.hub.kinds import source_in
from services.hub.object_file import PIECE_BYTES
from services.hub.source import SourceError
from tests.fake_hub import checkpoint
from tests.fake_s3 import ACCESS_KEY, ROOT, FakeS3, Stored
from tests.limits import HANG_S

SOURCE = "s3://models/llms/small"
KEY = "llms/small/model.safetensors"
SERVED = ("config.json", "tokenizer.json", "model.safetensors")
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
SMALL = random.Random(1).randbytes(100_000)
LARGE = random.Random(2).randbytes(2 * PIECE_BYTES + 12345)


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with FakeS3().serving() as serving:
        serving.put("models", "llms/small", checkpoint(SMALL))
        yield serving


def command(to: Path, *arguments: str, source: str = SOURCE) -> list[str]:
    return [sys.executable, "-m", "services.hub", source, "--to", str(to), *arguments]


def fetch(
    s3: FakeS3, to: Path, *arguments: str, source: str = SOURCE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; a variable that is set to nothing is left out."""
    environment = s3.environment(to.parent / "home", **variables)
    return subprocess.run(
        command(to, *arguments, source=source),
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_only_what_is_served_is_fetched(s3: FakeS3, tmp_path: Path) -> None:
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "m") == {name: checkpoint(SMALL)[name] for name in SERVED}
    assert {key for key, _, _ in s3.reads} == {f"llms/small/{name}" for name in SERVED}
    state = (tmp_path / "m").resolve().name[:12]
    assert done.stdout == f"{SOURCE} is state {state} in {tmp_path / 'm'}\n"


@pytest.mark.thorough
def test_the_file_that_says_how_vectors_are_made_is_fetched(s3: FakeS3, tmp_path: Path) -> None:
    folder = {"1_Pooling/config.json": b"{1}", "1_Pooling/README.md": b"words"}
    s3.put("models", "llms/small", {"modules.json": b"[]", **folder})
    for _ in range(2):
        assert fetch(s3, tmp_path / "m").returncode == 0
    assert (tmp_path / "m" / "1_Pooling" / "config.json").read_bytes() == b"{1}"
    assert (tmp_path / "m" / "config.json").read_bytes() == b"{}"
    assert not (tmp_path / "m" / "1_Pooling" / "README.md").exists()


@pytest.mark.thorough
def test_storage_without_etags_is_read_all_the_same(s3: FakeS3, tmp_path: Path) -> None:
    s3.has_etags = False
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "m") == {name: checkpoint(SMALL)[name] for name in SERVED}


@pytest.mark.thorough  # the same code as the hub's, in `test_fetching.py`
def test_a_claim_stays_what_it_was_when_it_was_filled(s3: FakeS3, tmp_path: Path) -> None:
    assert fetch(s3, tmp_path / "m").returncode == 0
    s3.buckets["models"][KEY] = Stored(b"newer")
    asked = s3.n_requests
    assert fetch(s3, tmp_path / "m").returncode == 0
    assert s3.n_requests == asked
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == SMALL


@pytest.mark.thorough
def test_a_large_object_comes_in_pieces(s3: FakeS3, tmp_path: Path) -> None:
    s3.put("models", "llms/small", {"model.safetensors": LARGE})
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == LARGE
    ranges = sorted((begin, end) for key, begin, end in s3.reads if key == KEY)
    assert ranges == [
        (0, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (2 * PIECE_BYTES, len(LARGE)),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, 130, id="terminated", marks=pytest.mark.thorough),
    ],
)
def test_a_process_that_has_ended_is_gone_on_from(
    s3: FakeS3, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    s3.put("models", "llms/small", {"model.safetensors": LARGE})
    s3.hangs_at = 2 * PIECE_BYTES
    ended = subprocess.Popen(command(tmp_path / "m"), env=s3.environment(tmp_path / "home"))
    assert s3.is_hanging.wait(HANG_S)
    objects = next((tmp_path / ".hub").glob("s3--*")) / "objects"
    while sum(path.read_bytes().count(b"0000000") for path in objects.glob("*.pieces-*")) < 4:
        assert ended.poll() is None
    ended.send_signal(number)
    assert ended.wait(30) == status  # though the connection is silent for longer
    assert not (tmp_path / "m").exists()
    s3.hangs_at = None
    s3.reads.clear()
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert s3.reads == [(KEY, 2 * PIECE_BYTES, len(LARGE))]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == LARGE
    assert not list(objects.glob("*.p*"))


@pytest.mark.thorough
def test_lost_connections_are_gone_on_from(s3: FakeS3, tmp_path: Path) -> None:
    s3.put("models", "llms/small", {"model.safetensors": LARGE[: 3 << 20]})
    s3.drops_after = 1 << 20
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == LARGE[: 3 << 20]
    assert max(begin for _, begin, _ in s3.reads) == 2 << 20


@pytest.mark.thorough  # the same code as the hub's, in `test_fetching.py`
def test_processes_at_once_fetch_it_once(s3: FakeS3, tmp_path: Path) -> None:
    environment = s3.environment(tmp_path / "home")
    running = [subprocess.Popen(command(tmp_path / "m"), env=environment) for _ in range(3)]
    assert [process.wait(HANG_S) for process in running] == [0, 0, 0]
    assert len(s3.reads) == len(SERVED)


@pytest.mark.thorough  # the same code as the hub's, in `test_fetching.py`
def test_who_waits_asks_nobody(s3: FakeS3, tmp_path: Path) -> None:
    late = fetch(s3, tmp_path / "m", "--wait", "--wait-s", "0.1")
    assert late.returncode == 1
    assert late.stderr == f"error: {SOURCE}: nobody has fetched it to {tmp_path / 'm'}\n"
    assert s3.n_requests == 0
    waiting = subprocess.Popen(
        command(tmp_path / "m", "--wait"),
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )
    assert fetch(s3, tmp_path / "m").returncode == 0
    assert waiting.wait(HANG_S) == 0


def test_a_user_gets_what_is_new_and_nothing_twice(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = source_in(SOURCE)
    assert source is not None
    assert source.model_name == "small"
    first = source.fetch(say=print)
    assert first.path.is_relative_to(tmp_path / "cache" / "orcinus")
    s3.reads.clear()
    assert source.fetch(say=print) == first
    assert s3.reads == []
    s3.buckets["models"]["llms/small/config.json"] = Stored(b'{"a": 1}')
    second = source.fetch(say=print)
    assert s3.reads == [("llms/small/config.json", 0, 8)]
    assert (second.path / "config.json").read_bytes() == b'{"a": 1}'
    assert (first.path / "config.json").read_bytes() == b"{}"


@pytest.mark.thorough
def test_a_user_without_storage_gets_what_it_last_was(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    source = source_in(SOURCE)
    assert source is not None
    heard = list[str]()
    fetched = source.fetch(say=heard.append, cache=tmp_path / "cache")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert source.fetch(say=heard.append, cache=tmp_path / "cache") == fetched
    assert len(heard) == 1
    assert "http://127.0.0.1:1 cannot be reached" in heard[0]
    assert heard[0].endswith("; this is what the cache has")
    (fetched.path / "config.json").resolve().unlink()
    with pytest.raises(SourceError, match="cannot be reached"):
        source.fetch(say=heard.append, cache=tmp_path / "cache")


@pytest.mark.thorough
def test_a_gguf_file_is_named_by_its_key(s3: FakeS3, tmp_path: Path) -> None:
    s3.put("models", "quantized", {"a.gguf": SMALL, "b.gguf": b"another"})
    refused = fetch(s3, tmp_path / "a.gguf", source="s3://models/quantized")
    assert "its GGUF file is s3://models/quantized/a.gguf\n" in refused.stderr
    done = fetch(s3, tmp_path / "a.gguf", source="s3://models/quantized/a.gguf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.gguf").read_bytes() == SMALL
    assert s3.reads == [("quantized/a.gguf", 0, len(SMALL))]


@pytest.mark.thorough
def test_other_content_than_promised_is_refused(s3: FakeS3, tmp_path: Path) -> None:
    s3.buckets["models"][KEY].sent = b"x" + SMALL[1:]
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 1
    assert f"s3://models/{KEY}: came with another content than its ETag promises" in done.stderr
    assert not (tmp_path / "m").exists()
    s3.buckets["models"][KEY].sent = None
    assert fetch(s3, tmp_path / "m").returncode == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == SMALL


@pytest.mark.parametrize(
    ("etag", "encryption"),
    [
        pytest.param("0" * 32, "aws:kms", id="kms"),
        pytest.param(f"{'0' * 32}-3", None, id="several-parts", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_an_etag_that_is_no_digest_promises_nothing(
    s3: FakeS3, tmp_path: Path, etag: str, encryption: str | None
) -> None:
    s3.buckets["models"][KEY] = Stored(SMALL, etag=etag, encryption=encryption)
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_piece_that_was_changed_on_the_disk_is_noticed(s3: FakeS3, tmp_path: Path) -> None:
    s3.put("models", "llms/small", {"model.safetensors": LARGE})
    s3.hangs_at = 2 * PIECE_BYTES
    ended = subprocess.Popen(command(tmp_path / "m"), env=s3.environment(tmp_path / "home"))
    assert s3.is_hanging.wait(HANG_S)
    objects = next((tmp_path / ".hub").glob("s3--*")) / "objects"
    while sum(path.read_bytes().count(b"0000000") for path in objects.glob("*.pieces-*")) < 4:
        assert ended.poll() is None
    ended.kill()
    ended.wait(HANG_S)
    part = next(path for path in objects.glob("*.part") if path.stat().st_size == len(LARGE))
    with part.open("r+b") as file:
        file.seek(1000)
        file.write(bytes(100))
    s3.hangs_at = None
    assert "came with another content" in fetch(s3, tmp_path / "m").stderr
    assert fetch(s3, tmp_path / "m").returncode == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == LARGE


@pytest.mark.thorough
def test_an_object_that_changes_meanwhile_is_refused(s3: FakeS3, tmp_path: Path) -> None:
    s3.put("models", "llms/small", {"model.safetensors": LARGE})
    s3.hangs_at = 2 * PIECE_BYTES
    running = subprocess.Popen(
        command(tmp_path / "m"),
        env=s3.environment(tmp_path / "home"),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert s3.is_hanging.wait(HANG_S)
    s3.put("models", "llms/small", {"model.safetensors": SMALL})
    s3.released.set()  # the connection breaks off, and the rest is asked for
    _, said = running.communicate(timeout=HANG_S)
    assert running.returncode == 1
    assert f"s3://models/{KEY}: changed while it was fetched" in said
    s3.hangs_at = None
    assert fetch(s3, tmp_path / "m").returncode == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == SMALL


@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("llms/small/../out.json", 1),
        *(
            pytest.param(key, status, marks=pytest.mark.thorough)
            for key, status in (
                ("llms/small/a/out.json", 0),
                ("llms/small/a/../../out.json", 1),
                ("llms/small/a\\..\\out.json", 0),
                ("elsewhere/out.json", 0),
            )
        ),
    ],
)
def test_keys_lead_nowhere_else(s3: FakeS3, tmp_path: Path, key: str, status: int) -> None:
    s3.lists_all = True
    s3.buckets["models"][key] = Stored(b"{}")
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == status, done.stderr
    assert ("a key in it is no path" in done.stderr) == (status == 1)
    assert not list(tmp_path.rglob("*out.json"))
    assert set(os.listdir(tmp_path / "m") if status == 0 else SERVED) == set(SERVED)


@pytest.mark.parametrize(
    "source",
    [
        "s3://b/a/../c",
        *(
            pytest.param(source, marks=pytest.mark.thorough)
            for source in ("s3://", "s3:///a", "s3://a b/c", "s3://b/./c", "s3://b//c", "s3://../c")
        ),
    ],
)
@pytest.mark.thorough
def test_what_is_no_place_in_a_bucket_is_refused(s3: FakeS3, tmp_path: Path, source: str) -> None:
    done = fetch(s3, tmp_path / "m", source=source)
    assert done.returncode == 2
    assert "names no bucket" in done.stderr or "no part of a prefix may be" in done.stderr
    assert s3.n_requests == 0


@pytest.mark.parametrize(
    ("source", "variables", "reason"),
    [
        pytest.param(
            SOURCE, {"AWS_ACCESS_KEY_ID": "x"}, "are refused (InvalidAccessKeyId)", id="code"
        ),
        *(
            pytest.param(source, variables, reason, id=id_, marks=pytest.mark.thorough)
            for id_, source, variables, reason in (
                ("bucket", "s3://none/x", {}, "there is no bucket 'none' at http://"),
                ("prefix", "s3://models/none", {}, "s3://models/none: nothing lies below this"),
                ("gguf", "s3://models/none.gguf", {}, "there is no such object"),
                ("split", "s3://models/a-00001-of-00002.gguf", {}, "is one of several files of a"),
                ("files", "s3://models/pickled", {}, "has no config.json to serve"),
                (
                    "keys",
                    SOURCE,
                    {"AWS_ACCESS_KEY_ID": "x"},
                    "(AWS_ACCESS_KEY_ID, AWS_SHARED_CREDENTIALS_FILE or ",
                ),
                ("no-keys", SOURCE, NO_KEYS, "no credentials: set AWS_ACCESS_KEY_ID and"),
                (
                    "unreachable",
                    SOURCE,
                    {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
                    "http://127.0.0.1:1 cannot be reached",
                ),
                (
                    "endpoint",
                    SOURCE,
                    {"AWS_ENDPOINT_URL": "127.0.0.1"},
                    "AWS_ENDPOINT_URL: '127.0.0.1' must begin",
                ),
            )
        ),
    ],
)
def test_a_refusal_says_why(
    s3: FakeS3, tmp_path: Path, source: str, variables: dict[str, str], reason: str
) -> None:
    s3.put("models", "pickled", {"pytorch_model.bin": b"x", "tokenizer.json": b"{}"})
    done = fetch(s3, tmp_path / "m", source=source, **variables)
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param(301, "set AWS_REGION", marks=pytest.mark.thorough),
        (503, "answers with HTTP status 503 (SlowDown)"),
    ],
)
@pytest.mark.thorough
def test_a_storage_that_does_not_serve_is_given_up(
    s3: FakeS3, tmp_path: Path, status: int, reason: str
) -> None:
    s3.status = status
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 1
    assert reason in done.stderr
    assert s3.n_requests < 10


def test_a_storage_without_ranges_is_refused(s3: FakeS3, tmp_path: Path) -> None:
    s3.ignores_ranges = True
    done = fetch(s3, tmp_path / "m")
    assert done.returncode == 1
    assert "non-partial response" in done.stderr


def test_a_mounted_file_of_credentials_is_read(s3: FakeS3, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = secret\n"
    )
    done = fetch(s3, tmp_path / "m", AWS_SHARED_CREDENTIALS_FILE=str(file), **NO_KEYS)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_file_of_credentials_that_is_wrong_is_named_and_not_shown(
    s3: FakeS3, tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text("aws_secret_access_key = hidden\n")
    file = str(tmp_path / "credentials")
    done = fetch(s3, tmp_path / "m", AWS_SHARED_CREDENTIALS_FILE=file, **NO_KEYS)
    assert done.returncode == 1
    assert f"AWS_SHARED_CREDENTIALS_FILE: {file} has no such credentials" in done.stderr
    assert "hidden" not in done.stderr


@pytest.mark.thorough
def test_a_role_of_a_service_account_is_tried(s3: FakeS3, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("identity")
    role = {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/reader",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ENDPOINT_URL_STS": "https://127.0.0.1:1",
    }
    done = fetch(s3, tmp_path / "m", **NO_KEYS, **role)
    assert done.returncode == 1
    assert "AWS_ROLE_ARN: no credentials for the web identity" in done.stderr
    assert s3.n_requests == 0
