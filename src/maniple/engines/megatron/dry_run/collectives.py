"""Records what a rank communicates, in a dry run (nothing is sent) and in a real one (everything is).

torch sends every collective, and every send and receive, through operators of the namespace `c10d`, where a dispatch
mode sees them, whoever calls. What it cannot see there is recorded where it is called: pickled objects (as one call),
the borders of a batch of sends, and what a pipeline stage's message is.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from torch.utils._python_dispatch import TorchDispatchMode

from maniple.engines.megatron.dry_run.program import Call, Event, Group, Program
from maniple.engines.megatron.dry_run.repeated import Repeated

# operator of c10d -> our name
_OPS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
}
_HERE = __file__


class Recorder(TorchDispatchMode):
    """Records this rank's communication while it is entered. Enter it before the groups are made.

    really: calls are made too. Otherwise nothing is sent, and what would have been received stays as it was.
    """

    def __init__(self, *, really: bool) -> None:
        super().__init__()
        self.really = really
        self.groups: list[Group] = []
        self.events: list[Event] = []
        self._numbers: dict[str, int] = {}  # torch's name of a group -> ours
        self._known: dict[tuple[Call, str], Call] = {}  # equal calls from one place are one object
        self._works: list[Any] = []  # a Work that only C++ holds loses its Python half
        self._repeated = Repeated()
        self._issued = 0
        self._muted = 0
        self._batch: list[Call] | None = None
        self._ways: dict[int, str] = {}  # a stage's messages in the making, by the id of the tensor
        self._patches = contextlib.ExitStack()

    def program(self) -> Program:
        return Program(dist.get_rank(), self.groups, self.events)

    def mark(self) -> tuple[int, int]:
        """Where the program is: its events until now, and how many of them are issues."""
        return len(self.events), self._issued

    def repeat(self, events: tuple[Event, ...], base: int) -> None:
        """Writes events down once more. base: issues before them, the first time, which their waits count from."""
        later = self._issued - base
        self.events += [event + later if isinstance(event, int) else event for event in events]
        self._issued += sum(not isinstance(event, int) for event in events)

    def __enter__(self) -> Recorder:
        world = dist.group.WORLD
        assert world is not None
        self.groups = [Group(0, "world", tuple(range(dist.get_world_size())))]
        self._numbers[world.group_name] = 0
        for module, name, wrap in (
            (dist, "new_group", self._new_group),
            (dist, "batch_isend_irecv", self._batch_isend_irecv),
            (dist, "all_gather_object", self._all_gather_object),
            (dist, "broadcast_object_list", self._broadcast_object_list),
            # p2p_communication.py knows whether a message goes to the next or to the previous stage; torch only knows
            # ranks, and of two stages each is the other's next and previous
            (p2p_communication, "_p2p_ops", self._stage_messages),
            (p2p_communication, "_batched_p2p_ops", self._stage_messages),
        ):
            self._patches.enter_context(replaced(module, name, wrap))
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "c10d" or self._muted:
            return func(*args, **kwargs) if self.really else self._repeated(func, args, kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        number = self._issue(self._call(func._schema.name.removeprefix("c10d::"), given))
        if self.really:
            return func(*args, **kwargs)
        work = _Work(self, number)
        self._works.append(work)
        return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())

    def _call(self, name: str, given: dict[str, Any]) -> Call:
        group = dist.ProcessGroup.unbox(given["process_group"])
        if name not in _OPS:
            raise RuntimeError(f"c10d::{name} is called and not in the table of collectives.py")
        op, number = _OPS[name], self._numbers[group.group_name]
        if op == "barrier":
            return self._make(op, number)
        if op in ("send", "recv"):
            (tensor,) = given["tensors"]
            sizes = (tensor.numel(),)
            return self._make(
                op,
                number,
                sent=sizes if op == "send" else (),
                received=sizes if op == "recv" else (),
                dtype=_dtype(tensor),
                peer=given["dst" if op == "send" else "src"],
                way=self._ways.get(id(tensor), ""),
            )
        if op == "all_to_all":
            if name == "alltoall_":
                sent = tuple(t.numel() for t in given["input_tensors"])
                received = tuple(t.numel() for t in given["output_tensors"])
                return self._make(op, number, sent=sent, received=received, dtype=_dtype(given["input_tensors"][0]))
            x, out = given["input"], given["output"]
            return self._make(
                op,
                number,
                sent=_split(x, given["input_split_sizes"], group.size()),
                received=_split(out, given["output_split_sizes"], group.size()),
                dtype=_dtype(x),
                row=math.prod(x.shape[1:]) if given["input_split_sizes"] or given["output_split_sizes"] else 0,
            )
        inputs, outputs = _tensors(given, "input", "tensors"), _tensors(given, "output")
        return self._make(
            op,
            number,
            sent=tuple(t.numel() for t in inputs),
            received=tuple(t.numel() for t in outputs),
            dtype=_dtype((inputs or outputs)[0]),
            peer=given.get("root_rank"),
        )

    def _make(self, op: str, group: int, **fields: Any) -> Call:
        call = Call(op, group, **fields, where=_caller())
        return self._known.setdefault((call, call.where), call)

    def _issue(self, call: Call) -> int:
        """Adds a call to the program; the number of its issue."""
        if self._batch is not None:
            self._batch.append(call)
            return self._issued
        self.events.append((call,))
        self._issued += 1
        return self._issued - 1

    @contextlib.contextmanager
    def _mute(self) -> Iterator[None]:
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def _new_group(self, original: Callable) -> Callable:
        def new_group(ranks=None, *args, group_desc=None, **kwargs):
            with self._mute():
                group = original(ranks, *args, group_desc=group_desc, **kwargs)
            number = len(self.groups)
            kind = (group_desc or "unnamed").removesuffix("_GROUP").lower().replace("_group_", "_")
            members = range(dist.get_world_size()) if ranks is None else ranks
            self.groups.append(Group(number, kind, tuple(members)))
            if isinstance(group, dist.ProcessGroup):
                self._numbers[group.group_name] = number
            return group

        return new_group

    def _batch_isend_irecv(self, original: Callable) -> Callable:
        # torch asks the group for the tensor's backend, and a group has none for tensors without values
        def batch_isend_irecv(p2p_op_list):
            self._batch = []
            try:
                works = []
                for p in p2p_op_list:
                    peer = {"group_dst" if p.op is dist.isend else "group_src": p.group_peer}
                    works.append(p.op(p.tensor, group=p.group, tag=p.tag, **peer))
            finally:
                batch, self._batch = self._batch, None
                if batch:
                    self.events.append(tuple(batch))
                    self._issued += 1
            return works

        return batch_isend_irecv

    def _all_gather_object(self, original: Callable) -> Callable:
        # pickled bytes, whose number depends on the rank: one call here. Without values every rank is taken to have
        # this one's object (optimizer/__init__.py gathers the names of parameter groups)
        def all_gather_object(object_list, obj, group=None):
            number = self._objects("all_gather_object", group)
            if self.really:
                with self._mute():
                    original(object_list, obj, group=group)
            else:
                object_list[:] = [obj] * len(object_list)
            self._wait(number)

        return all_gather_object

    def _broadcast_object_list(self, original: Callable) -> Callable:
        def broadcast_object_list(object_list, *args, group=None, **kwargs):
            number = self._objects("broadcast_object_list", group)
            if self.really:
                with self._mute():
                    original(object_list, *args, group=group, **kwargs)
            self._wait(number)

        return broadcast_object_list

    def _objects(self, op: str, group: dist.ProcessGroup | None) -> int:
        of = group or dist.group.WORLD
        assert of is not None
        return self._issue(self._make(op, self._numbers[of.group_name]))

    def _wait(self, number: int) -> None:
        if not self.really:
            self.events.append(number)

    def _stage_messages(self, original: Callable) -> Callable:
        def messages(**given):
            self._ways = {
                id(tensor): name.rsplit("_", 1)[1].replace("prev", "previous")
                for name, tensor in given.items()
                if name.startswith("tensor_") and tensor is not None
            }
            try:
                return original(**given)
            finally:
                self._ways = {}

        return messages


class _Work(dist._Work):
    """The handle of a call that is not made; waiting for it is an event of the program."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self.recorder, self.number = recorder, number

    def wait(self, timeout=None) -> bool:
        self.recorder._wait(self.number)
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def replaced(module, name: str, wrap: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, wrap(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _split(tensor: torch.Tensor, rows: list[int], ranks: int) -> tuple[int, ...]:
    """Elements to or from each rank; no rows: equal shares."""
    if not rows:
        return (tensor.numel() // ranks,) * ranks
    row = math.prod(tensor.shape[1:])
    return tuple(count * row for count in rows)


def _tensors(given: dict[str, Any], *stems: str) -> list[torch.Tensor]:
    """The tensors among an operator's arguments whose name begins so, lists and lists of lists flattened."""
    found: list[torch.Tensor] = []
    for name, value in given.items():
        if name.startswith(stems):
            values = [value] if isinstance(value, torch.Tensor) else value
            for item in values:
                found += [item] if isinstance(item, torch.Tensor) else item
    return found


def _caller() -> str:
    """`file:line function` of the innermost caller that does not merely pass the call on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name == _HERE or frame.f_code.co_name == "__torch_function__" or name == contextlib.__file__
        if not ours and "/torch/" not in name and not name.startswith("<"):
            short = "/".join(name.split("/")[-2:])
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
