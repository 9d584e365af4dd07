"""`subquad study NAME`: the measurements behind our claims, and what each of them takes. A study is a module of
`subquad.studies`, which imports torch; it is imported when its arguments have been checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from subquad.attention.registry import check_name
from subquad.cli import Part, PlainHelp
from subquad.core.files import ENDINGS, check_file, check_picture, check_pretrained, read_text
from subquad.core.names import unknown
from subquad.core.numbers import parse_lengths
from subquad.core.options import split_list
from subquad.tasks import check_settings
from subquad.training.start import check_out

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")  # of studies.gpu_build
DTYPES = ("float16", "bfloat16", "float32", "TF32")
PARTS = ("sent", "memory", "times")  # of studies.processes
LEAST = 2048  # two lengths are the fewest that growth can be seen in

Kept = Annotated[Path, typer.Option("--json", help="File that keeps the results.")]
Written = Annotated[
    list[Path] | None, typer.Option("--write", help="Bring the tables in this Markdown file up to date.")
]
Minutes = Annotated[float, typer.Option(min=0, help="Stop after about this many minutes.")]
Measured = Annotated[bool, typer.Option("--measured", help="Measure nothing, only write the tables.")]
Picture = Annotated[Path, typer.Option(help=f"File for the picture: {ENDINGS}.")]
Runs = Annotated[Path, typer.Option(help="Folder of the runs; finished ones are kept.")]
Longest = Annotated[int, typer.Option(min=LEAST, help="Lengths from 1024 up to here.")]
Heads = Annotated[int, typer.Option(min=1, help="Number of heads.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")]


def advice(
    path: Kept = Path("advice.json"),
    write: Written = None,
    minutes: Minutes = math.inf,
    times: Annotated[bool, typer.Option("--time/--no-time", help="Measure times, on an idle machine.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure memory.")] = True,
    seed: Annotated[int, typer.Option(help="Seed that the layers are drawn with.")] = 2027,
    measured: Measured = False,
) -> None:
    """Compare the predictions of `subquad advise` with measurements of ten layers outside any calibration.

    The predictions are those of this machine's calibration where there is one. Run the same command again to resume.
    """
    _check_files(path, write, measured)
    from subquad.studies.advice import show

    show(path, write or [], minutes, times, memory, seed, measured)


def combiner_cost(
    causal: Annotated[bool, typer.Option(help="Causal or bidirectional attention.")] = True,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads of width 64.")] = 2,
    longest: Longest = 65536,
    png: Picture = Path("combiner-cost.png"),
) -> None:
    """Operations and memory of every Combiner plan over n, against the declared exponent: a table and a plot."""
    check_picture(png, "--png")
    from subquad.studies.combiner_cost import show

    show(causal, heads, longest, png)


def conversion(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers language model, or a .gguf file.")],
    text: Annotated[str, typer.Option(help="Comma-separated text files; the part behind --start is read.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the page and its numbers.")] = Path("out/demo"),
    attention: Annotated[
        list[str] | None, typer.Option("--attention", help="SPEC of a conversion; may be repeated.")
    ] = None,
    adapted: Annotated[
        list[Path] | None, typer.Option(help="Folder of an adapted model, measured too; may be repeated.")
    ] = None,
    n: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 2048,
    start: Annotated[int, typer.Option(min=0, help="Character at which to begin.")] = 20000,
    speed: Annotated[str, typer.Option(help="Comma-separated lengths of prompts whose speed is measured.")] = "4096",
    hidden: Annotated[int, typer.Option(min=0, help="Tokens of a text with a hidden number; 0 = none.")] = 1024,
    tries: Annotated[int, typer.Option(min=1, help="Numbers hidden at each depth.")] = 2,
) -> None:
    """Convert a pretrained model and compare it with the original: losses, speed, cache, hidden numbers.

    Run the same command again to resume it, or with more texts, attentions or lengths to add them.
    """
    for each in (model, *(adapted or ())):
        check_pretrained(each)
    for spec in attention or ():
        check_name(spec)
    texts = {path.stem: read_text(path) for path in (Path(name.strip()) for name in text.split(","))}
    lengths = parse_lengths(speed, "--speed", "2048,8192") if speed.strip() else []
    check_out(folder)
    from subquad.studies.conversion import show

    show(model, texts, folder, attention or [], adapted or [], n, start, lengths, hidden, tries)


def fidelity(
    n: Annotated[int, typer.Option("--n", min=16, help="Length of the sequences.")] = 256,
    causal: Annotated[bool, typer.Option(help="Causal or bidirectional attention.")] = True,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps of the language model; 0: random inputs only.")
    ] = 150,
    png: Picture = Path("fidelity.png"),
    seed: Seed = 0,
) -> None:
    """How close the weights of Combiner are to full attention, every plan at equal cost: a table and a plot."""
    check_picture(png, "--png")
    from subquad.studies.fidelity import show

    show(n, causal, steps, png, seed)


def gpu_build(
    targets: Annotated[str, typer.Option(help="GPUs to build for, comma-separated.")] = ",".join(TARGETS),
    dtypes: Annotated[str, typer.Option(help="Dtypes, comma-separated.")] = ",".join(DTYPES),
    widths: Annotated[str, typer.Option(help="Head widths, comma-separated.")] = "64,128",
    kernels: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, and keep those that it has.")
    ] = None,
) -> None:
    """Compile the Triton kernels for GPUs ahead of time and show what they use; no GPU is needed."""
    chosen = _choices("target", targets, TARGETS), _choices("dtype", dtypes, DTYPES)
    sizes = parse_lengths(widths, "--widths", "64,128")
    check_file(json, "--json")
    from subquad.studies.gpu_build import show

    show(*chosen, sizes, kernels, json)


def gpu_time(
    specs: Annotated[list[str] | None, typer.Argument(metavar="SPEC", help="Mechanisms on plans.")] = None,
    n: Annotated[str, typer.Option("--n", help="Sequence lengths, comma-separated.")] = "8192,32768,131072",
    heads: Heads = 16,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Width of a head.")] = 64,
) -> None:
    """Predict the forward time of causal attention on GPUs from a model. Nothing here is measured."""
    for spec in specs or ():
        check_name(spec)
    lengths = parse_lengths(n)
    from subquad.studies.gpu_time import show

    show(specs or [], lengths, heads, head_dim)


def pathfinder_sheet(png: Picture = Path("pathfinder.png"), seed: Seed = 0) -> None:
    """Pictures of the task pathfinder, joined and not, of several sizes, on one sheet."""
    check_picture(png, "--png")
    from subquad.studies.pathfinder_sheet import draw_sheet

    print(f"drawn: {draw_sheet(png, seed=seed)}")


def processes(
    path: Kept = Path("processes.json"),
    write: Written = None,
    parts: Annotated[str, typer.Option(help="What to count or measure, comma-separated.")] = ",".join(PARTS),
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of the times; their median is shown.")] = 4,
) -> None:
    """Bytes, memory and time of one sequence that is divided among processes. Times need a quiet machine."""
    wanted = _choices("part", parts, PARTS) if parts else []
    _check_files(path, write, measured=not wanted)
    from subquad.studies.processes import show

    show(path, write or [], wanted, rounds)


def repeated_tokens(
    out: Runs = Path("out/repeated-tokens"),
    attention: Annotated[str, typer.Option(help="Mechanisms with their options, comma-separated.")] = "full,sbm",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """SBM learns to use full attention where the task needs it (SBM-Transformer, section 5.1): loss and density over
    the steps. Run the same command again to resume.
    """
    for spec in split_list(attention):
        check_name(spec)
    check_settings("repeated-tokens", settings or (), "paper")
    check_out(out)
    from subquad.studies.repeated_tokens import show

    show(out, split_list(attention), settings or [], seed)


def sbm_cost(
    png: Picture = Path("sbm-cost.png"),
    degree: Annotated[float, typer.Option(min=1, help="Expected number of edges of a query.")] = 64,
    longest: Longest = 32768,
    repeats: Annotated[int, typer.Option(min=1, help="Number of steps; the fastest counts.")] = 3,
) -> None:
    """Time and memory of SBM attention at a constant number of edges per query: a table and a plot."""
    check_picture(png, "--png")
    from subquad.studies.sbm_cost import show

    show(png, degree, longest, repeats)


def sbm_pictures(
    png: Picture = Path("sbm-trained.png"),
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 1000,
    penalty: Annotated[float, typer.Option(min=0, help="λ of the density loss, in the second half.")] = 0.02,
    seed: Seed = 0,
) -> None:
    """Train a small encoder with SBM attention and draw the masks and densities of its heads."""
    check_picture(png, "--png")
    from subquad.studies.sbm_pictures import draw_trained, train_small

    path, accuracy = draw_trained(train_small(steps=steps, penalty=penalty, seed=seed), png)
    print(f"accuracy {accuracy:.3f}\ndrawn: {path}")


def sequence_scaling(
    n: Annotated[int, typer.Option("--n", min=1024, help="Length of the sequence.")] = 1 << 20,
    heads: Heads = 32,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 128,
) -> None:
    """Predict the time of one causal layer on 8, 64 and 512 GPUs from a model. Nothing here is measured."""
    from subquad.studies.sequence_scaling import show

    show(n, heads, head_dim)


def slice_cost(png: Picture = Path("slice-cost.png")) -> None:
    """Cost of slices against linear attentions (Composite Slice, section A.4): a table and a plot."""
    check_picture(png, "--png")
    from subquad.studies.slice_cost import show

    show(png)


def slice_rank(
    png: Picture = Path("slice-rank.png"),
    seeds: Annotated[int, typer.Option(min=1, help="Random inputs and weights to average over.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")] = False,
) -> None:
    """Propositions 1 and 2 of Composite Slice (appendix A.5): degrees, ranks and entropies, a table and a plot."""
    check_picture(png, "--png")
    from subquad.studies.slice_rank import show

    show(png, seeds, as_json)


def speed(
    path: Kept = Path("speed.json"),
    write: Written = None,
    minutes: Minutes = math.inf,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds; the best time counts.")] = 3,
    comparison: Annotated[
        Path | None, typer.Option(help="Keep the results of this comparison.json beside the others, as run.json.")
    ] = None,
    measured: Measured = False,
) -> None:
    """Time and memory of every mechanism over the length, and the length from which it is faster than full attention.

    Run the same command again to continue. Without limits it takes about half an hour on 2 cores.
    """
    _check_files(path, [*(write or ()), *([] if comparison is None else [comparison])], measured)
    from subquad.studies.speed import show

    show(path, write or [], minutes, repeats, comparison, measured)


STUDIES: dict[str, Callable[..., Any]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        advice, combiner_cost, conversion, fidelity, gpu_build, gpu_time, pathfinder_sheet, processes,
        repeated_tokens, sbm_cost, sbm_pictures, sequence_scaling, slice_cost, slice_rank, speed,
    )
}  # fmt: skip


# ---- checks ----


def _check_files(path: Path, read: Sequence[Path] | None, measured: bool) -> None:
    """Results can be kept, or are there if nothing is measured; files that are read exist."""
    for each in [*(read or ()), *([path] if measured else [])]:
        if not each.is_file():
            raise ValueError(f"{each}: there is no such file")
    if not measured:
        check_file(path, "--json")


def _choices(what: str, text: str, known: Sequence[str]) -> list[str]:
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in known:
            raise unknown(what, name, known)
    return wanted


EXAMPLES = {
    "conversion": "conversion model.gguf --text book.txt --out out/demo",
    "gpu-build": "gpu-build --targets sm_90 --widths 64",
    "gpu-time": "gpu-time combiner-fixed longformer:window=256",
}


def add_to(app: typer.Typer) -> None:
    group = Part(cls=Studies)
    group.callback(invoke_without_command=True)(study)
    for name, function in STUDIES.items():
        group.command(name, epilog=f"Example: subquad study {EXAMPLES.get(name, name)}")(function)
    app.add_typer(group, name="study")


def study(context: typer.Context) -> None:
    """Run a study: a measurement behind one of our claims, with a table and a plot."""
    if context.invoked_subcommand is None:
        print(context.get_help())


class Studies(PlainHelp, TyperGroup):
    """Refuses an unknown study with the nearest names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in STUDIES:
            raise unknown("study", cmd_name, STUDIES)
        return super().get_command(ctx, cmd_name)
