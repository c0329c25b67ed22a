"""OpenAI's protocol for agents, POST /v1/responses.

items      the turns of a conversation, as the body has them
request    the body
reply      the answer, whole and as events
answer     the types of the answer
"""
