"""Pictures: the right colours in the right places."""

import sys

import numpy as np
import pytest
import torch

import subquad
from subquad import plots
from subquad.attention.base import Attention, Capabilities
from subquad.attention.registry import for_length
from subquad.bench import Row


@pytest.fixture
def grouped():
    """Direct inside spans of 4, through a summary outside; bidirectional only."""

    @subquad.register("grouped")
    class Grouped(Attention):
        """Spans."""

        capabilities = Capabilities(causal=False)

        def picture(self, n):
            span = torch.arange(n) // 4
            return torch.where(span[:, None] == span, 1, 2)

        def define(self, q, k, call):
            return (q @ k.mT).softmax(-1)

    yield "grouped"
    subquad.unregister("grouped")


def pixels(figure, tmp_path):
    """The saved picture, (height, width, 3) in 0 … 255."""
    from matplotlib.image import imread

    path = tmp_path / "picture.png"
    plots.save(figure, path)
    return np.round(imread(path)[..., :3] * 255).astype(int)


def share(image, colour):
    """Share of pixels of exactly this colour."""
    wanted = np.round(plots.rgb(colour) * 255).astype(int)
    return (image == wanted).all(-1).mean()


def test_a_picture_has_cells_in_proportion_to_the_connections(tmp_path):
    attention = subquad.attention("fixed", heads="union", causal=True)
    image = pixels(plots.draw_support(attention, 128), tmp_path)
    absent, direct, summary = (share(image, colour) for colour in plots.COLOURS)
    wanted = attention.support(128).float().mean().item()
    assert summary == 0
    assert direct / (direct + absent) == pytest.approx(wanted, abs=0.02)  # the legend has swatches too


def test_summaries_have_their_own_colour(grouped, tmp_path):
    image = pixels(plots.draw_support(subquad.attention(grouped), 128), tmp_path)
    assert share(image, plots.COLOURS[2]) > 10 * share(image, plots.COLOURS[1]) > 0


def test_heads_that_differ_have_panels_of_their_own(tmp_path):
    picture = subquad.attention("strided:w=4", heads="multihead", num_heads=4).picture(16)
    groups = plots.panels(picture)
    assert [name for name, _ in groups] == ["heads 0–1", "heads 2–3"]
    assert torch.equal(groups[0][1], picture[0]) and torch.equal(groups[1][1], picture[3])
    assert plots.panels(picture[:2])[0][0] == "" and plots.panels(picture[0])[0][0] == ""
    assert [name for name, _ in plots.panels(picture[[0, 3, 0]])] == ["heads 0, 2", "head 1"]
    single = plots.draw_support(subquad.attention("strided:w=4"), 16)
    double = plots.draw_support(subquad.attention("strided:w=4", heads="multihead"), 16)
    assert len(double.axes) == len(single.axes) + 1


def test_weights_are_shaded_by_kind_and_strength():
    weights, kinds = torch.tensor([[0.0, 0.25, 1.0, 1.0]]), torch.tensor([[1, 1, 1, 2]])
    absent, weak, strong, summary = plots.shades(weights, kinds, 1.0)[0]
    assert np.allclose(absent, plots.rgb(plots.COLOURS[0]))
    assert np.allclose(strong, plots.rgb(plots.COLOURS[1])) and np.allclose(summary, plots.rgb(plots.COLOURS[2]))
    assert (strong < weak).all() and (weak < absent).all()


def test_random_weights_are_seeded_and_leave_the_generator_alone(grouped):
    attention = subquad.attention(grouped, num_heads=2, head_dim=4)
    state = torch.get_rng_state()
    first, again, other = (plots.random_weights(attention, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (2, 8, 8) and torch.allclose(first.sum(-1), torch.ones(2, 8))


def test_weights_of_many_heads_say_which_are_drawn(grouped):
    figure = plots.draw_weights(subquad.attention(grouped, num_heads=3, head_dim=4), 8, most=2)
    assert any("heads 0–1 of 3" in text.get_text() for text in figure.texts)
    assert len(figure.axes) == 2 + 2  # panels, and a ramp for each kind


def test_the_gallery_shows_every_mechanism_and_says_what_is_missing(grouped, tmp_path):
    names = ("full", "fixed", "pattern", grouped)
    figure = plots.draw_gallery(names, n=32, columns=3)
    image = pixels(figure, tmp_path)
    assert all(share(image, colour) > 0.01 for colour in plots.COLOURS)
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert all(name in words for name in names) and "not causal" in words


def test_the_gallery_covers_the_registry():
    figure = plots.draw_gallery(n=16)
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert set(subquad.available()) <= set(words)


def test_every_title_of_the_gallery_stands_above_a_cost():
    """Also where the upper panel is empty because the mechanism is causal only."""
    titles, costs = {}, set()
    for axes in plots.draw_gallery(n=16).axes:
        note, title = (axes.texts[-2], axes.texts[-1]) if len(axes.texts) > 1 else (None, None)
        if title is not None and title.get_text():
            titles[title.get_text()] = title.get_position()
            costs |= {title.get_text()} if note.get_text().startswith("cost ") else set()
    assert costs == set(titles) == set(subquad.available())
    assert len(set(titles.values())) == 1


@pytest.mark.parametrize("spec", ["moba:block=8,topk=3", "sinkhorn:block=8"])
def test_chosen_blocks_are_drawn_as_an_example(spec):
    """A causal query sees its own block up to itself, and whole blocks before it: no more than the options allow."""
    n, allowed = 60, 1 + ("moba" in spec)
    block, drawn = torch.arange(n) // 8, for_length(spec, n, causal=True).picture(n)
    own = block[:, None] == block
    assert torch.equal(drawn[own].bool(), torch.ones(n, n).tril()[own].bool())
    before = [set(block[(row > 0) & (block < at)].tolist()) for row, at in zip(drawn, block, strict=True)]
    assert [len(chosen) for chosen in before] == [min(allowed, at) for at in block.tolist()]
    assert [int(row.sum()) for row in drawn] == [8 * len(x) + i % 8 + 1 for i, x in enumerate(before)]
    assert torch.equal(drawn, for_length(spec, n, causal=True).picture(n)), "the same picture every time"


def test_bidirectional_sinkhorn_is_drawn_as_one_order_of_the_blocks():
    drawn = for_length("sinkhorn:block=8", 64).picture(64)
    blocks = drawn.unflatten(0, (8, 8)).unflatten(2, (8, 8)).float().mean((1, 3))  # (N, N)
    assert set(blocks.flatten().tolist()) == {0, 1} and (blocks.diagonal() == 1).all()
    beside = blocks - torch.eye(8)
    assert (beside.sum(0) <= 1).all() and (beside.sum(1) <= 1).all() and beside.sum() > 4
    cut = for_length("sinkhorn:block=8,sortcut=2", 64).picture(64)
    assert (cut == cut[0]).all() and cut[0].sum() == 16


def test_weights_are_drawn_also_where_the_example_has_none():
    attention = for_length("moba:block=4,topk=2", 32, causal=True, num_heads=2, head_dim=4)
    weights = plots.random_weights(attention, 32, 0)
    elsewhere = (weights > 0) & (attention.picture(32) == 0)
    assert elsewhere.any()
    panel = plots.draw_weights(attention, 32).axes[0].images[0].get_array()
    size = len(panel) // 32
    middles = panel[size // 2 :: size, size // 2 :: size]
    assert (np.ptp(middles[elsewhere[0].numpy()], axis=-1) > 0.01).all(), "blue, not grey"


def test_a_mechanism_that_needs_options_says_so_in_its_panel():
    @subquad.register("needy")
    class Needy(Attention):
        """Needs a length."""

        def __init__(self, options):
            super().__init__(options)
            raise ValueError("give me more")

    try:
        panel = plots._gallery_panel("needy", 8, False)
    finally:
        subquad.unregister("needy")
    assert panel.colours is None and panel.reason == "give me more"


def test_measurements_are_drawn_on_logarithmic_axes(tmp_path):
    rows = [
        Row(
            spec=spec,
            level="head",
            n=n,
            repeats=1,
            seconds=cost * n,
            full_seconds=n,
            ratio=cost,
            flops=None,
            full_flops=1,
            input_bytes=1,
            memory=memory,
        )
        for n, memory in ((128, 2**20), (256, None))
        for spec, cost in (("full", 1.0), ("fixed", 0.1))
    ]
    figure = plots.draw_bench(rows, title="forward")
    assert [axes.get_xscale() + axes.get_yscale() for axes in figure.axes] == ["loglog", "loglog"]
    time, memory = ([list(line.get_ydata()) for line in axes.lines] for axes in figure.axes)
    assert time == [[128, 256], [12.8, 25.6]] and memory == [[1], [1]]  # what is not measured is not drawn
    assert share(pixels(figure, tmp_path), plots.LINES[0]) > 0


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "subquad\[train\]"'):
        plots.draw_support(subquad.attention("full"), 4)
