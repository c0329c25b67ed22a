"""The frontend: the clients' side of Orcinus, over gRPC and over the OpenAI HTTP API, with one
meaning.

It owns the client contract: checking requests, text to tokens and back, stop strings, templates,
errors in each protocol's own shape. It holds one stream to the scheduler and nothing else: no
order, no K/V, no tensors. It imports neither torch nor transformers, and it keeps no state that
outlives a request, so any number of replicas may stand side by side.

    http/, grpc/  the two protocols; nothing but translation
    generation/   the one implementation: check, submit, assemble, cancel
    api_keys      who may call, and how much
    link/         the stream to the scheduler, and its messages in the frontend's words
    observing/    metrics, and the span of a call
    text/         tokens, chat templates, stop strings
    request/      what a client asks for, and the rules it must keep
"""
