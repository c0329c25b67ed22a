"""OpenAI's completions and chats, and the paths that other servers of that API have besides.

request, reply, answer, errors        what completions and chats share
completion_*, chat_*                  one kind of generation each
tokens                                texts to tokens and back
"""
