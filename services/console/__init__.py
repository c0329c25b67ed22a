"""The pipeline, live in a terminal: which iterations ran where, for whom, and who waits.

    feed → ConsoleState → render → a terminal, or lines

It reads the events that the frontend streams to whoever watches, or a recording of them.
"""
