"""The best stages and recomputed layers of a linear model (`search_linear`), as a small integer program.

Of each stage and run of units alike: how many are held (n), how many of these are computed again (y), and whether the
run has ended by then (z), without which the next run cannot begin. Least is the time of the slowest rank and, of an
interleaved pipeline, of each turn's slowest pair of passes; every rank's fullest moment stays below the ceiling. HiGHS
solves it (https://highs.dev), in one thread and to the same result every time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from maniple.plan.search_linear import Cut, Linear

if TYPE_CHECKING:
    import highspy

NODES = 100
_GAP = 1e-3  # share of the time that a better solution has to save to be looked for
_UNIT = 2.0**30  # bytes, so that all numbers are of like size


@dataclass(frozen=True)
class Solution:
    """seconds: of the linear model, or a bound of it if `relaxed`; missing: bytes that the best still lacks (only where
    `solve` was asked for the least); cut: None where there is none, and if relaxed."""

    seconds: float
    missing: float
    cut: Cut | None
    proven: bool


Goal = Literal["seconds", "memory"]


def solve(
    linear: Linear,
    goal: Goal = "seconds",
    *,
    relaxed: bool = False,
    fixed: Cut | None = None,
    start: Cut | None = None,
    nodes: int = NODES,
) -> Solution | None:
    """The cut that takes least time, None where no cut fits.

    goal: `seconds` of the linear model, or, where nothing fits, least `memory` above the ceiling.
    relaxed: parts of units may be cut, which is quick and bounds the answer. fixed: the stages are its own, and only
    recomputation is free. start: a cut that fits, to begin with. nodes: of the branching, after which the best that was
    found is taken.
    """
    program = _Program()
    columns = _columns(program, linear, fixed)
    _order(program, linear, columns)
    over = _memory(program, linear, columns, free=goal == "memory")
    time = _time(program, linear, columns)
    program.cost[over if goal == "memory" else time] = 1.0
    values, proven = program.solve(relaxed, nodes, {} if start is None else columns.of(start))
    if values is None:
        return None
    missing = values[over] * _UNIT if goal == "memory" else 0.0
    if relaxed:
        return Solution(values[time], missing, None, proven)
    cut = Cut(
        *(
            tuple(
                tuple(round(values[table[stage, run]]) for run in range(len(linear.runs)))
                for stage in range(linear.stages)
            )
            for table in (columns.held, columns.again)
        )
    )
    return Solution(linear.seconds(cut), missing, cut, proven)


@dataclass(frozen=True)
class _Columns:
    held: Mapping[tuple[int, int], int]  # by stage and run
    again: Mapping[tuple[int, int], int]
    ended: Mapping[tuple[int, int], int]

    def of(self, cut: Cut) -> dict[int, float]:
        """What each column of a cut is, but for those of `ended`, which follow."""
        tables = ((self.held, cut.held), (self.again, cut.again))
        return {column: float(rows[stage][run]) for table, rows in tables for (stage, run), column in table.items()}


def _columns(program: _Program, linear: Linear, fixed: Cut | None) -> _Columns:
    held, again, ended = {}, {}, {}
    for stage in range(linear.stages):
        for index, run in enumerate(linear.runs):
            least, most = 0, run.length if stage in run.stages else 0
            if stage == index == 0:
                least = 1  # the embedding is with a layer
            if fixed is not None:
                least = most = fixed.held[stage][index]
            held[stage, index] = program.column(least, most, whole=True)
            again[stage, index] = program.column(0, most if linear.recomputes else 0, whole=True)
            if index + 1 < len(linear.runs):
                ended[stage, index] = program.column(0, 1, whole=True)
    return _Columns(held, again, ended)


def _order(program: _Program, linear: Linear, columns: _Columns) -> None:
    last = linear.stages - 1
    until: dict[tuple[int, int], int] = {}  # how many units of a run this stage and those before hold
    for stage in range(linear.stages):
        if stage < last:
            program.row({columns.held[stage, index]: 1.0 for index in range(len(linear.runs))}, least=1.0)
        for index, run in enumerate(linear.runs):
            until[stage, index] = program.column(0 if stage < last else run.length, run.length)
            sums = {until[stage, index]: 1.0, columns.held[stage, index]: -1.0}
            program.row(sums | ({until[stage - 1, index]: -1.0} if stage else {}), 0.0, 0.0)
            if linear.recomputes:
                program.row({columns.again[stage, index]: 1.0, columns.held[stage, index]: -1.0}, most=0.0)
            if index:
                ended = columns.ended[stage, index - 1]
                program.row({until[stage, index - 1]: 1.0, ended: -float(linear.runs[index - 1].length)}, least=0.0)
                program.row({until[stage, index]: 1.0, ended: -float(run.length)}, most=0.0)


def _memory(program: _Program, linear: Linear, columns: _Columns, *, free: bool) -> int:
    """Returns the column of bytes above the ceiling."""
    over = program.column(0.0, None if free else 0.0)
    for rank in range(linear.pipeline):
        stages = range(rank, linear.stages, linear.pipeline)
        for moment in linear.moments[rank]:
            weights = {over: -1.0}
            rest = linear.ceiling - linear.constant[rank] - moment.beside
            for stage, waiting in zip(stages, moment.waiting, strict=True):
                rest -= waiting * linear.kept[stage]
                for index, run in enumerate(linear.runs):
                    weights[columns.held[stage, index]] = (run.states + waiting * run.kept) / _UNIT
                    weights[columns.again[stage, index]] = -waiting * run.spared / _UNIT
            program.row(weights, most=rest / _UNIT)
    return over


def _time(program: _Program, linear: Linear, columns: _Columns) -> int:
    """Returns the column of the pipeline's seconds."""
    seconds = program.column(0.0, None)

    def add(weights: dict[int, float], stage: int, forward: float, backward: float) -> float:
        """Adds so many of a stage's passes to `weights`; returns what of them is there in any cut."""
        for index, run in enumerate(linear.runs):
            for column, value in (
                (columns.held[stage, index], forward * run.forward + backward * run.backward),
                (columns.again[stage, index], backward * run.again),
            ):
                weights[column] = weights.get(column, 0.0) + value
        return forward * linear.forward[stage] + backward * linear.backward[stage]

    ranks, number = linear.pipeline, linear.micro_batches
    around = (ranks - 1) * linear.travel
    if linear.chunks == 1:
        path: dict[int, float] = {}
        around += sum(add(path, rank, 1, 1) for rank in range(ranks))
        for rank in range(ranks):
            weights, rest = dict(path), number - min(number, ranks - rank)
            there = around + rest * linear.sends[rank] + add(weights, rank, rest, number - 1)
            program.row(weights | {seconds: -1.0}, most=-there)
        return seconds
    longest = {turn: program.column(0.0, None) for turn, *_ in linear.pairs()}
    for turn, rank, ahead, back in linear.pairs():
        pair: dict[int, float] = {}
        there = add(pair, back * ranks + rank, 0, 1)
        there += 0.0 if ahead is None else add(pair, ahead * ranks + rank, 1, 0)
        program.row(pair | {longest[turn]: -1.0}, most=-there)
    turns = {column: float(ranks * (linear.groups - (turn > 0))) for turn, column in longest.items()}
    for chunk, forward in itertools.product(range(linear.chunks - 1), (0, 1)):
        most = program.column(0.0, None)
        turns[most] = float(ranks)
        for stage in range(chunk * ranks, (chunk + 1) * ranks):
            one: dict[int, float] = {}
            there = add(one, stage, forward, 1 - forward)
            program.row(one | {most: -1.0}, most=-there)
    for chunk in range(linear.chunks):
        begun: dict[int, float] = {}
        there = around + sum(add(begun, chunk * ranks + rank, 1, 1) for rank in range(ranks - 1))
        program.row(begun | turns | {seconds: -1.0}, most=-there)
    return seconds


@dataclass
class _Program:
    """Columns and rows of min cost x, least <= A x <= most."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    cost: dict[int, float] = field(default_factory=dict)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, least: float, most: float | None, *, whole: bool = False) -> int:
        self.lower.append(float(least))
        self.upper.append(float("inf") if most is None else float(most))
        self.whole.append(whole)
        return len(self.lower) - 1

    def row(self, weights: Mapping[int, float], least: float | None = None, most: float | None = None) -> None:
        self.rows.append(
            (
                {column: weight for column, weight in weights.items() if weight},
                -float("inf") if least is None else float(least),
                float("inf") if most is None else float(most),
            )
        )

    def solve(self, relaxed: bool, nodes: int, start: Mapping[int, float]) -> tuple[list[float] | None, bool]:
        """(values of all columns or None where there are none, whether none are better)."""
        import highspy
        import numpy as np

        class Quiet(highspy.Highs):
            def enableCallbacks(self) -> None:  # called at construction: it would print who it is, and take long
                self.setOptionValue("output_flag", False)

        failed = highspy.HighsModelStatus.kSolveError
        for presolve in ("choose", "off"):  # HiGHS 1.16 fails to solve one in a hundred of these after its own presolve
            solver = Quiet()
            for option, value in (
                ("threads", 1),
                ("random_seed", 0),
                ("presolve", presolve),
                ("mip_max_nodes", nodes),
                ("mip_rel_gap", _GAP),
            ):
                solver.setOptionValue(option, value)
            solver.passModel(self._model(highspy, relaxed))
            if start:
                solver.setSolution(len(start), np.array(list(start)), np.array(list(start.values())))
            solver.run()
            status = solver.getModelStatus()
            if status != failed:
                break
        assert status != failed, "HiGHS failed with presolve and without"
        proven = status == highspy.HighsModelStatus.kOptimal
        found = solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return (list(solver.getSolution().col_value), proven) if found else (None, proven)

    def _model(self, highspy: Any, relaxed: bool) -> highspy.HighsLp:
        import numpy as np

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.lower), len(self.rows)
        model.col_cost_ = np.array([self.cost.get(column, 0.0) for column in range(len(self.lower))])
        model.col_lower_, model.col_upper_ = np.array(self.lower), np.array(self.upper)
        model.row_lower_ = np.array([least for _, least, _ in self.rows])
        model.row_upper_ = np.array([most for _, _, most in self.rows])
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = model.num_col_, model.num_row_
        matrix.start_ = np.cumsum([0, *(len(weights) for weights, _, _ in self.rows)])
        matrix.index_ = np.array([column for weights, _, _ in self.rows for column in weights])
        matrix.value_ = np.array([weight for weights, _, _ in self.rows for weight in weights.values()])
        if not relaxed:
            kinds = highspy.HighsVarType
            model.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self.whole]
        return model
