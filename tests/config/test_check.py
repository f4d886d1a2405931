"""Jobs that cannot work are refused before anything starts, and the shipped ones are not."""

from pathlib import Path

import pytest

from maniple.config.check import check, data_parallel_size, pipeline_stages, resolve_card
from maniple.config.load import load
from maniple.config.schema import PrecisionConfig
from maniple.errors import UserError
from maniple.models import list_cards

CONFIGS = Path(__file__).parents[2] / "configs"
WORLD = {"convergence_350m": 1, "demo": 2, "h200_qwen3_1b": 1, "qwen3_30b_a3b_8": 8, "deepseek_v3_1024": 1024}

# DeepSeek-V3's features at toy size: 3 layers (1 dense), 4 heads, 8 experts, 1 MTP layer
TINY = ["model.variant=tiny", "train.global_batch_size=64", "data.sequence_length=64"]


def _size(key):
    return lambda value: f"parallel.{key}={value}"


tp, pp, vpp = _size("tensor_parallel_size"), _size("pipeline_parallel_size"), _size("virtual_pipeline_size")
ep, etp, layout = _size("expert_parallel_size"), _size("expert_tensor_parallel_size"), _size("pipeline_layout")
cp = _size("context_parallel_size")
SELECTIVE = "recompute.granularity=selective"


def refusal(world_size, *overrides, gpus_per_node=None):
    config = load(None, [*TINY, *overrides]).config
    with pytest.raises(UserError) as caught:
        check(config, resolve_card(config), world_size, gpus_per_node=gpus_per_node)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def accepted(world_size, *overrides, gpus_per_node=None):
    config = load(None, [*TINY, *overrides]).config
    check(config, resolve_card(config), world_size, gpus_per_node=gpus_per_node)


def test_every_shipped_job_is_listed():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(WORLD)


@pytest.mark.parametrize("name", WORLD)
def test_shipped_jobs_load_and_fit_their_world(name):
    config = load(CONFIGS / f"{name}.yaml").config
    check(config, resolve_card(config), WORLD[name], gpus_per_node=8)


def test_deepseek_v3_in_two_chunks_of_sixteen():
    words = ["parallel.pipeline_layout=Et*3|(tt|)*28,t|t|mL", ep(64)]
    config = load(CONFIGS / "deepseek_v3_1024.yaml", words).config
    stages, chunks = pipeline_stages(config, resolve_card(config))
    assert (len(stages), chunks) == (32, 2)
    assert "".join(stages).count("t") == 61
    assert data_parallel_size(config, 1024) == 64


@pytest.mark.parametrize("card", list_cards())
def test_every_tiny_card_trains_on_one_and_two_ranks(card):
    accepted(1, f"model.card={card}")
    accepted(2, f"model.card={card}", ep(2))


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, ()),
        (8, (tp(2),)),
        (8, (tp(2), "parallel.sequence_parallel=true")),
        (4, (ep(2), etp(2))),
        (4, (tp(4), ep(4))),
        (3, (pp(3),)),
        (4, (cp(4), ep(4))),
        (8, (cp(2), tp(2), ep(4))),
        (8, (cp(2), tp(4), "data.sequence_length=72")),
        (2, (pp(2), layout("Et|ttmL"))),
        (2, (pp(2), layout("Et|t|t|mL"))),
        (2, (pp(2), layout("Et|t|t|mL"), vpp(2))),
        (2, ("moe.dispatcher=local",)),
        (2, (ep(2), "moe.buffer_factor=1", "moe.pages_factor=2")),
        (2, (etp(2), "moe.buffer_factor=1.5")),
        (1, ("moe.buffer_factor=2", "moe.dispatcher=all_to_all")),
        (1, ("train.deterministic=true", "precision.dtype=fp32")),
        (1, ("precision.recipe=fp8", "precision.bf16_first_layers=1", "precision.bf16_last_layers=1")),
        (1, ("precision.bf16_first_layers=9",)),  # all are bf16 anyway
        (1, ("recompute.granularity=selective", "recompute.modules=[core_attn, shared_experts]")),
        (1, ("recompute.granularity=full", "recompute.num_layers=1")),
        (1, (SELECTIVE, "recompute.modules=[norm, mla_up_proj, moe_act, permute, core_attn, mlp, shared_experts]")),
        (2, (SELECTIVE, "recompute.modules=[norm, experts]", ep(2))),
        (1, ("optimizer.main_params_dtype=bf16", "optimizer.moments_dtype=bf16")),
        (1, ("optimizer.moments_dtype=bf16", "precision.dtype=fp32", "parallel.distributed_optimizer=false")),
        (1, ("recompute.granularity=full", "recompute.layers=[0, 3]")),
        (4, (pp(4), layout("Et|tt|m|L"))),
    ],
)
def test_what_works_is_accepted(world_size, overrides):
    accepted(world_size, *overrides)


@pytest.mark.parametrize(
    ("world_size", "overrides", "says"),
    [
        (0, (), "world size 0"),
        (3, (tp(2),), "3 processes, one a GPU, are not a multiple of 2 = tensor_parallel_size 2 x"),
        (4, (pp(3),), "4 processes, one a GPU, are not a multiple of 3"),
        (6, (ep(4),), "6 processes, one a GPU, are not a multiple of 4 = expert_parallel_size 4 x"),
        (8, (ep(4), etp(4)), "not a multiple of 16"),
        (6, (ep(2), etp(2)), "not a multiple of 4"),
        (4, (ep(4), pp(2)), "not a multiple of 8"),
        (3, (ep(3),), "moe.num_experts 8 is not a multiple of parallel.expert_parallel_size 3"),
        (8, (tp(8),), "num_heads 4 is not a multiple of parallel.tensor_parallel_size 8"),
        (4, ("model.card=qwen3-30b-a3b", tp(4)), "num_kv_heads 2 is not a multiple"),
        (2, ("model.overrides.dense_ffn_size=97", tp(2)), "dense_ffn_size 97 is not"),
        (2, ("model.overrides.moe.shared_ffn_size=49", tp(2)), "shared_ffn_size 49 is not"),
        (2, ("model.overrides.moe.expert_ffn_size=49", etp(2)), "expert_ffn_size 49 is not"),
        (3, (), "train.global_batch_size 64 is not a multiple of 3 = train.micro_batch_size 1 x 3 data-parallel ranks"),
        (8, ("train.micro_batch_size=3",), "global_batch_size 64 is not a multiple of 24"),
        (2, (pp(2),), "the model's 3 layers do not divide over 2 = pipeline_parallel_size 2"),
        (3, (pp(3), vpp(2)), "3 layers do not divide over 6"),
        (1, (vpp(3),), "virtual_pipeline_size asks for 3 model chunks a rank"),
        (1, (layout("Et|ttmL"),), "pipeline_layout asks for 2 model chunks a rank"),
        (2, (pp(2), layout("Et|tmL")), "it holds 2 layers (t) and the model has 3"),
        (
            2,
            (pp(2), layout("Et|ttmL"), vpp(2)),
            "virtual_pipeline_size is 2 and parallel.pipeline_layout has 2 stages, 1 a pipeline rank",
        ),
        (
            2,
            (pp(2), layout("Et|t|t|mL"), "train.global_batch_size=3"),
            "3 micro-batches a step",
        ),
        (2, (tp(2), "parallel.sequence_parallel=false"), "sequence_parallel is false"),
        (1, ("parallel.sequence_parallel=true",), "sequence_parallel is true and parallel.tensor_parallel_size is 1"),
        (2, (tp(2), "data.sequence_length=63"), "data.sequence_length 63 is not a multiple"),
        (2, (cp(2), "data.sequence_length=66"), "data.sequence_length 66 is not a multiple of 2 x parallel.context_"),
        (8, (cp(2), tp(4), "data.sequence_length=68"), "68 is not a multiple of parallel.context_parallel_size x "),
        (
            6,
            (cp(2), tp(2)),
            "6 processes, one a GPU, are not a multiple of 4 = tensor_parallel_size 2 x pipeline_parallel_size 1 x",
        ),
        (4, (cp(2), ep(8)), "4 processes, one a GPU, are not a multiple of 8"),
        (2, ("moe.dispatcher=local", ep(2)), "moe.dispatcher local exchanges nothing"),
        (2, ("moe.buffer_factor=2",), "moe.buffer_factor bounds what ranks send each other"),
        (2, (ep(2), "moe.pages_factor=2"), "moe.pages_factor keeps less than the buffers' size"),
        (
            2,
            (ep(2), "moe.buffer_factor=2", "moe.pages_factor=2", "moe.overlap_exchange=true"),
            "in the order of one stream",
        ),
        (2, ("moe.dispatcher=local", etp(2)), "moe.dispatcher local exchanges nothing"),
        (
            1,
            ("precision.recipe=fp8", "precision.bf16_first_layers=1", "precision.bf16_last_layers=2"),
            "leave none of the 3 layers to precision.recipe fp8: lower them, or set precision.recipe=bf16",
        ),
        (1, ("precision.recipe=mxfp8", "precision.dtype=fp32"), "precision.dtype is fp32"),
        (1, ("moe.overlap_exchange=true",), "overlap_exchange needs parallel.expert_parallel_size above 1"),
        (2, (ep(2), "moe.overlap_exchange=true", "precision.dtype=fp32"), "needs precision.dtype=bf16"),
        (4, (ep(2), pp(2), layout("Ett|tmL"), "moe.overlap_exchange=true"), "two model chunks or more a pipeline rank"),
        (2, (ep(2), "moe.overlap_exchange=true", "recompute.granularity=full"), "granularity none or selective"),
        (2, (ep(2), "moe.overlap_exchange=true", "parallel.overlap_param_gather=true"), "overlap_param_gather=false"),
        (2, (ep(2), "moe.overlap_exchange=true", "data.attend_across_documents=false"), "attend_across_documents=true"),
        (1, ("recompute.granularity=selective",), "needs recompute.modules"),
        (1, ("recompute.modules=[moe]",), "needs recompute.granularity=selective"),
        (1, ("recompute.granularity=selective", "recompute.modules=[attn]"), "unknown 'attn'; it knows core_attn"),
        (1, ("recompute.num_layers=2",), "needs recompute.granularity=full"),
        (4, ("model.overrides.num_layers=30", pp(4)), "30 layers do not divide over 4"),
        (2, (pp(2), layout("Et|ttmL"), "model.overrides.num_layers=4"), "holds 3 layers (t) and the model has 4"),
        (4, (pp(4), layout("Et|tt|m|L"), "model.overrides.tied_embeddings=true"), "put m and L in one stage"),
        (1, ("recompute.layers=[2]",), "recompute.layers needs recompute.granularity=full"),
        (1, ("recompute.granularity=full", "recompute.num_layers=1", "recompute.layers=[0]"), "leave one out"),
        (1, ("recompute.granularity=full", "recompute.layers=[1, 4]"), "names layer 4 and"),
        (1, ("recompute.granularity=full", "recompute.layers=[1, 1]"), "names a layer twice"),
        (1, (SELECTIVE, "recompute.modules=[layernorm]"), "unknown 'layernorm'"),
        (1, (SELECTIVE, "recompute.modules=[norm, norm]"), "names a module twice"),
        (1, (SELECTIVE, "recompute.modules=[moe_act, moe]"), "moe computes moe_act again already: leave moe_act out"),
        (1, (SELECTIVE, "recompute.modules=[experts, moe_act]"), "experts computes moe_act again already"),
        (
            1,
            (SELECTIVE, "recompute.modules=[mla_up_proj]", "model.card=qwen3-30b-a3b"),
            "MLA, which qwen3-30b-a3b-tiny has",
        ),
        (2, (SELECTIVE, "recompute.modules=[permute]", ep(2)), "here they come from an exchange"),
        (1, (SELECTIVE, "recompute.modules=[permute]", "moe.dispatcher=all_to_all"), "or use moe.dispatcher=local"),
        (
            2,
            (SELECTIVE, "recompute.modules=[norm]", ep(2), "moe.overlap_exchange=true"),
            "norm needs layers that run whole",
        ),
        (1, ("optimizer.main_params_dtype=bf16", "precision.dtype=fp32"), "needs precision.dtype=bf16"),
        (1, ("optimizer.main_params_dtype=bf16", "parallel.distributed_optimizer=false"), "distributed_optimizer=true"),
        (1, ("optimizer.min_learning_rate=1",), "min_learning_rate 1 is more than optimizer.learning_rate 0.0003"),
        (1, ("train.steps=20",), "never reach its peak: set more train.steps, or optimizer.warmup_steps=2"),
        (1, ("parallel.overlap_param_gather=true",), "needs parallel.distributed_optimizer and"),
    ],
)
def test_what_cannot_work_is_refused(world_size, overrides, says):
    assert says in refusal(world_size, *overrides)


def test_nodes_are_full():
    assert "world size 12 is not a multiple of the ranks a node, 8" in refusal(
        12, "train.global_batch_size=96", gpus_per_node=8
    )
    accepted(4, gpus_per_node=8)
    accepted(16, gpus_per_node=8)


def test_the_card_is_found_shrunk_and_then_overridden():
    config = load(None, ["model.variant=tiny", "model.overrides.num_layers=5", "model.overrides.moe.topk=1"]).config
    card = resolve_card(config)
    assert (card.num_layers, card.moe.topk, card.moe.num_experts, card.hidden_size) == (5, 1, 8, 64)
    assert resolve_card(load(None).config).num_layers == 61


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.card=deepseek-v4"], "did you mean 'deepseek-v"),
        (["model.overrides.moe.topk=400"], "model.overrides: moe.topk 400 is more than moe.num_experts 256"),
        (["model.overrides.head_dim=5"], "model.overrides: MLA has head_dim equal to"),
        (
            ["model.card=mixtral-8x7b", "model.overrides.mla.v_head_dim=5"],
            "model.overrides.mla.kv_lora_rank: this value is needed and not given",
        ),
    ],
)
def test_cards_that_do_not_exist_or_contradict_themselves(overrides, says):
    with pytest.raises(UserError) as caught:
        resolve_card(load(None, overrides).config)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_that_would_overflow_later_are_refused():
    assert refusal(1, f"train.seed={2**31}").startswith("train.seed 2147483648 is more than 2147483647")
    accepted(1, f"train.seed={2**31 - 1}")
    assert "is more than 1,099,511,627,776 samples" in refusal(1, f"train.steps={2**34 + 1}")
    accepted(1, f"train.steps={2**34}")


def test_which_layers_run_in_the_recipe():
    def recipes(layers, *, mtp=0, **ends):
        precision = PrecisionConfig(recipe="fp8_block", **ends)
        return [precision.recipe_of(layer, layers) for layer in range(layers + mtp)]

    low, plain = "fp8_block", "bf16"
    assert recipes(3) == [low] * 3
    assert recipes(4, bf16_first_layers=1, bf16_last_layers=2) == [plain, low, plain, plain]
    assert recipes(2, mtp=2) == [low] * 4
    # MTP layers are as the last decoder layer is
    assert recipes(3, mtp=2, bf16_last_layers=1) == [low, low, plain, plain, plain]
    assert recipes(3, mtp=1, bf16_first_layers=2) == [plain, plain, low, low]
    assert PrecisionConfig(bf16_first_layers=1).recipe_of(2, 3) == plain
