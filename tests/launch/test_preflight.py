"""What a machine lacks is named, on machines that are made up: a folder stands for `/`."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from maniple.launch import preflight
from maniple.launch.preflight import Machine

HERE = Path(__file__).parents[2]
WHOLE = (
    *("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/infiniband/uverbs0", "dev/infiniband/rdma_cm"),
    *("usr/lib64/libcuda.so.1", "usr/lib/x86_64-linux-gnu/libibverbs.so.1", "sys/module/nvidia_peermem/refcnt"),
    "dev/shm/x",
)
STATE = "sys/class/infiniband/mlx5_0/ports/1/state"
UP, DOWN = "sys/class/net/eth0/operstate", "sys/class/net/eth1/operstate"
CUDA, ROCM = "2.11.0+cu130", "2.11.0+rocm7.1"


@pytest.fixture
def whole(tmp_path):
    """A node with two NVIDIA GPUs and InfiniBand that lacks nothing."""
    for name in WHOLE:
        put(tmp_path, name)
    put(tmp_path, STATE, "4: ACTIVE\n")
    put(tmp_path, UP, "up\n")
    put(tmp_path, DOWN, "down\n")
    put(tmp_path, "sys/class/net/lo/operstate", "unknown\n")
    return tmp_path


def put(root, name, text=""):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def looked(root, *, torch=CUDA, memlock=resource.RLIM_INFINITY, files=65536, **environment):
    """Feature -> (state, what is said) of what a made-up machine shows."""
    machine = Machine(root, environment)
    found = [
        *preflight._gpus(machine, torch),
        *preflight._rdma(machine),
        *preflight._interfaces(machine),
        *preflight._limits(machine, memlock, files),
    ]
    return {finding.feature: (finding.state, finding.said) for finding in found}


def missing(found):
    return {feature: said for feature, (state, said) in found.items() if state == "missing"}


def test_nothing_is_missing(whole):
    found = looked(whole)
    assert {state for state, _ in found.values()} == {"ok"}
    assert found["GPU devices"][1] == "2 of NVIDIA"
    assert found["RDMA devices"][1] == "mlx5_0 active, 1 in all"
    assert found["network interface"][1] == "eth0"


@pytest.mark.parametrize(
    ("hidden", "feature", "says"),
    [
        ("usr/lib/x86_64-linux-gnu/libibverbs.so.1", "RDMA library", "libibverbs is not found: install rdma-core"),
        ("dev/infiniband/uverbs0", "RDMA device files", "no uverbs"),
        ("usr/lib64/libcuda.so.1", "GPU driver library", "libcuda.so is not found"),
    ],
)
def test_what_is_hidden_is_named(whole, hidden, feature, says):
    (whole / hidden).unlink()
    found = missing(looked(whole))
    assert list(found) == [feature]
    assert says in found[feature]


def test_a_library_may_be_where_the_environment_says(whole):
    (whole / "usr/lib/x86_64-linux-gnu/libibverbs.so.1").unlink()
    put(whole, "elsewhere/libibverbs.so.1")
    assert not missing(looked(whole, LD_LIBRARY_PATH=f"/nowhere:{whole}/elsewhere"))


def test_devices_that_are_not_passed_to_a_container(whole):
    for number in (0, 1):
        (whole / f"dev/nvidia{number}").unlink()
    put(whole, "proc/driver/nvidia/version", "NVRM version: 580\n")
    assert "--gpus all" in missing(looked(whole))["GPU devices"]


def test_ports_that_are_down(whole):
    put(whole, STATE, "1: DOWN\n")
    assert missing(looked(whole)) == {"RDMA devices": "no port of mlx5_0 is active: check cables and switch"}


def test_efa_needs_its_own_libraries(whole):
    put(whole, "sys/class/infiniband/rdmap0s31/ports/1/state", "4: ACTIVE")
    assert set(missing(looked(whole))) == {"EFA library", "EFA plugin of NCCL"}
    put(whole, "opt/amazon/efa/lib/libfabric.so.1")
    put(whole, "opt/amazon/ofi-nccl/lib/libnccl-net.so")
    assert not missing(looked(whole))


def test_rdma_needs_locked_memory_and_without_it_none(whole):
    assert "ulimit -l unlimited" in missing(looked(whole, memlock=65536))["locked memory"]
    (whole / STATE).unlink()
    for folder in ("ports/1", "ports", ""):
        (whole / "sys/class/infiniband/mlx5_0" / folder).rmdir()
    found = looked(whole, memlock=65536)
    assert not missing(found)
    assert found["RDMA devices"][0] == "note"


def test_few_open_files_and_little_shared_memory_matter_with_gpus(whole, tmp_path):
    assert list(missing(looked(whole, files=1024))) == ["open files"]
    small = preflight._shared_memory_of(64 * 2**20, gpus=True)
    assert (small.state, small.said.partition(",")[0]) == ("missing", "/dev/shm has 64 MiB")
    assert preflight._shared_memory_of(64 * 2**20, gpus=False).state == "note"
    assert preflight._shared_memory_of(2**30, gpus=True).state == "ok"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert looked(empty, files=1024)["open files"][0] == "note"
    (gone,) = preflight._shared_memory(Machine(empty, {}))
    assert gone.state == "missing"


@pytest.mark.parametrize(
    ("build", "gpus", "is_missing"),
    [
        (CUDA, "nvidia", False),
        ("2.11.0", "nvidia", False),  # from PyPI: for CUDA
        ("2.11.0+cpu", "nvidia", True),
        (ROCM, "nvidia", True),
        (ROCM, "amd", False),
        (CUDA, "amd", True),
        ("2.11.0", "amd", True),
    ],
)
def test_torch_is_built_for_the_gpus(whole, build, gpus, is_missing):
    if gpus == "amd":
        for name in ("nvidia0", "nvidia1"):
            (whole / "dev" / name).unlink()
        put(whole, "dev/kfd")
        put(whole, "dev/dri/renderD128")
    found = missing(looked(whole, torch=build))
    assert list(found) == (["torch build"] if is_missing else [])


@pytest.mark.parametrize(
    ("name", "asked", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),  # the beginning of a name
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "^lo", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth1", False),  # it is down
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
    ],
)
def test_the_interface_that_is_asked_for(whole, name, asked, fits):
    found = missing(looked(whole, **{name: asked}))
    assert list(found) == ([] if fits else ["network interface"])
    if not fits:
        assert found["network interface"] == f"{name}={asked} names none that is up: it has eth0"


def test_several_interfaces_are_noted(whole):
    put(whole, DOWN, "up")
    state, said = looked(whole)["network interface"]
    assert state == "note"
    assert said.startswith("eth0, eth1: of several, say which")


def test_disk_and_clock(tmp_path):
    found = {finding.feature: finding for finding in preflight._disk(tmp_path / "runs" / "new", 2**62)}
    assert found["disk"].state == "missing"
    assert found["clock"].state == "ok"
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").write_text("")
    (taken,) = preflight._disk(tmp_path / "file" / "run", None)
    assert (taken.feature, taken.state) == ("run's folder", "missing")
    assert preflight._clock(-30).said.startswith("that of the run's file system is 30 s behind")
    assert preflight._clock(-30).state == "missing"


def test_a_name_that_does_not_resolve_is_noted():
    def resolve(name, port):
        raise OSError

    (found,) = preflight._name(Machine(), resolve)
    assert found.state == "note"


def test_the_command(tmp_path):
    config = str(HERE / "configs" / "demo.yaml")
    command = [sys.executable, "-m", "maniple", "preflight", config, f"output_dir={tmp_path}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found = json.loads(done.stdout)
    assert done.returncode == (2 if any(one["state"] == "missing" for one in found) else 0)
    assert {"GPU devices", "RDMA devices", "disk", "locked memory", "open files"} <= {one["feature"] for one in found}
    assert re.search(r" checkpoints of \d\d\.\d MiB", next(one["said"] for one in found if one["feature"] == "disk"))
