"""The PyTorch engine: Megatron-Core from PyPI, unmodified, with Maniple's attention, norms, experts and router."""

import logging
import warnings

# Upstream's notices about Transformer Engine, Apex and models that are not used here would bury a run's own words.
warnings.filterwarnings("ignore", module=r"megatron\..*")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\..*")  # of tensors that upstream hands it
logging.getLogger("megatron").setLevel(logging.ERROR)
# says at import that there is no CUDA runtime, where a CUDA compiler is installed on a machine without a GPU
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
