"""Anthropic's protocol: POST /v1/messages, and POST /v1/messages/count_tokens.

turns      the turns of a conversation, as the body has them
request    the bodies
reply      the answer, whole and as events
answer     the types of the answers
errors     the error tree in the shape of this protocol
"""
