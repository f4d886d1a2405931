"""Which implementation a plan is for: what its operations keep and need, and what a device holds beside tensors.

Every figure is a property of code that can be read or of a device, with its source; none is fitted to runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """oracles: permutation, routing and the fused loss are the plain-torch oracles, which need more while they run.

    sums_in_place: two gradients of one tensor are added up in the memory of one of them. workspace: bytes that matrix
    products reserve among the tensors; context: those that the driver and the libraries' code take of a GPU before the
    first tensor; communication: bytes a rank of NCCL or RCCL takes for each group that it is in; slack: share of the
    peak that the caching allocator holds beside live tensors. native_mxfp8: the GPU multiplies mxfp8; where not it is
    emulated.
    """

    name: str
    oracles: bool
    sums_in_place: bool
    workspace: int
    context: int
    communication: int
    slack: float
    native_mxfp8: bool = True


# workspace: torch gives cuBLAS 32 MiB on sm_90, and each thread's handle its own: forward and backward passes have a
# thread each (aten/src/ATen/cuda/CublasHandlePool.cpp). Megatron-LM's published runs have it too: tests/plan. Other
# chips are taken to be alike. context: nvidia-smi shows 0.5 to 0.6 GiB of an idle process on H100 and H200.
# communication: NCCL's buffers are 4 MiB (NCCL_BUFFSIZE) a channel and direction, of at least 2 channels. slack: blocks
# of more than 1 MiB are cut from segments of multiples of 2 MiB, and rests of up to 1 MiB stay uncut
# (c10/cuda/CUDACachingAllocator.cpp), where a training step's tensors are a few MiB to a few hundred.
MANIPLE = Profile(
    name="maniple",
    oracles=False,
    sums_in_place=True,
    workspace=64 << 20,
    context=600 << 20,
    communication=16 << 20,
    slack=0.03,
)
# what `maniple train --dry-run` counts: live tensors alone, with oracles where kernels are a GPU's
DRY_RUN = Profile(
    name="dry-run",
    oracles=True,
    sums_in_place=False,
    workspace=0,
    context=0,
    communication=0,
    slack=0.0,
)
