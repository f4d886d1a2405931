"""Pipeline layouts: what they mean, what they refuse, and that no layer is lost or built twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.config.check import check
from maniple.config.layout import checked_layout, parse_layout
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.models import load_card


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ["EttL"]),
        ("Et|t|tL", ["Et", "t", "tL"]),
        ("E,t*3|t,L", ["Ettt", "tL"]),
        ("Et|(tt|)*2tmL", ["Et", "tt", "tt", "tmL"]),
        ("E(t|t)*2L", ["Et", "tt", "tL"]),
        ("E(|t)*2|L", ["E", "t", "t", "L"]),
        ("E(t*2|)*2mL", ["Ett", "tt", "mL"]),
        ("E|*1t|L", ["E", "t", "L"]),
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
    ],
)
def test_unrolling(text, stages):
    assert parse_layout(text) == stages


def test_megatron_core_reads_it_alike():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    names = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    for text in ("EttL", "Et*3|(tt|)*29,m|L", "E,t*2|(t,t|t|)*3tL", "Et|(tt|)*12tmL", "E(t*2|)*3t*1|*1L"):
        theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
        assert parse_layout(text) == ["".join(names[kind.name] for kind in stage) for stage in theirs], text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "stage 1 of 1 is empty"),
        ("Et||tL", "stage 2 of 3 is empty"),
        ("Et|tL|", "stage 3 of 3 is empty"),
        ("Et|xL", "'x' is no layer"),
        ("E t|L", "' ' is no layer"),
        ("E(t|L", "a '(' is never closed"),
        ("Et)|L", "')' is no layer"),
        ("E(t(t)*2|)*2L", "brackets do not nest"),
        ("E(t|)L", "a bracket needs a count"),
        ("Et*|L", "'*' needs a count of 1 to 9999"),
        ("Et*0|L", "'*' needs a count of 1 to 9999"),
        ("Et*99999|L", "'*' needs a count of 1 to 9999"),
        ("*3", "'*' is no layer"),
        ("E" + "t*9999" * 3 + "L", "unrolls to more than"),
        ("E(" + "t" * 9999 + "|)*9999L", "unrolls to more than"),
    ],
)
def test_refused_by_itself(text, says):
    with pytest.raises(UserError) as caught:
        parse_layout(text)
    assert says in str(caught.value)
    assert str(caught.value).startswith("parallel.pipeline_layout ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tt|ttmL", "it needs exactly one E, first"),
        ("tE|tttmL", "it needs exactly one E, first"),
        ("Ett|EttmL", "it needs exactly one E, first"),
        ("Ett|ttm", "it needs exactly one L, last"),
        ("EttL|ttmL", "it needs exactly one L, last"),
        ("Ett|tmL", "it holds 3 layers (t) and the model has 4"),
        ("Ett|ttL", "it holds 0 MTP layers (m) and the model has 1"),
        ("Ett|ttmmL", "it holds 2 MTP layers (m) and the model has 1"),
        ("Et|t|ttmL", "its 3 stages do not divide over pipeline_parallel_size 2"),
        ("Ett|tmtL", "the MTP layers (m) come after every t"),
        ("Ett|ttm|L|L", "it needs exactly one L, last"),
    ],
)
def test_refused_for_the_model(text, says):
    with pytest.raises(UserError, match="pipeline_layout") as caught:
        checked_layout(text, num_layers=4, num_mtp_layers=1, pipeline_size=2)
    assert says in str(caught.value)


def test_mtp_layers_stay_together_in_a_last_chunk():
    checked_layout("Ett|tt|m|L", num_layers=4, num_mtp_layers=1, pipeline_size=4)
    checked_layout("E|tttt|mm|L", num_layers=4, num_mtp_layers=2, pipeline_size=4)
    checked_layout("EttttmL", num_layers=4, num_mtp_layers=1, pipeline_size=1)
    with pytest.raises(UserError, match="on the first pipeline rank, in another stage than E"):
        checked_layout("Ett|tt|m|L", num_layers=4, num_mtp_layers=1, pipeline_size=2)
    with pytest.raises(UserError, match="in one stage"):
        checked_layout("Ett|tt|m|mL", num_layers=4, num_mtp_layers=2, pipeline_size=2)
    with pytest.raises(UserError, match="one of the last 1 stages"):
        checked_layout("Etttt|m|L", num_layers=4, num_mtp_layers=1, pipeline_size=1)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(0, 2),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_layer_is_built_exactly_once(counts, num_mtp, repeats, per_stage, commas):
    """A layout written from given stages holds just these, and loses nothing when a run of stages is abbreviated."""
    middle = ["t" * max(1, count) for count in counts] + ["t" * per_stage] * repeats
    written = [*(stage for stage in middle[: len(counts)]), f"(t*{per_stage}|)*{repeats}"]
    head, tail = "E", "m" * num_mtp + "L"
    text = head + "|" + "|".join(written) + tail
    text = text.replace("|", ",|,") if commas else text
    expected = [head, *middle, tail]
    stages = checked_layout(text, num_layers=sum(map(len, middle)), num_mtp_layers=num_mtp, pipeline_size=len(expected))
    assert stages == expected
    with pytest.raises(UserError):
        checked_layout(text, num_layers=sum(map(len, middle)) + 1, num_mtp_layers=num_mtp, pipeline_size=1)


@given(
    num_layers=st.integers(1, 40),
    num_mtp=st.integers(0, 2),
    pipeline=st.integers(1, 8),
    virtual=st.integers(1, 4),
    data=st.data(),
)
def test_each_layer_once_and_in_order_or_refused(num_layers, num_mtp, pipeline, virtual, data):
    """Borders anywhere; then perhaps one symbol is put in, taken out or changed, or the model is another."""
    flat = "E" + "t" * num_layers + "m" * num_mtp + "L"
    number = min(pipeline * virtual, len(flat)) - 1
    inside = st.integers(1, len(flat) - 1)
    borders = data.draw(st.lists(inside, unique=True, min_size=number, max_size=number))
    symbols = list(flat)
    for border in sorted(borders, reverse=True):
        symbols.insert(border, "|")
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(symbols) - 1))
        symbols[at : at + data.draw(st.integers(0, 1))] = data.draw(st.sampled_from(["", "E", "t", "m", "L", "|"]))
    try:
        stages = checked_layout("".join(symbols), num_layers=num_layers, num_mtp_layers=num_mtp, pipeline_size=pipeline)
    except UserError as refusal:
        said, stages = str(refusal), None
    if stages is None:
        assert "\n" not in said
        return
    assert "".join(stages) == flat
    assert all(stages)
    assert len(stages) % pipeline == 0
    assert sum("m" in stage for stage in stages) <= 1


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4))
def test_an_even_cut_leaves_no_layer_over(num_layers, pipeline, virtual):
    """Without a layout (30 layers on 4 stages would build 28)."""
    card = load_card("mixtral-8x7b").tiny().with_overrides({"num_layers": num_layers})
    sizes = {"pipeline_parallel_size": pipeline, "virtual_pipeline_size": virtual if virtual > 1 else None}
    job = TrainConfig.model_validate({"parallel": sizes, "train": {"global_batch_size": 8 * pipeline}})
    divides = num_layers % (pipeline * virtual) == 0
    if divides and (pipeline > 1 or virtual == 1):
        check(job, card, pipeline)
        return
    with pytest.raises(UserError) as refusal:
        check(job, card, pipeline)
    assert "\n" not in str(refusal.value)


@given(st.text(alphabet="EtmL|()*,0123456789 x", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        stages = parse_layout(text)
    except UserError:
        return
    assert all(stages)
    assert set("".join(stages)) <= set("EtmL")
    assert parse_layout("|".join(stages)) == stages
