"""The registry refuses what cannot run, says why and what there is instead, and remembers what ran."""

import pytest

from maniple.errors import UserError
from maniple.kernels import registry


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", {})
    monkeypatch.setattr(registry, "_USED", set())
    registry.candidates.cache_clear()
    registry.register("add", "reference", {"bf16"}, registry.ANY_DEVICE, "the oracle")
    registry.register("add", "fast", {"bf16", "fp8"}, {"cuda"}, "fast", preference=1)
    registry.register(
        "add", "broken", {"bf16"}, {"cuda"}, "broken", preference=2, reason_unavailable=lambda: "needs sm_100"
    )
    yield
    registry.candidates.cache_clear()


def test_the_best_that_can_run_is_taken():
    assert registry.select("add", "bf16", "cpu").name == "reference"
    assert registry.select("add", "bf16", "cuda", "auto").name == "fast"
    assert registry.select("add", "bf16", "cuda", "reference").name == "reference"


def test_what_defers_is_taken_where_nothing_else_serves_or_it_is_named():
    registry.register(
        "add",
        "fused",
        {"bf16", "fp8"},
        {"cuda"},
        "fused",
        preference=3,
        defers=lambda size: "is slow for few" if size < 8 else None,
    )
    assert registry.select("add", "bf16", "cuda", None, (8,)).name == "fused"
    assert registry.select("add", "bf16", "cuda", None, (7,)).name == "fast"
    assert registry.select("add", "bf16", "cuda", "fused", (7,)).name == "fused"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("multiply", "bf16", "cpu"), ["no op multiply", "add"]),
        (("add", "mxfp8", "cpu"), ["mxfp8", "cpu", "reference has no recipe mxfp8", "bf16, fp8"]),
        (("add", "fp8", "cpu"), ["fast does not run on cpu"]),
        (("add", "bf16", "cuda", "broken"), ["needs sm_100", "can run here: fast, reference"]),
        (("add", "bf16", "cpu", "fast"), ["fast does not run on cpu", "can run here: reference"]),
        (("add", "bf16", "cpu", "fats"), ["no implementation fats", "can run here: reference"]),
    ],
)
def test_a_refusal_names_the_reason_and_the_alternatives(arguments, words):
    with pytest.raises(UserError) as error:
        registry.select(*arguments)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_only_what_was_used_is_reported():
    registry.select("add", "bf16", "cuda")
    assert registry.used() == []
    assert registry.use("add", "bf16", "cpu") == "the oracle"
    assert registry.use("add", "bf16", "cpu") == "the oracle"
    assert registry.used() == [("add", "bf16", "cpu", "reference")]


def test_a_later_registration_is_seen_and_a_name_is_taken_once():
    assert registry.select("add", "bf16", "cpu").name == "reference"
    registry.register("add", "better", {"bf16"}, {"cpu"}, "better", preference=5)
    assert registry.select("add", "bf16", "cpu").name == "better"
    with pytest.raises(ValueError, match="better already"):
        registry.register("add", "better", {"bf16"}, {"cpu"}, "again")


def test_describe_lists_every_row_with_its_reason():
    rows = {row["name"]: row for row in registry.describe()}
    assert list(rows) == ["broken", "fast", "reference"]
    assert rows["broken"]["unavailable"] == "needs sm_100"
    assert rows["fast"]["recipes"] == ["bf16", "fp8"]
    assert rows["reference"]["unavailable"] is None
