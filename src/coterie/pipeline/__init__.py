"""Run one stage of a schedule: compute, send, receive, stash weights, update."""
