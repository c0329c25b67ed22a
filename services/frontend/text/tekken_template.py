"""Chat templates for checkpoints that have only Mistral's own tokenizer file, `tekken.json`.

Such a checkpoint has no template: the version of its tokenizer says how a conversation is written.
The templates of this module write the texts that the library `mistral-common` encodes for the
versions 3, 7, 11, 13 and 15:

    v3   <s>[AVAILABLE_TOOLS][…][/AVAILABLE_TOOLS][INST]system

user[/INST]answer</s>
    v7   <s>[SYSTEM_PROMPT]system[/SYSTEM_PROMPT][INST]user[/INST]answer</s>
    v11  as v7, but [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}
    v13  as v7, but [TOOL_CALLS]name[ARGS]{…}
    v15  as v13, but [MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS] behind the tools

Up to version 11, tools stand before the last turn of the user. From version 13 on, they stand
before the first one. The file lists the allowed values of `reasoning_effort`.
"""

from __future__ import annotations

from collections.abc import Sequence

VERSIONS = (3, 7, 11, 13, 15)
"""Versions of the tokenizer for which this module has a template."""

THINK, END_THINK = "[THINK]", "[/THINK]"
"""Special tokens around reasoning, which only some tokenizers have."""

# Neighbouring turns of the user are one turn. `asked` is the first part of the turn that the tools
# (and in version 3 the words of the system) belong to.
_BEGIN = """\
{{- bos_token }}
{%- set found = namespace(asked=-1, system='') %}
{%- for message in messages %}
  {%- if message.role == 'user' and (loop.first or loop.previtem.role != 'user') %}
    {%- if POSITION %}{%- set found.asked = loop.index0 %}{%- endif %}
  {%- elif message.role == 'system' %}
    {%- set found.system = found.system ~ ('\\n\\n' if found.system else '') ~ message.content %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if loop.index0 == found.asked and tools %}
      {{- '[AVAILABLE_TOOLS][' }}
      {%- for tool in tools %}
        {%- set function = tool.function %}
        {{- {'type': 'function', 'function': {'name': function.name,
            'description': function.description or '',
            'parameters': function.parameters}} | tojson }}
        {{- '' if loop.last else ', ' }}
      {%- endfor %}
      {{- '][/AVAILABLE_TOOLS]' }}
    {%- endif %}
    SETTINGS
    {{- '[INST]' if loop.first or loop.previtem.role != 'user' else '\\n\\n' }}
    {{- USER_BEGIN }}
    {{- message.content }}
    {{- '[/INST]' if loop.last or loop.nextitem.role != 'user' else '' }}
  {%- elif message.role == 'system' %}
    {{- SYSTEM }}
  {%- elif message.role == 'assistant' %}
    REASONING
    {{- (message.content or '').rstrip(' ') }}
    {%- if message.tool_calls %}
      CALLS
    {%- endif %}
    {{- eos_token }}
  {%- elif message.role == 'tool' %}
    RESULT
  {%- else %}
    {{- raise_exception('the role ' ~ message.role ~ ' is not known') }}
  {%- endif %}
{%- endfor %}
"""

_REASONING = f"""\
{{%- if message.reasoning_content %}}
      {{{{- '{THINK}' ~ message.reasoning_content ~ '{END_THINK}' }}}}
    {{%- endif %}}"""

_SETTINGS = """\
{%- if loop.index0 == found.asked %}
      {%- set effort = reasoning_effort or EFFORTS[0] %}
      {%- if effort not in EFFORTS %}
        {{- raise_exception('reasoning_effort is not one of ' ~ EFFORTS | join(', ')) }}
      {%- endif %}
      {{- '[MODEL_SETTINGS]' ~ ({'reasoning_effort': effort} | tojson) ~ '[/MODEL_SETTINGS]' }}
    {%- endif %}"""

_CALL_LIST = """\
{{- '[TOOL_CALLS][' }}
      {%- for call in message.tool_calls %}
        {{- {'name': call.function.name, 'arguments': call.function.arguments,
            'id': call.id} | tojson }}
        {{- '' if loop.last else ', ' }}
      {%- endfor %}
      {{- ']' }}"""

_NAMED_CALLS = """\
{%- for call in message.tool_calls %}
        {{- '[TOOL_CALLS]' ~ call.function.name ~ ID ~ '[ARGS]' }}
        {{- call.function.arguments | tojson }}
      {%- endfor %}"""

# A result that is an object or a list is not written as a text.
_RESULT_OBJECT = """\
{%- set content = message.content %}
    {%- set is_json = content[:1] in ('{', '[') %}
    {{- '[TOOL_RESULTS]{"content": ' ~ (content if is_json else content | tojson) }}
    {{- ', "call_id": ' ~ (message.tool_call_id | tojson) ~ '}[/TOOL_RESULTS]' }}"""

_RESULT_WITH_ID = """\
{{- '[TOOL_RESULTS]' ~ message.tool_call_id ~ '[TOOL_CONTENT]' ~ message.content }}
    {{- '[/TOOL_RESULTS]' }}"""

_RESULT = "{{- '[TOOL_RESULTS]' ~ message.content ~ '[/TOOL_RESULTS]' }}"


def tekken_template(
    version: int, *, has_thoughts: bool = False, efforts: Sequence[str] = ()
) -> str | None:
    """Returns the template of conversations for a version of the tokenizer. Returns None if the
    version is not one of `VERSIONS`.

    `has_thoughts` says whether the tokenizer has tokens around reasoning. `efforts` are the allowed
    values of `reasoning_effort`, the default first.
    """
    if version not in VERSIONS:
        return None
    is_first = version >= 13
    has_settings = version >= 15 and bool(efforts)
    has_own_turn = version >= 7  # for the words of the system
    system = "'[SYSTEM_PROMPT]' ~ message.content ~ '[/SYSTEM_PROMPT]'"
    before_user = "found.system ~ '\\n\\n' if found.system and loop.index0 == found.asked else ''"
    result = _RESULT if is_first else _RESULT_WITH_ID if has_own_turn else _RESULT_OBJECT
    call_id = "''" if is_first else "'[CALL_ID]' ~ call.id"
    parts = {
        "POSITION": "found.asked < 0" if is_first else "true",
        "USER_BEGIN": "''" if has_own_turn else before_user,
        "SETTINGS": _SETTINGS.replace("EFFORTS", str([*efforts])) if has_settings else "",
        "SYSTEM": system if has_own_turn else "''",
        "REASONING": _REASONING if has_thoughts else "",
        "CALLS": _NAMED_CALLS.replace("ID", call_id) if version >= 11 else _CALL_LIST,
        "RESULT": result,
    }
    source = _BEGIN
    for name, part in parts.items():
        source = source.replace(f"{name}\n", f"{part}\n").replace(f" {name} ", f" {part} ")
    return source
