"""`--spec maniple.engines.megatron.spec layer_spec`: Megatron-LM's arguments, builder and `pretrain` train our layers.

The process is a CPU device, on which upstream's `pretrain` needs two words more: its own switch for machines without
CUDA, and that its dataset helpers come compiled (the wheel has no Makefile for them).
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

STEPS, SEQUENCE, VOCABULARY, EXPERTS = 3, 32, 255, 8
MODEL = f"""
    --spec maniple.engines.megatron.spec layer_spec --transformer-impl local
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope --no-rope-fusion --untie-embeddings-and-output-weights
    --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --qk-layernorm
    --num-experts {EXPERTS} --moe-router-topk 2 --moe-layer-freq [0,1,1] --moe-ffn-hidden-size 48
    --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
    --moe-z-loss-coeff 0.001
"""
VARIANTS = {
    "gqa": "--group-query-attention --num-query-groups 2",
    "mla": """
        --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8
        --v-head-dim 16 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-shared-expert-intermediate-size 48
    """,
}
JOB = f"""
    --seq-length {SEQUENCE} --micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS} --lr 1e-2
    --lr-decay-style constant --eval-iters 0 --eval-interval 100 --log-interval 1 --distributed-backend gloo
    --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-persist-layer-norm
"""


def pretrain(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """In a process of its own: what each variant's training was like."""
    from maniple.engines.megatron import cpu

    cpu.install()
    return {name: _pretrain(f"{MODEL} {JOB} {words}") for name, words in VARIANTS.items()}


def _pretrain(arguments: str) -> dict[str, Any]:
    from functools import partial

    import torch
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars, initialize, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from maniple.data.synthetic import SyntheticDataset

    report: dict[str, Any] = {"losses": [], "log": []}
    start: dict[str, torch.Tensor] = {}

    def forward_step(batches, model):
        if not start:
            start.update({name: p.detach().clone() for name, p in model.named_parameters()})
            report["modules"] = {_full_name(type(m)) for m in model.modules()}
        report["unchanged"] = [name for name, p in model.named_parameters() if torch.equal(p, start[name])]
        report["biases"] = [b.tolist() for name, b in model.named_buffers() if name.endswith("expert_bias")]
        batch = next(batches)
        words = {name: batch[name] for name in ("labels", "loss_mask")}
        losses_BS = model(batch["tokens"], batch["position_ids"], None, **words)
        return losses_BS, partial(reduce_loss, batch["loss_mask"])

    def reduce_loss(loss_mask_BS, losses_BS):
        total, tokens = (losses_BS.float() * loss_mask_BS).sum(), loss_mask_BS.sum().int()
        report["losses"].append((total / tokens).item())
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    def datasets(sizes: list[int]):
        return tuple(SyntheticDataset(max(size, 1), SEQUENCE, VOCABULARY, seed=1, split=0) for size in sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments.split()])
        patch.setattr(initialize, "_compile_dependencies", lambda: None)
        patch.setattr(training, "initialize_megatron", partial(initialize.initialize_megatron, allow_no_cuda=True))
        patch.setattr(training, "print_rank_last", report["log"].append)
        args = parse_and_validate_args()
        container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        training.pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
    global_vars.unset_global_variables()
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    return report


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    return run_ranks(pretrain, 1, timeout=400)[0]


@pytest.fixture(params=VARIANTS)
def report(request, reports) -> dict[str, Any]:
    return reports[request.param] | {"variant": request.param}


def test_the_model_is_of_our_modules(report):
    ours = "maniple.engines.megatron"
    wanted = {f"{ours}.moe.ManipleMoELayer", f"{ours}.moe.ManipleRouter", f"{ours}.experts.GroupedExperts"}
    wanted |= {f"{ours}.attention.SDPAttention", f"{ours}.norm.RMSNorm"}
    if report["variant"] == "mla":
        wanted |= {f"{ours}.attention.LatentAttention"}
    assert wanted <= report["modules"]
    # upstream's own parts that stand in the same slots where the spec is not taken
    core = "megatron.core.transformer"
    others = {f"{core}.moe.experts.SequentialMLP", f"{core}.dot_product_attention.DotProductAttention"}
    assert not others & report["modules"]


def test_it_trains(report):
    losses = report["losses"]
    assert len(losses) == 2 * STEPS  # micro-batches
    assert all(0 < loss < 7 for loss in losses)
    assert sum(losses[-2:]) < sum(losses[:2]) - 0.2
    assert not report["unchanged"]


def test_megatron_lm_logs_its_losses(report):
    lines = [line for line in report["log"] if "iteration" in line]
    assert len(lines) == STEPS
    for step in (0, 2):  # upstream's second line is the mean over the first two steps
        pairs = [part.rpartition(":") for part in lines[step].split("|")]
        logged = {name.strip(): float(value) for name, _, value in pairs if name.strip().endswith("loss")}
        losses = report["losses"][2 * step : 2 * step + 2]
        assert logged["lm loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert 0.9 < logged["seq_load_balancing_loss"] < EXPERTS  # 1 where loads are even
        assert 1 < logged["z_loss"] < 20  # log(8)^2 where logits are small


def test_the_balancing_bias_moves_by_its_rate(report):
    if report["variant"] == "gqa":
        assert not report["biases"]
        return
    for bias_E in report["biases"]:  # of the two MoE layers, before the last step
        steps = {round(value / 1e-3, 3) for value in bias_E}
        assert steps <= {-2.0, -1.0, 0.0, 1.0, 2.0}
        assert min(steps) < 0 < max(steps)
