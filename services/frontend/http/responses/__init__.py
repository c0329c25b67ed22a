"""OpenAI's protocol of responses, POST /v1/responses, which agents use.

items      the items of a conversation in the body
request    the body
reply      the answer, whole and as events
answer     the types of the answer
"""
