"""Blocks and constants of the routing kernels. No torch here, so that another framework can launch them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maniple.kernels.routing.reference import RouterSpec

_NUMBERS = 1024  # that a program holds at once, unless one token has more


def rows(target: str, lanes: int) -> int:
    """Tokens of one program on an "interpreter", "nvidia" or "amd" target, where so many lanes hold a token."""
    return 2 if target == "interpreter" else max(_NUMBERS // lanes, 1)


def forward_constants(target: str, spec: RouterSpec, *, given: bool) -> dict[str, Any]:
    """Constants and warps of `forward_kernel`; given: the ids are.

    Every group has lanes of its own, a power of two of them, so that a group is a run of lanes; a choice that is given
    needs no groups.
    """
    groups = 1 if given else spec.num_groups
    group_lanes, width = power(groups), power(spec.num_experts // groups)
    return _constants(target, spec, group_lanes * width) | {
        "GROUPS": groups,
        "GROUP_TOPK": spec.group_topk,
        "SUM_TOP2": spec.group_score == "sum_top2",
        "GROUP_LANES": group_lanes,
        "WIDTH": width,
    }


def backward_constants(target: str, spec: RouterSpec) -> dict[str, Any]:
    """Constants and warps of `backward_kernel`."""
    width = power(spec.num_experts)
    return _constants(target, spec, width) | {"WIDTH": width}


def power(number: int) -> int:
    """The first power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def _constants(target: str, spec: RouterSpec, lanes: int) -> dict[str, Any]:
    """What both kernels have."""
    softmax = spec.score == "softmax"
    return {
        "EXPERTS": spec.num_experts,
        "TOPK": spec.topk,
        "SOFTMAX": softmax,
        "BEFORE": spec.score_before_topk,
        # a softmax over the chosen has the sum 1
        "RENORMALIZE": spec.renormalize and (spec.score_before_topk or not softmax),
        "ROWS": rows(target, lanes),
        "CHOSEN": power(spec.topk),
        "num_warps": 1 if target == "interpreter" else 8 if lanes > 2 * _NUMBERS else 4,
    }
