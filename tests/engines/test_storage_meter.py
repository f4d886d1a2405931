"""The dry run's meter counts what operations make, once, for as long as it lives, and nothing that was there before."""

import torch

from maniple.engines.megatron.dry_run.memory import StorageMeter


def test_what_is_made_is_counted_once_and_until_it_ends():
    with StorageMeter() as meter:
        made = torch.empty(1024)
        view = made[:512].view(2, 256)
        assert meter.live == 4096
        other = torch.empty(1)  # the allocator's unit
        assert meter.live == 4096 + 512
        del made, other
        assert meter.live == 4096  # the view has it still
        del view
        assert (meter.live, meter.peak) == (0, 4608)


def test_views_of_what_was_there_before_are_not_counted():
    before = torch.nn.Parameter(torch.empty(4096))
    with StorageMeter() as meter:
        views = [before.view(64, 64), before.detach(), *before.split(1024)]
        before.detach().zero_()
        assert (meter.live, meter.peak) == (0, 0)
        made = views[0] + 1
        assert meter.live == made.numel() * 4
