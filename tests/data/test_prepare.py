import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from maniple.data import inputs
from maniple.data import prepare as module
from maniple.data.indexed import open_indexed
from maniple.data.prepare import prepare
from maniple.errors import UserError

TEXTS = [f"def f_{i}(x):\n    return x * {i}\n" * (1 + i % 7) for i in range(400)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 4096)


def pair(prefix):
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def documents(prefix, tokenizer):
    file = open_indexed(str(prefix))
    parts = np.split(file.tokens(), np.cumsum(file.lengths)[:-1])
    return [part.tolist() for part in parts]


def prepared(inputs, output, tokenizer, **options):
    return prepare(inputs, output, tokenizer.path, progress=False, **options)


def test_documents_in_order_with_end_tokens(tmp_path, tokenizer, write_lines):
    result = prepared([write_lines("a.jsonl", TEXTS)], tmp_path / "out", tokenizer)
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in TEXTS]
    assert documents(tmp_path / "out", tokenizer) == expected
    assert (result.documents, result.tokens) == (400, sum(map(len, expected)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx"]


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_an_output_that_is_no_prefix(tmp_path, tokenizer, write_lines, ending):
    with pytest.raises(UserError, match=rf"out\{ending} is a prefix, .*: give .*out$"):
        prepared([write_lines("a.jsonl", TEXTS)], tmp_path / f"out{ending}", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_other_key_no_end_token_blank_lines_and_empty_documents(tmp_path, tokenizer):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"body": "one"}\n\n  \n{"body": ""}\n{"body": "zwei ü"}')  # no newline at the end
    result = prepared([lines], tmp_path / "out", tokenizer, key="body", append_eod=False)
    assert documents(tmp_path / "out", tokenizer) == [tokenizer.encode("one"), tokenizer.encode("zwei ü")]
    assert result.documents == 2


def test_folders_text_files_and_gzip(tmp_path, tokenizer, write_lines):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    with gzip.open(folder / "b.jsonl.gz", "wt") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "a.txt").write_text("first\nfile\n")
    (folder / "sub" / "c.md").write_text("# last\n")
    (folder / "ignored.bin").write_bytes(b"\xff")
    extra = write_lines("extra.json", ["extra"])
    prepared([folder, extra], tmp_path / "out", tokenizer)
    expected = ["first\nfile\n", *TEXTS, "# last\n", "extra"]
    assert documents(tmp_path / "out", tokenizer) == [[*tokenizer.encode(text), 0] for text in expected]


def test_workers_change_nothing(tmp_path, tokenizer, write_lines):
    lines = write_lines("a.jsonl", TEXTS)
    one = prepared([lines], tmp_path / "one", tokenizer)
    two = prepared([lines], tmp_path / "two", tokenizer, workers=2)
    assert pair(tmp_path / "one") == pair(tmp_path / "two")
    assert (one.documents, one.tokens) == (two.documents, two.tokens)


def test_error_in_a_worker_names_the_line(tmp_path, tokenizer, write_lines):
    lines = write_lines("a.jsonl", TEXTS)
    with open(lines, "a") as out:
        out.write("{broken\n")
    with pytest.raises(UserError, match=r"a\.jsonl:401: not a line of JSON"):
        prepared([lines], tmp_path / "out", tokenizer, workers=2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", r"a\.jsonl:401: not a line of JSON"),
        (b'{"text": "\xff"}', r"a\.jsonl:401: not a line of JSON in UTF-8"),
        (b'{"body": "x"}', r"a\.jsonl:401: no key 'text' \(found: body\)"),
        (b'["text"]', r"a\.jsonl:401: no key 'text' \(found: list\)"),
        (b'{"text": 3}', r"a\.jsonl:401: 'text' is int"),
        (b"[" * 100_000, r"a\.jsonl:401: "),
    ],
)
def test_bad_line_is_one_line_and_leaves_nothing(tmp_path, tokenizer, write_lines, line, message):
    lines = write_lines("a.jsonl", TEXTS)
    with open(lines, "ab") as out:
        out.write(line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        prepared([lines], tmp_path / "out", tokenizer)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_bad_inputs(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    (tmp_path / "packed.jsonl.zst").write_bytes(b"x")
    before = sorted(tmp_path.iterdir())
    for name, message in {
        "absent.jsonl": "does not exist",
        "empty": "holds no .jsonl",
        "empty.jsonl": "no text in",
        "latin.txt": "not UTF-8",
        "cut.jsonl.gz": "damaged",
        "packed.jsonl.zst": "only .gz",
    }.items():
        with pytest.raises(UserError, match=message):
            prepared([tmp_path / name], tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="no input"):
        prepared([], tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="workers"):
        prepared([tmp_path / "latin.txt"], tmp_path / "out", tokenizer, workers=0)
    assert sorted(tmp_path.iterdir()) == before


def test_document_over_the_limit_is_refused(tmp_path, tokenizer, write_lines, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "long.txt").write_text("x" * 1001)
    with pytest.raises(UserError, match=r"long\.txt is over"):
        prepared([tmp_path / "long.txt"], tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match=r"a\.jsonl:2: a line of over"):
        prepared([write_lines("a.jsonl", ["x", "y" * 1001])], tmp_path / "out", tokenizer)


def test_existing_output_is_kept_unless_overwritten(tmp_path, tokenizer, write_lines):
    prepared([write_lines("a.jsonl", TEXTS)], tmp_path / "out", tokenizer)
    before = pair(tmp_path / "out")
    other = write_lines("b.jsonl", ["other"])
    with pytest.raises(UserError, match="--overwrite"):
        prepared([other], tmp_path / "out", tokenizer)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    with pytest.raises(UserError, match=r"bad\.jsonl:1"):
        prepared([bad], tmp_path / "out", tokenizer, overwrite=True)
    assert pair(tmp_path / "out") == before
    prepared([other], tmp_path / "out", tokenizer, overwrite=True)
    assert documents(tmp_path / "out", tokenizer) == [[*tokenizer.encode("other"), 0]]
    assert not (tmp_path / "out.partial").exists()


class Killed(BaseException):
    """Ends a run without any cleaning up, as a kill does."""


def interrupt(monkeypatch, after):
    """Kills the run at its `after`-th appended chunk, with that chunk half written."""
    append, calls = module._Work.append, []

    def dying(self, encoded, position):
        calls.append(position)
        if len(calls) == after:
            self._files[0].write(encoded.tokens[: len(encoded.tokens) // 2])
            raise Killed
        append(self, encoded, position)

    monkeypatch.setattr(module._Work, "append", dying)


@pytest.mark.parametrize("save_seconds", [0.0, 1e9])
@pytest.mark.parametrize("after", [1, 2, 9])
def test_resumed_run_is_byte_identical(tmp_path, tokenizer, write_lines, monkeypatch, after, save_seconds):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as out:
        out.write(write_lines("plain.jsonl", TEXTS[:150]).read_bytes())
    (tmp_path / "b.txt").write_text("one text file\n")
    files = [tmp_path / "a.jsonl.gz", tmp_path / "b.txt", write_lines("c.jsonl", TEXTS)]
    prepared(files, tmp_path / "whole", tokenizer)
    monkeypatch.setattr(module, "_SAVE_SECONDS", save_seconds)
    with monkeypatch.context() as patch:
        interrupt(patch, after)
        with pytest.raises(Killed):
            prepared(files, tmp_path / "cut", tokenizer)
    assert not (tmp_path / "cut.bin").exists()
    assert not (tmp_path / "cut.idx").exists()
    with pytest.raises(UserError, match="--resume"):
        prepared(files, tmp_path / "cut", tokenizer)
    result = prepared(files, tmp_path / "cut", tokenizer, resume=True)
    assert pair(tmp_path / "cut") == pair(tmp_path / "whole")
    assert result.documents == 551
    assert not (tmp_path / "cut.partial").exists()


def test_resume_continues_instead_of_starting_again(tmp_path, tokenizer, write_lines, monkeypatch):
    lines = write_lines("a.jsonl", TEXTS)
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        interrupt(patch, 6)
        with pytest.raises(Killed):
            prepared([lines], tmp_path / "out", tokenizer)
    starts = []
    read = module.read_chunks
    monkeypatch.setattr(module, "read_chunks", lambda files, start: starts.append(start) or read(files, start))
    prepared([lines], tmp_path / "out", tokenizer, resume=True)
    assert starts[0].offset > 5 * 4096


def test_resume_of_another_job_is_refused(tmp_path, tokenizer, write_lines, monkeypatch):
    lines = write_lines("a.jsonl", TEXTS)
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(Killed):
            prepared([lines], tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="other append_eod"):
        prepared([lines], tmp_path / "out", tokenizer, resume=True, append_eod=False)
    with open(lines, "a") as out:
        out.write('{"text": "more"}\n')
    with pytest.raises(UserError, match="other inputs"):
        prepared([lines], tmp_path / "out", tokenizer, resume=True)
    (tmp_path / "out.partial" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        prepared([lines], tmp_path / "out", tokenizer, resume=True)
    assert prepared([lines], tmp_path / "out", tokenizer, overwrite=True).documents == 401


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_kill_between_the_last_moves(tmp_path, tokenizer, write_lines, monkeypatch, moves):
    lines = write_lines("a.jsonl", TEXTS)
    prepared([lines], tmp_path / "whole", tokenizer)
    real, done = os.replace, []

    def dying(source, target):
        if not str(target).endswith("manifest.json"):
            if len(done) == moves:
                raise Killed
            done.append(target)
        real(source, target)

    def no_cleaning(folder, **_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", dying)
        patch.setattr(module.shutil, "rmtree", no_cleaning)
        with pytest.raises(Killed):
            prepared([lines], tmp_path / "out", tokenizer)
    prepared([lines], tmp_path / "out", tokenizer, resume=True)
    assert pair(tmp_path / "out") == pair(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_full_disk_is_one_line_and_can_be_resumed(tmp_path, tokenizer, write_lines, monkeypatch):
    lines = write_lines("a.jsonl", TEXTS)
    with monkeypatch.context() as patch:

        def full(self, encoded, position):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(module._Work, "append", full)
        with pytest.raises(UserError, match=r"No space left on device; .* --resume") as caught:
            prepared([lines], tmp_path / "out", tokenizer)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.partial"]
    assert prepared([lines], tmp_path / "out", tokenizer, resume=True).documents == 400


def test_output_folder_that_cannot_be_made(tmp_path, tokenizer, write_lines):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        prepared([write_lines("a.jsonl", TEXTS)], tmp_path / "file" / "out", tokenizer)


def test_memory_does_not_grow_with_documents(tmp_path, tokenizer):
    peaks = []
    for documents in (10_000, 40_000):
        lines = tmp_path / f"{documents}.jsonl"
        lines.write_bytes(b'{"text": "x"}\n' * documents)
        tracemalloc.start()
        result = prepared([lines], tmp_path / f"out{documents}", tokenizer)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.documents == documents
    # Python lists of lengths, offsets and bounds would be about 100 bytes a document: 3 MB more.
    assert peaks[1] < peaks[0] + (1 << 19)


_SLOW_RUN = """
import sys, time
from maniple.data import inputs
from maniple.data import prepare as module
if __name__ == "__main__":
    inputs.CHUNK_BYTES, module._SAVE_SECONDS = 4096, 0.0
    append = module._Work.append
    def slowly(self, encoded, position):
        append(self, encoded, position)
        time.sleep(0.05)
    module._Work.append = slowly
    module.prepare([sys.argv[1]], sys.argv[2], sys.argv[3], workers=2, progress=False)
"""


def test_killed_process_resumes_and_leaves_no_workers(tmp_path, tokenizer, write_lines):
    lines = write_lines("a.jsonl", TEXTS)
    prepared([lines], tmp_path / "whole", tokenizer)
    script = tmp_path / "run.py"
    script.write_text(_SLOW_RUN)
    command = [sys.executable, str(script), str(lines), str(tmp_path / "out"), tokenizer.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        manifest = tmp_path / "out.partial" / "manifest.json"
        deadline = time.monotonic() + 60
        while not (manifest.exists() and json.loads(manifest.read_text())["documents"] > 0):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        # The pipe closes once the last worker, which inherited it, is gone.
        process.communicate(timeout=30)
    assert not (tmp_path / "out.idx").exists()
    prepared([lines], tmp_path / "out", tokenizer, resume=True)
    assert pair(tmp_path / "out") == pair(tmp_path / "whole")
