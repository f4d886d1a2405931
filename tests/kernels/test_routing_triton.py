"""The routing kernels compile for every GPU they are meant for: no spills, room."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY, TARGETS, compile_for, spills

from maniple.kernels.routing import RouterSpec, launch
from maniple.kernels.routing import triton_kernels as kernels

pytestmark = pytest.mark.timeout(300)
DEEPSEEK = {"score": "sigmoid", "num_groups": 8, "group_topk": 4, "group_score": "sum_top2"}
LARGE = RouterSpec(2304, 36)
LATE = RouterSpec(128, 4, score_before_topk=False)
SPECS = {
    "E 128, k 8": RouterSpec(128, 8),
    "E 128, k 4, late": LATE,
    "E 160, k 6, groups": RouterSpec(160, 6, renormalize=False, num_groups=8, group_topk=3),
    "E 256, k 8, groups": RouterSpec(256, 8, **DEEPSEEK),
    "E 288, k 1": RouterSpec(288, 1, "sigmoid", False),
    "E 1024, k 16": RouterSpec(1024, 16),
    "E 2304, k 36": LARGE,
    "E 2304, k 36, groups": RouterSpec(2304, 36, **DEEPSEEK | {"num_groups": 48, "group_topk": 12}),
    "E 2304, k 36, a group each": RouterSpec(2304, 36, "sigmoid", num_groups=2304, group_topk=36),
}
NONE = ("=", None)


def check(target: str, kernel, arguments: dict, constants: dict) -> None:
    warps = constants.pop("num_warps")
    arguments = arguments | {name: ("=", value) for name, value in constants.items()}
    compiled = compile_for(target, kernel, arguments, num_warps=warps)
    assert spills(target, compiled) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY[target]


def kind(target: str) -> str:
    return "amd" if target.startswith("gfx") else "nvidia"


def forward(target: str, spec: RouterSpec, *, given: bool = False, biased: bool = True, dtype: str = "fp32") -> None:
    arguments = {"logits_ptr": f"*{dtype}", "bias_ptr": "*fp32" if biased else NONE}
    arguments |= {"given_ptr": "*i64", "ids_ptr": NONE} if given else {"given_ptr": NONE, "ids_ptr": "*i64"}
    arguments |= {"probs_ptr": "*fp32", "scores_ptr": "*fp32", "counts_ptr": "*i64"}
    arguments |= {"T": "i32", "logits_row": "i32", "scale": "fp32"}
    check(target, kernels.forward_kernel, arguments, launch.forward_constants(kind(target), spec, given=given))


def backward(target: str, spec: RouterSpec, *, missing: str | None = None, dtype: str = "fp32") -> None:
    arguments = dict.fromkeys(("logits_ptr", "out_ptr"), f"*{dtype}") | {"ids_ptr": "*i64"}
    arguments |= dict.fromkeys(("grad_probs_ptr", "grad_scores_ptr"), "*fp32")
    arguments |= {"T": "i32", "logits_row": "i32", "scale": "fp32"} | ({missing: NONE} if missing else {})
    check(target, kernels.backward_kernel, arguments, launch.backward_constants(kind(target), spec))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_forward(target, spec):
    forward(target, spec)


@pytest.mark.parametrize("target", TARGETS)
def test_forward_without_a_bias_of_bf16_logits_and_with_given_ids(target):
    forward(target, LARGE, biased=False)
    forward(target, LATE, biased=False, dtype="bf16")
    for name in ("E 128, k 8", "E 256, k 8, groups", "E 2304, k 36"):
        forward(target, SPECS[name], given=True, biased=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["E 128, k 8", "E 128, k 4, late", "E 256, k 8, groups", "E 2304, k 36", "sigmoid"])
def test_backward(target, name):
    backward(target, SPECS.get(name, RouterSpec(2304, 36, "sigmoid")))


@pytest.mark.parametrize("target", TARGETS)
def test_backward_of_one_result_alone_and_of_bf16_logits(target):
    for spec in (LATE, LARGE):
        backward(target, spec, missing="grad_scores_ptr", dtype="bf16")
        backward(target, spec, missing="grad_probs_ptr")
