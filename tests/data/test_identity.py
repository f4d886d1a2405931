import json
import shutil

import pytest
from tests.data.pairs import job, write_pair, write_tokenizer

from maniple.config.schema import TrainConfig
from maniple.data.identity import check_identity, difference, identity
from maniple.data.sources import prepare_source
from maniple.errors import UserError


@pytest.fixture
def made(tmp_path):
    a, _ = write_pair(tmp_path, [9] * 30, name="a")
    b, _ = write_pair(tmp_path, [9] * 30, name="b", tokens=range(5, 275))
    tokenizer = write_tokenizer(tmp_path, 400)

    def make(train=(a,), validation=(a,), **options):
        options = {"tokenizer": tokenizer} | options
        config = job(options.pop("tokenizer"), train, validation, **options)
        return identity(config, prepare_source(config, tmp_path, True, lambda: None))

    make.a, make.b, make.folder = a, b, tmp_path
    return make


def test_same_data_wherever_they_lie_and_however_they_are_read(made):
    base = made()
    assert json.loads(json.dumps(base)) == base
    moved = made.folder / "moved"
    moved.mkdir()
    for end in (".bin", ".idx"):
        shutil.copy(made.a + end, moved / f"other{end}")
    for same in (
        made((str(moved / "other"),)),
        made(steps=500),
        made(validation=(made.b,)),
        made(("3", made.a)),
        made(num_workers=3, attend_across_documents=False),
    ):
        assert difference(base, same) is None
        assert check_identity(base, same, "refuse") is None


def test_whatever_changes_the_samples_is_named(made):
    base = made(("0.5", made.a, "0.5", made.b))
    cases = [
        (made(("0.5", made.a, "0.5", made.b), seed=2), "seed 1 -> 2"),
        (made(("0.5", made.a, "0.5", made.b), length=16), "sequence_length 8 -> 16"),
        (made(("0.6", made.a, "0.4", made.b)), "training datasets of other weight"),
        (made((made.a,)), "2 training datasets -> 1"),
        (made(("0.5", made.b, "0.5", made.a)), "training datasets of other content"),
        (made(("0.5", made.a, "0.5", made.b), (), split="50,50,0"), "training datasets of other documents"),
        (made(("0.5", made.a, "0.5", made.b), tokenizer=write_tokenizer(made.folder, 401)), "another tokenizer"),
    ]
    for changed, words in cases:
        with pytest.raises(UserError, match="the data are not those that the checkpoint was trained on") as caught:
            check_identity(base, changed, "refuse")
        assert words in str(caught.value)
        assert "data.on_change=continue" in str(caught.value)
        assert "\n" not in str(caught.value)
        warning = check_identity(base, changed, "continue")
        assert words in warning
        assert "\n" not in warning


def test_a_dataset_prepared_anew_is_another(made):
    base = made()
    write_pair(made.folder, [9] * 30, name="a", tokens=range(1, 271))
    assert difference(base, made()) == "training datasets of other content"


def test_sources_without_files(tmp_path):
    def of(**data):
        config = TrainConfig.model_validate({"data": {"source": "synthetic", **data}})
        return identity(config, prepare_source(config, tmp_path, True, lambda: None))

    assert difference(of(), of()) is None
    assert difference(of(), of(sequence_length=32)) == "sequence_length 256 -> 32"
    assert difference(of(), of(tokenizer_vocab_size=500)) == "another tokenizer"
    assert difference({"order": 0}, of())
