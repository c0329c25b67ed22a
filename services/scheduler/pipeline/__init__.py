"""The pipeline as the scheduler sees it: the stages of an epoch, and the engine master that runs
iterations on them.
"""
