"""OpenAI's completions and chats, and the paths that other servers of that API have besides.

answer                                the types of all answers
request, reply, errors                what completions and chats share
completion_*, chat_*                  one kind of generation each
tokens                                texts to tokens and back
"""
