"""Where a job's nodes meet, and which of them have not come when the time for it is over."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_LOOK_SECONDS = 0.2
_NAMED = 16  # missing nodes at most, by number


class NumberedMeeting(StaticTCPRendezvous):
    """torchrun's meeting of numbered nodes at the address of node 0; each says that it has come.

    Upstream's store waits for as many connections as there are nodes, and knows at its timeout only how many came.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        place = f"{self.master_addr}:{self.master_port}"
        try:
            store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                self.rank == 0,
                self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except DistError as error:
            raise RendezvousConnectionError(
                f"node 0 has not answered at {place} for {self.timeout.total_seconds():.0f} s"
            ) from error
        self._wait_for_all(store, place)
        meeting = PrefixStore(self.run_id, store)
        return RendezvousInfo(
            meeting, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )

    def _wait_for_all(self, store: TCPStore, place: str) -> None:
        keys = [f"maniple/node/{self.run_id}/{node}" for node in range(self.world_size)]
        store.set(keys[self.rank], socket.gethostname())
        try:
            store.wait(keys, self.timeout)
            return
        except DistError:  # the time is over, or node 0 is gone
            try:
                missing = [node for node, key in enumerate(keys) if not store.check([key])]
            except DistError as error:
                raise RendezvousConnectionError(f"node 0 has gone from {place} before all nodes had come") from error
        if missing:
            raise RendezvousTimeoutError(
                f"{_nodes(missing)} of {self.world_size} did not come to {place} in "
                f"{self.timeout.total_seconds():.0f} s"
            )


class Arrivals:
    """The nodes that have come to a rendezvous which hands out the numbers, by address."""

    def __init__(self) -> None:
        self._seen: dict[Any, str] = {}

    def __str__(self) -> str:
        return f"{len(self._seen)} came: {', '.join(sorted(self._seen.values()))}" if self._seen else ""

    @contextmanager
    def noticed(self, handler: Any) -> Iterator[None]:
        """Looks inside who is there: at its timeout a node takes itself off the list before it says so."""
        # torch has no public way to ask: dynamic_rendezvous.py keeps the participants in the handler's state
        holder, ended = getattr(handler, "_state_holder", None), threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_SECONDS):
                state = getattr(holder, "state", None)
                self._seen |= {node: node.addr for node in list(getattr(state, "participants", ()))}

        self._seen.clear()
        thread = threading.Thread(target=look, name="maniple-arrivals", daemon=True)
        if holder is not None:
            thread.start()
        try:
            yield
        finally:
            ended.set()


def _nodes(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_NAMED]))}{more}"
