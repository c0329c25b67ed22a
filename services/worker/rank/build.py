"""A digest of the code that all stages of a pipeline must have in common.

Version numbers do not suffice, because a pod may run an image that was built between two versions.
The digest covers the code of stages, the packages that this code uses, and the messages between
stages.
"""

import hashlib
from pathlib import Path

from orcinus.v1 import sampling_pb2, trace_pb2, worker_pb2

import kernels
import services.common
import services.grammar
import services.worker

PACKAGES = (services.common, services.grammar, services.worker, kernels)
# Native kernels are included as sources, because the compiled code differs between machines.
SOURCES = frozenset((".py", ".cpp", ".h"))
MESSAGES = (sampling_pb2, trace_pb2, worker_pb2)


def build_digest() -> str:
    """Returns a digest of the source files and the generated messages. Takes a few milliseconds."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for directory in package.__path__:
            for path in sorted(Path(directory).rglob("*.*")):
                if path.suffix in SOURCES:
                    name = f"{package.__name__}/{path.relative_to(directory)}"
                    _add(digest, name, path.read_bytes())
    for module in MESSAGES:
        _add(digest, module.DESCRIPTOR.name, module.DESCRIPTOR.serialized_pb)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
