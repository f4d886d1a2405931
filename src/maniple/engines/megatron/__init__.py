"""The PyTorch engine: Megatron-Core from PyPI, unmodified, with Maniple's attention, norms, experts and router."""
