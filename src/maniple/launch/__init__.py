"""Starting a job: `torchrun` (processes of this node), `worker` (what a started process needs to know)."""
