"""The arena: runs policies on the same arrivals, checks each of their batches, and compares them.

    entrants.py     which policies run, by name or from a file
    traffic.py      the requests: named traces, files of traces, recordings
    setup.py        the machine and the settings that all policies have
    referee.py      a scheduler that checks every batch and every token
    virtual.py      a run of the real scheduling core in virtual time
    real.py         a run of a real system, whose ranks compute a model or sleep instead
    figures.py      the figures that are compared; table.py and drawing.py show them

The arena decides nothing about requests and has no scheduler of its own.
"""
