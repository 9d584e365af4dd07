"""The options of `subquad bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    Path | None, typer.Option("--png", help="Draw time and memory against the length into this file.")
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
