"""Starts the processes of this node with torchrun's machinery, and ends as they ended.

torchrun runs inside this process and not as a child, for three reasons: as a program it exits with 1 whatever its
workers exited with; its handlers of SIGTERM and SIGINT, which pass the signal on to the workers, then serve without a
relay; and workers inherit this process's terminal, so that their output stays live. Options are torchrun's own, read by
torchrun; its agent is subclassed in `agent.py`.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maniple.errors import UserError
from maniple.launch.worker import LAUNCHED, LAUNCHER, RESTARTED

if TYPE_CHECKING:
    from maniple.launch.agent import Agent

_DEFAULT_PORT = 29500  # torchrun's own
_RESOLVE_SECONDS = 40.0  # for an answer to come
_UNKNOWN_SECONDS = 30.0  # for an unknown host to become known: a cluster may be about to make its name
_NOTICE_SECONDS = 3.0  # after which a line says what is waited for
# What GPU drivers of Linux make: NVIDIA's (Jetson's too), AMD's, and both under Windows' Linux.
_DEVICES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/kfd", "/dev/dxg")
_ORDERLY = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler's: a job that saves and stops by them has done well
# Loggers that tell of every closed process and broken connection: `agent.py` says why a job ended, in one line.
_REPORTERS = (
    *("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"),
    *("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "torch.distributed.elastic.rendezvous.utils"),
)


@dataclass(frozen=True)
class Launch:
    """Which processes to start. One node alone needs `nproc` only; it meets on a free port of the loopback.

    Several nodes meet at `master_addr:master_port`, each with its `node_rank`, or through a rendezvous
    (`rdzv_backend`, `rdzv_endpoint`, `rdzv_id`, `rdzv_conf` as torchrun has them), which hands out the ranks itself.
    nnodes: a number, or `MIN:MAX` with a rendezvous: the job goes on with fewer nodes when some are lost, and with more
    when some come. fits: numbers of nodes that the job's layout allows; empty: any.
    meet_seconds: how long nodes wait for one another at `master_addr` (a rendezvous has `join_timeout` in `rdzv_conf`).
    max_restarts: how often the processes are started again after a failure that is not a user's mistake.
    stop_grace_seconds: time to save and end after SIGTERM, SIGUSR1 or SIGINT.
    """

    nproc: int
    nnodes: int | str = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    fits: frozenset[int] = frozenset()
    meet_seconds: float = 600.0
    max_restarts: int = 0
    stop_grace_seconds: float = 30.0

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most nodes. Raises UserError if `nnodes` is neither a number nor `MIN:MAX`."""
        fewest, _, most = str(self.nnodes).partition(":")
        if not (fewest.isascii() and fewest.isdecimal() and (not most or (most.isascii() and most.isdecimal()))):
            raise UserError(f"--nnodes {self.nnodes}: expected a number of nodes, or MIN:MAX")
        return int(fewest), int(most or fewest)

    @property
    def world_size(self) -> int:
        """Ranks of the job with all its nodes."""
        return self.nproc * self.node_range[1]

    @property
    def _static(self) -> bool:
        """Whether the nodes meet at a given address rather than through a rendezvous."""
        return (self.node_range[1] > 1 and not self._rendezvous) or bool(self.master_addr or self.master_port)

    @property
    def _rendezvous(self) -> bool:
        return bool(self.rdzv_backend or self.rdzv_endpoint or self.rdzv_id or self.rdzv_conf)

    def check(self) -> None:
        """Raises UserError, before anything starts, for options that contradict each other, a host that no one knows or
        a port in use."""
        fewest, most = self.node_range
        if self.nproc < 1 or fewest < 1:
            raise UserError(f"--nproc {self.nproc} --nnodes {self.nnodes}: a job has at least one process and node")
        if most < fewest:
            raise UserError(f"--nnodes {self.nnodes}: the least number of nodes comes first")
        if self.max_restarts < 0:
            raise UserError(f"--max-restarts {self.max_restarts}: expected 0 or more")
        if self._rendezvous:
            if self.master_addr or self.master_port or self.node_rank is not None:
                raise UserError(
                    "--rdzv-* and --master-addr, --master-port or --node-rank are two ways to meet: give one of them"
                )
            if not self.rdzv_endpoint:
                raise UserError("--rdzv-backend, --rdzv-id and --rdzv-conf need --rdzv-endpoint HOST:PORT")
            if self.rdzv_backend in (None, "c10d") and "store_type=file" not in (self.rdzv_conf or ""):
                _check_host(_host_of(self.rdzv_endpoint), f"--rdzv-endpoint {self.rdzv_endpoint}")
            return
        if fewest != most:
            raise UserError(f"--nnodes {self.nnodes}: nodes that come and go meet through --rdzv-endpoint HOST:PORT")
        if most > 1 and (self.master_addr is None or self.node_rank is None):
            raise UserError(
                f"--nnodes {most} needs --master-addr HOST and --node-rank R on every node, or --rdzv-endpoint"
            )
        if most > 1 and self.max_restarts:
            raise UserError(
                f"--max-restarts {self.max_restarts} with {most} nodes: nodes agree on a restart through "
                "--rdzv-endpoint HOST:PORT, not through --master-addr"
            )
        if not 0 <= (self.node_rank or 0) < most:
            raise UserError(f"--node-rank {self.node_rank}: expected 0 to {most - 1} for --nnodes {most}")
        if self.master_addr is not None:
            _check_host(self.master_addr, f"--master-addr {self.master_addr}")
        if self._static and not self.node_rank:
            _check_port(self.master_port or _DEFAULT_PORT)

    def torchrun_arguments(self, module: str, arguments: Sequence[str]) -> list[str]:
        """torchrun's arguments to run `python -m module arguments...` on every rank."""
        out = [f"--nproc-per-node={self.nproc}", f"--nnodes={self.nnodes}", f"--max-restarts={self.max_restarts}"]
        if self._rendezvous:
            out += [f"--rdzv-backend={self.rdzv_backend or 'c10d'}", f"--rdzv-endpoint={self.rdzv_endpoint}"]
            out += [f"--rdzv-id={self.rdzv_id}"] if self.rdzv_id else []
            out += [f"--rdzv-conf={self.rdzv_conf}"] if self.rdzv_conf else []
            on_loopback = (self.rdzv_endpoint or "").rpartition(":")[0] in ("127.0.0.1", "localhost")
            out += ["--local-addr=127.0.0.1"] if on_loopback else []
        elif self._static:
            out += [f"--master-addr={self.master_addr or '127.0.0.1'}", f"--node-rank={self.node_rank or 0}"]
            out += [f"--master-port={self.master_port or _DEFAULT_PORT}"]
        else:  # the loopback by its number: a machine's own name need not resolve
            out += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4()}"]
            out += ["--local-addr=127.0.0.1"]
        return [*out, "--module", module, *arguments]

    def __str__(self) -> str:
        fewest, most = self.node_range
        count = f"{self.nproc} process{'es' if self.nproc > 1 else ''}"
        if most == 1:
            return count
        return f"{count} of this node; {most if fewest == most else f'{fewest} to {most}'} nodes meet"


def run(launch: Launch, module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments...` as every rank of this node; returns the exit code of the job.

    0 if all ranks ended well, also after a SIGTERM or SIGUSR1 by which they saved and stopped (130 after Ctrl-C); else
    the code of the rank that failed first, with 128 + n for a signal n, after one line that says why and where. A
    rank's UserError is raised here as one, in the worker's words. Call from the main thread, since torchrun sets signal
    handlers.
    """
    launch.check()
    print(f"maniple: starting {launch}: loading torch and Megatron-Core takes 10 to 25 s", file=sys.stderr, flush=True)
    os.environ[LAUNCHED], os.environ[LAUNCHER] = "1", str(os.getpid())
    os.environ.pop(RESTARTED, None)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // launch.nproc)))

    import torch.distributed
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

    from maniple.launch.agent import Agent, describe, make_spec
    from maniple.metrics import pulse
    from maniple.metrics.summary import COMMAND

    os.environ[COMMAND] = shlex.join(["maniple", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="maniple-") as folder, _quiet():
        os.environ[pulse.DIRECTORY] = folder
        words = [f"--log-dir={folder}", *launch.torchrun_arguments(module, arguments)]
        config, program, program_words = torchrun.config_from_args(torchrun.parse_args(words))
        agent: Agent | None = None
        try:
            spec = make_spec(config, program, program_words, meet_seconds=launch.meet_seconds)
            agent = Agent(spec, config.logs_specs, stop_grace_seconds=launch.stop_grace_seconds, fits=launch.fits)
            result = agent.run_to_end()
        except SignalException as error:
            ended_well = agent is not None and agent.exit_codes and not any(agent.exit_codes)
            return 0 if ended_well and error.sigval in _ORDERLY else 128 + error.sigval
        except RendezvousClosedError:
            line = "the job has ended on another node"
            raise UserError(f"{line}: {agent.failure.line}" if agent and agent.failure else line) from None
        except (torch.distributed.DistError, RendezvousError) as error:
            raise UserError(
                f"torchrun could not bring the processes together: {_reason(error, agent, launch)}"
            ) from error
        if result is None or not result.is_failed():
            return 0
        assert agent.failure is not None
        if agent.failure.is_mistake:
            raise UserError(agent.failure.message)
        describe(agent.failure)
        return agent.failure.exit_code


def _reason(error: Exception, agent: Agent | None, launch: Launch) -> str:
    text = (str(error).splitlines() or [""])[0] or "the nodes did not come in time"
    came = str(agent.arrivals) if agent is not None else ""
    return f"{text} (of {launch.node_range[0]} nodes {came})" if came else text


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the loggers that would bury the reason of a failure to themselves."""
    loggers = [logging.getLogger(name) for name in _REPORTERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def visible_gpus() -> int:
    """GPUs that processes of this node would see; 0 without any. Asks torch, where there is a driver to ask."""
    if not any(glob.glob(pattern) for pattern in _DEVICES):
        return 0  # told in no time, where the import of torch takes seconds
    import torch

    return torch.cuda.device_count()


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


def _host_of(endpoint: str) -> str:
    """`n0` of `n0:29400` and of `n0`, `::1` of `[::1]:29400`."""
    host, colon, port = endpoint.rpartition(":")
    return (host if colon and port.isdecimal() else endpoint).removeprefix("[").removesuffix("]")


def _check_host(host: str, option: str) -> None:
    """Raises UserError if the name does not become known here."""
    found: list[str] = []

    def look() -> None:
        end, why = time.monotonic() + _UNKNOWN_SECONDS, ""
        while time.monotonic() < end:
            try:
                socket.getaddrinfo(host, None)
                found.append("")
                return
            except UnicodeError:
                why = "no host has such a name"
                break
            except OSError as error:
                why = error.strerror or str(error)
            time.sleep(0.5)
        found.append(why)

    # in a thread of its own: the system's answer may be long in coming, and cannot be called off
    thread = threading.Thread(target=look, name="maniple-resolve", daemon=True)
    thread.start()
    thread.join(min(_NOTICE_SECONDS, _RESOLVE_SECONDS))
    if thread.is_alive():
        print(f"waiting for this machine to know host {host} ({option}), {_UNKNOWN_SECONDS:.0f} s at most", flush=True)
        thread.join(_RESOLVE_SECONDS - _NOTICE_SECONDS)
    why = found[0] if found else f"no answer for {_RESOLVE_SECONDS:.0f} s"
    if why:
        raise UserError(
            f"{option}: this machine does not know that host ({why}): mend the name, or give node 0's address in "
            "numbers"
        )
