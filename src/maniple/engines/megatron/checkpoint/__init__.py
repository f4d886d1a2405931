"""Checkpoints: what they hold (`state`), writing (`writer`), reading (`reader`), and what needs no torch (`files`)."""
