"""Which implementation a plan is for: what its operations keep and need, and what a device holds beside tensors.

Every figure is a property of code that can be read or of a device, with its source; none is fitted to runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from maniple.hardware.card import GPU


@dataclass(frozen=True)
class Profile:
    """oracles: permutation, routing and the fused loss are the plain-torch oracles, which need more while they run.

    sums_in_place: two gradients of one tensor are added up in the memory of one of them. workspace: bytes that matrix
    products reserve among the tensors; context: those that the driver and the libraries' code take of a GPU before the
    first tensor; communication: bytes a rank of NCCL or RCCL takes for each group that it is in; slack: share of the
    peak that the caching allocator holds beside live tensors. passing: parameters whose states, kept in host memory,
    are on the device at once while they are updated. native_mxfp8: the GPU multiplies mxfp8; where not it is
    emulated. flash_windows: flash attention takes windows, sinks and parts of a sequence, which are a bias where not;
    repeats_keys: attention with a bias repeats grouped keys and values for every head, since torch has no kernel for
    them as they are (`engines/megatron/attention.py`). accumulates: backward kernels of attention hold gradients of
    queries in fp32, and those of grouped keys and values for every head, until they are done.
    """

    name: str
    oracles: bool
    sums_in_place: bool
    workspace: int
    context: int
    communication: int
    slack: float
    passing: int
    native_mxfp8: bool = True
    flash_windows: bool = True
    repeats_keys: bool = False
    accumulates: bool = True


# workspace: torch gives cuBLAS 32 MiB on sm_90, and each thread's handle its own: forward and backward passes have a
# thread each (aten/src/ATen/cuda/CublasHandlePool.cpp). Megatron-LM's published runs have it too: tests/plan. Other
# chips are taken to be alike. context: nvidia-smi shows 0.5 to 0.6 GiB of an idle process on H100 and H200.
# communication: NCCL's buffers are 4 MiB (NCCL_BUFFSIZE) a channel and direction, of at least 2 channels. slack: blocks
# of more than 1 MiB are cut from segments of multiples of 2 MiB, and rests of up to 1 MiB stay uncut
# (c10/cuda/CUDACachingAllocator.cpp), where a training step's tensors are a few MiB to a few hundred. passing: `SLOTS`
# of `CHUNK` in engines/megatron/offload.py. accumulates: flash (flash_api.cpp, mha_bwd), memory-efficient
# (attention_backward.cu) and, by measurement, cuDNN's (benchmarks/results/2026-11-30-h200-attention.jsonl).
MANIPLE = Profile(
    name="maniple",
    oracles=False,
    sums_in_place=True,
    workspace=64 << 20,
    context=600 << 20,
    communication=16 << 20,
    slack=0.03,
    passing=3 * 2**23,
)


def profile_of(gpu: GPU) -> Profile:
    """Maniple's on this GPU. torch takes cuDNN's attention first on sm_9x and sm_10x (sdp_utils.cpp)."""
    cudnn = gpu.architecture.startswith(("sm_9", "sm_10"))
    flash = gpu.vendor == "nvidia"
    return replace(MANIPLE, native_mxfp8=gpu.mxfp8_native, flash_windows=flash, repeats_keys=not cudnn)


# what `maniple train --dry-run` counts: live tensors alone, with oracles where kernels are a GPU's
DRY_RUN = Profile(
    name="dry-run",
    oracles=True,
    sums_in_place=False,
    workspace=0,
    context=0,
    communication=0,
    slack=0.0,
    passing=0,
    native_mxfp8=False,
    accumulates=False,
)
