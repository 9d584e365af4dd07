"""Composite Slice Transformer (Lee et al. 2023).

The text of the paper that is at hand has no numbers in its tables: what it says of them in words is what is checked.
"""

from __future__ import annotations

from dataclasses import replace

from subquad.reproductions.declare import (
    AVERAGE,
    SCORED,
    SMALL_ARENA,
    Claim,
    Column,
    Method,
    Reproduction,
    Scale,
    half_overlapping,
    lra,
)

NO_NUMBERS = "the paper's numbers are not at hand (the text has none in its tables), only what it says of them"
LRA = (*lra(recipe="cst"), AVERAGE)
RATES = ("2e-3", "1e-3", "5e-4")
FACTORS = (0.5, 1, 2)  # A.6.1: each model is evaluated with a learning rate of [l/2, l, 2l]
SLICES = "composite-slice:slice_length={},extension={}"


def cst(length: int, extension: int = 1, *, name: str = "", options: str = "") -> Method:
    spec = SLICES.format(length, extension) + options
    return Method(name or f"CST L={length}, α={extension}", spec)


LRA_DIFFERS = f"{SMALL_ARENA}; {NO_NUMBERS}"
OTHERS = (
    Method("Transformer", "full"), Method("Linear Trans.", "linear"), Method("Performer", "performer"),
    Method("cosFormer", "cosformer"), Method("Reformer", "reformer"), Method("Linformer", "linformer:k=64"),
    Method("Luna", "luna"), Method("Nyströmformer", "nystrom"), Method("H-Transformer-1D", "h-transformer-1d"),
    Method("Long Short", "long-short"), Method("Scatterbrain", "scatterbrain"),
)  # fmt: skip

TABLE_1 = Reproduction(
    "composite-slice-table-1", "Lee et al. 2023, table 1", "Long Range Arena",
    columns=LRA, methods=(*OTHERS, cst(8), cst(16)),
    claims=(
        Claim("CST L=8, α=1", "Transformer", ("Text", "Retrieval", "Image")),
        Claim("Transformer", "CST L=8, α=1", ("ListOps",)),
        *(Claim("CST L=8, α=1", each.name, ("Average",)) for each in (*OTHERS, cst(16))),  # 5.1
    ),
    rates=RATES, rate_factors=FACTORS, differs=LRA_DIFFERS,
)  # fmt: skip

WORDS = f"Penn Treebank for WikiText-103, 2 layers of 128, 2,000 steps, embeddings of 0.1; {NO_NUMBERS}"
BEST = "CST L=32, α=3"
TABLE_2 = Reproduction(
    "composite-slice-table-2", "Lee et al. 2023, table 2", "words of WikiText-103, 256 of them",
    columns=(Column("perplexity", "lm-words", Scale("small"), Scale("paper")),),
    methods=(
        Method("Transformer", "full"), Method("Linear Trans.", "linear"), Method("Performer", "performer"),
        Method("FMMformer", "fmmformer"), cst(32, 3),
    ),
    claims=tuple(Claim(BEST, other) for other in ("Linear Trans.", "Performer", "FMMformer")),
    larger_is_better=False, rates=("2e-3", "1e-3"), differs=WORDS,
)  # fmt: skip
TABLE_3 = Reproduction(
    "composite-slice-table-3", "Lee et al. 2023, table 3", "words of WikiText-103: slice length and extension",
    columns=TABLE_2.columns,
    methods=(
        Method("Transformer", "full"),
        *(cst(length, extension) for length in (8, 16, 32) for extension in (1, 2, 3)),
    ),
    claims=(
        *(Claim("CST L=32, α=3", f"CST L={length}, α={extension}") for length, extension in ((8, 1), (8, 2), (16, 1))),
        Claim("CST L=16, α=3", "CST L=8, α=1"),
    ),
    larger_is_better=False, rates=("2e-3", "1e-3"), differs=WORDS,
)  # fmt: skip
TABLE_4 = Reproduction(
    "composite-slice-table-4", "Lee et al. 2023, table 4", "words of WikiText-103, 1024 of them",
    columns=(Column("perplexity", "lm-words", Scale("small", ("length=512", "batch=4", "stride=256")), Scale("long")),),
    methods=(
        Method("Transformer", "full"), Method("Performer", "performer"), Method("Scatterbrain", "scatterbrain"),
        cst(32, 3),
    ),
    claims=(Claim(BEST, "Performer"),),
    larger_is_better=False, rates=("2e-3", "1e-3"),
    differs="Penn Treebank for WikiText-103, 512 words for 1024, 2 layers of 128, 2,000 steps, embeddings of 0.1; "
    f"{NO_NUMBERS}",
)  # fmt: skip

BERT = Scale("base", ("steps=900000",))
GLUE = {"CoLA": "glue-cola", "SST-2": "glue-sst2", "MRPC": "glue-mrpc", "RTE": "glue-rte"}
GROWING = (("CST L=16, α=1", "CST L=8, α=1"), ("CST L=16, α=2", "CST L=16, α=1"))  # 5.3: perplexity falls with both
TABLE_5 = Reproduction(
    "composite-slice-table-5", "Lee et al. 2023, table 5", "masked language modelling, then GLUE",
    columns=(
        Column("MLM perplexity", "mlm", Scale("small", ("positions=published",)), BERT, larger_is_better=False),
        *(
            Column(name, task, Scale("small", ("positions=published",)), Scale("base", ("pooling=mean",), begin=BERT),
                   factor=100, metric="accuracy")
            for name, task in GLUE.items()
        ),
    ),
    methods=(
        Method("BERT", "full"), Method("Nyströmformer", "nystrom:landmarks=16"), Method("Performer", "performer"),
        Method("Luna", "luna:memory=16"), Method("FNet", "fnet"), cst(8), cst(16), cst(16, 2),
    ),
    claims=(
        *(Claim("CST L=16, α=1", x, ("MLM perplexity",)) for x in ("Nyströmformer", "Performer", "Luna", "FNet")),
        Claim("BERT", "CST L=16, α=1", ("MLM perplexity",)),
        *(Claim(longer, shorter, ("MLM perplexity",)) for longer, shorter in GROWING),
        *(Claim("CST L=16, α=1", x, tuple(GLUE)) for x in ("Nyströmformer", "Performer", "Luna", "FNet")),
    ),
    rates=("2e-3", "1e-3"),
    differs="WikiText-2, 64 tokens for 128, 2 layers of 128; GLUE is trained from scratch (train --set init=RUN begins "
    f"with an encoder of mlm); {NO_NUMBERS}",
)  # fmt: skip

BASE = "CST L=16, α=1"
TABLE_7 = Reproduction(
    "composite-slice-table-7", "Lee et al. 2023, table 7", "ablations: slice length, extension, positions, composition",
    columns=LRA,
    methods=(
        *(cst(length) for length in (4, 8, 16, 32, 64)),
        cst(16, 2), cst(16, 3),
        cst(16, name="learned positions", options=",positions=none"),
        cst(16, name="parallel", options=",composition=parallel"),
        cst(16, name="global-local", options=",composition=global-local"),
    ),
    claims=(
        Claim(BASE, "parallel"), Claim(BASE, "global-local"),
        Claim(BASE, "learned positions", ("Text", "Retrieval", "Image", "Pathfinder")),
        Claim("learned positions", BASE, ("ListOps",)),
        *(Claim(f"CST L=16, α={x}", BASE, ("Retrieval", "Image")) for x in (2, 3)),  # A.6.2: slightly better there
        *(Claim("CST L=8, α=1", f"CST L={x}, α=1", ("Average",)) for x in (4, 16, 32, 64)),  # 5.1
    ),
    rates=RATES, rate_factors=FACTORS, differs=LRA_DIFFERS,
)  # fmt: skip
TABLE_8 = Reproduction(
    "composite-slice-table-8", "Lee et al. 2023, table 8", "ablations: local mixing and pooling of a slice",
    columns=LRA,
    methods=(
        cst(16, name="attention, mean"),
        cst(16, name="MLP, 16 hidden", options=",local=mlp,hidden=16"),
        cst(16, name="MLP, 32 hidden", options=",local=mlp,hidden=32"),
        cst(16, name="max pooling", options=",pool=max"),
        cst(16, name="linear pooling", options=",pool=linear"),
    ),
    claims=(
        Claim("attention, mean", "MLP, 16 hidden"), Claim("attention, mean", "MLP, 32 hidden"),
        Claim("attention, mean", "max pooling", ("Image", "Pathfinder")),
        Claim("attention, mean", "linear pooling", ("Image", "Pathfinder")),
        *(  # 5.1
            Claim("attention, mean", other, ("Average",))
            for other in ("MLP, 16 hidden", "MLP, 32 hidden", "max pooling", "linear pooling")
        ),
    ),
    rates=RATES, rate_factors=FACTORS, differs=LRA_DIFFERS,
)  # fmt: skip
TABLE_9 = Reproduction(
    "composite-slice-table-9", "Lee et al. 2023, table 9", "books of PG-19 at the same cost of attention",
    columns=(Column("perplexity", "lm-books", paper=Scale("paper")),),
    methods=(
        Method("Transformer, N", "full", half_overlapping(64, SCORED), half_overlapping(256)),
        replace(
            cst(8, 2, name="CST, 4N"), full=SLICES.format(32, 3),
            small=half_overlapping(256, SCORED), paper=half_overlapping(1024),
        ),
        Method("Transformer, 2N", "full", half_overlapping(128, SCORED), half_overlapping(512)),
        replace(
            cst(16, 3, name="CST, 8N"), full=SLICES.format(64, 3),
            small=half_overlapping(512, SCORED), paper=half_overlapping(2048),
        ),
    ),
    claims=(Claim("CST, 4N", "Transformer, N"), Claim("CST, 8N", "Transformer, 2N")),
    larger_is_better=False, rates=("4e-3", "2e-3"),
    differs="N = 64 for 256, bytes for GPT-2's pieces, 2 layers of 128, 16 books, 1,200 steps; embeddings of 0.1; the "
    f"lengths are those at which N²/L² + (α+1)NL/2 is the square of the Transformer's; {NO_NUMBERS}",
)  # fmt: skip

DIAGRAM = "a diagram of the architecture: there are no numbers in it"
ALL = (
    TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5,
    Reproduction(
        "composite-slice-table-6", "Lee et al. 2023, table 6", "hyperparameters", kind="stated",
        differs="they are the recipes `cst` of the tasks of the Arena, as far as A.6.1 gives them in words",
    ),
    TABLE_7, TABLE_8, TABLE_9,
    Reproduction(
        "composite-slice-figure-1", "Lee et al. 2023, figure 1", "the attention", kind="stated", differs=DIAGRAM
    ),
    Reproduction(
        "composite-slice-figure-2", "Lee et al. 2023, figure 2", "score, speed, memory and parameters in one picture",
        kind="stated", differs="the report.html of `subquad compare lra` draws the average score of the tasks against "
        "relative time, with circles as large as the relative memory, labelled with the number of parameters",
    ),
    Reproduction("composite-slice-figure-3", "Lee et al. 2023, figure 3", "the model", kind="stated", differs=DIAGRAM),
    Reproduction(
        "composite-slice-figure-4", "Lee et al. 2023, figure 4", "cost of slices against linear attentions",
        kind="drawn", function="subquad.reproductions.drawings:slice_costs",
    ),
)  # fmt: skip
