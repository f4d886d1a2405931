"""Job files: precedence by what was set, provenance of each value, and one line for each mistake."""

import re
import typing
from pathlib import Path

import pytest

from maniple.config import load as config_load
from maniple.config.load import PRESETS, Origin, load, presets
from maniple.config.reference import keys
from maniple.config.schema import TrainConfig
from maniple.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write_(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_


def refusal(path=None, overrides=()):
    with pytest.raises(UserError) as caught:
        load(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_number_has_an_upper_bound():
    unbounded = [
        key
        for key, field in keys(TrainConfig)
        if {int, float} & {field.annotation, *typing.get_args(field.annotation)}
        and not any(getattr(limit, name, None) is not None for limit in field.metadata for name in ("le", "lt"))
    ]
    assert unbounded == ["recompute.layers", "train.seed"]  # `check` bounds these


def test_defaults_alone():
    loaded = load(None)
    assert loaded.config.train.steps == 100
    assert set(loaded.origin.values()) == {Origin("default")}
    assert "model.overrides" in loaded.origin
    assert list(loaded.values()) == list(loaded.origin)


def test_each_layer_beats_the_one_below(write):
    write("base.yaml", "train: {steps: 1, seed: 1, eval_batches: 1}\n")
    job = write("job.yaml", "extends: base.yaml\ntrain:\n  steps: 2\n  seed: 2\n")
    loaded = load(job, ["train.steps=3"])
    train = loaded.config.train
    assert (train.steps, train.seed, train.eval_batches, train.micro_batch_size) == (3, 2, 1, 1)
    assert [loaded.origin[f"train.{key}"] for key in ("steps", "seed", "eval_batches", "micro_batch_size")] == [
        Origin("cli"),
        Origin("file", f"{job}:4"),
        Origin("preset", f"{job.parent / 'base.yaml'}:1"),
        Origin("default"),
    ]


def test_a_value_set_to_its_default_still_beats_the_preset(write):
    write("base.yaml", "train: {steps: 7}\nparallel: {pipeline_layout: EttL}\n")
    job = write("job.yaml", "extends: base.yaml\ntrain: {steps: 100}\nparallel: {pipeline_layout: null}\n")
    loaded = load(job)
    assert loaded.config.train.steps == 100
    assert loaded.config.parallel.pipeline_layout is None
    assert loaded.origin["train.steps"].kind == loaded.origin["parallel.pipeline_layout"].kind == "file"
    on_top = load(job, ["train.steps=100"])
    assert on_top.origin["train.steps"] == Origin("cli")


def test_the_last_override_wins():
    assert load(None, ["train.steps=3", "train.steps=4"]).config.train.steps == 4


def test_extends_a_list_of_which_the_later_wins_and_a_shared_base_is_no_cycle(write):
    write("root.yaml", "train: {seed: 5}\n")
    write("a.yaml", "extends: root.yaml\ntrain: {steps: 1, eval_batches: 1}\n")
    write("sub/b.yaml", "extends: ../root.yaml\ntrain: {steps: 2}\n")
    job = write("job.yaml", "extends: [a.yaml, sub/b.yaml]\n")
    train = load(job).config.train
    assert (train.steps, train.eval_batches, train.seed) == (2, 1, 5)


def test_extends_a_shipped_preset(write):
    loaded = load(write("job.yaml", "extends: laptop\n"))
    assert loaded.config.precision.dtype == "fp32"
    origin = loaded.origin["precision.dtype"]
    assert origin.kind == "preset"
    assert re.fullmatch(r"laptop\.yaml:\d+", origin.source)
    assert str(origin) == f"preset {origin.source}"


@pytest.mark.parametrize("name", presets())
def test_every_shipped_preset_loads(name):
    assert load(PRESETS / f"{name}.yaml").config


def test_extends_cycles_are_named(write):
    write("b.yaml", "extends: c.yaml\n")
    write("c.yaml", "extends: b.yaml\n")
    job = write("a.yaml", "extends: b.yaml\n")
    assert "b.yaml -> c.yaml -> b.yaml" in refusal(job)
    assert "self.yaml -> self.yaml" in refusal(write("self.yaml", "extends: self.yaml\n"))


@pytest.mark.parametrize(
    ("extends", "says"),
    [
        ("labtop", "did you mean 'laptop'?"),
        ("zzz", "shipped presets: laptop, pretrain"),
        ("gone.yaml", "no such file 'gone.yaml'"),
        ("3", "expected a file, a preset, or a list of them, got 3"),
        ("[laptop, 3]", "expected a file, a preset, or a list of them"),
        ("null", "got nothing (null)"),
    ],
)
def test_extends_of_something_else(write, extends, says):
    message = refusal(write("job.yaml", f"name: a\nextends: {extends}\n"))
    assert says in message
    assert "job.yaml:2: extends" in message


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trian", "'train'"),
        ("train.stepz", "'train.steps'"),
        ("train.learning_rate", "'optimizer.learning_rate'"),
        ("num_layers", "'model.overrides.num_layers'"),
        ("model.overrides.num_layer", "'model.overrides.num_layers'"),
        ("model.overrides.moe.top_k", "'model.overrides.moe.topk'"),
        ("model.overrides.moe.router.num_group", "'model.overrides.moe.router.num_groups'"),
        ("model.overrides.mla.kv_rank", "'model.overrides.mla.kv_lora_rank'"),
        ("model.overrides.rope.yarn.facto", "'model.overrides.rope.yarn.factor'"),
        ("extends", "valid keys here: name, output_dir, model"),
        ("parallel.tp", "'parallel.tensor_parallel_size'?"),
        ("parallel.pp", "'parallel.pipeline_parallel_size'?"),
        ("parallel.vpp", "'parallel.virtual_pipeline_size'?"),
        ("parallel.cp", "'parallel.context_parallel_size'?"),
        ("parallel.ep", "'parallel.expert_parallel_size'?"),
        ("parallel.etp", "'parallel.expert_tensor_parallel_size'?"),
        ("lr", "mean 'optimizer.learning_rate'?"),
        ("optimizer.lr", "mean 'optimizer.learning_rate'?"),
        ("train.lr", "mean 'optimizer.learning_rate'?"),
        ("checkpoint.interval", "mean 'checkpoint.save_interval'?"),
        ("checkpoint.save_every", "mean 'checkpoint.save_interval'?"),
        ("guard.interval", "mean 'log.interval'?"),
        ("train.xy", "valid keys here: steps"),
    ],
)
def test_an_unknown_key_at_any_depth_names_the_nearest(write, key, near):
    message = refusal(None, [f"{key}=1"])
    assert message.startswith(f"command line: unknown key '{key}'; ")
    assert near in message
    if key != "extends":
        depth = key.count(".")
        text = "name: x\n" + "".join(f"{'  ' * i}{part}:\n" for i, part in enumerate(key.split(".")))[:-1] + " 1\n"
        message = refusal(write("job.yaml", text))
        assert f"job.yaml:{depth + 2}: unknown key '{key}'" in message
        assert near in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=abc", "train.steps: expected a whole number, got 'abc'"),
        ("train.steps=true", "train.steps: expected a whole number, got true"),
        ("train.steps=1.0", "train.steps: expected a whole number, got 1.0"),
        ("train.steps=", "train.steps: expected a whole number, got nothing (null)"),
        ("train.steps='3'", "train.steps: expected a whole number, got '3'"),
        ("train.steps=0", "train.steps: expected at least 1, got 0"),
        ("train.steps={a: 1}", "train.steps: expected a whole number, got {'a': 1}"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate: expected a number, got true"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: expected more than 0"),
        ("optimizer.beta1=1", "optimizer.beta1: expected less than 1"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: expected a finite number"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: expected a finite number"),
        ("log.progress=1", "log.progress: expected true or false, got 1"),
        ("name=7", "name: expected text (numbers and dates in quotes), got 7"),
        ("name=no", "name: expected text (numbers and dates in quotes), got false"),
        ("name=../up", "name: expected letters, digits"),
        ("output_dir=3", "output_dir: expected"),
        ('output_dir="a\\0b"', "output_dir: 'a\\x00b' holds a control character"),
        ('data.cache_dir="a\\nb"', "data.cache_dir: 'a\\nb' holds a control character"),
        (f"data.tokenizer={'t' * 300}", "has a name of more than 240 bytes"),
        (f"data.train=[1, x/{'t' * 300}]", "has a name of more than 240 bytes"),
        (f"name={'n' * 201}", "name: "),
        ("parallel.collective_timeout_seconds=1e300", "parallel.collective_timeout_seconds: expected at most 2592000"),
        ("data.num_workers=257", "data.num_workers: expected at most 256, got 257"),
        ("data.sequence_length=16777217", "data.sequence_length: expected at most 16777216"),
        ("train.eval_batches=100000000000000000000", "train.eval_batches: expected at most"),
        ("model.vocab_size_multiple=100000000000000000000", "model.vocab_size_multiple: expected at most"),
        ("optimizer.learning_rate=1e300", "optimizer.learning_rate: expected at most 1000"),
        ("precision.dtype=fp16", "precision.dtype: expected 'bf16' or 'fp32', got 'fp16'"),
        ("data.train=a", "data.train: expected a list, got 'a'; write data.train=[a]"),
        ("recompute.layers=3", "recompute.layers: expected a list, got 3; write recompute.layers=[3]"),
        ("recompute.layers=true", "recompute.layers: expected a list, got true"),
        ("data.train=[a, true]", "data.train[1]: expected text"),
        ("parallel=3", "parallel: expected a mapping of keys, got 3"),
        ("parallel=null", "parallel: expected a mapping of keys, got nothing (null)"),
        ("model.overrides=[1]", "model.overrides: expected a mapping of keys, got [1]"),
        ("model.overrides=null", "model.overrides: expected a mapping of keys"),
        ("model.overrides.moe=8", "model.overrides.moe: expected a mapping of keys, got 8"),
        ("model.overrides.num_layers=true", "model.overrides.num_layers: expected a whole number, got true"),
        ("model.overrides.moe.topk=two", "model.overrides.moe.topk: expected a whole number, got 'two'"),
        ("model.overrides.rope.base=.inf", "model.overrides.rope.base: expected a finite number"),
        ('model.overrides.name="a\\nb"', "model.overrides.name: "),
        ("model.overrides.mla.kv_lora_rank=0", "model.overrides.mla.kv_lora_rank: expected at least 1, got 0"),
        ("train.steps=!!binary aGk=", "train.steps: expected plain data, got b'hi'"),
        ("train.steps", "expected key=value, as in train.steps=100, got 'train.steps'"),
        ("=3", "expected key=value"),
        ("train.steps=[", "train.steps: "),
        ("train.steps=*a", "aliases (*name) are not read here"),
        ("train.steps=!!python/object:os.x {}", "could not determine a constructor"),
        ("train={steps: 1, steps: 2}", "train: key 'steps' is given twice"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_key(override, says):
    message = refusal(None, [override])
    assert message.startswith("command line: ")
    assert says in message


def test_every_alias_leads_to_a_key():
    assert set(config_load._ALIASES.values()) <= set(config_load._all_keys())
    assert not set(config_load._ALIASES) & {key.rpartition(".")[2] for key in config_load._all_keys()}


def test_a_wrong_value_in_a_file_names_file_and_line(write):
    job = write("job.yaml", "name: x\ntrain:\n  # how long\n  steps: many\n")
    assert refusal(job) == f"{job}:4: train.steps: expected a whole number, got 'many'"


def test_a_wrong_value_in_a_base_is_an_error_even_if_overridden(write):
    write("base.yaml", "train: {steps: many}\n")
    job = write("job.yaml", "extends: base.yaml\ntrain: {steps: 3}\n")
    assert "base.yaml:1: train.steps" in refusal(job)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty; a job file sets at least one key"),
        (b"# nothing\n", "empty"),
        (b"- a\n- b\n", "expected a mapping of keys at the top, got ['a', 'b']"),
        (b"steps\n", "expected a mapping of keys at the top, got 'steps'"),
        (b"name: a\nname: b\n", ":2: key 'name' is given twice"),
        (b"train:\n  steps: 1\n  seed: 2\n  steps: 3\n", ":4: key 'steps' is given twice"),
        (b"name: [a\ntrain: b\n", ":2: "),
        (b"name: a\n\ttrain: 1\n", ":2: found character '\\t'"),
        (b"name: caf\xe9\n", "not UTF-8 text (byte 9)"),
        (b"\x00\x01", "special characters are not allowed"),
        (b"1: x\nname: y\n", ":1: a key must be text, and '1' is not"),
        (b"? [a]\n: x\n", ":1: a key must be plain text"),
        (b"base: &b {steps: 1}\ntrain: *b\n", ":2: aliases (*name) are not read here; use extends"),
        (b"train: {<<: {steps: 1}}\n", "a key must be plain text"),
        (b"a: 1\n---\nb: 2\n", "but found another document"),
        (b"train: {steps: " + b"9" * 5000 + b"}\n", "Exceeds the limit"),
        (b"a: " + b"[" * 3000, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, content, says):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(str(path))
    assert says in message


def test_no_file_and_a_folder(tmp_path):
    assert refusal(tmp_path / "job.yaml") == f"{tmp_path}/job.yaml: no such file; give the path of a job file (YAML)"
    assert refusal(tmp_path) == f"{tmp_path}: a folder, not a job file; give the path of a YAML file"
    (tmp_path / "file").write_text("x")
    assert "cannot be read: Not a directory" in refusal(tmp_path / "file" / "job.yaml")


def test_numbers_of_yaml_1_2():
    config = load(None, ["optimizer.learning_rate=1e-4", "optimizer.epsilon=1E-9", "optimizer.weight_decay=0"]).config
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.epsilon == 1e-9
    assert config.optimizer.weight_decay == 0
    assert load(None, ["model.overrides.norm_eps=1e-5"]).config.model.overrides == {"norm_eps": 1e-5}


def test_text_that_looks_like_something_else():
    config = load(
        None,
        ["data.source=megatron", "data.split=949,50,1", "checkpoint.resume=2024-01-01", "train.sample_prompt='def '"],
    ).config
    assert config.data.split == "949,50,1"
    assert config.checkpoint.resume == "2024-01-01"
    assert config.train.sample_prompt == "def "
    assert load(None, ["parallel.pipeline_layout=Et*3|(tt|)*29,m|L"]).config.parallel.pipeline_layout == (
        "Et*3|(tt|)*29,m|L"
    )


def test_blends_take_their_weights_as_numbers():
    loaded = load(None, ["data.train=[0.7, a, 3, b]"])
    assert loaded.config.data.train == ["0.7", "a", "3", "b"]
    assert loaded.values()["data.train"] == ["0.7", "a", "3", "b"]


def test_overrides_of_the_card_merge_key_by_key(write):
    write("base.yaml", "model: {overrides: {num_layers: 4, moe: {topk: 2, num_experts: 8}, mla: {kv_lora_rank: 8}}}\n")
    job = write("job.yaml", "extends: base.yaml\nmodel: {overrides: {moe: {topk: 4}, mla: null}}\n")
    loaded = load(job, ["model.overrides.moe.router.num_groups=2"])
    assert loaded.config.model.overrides == {
        "num_layers": 4,
        "moe": {"num_experts": 8, "topk": 4, "router": {"num_groups": 2}},
        "mla": None,
    }
    kinds = {key: origin.kind for key, origin in loaded.origin.items() if key.startswith("model.overrides")}
    assert kinds == {
        "model.overrides.num_layers": "preset",
        "model.overrides.moe.num_experts": "preset",
        "model.overrides.moe.topk": "file",
        "model.overrides.moe.router.num_groups": "cli",
        "model.overrides.mla": "file",
    }
    again = load(job, ["model.overrides.mla={kv_lora_rank: 3}"])
    assert again.config.model.overrides["mla"] == {"kv_lora_rank": 3}
    assert again.origin["model.overrides.mla.kv_lora_rank"] == Origin("cli")


def test_lists_are_replaced_whole(write):
    write("base.yaml", "recompute: {granularity: selective, modules: [core_attn, moe]}\n")
    job = write("job.yaml", "extends: base.yaml\nrecompute: {modules: [mlp]}\n")
    assert load(job).config.recompute.modules == ["mlp"]


def test_bom_is_no_part_of_the_first_key(tmp_path):
    path = Path(tmp_path / "job.yaml")
    path.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert load(path).config.name == "x"


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: a\n#" + "x" * (1 << 20))
    assert refusal(path) == f"{path}: larger than 1 MiB, so no job file; give the path of a YAML file"
    assert "larger than 1 MiB" in refusal(Path("/dev/zero"))  # endless


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        ("data: {split: '9,1,0'}", [], r"job\.yaml:1: data\.split is read with data\.source megatron only, not python"),
        ("data: {source: synthetic, split: '9,1,0'}", [], "megatron only, not synthetic"),
        ("data: {source: megatron, validation: [a], split: '9,1,0'}", [], "data.validation is given"),
        ("data: {source: synthetic, corpus_bytes: 9}", [], "data.corpus_bytes is read with data.source python only"),
        ("name: x", ["data.split=9,1,0"], "command line: data.split is read"),
        ("data: {source: megatron}", ["data.source=synthetic", "data.split=9,1,0"], "command line: data.split"),
    ],
)
def test_a_key_that_would_not_be_read_is_refused(tmp_path, text, sets, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(path, sets)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("data: {source: megatron, split: '9,1,0'}", []),
        ("data: {source: megatron, split: '9,1,0'}", ["data.source=synthetic"]),  # the command line knows of the file
        ("data: {corpus_bytes: 1000}", ["data.source=synthetic"]),
        ("data: {source: megatron, split: '9,1,0'}", ["data.validation=[a]"]),
    ],
)
def test_what_a_later_layer_makes_idle_is_left_alone(tmp_path, text, sets):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    load(path, sets)


@pytest.mark.parametrize(
    "text",
    ["1:30", "190:20:30", "1:30.5", "012", "0777", "00", "00.5", "2024_01", "1_0", "1__000", "1_", "12_34.5", "0b1_0"],
)
def test_numbers_that_do_not_mean_what_they_look_like_are_refused(text):
    with pytest.raises(UserError, match="in more than one way") as caught:
        load(None, [f"train.max_minutes={text}"])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert load(None, [f"train.sample_prompt='{text}'"]).config.train.sample_prompt == text  # in quotes it is text


@pytest.mark.parametrize(
    ("text", "value"), [("1_000", 1000), ("12_000_000", 12_000_000), ("0x10", 16), ("0b11", 3), ("+7", 7), ("90", 90)]
)
def test_numbers_that_mean_what_they_look_like(text, value):
    assert load(None, [f"train.steps={text}"]).config.train.steps == value


@pytest.mark.parametrize("text", ["08", "0o17", "1.5", "yes", "1e3x"])
def test_what_is_no_whole_number_is_refused_as_one(text):
    with pytest.raises(UserError, match=r"train\.steps: expected a whole number"):
        load(None, [f"train.steps={text}"])
