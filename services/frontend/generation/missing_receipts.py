"""Logs that answers come without the receipts that the setting `receipts` asks for."""

import logging

from services.frontend.request.pipeline import ServedPipeline, Traits

log = logging.getLogger(__name__)


class MissingReceipts:
    """Logs why answers have no receipts. Logs again only if the workers report other traits, which
    are facts about the model and the arithmetic that they compute with."""

    def __init__(self) -> None:
        self._logged_for: Traits | None = None

    def note(self, pipeline: ServedPipeline, why: str) -> None:
        """Notes that an answer of a call to `pipeline` has no receipt, and the reason."""
        if pipeline.traits != self._logged_for:
            self._logged_for = pipeline.traits
            log.warning("receipts=always, but answers have no receipts: %s", why)
