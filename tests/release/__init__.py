"""Tests of how releases are made, without making one; `tests/install` does."""
