from pathlib import Path

import pytest

from maniple.data import corpus as module
from maniple.data.corpus import is_validation, read_corpus
from maniple.errors import UserError


def names(documents):
    return [document.name for document in documents]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    files = {
        "os.py": "import sys\n",
        "LICENSE.txt": "PSF licence, with a ‘quote’\n",
        "email/architecture.rst": "Architecture\n",
        "copy_of_os.py": "import sys\n",
        "empty.py": "",
        "encodings/cp037.py": "decoding_table = (\n" + "".join(f"    '\\x{i:02x}'\n" for i in range(32)) + ")\n",
        "_sysconfigdata__linux.py": "build_time_vars = {'prefix': '/somewhere'}\n",
        "site-packages/foreign.py": "x = 1\n",
        "lib2to3/tests/data/crlf.py": "print 1\n",
        "test/test_os.py": "import os, unittest\n",
        "test/badsyntax_future.py": "from __future__ import\n",
        "test/notes.txt": "data of a test\n",
        "test/cjkencodings/big5.py": "x\n",
        "image.png": "no text",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("# é\n".encode("latin-1"))
    (tmp_path / "binary.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "surrogate.py").write_bytes(b"'\xed\xa0\x80'\n")
    return tmp_path


def test_takes_text_and_counts_what_it_skips(library):
    corpus = read_corpus(10_000, library)
    taken = names(corpus.train) + names(corpus.validation)
    assert {"LICENSE.txt", "email/architecture.rst", "test/test_os.py"} <= set(taken)
    assert len({"os.py", "copy_of_os.py"} & set(taken)) == 1
    assert len(taken) == 4
    assert (corpus.undecodable, corpus.duplicates, corpus.tables) == (3, 1, 1)
    assert corpus.num_bytes == sum(len(d.text.encode()) for d in corpus.train + corpus.validation)


def test_order_does_not_depend_on_the_file_system(library, monkeypatch):
    first = read_corpus(10_000, library)
    candidates = module._candidates(library)
    monkeypatch.setattr(module, "_candidates", lambda root: candidates[::-1])
    assert read_corpus(10_000, library) == first
    assert names(first.train) == sorted(names(first.train))


def test_budget_holds_and_does_not_move_documents_between_splits():
    large, small = read_corpus(3_000_000), read_corpus(300_000)
    assert 290_000 < small.num_bytes <= 300_000
    assert 2_990_000 < large.num_bytes <= 3_000_000
    assert not set(names(large.train)) & set(names(large.validation))
    assert not set(names(small.train)) & set(names(large.validation))
    assert all(is_validation(d.name) for d in large.validation)
    assert not any(is_validation(d.name) for d in large.train)
    assert not {d.text for d in large.train} & {d.text for d in large.validation}
    assert not any(name.startswith("/") or "site-packages" in name for name in names(large.train))


def test_about_one_document_in_twenty_validates():
    share = sum(is_validation(f"package/module_{i}.py") for i in range(20_000)) / 20_000
    assert abs(share - 0.05) < 0.005


def test_installation_without_sources(tmp_path):
    with pytest.raises(UserError, match="no Python source found"):
        read_corpus(1000, tmp_path)
    with pytest.raises(UserError, match="zipped"):
        read_corpus(1000, tmp_path / "python312.zip")
