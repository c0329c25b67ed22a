"""Fields that official clients send although their users did not set them, and that have no effect
here. The server ignores these fields. It names them neither in answers nor in the log, and accepts
them even if it refuses unknown fields, because users cannot stop their clients from sending them.
Fields that the models of bodies declare are not in the list."""

from collections.abc import Mapping

_CACHING = "messages.content", "messages.content.content", "system", "tools"

FIELDS_OF_CLIENTS: Mapping[str, tuple[str, ...]] = {
    "openai": (
        "prompt_cache_options",
        "stream_options.include_obfuscation",
        "verbosity",
        "messages.content.prompt_cache_breakpoint",
        "tools.async",
        "tools.allowed_callers",
        "tools.output_schema",
    ),
    "openai, responses": (
        "background_options",
        "context_management",
        "personality",
        "stream_options",
        "input.async",
        "input.caller",
        "input.created_by",
        "input.execution",
        "input.id",
        "input.name",
        "input.phase",
        "input.recipient",
        "input.role",
        "input.server_label",
        "input.status",
        "input.content.annotations",
        "input.content.id",
        "input.content.logprobs",
        "input.content.prompt_cache_breakpoint",
        "input.output.annotations",
        "input.output.prompt_cache_breakpoint",
        "input.acknowledged_safety_checks",
        "input.approval_request_id",
        "input.approve",
        "input.container_id",
        "input.environment",
        "input.max_output_length",
        "input.tools.async",
        "input.tools.allowed_callers",
        "input.tools.output_schema",
        "input.tools.tools.async",
        "input.tools.tools.allowed_callers",
        "input.tools.tools.output_schema",
        "reasoning.context",
        "reasoning.generate_summary",
        "reasoning.mode",
        "reasoning.summary",
        "text.verbosity",
        "text.format.description",
        "tools.tools.async",
        "tools.tools.allowed_callers",
        "tools.tools.output_schema",
    ),
    "Codex CLI": (
        "client_metadata",
        "input.internal_chat_message_metadata_passthrough",
        "input.metadata",
    ),
    "openai-agents": ("input.provider_data",),
    "anthropic, Claude Code": (
        *(f"{place}.cache_control" for place in _CACHING),
        "messages.id",
        "messages.model",
        "messages.stop_reason",
        "messages.stop_sequence",
        "messages.type",
        "messages.usage",
        "messages.content.caller",
        "messages.content.citations",
        "messages.content.signature",
        "system.citations",
        "tools.allowed_callers",
        "tools.defer_loading",
        "tools.eager_input_streaming",
        "tools.input_examples",
    ),
    "LangChain": ("messages.example", "messages.response_metadata"),
    "LiteLLM": ("litellm_metadata", "messages.thinking_blocks"),
}
"""Paths of the ignored fields, keyed by the client that sends them. Paths leave out positions in
lists: `messages.id`."""

CLIENT_FIELDS = frozenset(path for paths in FIELDS_OF_CLIENTS.values() for path in paths)
"""Paths of the ignored fields of all clients."""
