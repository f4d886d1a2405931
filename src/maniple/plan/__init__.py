"""What a job will cost, before it starts. Nothing here imports torch: a laptop answers at once."""
