"""Inputs that atheris makes up, guided by the lines of ours that they reach.

    python -m tests.fuzz.coverage TARGET --runs N

A target is a file of `targets`: it takes bytes to a parser of ours, and lets pass only the errors
that this parser is documented to raise. Any other error ends the run, and so do an input that takes
seconds and a process that takes more memory than a pod has; the input is printed.
"""
