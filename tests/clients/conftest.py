"""Tests of clients use the same kind of frontend as the tests of frontends."""

from tests.frontend.conftest import shared_site, site

__all__ = ["shared_site", "site"]
