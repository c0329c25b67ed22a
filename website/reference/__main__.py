"""`python -m website.reference DIRECTORY`: writes the pages of reference, and `openapi.json`."""

import json
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from services.frontend.http.docs import openapi
from services.frontend.http.routes import served_routes
from website.reference.http_page import http_page
from website.reference.proto_page import ProtoPage, homes, page_name

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).parent / "buf"


def http_pages() -> dict[str, str]:
    """Returns the page of the HTTP API and the OpenAPI document, by the names of their files."""
    document = openapi.document(
        served_routes(has_page=True, has_metrics=True, has_receipts=True), needs_key=True
    )
    return {"http.md": http_page(document), "openapi.json": json.dumps(document, indent=1)}


def proto_pages() -> dict[str, str]:
    """Returns a page for each proto, by the names of their files."""
    files = described().file
    types = homes(files)
    return {page_name(file): ProtoPage(file, types).text() for file in files}


def described() -> FileDescriptorSet:
    """Returns the descriptors of all protos, with their comments.

    Raises:
        CalledProcessError: a proto cannot be compiled; buf has printed why.
    """
    build = [str(BUF), "build", "--exclude-imports", "--output", "-"]
    image = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return FileDescriptorSet.FromString(image.stdout)


def main(directory: Path) -> None:
    """Writes all pages into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (http_pages() | proto_pages()).items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
