"""The limits of the generation service; `FrontendSettings` explains them."""

from dataclasses import dataclass, field

from services.frontend.text.prompt_encoder import TextLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits that the generation service enforces, on single requests and on all requests
    together."""

    max_in_flight: int = 4096
    """Largest number of answers that the scheduler has at once."""
    max_answers_at_once: int = 32
    """Largest number of answers of one call that the scheduler has at once."""
    hold_s: float = 0.0
    """Seconds that a request waits for a pipeline when there is none."""
    wake_s: float = 0.0
    """Seconds that a request waits for a pipeline while the model is asleep or starts."""
    max_request_s: float = 0.0
    """Seconds that a request may take; 0 sets no limit."""
    strict_max_tokens: bool = False
    """Whether a `max_tokens` that does not fit into the model's context is refused."""
    texts: TextLimits = field(default_factory=TextLimits)
