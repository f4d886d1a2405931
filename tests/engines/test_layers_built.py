"""What the engine really builds at a layout: every layer once, in order, of its kind, where the layout puts it.

Each rank of the pipeline is built on the meta device, in one process. Chunk c of pipeline rank r is stage c * PP + r.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

from maniple.config.layout import parse_layout
from maniple.models import load_card

pytestmark = pytest.mark.timeout(400)  # the first test waits for the process that does the work


def some_layouts(count: int) -> dict[str, dict[str, Any]]:
    """Layouts whose borders fall anywhere, on two or four pipeline ranks; with and without an MTP layer."""
    found, draw = {}, random.Random(3)
    while len(found) < count:
        pipeline, layers = draw.choice([2, 4]), draw.randint(2, 9)
        mtp = draw.randint(0, 1)
        flat = "E" + "t" * layers + "m" * mtp + "L"
        stages = pipeline * draw.choice([1, 2])
        if stages > len(flat):
            continue
        borders = sorted(draw.sample(range(1, len(flat)), stages - 1))
        parts = [flat[a:b] for a, b in zip([0, *borders], [*borders, len(flat)], strict=True)]
        holder = next((number for number, part in enumerate(parts) if "m" in part), -1)
        if mtp and (holder % pipeline == 0 or holder < stages - pipeline):
            continue  # refused: tests/config/test_layout.py
        text = "|".join(parts)
        found[text] = {"pp": pipeline, "text": text, "layers": layers, "mtp": mtp}
    return found


EVEN = {
    f"{layers} layers, PP {pipeline}, VPP {virtual}": {"pp": pipeline, "vpp": virtual, "layers": layers, "mtp": 0}
    for layers, pipeline, virtual in ((8, 4, None), (8, 2, 2), (12, 2, 3), (6, 1, None))
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "30 layers on four": {"pp": 4, "text": "Et*7|t*8|t*8|t*7,mL", "layers": 30, "mtp": 1},
    "tied": {"pp": 2, "text": "Ett|tmL", "layers": 3, "mtp": 1, "tied": True},
    "tied, no MTP": {"pp": 2, "text": "Ett|tL", "layers": 3, "mtp": 0, "tied": True},
    **EVEN,
    **some_layouts(8),
}


def build(rank: int, world_size: int) -> dict[str, list[dict[str, Any]]]:
    """By layout: what each stage holds, in order."""
    from tests.engines import jobs

    from maniple.config.check import check

    found = {}
    with jobs.no_process_group():
        for name, case in LAYOUTS.items():
            pipeline, dense = case["pp"], min(2, case["layers"] - 1)
            overrides = {
                "num_layers": case["layers"],
                "num_mtp_layers": case["mtp"],
                "moe": {"num_dense_layers": dense},
            }
            card = load_card("deepseek-v3").tiny()
            card = card.with_overrides(overrides | {"tied_embeddings": case.get("tied", False)})
            parallel = {"pipeline_parallel_size": pipeline, "pipeline_layout": case.get("text")}
            job = jobs.make_job(
                "unused",
                "job",
                parallel=parallel | {"virtual_pipeline_size": case.get("vpp")},
                train={"global_batch_size": 8},
            )
            check(job, card, pipeline)
            ranks = [_chunks(job, card, rank, pipeline) for rank in range(pipeline)]
            found[name] = [chunk for chunks in zip(*ranks, strict=True) for chunk in chunks]
    return found


def _chunks(job, card, rank: int, world_size: int) -> list[dict[str, Any]]:
    from maniple.engines.megatron import model
    from maniple.engines.megatron.dry_run import meta

    with meta.stand_in(job, rank, world_size):
        return [
            {
                "E": hasattr(chunk, "embedding"),
                "layers": [(layer.layer_number - 1, layer.is_moe_layer) for layer in chunk.decoder.layers],
                "m": len(chunk.mtp.layers) if chunk.mtp_process else 0,
                "L": hasattr(chunk, "output_layer"),
                "own head": hasattr(chunk, "output_layer") and chunk.output_layer.weight is not None,
                "saved": sorted(chunk.sharded_state_dict()),
            }
            for chunk in model.build_chunks(card, job)
        ]


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    return run_ranks(build, 1, timeout=300)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layer_once_in_order_and_of_its_kind(built, name):
    layers = LAYOUTS[name]["layers"]
    dense = min(2, layers - 1)
    seen = [layer for stage in built[name] for layer in stage["layers"]]
    assert seen == [(number, number >= dense) for number in range(layers)]
    assert sum(stage["m"] for stage in built[name]) == LAYOUTS[name]["mtp"]
    assert [stage["L"] for stage in built[name]] == [False] * (len(built[name]) - 1) + [True]


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_hold_what_the_layout_says(built, name):
    case = LAYOUTS[name]
    if "text" in case:
        counts = [(stage.count("t"), stage.count("m")) for stage in parse_layout(case["text"])]
    else:
        stages = case["pp"] * (case["vpp"] or 1)
        counts = [(case["layers"] // stages, 0)] * stages
    assert [(len(stage["layers"]), stage["m"]) for stage in built[name]] == counts
    # an embedding stands in the first stage and where MTP looks tokens up
    assert [stage["E"] for stage in built[name]] == [not at or m > 0 for at, (_, m) in enumerate(counts)]


def test_a_tied_head_is_one_weight_a_stage_and_can_be_saved(built):
    first, last = built["tied"]
    assert "embedding.word_embeddings.weight" in first["saved"]
    assert "embedding.word_embeddings.weight" in last["saved"]
    assert (last["L"], last["own head"]) == (True, False)
    assert built["tied, no MTP"][1]["own head"]
    assert built["30 layers on four"][3]["own head"]
