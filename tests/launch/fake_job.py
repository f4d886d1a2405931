"""`maniple train` with a trainer that only acts out an ending, named by the environment variable ENDING.

Run as a program it is the launcher, whose workers are this same file.
"""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

from maniple import cli
from maniple.errors import UserError
from maniple.launch import torchrun, worker


def _train(config, card) -> int:
    rank = int(os.environ["RANK"])
    ending, _, who = os.environ["ENDING"].partition("@")
    report = os.environ.get("REPORT")
    if report:
        facts = {name: os.environ.get(name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")}
        facts |= {"steps": config.train.steps, "name": config.name, "card": card.name, "tty": sys.stderr.isatty()}
        facts |= {"resume": config.checkpoint.resume}
        Path(report, f"{rank}.json").write_text(json.dumps(facts))
    if who and rank != int(who):
        time.sleep(60)
    if ending == "user_error":
        raise UserError("the corpus is shorter than one sequence: give more text")
    if ending == "crash":
        raise RuntimeError("boom")
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "sleep":
        print("waiting", flush=True)
        time.sleep(60)
    return int(ending)


trainer = types.ModuleType("maniple.engines.megatron.trainer")
trainer.main = _train
engine = types.ModuleType("maniple.engines.megatron")  # the real package pays for torch and megatron
engine.trainer = trainer
sys.modules["maniple.engines.megatron"] = engine
sys.modules["maniple.engines.megatron.trainer"] = trainer

if __name__ == "__main__":
    if not worker.is_worker():
        real = torchrun.run
        torchrun.run = lambda launch, module, arguments: real(launch, "fake_job", arguments)
    sys.exit(cli.main())
