"""O(n) Connections are Expressive Enough: Universal Approximability of Sparse Transformers (Yun et al. 2020).

Figures 1 to 4 draw a score against the level of sparsity; the paper gives no numbers for them, and what it says of
them in words (section 5.2) is what is checked. `w` is what sets the level.
"""

from __future__ import annotations

from subquad.reproductions.declare import Claim, Column, Method, Reproduction, Scale

LAYOUTS = {
    f"{pattern.upper()} {heads.upper()}": f"{pattern}:w={{w}},heads={heads}"
    for pattern in ("strided", "fixed")
    for heads in ("union", "multihead", "sequential")
}
PATTERNS = {**LAYOUTS, "STAR": "star:w={w}"}
DEPTHS = tuple(f"{layers} layer{'s' * (layers > 1)}" for layers in range(1, 5))


def copying(task: str) -> tuple[Column, ...]:
    def small(layers: int) -> Scale:
        steps = 500 if layers == 1 else 1500  # one layer has learned by then what it can see
        return Scale("small", (f"layers={layers}", f"steps={steps}", "batch=32", "evaluate=250", "enough=0.999"))

    return tuple(
        Column(name, task, small(i), Scale("paper", (f"layers={i}",)), factor=100) for i, name in enumerate(DEPTHS, 1)
    )


COPIERS = (
    *(
        Method(name, spec.format(w=8 if name.startswith("FIXED") else 7), full=spec.format(w=16))
        for name, spec in PATTERNS.items()
    ),
    Method("RANDOM", "random:density=0.1"),
)
COPYING_RATES = ("4e-3", "2e-3")
REDUCED = (
    "n = 64 for 256, 16 symbols for 128, width 64 for 256, 1,500 steps of 32 sequences for 500,000 of 1024 (500 with "
    "one layer; a run ends at the first evaluation with 99.9 %), and w = 7 for 16: with w = 16 and n = 256 the sets of "
    "STRIDED UNION and MULTIHEAD contain k - 128: one layer could copy everything, and the paper reports 0.82 %; w = 7 "
    "does not divide n/2, and the logic of the table holds. FIXED has w = 8, because its segments have to divide n"
)

TABLE_1 = Reproduction(
    "sparse-table-1", "Yun et al. 2020, table 1", "copying, bidirectional: which pattern copies at which depth?",
    columns=copying("copying"), methods=COPIERS,
    numbers={
        "STRIDED UNION": (0.82, 100.00, 100.00, 100.00), "STRIDED MULTIHEAD": (0.82, 100.00, 100.00, 100.00),
        "STRIDED SEQUENTIAL": (0.80, 81.24, 100.00, 100.00), "FIXED UNION": (7.04, 69.26, 99.98, 100.00),
        "FIXED MULTIHEAD": (0.76, 56.45, 99.08, 99.64), "FIXED SEQUENTIAL": (0.80, 96.01, 98.58, 100.00),
        "STAR": (1.53, 29.70, 42.18, 83.57), "RANDOM": (33.14, 63.41, 70.29, 95.49),
    },
    claims=(
        *(Claim(25, name, ("1 layer",)) for name in PATTERNS),
        *(Claim(name, 99, ("4 layers",)) for name in LAYOUTS),
        *(Claim(99, name, ("4 layers",)) for name in ("STAR", "RANDOM")),
        *(Claim(name, "STAR", ("2 layers",)) for name in LAYOUTS),
    ),
    rates=COPYING_RATES, differs=REDUCED,
)  # fmt: skip

TABLE_2 = Reproduction(
    "sparse-table-2", "Yun et al. 2020, table 2", "copying, one token after another",
    columns=copying("copying-causal"), methods=COPIERS,
    numbers={
        "STRIDED UNION": (0.79, 12.40, 94.50, 100), "STRIDED MULTIHEAD": (0.78, 8.26, 65.58, 100),
        "STRIDED SEQUENTIAL": (0.78, 1.57, 60.88, 98.40), "FIXED UNION": (7.02, 73.43, 99.87, 99.97),
        "FIXED MULTIHEAD": (7.04, 13.24, 70.82, 99.16), "FIXED SEQUENTIAL": (0.81, 92.10, 99.84, 99.97),
        "STAR": (0.77, 12.32, 14.03, 31.19), "RANDOM": (33.13, 67.30, 89.50, 95.88),
    },
    claims=(
        *(Claim(25, name, ("1 layer",)) for name in PATTERNS),
        *(Claim(name, 95, ("4 layers",)) for name in LAYOUTS),
        Claim(95, "STAR", ("4 layers",)),
    ),
    rates=COPYING_RATES, differs=REDUCED,
)  # fmt: skip

LEVELS = (4, 8, 16)


def density(w: int, n: int) -> float:
    """The share of pairs that STRIDED UNION (eq. 4) connects at length n."""
    near = -(-w // 2), w // 2
    pairs = sum(-near[0] <= j - i <= near[1] or (i - j) % w == 0 for i in range(n) for j in range(n))
    return round(pairs / n**2, 3)


def sweep(small: int, paper: int) -> tuple[Method, ...]:
    """Every pattern at every level, and RANDOM with the connections of STRIDED UNION at the lengths of both scales."""

    def random(w: int) -> Method:
        spec = "random:density={}"
        return Method(f"RANDOM, w={w}", spec.format(density(w, small)), full=spec.format(density(w, paper)))

    patterns = (Method(f"{name}, w={w}", spec.format(w=w)) for w in LEVELS for name, spec in PATTERNS.items())
    return Method("dense", "full"), *patterns, *map(random, LEVELS)


def at_each_level(*pairs: tuple[str, str]) -> tuple[Claim, ...]:
    return tuple(Claim(f"{better}, w={w}", f"{worse}, w={w}") for w in LEVELS for better, worse in pairs)


UNION_BEST = at_each_level(
    *((f"{x} UNION", f"{x} {other}") for x in ("STRIDED", "FIXED") for other in ("MULTIHEAD", "SEQUENTIAL"))
)
RANDOM_WORST = at_each_level(*((name, "RANDOM") for name in LAYOUTS))
STAR_BEST = at_each_level(*(("STAR", name) for name in (*LAYOUTS, "RANDOM")))
STAR_IN_TROUBLE = at_each_level(*((name, "STAR") for name in LAYOUTS))
UNION_SUFFERS = tuple(Claim(each.worse, each.better) for each in UNION_BEST)  # fine-tuning BERT
ONE_RUN = (
    "the small recipe of the task; one model per level, w = 4, 8, 16, and patterns are compared at the same w, where "
    "MULTIHEAD, SEQUENTIAL and STAR have fewer connections than UNION; RANDOM has those of STRIDED UNION"
)

FIGURE_1A = Reproduction(
    "sparse-figure-1a", "Yun et al. 2020, figure 1a", "language modelling over the level of sparsity",
    columns=(
        Column("perplexity", "lm-books", Scale("small", ("length=128", "steps=600", "evaluate=200")), Scale("lm1b")),
    ),
    methods=sweep(128, 256), claims=(*UNION_BEST, *RANDOM_WORST, *STAR_BEST),
    larger_is_better=False, rates=("3e-3", "1e-3"),
    differs=f"PG-19 for One Billion Words; {ONE_RUN}",
)  # fmt: skip


def translated(key: str, place: str, pairs: dict[str, tuple[str, str]]) -> Reproduction:
    return Reproduction(
        f"sparse-figure-{key}", f"Yun et al. 2020, figure {place}", "translation over the level of sparsity, BLEU",
        columns=tuple(
            Column(
                name, "translation",
                Scale("small", (f"origin={origin}", f"target={target}")),
                Scale("paper", (f"origin={origin}", f"target={target}")),
                metric="bleu",
            )
            for name, (origin, target) in pairs.items()
        ),
        methods=sweep(48, 256), claims=(*UNION_BEST, *RANDOM_WORST, *STAR_IN_TROUBLE), rates=("2e-3", "1e-3"),
        differs=f"Multi30k for WMT; {ONE_RUN}",
    )  # fmt: skip


FIGURE_1B = translated("1b", "1b", {"en-cs": ("en", "cs")})
FIGURE_3 = translated("3", "3", {"de-en": ("de", "en"), "en-de": ("en", "de")})


def classified(key: str, title: str, tasks: dict[str, str]) -> Reproduction:
    return Reproduction(
        f"sparse-figure-{key}", f"Yun et al. 2020, figure {key}", f"{title} over the level of sparsity",
        columns=tuple(
            Column(name, task, paper=Scale("base", begin=Scale("base")), metric="accuracy", factor=100)
            for name, task in tasks.items()
        ),
        methods=sweep(128, 128), claims=(*RANDOM_WORST, *STAR_IN_TROUBLE, *UNION_SUFFERS), rates=("1e-3", "3e-4"),
        differs=f"trained from scratch, without the pre-training of BERT; {ONE_RUN}; the paper gives no numbers",
    )  # fmt: skip


FIGURE_2A = classified("2a", "MNLI", {"MNLI": "glue-mnli"})
FIGURE_2B = classified("2b", "XNLI", {"XNLI": "xnli"})
FIGURE_4 = classified("4", "CoLA and MRPC", {"CoLA": "glue-cola", "MRPC": "glue-mrpc"})

ALL = (TABLE_1, TABLE_2, FIGURE_1A, FIGURE_1B, FIGURE_2A, FIGURE_2B, FIGURE_3, FIGURE_4)
