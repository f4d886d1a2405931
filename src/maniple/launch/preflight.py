"""What a machine lacks for a job, told before the job starts: devices, libraries, limits, space, clock.

Nothing here starts a process, loads a library or imports torch: files of `/sys`, `/proc` and `/dev`, limits of this
process, and the environment say it all. A finding is `ok`; a `note`, what may be meant so; or `missing`, what would
end a job or let it run far slower than its hardware, with what to do.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from maniple.hardware.units import binary_size

_LEAST_SHM = 2**30  # a container's usual 64 MiB hold neither NCCL's buffers nor a loader's batches
_LEAST_FILES = 4096  # sockets to peers, shared tensors of loaders, dataset files: each is an open file
_MOST_SKEW = 5.0  # seconds
_LIBRARY_FOLDERS = (
    *("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"),
    *("lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/cuda/lib64", "usr/local/nvidia/lib64"),
    *("opt/rocm/lib", "opt/amazon/efa/lib", "opt/amazon/efa/lib64", "opt/amazon/ofi-nccl/lib"),
)


@dataclass(frozen=True)
class Finding:
    """About one feature. `said` is one line; of a missing one it ends with what to do."""

    feature: str
    state: Literal["ok", "note", "missing"]
    said: str


@dataclass(frozen=True)
class Machine:
    """Where to look. `root` stands for `/` and `environment` for the process's own, so that another can be made up."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        return sorted(path.name for path in (self.root / folder).glob(pattern))

    def text(self, file: str) -> str:
        """The file's content without white space at its ends; empty if it cannot be read."""
        try:
            return (self.root / file).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def has_library(self, name: str) -> bool:
        """Whether `NAME`, or `NAME.` and a version, is in a folder where the loader would look."""
        given = [Path(path) for path in self.environment.get("LD_LIBRARY_PATH", "").split(":") if path]
        folders = [*given, *(self.root / folder for folder in _LIBRARY_FOLDERS)]
        return any(folder.is_dir() and any(folder.glob(f"{name}*")) for folder in folders)

    @property
    def gpus(self) -> dict[str, int]:
        """Maker -> number of GPUs whose device files are there."""
        nvidia = [name for name in self.names("dev", "nvidia[0-9]*") if name.removeprefix("nvidia").isdecimal()]
        amd = self.names("dev/dri", "render*") if (self.root / "dev/kfd").exists() else []
        return {maker: len(found) for maker, found in (("NVIDIA", nvidia), ("AMD", amd)) if found}

    @property
    def rdma(self) -> list[str]:
        return self.names("sys/class/infiniband")


def findings(machine: Machine, run_dir: Path, *, checkpoint_bytes: int | None = None) -> list[Finding]:
    """All that can be said of this machine for a job that writes to `run_dir`, whose checkpoints take so many bytes."""
    return [
        *_gpus(machine, _torch_version()),
        *_rdma(machine),
        *_interfaces(machine),
        *_shared_memory(machine),
        *_limits(
            machine, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        ),
        *_disk(run_dir, checkpoint_bytes),
        *_name(machine, socket.getaddrinfo),
    ]


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus(machine: Machine, torch_version: str) -> Iterator[Finding]:
    gpus = machine.gpus
    if not gpus:
        loaded = machine.text("proc/driver/nvidia/version") or machine.names("sys/module", "amdgpu")
        if loaded:
            yield Finding(
                "GPU devices",
                "missing",
                "a GPU driver is loaded, and /dev has no GPU: pass the devices to the container (--gpus all, or "
                "--device /dev/kfd --device /dev/dri)",
            )
        else:
            yield Finding("GPU devices", "note", "none: training runs on the CPU")
        return
    for maker, count in gpus.items():
        yield Finding("GPU devices", "ok", f"{count} of {maker}")
        library = {"NVIDIA": "libcuda.so", "AMD": "libamdhip64.so"}[maker]
        # torch's ROCm wheels bring their own
        if maker == "NVIDIA" and not machine.has_library(library):
            yield Finding(
                "GPU driver library", "missing", f"{library} is not found: install the driver's user libraries"
            )
        build = torch_version.partition("+")[2]
        other = "rocm" if maker == "NVIDIA" else "cu1"
        if build == "cpu" or build.startswith(other) or (maker == "AMD" and not build.startswith("rocm")):
            yield Finding(
                "torch build",
                "missing",
                f"torch {torch_version} does not run on {maker} GPUs: install its build for them",
            )


def _rdma(machine: Machine) -> Iterator[Finding]:
    devices = machine.rdma
    if not devices:
        yield Finding("RDMA devices", "note", "none in /sys/class/infiniband: several nodes would talk over TCP")
        return
    active = [device for device in devices if _is_active(machine, device)]
    if active:
        yield Finding("RDMA devices", "ok", f"{', '.join(active)} active, {len(devices)} in all")
    else:
        yield Finding("RDMA devices", "missing", f"no port of {', '.join(devices)} is active: check cables and switch")
    if not machine.names("dev/infiniband", "uverbs*"):
        yield Finding(
            "RDMA device files",
            "missing",
            "/dev/infiniband has no uverbs: pass it to the container (--device /dev/infiniband)",
        )
    if not machine.has_library("libibverbs.so"):
        yield Finding("RDMA library", "missing", "libibverbs is not found: install rdma-core (libibverbs1)")
    if any(device.startswith(("efa", "rdmap")) for device in devices):
        if not machine.has_library("libfabric.so"):
            yield Finding("EFA library", "missing", "libfabric is not found: install the EFA installer's packages")
        if not machine.has_library("libnccl-net"):
            yield Finding("EFA plugin of NCCL", "missing", "libnccl-net is not found: install aws-ofi-nccl")
    if "NVIDIA" in machine.gpus and not machine.names("sys/module", "nvidia_peermem"):
        yield Finding(
            "GPUDirect RDMA",
            "note",
            "the kernel module nvidia_peermem is not loaded: without DMA-BUF support data go through the host's memory",
        )


def _is_active(machine: Machine, device: str) -> bool:
    ports = machine.names(f"sys/class/infiniband/{device}/ports")
    return any("ACTIVE" in machine.text(f"sys/class/infiniband/{device}/ports/{port}/state") for port in ports)


def _interfaces(machine: Machine) -> Iterator[Finding]:
    there = machine.names("sys/class/net")
    up = [name for name in there if name != "lo" and machine.text(f"sys/class/net/{name}/operstate") != "down"]
    for variable, matches in (("NCCL_SOCKET_IFNAME", _nccl_matches), ("GLOO_SOCKET_IFNAME", _gloo_matches)):
        asked = machine.environment.get(variable)
        if asked and not matches(asked, [*up, *(["lo"] if "lo" in there else [])]):
            yield Finding(
                "network interface",
                "missing",
                f"{variable}={asked} names none that is up: it has {', '.join(up) or 'none but the loopback'}",
            )
        elif asked:
            yield Finding("network interface", "ok", f"{variable}={asked}")
    if not any(machine.environment.get(name) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")):
        said = ", ".join(up) or "none but the loopback: one node only"
        if len(up) > 1:
            said += ": of several, say which leads to the other nodes by NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        yield Finding("network interface", "ok" if len(up) == 1 else "note", said)


def _nccl_matches(asked: str, there: list[str]) -> bool:
    """NCCL's: beginnings of names, `=` before whole names, `^` before those that are left out."""
    inverse, text = asked.startswith("^"), asked.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    wanted = [item for item in text.split(",") if item]
    found = [n for n in there if any(n == item if exact else n.startswith(item) for item in wanted)]
    return bool(set(there) - set(found)) if inverse else bool(found)


def _gloo_matches(asked: str, there: list[str]) -> bool:
    return all(item in there for item in asked.split(","))


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    folder = machine.root / "dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError:
        yield Finding("shared memory", "missing", "/dev/shm is not there: mount it, of 1 GiB or more")
        return
    yield _shared_memory_of(found.f_blocks * found.f_frsize, bool(machine.gpus))


def _shared_memory_of(size: int, gpus: bool) -> Finding:
    if size < _LEAST_SHM:
        said = f"/dev/shm has {size / 2**20:,.0f} MiB, GPUs need 1,024: start the container with --shm-size=16g or so"
        return Finding("shared memory", "missing" if gpus else "note", said)
    return Finding("shared memory", "ok", f"/dev/shm has {binary_size(size)}")


def _limits(machine: Machine, memlock: int, files: int) -> Iterator[Finding]:
    if memlock == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "unlimited")
    elif machine.rdma:
        said = (
            f"{memlock:,} bytes, and RDMA pins its buffers: set ulimit -l unlimited, a container's --ulimit memlock=-1"
        )
        yield Finding("locked memory", "missing", said)
    else:
        yield Finding("locked memory", "note", f"{memlock:,} bytes: enough without RDMA devices")
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        said = f"{files:,} may be open, a node of GPUs needs {_LEAST_FILES:,}: set ulimit -n 65536"
        yield Finding("open files", "missing" if machine.gpus else "note", said)
    else:
        yield Finding("open files", "ok", "unlimited" if files == resource.RLIM_INFINITY else f"{files:,} may be open")


def _disk(run_dir: Path, checkpoint_bytes: int | None) -> Iterator[Finding]:
    place = run_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield Finding("run's folder", "missing", f"{place} is not a folder: set another output_dir")
        return
    free = shutil.disk_usage(place).free
    space = f"{binary_size(free)} free for {run_dir}"
    if checkpoint_bytes is None:
        yield Finding("disk", "ok", space)
    elif free < checkpoint_bytes:
        need = f"a checkpoint takes {binary_size(checkpoint_bytes)}"
        yield Finding("disk", "missing", f"{space}, and {need}: free some, or set another output_dir")
    else:
        count = free // checkpoint_bytes
        room = f"{count:,} checkpoint{'' if count == 1 else 's'} of {binary_size(checkpoint_bytes)}"
        yield Finding("disk", "ok", f"{space}, {room}")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            written = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        why = error.strerror or errno.errorcode.get(error.errno or 0, "")
        yield Finding("run's folder", "missing", f"{place} cannot be written ({why}): set another output_dir")
        return
    yield _clock(written - time.time())


def _clock(ahead: float) -> Finding:
    if abs(ahead) > _MOST_SKEW:
        said = (
            f"that of the run's file system is {abs(ahead):,.0f} s {'ahead' if ahead > 0 else 'behind'}: restarts and "
            "hangs are told by time, so let both follow one time server"
        )
        return Finding("clock", "missing", said)
    return Finding("clock", "ok", f"within {_MOST_SKEW:.0f} s of the run's file system")


def _name(machine: Machine, resolve: Callable) -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        resolve(name, None)
    except OSError:
        said = f"{name} does not resolve: several nodes need --master-addr or --rdzv-endpoint by number"
        yield Finding("host name", "note", said)
    else:
        yield Finding("host name", "ok", name)


def run(run_dir: Path, *, checkpoint_bytes: int | None = None, as_json: bool = False) -> int:
    """Prints the findings as a table, or as JSON, on standard output. The exit code: 2 if something is missing."""
    found = findings(Machine(), run_dir, checkpoint_bytes=checkpoint_bytes)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        width = max(len(finding.feature) for finding in found)
        for finding in found:
            print(f"{finding.feature:{width}}  {finding.state:7}  {finding.said}")
    return 2 if any(finding.state == "missing" for finding in found) else 0
