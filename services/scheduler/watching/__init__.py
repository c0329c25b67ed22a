"""Watching: sends events about the scheduler's work to watchers, which show, record or replay them.

In these modules, to tell a change means to send an event about it to all present watchers, which
are called the audience.

watching          creates the parts, and begins each watch with the present state
audience          the present watchers; without a watcher no event is made
watcher           one watcher, with the events that wait to be sent
told_requests     the numbers by which events name requests
request_events    tells each change of a request's state (turn)
iteration_events  tells iterations, when the timings of all stages have arrived
stage_starts      computes when each stage began, from the durations that stages report
pool_events       tells the order of the pool, a few times per second
core_calls        wraps a scheduling core, to tell the calls of its methods
core_facts        the settings from which a scheduling core can be created again
decisions         makes the events about calls, with numbers instead of tokens
selections        the event of a selected batch
recording         writes the events to a file
replaying         repeats the calls of a recording, and compares the batches
epoch_events      tells the epochs and their iterations
watch_service     the gRPC service for watchers
"""
