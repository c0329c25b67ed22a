"""OpenAI's completions and chats, and further paths that other servers of OpenAI's API offer.

answer                                types of the answers
request, reply, errors                common parts of completions and chats
completion_*, chat_*                  bodies and replies of completions and of chats
tokens                                POST /tokenize and POST /detokenize
"""
