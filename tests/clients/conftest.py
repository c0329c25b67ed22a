"""The clients are tested against frontends, as those are."""

from tests.frontend.conftest import shared_site, site

__all__ = ["shared_site", "site"]
