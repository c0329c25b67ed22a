"""The HTTP API: bodies, answers, server-sent events and errors, in the forms of several protocols.

openai, responses, anthropic    a folder for each protocol
ranking                         scores of pairs of texts, and rankings of documents
operations                      probes, the page of the pipeline, spans of requests
docs                            the OpenAPI document
protocol                        common parts of the protocols: bodies, replies, routes, errors
bodies                          reading bodies in JSON as models
transport                       HTTP connections within limits, and streams of events
"""
