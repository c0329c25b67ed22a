"""The scheduling core (Orca, section 4.2): requests, their pool, K/V accounting, Algorithm 1.

It is pure: no asyncio, no gRPC, no tensors, no text, no clock. Tests and benchmarks drive it with
plain calls.

    scheduler      selects a batch, and later applies the tokens that the batch produced
    preemption/    lets running requests make room for others
    drafting/      guesses the next tokens of requests
    policies/      choose the requests of the next batch, and the tokens of each request
    batch          a batch of spans, and its updates
    request_pool   all requests in the system
    placement      chooses the pipeline that admits a waiting request
    room           the pipelines that may run a request
    admission/     deadlines, refusals, grammars, adapters: what else keeps a request waiting
    order/         decides which request comes next
    request        a request, its tokens and its state
    memory/        the accounts of K/V memory
    clients/       accounts of API keys, and the service that each client has received
    speculation    records how many drafted tokens of a request were right
"""
