"""A live view of a pipeline in a terminal: the iterations that ran on each stage, and the requests.

    feed → ConsoleState → render → a terminal, or lines

The console gets its events from a frontend, which streams them to viewers, or from a recording.
"""
