"""What a run does about losses and gradients that cannot be right: which, how far off, and what follows.

Pure decisions on figures that are the same on every rank, so that all ranks decide alike. `trainer.py` carries them
out; `nonfinite.py` finds where a NaN began. `state` is kept in checkpoints: a resumed run decides as the uninterrupted.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from maniple.config.schema import GuardConfig

Action = Literal["go", "warn", "skip", "rollback", "stop"]
_SIGMA_OF_MAD = 1.4826  # of a normal distribution
_LEAST_SIGMA = 1e-3  # of the median: losses that hardly differ make no alarm


@dataclass(frozen=True)
class Verdict:
    """About one step, before its update. kind: "", "nonfinite" or "spike"; why: in words, without the step."""

    action: Action = "go"
    kind: str = ""
    why: str = ""

    @property
    def updates(self) -> bool:
        return self.action in ("go", "warn")


class Guard:
    """Judges each step's loss (nats a token) and gradient norm, both the same on all ranks."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.losses: list[float] = []  # the last ones that were not left out
        self.skips = 0  # in a row
        self.left_out: list[list[int]] = []  # first and last step of each window that a rollback leaves out

    def judge(self, loss: float, grad_norm: float) -> Verdict:
        verdict = self._limited(self._nonfinite(loss, grad_norm) or self._spike(loss) or Verdict())
        if verdict.updates:
            self.losses = [*self.losses, loss][-self.config.spike_window :]
            self.skips = 0
        elif verdict.action == "skip":
            self.skips += 1
        return verdict

    def leave_out(self, step: int, newest_saved: int) -> None:
        """Notes that `step` and those about it are not to be taken again, as far as they come after `newest_saved`."""
        around = self.config.skip_steps
        self.left_out.append([max(newest_saved + 1, step - around), step + around])

    def end_of_window(self, step: int) -> int | None:
        """Last step of the window that leaves `step` out; None if it is to be taken."""
        ends = [last for first, last in self.left_out if first <= step <= last]
        return max(ends) if ends else None

    def state(self) -> dict[str, Any]:
        """As plain numbers, for a checkpoint."""
        return {"losses": list(self.losses), "skips": self.skips, "left_out": [list(pair) for pair in self.left_out]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = [float(loss) for loss in state.get("losses", [])][-self.config.spike_window :]
        self.skips = int(state.get("skips", 0))
        self.left_out = [[int(first), int(last)] for first, last in state.get("left_out", [])]

    def _nonfinite(self, loss: float, grad_norm: float) -> Verdict | None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return None
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {grad_norm}"
        return Verdict(self.config.nonfinite, "nonfinite", what)

    def _spike(self, loss: float) -> Verdict | None:
        if self.config.spike == "off" or len(self.losses) < self.config.spike_window:
            return None
        median = statistics.median(self.losses)
        sigma = _SIGMA_OF_MAD * statistics.median(abs(loss - median) for loss in self.losses)
        sigma = max(sigma, _LEAST_SIGMA * abs(median))
        if loss <= median + self.config.spike_sigmas * sigma:
            return None
        why = f"loss {loss:.3f} is {(loss - median) / max(sigma, 1e-300):.1f} deviations above the median {median:.3f}"
        return Verdict(self.config.spike, "spike", f"{why} of the last {len(self.losses)}")

    def _limited(self, verdict: Verdict) -> Verdict:
        most = self.config.max_skips
        if verdict.action == "skip" and self.skips >= most:
            return Verdict("stop", verdict.kind, f"{verdict.why}, after {most} updates left out in a row")
        if verdict.action == "rollback" and len(self.left_out) >= most:
            return Verdict("stop", verdict.kind, f"{verdict.why}, after {most} rollbacks")
        return verdict
