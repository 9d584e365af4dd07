"""The figures of trained SBM-Transformers: what is shown of which run, from miniatures that are really trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch import nn

import subquad
from subquad.reproductions import find, runner, sbm_trained
from subquad.reproductions.declare import limited
from subquad.reproductions.runner import Plan
from subquad.reproductions.sbm import TABLE_1, TABLE_2
from subquad.studies import sbm_pictures
from subquad.studies.sbm_pictures import Seen
from subquad.tasks import task as make_task
from subquad.training import compare as comparing
from subquad.training import log
from subquad.training.run import Run, train
from training_runs import one_thread

__all__ = ["one_thread"]  # a fixture of every test here

SHARED = ("width=8", "heads=2", "layers=2", "feedforward=8", "steps=2", "evaluate=2", "batch=2", "warmup=0")
OWN = {"pathfinder": ("train_size=8", "eval_size=24"), "image": ("train_size=4", "eval_size=6", "valid=6")}


def in_process(comparison, attention, seed, rate=None):
    made = make_task(comparison.task, comparison.recipe, comparison.settings, comparison.data, seed=seed)
    train(Run(made, [attention], comparison.folder(attention, seed, rate), comparison.recipe, seed, ["x"]))
    return 0


def tiny(table):
    """The table with Pathfinder and Image in miniature."""
    small = lambda each: each.small._replace(settings=(*SHARED, *OWN[each.task]))  # noqa: E731
    columns = tuple(replace(each, small=small(each)) if each.task in OWN else each for each in table.columns)
    return replace(table, columns=columns, rates=())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Pictures of two classes of CIFAR-10."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "cifar10").mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        labels, pixels = np.tile([[3], [8]], (6, 1)), rng.integers(0, 256, (12, 3072))
        (folder / "cifar10" / name).write_bytes(np.concatenate([labels, pixels], 1).astype(np.uint8).tobytes())
    return folder


@pytest.fixture
def figures(monkeypatch) -> list:
    """What is drawn, before it is saved; the tables are the miniatures."""
    drawn, save = [], sbm_pictures.save
    monkeypatch.setattr(
        sbm_pictures, "save", lambda figure, *where, **about: drawn.append(figure) or save(figure, *where, **about)
    )
    monkeypatch.setattr(sbm_trained, "TABLE_1", tiny(TABLE_1))
    monkeypatch.setattr(sbm_trained, "TABLE_2", tiny(TABLE_2))
    monkeypatch.setattr(comparing, "run_one", in_process)
    return drawn


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> SimpleNamespace:
    """Folders of runs: `plain` of table 1 on Pathfinder, `both` also of table 2, and one λ on Image."""
    made = SimpleNamespace(plain=tmp_path_factory.mktemp("plain"), both=tmp_path_factory.mktemp("both"))
    whole = [
        (made.plain, TABLE_1, ["SBM-Transformer"], "Pathfinder"),
        (made.both, TABLE_1, ["SBM-Transformer"], "Pathfinder"),
        (made.both, TABLE_2, ["λ = 1e-4", "λ = 1e-2"], "Pathfinder"), (made.both, TABLE_2, ["λ = 1e-3"], "Image"),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "run_one", in_process)
        for out, table, methods, column in whole:
            found = runner.reproduce(Plan(limited(tiny(table), methods, [column]), out, data=data))
            assert set(found["ours"]) == set(methods)
    return made


def panels(figure, width: int) -> list[list[tuple[str, np.ndarray]]]:
    """Title and values of each panel, row by row."""
    found = [(axis.get_title(), np.asarray(axis.images[0].get_array())) for axis in figure.axes]
    return [found[first : first + width] for first in range(0, len(found), width)]


def title(figure) -> str:
    return figure.get_suptitle()


# ---- which examples are shown ----------------------------------------------------------------------------------------


class Parity(nn.Module):
    """Says whether the first pixel is odd, whatever its attention sees."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layer = subquad.MultiheadAttention(8, 2, attention="sbm:clusters=4", batch_first=True)

    def forward(self, pixels):
        x = self.embedding(pixels)
        self.layer(x, x, x, need_weights=False)
        return SimpleNamespace(logits=nn.functional.one_hot(pixels[:, 0] % 2, 2))


def test_only_what_is_classified_rightly_is_shown():
    draw = torch.Generator().manual_seed(0)
    pictures = [(torch.randint(256, (12,), generator=draw), label % 2) for label in range(20)]
    right = [pixels for pixels, label in pictures if int(pixels[0]) % 2 == label]
    assert 0 < len(right) < len(pictures)
    model = Parity().eval()
    found = sbm_pictures.first_right(model, pictures)
    assert len(found) == len(right) and all(map(torch.equal, (each.pixels for each in found), right))
    assert all(each.label == int(each.pixels[0]) % 2 for each in found)
    assert len(sbm_pictures.first_right(model, iter(pictures), most=3)) == 3
    wrong = [(pixels, 1 - int(pixels[0]) % 2) for pixels, _ in pictures]
    assert sbm_pictures.first_right(model, wrong) == []


def test_what_is_shown_is_the_call_that_was_right():
    """Its graphs are sampled: the shares have the densities of that call."""
    model, pixels = Parity().eval(), torch.arange(12)
    torch.manual_seed(0)
    (seen,) = sbm_pictures.first_right(model, [(pixels, 0)])
    torch.manual_seed(0)
    with sbm_pictures.watched(model) as calls:
        model(pixels[None])
    assert seen.shares.shape == (1, 2, 12)
    assert torch.allclose(seen.shares.mean(2)[0], calls[0].record.density)
    assert torch.equal(seen.shares[0], calls[0].mask()[0].float().mean(1))


def seen(density: float, label: int) -> Seen:
    return Seen(torch.zeros(1), label, torch.full((1, 1, 1), density))


def test_examples_of_different_classes_and_densities():
    chosen = lambda *pairs: [  # noqa: E731
        (round(each.density, 1), each.label) for each in sbm_pictures.contrasted([seen(*pair) for pair in pairs], 4)
    ]
    two = [(0.5, 0), (0.1, 1), (0.9, 1), (0.2, 0), (0.7, 0), (0.3, 1)]
    assert chosen(*two) == [(0.1, 1), (0.2, 0), (0.7, 0), (0.9, 1)], "of each class the sparsest and the densest"
    assert chosen(*((x / 10, x) for x in range(1, 7))) == [(0.1, 1), (0.2, 2), (0.5, 5), (0.6, 6)]
    assert chosen((0.1, 0), (0.2, 0), (0.3, 0), (0.8, 1)) == [(0.1, 0), (0.2, 0), (0.3, 0), (0.8, 1)]
    assert chosen((0.5, 0)) == [(0.5, 0)] and chosen() == []


# ---- figures 7 and 8 -------------------------------------------------------------------------------------------------


def test_figure_7_shows_pictures_and_heads(trained, data, figures, monkeypatch):
    """The model is made to be right on pictures with a dark corner only: no other one is in the figure."""
    load, rule = sbm_trained.load, lambda pixels: int(pixels[:40].sum()) < 900

    def judged(run, where):
        model, task = load(run, where)
        labels = {bytes(pixels.numpy()): label for pixels, label in sbm_trained.pictures(task)}
        forward = model.forward

        def answer(pixels):
            forward(pixels)
            label = labels[bytes(pixels[0].numpy())]
            return SimpleNamespace(logits=torch.eye(2)[[label if rule(pixels[0]) else 1 - label]])

        monkeypatch.setattr(model, "forward", answer)
        return model, task

    monkeypatch.setattr(sbm_trained, "load", judged)
    result = runner.reproduce(Plan(find("sbm-figure-7"), trained.both, data=data))
    assert Path(result["picture"]).read_bytes()[:4] == b"\x89PNG"
    rows = panels(figures[0], 5)
    assert len(rows) == 4 and {len(row) for row in rows} == {5}, "the picture, two heads of two layers"
    _, task = load(sbm_trained.sparse_runs(Plan(find("sbm-figure-7"), trained.both))["Pathfinder"].run, data)
    examples = {bytes(pixels.numpy()): label for pixels, label in sbm_trained.pictures(task)}
    assert sorted(name for (name, _), *_ in rows) == ["joined", "joined", "not joined", "not joined"]
    assert 0 < sum(rule(torch.frombuffer(bytearray(x), dtype=torch.long)) for x in examples) < len(examples)
    for (name, picture), *heads in rows:
        assert picture.shape == (16, 16) and rule(picture.ravel())
        assert name == ("not joined", "joined")[examples[picture.astype(np.int64).tobytes()]]
        for density, share in heads:
            assert share.shape == (16, 16) and float(density) == pytest.approx(share.mean(), abs=6e-4)
    sums = [sum(float(density) for density, _ in row[1:]) for row in rows]
    assert sums == sorted(sums), "the sparsest first"


def test_figures_say_how_the_model_was_trained(trained, data, figures):
    for out in (trained.plain, trained.both):
        runner.reproduce(Plan(find("sbm-figure-7"), out, data=data))
    assert "trained without the density loss: no run of sbm-table-2 with it is finished" in title(figures[0])
    best = sbm_trained.sparse_runs(Plan(find("sbm-figure-7"), trained.both))["Pathfinder"].method
    assert "trained without" not in title(figures[1]) and f"trained with the density loss, {best}" in title(figures[1])


def test_figure_8_names_the_classes(trained, data, figures):
    runner.reproduce(Plan(find("sbm-figure-8"), trained.both, data=data))
    assert "figure 8: Image" in title(figures[0]) and "λ = 1e-3" in title(figures[0])
    rows = panels(figures[0], 5)
    assert rows and {name for (name, _), *_ in rows} <= {"cat", "ship"} and rows[0][0][1].shape == (32, 32)


def test_a_figure_without_a_model_says_which_command_trains_it(trained, data, figures, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        runner.reproduce(Plan(find("sbm-figure-8"), trained.plain, data=data))
    assert str(error.value) == (
        f"{trained.plain} has no finished run of SBM-Transformer on Image: run `subquad reproduce sbm-table-2 --method "
        "'λ = 1e-2' --column Image` first, or without the density loss `subquad reproduce sbm-table-1 --method "
        "SBM-Transformer --column Image`"
    )
    with pytest.raises(FileNotFoundError, match=r"--method 'λ = 1e-4' --column Pathfinder --recipe paper` first"):
        runner.reproduce(Plan(find("sbm-figure-7"), trained.both, "paper", data=data))
    with pytest.raises(
        FileNotFoundError, match="no finished run of SBM-Transformer: run `subquad reproduce sbm-table-1"
    ):
        runner.reproduce(Plan(find("sbm-figure-5"), tmp_path, data=data))
    assert not figures


def test_a_model_that_is_never_right_is_an_error(trained, data, figures, monkeypatch):
    monkeypatch.setattr(sbm_pictures, "first_right", lambda *given: [])
    with pytest.raises(ValueError, match=r"its model classifies no test example of Pathfinder rightly"):
        runner.reproduce(Plan(find("sbm-figure-7"), trained.plain, data=data))


# ---- figure 5 --------------------------------------------------------------------------------------------------------


def test_figure_5_compares_the_models_without_and_with_the_density_loss(trained, data, figures):
    plan = Plan(find("sbm-figure-5"), trained.both, data=data)
    for out in (trained.both, trained.plain):
        runner.reproduce(replace(plan, out=out))
    image, pathfinder = figures[0].axes
    best = sbm_trained.sparse_runs(plan)["Pathfinder"]
    assert image.get_title() == "Image, λ = 1e-3" and pathfinder.get_title() == f"Pathfinder, {best.method}"
    bars = [[bar.get_height() for bar in each] for each in pathfinder.containers if hasattr(each, "patches")]
    assert len(bars) == 2 and len([each for each in image.containers if hasattr(each, "patches")]) == 1
    for run, heights in zip((sbm_trained.plain_runs(plan)["Pathfinder"].run, best.run), bars, strict=True):
        found = sbm_pictures.densities(*sbm_trained.test_batches(run, plan, 32))
        assert found.shape == (24, 2, 2) and heights == pytest.approx(found.mean((0, 2)).tolist(), abs=1e-4)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [sbm_trained.PLAIN, sbm_trained.SPARSE]
    assert figures[0].get_supxlabel().replace("\n", " ") == (
        "not trained: ListOps, Text, Retrieval, Image without the density loss; "
        "ListOps, Text, Retrieval with the density loss"
    )
    assert [axis.get_title() for axis in figures[1].axes] == ["Pathfinder"]
    for figure in figures:
        (remark,) = (text for text in figure.findobj(Text) if text.get_text().startswith("not trained"))
        figure.draw_without_rendering()  # at its own resolution, not that of the file
        edges = remark.get_window_extent()
        assert edges.x0 >= 0 and edges.x1 <= figure.bbox.x1, "it is not cut off"


# ---- which runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [None, "5e-4", "7e-4"])
def test_the_best_run_on_validation_is_shown_whatever_rates_were_tried(best, tmp_path):
    """7e-4 is no rate of the table: someone asked for it by --rates."""
    plan = Plan(find("sbm-figure-5"), tmp_path)
    column, methods, comparison = next(iter(replace(plan, reproduction=TABLE_1).comparisons()))
    spec = next(each.spec for each in methods if each.name == "SBM-Transformer")
    for rate in (None, *comparison.rates, "7e-4"):
        folder = comparison.folder(spec, 0, rate)
        folder.mkdir(parents=True)
        result = {"valid": 0.4 + 0.1 * (rate == best), "larger_is_better": True}
        (folder / "result.json").write_text(json.dumps(result))
    found = sbm_trained.trained_runs(plan, TABLE_1, ["SBM-Transformer"])
    assert found == {column.name: ("SBM-Transformer", comparison.folder(spec, 0, best))}
    assert sbm_trained.plain_runs(plan) == found and sbm_trained.sparse_runs(plan) == {}


def test_the_best_weight_of_the_density_loss_is_shown(tmp_path):
    plan = Plan(find("sbm-figure-7"), tmp_path)
    for _, methods, comparison in replace(plan, reproduction=limited(TABLE_2, (), ["Image"])).comparisons():
        (method,) = methods
        valid = {"λ = 0": 0.9, "λ = 1e-4": 0.4, "λ = 1e-3": 0.5, "λ = 1e-2": 0.3}.get(method.name)
        if valid is not None:
            folder = comparison.folder(method.spec, 0)
            folder.mkdir(parents=True)
            log.write_result(folder, {"valid": valid, "larger_is_better": True})
    assert sbm_trained.sparse_runs(plan)["Image"].method == "λ = 1e-3"
    assert sbm_trained.plain_runs(plan)["Image"].method == "λ = 0"
    assert sbm_trained.chosen(plan, "Image")[1] == "trained with the density loss, λ = 1e-3"
