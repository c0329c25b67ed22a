"""The version of Orcinus. It must equal the version in `pyproject.toml`, which images do not
contain."""

VERSION = "0.1.0"
