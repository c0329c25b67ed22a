"""The limits of the requests to a model; `FrontendSettings` explains them."""

from dataclasses import dataclass, field

from services.frontend.text.prompt_encoder import TextLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits on each request to a model. `Admission` has the limits on all requests together."""

    hold_s: float = 0.0
    """Seconds that a request waits for a pipeline when there is none."""
    wake_s: float = 0.0
    """Seconds that a request waits for a pipeline while the model is asleep or starts."""
    max_request_s: float = 0.0
    """Seconds that a request may take; 0 sets no limit."""
    strict_max_tokens: bool = False
    """Whether a `max_tokens` that does not fit into the model's context is refused."""
    texts: TextLimits = field(default_factory=TextLimits)
