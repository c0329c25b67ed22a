"""Short chat templates in the style of the templates that families of models publish."""

HERMES = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}

Answer a call as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}
{{- "\\n<think>\\n" + message.reasoning_content + "\\n</think>" }}
{%- endif %}
{%- if message.content %}{{ "\\n" + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ "\\n<tool_call>" }}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen 2.5 and 3, and Hermes: calls between tags, answers in the user's turn."""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "tool" %}{% set role = "ipython" %}{% else %}{% set role = message.role %}
{%- endif %}<|start_header_id|>{{ role }}<|end_header_id|>

{% if "tool_calls" in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}
{%- if tools is not none and loop.first %}{{ tools | tojson(indent=1) }}
{% endif %}{{ message.content | trim }}
{%- endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}
{#- <|python_tag|> begins a call of a built-in tool -#}"""
"""As Llama 3.1: a call instead of content, and one call at a time."""

MISTRAL = """\
{{- bos_token }}
{%- if tools is defined and tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- elif message.role == "user" %}[INST] {{ message["content"] }}[/INST]
{%- else %} {{ message["content"] }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""
"""As Mistral 7B of version 3: ids of nine characters."""

SMOLLM2 = """\
{% for message in messages %}
{{ "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>" + "\\n" }}
{%- endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
"""As SmolLM2: knows no tools."""
