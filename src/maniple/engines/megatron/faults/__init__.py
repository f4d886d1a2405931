"""What a run does when something goes wrong: a NaN, a spike, a signal, a hang, a start from what was saved."""
