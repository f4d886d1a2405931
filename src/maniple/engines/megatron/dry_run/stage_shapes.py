"""The shapes of pipeline messages where they are themselves sent, as values, which a dry run does not have.

Where the MTP layers are in an earlier pipeline stage than the loss, the border between the two carries the hidden
states of every depth, one behind another, and Megatron-Core's stages tell each other the shape before each message
(p2p_communication.py, `_communicate_shapes`). The exchange is still made; what would have been received is worked out
here from the layout: which chunk a stage's next message is for follows from the order of the schedule.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.enums import LayerType

from maniple.config.schema import TrainConfig


class _Stage:
    """The messages of one pipeline stage in one run of a schedule."""

    def __init__(self, communicator: P2PCommunicator, job: TrainConfig, chunks: list[int]) -> None:
        config = communicator.config
        self.stage, self.stages = communicator.current_stage, communicator.total_stages
        self.chunks = chunks  # of the forward passes, in order; empty: there is one chunk
        self.last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
        cut = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        self.usual = [job.data.sequence_length // cut, job.train.micro_batch_size, config.hidden_size]
        self.depths = config.mtp_num_layers
        # upstream has all MTP layers in the last chunk of their rank, which is not the first rank
        layout = config.pipeline_model_parallel_layout.layout
        self.mtp_stage = next(stage for stage, held in enumerate(layout) if LayerType.mtp in held[-1])
        self.forward = self.backward = 0  # messages received

    def from_previous(self) -> list[int]:
        chunk = self.chunks[self.forward] if self.chunks and self.stage else self.last_chunk
        self.forward += 1
        return self._shape(chunk == self.last_chunk and self.stage > self.mtp_stage)

    def from_next(self) -> list[int]:
        last = self.stage == self.stages - 1  # it gets gradients from the first stage's next chunk
        # chunks go backward in the reverse of their order
        chunk = self.last_chunk - (self.chunks[self.backward] if self.chunks and not last else 0)
        self.backward += 1
        return self._shape(not last and chunk == self.last_chunk and self.stage >= self.mtp_stage)

    def _shape(self, has_depths: bool) -> list[int]:
        length, *rest = self.usual
        return [length * (1 + self.depths if has_depths else 1), *rest]


@contextlib.contextmanager
def known(job: TrainConfig) -> Iterator[None]:
    """Inside, stages that ask their neighbours for the shape of a message are answered from the layout."""
    ask, table_of = P2PCommunicator._communicate_shapes, schedules.get_schedule_table
    chunks: list[int] = []  # of the interleaved schedule that runs
    stages: weakref.WeakKeyDictionary[P2PCommunicator, _Stage] = weakref.WeakKeyDictionary()

    def table_noted(*sizes: int):
        table = table_of(*sizes)
        chunks[:] = [chunk for _, chunk in table]
        return table

    def answered(self: P2PCommunicator, send_next, send_prev, recv_prev: bool, recv_next: bool):
        ask(self, send_next, send_prev, recv_prev, recv_next)
        stage = stages.get(self)
        if stage is None:  # a schedule makes a communicator for each of its runs
            stage = stages[self] = _Stage(self, job, list(chunks))
        nothing = [0, 0, 0]
        return stage.from_previous() if recv_prev else nothing, stage.from_next() if recv_next else nothing

    P2PCommunicator._communicate_shapes = answered
    schedules.get_schedule_table = table_noted
    try:
        yield
    finally:
        P2PCommunicator._communicate_shapes = ask
        schedules.get_schedule_table = table_of
