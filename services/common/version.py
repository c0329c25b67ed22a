"""The version of Orcinus, equal to the one in `pyproject.toml`, which images do not have."""

VERSION = "0.1.0"
