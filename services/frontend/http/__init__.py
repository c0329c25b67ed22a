"""The HTTP API: bodies, answers, server-sent events and errors as clients know them.

openai_*, completion_*, chat_*    completions and chats
responses_*, messages_*           protocols of agents, upon conversation_*
openapi, *_schemas, operations    the OpenAPI document
transport                         what goes over a connection, within its limits
"""
