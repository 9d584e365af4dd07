"""The command: what it prints, what it writes, and how it refuses."""

import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import subquad
from subquad import bench as measurement
from subquad import tasks
from subquad.__main__ import WAITING
from subquad.attention.base import Attention
from subquad.attention.registry import describe, mechanism
from subquad.cli import COMMANDS, IMPORTS, app, studies
from subquad.cli.bench_table import against, count, seconds
from subquad.cli.terminal import coarse, draw
from subquad.cli.train import show as show_training
from subquad.core import declarations
from subquad.core.declarations import keys, options_class
from subquad.core.files import ENDINGS
from subquad.core.numbers import parse_lengths
from subquad.core.options import fields
from subquad.models import HEADS
from subquad.plots import COLOURS
from subquad.supports.support import constant_of_graphs

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command line in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return lambda line: CliRunner().invoke(app, line.split())


@pytest.fixture
def quick(monkeypatch):
    """Memory without fresh processes."""
    monkeypatch.setattr(measurement, "peak_memory", lambda spec, level, n, setting: 2**20 * n)


# ---- list and show -----------------------------------------------------------------------------------------


def test_list_names_every_mechanism(run):
    result = run("list")
    assert result.exit_code == 0
    assert all(any(line.startswith(name) for line in result.stdout.splitlines()) for name in subquad.available())
    assert "Vaswani et al. 2017" in result.stdout and "✓" in result.stdout and "n²" in result.stdout


def test_explanations_have_no_names_of_the_code():
    internal = {name: re.findall(r"`[A-Z_]{3,}`", mechanism(name).__doc__ or "") for name in subquad.available()}
    assert not any(internal.values()), internal


def test_list_as_json(run):
    entries = json.loads(run("list --json").stdout)
    assert [entry["name"] for entry in entries] == list(subquad.available())
    keys = {"name", "family", "causal", "bidirectional", "level", "cost", "paper"}
    assert all(set(entry) == keys and entry["cost"] and entry["paper"] for entry in entries)


def test_show_explains_and_draws(run):
    result = run("show fixed:w=4 --n 8 --causal")
    assert result.exit_code == 0, result.output
    for words in (
        "Child et al.",
        "length of a segment",
        "an integer ≥ 1 or None",
        "cost: grows like n^2, up to logarithms, with these options (in general n·√n)\n",
        "█ direct",
    ):
        assert words in result.stdout
    assert "20 of 36 connections, sparsity 44.4%" in result.stdout
    assert "\n████····\n····█···\n" in result.stdout


def test_show_draws_heads_that_differ(run):
    result = run("show fixed:w=4,heads=multihead --n 8")
    assert "heads 0–3" in result.stdout and "heads 4–7" in result.stdout
    assert "at n = 8, heads 4–7: 22 of 64 connections" in result.stdout


def test_show_prints_a_report_of_costs(run):
    @subquad.register("costly")
    class Costly(Attention):
        """Costs."""

        def cost_report(self, n):
            return {"terms per query": 3 * n, "exponent": 1.5}

        def picture(self, n):
            return 1 + torch.ones(n, n).triu(1).int()

    try:
        result = run("show costly --n 1000")
    finally:
        subquad.unregister("costly")
    assert result.stdout.count("cost: ") == 1 and "exponent" not in result.stdout, "one cost, not two"
    assert "terms per query: 3,000\n" in result.stdout
    assert "(500,500 direct, 499,500 through summaries)" in result.stdout
    assert "(9 × 9 tokens per cell)" in result.stdout and "░ through a summary" in result.stdout


@pytest.mark.parametrize(
    ("name", "option", "words"), [("pattern", "sets", "lists of key positions"), ("combiner-plan", "plan", "groups")]
)
def test_show_explains_what_only_python_can_give(run, name, option, words):
    """With an example in place of the option that a spec cannot have."""
    result = run(f"show {name} --n 16")
    assert result.exit_code == 0 and words in result.stdout and "of 256 connections" in result.stdout
    assert f"{option} can only be given in Python: subquad.attention('{name}', {option}=…)" in result.stdout
    assert run(f"show {name} --n 16 --causal").exit_code == 0


def test_help_fits_the_terminal_and_flags_take_no_value(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = {name: run(f"{name} --help").stdout for name in ("perplexity", "bench", "explore", "")}
    assert not any("<bool>" in text or "[[" in text or "]..]..." in text for text in said.values())
    lines = [line.strip() for line in said["perplexity"].splitlines()]
    assert "adapted model, this is not the model that was converted: measure the latter" in " ".join(lines)
    body = [line for line in lines if "original is the same weights" in line or "this is not the model" in line]
    assert body and all(len(line) > 60 for line in body), "no line is broken where the source code breaks it"


def test_help_names_what_an_option_takes_as_users_do(run, monkeypatch):
    """INTEGER and PATH, not the types of Python; arguments in capitals, without braces."""
    monkeypatch.setenv("COLUMNS", "120")
    for name in (*COMMANDS, "study speed"):
        said = run(f"{name} --help").stdout
        strange = re.findall(r"<[\w\[\] ]+>|\{\w+\}|RANGE|range \[|list\[", said)
        assert not strange, f"{name}: {strange}"
    assert "predict [OPTIONS] MODEL [TEXT]" in run("predict --help").stdout
    assert "bench [OPTIONS] [SPEC]..." in run("bench --help").stdout
    said = " ".join(run("adapt --help").stdout.split())
    assert all(words in said for words in ("INTEGER [x>=2]", "NUMBER [0<=x<=1]", "-o PATH", "--text TEXT"))
    assert "Missing argument 'TASK'" in run("train").stderr and "--seed" in run("train needle --seed -1").stderr


def test_show_into_a_file(run, tmp_path):
    result = run("show star --n 16 --png star.png")
    assert "picture: star.png" in result.stdout and "█" not in result.stdout
    assert (tmp_path / "star.png").read_bytes().startswith(PNG)


def test_pictures_in_the_terminal_have_two_rows_per_line():
    picture = torch.tensor([[1, 2, 0], [0, 1, 1], [2, 2, 1]])
    text = draw(picture, Console(force_terminal=True, color_system="truecolor", width=40, no_color=False))
    assert text.plain == "▀▀▀\n▀▀▀"
    styles = [(span.style.color.name, span.style.bgcolor and span.style.bgcolor.name) for span in text.spans]
    absent, direct, summary = COLOURS
    assert styles[:3] == [(direct, absent), (summary, direct), (absent, direct)]
    assert styles[3:] == [(summary, None), (summary, None), (direct, None)]


def test_a_coarse_picture_keeps_the_strongest_thing():
    picture = torch.zeros(5, 5, dtype=torch.int)
    picture[0, 1], picture[1, 0], picture[4, 4] = 1, 2, 2
    assert coarse(picture, 3) == ([[1, 0, 0], [0, 0, 0], [0, 0, 2]], 2)
    assert coarse(picture, 5) == (picture.tolist(), 1)


# ---- plot and gallery --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", " --causal", " --weights", " --causal --weights"])
def test_plot_writes_a_picture(run, tmp_path, options):
    result = run("plot longformer:window=4,num_heads=2,head_dim=4 --n 12 -o out.png" + options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_gallery_makes_its_directory(run, tmp_path):
    result = run("gallery -o some/where")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "some/where/gallery.png").stat().st_size > 10_000


# ---- bench -------------------------------------------------------------------------------------------------

TINY = " --heads 2 --head-dim 4 --repeats 1"


def test_bench_prints_a_table_and_keeps_json_and_plot(run, quick, tmp_path):
    result = run("bench fixed longformer:window=4 --n 8,4 --causal --backward --json b.json --png b.png" + TINY)
    assert result.exit_code == 0, result.output
    assert "forward + backward, causal, batch 1, 2 heads × 4" in result.stdout
    assert "longformer:window=4" in result.stdout and " 8.00 MiB" in result.stdout
    kept = json.loads((tmp_path / "b.json").read_text())
    assert [(row["n"], row["spec"]) for row in kept["rows"]] == [
        (n, spec) for n in (4, 8) for spec in ("full", "fixed", "longformer:window=4")
    ]
    assert all(row["ratio"] > 0 and row["memory"] == 2**20 * row["n"] for row in kept["rows"])
    assert kept["setting"]["causal"] and kept["setting"]["backward"]
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)


def test_bench_claims_no_speed_from_a_busy_machine(run, quick, monkeypatch):
    said = {}
    for why in (None, "a neighbour is busy"):
        monkeypatch.setattr(measurement, "busy", lambda rows, why=why: why)
        said[why] = run("bench fixed --n 8" + TINY).stdout
    assert "not to be trusted" not in said[None] and "≈" not in said[None]
    assert "these times are not to be trusted: a neighbour is busy" in said["a neighbour is busy"]
    assert "≈ " in said["a neighbour is busy"]


def test_numbers_are_written_for_people():
    assert parse_lengths("8192, 1024,1024") == [1024, 8192]
    assert [seconds(2.0), seconds(0.0125)] == ["2 s", "12.5 ms"]
    assert [against(0.1), against(2), against(1.0)] == ["10.00× faster", "2.00× slower", "1"]
    assert [count(None), count(12), count(2_500_000), count(3 * 10**12)] == ["–", "12", "2.5 M", "3 T"]


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show fixd", "unknown attention 'fixd'; did you mean fixed?"),
        ("show fixed:ww=3", "fixed has no option 'ww'; did you mean w?"),
        ("show strided:width=8", "strided has no option 'width'; did you mean w?"),
        ("show Combiner-Fixed", "unknown attention 'Combiner-Fixed'; did you mean combiner-fixed"),
        ("train Listops", "unknown task 'Listops'; did you mean listops"),
        ("train needle --attention ful|star", "unknown attention 'ful'; did you mean full"),
        ("compare needle --attention full,sbn", "unknown attention 'sbn'; did you mean sbm"),
        ("compare needel --attention full", "unknown task 'needel'; did you mean needle"),
        ("compare needle --attention full,full", "names full twice"),
        ("compare needle --attention full,,", "--attention 'full,,' has an empty entry: give comma-separated specs"),
        ("compare needle --attention ,", "--attention ',' has an empty entry"),
        ("show fixed:w=1,,", "spec 'fixed:w=1,,' has an empty option"),
        ("prove star --n 4 --delta abc", "delta must be a fraction such as 1/2 or 0.5, not 'abc'"),
        ("prove star --n 400", "the grid has n/δ^(dn) = about 10^123 columns, and at most 4,000 can be verified"),
        ("show xyzzy", "unknown attention 'xyzzy' (`subquad list` shows all"),
        ("show fixd", "(`subquad list` shows all"),
        ("reproduce xyzzy", "unknown table or figure 'xyzzy' (`subquad reproduce` shows all"),
        ("eval nowhere", "the folder nowhere does not exist"),
        ("train needle --recipe big", "unknown recipe 'big' (available: small"),
        ("tasks xyzzy", "unknown task 'xyzzy' (`subquad tasks` shows all"),
        ("train needle --recipe big", "(available: "),
        ("train needle --set batch=0", "needle: batch must be an integer ≥ 1, not 0"),
        ("bench fixed --batch 0", "--batch"),
        ("--import", "--import needs the name of a module"),
        ("--import no_such_module list", "module 'no_such_module' not found, neither installed nor in "),
        ("--import ./my_blocks list", "./my_blocks is a path, and the name of a module is needed: my_blocks"),
        ("train needle --device cuda", "--device: a GPU is used where torch finds one"),
        ("list --device cuda", "No such option: --device"),
        ("generate . --prompt=", "--prompt is empty"),
        ("plot fixed -o .", "--output must be a file, and . is a folder"),
        ("show fixed:w=0", "w must be an integer ≥ 1 or None, not 0"),
        ("show fixed:w", "'w' is not of the form option=value"),
        ("show fixed --n 0", "--n"),
        ("show fixed --n 1000000", "--n"),
        ("show", "SPEC"),
        ("plot fixed", "--output"),
        ("plot fixed -o nowhere/out.png", "--output: the folder nowhere does not exist"),
        ("study slice-rank --png nowhere/out.png", "--png: the folder nowhere does not exist"),
        ("analyze fixed --png nowhere/out.png", "--png: the folder nowhere does not exist"),
        ("analyze --sets nowhere.json", "--sets nowhere.json: No such file or directory"),
        ("analyze --sets nowhere.npy", "--sets nowhere.npy: No such file or directory"),
        ("plot fixed -o out.xyz", "xyz"),
        ("plot pattern -o out.png", "sets is needed"),
        ("plot fixed:causal=true --bidirectional -o out.png", "causal is True in the spec and False"),
        ("gallery -o /proc/nowhere", "/proc/nowhere"),
        (f"gallery -o {__file__}", "--output must be a folder, and "),
        ("plot composite-slice --weights -o out.png", "--weights: composite-slice has no matrix of weights"),
        (f"analyze --sets {__file__}", f"--sets {__file__} cannot be read: it must be JSON, with n (or p × n) lists"),
        ("train needle --steps 5", "a setting of the recipe is changed with --set, as in --set steps=VALUE"),
        ("bench", "SPEC"),
        ("bench fixed --n 0", "--n must be comma-separated integers ≥ 1, such as 1024,4096, not '0'"),
        ("bench fixed --n 8,x", "--n must be comma-separated integers ≥ 1, such as 1024,4096, not '8,x'"),
        ("study gpu-time --n 8,x", "--n must be comma-separated integers ≥ 1, such as 1024,4096, not '8,x'"),
        ("bench fixed --repeats 0", "--repeats"),
        ("bench fixed --json nowhere/out.json", "--json: the folder nowhere does not exist"),
        ("bench fixed --json .", "--json must be a file, and . is a folder"),
        ("study advice --json nowhere/out.json", "--json: the folder nowhere does not exist"),
        ("study gpu-build --json nowhere/out.json", "--json: the folder nowhere does not exist"),
        ("sample . -o nowhere/out.png", "--out: the folder nowhere does not exist"),
        ("sample . -o out.jpg", "--out must end in .png, not in 'out.jpg'"),
        ("bench fixed --png nowhere/out.png", "--png: the folder nowhere does not exist"),
        ("bench fixed:max_length=4 --n 8" + TINY, "fixed:max_length=4 cannot run at n = 8"),
        ("bench fixed:num_heads=4 --n 8" + TINY, "num_heads is 4 in the spec and 2 as a keyword"),
        ("lst", "No such command 'lst'. Did you mean 'list'?\n"),
        ("--nonsense", "--nonsense"),
        ("study nothing", "nothing"),
        ("train needle --resume --out new", "new cannot be resumed: the folder does not exist; without --resume"),
        ("train needle --resume --overwrite", "--resume continues a run and --overwrite deletes it: choose one"),
        ("train needle --set heads=3", "width must be a multiple of heads=3, not 64"),
        ("train needle --set batch=7 --set accumulate=2", "batch must be a multiple of accumulate=2, not 7"),
        ("train needle --set positions=own", "positions=own: full has no positions of its own"),
        ("train needle --data nowhere", "--data: the folder nowhere does not exist"),
        ("train lm-bytes --attention fnet", "fnet: causal=True is not supported; it is bidirectional only"),
        ("train needle --attention luna:causal=true", "causal is the model's to say (false here): leave it out"),
        ("compare needle --attention full --rates 1e-3 --set rate=1e-3,2e-3", "mean the same: give one of them"),
        ("train needle --set rate=1e-3,2e-3", "subquad compare needle --attention 'full' --rates 1e-3,2e-3"),
        ("compare needle --attention hca", "hca: causal=False is not supported; it is causal only"),
        ("reproduce --column none", "NAME is missing"),
        ("reproduce sbm-table-3 --pages docs", "--pages runs nothing: leave out sbm-table-3"),
        ("reproduce sbm-table-3 --method none", "sbm-table-3 has no method 'none'; it has "),
        ("bench fixed --dtype float99", "--dtype must be one of float32, bfloat16, float16, not 'float99'"),
        ("bench fixed --dropout 2 --backward", "--dropout must be a probability ≥ 0 and < 1, not 2.0"),
        ("bench fixed --processes 8 --n 4", "error: 8 processes cannot share 4 tokens"),
        ("calibrate --out .", "--out must be a file, and . is a folder"),
        ("prove star --function none", "--function must be one of reverse, sum"),
        ("prove star --epsilon -1", "--epsilon must be a number > 0, not -1.0"),
        ("convert . --attention full -o new", ". is neither a folder of a transformers model (with config.json)"),
        ("passkey x.gguf", "x.gguf: there is no such file"),
        ("passkey . --heads --full", "--heads looks at the model as it is"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(run, tmp_path, monkeypatch, line, message):
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    result = run(line)
    assert result.exit_code == 2
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left


def test_too_little_memory_is_one_line(run, monkeypatch):
    def refuse(name: str) -> None:
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 32000000000000 bytes. Error 12")

    monkeypatch.setattr(sys.modules["subquad.attention.registry"], "describe", refuse)
    expected = "error: there is not enough memory: one tensor would take 29,802 GiB; choose smaller sizes\n"
    assert (run("list").exit_code, run("list").stderr) == (2, expected)
    monkeypatch.setattr(sys.modules["subquad.attention.registry"], "describe", lambda name: 1 / 0)
    assert isinstance(run("list").exception, ZeroDivisionError), "other errors are not hidden"


def test_a_traceback_can_be_asked_for(run):
    result = run("--traceback show fixd")
    assert isinstance(result.exception, ValueError) and result.exit_code == 1


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help_with_an_example(run, command):
    result = run(f"{command} --help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout and ("Example: " in result.stdout or command == "study")


@pytest.mark.parametrize(
    "command",
    ["plot", "show", "bench", "analyze", *(f"study {name}" for name in studies.STUDIES)],
)
def test_help_names_the_formats_of_pictures(run, command):
    """Those that an error names."""
    shown = " ".join(run(f"{command} --help").stdout.replace("│", " ").split())
    if "--png" in shown or "--output" in shown:
        assert ENDINGS in shown
        assert f"must end in {ENDINGS}, not in 'a.xyz'" in run("plot fixed -o a.xyz").stderr


def test_defaults_in_words_are_shown(run):
    """rich takes words in square brackets for markup and shows nothing."""
    shown = " ".join(run("advise --help").stdout.replace("│", " ").split())
    assert "Available memory, such as 4GiB. Default: that of this machine." in shown


# ---- before torch is loaded --------------------------------------------------------------------------------

AT_ONCE = ("--help", "list", "--version", "", "list --json", "tasks", "lst", "--nonsense", "show fixd",
           "show fixed --n 0", "bench fixd", "train nothing", "eval /nowhere", "generate /nowhere",
           "compare needle --attention fuul", "train --help", "compare --help", "show strided:width=8",
           "bench full sbm:sampler=none --n 64", "plot linear:no=1", "analyze strided --w 0", "analyze star --n 1",
           "prove star --delta 0", "train needle --set stpes=3", "train lm-words --set rare=-1",
           "compare needle --attention full --set steps=x", "compare needle --attention full --rates x",
           "study nothing", "train needle --recipe big", "compare lra --attention full --recipe big",
           "show fixed --png nowhere/a.png", "plot fixed -o out.xyz", "plot fnet --causal -o out.png",
           "gallery -o /proc/nowhere", "bench fixed --dtype float99", "bench fixed --processes 8 --n 4",
           "bench fnet --causal", "calibrate --out /", "doctor --dtype float99", "analyze star --png nowhere/a.png",
           "prove star --function none", "prove star --epsilon -1", "train needle --resume --out /nowhere",
           "train needle --set heads=3", "train needle --data /nowhere", "train lm-bytes", "train glue-cola",
           "train lm-bytes --attention fnet", "train needle --set positions=own", "compare lm-words --attention full",
           "compare needle --attention full --out /dev/null", "reproduce combiner-table-1 --column none",
           "reproduce sbm-table-3 --rates x", "convert /nowhere --attention combiner-window -o new",
           "perplexity /nowhere --text none", "adapt /nowhere --text none -o new", "passkey /nowhere",
           "study", "study speed --minutes x", "study speed --write nowhere.md", "study conversion /nowhere --text x",
           "study gpu-build --targets sm_1", "study gpu-time fixd", "study gpu-time --n x", "study sbm-cost --nothing",
           "study fidelity --png a.xyz", "study processes --parts some", "study repeated-tokens --set stpes=3",
           "study sbm-cost --degree 0", "study slice-rank --png nowhere/a.png", "study advice --json /nowhere/x.json",
           "reproduce combiner-table-1 --data /nowhere", "reproduce combiner-table-4", "reproduce sbm-table-7",
           "train lm-books", "train lm-books --set source=folder", "train lm-bytes --set source=file --set path=none",
           "prove star --n 400", "prove star --function os:none", "bench --peers nobody", "bench --peers --n 64,128",
           "train needle --set length=250", "compare needle --attention full --set length=250",
           "train copying --set length=7",
           "train listops --set max_length=500", "train pathfinder --set length=100", "train image --set colour=rgb",
           "train translation --set target=en", "plot pattern -o out.png", "train needle --attention pattern",
           "compare needle --attention full,pattern", "train needle --out /proc/none",
           "study repeated-tokens --out /proc/none")  # fmt: skip


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    kept = {key: value for key, value in os.environ.items() if key not in WAITING}
    return subprocess.run([sys.executable, "-c", code], env={**kept, **paths}, capture_output=True, text=True)


def test_help_lists_and_wrong_names_are_answered_without_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)  # with data sets, some of the lines would train
    monkeypatch.chdir(tmp_path)
    code = f"""if True:
        import sys
        from subquad.__main__ import main
        for line in {AT_ONCE!r}:
            sys.argv = ["subquad", *line.split()]
            try:
                main()
            except SystemExit:
                pass
            heavy = {{"torch", "numpy", "transformers", "matplotlib"}} & set(sys.modules)
            heavy |= {{"pydantic"}} & set(sys.modules) if line in ("list", "--help") else set()
            assert not heavy, (line, heavy)
        print("none", file=sys.stderr)
    """
    result = python(code)
    assert result.returncode == 0 and result.stderr.endswith("none\n"), result.stderr


def test_the_package_imports_its_names_when_they_are_used():
    code = """if True:
        import sys
        import subquad
        from subquad import Options, available, option
        assert "sbm" in available() and "torch" not in sys.modules
        import subquad.attention.base  # Python would now put the package in the place of the function
        made = subquad.attention("full", num_heads=1, head_dim=4)
        assert isinstance(made, subquad.Attention) and subquad.MultiheadAttention(4, 1)
        assert set(subquad.__all__) <= set(dir(subquad)) and callable(subquad.testing.check_attention)
        try:
            subquad.nothing
        except AttributeError as error:
            print(error)
    """
    result = python(code)
    assert result.stdout == "module 'subquad' has no attribute 'nothing'\n", result.stderr


@pytest.mark.parametrize("name", subquad.available())
def test_what_the_source_declares_is_what_the_class_has(name):
    cls, found = mechanism(name), describe(name)
    able = cls.capabilities
    assert found == {
        "name": name, "family": cls.family, "causal": able.causal, "bidirectional": able.bidirectional,
        "level": able.level, "cost": cls.cost, "paper": cls.paper,
    }  # fmt: skip
    entry = f"{cls.__module__}:{cls.__qualname__}"
    assert describe_source(entry, "family") == cls.family, "read from the text, not from the class"


def describe_source(entry: str, attribute: str):
    module, _, cls = entry.partition(":")
    return declarations._look_up(module, cls, attribute)


@pytest.mark.parametrize("name", tasks.available())
def test_what_a_task_declares_is_what_its_class_has(name):
    cls, found = tasks.task_class(name), tasks.describe(name)
    assert found == {"name": name, **{key: getattr(cls, key) for key in found if key != "name"}}
    assert describe_source(f"{cls.__module__}:{cls.__qualname__}", "title") == cls.title


@pytest.mark.parametrize("name", subquad.available())
def test_options_read_from_the_source_are_those_of_the_class(name):
    cls = mechanism(name)
    found = options_class(f"{cls.__module__}:{cls.__qualname__}", "Options")
    assert found is not None and fields(found) == fields(cls.Options)


def test_settings_read_from_the_source_are_those_of_the_task():
    classes = {name: tasks.task_class(name) for name in tasks.available()}
    found = {name: options_class(f"{cls.__module__}:{cls.__qualname__}", "recipes") for name, cls in classes.items()}
    told = {name: fields(each) for name, each in found.items() if each is not None}
    assert told == {name: fields(type(classes[name].recipes["small"])) for name in told}
    assert {"needle", "listops", "text", "image", "lm-bytes", "translation"} <= set(told), "some are computed, few"
    names = {name: keys(f"{cls.__module__}:{cls.__qualname__}", "recipes") for name, cls in classes.items()}
    assert all(given is None or given == list(classes[name].recipes) for name, given in names.items())
    assert {"needle", "listops", "text", "image", "lm-bytes", "translation"} <= {n for n in names if names[n]}


@pytest.mark.parametrize(("line", "folder"), [
    ("train lm-bytes", "shakespeare"), ("train lm-bytes --set source=enwik8", "enwik8"), ("train mlm", "wikitext-2"),
    ("train glue-cola", "glue"), ("train xnli", "xnli"), ("train translation", "multi30k"), ("train image", "cifar10"),
    ("compare lra --attention full", "imdb"), ("train image-density --set source=imagenet64", "imagenet64"),
])  # fmt: skip
def test_the_folder_of_missing_data_is_named(run, monkeypatch, line, folder):
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    result = run(line)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"the folder data/{folder} does not exist: get " in result.stderr


def test_directions_of_tasks_are_those_of_their_heads():
    for name, head in HEADS.items():
        assert tasks.CAUSAL.get(name, (False,)) == ((False, True) if name == "seq2seq" else (head.causal,))


def test_importing_the_mechanisms_does_not_import_the_compiler():
    """torch._dynamo takes as long to import as torch itself."""
    code = """if True:
        import sys
        from subquad.attention.registry import available, mechanism
        for name in available():
            mechanism(name)
            assert "torch._dynamo" not in sys.modules, name
    """
    result = python(code)
    assert result.returncode == 0, result.stderr

    def plain() -> None: ...

    assert vars(torch.compiler.assume_constant_result(plain)) == vars(constant_of_graphs(lambda: None))


def test_what_the_text_does_not_tell_is_read_from_the_class(tmp_path, monkeypatch):
    (tmp_path / "computed.py").write_text("class A:\n    x = 'a' * 3\n\nclass B(A):\n    y = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert declarations.declared("computed:B", ("x", "y")) == {"x": "aaa", "y": 1}


def test_threads_wait_passively_unless_the_user_says_otherwise():
    code = "import os, sys; sys.argv[1:] = ['--version']\nfrom subquad.__main__ import main\ntry:\n    main()\n"
    code += "finally:\n    print(os.environ.get('OMP_WAIT_POLICY'))"
    assert python(code).stdout.split()[-1] == "PASSIVE"
    assert python(code, OMP_WAIT_POLICY="ACTIVE").stdout.split()[-1] == "ACTIVE"
    assert python(code, GOMP_SPINCOUNT="0").stdout.split()[-1] == "None"


SWALLOWING = """
import os, signal, weakref
from subquad.__main__ import interrupt
signal.signal(signal.SIGINT, interrupt)
code = "def callback(_): os.kill(os.getpid(), signal.SIGINT); sum(range(9))"
exec(compile(code, "<frozen importlib._bootstrap>", "exec"))
class Lock: pass
lock = Lock()
kept = weakref.ref(lock, callback)
del lock
print("it went on")
"""


def test_ctrl_c_is_not_swallowed_by_a_callback_of_the_import_system():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, "-c", SWALLOWING], env=env, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


FINALIZED = """
import os, signal
from subquad.__main__ import interrupt
signal.signal(signal.SIGINT, interrupt)
def press():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(9))
class Group:
    def __del__(self):
        press()
group = Group()
del group
print("it went on")
"""


def test_ctrl_c_is_not_swallowed_by_a_finalizer():
    found = python(FINALIZED)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


TWICE = """
import atexit, os, signal, sys, types
from subquad.__main__ import main
def press():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(9))
def app(prog_name):
    {first}
atexit.register(press)
sys.modules["subquad.cli"] = types.SimpleNamespace(app=app)
main()
"""


@pytest.mark.parametrize("first", ["press()", "sys.exit(130)"])
def test_a_second_ctrl_c_while_the_program_ends_is_silent(first):
    """From the terminal and through a parent process; the second one may find the interpreter at its end."""
    found = python(TWICE.format(first=first))
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.5])
def test_ctrl_c_while_importing_ends_cleanly(delay):
    code = "import sys; from subquad.__main__ import main; print('begun', flush=True); main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, "prove", "star"]  # imports torch, and writes nothing
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said


# ---- modules of one's own, narrow windows, strange paths ---------------------------------------------------

OWN = """
import subquad
from subquad.tasks import register
from subquad.tasks.needle import Needle

@subquad.register("of-my-own")
class Mine(subquad.Attention):
    "All alike."
    family, cost, paper = "own", "n²", "unpublished"

register("own-task", type("Own", (Needle,), {"title": "a task of my own"}))
"""


def test_an_error_in_a_module_of_ones_own_is_one_line_with_its_place(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(IMPORTS, raising=False)
    (tmp_path / "divides.py").write_text("x = 1\n\nx / 0\n")
    (tmp_path / "half.py").write_text("x = 1\nx = = 2\n")
    (tmp_path / "asks.py").write_text('import subquad\nsubquad.attention("fulll")\n')
    for module, said in (
        ("divides", f"{tmp_path / 'divides.py'}, line 3: ZeroDivisionError: division by zero"),
        ("half", f"{tmp_path / 'half.py'}, line 2: SyntaxError"),
        ("asks", f"{tmp_path / 'asks.py'}, line 2: ValueError: unknown attention 'fulll'"),
        ("divides.py", "divides.py is a path, and the name of a module is needed: divides"),
    ):
        found = run(f"--import {module} list")
        assert found.exit_code == 2 and said in found.stderr.replace("\n", " "), found.output
        assert len(found.stderr.splitlines()) <= 4 and "Traceback" not in found.output


def test_a_folder_without_a_tokenizer_is_named(run, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    found = run("passkey bare")
    assert found.exit_code == 2 and found.stderr.startswith("error: bare has no tokenizer")


def test_modules_of_ones_own_are_imported(run, tmp_path, monkeypatch):
    (tmp_path / "my_own_module.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(IMPORTS, raising=False)
    monkeypatch.setitem(os.environ, IMPORTS, "")
    try:
        assert "of-my-own" in run("--import my_own_module list").stdout
        assert "a task of my own" in run("--import my_own_module tasks").stdout
        assert os.environ[IMPORTS] == "my_own_module", "the processes that a command starts import it too"
        assert "All alike." in run("show of-my-own --n 4").stdout
    finally:
        subquad.unregister("of-my-own")
        tasks._TASKS.pop("own-task", None)
        sys.modules.pop("my_own_module", None)


def test_the_recipes_of_a_task_come_with_what_it_is(run):
    said = run("tasks needle").stdout
    assert said.startswith("needle: answer questions about facts scattered in a long text")
    assert "metric: accuracy; data: generated" in said and "peak learning rate" in said


@pytest.mark.parametrize("command", ["list", "tasks"])
def test_lists_can_be_read_in_a_narrow_window(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(command).stdout.splitlines()
    assert max(map(len, lines)) <= 40
    names = subquad.available() if command == "list" else tasks.available()
    assert [line for line in lines if not line.startswith(" ")] == list(names), "every name whole, on its own line"


@pytest.mark.parametrize("command", ["show combiner-window --n 8", "tasks needle", "doctor"])
def test_tables_break_no_word_in_a_narrow_window(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    said = run(command).stdout
    assert "…" not in said and ("residual-attended" in said or "feed-forward" in said or "compressed" in said)


def test_the_list_takes_a_line_or_two_per_mechanism_in_a_window_of_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = run("list").stdout
    assert len(said.splitlines()) < 2 * len(subquad.available()) and "…" not in said
    assert "n·window" in said and "wider window" in said and max(map(len, said.splitlines())) <= 80


def test_paths_are_no_markup(capsys):
    result = {"test": {"accuracy": 0.5}, "steps": 3, "best_step": None, "metric": "accuracy", "valid": None,
              "parameters": 1, "step_seconds": 0.1, "memory": 0}  # fmt: skip
    show_training(result, Path("z[/b]/:smile:"))
    assert "model: z[/b]/:smile:/model\n" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "words"), [
    ("plot full --n -3", ("--n", "-3", "1")),
    ("plot full --n=-3", ("--n", "-3", "1")),
    ("advise --n 16k", ("--n", "16k", "integer")),
    ("show :w=8", ("the name of the attention is missing (`subquad list` shows all ",)),
])  # fmt: skip
def test_errors_name_the_option_and_its_value(run, line, words):
    result = run(line)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and all(word in result.stderr for word in words)


# ---- studies -----------------------------------------------------------------------------------------------


def test_studies_are_listed_and_an_unknown_one_is_refused(run):
    assert all(name in run("study").stdout for name in studies.STUDIES)
    refused = run("study sped")
    assert refused.exit_code == 2 and "unknown study 'sped'; did you mean speed" in refused.stderr


def test_every_study_has_a_command():
    modules = {name for _, name, _ in pkgutil.iter_modules([str(Path(subquad.__file__).parent / "studies")])} - {
        "tables",
        "conversion_tables",
    }
    assert {name.replace("-", "_") for name in studies.STUDIES} == modules


def test_choices_of_studies_are_those_that_they_know():
    from subquad.studies import gpu_build, processes

    assert tuple(gpu_build.TARGETS) == studies.TARGETS and tuple(gpu_build.KINDS) == studies.DTYPES
    assert tuple(processes.PARTS) == studies.PARTS
