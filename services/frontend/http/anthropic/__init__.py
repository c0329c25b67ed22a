"""Anthropic's protocol: POST /v1/messages, and POST /v1/messages/count_tokens.

tools              tools, and the choice of tools
blocks, turns      the turns of a conversation in a body, and their blocks
turn_messages      the conversion of turns to messages
unused_fields      fields that do nothing
request            the bodies
reply              the answer, whole and as events
answer             the types of the answers
errors             errors in the form of Anthropic's API
"""
