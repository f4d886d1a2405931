"""Several ranks of a job on one GPU, for tests and for measured memory: what ranks exchange goes through the host.

    python -m tests.gpu.shared_gpu RANKS [--even] train JOB.yaml KEY=VALUE...

NCCL (2.28) refuses two ranks on one GPU. What tensors take of a GPU, and what a job computes, do not depend on what
carries the bytes: here each collective copies its tensors to the host in pieces, lets Gloo move them, and copies them
back; no further tensor is made on the GPU. It is done when the call returns, sends and receipts when they are waited
for, which is NCCL's order or a stricter one. Speed says nothing. `--even` deals tokens to experts in turn, so that the
load is known. Each rank leaves `peak_RANK.json` (`max_memory_allocated`, in bytes) in the working folder, beside
`ranks.log`, what they print.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

ROOT = Path(__file__).parents[2]
PEAKS = "MANIPLE_TEST_PEAKS"  # the folder for each rank's peak
EVEN = "MANIPLE_TEST_EVEN"
_PIECE = 8 << 20  # bytes of a long tensor on the host at once
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}


class Staged(dist.ProcessGroup):
    """A group of torch.distributed whose tensors, on any device, pass through the host and Gloo.

    Sums of 16-bit floats are fp32 and rounded once. Tensors are contiguous, as NCCL wants them; ValueError else.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        from maniple.engines.megatron.cpu import _GlooOnOneDevice

        super().__init__(rank, size)
        self.gloo = _GlooOnOneDevice(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return "staged"

    def _set_group_name(self, name: str) -> None:  # torch's own is for groups of other backends
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def barrier(self, opts: Any = None) -> Work:
        self.gloo.barrier().wait()
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        for tensor in tensors:
            for piece in _pieces(_bytes(tensor)):
                host = _host(piece)
                self.gloo.broadcast([host], opts).wait()
                if opts.rootRank != self.rank():
                    piece.copy_(host)
        return _Done()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        mean = opts.reduceOp == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if mean else opts.reduceOp
        for tensor in tensors if self.size() > 1 else ():
            for piece in _pieces(_flat(tensor)):
                host = _host(piece)
                host = host.to(_WIDE.get(host.dtype, host.dtype))
                self.gloo.allreduce([host], options).wait()
                piece.copy_(host / self.size() if mean else host)
        return _Done()

    allreduce_coalesced = allreduce

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        return self.allgather([list(_flat(out).chunk(self.size()))], [x], opts)

    def allgather(self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> Work:
        for out, x in zip(outs, tensors, strict=True):
            if self.size() == 1:
                out[0].view(-1).copy_(_flat(x))
                continue
            for piece, *places in zip(_pieces(_bytes(x)), *(_pieces(_bytes(each)) for each in out), strict=True):
                options = dist.BroadcastOptions()
                for source, place in enumerate(places):  # Gloo's own is several times slower
                    host = _host(piece) if source == self.rank() else _room(piece)
                    options.rootRank = source
                    self.gloo.broadcast([host], options).wait()
                    place.copy_(host)
        return _Done()

    def allgather_into_tensor_coalesced(self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None):
        for out, x in zip(outs, tensors, strict=True):
            self._allgather_base(out, x)
        return _Done()

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any) -> Work:
        return self.reduce_scatter([out], [list(_flat(x).chunk(self.size()))], opts)

    def reduce_scatter(self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any) -> Work:
        if not (opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG):
            raise ValueError(f"ranks' parts are summed or averaged here, not {opts.reduceOp}")
        for out, parts in zip(outs, tensors, strict=True):
            if self.size() == 1:
                _flat(out).copy_(_flat(parts[0]))
                continue
            for place, *pieces in zip(_pieces(_flat(out)), *(_pieces(_flat(part)) for part in parts), strict=True):
                sent_RN, came_RN = _room(place, self.size()), _room(place, self.size())
                for row_N, piece in zip(sent_RN, pieces, strict=True):
                    row_N.copy_(piece)
                self.gloo.alltoall_base(_bytes(came_RN), _bytes(sent_RN), [], []).wait()
                sums_N = came_RN.to(_WIDE.get(came_RN.dtype, came_RN.dtype)).sum(0)
                place.copy_(sums_N / self.size() if opts.reduceOp == dist.ReduceOp.AVG else sums_N)
        return _Done()

    def reduce_scatter_tensor_coalesced(self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any) -> Work:
        for out, x in zip(outs, tensors, strict=True):
            self._reduce_scatter_base(out, x, opts)
        return _Done()

    def alltoall_base(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        """received, sent: rows of the first dimension by rank; empty where all are alike."""
        came = _room(_bytes(out))
        self.gloo.alltoall_base(came, _host(_bytes(x)), _in_bytes(out, received), _in_bytes(x, sent)).wait()
        _bytes(out).copy_(came)
        return _Done()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        (x,) = tensors
        host = _host(_bytes(x))
        return _Pending(self.gloo.send([host], to, tag), host, x, receives=False)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        (out,) = tensors
        host = _room(_bytes(out))
        return _Pending(self.gloo.recv([host], source, tag), host, out, receives=True)


class _Done(Work):
    """Of what was done when the call returned."""

    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Pending(Work):
    """Of a send or receipt: holds its tensors, on the host and `x`, until it is waited for, as NCCL's does."""

    def __init__(self, work: Work, host: torch.Tensor, x: torch.Tensor, *, receives: bool) -> None:
        super().__init__()
        self.work, self.receives = work, receives
        self.held: tuple[torch.Tensor, ...] = (host, x)

    def wait(self, timeout: Any = None) -> bool:
        if self.held:
            self.work.wait()
            host, x = self.held
            if self.receives:
                _bytes(x).copy_(host)
            self.held = ()
        return True


def _flat(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous")
    return x.detach().view(-1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return _flat(x).view(torch.uint8)


def _in_bytes(x: torch.Tensor, rows: list[int]) -> list[int]:
    each = x[:1].numel() * x.element_size() if x.shape[0] else 0
    return [each * count for count in rows]


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(flat.split(_PIECE // flat.element_size())) if flat.numel() else iter(())


def _room(x: torch.Tensor, *outer: int) -> torch.Tensor:
    """On the host, for what is like x, with dimensions before its own; a GPU's in memory that is kept and reused."""
    return torch.empty(*outer, *x.shape, dtype=x.dtype, pin_memory=x.is_cuda)


def _host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, when all that was to write x is done."""
    return _room(x).copy_(x)


def install() -> None:
    """Makes `nccl` mean `Staged` in this process, for default groups that are yet to come and the groups in them."""
    dist.Backend.register_backend("staged", Staged, devices=["cpu", "cuda"])
    usual: Callable[..., None] = dist.init_process_group

    @functools.wraps(usual)
    def init_process_group(backend: str, *, device_id: Any = None, **rest: Any) -> None:
        usual("staged" if backend == "nccl" else backend, **rest)

    dist.init_process_group = init_process_group


def start(ranks: int, words: Sequence[str], *, folder: Path, log: Path, even: bool = False) -> list[subprocess.Popen]:
    """The ranks of `maniple WORDS...` on the GPU that this process sees first, in `folder`; output goes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    usual = {**os.environ, **meeting, "PYTHONPATH": path, PEAKS: str(folder), "OMP_NUM_THREADS": "2"}
    usual |= {EVEN: "1"} if even else {}
    started = []
    for rank in range(ranks):
        with log.open("ab") as file:
            command = [sys.executable, "-m", "tests.gpu.shared_gpu", str(ranks), *words]
            process = subprocess.Popen(
                command, cwd=folder, env={**usual, "RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT
            )
        started.append(process)
    return started


def finish(processes: list[subprocess.Popen], seconds: float) -> int:
    """Waits for all; the first code that is not 0 ends the others. 124 where they took longer."""
    limit, waiting, code = time.monotonic() + seconds, list(processes), 0
    try:
        while waiting and not code:
            time.sleep(0.1)
            codes = [process.poll() for process in waiting]
            code = 124 if time.monotonic() > limit else next(filter(None, codes), 0)
            waiting = [process for process, ended in zip(waiting, codes, strict=True) if ended is None]
        return code
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(words: list[str]) -> int:
    """One rank, where `start` says so; else all of them."""
    ranks, *words = words
    if "RANK" not in os.environ:
        even = words[0] == "--even"
        folder = Path.cwd()
        return finish(start(int(ranks), words[even:], folder=folder, log=folder / "ranks.log", even=even), 3600)
    install()
    if os.environ.get(EVEN):
        from megatron.core.transformer import TransformerConfig

        TransformerConfig.maniple_static_splits = "even"
    from maniple import cli

    code = cli.main(words)
    if torch.cuda.is_available():
        peak = {"rank": int(os.environ["RANK"]), "peak_memory_bytes": torch.cuda.max_memory_allocated()}
        (Path(os.environ[PEAKS]) / f"peak_{peak['rank']}.json").write_text(json.dumps(peak), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
