"""JSON Schema's own tests: each schema is enforced or named as not enforced, and no invalid value
keeps a schema that is enforced. The tests are in the source archive of the package `jsonschema`."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.frontend.request.json_schema.client_schema import AdditionalProperties
from tests.environments import OUTSIDE
from tests.frontend.request.json_schema.engine import CannotCompile, accepts, client_schema

PACKAGE = "jsonschema==4.26.0"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
}


@pytest.fixture(name="suite", scope="module")
def fetch_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("suite")
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    fetch += ["--no-binary", "jsonschema", "--dest", str(directory), PACKAGE]
    subprocess.run(fetch, check=True, env=OUTSIDE)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz") / "json" / "tests"


def groups(suite: Path, draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    for file in sorted((suite / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema.setdefault("$schema", DRAFTS[draft])
                yield f"{file.stem}: {group['description']}", schema, group["tests"]


@pytest.mark.parametrize("additional", ["declared", "allowed"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_value_keeps_a_schema_that_is_enforced(
    suite: Path, draft: str, additional: AdditionalProperties
) -> None:
    wrong, n_enforced, n_named = [], 0, 0
    for name, schema, cases in groups(suite, draft):
        asked = client_schema(schema, additional)
        if asked.unenforced:
            n_named += 1
            continue
        n_enforced += 1
        for case in cases:
            try:
                is_accepted = accepts(asked, json.dumps(case["data"], ensure_ascii=False))
            except CannotCompile:  # no value matches, which is said to the client
                is_accepted = False
            if is_accepted and not case["valid"]:
                wrong.append((name, case["data"]))
    assert not wrong
    assert n_enforced > 100
    assert n_named > 50
