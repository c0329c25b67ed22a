"""The scheduling core (Orca, section 4.2): requests, their pool, K/V accounting, Algorithm 1.

It is pure: no asyncio, no gRPC, no tensors, no text, no clock. Tests and benchmarks drive it with
plain calls.

    scheduler      selects a batch, and applies what it brought
    preemption/    requests that run make room for others
    drafting/      guesses at the next tokens of requests
    policies/      which requests are in the next batch, and with how many tokens
    batch          a batch of spans, and its updates
    request_pool   all requests in the system
    admission/     deadlines, refusals, turns: what else keeps a request waiting
    order/         which request comes next
    request        a request, its tokens and its state
    memory/        the accounts of K/V memory
    clients/       accounts of API keys, and service that clients have had
    speculation    how far the drafts of a request were right
"""
