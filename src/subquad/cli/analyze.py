"""`subquad analyze SPEC`: is this pattern a universal approximator? Assumptions 1 and 2, checked and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from subquad.attention.registry import check_direction, check_name
from subquad.cli.plot import Causal
from subquad.cli.tables import show_table
from subquad.core.console import err, out
from subquad.core.files import ENDINGS, check_picture
from subquad.core.names import import_user_module

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
LONGEST = 8192  # hop sets are n² bits, masks n² bytes

Sets = Annotated[
    Path | None,
    typer.Option(
        "--sets",
        help="Analyze your own sets: a .json file of n (or p × n) lists, or a .npy file with a bool mask.",
    ),
]


def add_to(app: typer.Typer) -> None:
    example = "Example: subquad analyze strided --n 256 --w 16   (--w is an option of strided)"
    app.command(context_settings=EXTRA, epilog=example)(analyze)


def analyze(
    context: typer.Context,
    spec: Annotated[str | None, typer.Argument(metavar="SPEC", help="A mechanism with its options.")] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=2, max=LONGEST, help="Length of the sequences. Default: 256.")
    ] = None,
    causal: Causal = None,
    map: Annotated[
        str | None, typer.Option("--map", help="Probability map: a name, or module:function for one of your own.")
    ] = None,
    sets: Sets = None,
    png: Annotated[
        Path | None, typer.Option(help=f"Draw the growth of the hop sets into this file ({ENDINGS}).")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a table of all mechanisms.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="With --all, print the table in Markdown.")] = False,
) -> None:
    """Check the conditions under which a sparse Transformer is a universal approximator (Yun et al. 2020).

    For a Combiner the conditions of its Proposition 1 are checked as well.
    """
    spec, options = read_arguments(spec, context.args)
    if as_markdown and not every:
        raise typer.BadParameter("--markdown needs --all")
    if every:
        if spec or options or sets or png or map:
            raise typer.BadParameter(
                "--all cannot be combined with SPEC, --sets, --map, --png or options of a mechanism"
            )
        return _all(n or 256, bool(causal), as_json, as_markdown)
    check_picture(png, "--png")
    rho, options = _map(map, options, sets)
    source, title = source_of(spec, options, sets, causal)
    from subquad.theory.assumptions import check
    from subquad.theory.counting import growth

    verdict = check(source, n if sets else n or 256, causal=causal, map=rho)
    if png is not None:
        from subquad.plots import save
        from subquad.theory.picture import draw_hops

        save(draw_hops(verdict, title), png)
    exponent = None if sets or verdict.support.n < 8 else growth(source, verdict.support.n, causal=causal)
    blocks = _blocks(verdict)
    if as_json:
        found = {"exponent": exponent, "blocks": blocks, **verdict.to_dict()}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return None
    _print(verdict, title, exponent, blocks)
    if png is not None:
        out().print(f"\npicture: {png}", soft_wrap=True)
    return None


def read_arguments(spec: str | None, extra: list[str]) -> tuple[str | None, dict[str, str]]:
    """SPEC and the pairs `--option value` (or `--option=value`) that belong to the mechanism."""
    words, options, names = [*([] if spec is None else [spec]), *extra], {}, []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            names.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise typer.BadParameter(f"option {word} needs a value")
            value = words.pop(0)
        if key in options:
            raise typer.BadParameter(f"option --{key} is given twice")
        options[key.replace("-", "_")] = value
    if len(names) > 1:
        raise typer.BadParameter(f"one SPEC is expected, got {' and '.join(names)}")
    return (names[0] if names else None), options


def source_of(spec: str | None, options: dict[str, str], sets: Path | None, causal: bool | None) -> tuple[Any, str]:
    """What to check and its title: a spec with its options written in, or the sets of a file."""
    if (spec is None) == (sets is None):
        raise typer.BadParameter("give either a SPEC, such as strided:w=16, or --sets FILE")
    if sets is not None:
        if options:
            raise typer.BadParameter(f"--{next(iter(options))} is an option of a mechanism; --sets has none")
        return _load(sets), sets.name
    text = str(spec)
    for key, value in options.items():
        text += f"{',' if ':' in text else ':'}{key}={value}"
    check_name(text)
    check_direction(text, causal)
    return text, text


def _load(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path) if path.suffix == ".npy" else json.loads(path.read_bytes())
    except (ValueError, EOFError):  # of json and numpy, which do not name the file
        form = "a .npy file with a mask" if path.suffix == ".npy" else "JSON, with n (or p × n) lists of key positions"
        raise ValueError(f"--sets {path} cannot be read: it must be {form}") from None
    except OSError as error:
        raise ValueError(f"--sets {path}: {error.strerror or error}") from None


def _map(name: str | None, options: dict[str, str], sets: Path | None) -> tuple[Any, dict[str, str]]:
    """A map of the library is an option of the mechanism; for sets of your own it is made here."""
    if name is None:
        return None, options
    if ":" in name:
        return imported(name), options
    if sets is None:
        return None, {**options, "map": name}
    from subquad.probability import probability_map

    return probability_map(name, topk=8), options


def imported(name: str) -> Any:
    """`module:function`, from the working directory too."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_user_module(module), attribute)
    except AttributeError:
        raise typer.BadParameter(f"module {module} has no {attribute}") from None


def _print(verdict: Any, title: str, exponent: float | None, blocks: dict[str, int] | None) -> None:
    s, path, console = verdict.support, verdict.path, out()
    answer = verdict.answer, {True: "green", False: "red", None: "yellow"}[verdict.universal]
    console.print(
        Text.assemble((title, "bold"), f"  n = {s.n}", ", causal" if s.causal else "", ", universal: ", answer)
    )
    for reason in verdict.reasons:
        console.print(reason, soft_wrap=True)
    if path is not None and path.order is not None and not path.identity:
        console.print(f"γ: {_abbreviated(path.order.tolist())}", soft_wrap=True)
    growing = "" if exponent is None else f", growing like n^{exponent:.2f}"
    console.print(f"connections: {verdict.counted()}{growing}")
    if blocks is not None:
        shares = f"quantisation {blocks['quantisation']:,}, context {blocks['context']:,} (dense {blocks['dense']:,})"
        console.print(f"blocks for d = 1, δ = 1/2 (section 4.1): {shares}, values n·2^n for both", soft_wrap=True)


def _blocks(verdict: Any) -> dict[str, int] | None:
    """What section 4.1 asks for at d = 1, δ = 1/2; a multihead layer holds all families, so it waits for none."""
    from subquad.theory.counting import dense_blocks, sparse_blocks

    s = verdict.support
    if not verdict.assumption1:
        return None
    needed, dense = sparse_blocks(s.n, 1, "1/2", len(s.cycle), verdict.hops.steps), dense_blocks(s.n, 1, "1/2")
    return {"quantisation": needed.quantisation, "context": needed.context, "dense": dense.context}


def _abbreviated(order: list[int]) -> str:
    shown = order if len(order) <= 24 else [*order[:12], "…", *order[-12:]]
    return " → ".join(map(str, shown))


def _all(n: int, causal: bool, as_json: bool, as_markdown: bool) -> None:
    from subquad.theory.survey import HEADERS, markdown, survey

    rows = []
    with err().status("checking …") as status:
        for row in survey(n, causal=causal):
            rows.append(row)
            status.update(f"{row.spec} checked")
    if as_json:
        entries = [{"spec": row.spec, **row.verdict.to_dict(), "exponent": row.exponent} for row in rows]
        print(json.dumps(entries, indent=2, ensure_ascii=False))
    elif as_markdown:
        print(markdown(rows))
    else:
        table = Table(*HEADERS, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*row.cells())
        show_table(out(), table)
