"""The version of Orcinus: that of `pyproject.toml`, which images do not have."""

VERSION = "0.1.0"
