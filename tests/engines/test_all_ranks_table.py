"""The table of a dry run of all ranks: plain names, 100 columns, nothing left out of the sums."""

from rich.console import Console

from maniple.engines.megatron.dry_run.all_ranks import AllRanks, table_of
from maniple.engines.megatron.dry_run.one_rank import RankProgram
from maniple.engines.megatron.dry_run.program import Call, Group, Program
from maniple.models import load_card

KINDS = (
    *("world", "expert_model_parallel", "data_parallel_with_cp", "tensor_model_parallel", "expert_data_parallel"),
    *("tensor_and_data_parallel_with_cp", "expert_tensor_model_pipeline_parallel_with_egtp", "pipeline_model_parallel"),
)


def lines(calls_of_a_kind: int, elements: int) -> list[str]:
    """Of two stages that call the more in a group the later it comes in KINDS."""
    groups = [Group(number, kind, tuple(range(8))) for number, kind in enumerate(KINDS)]
    calls = [
        Call("all_reduce", group.number, sent=(elements * (group.number + 1),), dtype="float32")
        for group in groups
        for _ in range(calls_of_a_kind)
    ]
    programs = [
        RankProgram(Program(4 * stage, groups, [(call,) for call in calls]), 10**10, 48, 128) for stage in (0, 1)
    ]
    found = AllRanks(8, programs, programs, [], 1.0)
    console = Console(width=400)
    with console.capture() as text:
        console.print(table_of(load_card("deepseek-v3"), found))
    return [line.rstrip() for line in text.get().splitlines()]


def test_groups_have_plain_names_and_the_largest_come_first():
    table = lines(2, 2**20)
    assert table[0] == "deepseek-v3 on 8 ranks, 4 a pipeline stage"
    assert table[1] == "calls/MiB of a rank by group, 48 of 128 micro-batches a step"
    assert table[2].split() == ["stage", "parameters", "PP", "TP", "x", "DP", "x", "CP", "expert", "DP", "TP", "others"]
    # 8 and 6 times 4 MiB, twice; the others: world, EP, DP x CP and the seventh
    assert table[3].split() == ["0", "10,000,000,000", "2/64.0", "2/48.0", "2/40.0", "2/32.0", "8/104"]
    assert table[4].split()[0] == "1"


def test_large_numbers_fit_a_hundred_columns():
    assert max(map(len, lines(1000, 2**24))) <= 100
