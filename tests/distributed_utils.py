"""Runs a function on several Gloo processes of this machine, for tests: `run_ranks(fn, 2, *args)`.

The processes are forked from a server that has imported torch and the engine once for this test process, so that eight
of them are ready in half a second, share that memory, and know nothing of each other's tests.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

STARTUP_SECONDS = 240.0  # the server's imports on a busy machine; not part of the job's own limit
PRELOADED = ["torch", "torch._dynamo", "maniple.engines.megatron.trainer"]
GRACE_SECONDS = 5.0  # for peers of a rank that failed to say why they failed


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """`[fn(rank, world_size, *args) for every rank]`, each in a process of its own with a Gloo default group.

    `fn` and `args` are pickled: `fn` is a function at the top of a module. Each collective, and the whole call after
    start-up, may take `timeout` seconds. Results come back by value. Processes never outlive the call.
    Raises RuntimeError with the traceback of the rank that failed first, or naming the ranks that hang.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        environment = dict(os.environ)  # a forked process has its server's
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(sender, environment, store, fn, rank, world_size, args, timeout), daemon=True
            )
            process.start()
            sender.close()  # the child holds the only writing end, so that its death is seen here as end of file
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list, processes: list, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting, starting = dict(enumerate(pipes)), set(range(len(pipes)))
    deadline = time.monotonic() + STARTUP_SECONDS
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting.values()), left):
            rank = next(r for r, p in waiting.items() if p is pipe)
            try:
                kind, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                kind, payload = "failed", f"the process ended with exit code {processes[rank].exitcode} and no result"
            if kind == "started":
                starting.discard(rank)
                if not starting and not failures:
                    deadline = time.monotonic() + timeout + GRACE_SECONDS  # a collective's own timeout comes first
                continue
            del waiting[rank]
            (results if kind == "result" else failures)[rank] = payload
            if kind == "failed":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        first, text = next(iter(failures.items()))
        others = f" (so did then {sorted(failures)[:8]})" if len(failures) > 1 else ""
        raise RuntimeError(f"rank {first} of {len(pipes)} failed{others}:\n{text}")
    if waiting:
        raise RuntimeError(f"ranks {sorted(waiting)} of {len(pipes)} gave no result in time and were killed")
    return [results[rank] for rank in range(len(pipes))]


def _child(
    sender, environment: dict[str, str], store: str, fn, rank: int, world_size: int, args: tuple, timeout: float
) -> None:
    try:
        os.environ.clear()
        os.environ.update(environment)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        sender.send_bytes(pickle.dumps(("started", None)))
        payload = pickle.dumps(("result", fn(rank, world_size, *args)))
        dist.barrier()  # a rank that leaves early would break the collectives of the others
        sender.send_bytes(payload)
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
    finally:
        sender.close()
