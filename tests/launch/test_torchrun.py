"""The launcher: what torchrun is asked for, and that a job ends with its workers' exit code and words."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import maniple
from maniple.errors import UserError
from maniple.launch import torchrun
from maniple.launch.torchrun import Launch
from maniple.launch.worker import LAUNCHER
from maniple.metrics import pulse

START = "maniple: starting {}: loading torch and Megatron-Core takes 10 to 25 s\n"
HERE = Path(__file__).parent
DEMO = str(HERE.parents[1] / "configs" / "demo.yaml")

pytestmark = pytest.mark.timeout(300)  # each starts torchrun, which takes long on a busy machine


def job(ending, *words, **environment):
    """The command and environment of `maniple train` whose workers act out `ending` (see fake_job.py)."""
    command = [sys.executable, str(HERE / "fake_job.py"), "train", DEMO, "train.device=cpu", *words]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(Path(maniple.__file__).parents[1]), str(HERE)])
    return command, {**inherited, "PYTHONPATH": path, "ENDING": ending, **environment}


def run(ending, *words, **environment):
    command, env = job(ending, *words, **environment)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_one_node_meets_on_the_loopback():
    asked = Launch(4).torchrun_arguments("maniple", ["train", "x.yaml"])
    assert asked[:5] == [
        *("--nproc-per-node=4", "--nnodes=1", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
    ]
    assert asked[6:] == ["--local-addr=127.0.0.1", "--module", "maniple", "train", "x.yaml"]
    assert Launch(4).world_size == 4


def test_several_nodes_meet_at_an_address_or_a_rendezvous():
    launch = Launch(8, nnodes=3, node_rank=2, master_addr="localhost", master_port=1234)
    launch.check()
    assert launch.world_size == 24
    assert launch.torchrun_arguments("m", [])[:6] == [
        *("--nproc-per-node=8", "--nnodes=3", "--max-restarts=0"),
        *("--master-addr=localhost", "--node-rank=2", "--master-port=1234"),
    ]
    launch = Launch(8, nnodes=3, rdzv_endpoint="localhost:99", rdzv_id="job7")
    launch.check()
    assert launch.torchrun_arguments("m", [])[3:6] == [
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:99", "--rdzv-id=job7")
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nproc": 0}, "at least one process"),
        ({"nproc": 1, "nnodes": 0}, "at least one process"),
        ({"nproc": 1, "nnodes": 2}, "--nnodes 2 needs --master-addr"),
        ({"nproc": 1, "nnodes": 2, "master_addr": "a"}, "--nnodes 2 needs --master-addr"),
        ({"nproc": 1, "nnodes": 2, "master_addr": "a", "node_rank": 2}, "--node-rank 2: expected 0 to 1"),
        ({"nproc": 1, "node_rank": 1}, "--node-rank 1: expected 0 to 0"),
        ({"nproc": 1, "master_addr": "a", "rdzv_endpoint": "b:1"}, "two ways to meet"),
        ({"nproc": 1, "rdzv_id": "b"}, "need --rdzv-endpoint"),
        ({"nproc": 1, "rdzv_conf": "join_timeout=5"}, "need --rdzv-endpoint"),
        ({"nproc": 1, "nnodes": "two"}, "--nnodes two: expected a number of nodes, or MIN:MAX"),
        ({"nproc": 1, "nnodes": "3:2", "rdzv_endpoint": "b:1"}, "the least number of nodes comes first"),
        ({"nproc": 1, "nnodes": "1:2"}, "nodes that come and go meet through --rdzv-endpoint"),
        ({"nproc": 1, "max_restarts": -1}, "--max-restarts -1: expected 0 or more"),
        (
            {"nproc": 1, "nnodes": 2, "master_addr": "a", "node_rank": 0, "max_restarts": 1},
            "nodes agree on a restart through --rdzv-endpoint",
        ),
        ({"nproc": 1, "master_port": 70000}, "--master-port 70000: expected 1 to 65535"),
    ],
)
def test_options_that_contradict_each_other(options, says):
    with pytest.raises(UserError) as caught:
        Launch(**options).check()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"nnodes": 2, "node_rank": 1, "master_addr": "host.invalid"},
        {"nnodes": 2, "node_rank": 0, "master_addr": "host.invalid:29500"},
        {"nnodes": 2, "node_rank": 1, "master_addr": "a..b"},
        {"nnodes": 2, "rdzv_endpoint": "host.invalid:29400"},
        {"nnodes": 2, "rdzv_endpoint": "host.invalid"},
    ],
)
def test_a_host_that_no_one_knows_is_found_before_the_start(monkeypatch, options):
    monkeypatch.setattr(torchrun, "_UNKNOWN_SECONDS", 0.1)
    with pytest.raises(
        UserError, match=r"^--(master-addr|rdzv-endpoint) \S+: this machine does not know that host \(.+\)"
    ):
        Launch(1, **options).check()


def test_a_name_server_that_does_not_answer(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(torchrun, "_RESOLVE_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer.wait(30))
    with pytest.raises(UserError, match=r"n0: this machine does not know that host \(no answer for 0 s\)"):
        Launch(1, nnodes=2, node_rank=1, master_addr="n0").check()
    answer.set()


def test_a_host_that_becomes_known_in_time(monkeypatch):
    asked = []

    def getaddrinfo(host, port):
        asked.append(host)
        if len(asked) < 2:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    Launch(1, nnodes=2, rdzv_endpoint="[::1]:29400").check()
    assert asked == ["::1", "::1"]
    Launch(1, nnodes=2, rdzv_endpoint="/shared/file", rdzv_conf="store_type=file").check()
    Launch(1, nnodes=2, rdzv_backend="etcd", rdzv_endpoint="n0:2379").check()
    assert len(asked) == 2


def test_a_port_in_use_is_found_before_the_start(busy_port):
    with pytest.raises(UserError, match=f"--master-port {busy_port} is in use"):
        Launch(1, master_port=busy_port).check()
    Launch(1, nnodes=2, node_rank=1, master_addr="localhost", master_port=busy_port).check()


def test_a_port_in_use_is_one_line_and_exit_code_2(busy_port, tmp_path):
    done = run("0", "--nproc", "2", "--master-port", str(busy_port), REPORT=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"maniple: error: --master-port {busy_port} is in use")  # before anything starts
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_exit_code_7_in_7_out_and_the_report_is_there(tmp_path):
    words = ["--set", "train.steps=300", "--name", "007", "--resume", "auto", "--nproc", "2"]
    command, env = job("7", *words, REPORT=str(tmp_path))
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] in [
        f"maniple: rank {n} ended with exit code 7 in step 7, forward" for n in "01"
    ]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert facts
    for fact in facts:
        assert (fact["WORLD_SIZE"], fact["MASTER_ADDR"], fact["OMP_NUM_THREADS"]) == ("2", "127.0.0.1", str(threads))
        assert (fact["steps"], fact["name"], fact["resume"]) == (300, "007", "auto")


def test_a_workers_mistake_is_one_line_and_exit_code_2():
    done = run("user_error", "--nproc", "2")
    assert done.returncode == 2
    assert (
        done.stderr
        == START.format("2 processes") + "maniple: error: the corpus is shorter than one sequence: give more text\n"
    )


def test_a_mistake_of_one_worker_ends_the_others():
    done = run("user_error@1", "--nproc", "2")
    assert done.returncode == 2
    assert (
        done.stderr
        == START.format("2 processes") + "maniple: error: the corpus is shorter than one sequence: give more text\n"
    )


def test_a_mistake_is_not_repeated(tmp_path):
    done = run("user_error@1", "--nproc", "2", "--max-restarts", "3", REPORT=str(tmp_path))
    assert done.returncode == 2
    assert (tmp_path / "1.starts").read_text() == "False\n"


def test_a_crash_keeps_its_traceback():
    done = run("crash", "--nproc", "1", "parallel.expert_parallel_size=1")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "maniple: rank 0 failed in step 7, forward: RuntimeError: boom"


def test_the_first_failure_is_told_and_no_other():
    done = run("quarrel", "--nproc", "2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "maniple: rank 1 failed in step 7, forward: RuntimeError: boom"
    assert "rank 0" not in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_a_killed_worker_gives_128_and_the_signal():
    started = time.monotonic()
    done = run("kill@1", "--nproc", "2")
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr == START.format("2 processes") + (
        "maniple: rank 1 was ended by signal 9 (SIGKILL) in step 7, forward\n"
    )
    assert time.monotonic() - started < 150  # the other one would sleep for 200 s


@pytest.mark.parametrize("ending", ["hang@0", "hang_and_linger"])
def test_a_hang_is_told_in_its_own_words(ending):
    done = run(ending, "--nproc", "2")
    assert done.returncode == 124
    assert done.stderr.splitlines()[1:] == [
        "maniple: step 7: rank 1 stopped in data loading 61 s ago; rank 0 waits in backward"
    ]


def test_a_killed_worker_is_started_again(tmp_path):
    done = run("kill_once@1", "--nproc", "2", "--max-restarts", "1", REPORT=str(tmp_path))
    # rank 0 sleeps for 200 s in both lives: it is ended with the first
    assert "rank 1 was ended by signal 9 (SIGKILL) in step 7, forward · 1 restart left" in done.stderr
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "1.starts").read_text() == "False\nTrue\n"


def test_restarts_come_to_an_end(tmp_path):
    done = run("kill", "--nproc", "1", "--max-restarts", "1", "parallel.expert_parallel_size=1", REPORT=str(tmp_path))
    assert done.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "0.starts").read_text() == "False\nTrue\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_workers_may_save_before_they_stop(number, code):
    command, env = job("stop", "--nproc", "1", "parallel.expert_parallel_size=1")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(number)
        process.wait(timeout=60)
        assert process.returncode == code
        assert process.stderr.read().decode() == START.format("1 process")


@pytest.mark.parametrize("twice", [True, False], ids=["a second signal", "the time is over"])
def test_a_stop_has_an_end(twice):
    grace = [] if twice else ["train.stop_grace_seconds=1"]
    command, env = job("stop", "--nproc", "1", "parallel.expert_parallel_size=1", *grace, SAVES_FOR="100")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"waiting\n"
        process.terminate()
        if twice:
            time.sleep(pulse.SAME_SIGNAL_SECONDS + 1)
            process.terminate()
        started = time.monotonic()
        process.wait(timeout=80)
        assert process.stdout.read() == b""  # the worker is gone too
        assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 60


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path):
    command, env = job("stop", "--nproc", "1", "parallel.expert_parallel_size=1", SAVES_FOR="4")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waiting\n"
        for _ in range(2):
            process.terminate()
            time.sleep(0.5)
        process.wait(timeout=60)
        assert process.returncode == 0
        assert process.stderr.read().decode() == START.format("1 process")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_write_to_the_terminal_at_once_and_get_signals(number, tmp_path):
    command, env = job("sleep", "--nproc", "1", "parallel.expert_parallel_size=1", REPORT=str(tmp_path))
    screen, terminal = pty.openpty()
    with subprocess.Popen(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        seen = b""
        while not seen.endswith(b"waiting\r\n"):  # the worker sleeps, and yet its line is here
            seen += os.read(screen, 1000)
        process.send_signal(number)
        process.wait(timeout=60)
    os.close(terminal)
    os.set_blocking(screen, False)
    with pytest.raises(OSError, match="Input/output error"):  # nothing more was written: no traceback, no report
        os.read(screen, 1000)
    os.close(screen)
    assert seen == (START.format("1 process") + "waiting\n").replace("\n", "\r\n").encode()
    assert process.returncode == 128 + number
    assert json.loads((tmp_path / "0.json").read_text())["tty"] is True


def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    command, env = job("sleep", "--nproc", "1", "parallel.expert_parallel_size=1")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"waiting\n"
        process.kill()
        started = time.monotonic()
        assert process.stdout.read() == b""  # until the worker, too, has closed it
    assert time.monotonic() - started < 20  # it would sleep for 60 s


def test_a_worker_whose_launcher_is_gone_before_it_looks_ends():
    gone = subprocess.Popen(["true"])
    gone.wait()
    code = "import time; from maniple.launch import worker; worker.end_with_launcher(); time.sleep(60)"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, LAUNCHER: str(gone.pid)}, timeout=50)
    assert done.returncode == 1
    assert time.monotonic() - started < 40


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--node-rank 0 --master-addr 127.0.0.1 --master-port {port}", "node 1 of 2 did not come to {place} in 4 s"),
        ("--node-rank 1 --master-addr 127.0.0.1 --master-port {port}", "node 0 has not answered at {place} for 4 s"),
        (
            "--rdzv-endpoint {place} --rdzv-id a --rdzv-conf join_timeout=4",
            "the nodes did not come in time (of 2 nodes 1 came: 127.0.0.1)",
        ),
    ],
)
def test_a_node_that_does_not_come_is_told(words, said):
    port = _free_port()
    facts = {"port": port, "place": f"127.0.0.1:{port}"}
    done = run("0", "--nproc", "1", "--nnodes", "2", *words.format(**facts).split(), MEET_SECONDS="4")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("maniple: error: ")]
    assert line.endswith(f"torchrun could not bring the processes together: {said.format(**facts)}"), done.stderr


def test_numbered_nodes_meet():
    port = _free_port()
    words = [
        ["--nproc", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", rank]
        for rank in "01"
    ]
    nodes = []
    for one in words:
        command, environment = job("7@1", *one)
        nodes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        assert nodes[1].wait(timeout=200) == 7
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
