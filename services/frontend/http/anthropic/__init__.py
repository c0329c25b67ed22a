"""Anthropic's protocol: POST /v1/messages, and POST /v1/messages/count_tokens.

turns      the turns of a conversation in a body
request    the bodies
reply      the answer, whole and as events
answer     the types of the answers
errors     errors in the form of Anthropic's API
"""
