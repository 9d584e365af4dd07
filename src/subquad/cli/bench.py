"""`subquad bench SPEC…`: the command, which flags can be combined, and which module measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.attention.registry import check_direction, check_name
from subquad.cli import given
from subquad.core.files import ENDINGS, check_file, check_picture
from subquad.core.numbers import parse_lengths

if TYPE_CHECKING:
    from subquad.bench import Setting


Specs = Annotated[
    list[str] | None,
    typer.Argument(metavar="SPEC", help="Mechanisms with their options; with --peers, names of peers."),
]
Lengths = Annotated[
    str | None,
    typer.Option("--n", help="Sequence lengths, comma-separated. Default: 1024,4096,8192; with --peers 4096."),
]
Backward = Annotated[bool, typer.Option("--backward", help="Measure forward and backward, not only forward.")]
Causal = Annotated[bool, typer.Option("--causal", help="Measure causal attention, against causal full attention.")]
Heads = Annotated[int, typer.Option(min=1, help="Number of heads.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch size. Default: 1; with --ragged 8.", show_default=False)]
Ragged = Annotated[
    bool,
    typer.Option("--ragged", help="Measure padded rows of n/2 to n tokens, also against rows without padding."),
]
Dropout = Annotated[
    float | None,
    typer.Option(
        help="Probability of attention dropout in training, also measured against a step without dropout.",
        show_default=False,
    ),
]
Model = Annotated[
    bool,
    typer.Option(
        "--model", help="Measure a training step of a whole model with 6 layers, as wide as all heads together."
    ),
]
Decode = Annotated[
    bool,
    typer.Option("--decode", help="Measure streaming: one decode step after n tokens, the state, and the prefill."),
]
Chunk = Annotated[int, typer.Option(min=1, help="With --decode: number of tokens of a prefill chunk.")]
Device = Annotated[str, typer.Option(help="Device to measure on: cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the tensors: float32, bfloat16 or float16.")]
Repeats = Annotated[int, typer.Option(min=1, help="Number of rounds; the best time is reported.")]
Processes = Annotated[
    str | None,
    typer.Option(
        help="Divide the sequence among this many processes, comma-separated, such as 1,2,4.", show_default=False
    ),
]
CountOnly = Annotated[
    bool, typer.Option("--count-only", help="With --processes: only count the bytes that are sent, for any length.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results to this file, which is updated after every measurement."),
]
PictureFile = Annotated[
    Path | None, typer.Option("--png", help=f"Draw time and memory against the length into this file ({ENDINGS}).")
]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="Measure layers against other implementations of the same mechanism (the extra `peers` and "
        "transformers), in the direction that is listed for each. Without names, all that are installed are "
        "measured. Rows of other peers in an existing JSON file are kept.",
    ),
]
Crossover = Annotated[
    bool, typer.Option(help="With --peers: find the length from which our layer is faster than full attention.")
]


# The special measurements and the flags that each of them takes; any other flag raises an error.
_SHARED = {"specs", "n", "heads", "head_dim", "batch", "repeats", "json"}
TAKES = {
    "decode": _SHARED | {"chunk", "causal"},  # always causal
    "peers": _SHARED | {"backward", "crossover"},
    "processes": _SHARED - {"json"} | {"causal", "count_only"},
    "model": _SHARED | {"causal", "device", "png"},  # always forward, backward and update
}
DTYPES, DEVICES = ("float32", "bfloat16", "float16"), ("cpu", "cuda")
OWN = {"chunk": "decode", "crossover": "peers", "count_only": "processes"}  # flags that only one of them takes


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad bench longformer fixed:w=90 --n 1024,4096,8192 --backward --json out.json")(
        bench
    )


def bench(
    context: typer.Context,
    specs: Specs = None,
    n: Lengths = None,
    backward: Backward = False,
    causal: Causal = False,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    batch: Batch = None,
    ragged: Ragged = False,
    dropout: Dropout = None,
    model: Model = False,
    decode: Decode = False,
    chunk: Chunk = 1024,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    processes: Processes = None,
    count_only: CountOnly = False,
    json: JsonFile = None,
    png: PictureFile = None,
    peers: Peers = False,
    crossover: Crossover = True,
) -> None:
    """Measure mechanisms against full attention in the same run.

    Mechanisms on q, k, v are compared with torch's scaled_dot_product_attention with the same causal flag;
    mechanisms that work on whole layers are measured with their projections and compared with a layer of full
    attention.

    With --model, a training step of a whole language model (forward, loss, backward, update) is compared with the same
    model with full attention.

    With --decode, one token after n others is measured against full attention over a preallocated key/value cache.

    With --processes, one sequence is divided among several processes of one thread each. The table shows time and
    memory of the forward and backward pass of a layer, and the bytes that a process sends, compared with ring
    attention (docs/distributed.md).
    """
    kind = refuse_what_does_not_go_together(context)
    check_file(json, "--json")
    check_picture(png, "--png")
    _check_specs(specs, kind, causal)
    _check_choice("--dtype", dtype, DTYPES)
    _check_choice("--device", device, DEVICES)
    _check_rows(backward, batch, ragged, dropout)
    names, lengths = specs or [], None if n is None else parse_lengths(n)
    about: dict[str, Any] = {"batch": batch or (8 if ragged else 1), "heads": heads, "head_dim": head_dim}
    if kind == "peers":
        _peers(names, lengths, {**about, "backward": backward}, repeats, json, crossover)
        return
    lengths = lengths or [1024, 4096, 8192]
    if kind == "processes":
        _processes(names, lengths, _check_shares(processes, lengths), causal, about, repeats, count_only)
    elif kind == "decode":
        _decode(names, lengths, {**about, "causal": True}, repeats, chunk, json)
    else:
        about |= {"causal": causal, "device": device, "dtype": dtype, "ragged": ragged, "dropout": dropout or 0.0}
        about |= {"backward": True, "level": "model"} if model else {"backward": backward}
        _ordinary(names, lengths, about, repeats, json, png)


# ---- checks ----


def refuse_what_does_not_go_together(context: typer.Context) -> str | None:
    """The measurement of its own that was asked for, None for the ordinary one. A flag it would ignore is an error."""
    flags = given(context)
    special = [name for name in TAKES if name in flags]
    if len(special) > 1:
        raise typer.BadParameter(
            f"{_flag(special[0])} and {_flag(special[1])} are measurements of their own: choose one"
        )
    kind = special[0] if special else None
    for name in flags:
        if name in OWN and kind != OWN[name]:
            raise typer.BadParameter(f"{_flag(name)} needs {_flag(OWN[name])}")
        if kind is not None and name != kind and name not in TAKES[kind]:
            raise typer.BadParameter(f"{_flag(kind)} does not go with {_flag(name)}: leave one of them out")
    return kind


def _check_specs(specs: list[str] | None, kind: str | None, causal: bool) -> None:
    """With --peers the names are those of peers, and none is needed."""
    if kind == "peers":
        return
    if not specs:
        raise typer.BadParameter("SPEC is missing: name one mechanism or more, or pass --peers")
    for spec in specs:
        check_name(spec)
        check_direction(spec, causal or kind == "decode")


def _check_rows(backward: bool, batch: int | None, ragged: bool, dropout: float | None) -> None:
    if dropout is not None and not 0 <= dropout < 1:
        raise typer.BadParameter(f"--dropout must be a probability ≥ 0 and < 1, not {dropout}")
    if dropout is not None and not backward:
        raise typer.BadParameter("--dropout acts in training only: add --backward")
    if ragged and batch == 1:
        raise typer.BadParameter("--ragged needs rows of different lengths: --batch must be at least 2, not 1")


def _check_shares(processes: str | None, lengths: list[int]) -> list[int]:
    """How many processes share a sequence, ascending."""
    shares = parse_lengths(processes or "", "--processes", "1,2,4")
    if shares[-1] > lengths[0]:
        raise typer.BadParameter(f"{shares[-1]} processes cannot share {lengths[0]} tokens")
    return shares


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_choice(flag: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise typer.BadParameter(f"{flag} must be one of {', '.join(allowed)}, not {given!r}")


# ---- measurements ----


def _setting(about: dict[str, Any]) -> Setting:
    from subquad.bench import Setting

    return Setting(**about)


def _ordinary(specs: list[str], lengths: list[int], about: dict[str, Any], repeats: int, json, png) -> None:
    from subquad.cli.bench_table import measure_and_print

    if about.get("level") == "model":
        import subquad.bench_model  # noqa: F401  adds the level

    measure_and_print(specs, lengths, _setting(about), repeats, json, png)


def _peers(names: list[str], lengths: list[int] | None, about: dict[str, Any], repeats: int, json, crossover) -> None:
    from subquad.cli.peers import measure_and_print

    measure_and_print(names, lengths, about, repeats, json, crossover)


def _decode(specs: list[str], lengths: list[int], about: dict[str, Any], repeats: int, chunk: int, json) -> None:
    from subquad.cli.bench_table import decode_bench

    decode_bench(specs, lengths, _setting(about), repeats, chunk, json)


def _processes(specs, lengths, processes: list[int], causal: bool, about: dict[str, Any], repeats, count_only) -> None:
    from subquad.cli.bench_table import processes_bench

    sizes = (about["heads"], about["head_dim"], about["batch"])
    processes_bench(specs, lengths, processes, causal, *sizes, repeats, count_only)
