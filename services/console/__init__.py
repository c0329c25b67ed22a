"""A live view of a pipeline in a terminal: the iterations that ran on each stage, and the requests.

    feed → ConsoleState → render → a terminal, or lines

The console reads the events that a frontend streams to its viewers, or a recording of such events.
"""
