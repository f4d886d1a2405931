"""Programs written by hand: what fits is passed, and every way not to fit is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maniple.engines.megatron.dry_run.matching import World, alike, compare, same_groups, simulate
from maniple.engines.megatron.dry_run.program import Call, Group, Program, ranges

GROUPS = [
    Group(0, "world", (0, 1, 2, 3)),
    Group(1, "data", (0, 1)),
    Group(2, "data", (2, 3)),
    Group(3, "pipe", (0, 2)),
    Group(4, "pipe", (1, 3)),
    Group(5, "other", (0, 1, 2, 3)),
]
SUM = Call("all_reduce", 0, sent=(4,), dtype="float32", where="here.py:1 f")


def program(rank: int, *events) -> Program:
    """`events`: a call is issued and waited for, a tuple of calls is a batch, `[call]` is issued only, an int waits."""
    out: list = []
    issued = 0
    for event in events:
        if isinstance(event, int):
            out.append(event)
            continue
        calls = tuple(event) if isinstance(event, tuple | list) else (event,)
        out.append(calls)
        if not isinstance(event, list):
            out.append(issued)
        issued += 1
    return Program(rank, GROUPS, out)


def send(peer: int, size: int = 8, group: int = 3, **fields) -> Call:
    return Call("send", group, sent=(size,), dtype="bfloat16", peer=peer, where="p2p.py:1 s", **fields)


def receive(peer: int, size: int = 8, group: int = 3, **fields) -> Call:
    return Call("recv", group, received=(size,), dtype="bfloat16", peer=peer, where="p2p.py:2 r", **fields)


def own(*programs: Program) -> World:
    """A world of four where ranks without a program have nothing to do."""
    have = {p.rank: p for p in programs}
    every = [have.get(rank, program(rank)) for rank in range(4)]
    return World(every, lambda rank: rank)


def faults(world: World) -> list[str]:
    return [str(fault) for fault in compare(world) + simulate(world)]


def test_what_fits_is_passed():
    body = SUM, replace(SUM, group=1), Call("barrier", 0)
    first = program(0, *body, send(1), receive(1))
    last = program(2, SUM, replace(SUM, group=2), Call("barrier", 0), receive(0), send(0))
    assert faults(World([first, last], lambda rank: rank // 2)) == []


def test_programs_stand_for_ranks_in_the_same_place():
    world = World([program(1, send(1, group=4)), program(2, receive(0))], lambda rank: rank // 2)
    assert [world.numbers[rank][call.group] for rank, call in ((0, send(1, group=4)), (3, receive(0)))] == [3, 4]
    assert faults(world) == []
    lonely = Program(0, [*GROUPS[:1], Group(1, "data", (0, 1))], [(replace(SUM, group=1),), 0])
    with pytest.raises(ValueError, match="rank 0 cannot stand for rank 2: data differs"):
        World([lonely], lambda rank: 0)


def test_messages_on_the_world_go_to_the_partner_of_each_rank():
    # of two stages one direction is sent on the world's group, where a peer is a rank of the job
    first, last = program(0, send(2, group=0)), program(2, receive(0, group=0))
    world = World([first, last], lambda rank: rank // 2)
    assert [world.other(rank, send(2, group=0)) for rank in (0, 1)] == [2, 3]
    assert faults(world) == []


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(SUM, op="all_gather"), "different operations"),
        (replace(SUM, sent=(5,)), "different sizes"),
        (replace(SUM, dtype="int64"), "different types"),
        (replace(SUM, sent=(2, 2)), "different sizes"),
    ],
)
def test_a_collective_of_another_kind_size_or_type(other, why):
    (found,) = faults(own(*(program(rank, other if rank == 2 else SUM) for rank in range(4))))
    assert found.startswith(f"call 0 on world: {why}")
    assert "ranks 0-1, 3: all_reduce, 4 float32 (here.py:1 f)" in found
    assert "rank 2: " in found


def test_roots_and_shares_of_collectives():
    root = Call("broadcast", 0, sent=(4,), dtype="float32", peer=0)
    (found,) = compare(own(*(program(rank, replace(root, peer=rank // 2)) for rank in range(4))))
    assert "different roots" in str(found)
    gather = Call("all_gather", 0, sent=(4,), received=(12,), dtype="float32")
    (found,) = compare(own(*(program(rank, gather) for rank in range(4))))
    assert "4 elements of 4 ranks are not 12" in str(found)


def test_a_collective_left_out():
    compared, simulated = faults(
        own(*(program(rank, *([SUM] * (rank != 3)), Call("barrier", 0)) for rank in range(4)))
    )[:2]
    assert "rank 3: barrier" in compared
    assert "ranks 0-2: all_reduce" in compared
    # all have something to say on the group until rank 3 has no more
    assert "3 of 4 ranks wait for ever" in simulated
    assert "ranks 0-2 in barrier on world" in simulated
    assert "waiting for rank 3" in simulated


def test_all_to_all_splits():
    def exchange(sent, received, **fields):
        return Call("all_to_all", 1, sent=sent, received=received, dtype="int64", **fields)

    good = program(0, exchange((1, 2), (1, 3))), program(1, exchange((3, 4), (2, 4)))
    assert faults(own(*good)) == []
    bad = program(0, exchange((1, 2), (1, 3))), program(1, exchange((3, 4), (5, 4)))
    (found,) = faults(own(*bad))
    assert "member 0 sends 2 elements to 1, which expects 5" in found
    rows = [program(rank, exchange((64, 64), (64, 64), row=8 << rank)) for rank in range(2)]
    assert "rows of different lengths" in faults(own(*rows))[0]


def test_two_groups_in_another_order():
    other = replace(SUM, group=5)
    swapped = [program(rank, *((SUM, other) if rank < 2 else (other, SUM))) for rank in range(4)]
    assert compare(own(*swapped)) == []  # on each group all is in order
    (found,) = simulate(own(*swapped))
    assert "the step cannot end: 4 of 4 ranks wait for ever" in str(found)
    assert "ranks 0-1 in all_reduce, 4 float32 on world (here.py:1 f)\n    waiting for ranks 2-3" in str(found)
    assert "ranks 2-3 in all_reduce, 4 float32 on other (here.py:1 f)\n    waiting for ranks 0-1" in str(found)
    # without waiting between the two neither holds up the other
    free = [program(rank, *(([SUM], [other]) if rank < 2 else ([other], [SUM])), 0, 1) for rank in range(4)]
    assert faults(own(*free)) == []


def test_messages_of_another_size_or_type_or_without_an_end():
    assert "8 elements are sent and 9 expected" in faults(own(program(0, send(1)), program(2, receive(0, 9))))[0]
    other = replace(receive(0), dtype="float32")
    assert "bfloat16 is sent and float32 expected" in faults(own(program(0, send(1)), program(2, other)))[0]
    compared, simulated = faults(own(program(0, send(1))))
    assert "message 0 from rank 0 to rank 2 on pipe: a send without a receive" in compared
    assert "rank 0 in send to rank 1 of the group" in simulated
    assert "waiting for rank 2" in simulated
    assert "a receive without a send" in faults(own(program(2, receive(0))))[0]
    assert len(faults(own(program(0, [send(1)])))) == 2  # nobody waits for it, and it never ends


def test_sends_wait_for_each_other_but_not_in_a_batch():
    one_by_one = program(0, send(1), receive(1)), program(2, send(0), receive(0))
    assert compare(own(*one_by_one)) == []
    assert "2 of 4 ranks wait for ever" in str(simulate(own(*one_by_one))[0])
    # not waiting does not help: they run one after another on the group
    queued = program(0, [send(1)], [receive(1)], 0, 1), program(2, [send(0)], [receive(0)], 0, 1)
    assert "2 of 4 ranks wait for ever" in str(simulate(own(*queued))[0])
    batched = program(0, (send(1), receive(1))), program(2, (send(0), receive(0)))
    assert faults(own(*batched)) == []


def test_a_batch_that_mixes_up_the_neighbours():
    # each of two stages is the other's next and previous; the messages meet in the order in which they are issued
    def batch(rank: int) -> Program:
        peer = 1 if rank == 0 else 0
        before = send(peer, way="previous"), receive(peer, way="previous")
        return program(rank, (*before, send(peer, way="next"), receive(peer, way="next")))

    found = faults(own(batch(0), batch(2)))
    assert "sent to the previous stage and taken for a message of the previous one" in found[0]


def test_ranks_that_are_taken_to_be_alike():
    body = SUM, replace(SUM, group=1), send(1)
    assert alike(program(0, *body), program(1, SUM, replace(SUM, group=1), send(1, group=4))) == []
    for other in ((replace(SUM, sent=(5,)),), (), (SUM, SUM), ([SUM],), (replace(SUM, group=5),)):
        (found,) = alike(program(0, SUM), program(1, *other))
        assert "ranks 0 and 1 are taken to be alike and are not" in str(found)


def test_groups_are_made_alike():
    one, two = program(0), replace(program(1), groups=[*GROUPS[:5], replace(GROUPS[5], kind="another")])
    assert same_groups([one, program(1)]) == []
    assert "group 5 is other of 0-3 on rank 0 and another of 0-3 on rank 1" in str(same_groups([one, two])[0])
    assert "6 on rank 0, 5 on rank 1" in str(same_groups([one, replace(two, groups=GROUPS[:5])])[0])


def test_the_same_fault_in_many_groups_is_one():
    sizes = [program(rank, replace(SUM, group=1 + rank // 2, sent=(4 + rank % 2,))) for rank in range(4)]
    (found,) = compare(own(*sizes))
    assert str(found).startswith("call 0 on data of ranks 0-1: different sizes")
    assert str(found).endswith("(and 1 more groups like it)")


def test_traffic_and_ranges():
    taken = program(0, SUM, SUM, send(1), receive(1)).traffic()
    assert taken == {"pipe": {"calls": 2, "bytes": 16}, "world": {"calls": 2, "bytes": 32}}
    assert ranges([3, 0, 1, 7]) == "0-1, 3, 7"
    assert ranges(list(range(0, 20, 2))) == "0, 2, 4, 6, 8, ... (5 more)"
