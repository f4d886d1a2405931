"""Where a rank is, on record even when it is killed."""

import os
import signal
import subprocess
import sys
import time

from maniple.metrics import pulse

CHILD = """
import os, signal
from maniple.metrics import pulse
pulse.start(3)
pulse.enter(pulse.SAVING, 12)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_place(tmp_path):
    started = time.time()
    environment = os.environ | {pulse.DIRECTORY: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=environment) as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    place = pulse.read(tmp_path, 3, process.pid)
    assert (place.step, place.phase, str(place)) == (12, "saving", "step 12, saving")
    assert started <= place.since <= time.time()
    assert pulse.read(tmp_path, 3, process.pid + 1) is None  # another process's record
    assert pulse.read(tmp_path, 4, process.pid) is None


def test_a_process_without_a_launcher_knows_its_own(monkeypatch):
    monkeypatch.delenv(pulse.DIRECTORY, raising=False)
    pulse.start(0)
    assert str(pulse.place()) == "start-up"
    pulse.enter(pulse.FORWARD, 1)
    pulse.enter(pulse.BACKWARD)
    assert str(pulse.place()) == "step 1, backward"
