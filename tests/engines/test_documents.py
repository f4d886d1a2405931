"""Documents that share a row are as if each had a row to itself; padding is as if it were not there.

Two micro-batches of documents go through the engine in several arrangements: each document in a row of its own, padded;
several in a row; the same rows with more padding behind. Every document's losses, every gradient and every statistic
of a step must agree. The balance loss by sequence alone depends on the arrangement, since its sequence is the row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.models import load_card

pytestmark = pytest.mark.timeout(480)  # the first test waits for the engine's process
TOLERANCE = 1e-5  # of the largest magnitude in the tensor
LENGTHS = (7, 1, 16, 24, 20, 3, 1)  # of the documents of each micro-batch; the tiny window is 16 tokens
PACKED = ((0, 1, 2), (3,), (4, 5, 6))  # rows: documents that share them, all 24 tokens long
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek-v3", {}),  # MLA, MTP, a dense layer, expert bias
    "two-mtp": ("deepseek-v3", {"num_layers": 2, "num_mtp_layers": 2}),
    "kimi-k2": ("kimi-k2", {}),  # YaRN in MLA
    "qwen3": ("qwen3-30b-a3b", {}),
    "glm": ("glm-4.5", {}),
    "gpt-oss": ("gpt-oss-20b", {}),  # sinks, windows, YaRN
}
AUX = {"qwen3": "none", "glm": "global_batch"}  # else of the micro-batch
ALL_MASKED = ("deepseek-v3", "gpt-oss-20b")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"granularity": "full"},
    "core_attn": {"granularity": "selective", "modules": ["core_attn", "moe"]},
}


def texts(vocabulary: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Documents with the label of each token; that of the last is a document's first token and does not count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in LENGTHS:
        ids = torch.randint(1, vocabulary, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) < 0.8).float()
        mask[-1] = 0
        found.append({"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask})
    return found


def arrange(documents: list[dict[str, torch.Tensor]], rows: tuple[tuple[int, ...], ...], length: int, filler: int):
    """A micro-batch of these rows, filled up with `filler` to `length` tokens."""
    batch = {
        "tokens": torch.full((len(rows), length), filler),
        "labels": torch.full((len(rows), length), filler),
        "loss_mask": torch.zeros(len(rows), length),
        "documents": torch.zeros(len(rows), length, dtype=torch.int32),
        "position_ids": torch.arange(length).repeat(len(rows), 1),
    }
    for row, members in enumerate(rows):
        first = 0
        for number, member in enumerate(members, 1):
            end = first + LENGTHS[member]
            for key, value in documents[member].items():
                batch[key][row, first:end] = value
            batch["documents"][row, first:end] = number
            first = end
    return batch


APART = tuple((member,) for member in range(len(LENGTHS)))
ARRANGEMENTS = {
    "apart": (APART, 24, 5),  # rows, their length, token in the padding
    "packed": (PACKED, 24, 5),
    "packed-and-padded": (PACKED, 32, 9),
    "with-an-empty-row": ((*APART, ()), 24, 9),
}


def compare(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """In a process of its own: a step of every model in every arrangement, and what else is compared with it."""
    report: dict[str, dict[str, Any]] = {}
    for name, (card_name, overrides) in MODELS.items():
        card = load_card(card_name).tiny().with_overrides(overrides)
        aux = AUX.get(name, "micro_batch")
        report[name] = {arrangement: _step(card, arrangement, aux) for arrangement in ARRANGEMENTS}
    card = load_card("deepseek-v3").tiny()
    for name, recompute in RECOMPUTE.items():
        report["deepseek-v3"][name] = _step(card, "packed", "micro_batch", recompute=recompute)
    report["sequence"] = {name: _step(card, name, "sequence") for name in ("packed", "packed-and-padded")}
    report["unmarked"] = {"packed": _step(card, "packed", "sequence", marked=False)}
    report["one"] = {name: _one_document(card, name == "marked") for name in ("marked", "unmarked")}
    report["masked"] = {name: _step(load_card(name).tiny(), "packed", "sequence", labels=False) for name in ALL_MASKED}
    return report


def _step(
    card,
    arrangement: str,
    aux: str,
    *,
    recompute: dict[str, Any] | None = None,
    marked: bool = True,
    labels: bool = True,
) -> dict[str, Any]:
    from tests.engines import helpers

    rows, length, filler = ARRANGEMENTS[arrangement]
    job = helpers.make_job(
        moe={"aux_loss_type": aux},
        recompute=recompute or {},
        data={"sequence_length": length},
        train={"micro_batch_size": len(rows), "global_batch_size": 2 * len(rows)},
    )
    engine = helpers.Engine(card, job)
    batches = [arrange(texts(card.vocab_size, seed), rows, length, filler) for seed in (0, 1)]
    places = [
        [batch["documents"][row] == n for row, m in enumerate(rows) for n in range(1, 1 + len(m))] for batch in batches
    ]
    order = [(row, member) for row, members in enumerate(rows) for member in members]
    for batch in batches:
        if not marked:
            del batch["documents"]
        if not labels:
            batch["loss_mask"].zero_()
    losses = {}
    for number, (batch, found) in enumerate(zip(batches, places, strict=True)):
        seen_BS = engine.look(batch)[1]
        for (row, member), place_S in zip(order, found, strict=True):
            losses[number, member] = seen_BS[row, place_S]
    return {"losses": losses, **_outcome(engine, batches)}


def _outcome(engine, batches) -> dict[str, Any]:
    return {"stats": engine.step(batches), "gradients": engine.gradients(), "weights": engine.weights()}


def _one_document(card, marked: bool) -> dict[str, Any]:
    """Rows of one document each, without padding: marked as such, and not."""
    from tests.engines import helpers

    engine = helpers.Engine(card, helpers.make_job())
    batches = helpers.make_batches(card.vocab_size, 2, 2)
    if marked:
        batches = [{**b, "documents": torch.ones_like(b["tokens"], dtype=torch.int32)} for b in batches]
    return {"losses": {n: engine.look(batch)[1] for n, batch in enumerate(batches)}, **_outcome(engine, batches)}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = wanted.abs().max()
    return float((got - wanted).abs().max() / (scale if scale > 0 else 1))


def assert_same(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    for key in ("losses", "gradients"):
        assert set(got[key]) == set(wanted[key])
        errors = {name: error(found, wanted[key][name]) for name, found in got[key].items()}
        assert not {name: e for name, e in errors.items() if not e <= tolerance}, key
    for name, found in got["weights"].items():
        if name.endswith("expert_bias"):
            assert torch.equal(found, wanted["weights"][name]), name
    assert got["stats"].tokens == wanted["stats"].tokens
    assert got["stats"].expert_counts == wanted["stats"].expert_counts
    for figure in ("loss", "mtp_loss", "aux_loss", "z_loss", "grad_norm"):
        value = getattr(wanted["stats"], figure)
        assert getattr(got["stats"], figure) == (value if value is None else pytest.approx(value, rel=tolerance)), (
            figure
        )


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, Any]]:
    return run_ranks(compare, 1, timeout=400)[0]


@pytest.mark.parametrize("arrangement", [name for name in ARRANGEMENTS if name != "apart"])
@pytest.mark.parametrize("model", MODELS)
def test_arrangement_changes_nothing(report, model, arrangement):
    assert_same(report[model][arrangement], report[model]["apart"])


def test_documents_and_padding_do_matter(report):
    """What is compared above would differ if documents saw each other."""
    apart, unmarked = report["deepseek-v3"]["apart"]["losses"], report["unmarked"]["packed"]["losses"]
    assert error(unmarked[0, 0], apart[0, 0]) <= TOLERANCE  # a row's first document has nothing before it
    assert all(error(unmarked[0, member], apart[0, member]) > 1e-2 for member in (1, 2, 5, 6))


@pytest.mark.parametrize("model", MODELS)
def test_only_whole_documents_count(report, model):
    """Each token of a document is counted in the decoder, and by MTP depth d all but its last d."""
    card = load_card(MODELS[model][0]).tiny().with_overrides(MODELS[model][1])
    for layer, loads in report[model]["packed"]["stats"].expert_counts.items():
        depth = max(0, layer + 1 - card.num_layers)
        assert sum(loads) == 2 * card.moe.topk * sum(max(0, length - depth) for length in LENGTHS)


def test_recomputation_keeps_documents(report):
    for name in RECOMPUTE:
        assert_same(report["deepseek-v3"][name], report["deepseek-v3"]["packed"])


def test_padding_changes_no_sequence_loss(report):
    assert_same(report["sequence"]["packed-and-padded"], report["sequence"]["packed"])


def test_a_row_that_is_one_document_is_as_before(report):
    """But for MTP's last positions, which have no token to look at and count only where nothing marks documents."""
    got, wanted = report["one"]["marked"], report["one"]["unmarked"]
    assert all(error(got["losses"][n], found) <= 1e-6 for n, found in wanted["losses"].items())
    assert got["stats"].loss == pytest.approx(wanted["stats"].loss, rel=1e-6)
    assert got["stats"].mtp_loss == pytest.approx(wanted["stats"].mtp_loss, rel=1e-6)
    layers = load_card("deepseek-v3").tiny().num_layers
    for layer, loads in wanted["stats"].expert_counts.items():
        missing = sum(loads) - sum(got["stats"].expert_counts[layer])
        assert missing == (0 if layer < layers else 4 * load_card("deepseek-v3").tiny().moe.topk)


@pytest.mark.parametrize("model", ALL_MASKED)
def test_no_label_at_all(report, model):
    outcome = report["masked"][model]
    assert outcome["stats"].loss == outcome["stats"].tokens == 0
    assert outcome["stats"].mtp_loss in (None, 0.0)
    assert all(bool(g.isfinite().all()) for g in outcome["gradients"].values())
    assert all(bool(w.isfinite().all()) for w in outcome["weights"].values())
    assert 0 < outcome["stats"].aux_loss < 10
    assert not outcome["gradients"]["output_layer.weight"].any()
