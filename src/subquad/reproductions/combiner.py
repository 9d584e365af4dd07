"""Combiner: Full Attention Transformer with Sparse Computation Cost (Ren et al. 2021).

The X of Combiner-X has the direct and summary-column sets of Combiner-X itself (sections 4.1 to 4.4): `fixed` as
UNION, `logsparse` with suffix sums, `axial`, `routing` with the query's cluster only.
"""

from __future__ import annotations

from collections.abc import Mapping

from subquad.reproductions.declare import (
    AVERAGE,
    MEASURED,
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

FIXED, LOGSPARSE = "fixed:heads=union", "logsparse:sets=suffix"
PAIRS = tuple(Claim(f"Combiner-{x}", x) for x in ("Logsparse", "Fixed", "Axial"))


def at(length: str, name: str, spec: str, small: Mapping[str, tuple[str, ...]]) -> Method:
    """A method of the language-model tables: its name says how long its context is. At the size of the paper, segments
    have 128 tokens, as in the published configuration, and BigBird has blocks of 64.
    """
    lengths, mechanism = {"2k": 2048, "8k": 8192}, spec.split(":")[0]
    size = {"fixed": "w=128", "combiner-fixed": "span=128"}.get(mechanism)
    full = f"{spec}{',' if ':' in spec else ':'}{size}" if size else mechanism if mechanism == "bigbird" else ""
    return Method(f"{name}-{length}", spec, small[length], (f"length={lengths[length]}",), full)


SHORT = {"2k": half_overlapping(256, SCORED), "8k": half_overlapping(1024, SCORED)}
WIKI = Column(
    "Perplexity", "lm-books",
    Scale("small", ("source=pg19",)), Scale("wiki40b"),
)  # fmt: skip
C4 = Column("Perplexity", "mlm", Scale("small", ("positions=learned", "initial=0.1")), Scale("c4"))
MLM_SHORT = {"2k": ("length=64", "eval_size=1600"), "8k": ("length=128", "eval_size=800")}  # as many tokens

TABLE_1 = Reproduction(
    "combiner-table-1", "Ren et al. 2021, table 1", "bits per dimension of pictures: X against Combiner-X",
    columns=(
        Column("CIFAR-10", "image-density", Scale("small", ("positions=learned",)), Scale("paper")),
        Column(
            "ImageNet-64", "image-density",
            Scale("small", ("positions=learned", "source=imagenet64", "length=12289", "batch=1", "steps=500")),
            Scale("paper", ("source=imagenet64", "length=12289")),
        ),
    ),
    methods=(
        Method("Reformer", "reformer"),
        Method("Performer", "performer"),
        Method("Logsparse", LOGSPARSE),
        Method("Combiner-Logsparse", "combiner-logsparse"),
        Method("Fixed", FIXED),
        Method("Combiner-Fixed", "combiner-fixed"),
        Method("Axial", "axial"),
        Method("Combiner-Axial", "combiner-axial"),
        Method("Combiner-Mixture", "combiner-mixture"),
        Method("Reformer, 12 layers", "reformer", ("layers=4",), ("layers=12",)),
        Method("Performer, 12 layers", "performer", ("layers=4",), ("layers=12",)),
        Method("Routing, 12 layers", "routing", ("layers=4",), ("layers=12",)),
        Method("Combiner-Mixture, 12 layers", "combiner-mixture", ("layers=4",), ("layers=12",)),
    ),
    numbers={
        "Reformer": (None, 3.740), "Performer": (3.335, 3.719), "Logsparse": (4.253, 4.351),
        "Combiner-Logsparse": (3.366, 3.795), "Fixed": (3.408, 3.696), "Combiner-Fixed": (3.321, 3.654),
        "Axial": (3.666, 4.032), "Combiner-Axial": (3.050, 3.585), "Combiner-Mixture": (3.040, 3.585),
        "Reformer, 12 layers": (None, 3.710), "Performer, 12 layers": (3.310, 3.636),
        "Routing, 12 layers": (2.950, None), "Combiner-Mixture, 12 layers": (2.885, 3.504),
    },
    claims=(  # 5.1.2: every Combiner is better than its baseline, and than the best of the baselines
        *PAIRS, *(Claim(f"Combiner-{x}", "Fixed", ("CIFAR-10",)) for x in ("Logsparse", "Axial")),
        Claim("Combiner-Mixture, 12 layers", "Performer, 12 layers"),
    ),
    larger_is_better=False, rates=("3e-3", "1e-3"),
    differs="2 layers of 64 (and 4 for 12), 1,000 steps of 4 pictures, 16 test pictures, one of the five files of "
    "training pictures; ImageNet-64 is a sample of 600 pictures where there is nothing else, and takes 500 steps of "
    "one picture",
)  # fmt: skip

TABLE_2 = Reproduction(
    "combiner-table-2", "Ren et al. 2021, table 2", "language modelling: X against Combiner-X, and a longer context",
    columns=(WIKI,),
    methods=tuple(
        at(length, name, spec, SHORT)
        for length, name, spec in (
            ("2k", "Transformer", "full"), ("2k", "Performer", "performer"), ("2k", "Routing", "routing"),
            ("2k", "Fixed", FIXED), ("2k", "Combiner-Fixed", "combiner-fixed"), ("2k", "Axial", "axial"),
            ("2k", "Combiner-Axial", "combiner-axial:summary=proj"), ("8k", "Combiner-Fixed", "combiner-fixed"),
            ("8k", "Combiner-Axial", "combiner-axial:summary=proj"),
        )
    ),
    numbers={
        "Transformer-2k": (17.26,), "Performer-2k": (19.66,), "Routing-2k": (20.85,), "Fixed-2k": (18.04,),
        "Combiner-Fixed-2k": (17.70,), "Axial-2k": (20.82,), "Combiner-Axial-2k": (17.56,),
        "Combiner-Fixed-8k": (16.60,), "Combiner-Axial-8k": (16.49,),
    },
    claims=(
        Claim("Combiner-Fixed-2k", "Fixed-2k"), Claim("Combiner-Axial-2k", "Axial-2k"),
        Claim("Combiner-Fixed-8k", "Transformer-2k"), Claim("Combiner-Axial-8k", "Transformer-2k"),
        Claim("Combiner-Fixed-8k", "Combiner-Fixed-2k"), Claim("Combiner-Axial-8k", "Combiner-Axial-2k"),
    ),
    larger_is_better=False, rates=("4e-3", "2e-3"),
    differs="bytes of PG-19 for pieces of Wiki-40B, 2 layers of 128, 1,200 steps; embeddings of 0.1; 256 bytes stand "
    "for 2k and 1024 for 8k",
)  # fmt: skip

TABLE_3 = Reproduction(
    "combiner-table-3", "Ren et al. 2021, table 3", "language modelling: four ways to summarise a group",
    columns=(WIKI,),
    methods=(
        at("2k", "Transformer", "full", SHORT),
        *(
            at("8k", f"Combiner-{name}", f"combiner-fixed{abstraction}", SHORT)
            for name, abstraction in (
                ("DeepSets-Max", ":abstraction=deepsets-max"), ("DeepSets-Mean", ":abstraction=deepsets-mean"),
                ("Max", ""), ("Mean", ":abstraction=mean"),  # max is the default: its runs are those of table 2
            )
        ),
    ),
    numbers={
        "Transformer-2k": (17.26,), "Combiner-DeepSets-Max-8k": (16.29,), "Combiner-DeepSets-Mean-8k": (16.48,),
        "Combiner-Max-8k": (16.60,), "Combiner-Mean-8k": (16.54,),
    },
    claims=(
        Claim("Combiner-DeepSets-Max-8k", "Combiner-Max-8k"), Claim("Combiner-DeepSets-Mean-8k", "Combiner-Mean-8k"),
        *(Claim(f"Combiner-{x}-8k", "Transformer-2k") for x in ("DeepSets-Max", "DeepSets-Mean", "Max", "Mean")),
    ),
    larger_is_better=False, rates=TABLE_2.rates, differs=TABLE_2.differs,
)  # fmt: skip

TABLE_4 = Reproduction(
    "combiner-table-4", "Ren et al. 2021, table 4", "bits per dimension of the largest Combiner-Axial models",
    columns=(
        Column("CIFAR-10", "image-density", paper=Scale("paper", ("layers=128", "steps=1200000"))),
        Column(
            "ImageNet-64", "image-density",
            paper=Scale("paper", ("source=imagenet64", "length=12289", "layers=30", "width=768", "steps=1200000")),
        ),
    ),
    methods=(Method("Combiner-Axial", "combiner-axial"),),
    numbers={"Combiner-Axial": (2.77, 3.42)}, spreads={"Combiner-Axial": (0.003, 0.005)},
    claims=(Claim("Combiner-Axial", 2.80, ("CIFAR-10",)), Claim("Combiner-Axial", 3.43, ("ImageNet-64",))),
    larger_is_better=False,
    too_big="it is about the absolute score of a model of 128 layers (30 on ImageNet-64) after 1.2 million steps",
)  # fmt: skip

TABLE_5 = Reproduction(
    "combiner-table-5", "Ren et al. 2021, table 5", "Long Range Arena",
    columns=(*lra(), AVERAGE),
    methods=(
        Method("Transformer", "full"), Method("Local Attention", "local:window=16", full="local"),
        Method("Sparse Trans.", "strided"), Method("Longformer", "longformer:window=16", full="longformer"),
        Method("Linformer", "linformer:k=32", full="linformer"), Method("Reformer", "reformer"),
        Method("Sinkhorn Trans.", "sinkhorn:block=16", full="sinkhorn"), Method("Synthesizer", "synthesizer"),
        Method("BigBird", "bigbird:block=8", full="bigbird"), Method("Linear Trans.", "linear"),
        Method("Performer", "performer"),
        Method("Combiner-Fixed", "combiner-fixed"), Method("Combiner-Axial", "combiner-axial"),
    ),
    numbers={
        "Transformer": (36.38, 64.27, 57.46, 42.44, 88.81, 57.87),
        "Local Attention": (15.95, 52.98, 53.39, 41.46, 84.64, 49.68),
        "Sparse Trans.": (35.78, 63.58, 59.59, 44.24, 83.90, 57.42),
        "Longformer": (36.03, 62.85, 56.89, 42.22, 86.68, 56.93),
        "Linformer": (35.49, 53.94, 52.27, 38.56, 86.17, 53.28), "Reformer": (36.30, 56.10, 53.40, 38.07, 79.18, 52.61),
        "Sinkhorn Trans.": (34.20, 61.20, 53.83, 41.23, 73.36, 52.76),
        "Synthesizer": (36.50, 61.68, 54.67, 41.61, 81.61, 55.21),
        "BigBird": (37.08, 64.02, 59.29, 40.83, 86.75, 57.59),
        "Linear Trans.": (17.15, 65.90, 53.09, 42.34, 88.13, 53.32),
        "Performer": (36.00, 65.40, 53.82, 42.77, 88.76, 57.35),
        "Combiner-Fixed": (36.65, 64.99, 59.81, 41.67, 88.59, 58.34),
        "Combiner-Axial": (36.15, 64.36, 56.10, 41.33, 88.43, 57.27),
    },
    claims=tuple(
        Claim(f"Combiner-{x}", "Local Attention", ("ListOps", "Text", "Retrieval", "Pathfinder"))
        for x in ("Fixed", "Axial")
    ),
    rates=("2e-3", "1e-3", "5e-4"),
    differs=f"{SMALL_ARENA}; windows of 16 tokens, blocks of 8 or 16, 32 projected rows",
    differs_paper="the recipes are those of SBM-Transformer's table 7, as E.4 does not state its own; sequences are "
    "pooled by their mean, where E.4 takes the better of mean and CLS (--set pooling=cls of `subquad compare lra`)",
)  # fmt: skip

TABLE_6 = Reproduction(
    "combiner-table-6", "Ren et al. 2021, table 6", "masked language modelling: X against Combiner-X",
    columns=(C4,),
    methods=tuple(
        at(length, name, spec, MLM_SHORT)
        for length, name, spec in (
            ("2k", "Transformer", "full"), ("2k", "BigBird", "bigbird:block=4"), ("2k", "Performer", "performer"),
            ("2k", "Fixed", FIXED), ("2k", "Combiner-Fixed", "combiner-fixed"), ("2k", "Axial", "axial"),
            ("2k", "Combiner-Axial", "combiner-axial"), ("2k", "Routing", "routing"),
            ("2k", "Combiner-Routing", "combiner-routing"), ("8k", "BigBird", "bigbird:block=4"),
            ("8k", "Combiner-Axial", "combiner-axial"), ("8k", "Combiner-Fixed", "combiner-fixed"),
        )
    ),
    numbers={
        "Transformer-2k": (4.552,), "BigBird-2k": (4.696,), "Performer-2k": (10.940,), "Fixed-2k": (5.279,),
        "Combiner-Fixed-2k": (5.170,), "Axial-2k": (5.370,), "Combiner-Axial-2k": (4.809,), "Routing-2k": (6.703,),
        "Combiner-Routing-2k": (6.539,), "BigBird-8k": (4.542,), "Combiner-Axial-8k": (4.190,),
        "Combiner-Fixed-8k": (4.139,),
    },
    claims=(  # 5.2.2: better than their baselines, behind the Transformer and BigBird with 2k, ahead of both with 8k
        *(Claim(f"Combiner-{x}-2k", f"{x}-2k") for x in ("Fixed", "Axial", "Routing")),
        *(
            Claim(f"{better}-2k", f"Combiner-{x}-2k")
            for better in ("Transformer", "BigBird") for x in ("Fixed", "Axial", "Routing")
        ),
        *(
            Claim(f"Combiner-{x}-8k", worse)
            for x in ("Fixed", "Axial") for worse in ("BigBird-8k", "Transformer-2k")
        ),
    ),
    larger_is_better=False, rates=("2e-3", "1e-3"),
    differs="WikiText-2 for C4, 2 layers of 128, 1,200 steps; embeddings of 0.1; 64 tokens stand for 2k and 128 for "
    "8k; blocks of BigBird have 4 tokens",
)  # fmt: skip

LENGTHS = tuple(1 << power for power in range(10, 15))
FIGURE_3 = Reproduction(
    "combiner-figure-3", "Ren et al. 2021, figure 3", "time and memory of a forward pass over the length",
    kind="measured", function="subquad.reproductions.measures:combiner_costs",
    columns=tuple(Column(f"{what}, {n}", noise=MEASURED) for what in ("time", "memory") for n in LENGTHS),
    methods=(
        Method("Transformer", "full"), Method("Performer", "performer"), Method("BigBird", "bigbird"),
        Method("Sparse-Fixed", FIXED), Method("Sparse-Axial", "axial"), Method("Combiner-Fixed", "combiner-fixed"),
        Method("Combiner-Axial", "combiner-axial"), Method("Combiner-Mixture", "combiner-mixture"),
    ),
    claims=tuple(  # 5.3: Mixture is slower, BigBird very expensive, the Transformer soon runs out of memory
        Claim(f"Combiner-{x}", other, (f"{what}, {n}",))
        for n in LENGTHS[-2:] for x in ("Fixed", "Axial")
        for what, other in (
            ("time", "Transformer"), ("time", "Combiner-Mixture"), ("time", "BigBird"), ("memory", "Transformer"),
        )
    ),
    larger_is_better=False,
    differs="a CPU for a TPU, one example for 16, 8 heads × 64, one attention without a model around it; seconds and "
    "MiB, and the Transformer is torch's own attention, which does not store the matrix of weights",
)  # fmt: skip

DRAWN = "subquad.reproductions.drawings:"
FIGURE_1 = Reproduction(
    "combiner-figure-1", "Ren et al. 2021, figure 1", "attention matrices of Fixed, Logsparse, Axial and Combiner-X",
    kind="drawn", function=DRAWN + "combiner_matrices",
)  # fmt: skip
FIGURE_2 = Reproduction(
    "combiner-figure-2", "Ren et al. 2021, figure 2", "the vertical and horizontal plans of Combiner-Axial",
    kind="drawn", function=DRAWN + "combiner_axial",
)  # fmt: skip
FIGURE_4 = Reproduction(
    "combiner-figure-4", "Ren et al. 2021, figure 4 (appendix)",
    "Combiner-Logsparse for masked models, and learned plans",
    kind="drawn", function=DRAWN + "combiner_bidirectional",
)  # fmt: skip

ALL = (TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5, TABLE_6, FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_4)
