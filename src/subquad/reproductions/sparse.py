"""O(n) Connections are Expressive Enough: Universal Approximability of Sparse Transformers (Yun et al. 2020).

Figures 1 to 4 draw a score against the level of sparsity; the paper gives no numbers for them, and what it says of
them in words (section 5.2) is what is checked. Patterns are compared at the same level, as there: each has the `w`
whose share of connected pairs is nearest to it. The share is that of the longest sequence: in language modelling of the
pairs that a causal model may see (STAR has no relay there, see H.1), in translation the mean of the encoder's and the
decoder's self-attention (attention from one to the other is dense), in classification of all pairs. In a shorter
sentence RANDOM has the same share, and the other patterns have a larger one, because windows keep their size.

MULTIHEAD and SEQUENTIAL cannot connect many more than a quarter of the pairs with both of their sets. Beyond that, one
of the sets has nearly all pairs and the other one few: half of the heads, or of the layers, are dense (w = 1, or a w
that is most of the length).

That UNION is similar to dense attention in translation, and the least sensitive to the level, is not a claim that one
method is better than another: the picture shows it.
"""

from __future__ import annotations

from typing import NamedTuple

from subquad.reproductions.declare import SCORED, Claim, Column, Method, Reproduction, Scale, half_overlapping

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


class Sweep(NamedTuple):
    """The levels, how many of 100 pairs are not connected, and by kind the w of each level at both scales: that whose
    share of pairs is nearest to the level, the mean over the two sets of MULTIHEAD and SEQUENTIAL, and in translation
    over encoder and decoder. Of two such w the smaller one: sentences are shorter than the longest sequence, and a
    window that is most of it would see all of them.
    """

    levels: tuple[int, int, int]
    small: dict[str, tuple[int, int, int]]
    paper: dict[str, tuple[int, int, int]]

    @property
    def methods(self) -> tuple[Method, ...]:
        """Dense attention, and every pattern at every level."""
        return Method("dense", "full"), *(self.at(level, name) for level in self.levels for name in (*PATTERNS, RANDOM))

    def at(self, level: int, name: str) -> Method:
        if name == RANDOM:
            return Method(at_level(name, level), f"random:density={1 - level / 100:g}")
        kind, place = name.replace("SEQUENTIAL", "MULTIHEAD"), self.levels.index(level)
        small, paper = (PATTERNS[name].format(w=each[kind][place]) for each in (self.small, self.paper))
        return Method(at_level(name, level), small, full=paper)

    def claims(self, *pairs: tuple[str, str]) -> tuple[Claim, ...]:
        """That the first is better than the second, at every level."""
        return tuple(Claim(at_level(a, level), at_level(b, level)) for level in self.levels for a, b in pairs)


def at_level(name: str, level: int) -> str:
    return f"{name}, {level} % sparse"


RANDOM = "RANDOM"
MODELLING = Sweep(
    (50, 75, 82),
    small={  # n = 128
        "STRIDED UNION": (2, 5, 12), "STRIDED MULTIHEAD": (1, 2, 3), "FIXED UNION": (2, 5, 9),
        "FIXED MULTIHEAD": (1, 2, 3), "STAR": (37, 16, 11),
    },
    paper={  # n = 256
        "STRIDED UNION": (2, 4, 7), "STRIDED MULTIHEAD": (1, 2, 3), "FIXED UNION": (2, 4, 6),
        "FIXED MULTIHEAD": (1, 2, 3), "STAR": (74, 33, 23),
    },
)  # fmt: skip
TRANSLATING = Sweep(
    (48, 66, 72),  # with 48 tokens UNION connects 28 % of the pairs or more
    small={
        "STRIDED UNION": (2, 4, 6), "STRIDED MULTIHEAD": (1, 37, 2), "FIXED UNION": (2, 4, 6),
        "FIXED MULTIHEAD": (1, 36, 2), "STAR": (12, 7, 6),
    },
    paper={  # n = 256
        "STRIDED UNION": (2, 3, 4), "STRIDED MULTIHEAD": (1, 218, 2), "FIXED UNION": (2, 3, 4),
        "FIXED MULTIHEAD": (1, 203, 2), "STAR": (70, 44, 36),
    },
)  # fmt: skip
BERT = {  # n = 128
    "STRIDED UNION": (2, 5, 9), "STRIDED MULTIHEAD": (1, 2, 3), "FIXED UNION": (2, 4, 8), "FIXED MULTIHEAD": (1, 2, 3),
    "STAR": (31, 15, 10),
}  # fmt: skip
CLASSIFYING = Sweep((50, 75, 82), small=BERT, paper=BERT)

UNION_BEST = tuple(
    (f"{pattern} UNION", f"{pattern} {heads}")
    for pattern in ("STRIDED", "FIXED")
    for heads in ("MULTIHEAD", "SEQUENTIAL")
)
UNION_SUFFERS = tuple((better, union) for union, better in UNION_BEST)
UNION_FIRST = tuple((x, y) for x in LAYOUTS for y in LAYOUTS if x.endswith("UNION") and not y.endswith("UNION"))
STRIDED_BEST = tuple((name, name.replace("STRIDED", "FIXED")) for name in LAYOUTS if name.startswith("STRIDED"))
STAR_BEST = tuple(("STAR", name) for name in LAYOUTS)
STAR_IN_TROUBLE = tuple((name, "STAR") for name in LAYOUTS)
RANDOM_WORST = tuple((name, RANDOM) for name in PATTERNS)
LEVELS = (
    "the small recipe of the task; three levels of sparsity, which every pattern comes near to with sequences of the "
    "longest length ({}), within 3 points; one model per level"
)
THREE_RUNS = "the paper's scores are means of three runs (`--seeds 3`)"

FIGURE_1A = Reproduction(
    "sparse-figure-1a", "Yun et al. 2020, figure 1a", "language modelling over the level of sparsity",
    columns=(
        Column(
            "perplexity", "lm-books",
            Scale("small", half_overlapping(128, SCORED)), Scale("lm1b"),
        ),
    ),
    methods=MODELLING.methods, claims=MODELLING.claims(*UNION_BEST, *STRIDED_BEST, *STAR_BEST, *RANDOM_WORST),
    larger_is_better=False, rates=("4e-3", "2e-3"),
    differs=f"bytes of PG-19 for pieces of One Billion Words; embeddings of 0.1; {LEVELS.format(128)}",
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
        methods=TRANSLATING.methods, claims=TRANSLATING.claims(*UNION_FIRST, *STAR_IN_TROUBLE, *RANDOM_WORST),
        rates=("2e-3", "1e-3"),
        differs=f"Multi30k for WMT; {LEVELS.format(48)}, and most sentences are shorter",
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
        methods=CLASSIFYING.methods, claims=CLASSIFYING.claims(*UNION_SUFFERS, *STAR_IN_TROUBLE, *RANDOM_WORST),
        rates=("1e-3", "3e-4"),
        differs=f"trained from scratch, without the pre-training of BERT; {LEVELS.format(128)}; {THREE_RUNS}",
        differs_paper=THREE_RUNS,
    )  # fmt: skip


FIGURE_2A = classified("2a", "MNLI", {"MNLI": "glue-mnli"})
FIGURE_2B = classified("2b", "XNLI", {"XNLI": "xnli"})
FIGURE_4 = classified("4", "CoLA and MRPC", {"CoLA": "glue-cola", "MRPC": "glue-mrpc"})

FIGURES = (FIGURE_1A, FIGURE_1B, FIGURE_2A, FIGURE_2B, FIGURE_3, FIGURE_4)
ALL = (TABLE_1, TABLE_2, *FIGURES)
