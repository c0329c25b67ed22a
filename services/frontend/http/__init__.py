"""The HTTP API: bodies, answers, server-sent events and errors, in the forms of several protocols.

openai, responses, anthropic    a folder for each protocol
operations                      the server's own paths
docs                            the OpenAPI document
protocol                        what the protocols share: bodies of conversations, replies
bodies                          a body of JSON becomes a model
transport                       what goes over a connection, within its limits
"""
