"""What a run says of itself."""

from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.engines.megatron.headline import headline, kernel_lines
from maniple.models import counting

CUT = ["tensor_parallel_size=2", "pipeline_parallel_size=4", "context_parallel_size=2", "expert_parallel_size=4"]


def line(*sets: str, world: int, data_parallel_size: int, chunks: int = 1) -> str:
    job = load(None, list(sets)).config
    ranks = {"world": world, "data_parallel_size": data_parallel_size}
    return headline(job, resolve_card(job), **ranks, chunks=chunks, device="CPU process", largest=1234)


def test_the_sizes_are_those_of_the_world():
    said = line(*(f"parallel.{size}" for size in CUT), world=32, data_parallel_size=2, chunks=3)
    assert ", on 32 x CPU process: TP 2 PP 4 VPP 3 CP 2 EP 4 ETP 1 DP 2, at most 1,234 parameters a rank, bf16" in said


def test_what_is_not_cut_is_left_out():
    assert ": TP 1 PP 1 EP 1 ETP 1 DP 8, at most" in line(world=8, data_parallel_size=8)


def test_a_changed_card_says_so_and_its_size():
    ranks = {"world": 1, "data_parallel_size": 1}
    assert line(**ranks).startswith("deepseek-v3, 682,636,472,320 parameters, on 1 x CPU process")
    small = ["model.card=mixtral-8x7b", "model.overrides.num_layers=1"]
    count = counting.count(resolve_card(load(None, small).config)).total_with_mtp
    assert line(*small, **ranks).startswith(f"mixtral-8x7b with overrides, {count:,} parameters")
    tiny = line("model.variant=tiny", **ranks)
    assert tiny.startswith("deepseek-v3-tiny, ")


def test_kernels_that_ran_the_same_way_are_one_line():
    same = [(op, "bf16", "cpu", "reference") for op in ("permute", "swiglu")]
    assert kernel_lines(same, "fp32") == [
        "kernels: all on cpu: reference (fp32 tensors, recipe bf16): permute, swiglu",
    ]
    other = ("grouped_gemm", "fp8", "cpu", "reference")
    assert kernel_lines([other, *same], "bf16") == [
        "kernels: grouped_gemm on cpu: reference (bf16 tensors, recipe fp8)",
        "kernels: permute on cpu: reference (bf16 tensors, recipe bf16)",
        "kernels: swiglu on cpu: reference (bf16 tensors, recipe bf16)",
    ]
    assert kernel_lines([other], "bf16") == ["kernels: grouped_gemm on cpu: reference (bf16 tensors, recipe fp8)"]
    assert kernel_lines([], "bf16") == []
