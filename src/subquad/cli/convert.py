"""`subquad convert`, `perplexity`, `adapt`, `passkey`: another attention in a pretrained language model."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from subquad.attention.registry import check_name
from subquad.cli.tables import show_table
from subquad.core.console import err, out
from subquad.core.files import check_pretrained, check_tokenizer, read_text

Model = Annotated[Path, typer.Argument(help="Folder of a transformers language model, or a .gguf file.")]
Converted = Annotated[Path, typer.Argument(help="Folder of a converted model.")]
Attention = Annotated[
    str | None, typer.Option(help="Convert to this SPEC first; the folder is not changed.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    spec = "combiner-window:span=32,window=256,sinks=4"
    app.command(epilog=f"Example: subquad convert model.gguf --attention {spec} -o converted")(convert)
    app.command(epilog="Example: subquad perplexity converted --text book.txt --n 2048,4096")(perplexity)
    app.command(epilog="Example: subquad adapt converted --text a.txt,b.txt -o adapted")(adapt)
    app.command(epilog="Example: subquad passkey adapted --n 4096")(passkey)


def convert(
    model: Model,
    attention: Annotated[str, typer.Option(help="SPEC of the mechanism, for example combiner-window:span=32.")],
    folder: Annotated[Path, typer.Option("-o", "--out", help="New folder for the converted model.")],
    layers: Annotated[
        str | None, typer.Option(help="Indices of the layers to convert, comma-separated. Default: all.")
    ] = None,
    full_heads: Annotated[
        str | None, typer.Option(help="Key/value heads that keep full attention, LAYER:HEAD, comma-separated.")
    ] = None,
) -> None:
    """Replace the attention of a pretrained language model and save it."""
    check_name(attention)
    check_pretrained(model)
    numbers = None if layers is None else _integers("--layers", layers)
    kept = _heads(full_heads)
    _check_new(folder)
    _quiet()
    from subquad import hf
    from subquad.hf.loading import load, save

    found, tokenizer = load(model)
    hf.convert(found, attention, layers=numbers, full_heads=kept)
    save(found, tokenizer, folder)
    every = hf.converted_layers(found)
    made = [mechanism for mechanism in every.values() if mechanism is not None]
    new = sum(p.numel() for mechanism in made for p in mechanism.parameters())
    out().print(f"{len(made)} of {len(every)} layers converted to {attention}; {new:,} new parameters", soft_wrap=True)
    out().print(f"model: {folder}", soft_wrap=True)


def perplexity(
    model: Model,
    text: Annotated[Path, typer.Option(help="A text file.")],
    n: Annotated[str, typer.Option("--n", help="Lengths of the text in tokens, comma-separated.")] = "2048",
    attention: Attention = None,
    start: Annotated[int, typer.Option(min=0, help="Start at this character of the text.")] = 0,
    json: Json = False,
) -> None:
    """Compare a converted model with the original: loss by position, time, memory and mass on summaries.

    The original is the same weights with full attention. For an adapted model, this is not the model that was
    converted: measure the latter separately.
    """
    lengths = _integers("--n", n)
    if min(lengths) < 2:
        raise typer.BadParameter(f"--n must be at least 2, not {min(lengths)}")
    _check_model(model, attention)
    read_text(text)
    _quiet()
    from subquad.hf import texts
    from subquad.hf.perplexity import compare

    found, tokenizer = _load_converted(model, attention)
    ids = texts.window(read_text(text), tokenizer, max(lengths), start)
    rows: list[dict[str, Any]] = []
    for length, full, own in compare(found, ids, lengths):
        for name, one in (("original", full), ("converted", own)):
            rows.append({"n": length, "attention": name, "loss": one.loss(), "second half": one.loss(length // 2)})
            rows[-1] |= {"by position": one.by_position(), "seconds": one.seconds, "memory": one.memory}
            rows[-1]["mass on summaries"] = one.mass
    if json:
        print(jsonlib.dumps(rows))
        return
    table = Table("n", "attention", "loss", "second half", "seconds", "memory", "mass", "loss by position", box=None)
    for row in rows:
        mass = "–" if row["mass on summaries"] is None else f"{row['mass on summaries']:.1%}"
        cells = [f"{row['loss']:.3f}", f"{row['second half']:.3f}", f"{row['seconds']:.2f}"]
        places = " ".join(f"{x:.2f}" for x in row["by position"])
        table.add_row(str(row["n"]), row["attention"], *cells, f"{row['memory'] / 2**20:,.0f} MiB", mass, places)
    show_table(out(), table)


def adapt(
    model: Converted,
    text: Annotated[str, typer.Option(help="Text files to train on, comma-separated.")],
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for the adapted model; a run in it is resumed.")],
    length: Annotated[int, typer.Option(min=2, help="Number of tokens of a window.")] = 1024,
    fit_steps: Annotated[int, typer.Option(min=0, help="Number of windows on which every layer is fitted.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Number of steps of every layer on a window.")] = 4,
    tune_steps: Annotated[int, typer.Option(min=0, help="Number of windows on which the whole model is tuned.")] = 24,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the low-rank updates of q, k and v; 0 for none.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate of the mechanisms' own parameters.")] = 3e-2,
    update_rate: Annotated[float, typer.Option(min=0, help="Learning rate of the low-rank updates.")] = 5e-4,
    decay: Annotated[bool, typer.Option(help="Let the rates of the tuning fall to 0 linearly.")] = False,
    distillation: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of distillation in the loss of the tuning; the rest is cross-entropy."),
    ] = 0.9,
    numbers: Annotated[
        int, typer.Option(min=0, max=12, help="Numbers hidden in each window of the tuning and asked for at its end.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the windows and of the updates.")] = 0,
) -> None:
    """Recover quality after a conversion; run the same command again to resume.

    First every layer is fitted to the output of the original, then the whole model is tuned with cross-entropy and
    distillation. This trains the parameters of the mechanism and low-rank updates of q, k and v.
    """
    check_pretrained(model)
    books = [read_text(Path(name.strip())) for name in text.split(",") if name.strip()]
    if not books:
        raise typer.BadParameter("--text names no file")
    if not fit_steps and not tune_steps:
        raise typer.BadParameter("--fit-steps and --tune-steps are both 0: there is nothing to train")
    if folder.resolve() == model.resolve():
        raise typer.BadParameter(f"--out is the folder of the model, {model}: choose another one")
    _quiet()
    from subquad.hf.adapting import Adapter, Settings
    from subquad.hf.loading import load, save

    found, tokenizer = load(model)
    chosen = Settings(
        length=length,
        fit_steps=fit_steps,
        repeats=repeats,
        tune_steps=tune_steps,
        rank=rank,
        rate=rate,
        update_rate=update_rate,
        decay=decay,
        distillation=distillation,
        numbers=numbers,
        seed=seed,
    )
    adapter = Adapter(found, tokenizer, books, folder, chosen)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), disable=not err().is_terminal) as progress:
        bar = progress.add_task("adapting", total=adapter.total)

        def tell(line: dict[str, Any]) -> None:
            figures = {key: value for key, value in line.items() if key not in ("step", "of", "phase", "seconds")}
            words = "  ".join(f"{key} {value:.4f}" for key, value in figures.items())
            progress.update(bar, completed=line["step"], description=f"{line['phase']}  {words}")

        adapter.run(tell)
    save(adapter.finish(), tokenizer, folder)
    out().print(f"model: {folder}", soft_wrap=True)


def passkey(
    model: Model,
    n: Annotated[str, typer.Option("--n", help="Lengths of the text in tokens, comma-separated.")] = "1024",
    depths: Annotated[int, typer.Option(min=2, help="Number of depths, from the beginning to the end.")] = 5,
    tries: Annotated[int, typer.Option(min=1, help="How many numbers are hidden at each depth, one per text.")] = 1,
    attention: Attention = None,
    full: Annotated[bool, typer.Option("--full", help="Test the same weights with full attention instead.")] = False,
    heads: Annotated[
        bool, typer.Option("--heads", help="List the key/value heads of an unconverted model that look the number up.")
    ] = False,
    json: Json = False,
) -> None:
    """Test whether a number hidden at some depth of a long text is found; print a heat map by length and depth.

    With --heads, print which heads of an unconverted model look the number up: candidates for `subquad convert
    --full-heads`.
    """
    lengths = _integers("--n", n)
    if min(lengths) < 1:
        raise typer.BadParameter(f"--n must be at least 1, not {min(lengths)}")
    if heads and (full or attention is not None):
        raise typer.BadParameter("--heads looks at the model as it is: leave out --full and --attention")
    _check_model(model, attention)
    _quiet()
    if heads:
        _print_heads(model, max(lengths), json=json)
        return
    from subquad.hf.passkey import passkey as search

    found, tokenizer = _load_converted(model, attention)
    places = [number / (depths - 1) for number in range(depths)]
    with Progress(console=err(), transient=True, disable=not err().is_terminal) as progress:
        bar = progress.add_task("asking", total=len(lengths) * depths)
        results = {
            length: search(found, tokenizer, length, places, tries, full=full, tell=lambda _: progress.advance(bar))
            for length in lengths
        }
    if json:
        print(jsonlib.dumps({length: [one._asdict() for one in rows] for length, rows in results.items()}))
        return
    table = Table("n", *(f"{place:.0%}" for place in places), "mean", box=None)
    for length, rows in results.items():
        mean = sum(one.found for one in rows) / len(rows)
        table.add_row(str(length), *(_cell(one) for one in rows), f"{mean:.0%}")
    show_table(out(), table)
    out().print(
        "share of numbers found, share of their digits, and the loss of these in nats, by depth", soft_wrap=True
    )


def _print_heads(model: Path, n: int, *, json: bool, shown: int = 12) -> None:
    from subquad.hf.loading import load
    from subquad.hf.passkey import looking_heads

    looks = looking_heads(*load(model), n)  # (layers, key/value heads)
    order = looks.flatten().argsort(descending=True).tolist()[:shown]
    width = looks.shape[1]
    rows = [{"layer": i // width, "head": i % width, "attention": looks.flatten()[i].item()} for i in order]
    if json:
        print(jsonlib.dumps(rows))
        return
    table = Table("LAYER:HEAD", "attention to the number", box=None)
    for row in rows:
        table.add_row(f"{row['layer']}:{row['head']}", f"{row['attention']:.2f}")
    show_table(out(), table)


def _cell(one: Any) -> Text:
    colour = "green" if one.found > 0.5 else "yellow" if one.digits > 0.2 else "red"
    return Text(f"{one.found:.0%}, {one.digits:.0%} ({one.loss:.2f})", style=colour)


def _check_model(model: Path, attention: str | None) -> None:
    """What is wrong is refused before torch is imported."""
    check_pretrained(model)
    check_tokenizer(model)
    if attention is not None:
        check_name(attention)


def _load_converted(model: Path, attention: str | None) -> tuple[Any, Any]:
    from subquad import hf
    from subquad.hf.loading import load

    found, tokenizer = load(model)
    if attention is not None:
        hf.convert(found, attention)
    if not any(hf.converted_layers(found).values()):
        raise ValueError(f"{model} is not converted: give --attention SPEC, or use `subquad convert` first")
    return found, tokenizer


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(piece) for piece in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} must be comma-separated integers, not {text!r}") from None


def _heads(text: str | None) -> dict[int, list[int]]:
    """ "15:2,17:0,17:1" → {15: [2], 17: [0, 1]}."""
    kept: dict[int, list[int]] = {}
    for piece in text.split(",") if text else []:
        layer, _, head = piece.partition(":")
        if not (layer.strip().isdigit() and head.strip().isdigit()):
            raise typer.BadParameter(f"--full-heads must be LAYER:HEAD, comma-separated, not {text!r}")
        kept.setdefault(int(layer), []).append(int(head))
    return kept


def _check_new(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} already contains files: choose a new folder")


def _quiet() -> None:
    from subquad.training.start import quiet

    quiet()
