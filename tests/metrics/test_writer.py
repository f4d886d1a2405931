import errno
import json
import logging
import multiprocessing
import os
import resource
import shutil
from pathlib import Path

import pytest

from maniple.errors import UserError
from maniple.metrics import MetricsWriter, read_metrics, setup_logging
from maniple.metrics.folder import RunLock, cannot_write


@pytest.fixture(autouse=True)
def _restore_logging():
    logger = logging.getLogger("maniple")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def steps(path):
    return [record["step"] for record in read_metrics(path)]


def test_each_record_is_on_disk_when_log_returns(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.log(1, {"loss": 2.5, "expert_counts": [[1, 2], [3, 0]]})
        (record,) = map(json.loads, writer.path.read_text().splitlines())
    assert record.pop("time") > 1e9
    assert record == {"step": 1, "loss": 2.5, "expert_counts": [[1, 2], [3, 0]]}


def test_resuming_keeps_the_past_and_drops_what_will_be_made_again(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.log(step, {"loss": 1.0})
    with MetricsWriter(tmp_path, resumed_step=3) as writer:
        writer.log(4, {"loss": 9.0})
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["loss"] == 9.0


def test_a_new_run_in_the_same_folder_sets_the_former_aside(tmp_path):
    for first_step in (1, 10, 20):
        with MetricsWriter(tmp_path) as writer:
            writer.log(first_step, {"loss": 1.0})
    assert steps(tmp_path / "metrics.jsonl") == [20]
    assert steps(tmp_path / "metrics.1.jsonl") == [1]
    assert steps(tmp_path / "metrics.2.jsonl") == [10]


def test_other_ranks_write_their_log_and_nothing_else(tmp_path):
    setup_logging(tmp_path, rank=3)
    with MetricsWriter(tmp_path, rank=3, tensorboard=True) as writer:
        writer.log(7, {"loss": 1.25, "expert_counts": [[1]]})
    text = (tmp_path / "logs" / "rank_3.log").read_text()
    assert "rank 3" in text
    assert "step=7 loss=1.25" in text
    assert "expert_counts" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_logging_again_appends_and_does_not_double(tmp_path):
    for word in ("first", "second"):
        setup_logging(tmp_path, rank=0).info(word)
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["first", "second"]


def test_the_terminal_has_rank_0_and_warnings_of_others_only(tmp_path, capsys):
    setup_logging(tmp_path, rank=0)
    logging.getLogger("maniple.train").info("reads synthetic data [not text]")
    MetricsWriter(tmp_path).log(1, {"loss": 1.0})
    assert capsys.readouterr() == ("", "reads synthetic data [not text]\n")
    log = setup_logging(tmp_path, rank=2)
    log.info("quiet")
    log.warning("loud")
    assert capsys.readouterr() == ("", "warning: rank 2: loud\n")


def test_tensorboard_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in (1, 2):
            writer.log(step, {"loss": 3.0 / step, "data": "synthetic", "expert_counts": [[1, 2]]})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 1.5)]


def test_a_run_has_one_writer_at_a_time(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"loss": 1.0})
        with pytest.raises(UserError, match="another job is writing this run"):
            MetricsWriter(tmp_path, resumed_step=0)
        MetricsWriter(tmp_path, rank=1).close()  # of the same job
    assert steps(tmp_path / "metrics.jsonl") == [1]
    MetricsWriter(tmp_path).close()


def test_a_lock_that_was_taken_before_is_the_writers(tmp_path):
    run_dir = tmp_path / "run"
    lock = RunLock(run_dir)  # of a folder that is not there
    assert not run_dir.exists()
    with MetricsWriter(run_dir, lock=lock) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"loss": 1.0})
        writer.go_back(1)
        with pytest.raises(UserError, match="another job is writing this run"):
            RunLock(run_dir)  # held all the time
        writer.log(2, {"loss": 2.0})
    assert steps(writer.path) == [1, 2]
    RunLock(run_dir).close()


def _write_on_a_full_disk(run_dir: Path, words: multiprocessing.Queue) -> None:
    """With a limit of file sizes in the disk's place: it is met in the middle of a record, and lifted later."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = MetricsWriter(run_dir)
    log = setup_logging(run_dir, 0)
    said = logging.Handler(logging.WARNING)
    said.emit = lambda record: words.put(record.getMessage())
    log.addHandler(said)
    writer.log(1, {"loss": 1.0, "pad": "x" * 100_000})  # what the screen is told, into a file here, is shorter
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 10, limits[1]))
    for step in (2, 3):
        writer.log(step, {"loss": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.log(4, {"loss": 1.0})
    writer.close()
    words.put(None)


def test_a_full_disk_costs_records_and_not_the_run(tmp_path, capfd):
    context = multiprocessing.get_context("spawn")
    words = context.Queue()
    process = context.Process(target=_write_on_a_full_disk, args=(tmp_path / "run", words))
    process.start()
    said = list(iter(lambda: words.get(timeout=60), None))
    process.join()
    assert process.exitcode == 0
    assert [text.partition(": ")[2] for text in said] == [
        "File too large: records of this run are lost until that is mended; training goes on"
    ]
    assert steps(tmp_path / "run" / "metrics.jsonl") == [1, 4]
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("rank_0.log: File too large: lines of this log are lost") == 1


@pytest.mark.parametrize("what", ["the file", "the folder"])
def test_records_go_on_where_a_run_was_removed(tmp_path, what, capsys):
    run_dir = tmp_path / "run"
    with MetricsWriter(run_dir) as writer:
        writer.log(1, {"loss": 1.0})
        setup_logging(tmp_path / "logs", 0)
        writer.path.unlink() if what == "the file" else shutil.rmtree(run_dir)
        for step in (2, 3):
            writer.log(step, {"loss": 1.0})
        with pytest.raises(UserError, match="another job is writing this run"):
            RunLock(run_dir)
    assert steps(writer.path) == [2, 3]
    assert capsys.readouterr().err.count("was removed in mid-run: its records until now are lost") == 1


def test_which_errors_are_the_users(tmp_path):
    for name in ("ENOSPC", "EFBIG", "EISDIR", "EIO", "ELOOP", "EACCES"):
        assert cannot_write(OSError(getattr(errno, name), "x"), tmp_path), name
    assert not cannot_write(OSError(errno.EBADF, "x"), tmp_path)
    for path, own in ((tmp_path / "metrics.jsonl", True), (os.fsencode(tmp_path / "a"), True), ("/x/gcc", False)):
        assert cannot_write(FileNotFoundError(errno.ENOENT, "x", path), tmp_path) is own
    assert not cannot_write(FileNotFoundError(errno.ENOENT, "x"), tmp_path)


@pytest.mark.parametrize("name", ["file/run", "n" * 300])
def test_a_folder_that_cannot_be_made(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"set output_dir \(and name\) to a folder that can be written"):
        setup_logging(tmp_path / name, 0)
