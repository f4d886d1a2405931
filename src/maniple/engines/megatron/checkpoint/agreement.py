"""What ranks find in a checkpoint's folder, told to all of them: none may go on where another has found a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from maniple.engines.megatron.checkpoint import files
from maniple.errors import UserError


def from_rank_0[T](find: Callable[[], T]) -> T:
    """What rank 0 finds, or the UserError it finds, on every rank: ranks must not read a folder at different moments
    and differ."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except UserError as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


def agree[T](work: Callable[[], T]) -> T:
    """Each rank's own result; if a rank finds a UserError, the first rank's is raised on all."""
    result, error = None, None
    try:
        result = work()
    except UserError as found:
        error = found
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for first in errors:
        if first is not None:
            raise first
    return result  # type: ignore[return-value]


def verify(folder: Path, manifest: dict[str, Any], *, digests: bool) -> None:
    """Raises UserError, on all ranks, unless the index is sound and, with `digests`, every file is as it was written:
    each rank reads a share. Collective."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    agree(lambda: files.check_index(folder, manifest))
    if digests:
        agree(lambda: files.check_digests(folder, manifest, share))
