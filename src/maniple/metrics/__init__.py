"""A run's numbers: records and logs (`writer`), expert balance, the progress line, the picture and the summary."""

from maniple.metrics.balance import ExpertBalance, expert_balance
from maniple.metrics.figure import NothingToDraw, draw_curves
from maniple.metrics.progress import TrainProgress
from maniple.metrics.records import read_metrics
from maniple.metrics.summary import environment, peak_memory_bytes, write_summary
from maniple.metrics.writer import MetricsWriter, console, setup_logging

__all__ = [
    "ExpertBalance",
    "MetricsWriter",
    "NothingToDraw",
    "TrainProgress",
    "console",
    "draw_curves",
    "environment",
    "expert_balance",
    "peak_memory_bytes",
    "read_metrics",
    "setup_logging",
    "write_summary",
]
