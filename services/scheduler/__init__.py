"""The scheduler: the request pool, K/V accounting, Algorithm 1, and the engine master that drives
the stages.

    __main__         starts it
    replay           runs a recorded schedule again
    autoscaling      makes the autoscaler of a leader
    leader           gathers stages, joins an epoch, serves it, and starts again after a loss
    service          the gRPC service for frontends
    frontend_stream  one frontend: its requests, and the messages that wait to be sent to it
    submission       checks a submission, and makes a request from it
    known_model      what is known of the model while no pipeline serves
    serving_loop     select a batch → run one iteration → apply its tokens
    watching/        events for watchers: a page, a console, a recording
    observing/       metrics and traces of requests and iterations
    pipeline/        membership of an epoch, and the engine master that runs iterations on it
    scaling/         the number of pipelines by the queued work
    core/            the scheduling core: pure, without asyncio, gRPC, tensors, text or a clock
    cluster/         the election of a leader, the stages' addresses, and the number of workers
"""
