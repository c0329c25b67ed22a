"""The pipeline, live in a terminal: which iterations ran on which stage, and which requests wait.

    feed → ConsoleState → render → a terminal, or lines

The console reads the view that a frontend streams to its viewers, or a recording of a view.
"""
