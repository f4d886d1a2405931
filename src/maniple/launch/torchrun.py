"""Starts the processes of this node with torchrun, and ends as they ended.

torchrun runs inside this process (`torch.distributed.run.run`) and not as a child, for three reasons: as a program it
exits with 1 whatever its workers exited with; its handlers of SIGTERM and SIGINT, which pass the signal on to the
workers, then serve without a relay; and workers inherit this process's terminal, so that their output stays live.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from maniple.errors import UserError
from maniple.launch.worker import LAUNCHED

_DEFAULT_PORT = 29500  # torchrun's own
# The loggers that report a worker's end: held back until it is known whether that end is a user's mistake.
_REPORTERS = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


@dataclass(frozen=True)
class Launch:
    """Which processes to start. One node alone needs `nproc` only; it meets on a free port of the loopback.

    Several nodes meet at `master_addr:master_port`, each with its `node_rank`, or through a rendezvous
    (`rdzv_backend`, `rdzv_endpoint`, `rdzv_id` as torchrun has them), which hands out the ranks itself.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def _static(self) -> bool:
        """Whether the nodes meet at a given address rather than through a rendezvous."""
        return (self.nnodes > 1 and not self._rendezvous) or bool(self.master_addr or self.master_port)

    @property
    def _rendezvous(self) -> bool:
        return bool(self.rdzv_backend or self.rdzv_endpoint or self.rdzv_id)

    def check(self) -> None:
        """Raises UserError, before anything starts, for options that contradict each other or a port in use."""
        if self.nproc < 1 or self.nnodes < 1:
            raise UserError(f"--nproc {self.nproc} --nnodes {self.nnodes}: a job has at least one process and node")
        if self._rendezvous:
            if self.master_addr or self.master_port or self.node_rank is not None:
                raise UserError(
                    "--rdzv-* and --master-addr, --master-port or --node-rank are two ways to meet: give one of them"
                )
            if not self.rdzv_endpoint:
                raise UserError("--rdzv-backend and --rdzv-id need --rdzv-endpoint HOST:PORT")
            return
        if self.nnodes > 1 and (self.master_addr is None or self.node_rank is None):
            raise UserError(
                f"--nnodes {self.nnodes} needs --master-addr HOST and --node-rank R on every node, or --rdzv-endpoint"
            )
        if not 0 <= (self.node_rank or 0) < self.nnodes:
            raise UserError(f"--node-rank {self.node_rank}: expected 0 to {self.nnodes - 1} for --nnodes {self.nnodes}")
        if self._static and not self.node_rank:
            _check_port(self.master_port or _DEFAULT_PORT)

    def torchrun_arguments(self, module: str, arguments: Sequence[str]) -> list[str]:
        """torchrun's arguments to run `python -m module arguments...` on every rank; no restarts."""
        out = [f"--nproc-per-node={self.nproc}", f"--nnodes={self.nnodes}", "--max-restarts=0"]
        if self._rendezvous:
            out += [f"--rdzv-backend={self.rdzv_backend or 'c10d'}", f"--rdzv-endpoint={self.rdzv_endpoint}"]
            out += [f"--rdzv-id={self.rdzv_id}"] if self.rdzv_id else []
        elif self._static:
            out += [f"--master-addr={self.master_addr or '127.0.0.1'}", f"--node-rank={self.node_rank or 0}"]
            out += [f"--master-port={self.master_port or _DEFAULT_PORT}"]
        else:  # the loopback by its number: a machine's own name need not resolve
            out += ["--standalone", "--local-addr=127.0.0.1"]
        return [*out, "--module", module, *arguments]


def run(launch: Launch, module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments...` as every rank of this node; returns the exit code of the job.

    0 if all ranks ended well; else the code of the rank that failed first, with 128 + n for a signal n, after
    torchrun's report. A rank's UserError is raised here as one, in the worker's words and without the report.
    Call from the main thread, since torchrun sets signal handlers.
    """
    launch.check()
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // launch.nproc)))

    import torch.distributed
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    held = _HeldLogs()
    try:
        torchrun.run(torchrun.parse_args(launch.torchrun_arguments(module, arguments)))
    except ChildFailedError as error:
        failures = list(error.failures.values())
        mistakes = list(dict.fromkeys(message for failure in failures if (message := _user_error(failure))))
        # Ranks that were fine are ended by torchrun with SIGTERM, and after 30 s with SIGKILL.
        explained = all(_user_error(failure) or failure.exitcode in (-15, -9) for failure in failures)
        if not (mistakes and explained):
            held.release()
            print(error.format_msg(), file=sys.stderr)
        if mistakes:
            raise UserError(" · ".join(mistakes)) from None
        first = min(failures, key=lambda failure: (failure.timestamp, failure.exitcode == -15))
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except (torch.distributed.DistError, RendezvousError) as error:
        held.release()
        raise UserError(f"torchrun could not bring the processes together: {str(error).splitlines()[0]}") from error
    finally:
        held.close()
    return 0


def visible_gpus() -> int:
    """GPUs that processes of this node would see; 0 without any (imports torch)."""
    import torch

    return torch.cuda.device_count()


def _user_error(failure) -> str | None:
    """The message of a rank that ended by a UserError, as `worker.record` left it; None for any other end."""
    if failure.exitcode != 2 or not isinstance(failure.message, dict):
        return None
    kind, _, message = failure.message.get("message", "").partition(": ")
    return message if kind == UserError.__name__ else None


def _check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise UserError(f"--master-port {port}: expected 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was in use a minute ago is free
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"--master-port {port} is in use on this machine: give another"
                    " (one node alone may leave it out and gets a free one)"
                ) from None
            raise UserError(f"--master-port {port} cannot be used: {error.strerror}") from None


class _HeldLogs:
    """Keeps the records of some loggers aside: `release` emits them late, `close` ends the holding."""

    def __init__(self) -> None:
        self._records: list[logging.LogRecord] = []
        for name in _REPORTERS:
            logging.getLogger(name).addFilter(self._hold)

    def _hold(self, record: logging.LogRecord) -> bool:
        self._records.append(record)
        return False

    def close(self) -> None:
        for name in _REPORTERS:
            logging.getLogger(name).removeFilter(self._hold)

    def release(self) -> None:
        self.close()
        for record in self._records:
            logging.getLogger(record.name).handle(record)
