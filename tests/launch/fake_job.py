"""`maniple train` with a trainer that only acts out an ending, named by the environment variable ENDING.

Run as a program it is the launcher, whose workers are this same file.
"""

import json
import os
import signal
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

from maniple import cli
from maniple.errors import UserError
from maniple.launch import torchrun, worker
from maniple.metrics import pulse


class Hang(RuntimeError):
    """As the engine's watch has it."""


def _train(config, card, *, restarted, report) -> int:
    rank = int(os.environ["RANK"])
    pulse.start(rank).enter(pulse.FORWARD, 7)
    ending, _, who = os.environ["ENDING"].partition("@")
    folder = os.environ.get("REPORT")
    if folder:
        facts = {name: os.environ.get(name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")}
        facts |= {"steps": config.train.steps, "name": config.name, "card": card.name, "tty": sys.stderr.isatty()}
        facts |= {"resume": config.checkpoint.resume, "restarted": restarted}
        Path(folder, f"{rank}.json").write_text(json.dumps(facts))
        with open(Path(folder, f"{rank}.starts"), "a") as starts:
            starts.write(f"{restarted}\n")
    if who and rank != int(who):
        if restarted:
            return 0
        time.sleep(200)
    if ending == "user_error":
        raise UserError("the corpus is shorter than one sequence: give more text")
    if ending == "crash":
        raise RuntimeError("boom")
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "kill_once":
        if not restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0
    if ending == "quarrel":  # rank 1 fails, and rank 0, which needed it, says so at once
        words = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        while rank == 0 and not (words.parents[1] / "1" / words.name).exists():
            time.sleep(0.001)
        raise RuntimeError("boom" if rank == 1 else "connection closed by peer")
    if ending == "hang":
        report(Hang("step 7: rank 1 stopped in data loading 61 s ago; rank 0 waits in backward"), pulse.HUNG)
        os._exit(pulse.HUNG)
    if ending == "hang_and_linger":  # rank 0 has told of a hang, and rank 1 ends before it
        if rank == 0:
            report(Hang("step 7: rank 1 stopped in data loading 61 s ago; rank 0 waits in backward"), pulse.HUNG)
            time.sleep(200)
        words = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        while not (words.parents[1] / "0" / words.name).exists():
            time.sleep(0.001)
        raise RuntimeError("connection closed by peer")
    if ending == "stop":  # as the trainer does: finishes what it is at, then ends well
        asked = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: asked.append(number))
        print("waiting", flush=True)
        while not asked:
            time.sleep(0.05)
        time.sleep(float(os.environ.get("SAVES_FOR", "1")))
        return 0
    if ending == "sleep":
        print("waiting", flush=True)
        time.sleep(60)
    return int(ending)


trainer = types.ModuleType("maniple.engines.megatron.trainer")
trainer.main = _train
engine = types.ModuleType("maniple.engines.megatron")  # the real package pays for torch and megatron
engine.trainer = trainer
engine.__path__ = [str(Path(cli.__file__).parent / "engines" / "megatron")]  # the launcher looks at checkpoints there
sys.modules["maniple.engines.megatron"] = engine
sys.modules["maniple.engines.megatron.trainer"] = trainer

if __name__ == "__main__":
    if not worker.is_worker():
        real = torchrun.run
        meet = {"meet_seconds": float(os.environ.get("MEET_SECONDS", "600"))}
        torchrun.run = lambda launch, module, arguments: real(replace(launch, **meet), "fake_job", arguments)
    code = cli.main()
    # in C++ while Python ends, such a thread aborts the process now and then
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("RendezvousKeepAlive")]
    sys.exit(f"still running: {left}" if left else code)
