"""`maniple plan calibrate`, and plans that take its file: by hand arithmetic, on a CPU, and all that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from maniple import cli
from maniple.bench import calibrate, calibrate_work
from maniple.bench.calibrate_work import Ready, Work
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware import load_gpu, with_calibration
from maniple.hardware.calibration import Calibration, Measurement, read
from maniple.hardware.efficiency import load_efficiency, load_software
from maniple.models import load_card
from maniple.models.flops import attention_core_flops_per_token
from maniple.plan import operators
from maniple.plan.imbalance import BALANCED
from maniple.plan.operators import Machine
from maniple.plan.time import estimate

H200, QWEN, DEEPSEEK = load_gpu("h200-sxm"), load_card("qwen3-30b-a3b"), load_card("deepseek-v3")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


def _row(group: str, name: str, work: float, milliseconds: float, **more) -> dict:
    times = dict.fromkeys(("milliseconds", "milliseconds_p20", "milliseconds_p80"), milliseconds)
    return {"group": group, "name": name, "what": "made up", "work": work, "rounds": 9} | times | more


def _content(rows: list[dict], **changed) -> dict:
    about = {"format": 1, "gpu": "NVIDIA H200", "card": "h200-sxm", "date": "2026-11-30", "command": "maniple plan"}
    return about | {"versions": {"maniple": "0.1.0", "driver": "580.1"}, "sources": {}, "measured": rows} | changed


def _file(folder: Path, rows: list[dict], name: str = "mine", **changed) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(_content(rows, **changed)), encoding="utf-8")
    return file


COPY = _row("memory", "copy", 4.8e9, 2.0)  # half of 4,800 GB/s


def _measured() -> Calibration:
    """Everything that a GPU is asked for, as if each had run at another share of the peaks: no tensor is made."""
    works = list(calibrate_work.all_of(calibrate_work.GPU, CPU))
    names = list(dict.fromkeys((work.group, work.name) for work in works))
    rows, copy = [], 4.8e9 * 0.4
    assert names[0] == ("memory", "copy")
    for work in works:
        share = 0.4 + 0.01 * names.index((work.group, work.name))
        most = {"memory": 4.8e12, "launch": 4e5}.get(work.group, 989e12)
        if "fp8" in work.name and work.group != "memory":
            most = 1979e12
        beside = 8 * work.added / copy
        rows.append(
            _row(work.group, work.name, work.work, work.work / most / share * 1e3 + beside, beside_milliseconds=beside)
        )
    return Calibration.model_validate(_content(rows))


def test_a_plan_takes_as_long_as_what_was_measured():
    """Each operation at the measured sizes costs the planner the very milliseconds of the file."""
    calibration = _measured()
    efficiency, software = calibration.apply(load_efficiency("h200-sxm"), load_software("maniple"), H200)
    machine = Machine(H200, efficiency, software)

    def took(group: str, name: str, what: int = 0) -> float:
        rows = [row for row in calibration.measured if (row.group, row.name) == (group, name)]
        return pytest.approx(rows[what].milliseconds / 1e3, rel=1e-9)

    for recipe in ("bf16", "fp8", "fp8_block"):
        assert machine.matmul(8192, 8192, 8192, recipe) == took("matmul", recipe)
        for which in ("forward", "dgrad", "wgrad"):
            name = f"{recipe}_{which}"
            assert machine.grouped(65_536, 128, 1536, 2048, recipe, which) == took("grouped", name)
            assert machine.grouped(65_536, 32, 4096, 7168, recipe, which) == took("grouped", name, 1)
    for recipe in ("fp8", "fp8_block", "mxfp8"):
        assert machine.quantize(65_536 * 2048, recipe) == took("memory", f"quantize_{recipe}")
    assert machine.stream(2 * 4 * 2**27) == took("memory", "copy")
    for name, size in (("adamw_fp32", 4), ("adamw_bf16", 2)):
        assert operators.optimizer_seconds(machine, 2**27, 4, size, size) == took("memory", name)
    moe = operators.moe_passes(machine, DEEPSEEK, 8192, "bf16", 256, 1, 1.0, 1)
    assert moe.forward["permutation"] == took("memory", "gather")
    norm = operators.norm_passes(machine, 8192 * 7168)
    assert norm.forward["norm"] + norm.backward["norm"] == took("memory", "elementwise")
    mlp = operators.dense_passes(machine, 1024, 7168, 8192, "bf16", "dense_mlp")
    assert mlp.forward["elementwise"] + mlp.backward["elementwise"] == took("memory", "elementwise", 1)
    for card, prefix in ((QWEN, ""), (DEEPSEEK, "latent_")):
        passes = operators.attention_passes(machine, card, 0, 4096, 4096, "bf16", 1)
        assert passes.forward["attention_core"] == took("attention", f"{prefix}forward")
        assert passes.backward["attention_core"] == took("attention", f"{prefix}backward")
    assert 4000 * software.gap_microseconds * 1e-6 == took("launch", "kernel")
    assert load_software("maniple").gap_microseconds == 10
    assert 32 * (60 + 86) * software.host_microseconds * 1e-6 == took("launch", "host")
    assert load_software("maniple").host_microseconds == 65.5


def _seconds(gpu=H200, card=QWEN, recipe: str = "bf16") -> tuple[float, dict[str, float]]:
    job = {"data": {"sequence_length": 4096}, "precision": {"recipe": recipe}}
    job["train"] = {"micro_batch_size": 8, "global_batch_size": 8}  # enough that the GPU never waits for the host
    step = estimate(TrainConfig.model_validate(job), card, gpu, 1, imbalance=BALANCED)
    return step.seconds, step.components


def test_what_was_measured_replaces_the_card_s_and_nothing_else(tmp_path):
    """Attention at a quarter of the peak, where the card has 52.4 and 43 %: that much longer, and so is the step."""
    rows = [_row("attention", which, 989e9, 4.0) for which in ("forward", "backward")]
    gpu = with_calibration(H200, _file(tmp_path, rows))
    (before, parts), (after, calibrated) = _seconds(), _seconds(gpu)
    forward = 8 * 4096 * attention_core_flops_per_token(QWEN, 4096, None) * QWEN.num_layers / 989e12
    assert parts["attention_core"] == pytest.approx(forward / 0.524 + 2.5 * forward / 0.43)
    assert calibrated["attention_core"] == pytest.approx(3.5 * forward / 0.25)
    assert after - before == pytest.approx(calibrated["attention_core"] - parts["attention_core"])
    rest = set(parts) - {"attention_core"}
    assert {part: calibrated[part] for part in rest} == pytest.approx({part: parts[part] for part in rest})
    # MLA was not measured: its passes take what was measured of the others
    latent = operators.attention_passes(
        Machine(gpu, *gpu.calibration.apply(*_of_h200(), gpu)), DEEPSEEK, 0, 8, 8, "bf16", 1
    )
    assert latent.forward["attention_core"] == pytest.approx(
        8 * attention_core_flops_per_token(DEEPSEEK, 8, None) / (0.25 * 989e12)
    )


def test_small_layers_wait_for_the_host_and_large_ones_do_not(tmp_path):
    """50 microseconds for each of a layer's 60 and 86 kernels are more than the GPU needs for 512 tokens."""
    fast, host = (
        with_calibration(H200, _file(tmp_path, [_row("launch", "host", 146, took)], name))
        for name, took in (("fast", 0.146), ("slow", 7.3))
    )

    def step(gpu, tokens: int):
        words = {"data": {"sequence_length": tokens}, "train": {"micro_batch_size": 1, "global_batch_size": 3}}
        return estimate(TrainConfig.model_validate(words), QWEN, gpu, 1, imbalance=BALANCED)

    small, waits = step(fast, 512), step(host, 512)
    layers = sum(small.components[part] for part in small.components if part not in ("optimizer", "embedding"))
    assert waits.seconds - small.seconds == pytest.approx(waits.components["host"])
    assert waits.seconds > 3 * QWEN.num_layers * 7.3e-3 > layers
    assert "host" not in small.components
    assert step(host, 65_536) == replace(step(fast, 65_536), assumptions=step(host, 65_536).assumptions)


def _of_h200():
    return load_efficiency("h200-sxm"), load_software("maniple")


def test_sizes_of_one_operation_count_together(tmp_path):
    rows = [_row("matmul", "bf16", 4e12, 10.0), _row("matmul", "bf16", 1e12, 10.0)]
    calibration = read(_file(tmp_path, rows))
    assert calibration.attained("matmul", "bf16") == pytest.approx(5e12 / 20e-3)
    assert calibration.shares(H200) == {"matmul": {"bf16": pytest.approx(250 / 989)}}


def test_figures_that_hold_no_quantization_say_so():
    """MI355X's card has fp8 products with the quantization of their operands; measured ones are without."""
    mi355x = load_gpu("mi355x")
    efficiency = load_efficiency("mi355x")
    assert efficiency.grouped.with_quantization == ("fp8",)
    rows = [_row("grouped", f"fp8_{which}", 2e12, 1.0) for which in ("forward", "dgrad", "wgrad")]
    made = Calibration.model_validate(_content(rows, card="mi355x"))
    changed, _ = made.apply(efficiency, load_software("maniple"), mi355x)
    assert changed.grouped.with_quantization == ()
    assert changed.grouped["fp8_forward"] == pytest.approx(2000 / 5000)
    assert changed.grouped["bf16_forward"] == efficiency.grouped["bf16_forward"]
    assert changed.borrowed == efficiency.borrowed
    bf16 = Calibration.model_validate(_content([COPY], card="mi355x")).apply(
        efficiency, load_software("maniple"), mi355x
    )
    assert bf16[0].grouped == efficiency.grouped
    assert "memory" in efficiency.borrowed
    assert "memory" not in bf16[0].borrowed


def test_emulated_mxfp8_takes_the_products_of_bf16(tmp_path):
    rows = [_row("grouped", f"bf16_{which}", 4e11, 1.0) for which in ("forward", "dgrad", "wgrad")]
    gpu = with_calibration(H200, _file(tmp_path, rows))
    machine = Machine(gpu, *gpu.calibration.apply(*_of_h200(), gpu))
    times = [machine.grouped(65_536, 128, 1536, 2048, recipe, "forward") for recipe in ("bf16", "mxfp8")]
    assert times[0] == times[1] == pytest.approx(2 * (65_536 + 64 * 128) * 1536 * 2048 / 4e14)


# --- what is refused --------------------------------------------------------------------------------------------------

FORWARD = _row("attention", "forward", 1e12, 3.0)


@pytest.mark.parametrize(
    ("rows", "changed", "said"),
    [
        ([COPY | {"milliseconds": float("nan")}], {}, "measured[0].milliseconds: expected"),
        ([COPY | {"milliseconds": -1.0}], {}, "measured[0].milliseconds: expected more than 0"),
        ([COPY | {"work": float("inf")}], {}, "measured[0].work: expected a finite number"),
        ([COPY | {"work": 0.0}], {}, "measured[0].work: expected more than 0"),
        ([COPY | {"beside_milliseconds": 2.0}], {}, "memory copy: 2.0 ms, and 2.0 ms of it beside"),
        ([COPY | {"work": 4.8e9 * 2.11}], {}, "memory copy is 106% of what h200-sxm has at most"),
        ([COPY | {"work": 4.8e9 * 0.019}], {}, "memory copy is 0.0095 of what h200-sxm has at most, less than 0.01"),
        ([_row("launch", "kernel", 1.0, 2.0)], {}, "launch kernel is 2,000 microseconds a kernel, more than 1,000"),
        ([COPY | {"name": "swap"}], {}, "memory has no 'swap'"),
        ([COPY | {"group": "links"}], {}, "measured[0].group: expected"),
        ([COPY | {"share": 0.9}], {}, "measured[0].share: this key is not known"),
        ([FORWARD], {}, "attention: backward is missing beside the others"),
        ([_row("grouped", "fp8_block_dgrad", 1e12, 3.0)], {}, "fp8_block_forward, fp8_block_wgrad is missing"),
        ([_row("matmul", "mxfp8", 1e12, 3.0)], {}, "h200-sxm has no mxfp8 matrix products"),
        ([], {}, "measured: "),
        ([COPY], {"format": 2}, "format: expected 1"),
        ([COPY], {"card": "mi355x", "gpu": "AMD Instinct MI355X"}, "measured on AMD Instinct MI355X, for mi355x"),
        (
            [COPY],
            {"card": None, "gpu": "CPU, some"},
            "measured on CPU, some, for no GPU card, and this plan is for h200",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, rows, changed, said):
    file = _file(tmp_path, rows, **changed)
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--calibration", str(file)]
    assert cli.main(words) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert said in message
    assert str(file) in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {card: qwen3-30b-a3b}\n", "no calibration"),
        ("!!python/object/apply:os.system [echo]\n", "could not determine a constructor"),
        ("measured: [&a {group: memory}, *a]\n", "aliases"),
        ("- 1\n", "no calibration"),
        (None, "no such file"),
    ],
)
def test_anything_else_is_no_calibration(tmp_path, text, said):
    file = tmp_path / "other.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        with_calibration(H200, file)


# --- the plan says what it took ---------------------------------------------------------------------------------------


def test_a_plan_names_its_calibration(tmp_path, capsys):
    file = _file(tmp_path, [COPY], not_measured={"matmul fp8": "no such product"})
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.expert_parallel_size=8"]
    assert cli.main([*words, "--calibration", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"calibration {file}: measured on NVIDIA H200, 2026-11-30, maniple 0.1.0, driver 580.1; links are" in out
    assert "calibration: not measured, and as without it: matmul fp8\n" in out
    assert cli.main(words) == 0
    assert "calibration" not in capsys.readouterr().out


# --- measuring --------------------------------------------------------------------------------------------------------


def test_scaling_takes_a_calibration_too(tmp_path, capsys):
    file = _file(tmp_path, [COPY])
    words = ["plan", "scale", "qwen3-30b-a3b", "--gpu", "h200", "--from", "8", "--to", "8", "--json"]
    words += ["--config", str(Path(__file__).parents[2] / "configs" / "qwen3_30b_a3b_8.yaml")]
    steps = []
    for more in ([], ["--calibration", str(file)]):
        assert cli.main([*words, *more]) == 0
        steps.append(json.loads(capsys.readouterr().out)["weak"][0]["seconds"])
    assert steps[1] > steps[0]


def test_a_cpu_is_measured_to_show_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cpu.yaml"
    assert cli.main(["plan", "calibrate", "--device", "cpu", "--out", "cpu.yaml"]) == 0
    out, err = capsys.readouterr()
    assert "a CPU: this shows that the command runs, and no plan takes it" in out
    assert "calibrate: memory copy: " in err
    made = read(file)
    assert made.card is None
    assert made.gpu.startswith("CPU")
    assert made.not_measured.keys() == {"launch host"}  # a CPU has nobody ahead of it
    found = {(row.group, row.name) for row in made.measured} | {("launch", "host")}
    assert found == {(work.group, work.name) for work in calibrate_work.all_of(calibrate_work.GPU, CPU)}
    assert {row.what.rpartition(", ")[2] for row in made.measured} == {"reference", "torch"}
    assert set(made.sources) >= {"grouped_gemm", "permute", "quantize"}
    assert made.versions["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.yaml"]  # nothing half written is left
    # measured on no GPU, so no plan takes it
    assert cli.main(["plan", "qwen3-30b-a3b", "--gpus", "1", "--gpu", "h200", "--calibration", "cpu.yaml"]) == 2
    assert "for no GPU card" in capsys.readouterr().err
    # and nothing is measured for a file that is there
    monkeypatch.setattr(calibrate, "run", None)
    before = file.read_text(encoding="utf-8")
    assert cli.main(["plan", "calibrate", "--device", "cpu", "--out", "cpu.yaml"]) == 2
    assert "it exists already" in capsys.readouterr().err
    with pytest.raises(UserError, match="File exists"):
        calibrate.write(made, file)
    assert file.read_text(encoding="utf-8") == before
    assert cli.main(["plan", "calibrate", "--device", "cpu", "--out", "nowhere/cpu.yaml"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


def test_a_cpu_s_figures_are_stored_only_where_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    works = [work for work in calibrate_work.all_of(calibrate_work.CPU, CPU) if work.name == "copy"]
    monkeypatch.setattr(calibrate, "all_of", lambda sizes, device: iter(works))
    assert cli.main(["plan", "calibrate", "--device", "cpu", "--quick"]) == 0
    assert "memory copy" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_calibrate(capsys):
    for words, said in (
        ([], "torch sees no GPU to calibrate"),
        (["--gpu", "h200"], "torch sees no GPU to calibrate"),
        (["--device", "tpu"], "--device tpu: give gpu or cpu"),
        (["--device", "cpu", "--gpu", "h200"], "--gpu h200-sxm: a CPU is measured"),
    ):
        assert cli.main(["plan", "calibrate", *words]) == 2
        message = capsys.readouterr().err
        assert said in message
        assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("device", "named", "found"),
    [
        ("NVIDIA H200", None, "h200-sxm"),
        ("NVIDIA H200", "h200-sxm", "h200-sxm"),
        ("NVIDIA H200", "b200", "this is a NVIDIA H200, whose card is h200-sxm"),
        ("NVIDIA H200 NVL", None, "no GPU card is about NVIDIA H200 NVL"),
        ("NVIDIA H200 NVL", "h200-sxm", "h200-sxm"),
        ("NVIDIA H200", "h20", "no GPU card is named 'h20'"),
    ],
)
def test_a_gpu_is_measured_for_its_own_card(monkeypatch, device, named, found):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: device)
    if " " in found:
        with pytest.raises(UserError, match=found):
            calibrate.card_of(torch.device("cuda"), named)
    else:
        assert calibrate.card_of(torch.device("cuda"), named).name == found


def test_what_fails_is_wrong_or_too_fast_has_no_time(monkeypatch):
    x = torch.zeros(8)

    def of(call=lambda: x.add_(1.0), error=lambda: 0.0) -> Ready:
        return Ready(call, "mine", error, 1e-3)

    def broken() -> Ready:
        raise RuntimeError("no such\ninstruction")

    def nothing() -> None:
        pass

    grouped = [Work("grouped", f"{recipe}_{which}", "some", 1.0, of) for recipe, which in _pairs()]
    works = [
        Work("memory", "copy", "some", 1.0, of),
        Work("matmul", "bf16", "some", 1.0, of),
        Work("matmul", "fp8", "some", 1.0, broken),
        Work("matmul", "fp8_block", "some", 1.0, lambda: of(error=lambda: float("nan"))),
        Work("memory", "gather", "some", 1e15, lambda: of(nothing)),
        *(replace(work, make=broken) if work.name == "fp8_dgrad" else work for work in grouped),
        Work("attention", "forward", "some", 1.0, of),
        Work("attention", "backward", "some", 1.0, of),
        Work("attention", "latent_forward", "some", 1.0, broken),
        Work("attention", "latent_backward", "some", 1.0, of),
        Work("matmul", "bf16", "more", 1.0, broken),
    ]
    monkeypatch.setattr(calibrate, "all_of", lambda sizes, device: iter(works))
    said: list[str] = []
    found = calibrate.run(CPU, H200, quick=False, command="maniple", progress=said.append)
    assert [f"{row.group} {row.name}" for row in found.measured] == [
        *("memory copy", "grouped bf16_forward", "grouped bf16_dgrad", "grouped bf16_wgrad"),
        *("attention forward", "attention backward"),
    ]
    why = found.not_measured
    assert why["matmul fp8"] == why["matmul bf16"] == "RuntimeError: no such instruction"
    assert "mine is wrong: its error is nan" in why["matmul fp8_block"]
    assert "more than it has" in why["memory gather"]
    assert why["grouped fp8_forward"] == why["grouped fp8_wgrad"] == "grouped fp8_dgrad was not"
    assert why["attention latent_backward"] == "attention latent_forward was not"
    assert len(said) == len(works)
    # gradients are added at the speed of a copy, which is then needed
    without = [replace(works[0], make=broken), replace(grouped[0], added=1), Work("launch", "kernel", "some", 1.0, of)]
    monkeypatch.setattr(calibrate, "all_of", lambda sizes, device: iter(without))
    found = calibrate.run(CPU, None, quick=True, command="maniple", progress=said.append)
    assert [row.group for row in found.measured] == ["launch"]
    assert found.not_measured["grouped bf16_forward"] == "needs the speed of a copy"
    # on a CPU there is no peak to go by: what is faster than its traffic has no time; on a GPU it ran at the peak
    without = [works[0], *(replace(work, added=10**15) for work in grouped[:3])]
    monkeypatch.setattr(calibrate, "all_of", lambda sizes, device: iter(without))
    found = calibrate.run(CPU, None, quick=True, command="maniple", progress=said.append)
    assert "less than its traffic alone" in found.not_measured["grouped bf16_forward"]
    found = calibrate.run(CPU, H200, quick=True, command="maniple", progress=said.append)
    assert found.shares(H200)["grouped"] == pytest.approx(
        dict.fromkeys(("bf16_forward", "bf16_dgrad", "bf16_wgrad"), 1.0), rel=1e-3
    )


def _pairs() -> list[tuple[str, str]]:
    return [(recipe, which) for recipe in ("bf16", "fp8") for which in ("forward", "dgrad", "wgrad")]


def test_a_table_shows_the_card_s_figures_beside_what_was_measured():
    rows = [Measurement.model_validate(COPY), Measurement.model_validate(_row("launch", "kernel", 1000.0, 5.0))]
    made = Calibration.model_validate(_content([row.model_dump() for row in rows]))
    copy, launch = calibrate.table(made, H200, {"memory": {"copy": 0.896}})
    assert copy == ["memory copy", "2,400.0 GB/s", "50.0%", "89.6%", "2.000", "made up"]
    assert launch[:4] == ["launch kernel", "5.00 us each", "", ""]
