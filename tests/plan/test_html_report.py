"""The HTML report: the planner's own figures, names that stay text, and one file that asks for nothing."""

from __future__ import annotations

import errno
import html.parser
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from tests.plan.reported import HOSTILE, WORDS, Report, hostile, said

from maniple import cli
from maniple.config.check import check, resolve_card
from maniple.config.load import load
from maniple.errors import UserError
from maniple.hardware import load_gpu
from maniple.plan import html_report, scaling, what_if
from maniple.plan.imbalance import Imbalance
from maniple.plan.stage_time import stage_time
from maniple.plan.time import make_job, simulated_step


@pytest.fixture(scope="module", autouse=True)
def _no_torchrun():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return Report(tmp_path_factory.mktemp("report"))


def the_job(*sets: str):
    config = load(None, ["model.card=qwen3-30b-a3b", "data.sequence_length=4096", *sets]).config
    return config, resolve_card(config), load_gpu("h200-sxm")


SMALL = ["model.overrides={num_layers: 8}", "parallel.expert_parallel_size=8", "train.global_batch_size=64"]
PIPELINE = [*SMALL, "parallel.pipeline_parallel_size=2", "parallel.virtual_pipeline_size=2"]


def asked(*sets: str) -> html_report.Asked:
    config, card, gpu = the_job(*sets)
    return html_report.Asked(config, card, gpu, 16, "dirichlet:8", ["maniple", "plan"], {})


# --- the figures ------------------------------------------------------------------------------------------------------


def same(cell: dict, plan: dict) -> None:
    """A cell of the page holds what the command says."""
    assert cell["verdict"] == plan["verdict"]
    least, most = plan["error_band"]
    assert cell["certain"] == (not least <= plan["gpu_memory"] < most)
    assert ("not certain" in cell["band"]) != cell["certain"]
    assert cell["fits"] == plan["fits"]
    assert cell["tightest"] == plan["tightest_rank"]
    assert [sum(rank["bytes"].values()) for rank in cell["ranks"]] == [rank["total"] for rank in plan["ranks"]]
    assert [rank["holds"] for rank in cell["ranks"]] == [rank["chunks"] for rank in plan["ranks"]]
    assert sum(size for *_, size in cell["components"]) == cell["total"] == plan["ranks"][cell["tightest"]]["total"]
    time = plan["time"]
    assert (cell["seconds"], cell["mfu"]) == (time["seconds"], time["mfu"])
    assert (cell["tgs"], cell["tflops"]) == (time["tokens_per_second_per_gpu"], time["tflops_per_gpu"])
    assert cell["bubbles"] == time["bubbles"]
    assert {part.replace(" ", "_"): seconds for part, seconds, _ in cell["parts"]} == time["components"]
    assert sum(seconds for _, seconds, _ in cell["parts"]) == pytest.approx(cell["seconds"])


def test_the_job_is_the_one_that_was_asked_for(report):
    same(report.own, report.json)
    assert report.data["capacity"] == report.json["gpu_memory"]
    assert report.data["assumed"] == {key: str(value) for key, value in report.json["assumed"].items()}
    assert report.data["assumed"]  # a batch, which the commands of other cells must keep
    assert report.json["fits"]


def test_a_cell_is_what_its_command_plans(report, monkeypatch):
    monkeypatch.chdir(report.folder)
    own = [axis["own"] for axis in report.data["axes"]]
    tried = []
    for axis, values in enumerate(report.data["axes"]):
        other = next(value for value in range(len(values["values"])) if value != values["own"])
        at = [*own[:axis], other, *own[axis + 1 :]]
        tried.append(report.cell(at))
    tried.append(
        max((cell for cell in report.data["cells"] if "why" not in cell), key=lambda cell: len(cell["command"]))
    )
    assert sum("why" not in cell for cell in tried) >= 5
    for cell in tried:
        if "why" in cell:
            continue
        words = shlex.split(cell["command"].replace("\\\n", ""))
        assert words[0] == "maniple"
        assert HOSTILE in words
        same(cell, said(words[1:]))


def test_cells_that_are_not_legal_say_why(report):
    refused = [cell for cell in report.data["cells"] if "why" in cell]
    assert refused
    assert all(
        cell["why"].startswith(("16 processes, one a GPU, are not a multiple of ", "train.", "1 micro-"))
        for cell in refused
    )
    assert 30 < len(report.data["cells"]) - len(refused) <= what_if.MOST_PLANS


def test_axes_hold_the_jobs_own_value_and_rise(report):
    values = {axis["name"]: axis["values"] for axis in report.data["axes"]}
    assert [axis["values"][axis["own"]] for axis in report.data["axes"]] == [
        *("PP 2", "EP 8", "1 layer a chunk", "1 sequence", "dirichlet:8")
    ]
    assert values["Pipeline-parallel size"] == ["PP 1", "PP 2", "PP 4"]
    assert values["Expert-parallel size"] == ["EP 4", "EP 8", "EP 16"]
    assert values["Recomputation"][0] == "nothing"
    assert values["Router imbalance"][0] == "balanced"


def test_the_grid_keeps_its_bounds():
    config, card, gpu = the_job(*SMALL)
    one = what_if.grid(config, card, gpu, 8, "1.3", most_plans=1)
    assert list(one.cells) == [one.own] == [(0,) * 5]
    assert one.cells[one.own].imbalance == "1.3"
    heard: list[tuple[int, int]] = []
    some = what_if.grid(config, card, gpu, 8, "1.3", most_plans=20, progress=lambda *so_far: heard.append(so_far))
    plans = sum(cell.memory is not None for cell in some.cells.values())
    assert 8 <= plans <= 20
    assert heard == [(number, plans) for number in range(1, plans + 1)]
    assert sum(len(axis.values) > 1 for axis in some.axes) >= 3
    long = what_if.grid(config, card, gpu, 8, "1.3", most_slots=1)
    assert list(long.cells) == [long.own]


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        # 61 layers and MTP: no other number of ranks divides them
        ("deepseek-v3", []),
        ("deepseek-v3", ["parallel.pipeline_parallel_size=4", "parallel.pipeline_layout='Et*15|t*16|t*16|t*14,mL'"]),
        ("gpt-oss-20b", ["parallel.pipeline_parallel_size=4", "parallel.virtual_pipeline_size=3"]),
    ],
)
def test_another_pipeline_is_cut_anew_where_the_jobs_cut_does_not_divide(model, sets):
    config = load(None, [f"model.card={model}", "train.global_batch_size=64", *sets]).config
    card = resolve_card(config)
    grid = what_if.grid(config, card, load_gpu("h200-sxm"), 16, "balanced", most_plans=24)
    sizes = [int(value.label.split()[1]) for value in grid.axes[0].values]
    assert len(sizes) >= 2
    for where, cell in grid.cells.items():
        if cell.memory is None:
            continue
        job = what_if.changed(config, cell.sets)
        check(job, card, 16)
        assert job.parallel.pipeline_parallel_size == cell.memory.placement.pipeline == sizes[where[0]]
        assert [layer for stage in cell.memory.placement.stages for layer in stage.layers] == [*range(card.num_layers)]


def test_a_job_that_cannot_run_is_refused():
    config, card, gpu = the_job(*SMALL)
    with pytest.raises(UserError, match="6 processes"):
        what_if.grid(config, card, gpu, 6, "balanced")


def test_scaling_is_that_of_plan_scale(report):
    sets = [*PIPELINE, "recompute.granularity=full", "recompute.num_layers=1", "train.global_batch_size=64"]
    for kind, points in zip(("weak", "strong"), report.data["scaling"]["points"], strict=True):
        expected = scaling.scale(*the_job(*sets), [16, 32, 64, 128], kind, Imbalance())
        assert points == [point.as_json() for point in expected]
    assert len(report.data["scaling"]["bends"]) == 2


def test_scaling_ends_where_plans_do(monkeypatch):
    monkeypatch.setattr(html_report, "MOST_GPUS", 40)
    weak, _ = html_report.data_of(asked(*SMALL))["scaling"]["points"]
    assert [point["gpus"] for point in weak] == [16, 32]


@pytest.mark.parametrize("sets", [PIPELINE, [*PIPELINE, "moe.overlap_exchange=true"]], ids=["plain", "overlapped"])
def test_the_drawn_pipeline_is_the_simulated_one(sets):
    one = asked(*sets, "train.global_batch_size=64")
    drawn = html_report.timeline(one)
    job = make_job(one.config, one.card, one.gpu, 16)
    run = simulated_step(job)
    for flat, spans in zip(drawn["ranks"], run.spans, strict=True):
        at, place = 0, 0
        for span in spans:
            kind = drawn["passes"][flat[place + 1]]
            start = at + flat[place]
            assert start == pytest.approx(span.start * 1e6, abs=1)
            at = start + kind["us"]
            assert at == pytest.approx(span.end * 1e6, abs=1.5)
            assert kind["kinds"] == "".join(task.kind for task in span.slot)
            assert kind["chunks"] == [task.chunk for task in span.slot]
            assert flat[place + 2 : place + 2 + len(span.slot)] == [task.micro_batch for task in span.slot]
            place += 2 + len(span.slot)
        assert place == len(flat)
    costs = [stage_time(job, stage).cost(job) for stage in job.place.stages]
    for kind in drawn["passes"]:
        cost = costs[kind["stages"][0]]
        if kind["kinds"] == "F":
            assert kind["exchange"] == pytest.approx(cost.exchange_forward / cost.forward)
        elif kind["kinds"] == "B":
            assert kind["exchange"] == pytest.approx(cost.exchange_backward / (cost.backward + cost.weight))
        else:  # beside another pass less of it is left to wait for
            ahead, back = (costs[stage] for stage in kind["stages"])
            alone = ahead.exchange_forward + back.exchange_backward
            hidden = alone * job.software.hidden
            seconds = ahead.forward + back.backward + back.weight - hidden
            assert kind["us"] == pytest.approx(seconds * 1e6, abs=1.5)
            assert kind["exchange"] == pytest.approx((alone - hidden) / seconds)
    shares = {pass_["kinds"]: pass_["exchange"] for pass_ in drawn["passes"]}
    assert all(0 < share < 1 for share in shares.values())


def test_of_a_long_step_the_first_micro_batches_are_drawn(monkeypatch):
    monkeypatch.setattr(html_report, "MOST_SPANS", 50)
    drawn = html_report.timeline(asked(*PIPELINE, "train.global_batch_size=256"))
    assert (drawn["micro_batches"], drawn["of"]) == (6, 32)
    assert sum(map(len, drawn["ranks"])) == 3 * 6 * 2 * 2 * 2


# --- the file ---------------------------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """Start tags with their attributes, and the text that is in none of script and style."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_stands_alone(report):
    tags = Elements(report.text).tags
    assert not [values for _, values in tags if set(values) & {"src", "srcset", "action", "style"}]
    assert [values["href"] for _, values in tags if "href" in values] == ["data:,"]
    policy = next(values["content"] for _, values in tags if values.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert set(re.findall(r"https?://[^\s\"'<]*", report.text)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert len(report.text) < 1_000_000


def test_a_large_job_is_a_small_file():
    """1,024 GPUs with as many micro-batches as there may be."""
    config = load(
        None,
        [
            *("model.card=qwen3-235b-a22b", "data.sequence_length=4096", "model.overrides={num_layers: 96}"),
            *("parallel.pipeline_parallel_size=32", "parallel.virtual_pipeline_size=3"),
            *("parallel.expert_parallel_size=8", "train.global_batch_size=65536"),
        ],
    ).config
    one = html_report.Asked(config, resolve_card(config), load_gpu("h200-sxm"), 1024, "balanced", ["maniple"], {})
    drawn = html_report.timeline(one)
    assert sum(map(len, drawn["ranks"])) <= 3 * html_report.MOST_SPANS
    assert len(json.dumps(drawn)) < 600_000


def test_names_are_text(report):
    scripts = [values for tag, values in Elements(report.text).tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert shlex.quote(HOSTILE) in report.own["command"]
    assert report.text.count("window.hacked") == sum("why" not in cell for cell in report.data["cells"])
    assert "</script><script>window" not in report.text


def test_every_text_of_the_data_is_inert(report):
    """Even one that no name can hold today."""
    evil = "</script><script>1</script><img src=x onerror=1>{{script}}\u2028"
    page = html_report.page(hostile(report.data, evil))
    assert len([tag for tag, _ in Elements(page).tags if tag == "script"]) == 2
    assert not [tag for tag, _ in Elements(page).tags if tag == "img"]


def test_progress_is_said_and_the_answer_stays_alone(report):
    plans = sum("why" not in cell for cell in report.data["cells"])
    assert report.err.splitlines() == [
        f"maniple: report: {plans} plans around the job",
        f"maniple: {report.file}: the report, {report.file.stat().st_size / 1e6:.1f} MB",
    ]


def test_no_file_is_overwritten_and_nothing_is_planned_in_vain(tmp_path, capsys, monkeypatch):
    there = tmp_path / "there.html"
    there.write_text("mine")
    monkeypatch.setattr("maniple.plan.report.memory_plan", lambda *_: pytest.fail("it planned"))
    for file, words in {there: "it exists already: give another name", tmp_path / "no" / "x.html": "no folder"}.items():
        assert cli.main([*WORDS, "--report", str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"maniple: error: --report {file}: ")
        assert words in err
        assert err.count("\n") == 1
    assert there.read_text() == "mine"


def test_a_file_that_cannot_be_written_is_a_line(report, tmp_path, monkeypatch):
    monkeypatch.setattr(html_report, "data_of", lambda *_: report.data)
    with pytest.raises(UserError, match=r"^--report .*: File name too long$"):
        html_report.write(asked(*SMALL), tmp_path / ("x" * 300))


def test_a_page_is_there_whole_or_not_at_all(report, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(html_report, "data_of", lambda *_: report.data)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"^--report .*: No space left on device$"):
        html_report.write(asked(*SMALL), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_without_a_report_nothing_of_it_is_loaded():
    code = (
        "import sys; from maniple import cli; code = cli.main(sys.argv[1:]);"
        "sys.exit(code or sum(name in sys.modules for name in ('maniple.plan.html_report', 'maniple.plan.what_if')))"
    )
    done = subprocess.run([sys.executable, "-c", code, *WORDS], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_may_help_is_on_the_page(tmp_path, capsys):
    """What the command says beneath a job that does not fit."""
    words = ["plan", "mixtral-8x7b", "--gpus", "8", "--gpu", "b200"]
    assert cli.main([*words, "--report", str(tmp_path / "page.html")]) == 0
    *_, advice, best = capsys.readouterr().out.splitlines()
    assert advice.startswith("what may help: ")
    assert best.startswith("no layout was given; the best is ")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(block[1])["advice"] == [advice, best]
