"""The scheduler: the request pool, K/V accounting, Algorithm 1, and the engine master that drives
the stages.

    __main__         starts it
    replay           runs a recorded schedule again
    leader           gathers stages, joins an epoch, serves it, and starts again when it is lost
    service          the gRPC face to frontends
    frontend_stream  one frontend: its requests, and what is to be sent to it
    submission       what is checked of a submission, and the request that it becomes
    serving_loop     select a batch → run one iteration → apply its tokens
    watching/        events for watchers: a page, a console, a recording
    observing/       metrics and traces: what is told of requests and iterations
    pipeline/        membership of an epoch, and the engine master that runs iterations on it
    core/            the scheduling core: pure, without asyncio, gRPC, tensors, text or a clock
    cluster/         which scheduler leads, and where the stages are
"""
