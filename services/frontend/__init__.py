"""The frontend: the part of Orcinus that clients call, over gRPC or over HTTP with the protocols of
OpenAI and Anthropic. A request means the same in every protocol, and names one of the models.

The frontend owns the contract with clients: it checks requests, turns text into tokens and back,
finds stop strings, renders templates, and reports errors in the shape of each protocol. It holds
one stream to the scheduler of each model. It does not decide the order of requests, and holds
neither K/V memory nor tensors. It imports neither torch nor transformers. It keeps no state that
outlives a request, so any number of replicas may run side by side.

    http/, grpc/  the APIs: translate messages to and from requests
    models/       the served models, each with its tokenizer, template and scheduler stream
    generation/   for all APIs: checks a request, submits it, assembles its answers
    api_keys      which callers may use the APIs, and how much
    link/         the stream to a scheduler, and its messages as objects of the frontend
    observing/    metrics, and the span of a call
    text/         tokens, chat templates, stop strings
    request/      what a client asks for, and the rules that it must keep
    watching/     the events of the scheduler, for viewers
"""
