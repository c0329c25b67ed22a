"""The scheduler's side of a pipeline: the choice of workers as stages of an epoch, and the engine
master that runs iterations on the stages.
"""
