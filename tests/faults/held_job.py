"""`maniple train` of which one rank, HELD_RANK, does not come to the meeting. HELD_AT: `import`, it has not even begun;
or `meeting`, it has begun and does not join the process group. START_SECONDS: what a start may take.

Run as a program it is the launcher, whose workers are this same file.
"""

import os
import sys
import time

from maniple import cli
from maniple.launch import torchrun, worker


def _hold() -> None:
    rank, held = os.environ["RANK"], os.environ["HELD_RANK"]
    if rank == held and os.environ["HELD_AT"] == "import":
        time.sleep(600)
    from maniple.engines.megatron import parallel
    from maniple.engines.megatron.faults import watch

    watch._START_SECONDS = float(os.environ["START_SECONDS"])
    if rank == held:
        parallel.start = lambda *args, **kwargs: time.sleep(600)


if __name__ == "__main__":
    if worker.is_worker():
        _hold()
    else:
        real = torchrun.run
        torchrun.run = lambda launch, module, arguments: real(launch, "held_job", arguments)
    sys.exit(cli.main())
