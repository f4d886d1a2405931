"""Low-precision recipes on several ranks: the same numbers at every layout, and no stale weight.

Block scales are powers of two, so that a block cut in two rounds as the whole did. Carriers are fp32 here, which jobs
refuse: in bf16 sums over ranks round otherwise, and near-ties of routing flip in any recipe. With one scale a tensor
each rank has its own scale: the numbers are other ones, and only the losses are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import parity
from tests.distributed.parity import Case
from tests.distributed_utils import run_ranks
from tests.engines.test_precision import differing, quantizing, weights
from tests.poison import relative_error

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work
TOLERANCE = 1e-5


def case(card: str, recipe: str, **parallel: int) -> Case:
    precision = {"dtype": "fp32", "recipe": recipe}
    return Case(card, 2, parallel, sequences=2, steps=1, sections={"precision": precision})


CASES = {
    "experts, fp8_block": case("qwen3-30b-a3b", "fp8_block", expert_parallel_size=2),
    "experts, mxfp8": case("qwen3-30b-a3b", "mxfp8", expert_parallel_size=2),
    "tensors, fp8_block": case("deepseek-v3", "fp8_block", tensor_parallel_size=2),
    "tensors, mxfp8": case("deepseek-v3", "mxfp8", tensor_parallel_size=2, expert_tensor_parallel_size=2),
    "both, with biases": case("gpt-oss-20b", "fp8_block", tensor_parallel_size=2, expert_parallel_size=2),
    "stages": case("qwen3-30b-a3b", "fp8_block", pipeline_parallel_size=2),
    "experts, fp8": case("qwen3-30b-a3b", "fp8", expert_parallel_size=2),
}


@pytest.fixture(scope="module")
def outcomes():
    return parity.compare(CASES)


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_are_one_process(outcomes, name):
    outcome = outcomes[name]
    assert not outcome.missing
    assert not outcome.unequal
    if CASES[name].sections["precision"]["recipe"] == "fp8":
        assert outcome.figures["loss 0"] <= 0.01
        assert outcome.figures["grad_norm 0"] <= 0.05
    else:
        assert outcome.counts_agree
        assert not outcome.too_far(TOLERANCE)


def linears(rank: int, world_size: int) -> dict[str, float]:
    """Errors of upstream's two linear layers, cut over two ranks without sequence parallelism, against the whole."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from tests.engines import helpers

    from maniple.engines.megatron import parallel
    from maniple.engines.megatron.linears import LowPrecisionProduct
    from maniple.kernels.linear import quantized_linear

    job = helpers.make_job(parallel={"tensor_parallel_size": 2})
    parallel.start(job, parallel.pick_device(job))
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=2, tensor_model_parallel_size=2, perform_initialization=False
    )
    generator = torch.Generator().manual_seed(0)
    errors = {}
    group = parallel_state.get_tensor_model_parallel_group()
    for name, kind, cut, words in (
        ("column", ColumnParallelLinear, 0, {"gather_output": False}),
        ("row", RowParallelLinear, 1, {"input_is_parallel": True}),
    ):
        x_SBK, w_NK, b_N, grad_SBN = (
            torch.randn(shape, generator=generator) for shape in ((6, 3, 256), (512, 256), (512,), (6, 3, 512))
        )
        linear = kind(
            256, 512, config=config, init_method=None, bias=True, skip_bias_add=False, tp_group=group, **words
        )
        linear._forward_impl = LowPrecisionProduct("fp8_block", torch.float8_e4m3fn)
        with torch.no_grad():
            linear.weight.copy_(w_NK.chunk(2, cut)[rank])
            linear.bias.copy_(b_N if kind is RowParallelLinear else b_N.chunk(2)[rank])
        part = x_SBK if cut == 0 else x_SBK.chunk(2, -1)[rank]
        part = part.clone().requires_grad_()
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        out, _ = linear(part)
        out.backward(grad_SBN.chunk(2, -1)[rank] if cut == 0 else grad_SBN)
        leaves = [t.clone().requires_grad_() for t in (x_SBK, w_NK, b_N)]
        whole = quantized_linear(leaves[0], leaves[1], bias_N=leaves[2], recipe="fp8_block")
        whole.backward(grad_SBN)
        dx, dw, db = (leaf.grad for leaf in leaves)
        errors[f"{name} out"] = relative_error(out, whole.chunk(2, -1)[rank] if cut == 0 else whole)
        errors[f"{name} dx"] = relative_error(part.grad, dx if cut == 0 else dx.chunk(2, -1)[rank])
        errors[f"{name} dw"] = relative_error(linear.weight.main_grad, dw.chunk(2, cut)[rank])
        errors[f"{name} db"] = relative_error(linear.bias.grad, db.chunk(2)[rank] if cut == 0 else db)
    parallel.stop_groups()
    return errors


def test_linear_layers_without_sequence_parallelism():
    for errors in run_ranks(linears, 2, timeout=120):
        assert len(errors) == 8
        assert not {name: e for name, e in errors.items() if not e <= 1e-6}


def overlapped(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A job that validates after each step and one that does not: weights that differ, weights quantized."""
    from tests.engines import jobs

    ends, quantized = {}, {}
    for name, interval in (("validating", 1), ("training", 0)):
        job = jobs.make_job(
            folder,
            name,
            parallel={"overlap_param_gather": True, "overlap_grad_reduce": True, "distributed_optimizer": True},
            precision={"dtype": "bf16", "recipe": "fp8_block"},
            train={"steps": 3, "global_batch_size": 8, "eval_interval": interval},
        )
        with quantizing(cache=True) as count:
            ends[name] = weights(jobs.run(job, jobs.tiny_card("qwen3-30b-a3b")))
        quantized[name] = len(count)
    return {"differ": differing(ends["validating"], ends["training"]), "quantized": quantized}


def test_validation_between_steps_leaves_no_stale_weight(tmp_path):
    for found in run_ranks(overlapped, 2, tmp_path, timeout=240):
        assert not found["differ"]
        # each of 8 weights before each update and after the last; `settle` says once more that they may have changed
        assert found["quantized"]["training"] == 4 * 8
        assert found["quantized"]["validating"] >= 4 * 8


def staged(rank: int, world_size: int, folder: Path) -> dict[str, str] | None:
    """What each of two pipeline stages knows of all layers after a job."""
    from tests.engines import jobs

    job = jobs.make_job(
        folder,
        "staged",
        parallel={"pipeline_parallel_size": 2, "pipeline_layout": "Et|ttmL"},
        precision={"dtype": "bf16", "recipe": "fp8", "bf16_first_layers": 1},
        train={"steps": 1},
    )
    return jobs.run(job, jobs.tiny_card("deepseek-v3")).precision


def test_every_rank_knows_what_the_layers_of_all_stages_ran(tmp_path):
    assert run_ranks(staged, 2, tmp_path, timeout=120) == [{"bf16": "0", "fp8": "1-3"}] * 2


def exchange(rank: int, world_size: int) -> dict[str, Any]:
    from tests.engines import test_schedule_plan

    precision = {"dtype": "bf16", "recipe": "fp8_block"}
    return test_schedule_plan._compare("deepseek-v3", rank, parallel={"expert_parallel_size": 2}, precision=precision)


def test_an_exchange_beside_another_backward_pass_is_the_plain_one():
    for report in run_ranks(exchange, 2, timeout=240):
        assert report["losses"] == 0
        assert not report["zeros"]
        embedding = "embedding.word_embeddings.weight"  # used twice with MTP: sums are rounded otherwise
        assert not {name: e for name, e in report["gradients"].items() if e and name != embedding}
        assert report["gradients"][embedding] <= 2**-8
