"""Watching: what the scheduler does, as events for whoever shows, keeps or replays them.

watching          puts the parts together, and begins a watch with what there is
audience          the watchers there are; while there are none, no event is made
watcher           one of them: the events that wait for it
told_requests     the numbers by which events name requests
request_events    tells the turns of requests' lives
iteration_events  tells iterations, once the timings of all stages are in
stage_starts      when each stage began, by the durations that stages report
pool_events       tells the order of the pool, a few times a second
core_calls        has a scheduling core tell the calls into it
decisions         what is told of a call, with numbers in the place of tokens
watch_service     the gRPC face to watchers
"""
