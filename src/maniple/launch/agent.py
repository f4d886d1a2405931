"""torchrun's agent with the ends of a job that people ask for: quick, with the first failure's own reason.

`torch.distributed.elastic` starts the processes, meets other nodes and restarts. What is changed here, by subclassing:

- A process that fails ends the others at once with SIGKILL. Upstream sends SIGTERM and waits 30 s, which a process that
  hangs in a collective uses up, and the others fill the screen with broken connections meanwhile.
- What failed first is found by its own word and time, not by the second at which it was noticed.
- A failure that a restart cannot mend (a user's mistake) is not repeated.
- A node that comes to a running job waits until the job fits as many nodes as there are then.
- SIGTERM, SIGINT and SIGUSR1 give the processes the job's own time to save; a second signal, some seconds later, ends
  them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from maniple.launch.meeting import Arrivals, NumberedMeeting
from maniple.launch.worker import RESTARTED
from maniple.metrics import pulse

_MISTAKE = "UserError"
_WHOLE_LINES = (_MISTAKE, "Hang")  # kinds whose message is the whole story
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_KILL_SECONDS = 5.0  # a killed process is gone in milliseconds, unless the kernel holds it
_OTHER_NODE_SECONDS = 1.5  # for the other nodes' agents to say what they saw
_CAUSE = "maniple/cause"


def make_spec(config: LaunchConfig, program: Any, words: list[str], *, meet_seconds: float) -> WorkerSpec:
    """What torchrun's options ask for, as its own `launch_agent` makes it. meet_seconds: how long numbered nodes wait
    for one another."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    static = config.rdzv_backend == "static"
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1) if static else (None, None)
    handler = (
        NumberedMeeting(
            host, port, config.rdzv_configs["rank"], config.max_nodes, config.run_id, math.ceil(meet_seconds)
        )
        if static
        else get_rendezvous_handler(parameters)
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"{config.signals_to_handle},SIGUSR1"
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(words),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: `line` says it in one line, `traceback` is the worker's own where it left one."""

    rank: int
    exit_code: int  # as a shell has it: 128 + n for signal n
    line: str
    kind: str = ""  # the exception's class
    message: str = ""
    traceback: str = ""
    moment: float = 0.0  # seconds since 1970; 0 for a signal

    @property
    def is_mistake(self) -> bool:
        return self.exit_code == 2 and self.kind == _MISTAKE


class Agent(LocalElasticAgent):
    """One node's agent. `failure` is the first failure that has been seen; `exit_codes` those of the last processes.

    stop_grace_seconds: how long processes may take to save and end after a signal. fits: see `torchrun.Launch`.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, *, stop_grace_seconds: float, fits: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(spec=spec, logs_specs=logs_specs, start_method="spawn")
        self.failure: Failure | None = None
        self.arrivals = Arrivals()  # of a meeting that did not complete
        self._pulses, self._grace = Path(os.environ[pulse.DIRECTORY]), stop_grace_seconds
        self._starts, self._fits = 0, fits
        # upstream's `_invoke_run` starts all processes anew as soon as a node waits
        waiting = spec.rdzv_handler.num_nodes_waiting
        spec.rdzv_handler.num_nodes_waiting = lambda: self._welcome(waiting())

    def run_to_end(self) -> RunResult | None:
        """Runs the job; None if the rendezvous had ended in good order before it was joined.

        Raises SignalException for SIGTERM, SIGINT and SIGUSR1, when the processes have ended. The rendezvous is closed
        at the end, so that nodes which wait there end too, but for a signal: other nodes may go on without this one.
        """
        handler = self._worker_group.spec.rdzv_handler
        try:
            result = self.run()
        except SignalException:
            # A thread that is in the store's C++ when Python ends would abort this process (std::terminate, -6).
            if hasattr(handler, "_stop_heartbeats"):  # dynamic_rendezvous.py stops them in `shutdown` only
                handler._stop_heartbeats()
            raise
        except BaseException:
            handler.shutdown()
            raise
        handler.shutdown()
        return result

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.returncode for process in self._processes().values()]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # The store where ranks meet is to be a new one each time, as torch's rendezvous.py (`_create_c10d_store`)
        # takes for granted. dynamic_rendezvous.py (`next_rendezvous`) keeps the first one, with the addresses of
        # processes that are gone, at a node that may be gone.
        handler = worker_group.spec.rdzv_handler
        for kept in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if hasattr(handler, kept):
                setattr(handler, kept, None)
        with self.arrivals.noticed(handler):
            super()._rendezvous(worker_group)

    def _welcome(self, waiting: int) -> int:
        """How many of the waiting nodes are to be taken in now: all, or none while the job would not fit with them."""
        return waiting if not self._fits or self._worker_group.group_world_size + waiting in self._fits else 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._starts += 1
        if self._starts > 1:
            os.environ[RESTARTED] = "1"  # inherited; a change of nodes does not count in torchrun's own number
            world = worker_group.workers[0].world_size
            _say(f"restarting {len(worker_group.workers)} of {world} processes")
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        first = self._first_failure(worker_group)
        if first is not None:
            self._kill()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and (first := first or self._first_failure(worker_group)):
            self.failure = self._root(worker_group, first)
            if self.failure.is_mistake:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                left = self._remaining_restarts
                _say(f"{self.failure.line} · {left} restart{'s' if left > 1 else ''} left")
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Upstream's, with this job's time for an orderly end; a second signal, or a job that has failed, ends it."""
        if self._pcontext is None:
            return
        by_signal = isinstance(sys.exception(), SignalException)
        with _one_signal_counted_once() if by_signal else nullcontext():
            if self._worker_group.group_world_size > 1 and self._told() is not None:
                self._kill()  # they would wait for ranks that are gone
            try:
                self._pcontext.close(death_sig, timeout=self._grace)
            except SignalException:
                self._kill()
                raise

    def _processes(self) -> dict[int, subprocess.Popen]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _kill(self) -> None:
        """Ends every process of this node, with what it started, now."""
        for process in self._processes().values():
            with suppress(ProcessLookupError, PermissionError):  # its group is gone
                os.killpg(process.pid, signal.SIGKILL)
        end = time.monotonic() + _KILL_SECONDS
        for process in self._processes().values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def _first_failure(self, worker_group: WorkerGroup) -> Failure | None:
        """Of the processes that have failed until now the one that failed first; None while all is well."""
        found = [
            self._failure_of(worker_group.workers[local_rank].global_rank, local_rank, process)
            for local_rank, process in self._processes().items()
        ]
        failed = [failure for failure in found if failure is not None]
        if not any(process.poll() for process in self._processes().values()):
            return None  # a process that has said why it fails may still be on its way out
        return min(failed, key=lambda failure: (failure.moment, failure.rank))

    def _failure_of(self, rank: int, local_rank: int, process: subprocess.Popen) -> Failure | None:
        code, place = process.poll(), pulse.read(self._pulses, rank, process.pid)
        where = f" in {place}" if place is not None else ""
        if code is not None and code < 0:
            # It left no word. Those that lost their connection to it failed later.
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
            return Failure(rank, 128 - code, f"rank {rank} was ended by signal {-code} ({name}){where}", moment=0.0)
        word = self._word(local_rank)
        if not code and not word:
            return None
        kind, _, message = str(word.get("message", "")).partition(": ")
        details = word.get("extraInfo", {})
        if code is None:
            code = int(details.get("exit_code", 1))  # it is about to end
        if not kind:
            line = f"rank {rank} ended with exit code {code}{where}"
        elif kind in _WHOLE_LINES:
            line = message
        else:
            line = f"rank {rank} failed{where}: {kind}: {message}"
        moment = float(details.get("moment", time.time()))
        traceback = "" if kind in _WHOLE_LINES else details.get("py_callstack", "")
        return Failure(rank, code, " ".join(line.split()), kind, message, traceback, moment)

    def _word(self, local_rank: int) -> dict[str, Any]:
        """What a process left as the reason of its end (see `worker.record`); empty if nothing."""
        assert self._pcontext is not None
        with suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads(Path(self._pcontext.error_files[local_rank]).read_text(encoding="utf-8"))["message"]
        return {}

    def _root(self, worker_group: WorkerGroup, own: Failure) -> Failure:
        """What made the job fail: this node's failure, or another node's that came before it."""
        if worker_group.group_world_size < 2:
            return own
        if own.kind and own.kind not in _WHOLE_LINES:  # perhaps a connection to a rank of another node that broke
            end = time.monotonic() + _OTHER_NODE_SECONDS
            while self._told() is None and time.monotonic() < end:
                time.sleep(0.1)
        told = self._told(json.dumps({"line": own.line, "node": worker_group.group_rank}))
        cause = json.loads(told) if told else {"node": worker_group.group_rank}
        if cause["node"] == worker_group.group_rank:
            return own
        return replace(own, line=f"node {cause['node']}: {cause['line']} · then here: {own.line}", traceback="")

    def _told(self, own: str | None = None) -> str | None:
        """The first failure that a node has told of in this meeting; `own` is told if there is none."""
        store = self._worker_group.store
        try:
            if own is not None:
                return store.compare_set(_CAUSE, "", own).decode()
            return store.get(_CAUSE).decode() if store.check([_CAUSE]) else None
        except Exception:  # the store's host is gone: what happened there is told there
            return None


@contextmanager
def _one_signal_counted_once() -> Iterator[None]:
    """Inside, a signal that comes at once after the first is taken for the same one; a later one raises as before."""
    began, former = time.monotonic(), {number: signal.getsignal(number) for number in _SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        before = former[signal.Signals(number)]
        if time.monotonic() - began > pulse.SAME_SIGNAL_SECONDS and callable(before):
            before(number, frame)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def _say(line: str) -> None:
    print(f"maniple: {line}", file=sys.stderr, flush=True)


def describe(failure: Failure) -> None:
    """Prints why the job failed: the first failure's traceback, if it left one, and its one line last."""
    if failure.traceback:
        print(failure.traceback.rstrip(), file=sys.stderr)
    _say(failure.line)
