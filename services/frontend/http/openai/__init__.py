"""OpenAI's completions and chats, and further paths that other servers of OpenAI's API offer.

answer                                the types of all answers
request, reply, errors                what completions and chats share
completion_*, chat_*                  one kind of generation each
tokens                                texts to tokens and back
"""
