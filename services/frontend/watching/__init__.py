"""The view of the scheduler that a frontend streams to its viewers, from one subscription to
events."""
