"""Reproductions: what is declared of the papers is consistent, runs in miniature, and is judged rightly."""

from __future__ import annotations

import inspect
import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import subquad
from subquad.cli import app
from subquad.cli import reproduce as command
from subquad.core.options import split_spec
from subquad.reproductions import REPRODUCTIONS, curves, drawings, find, measures, pages, runner, sparse, verdict
from subquad.reproductions.averages import add_averages
from subquad.reproductions.declare import AVERAGE, Claim, Column, Method, Reproduction, Scale, limited
from subquad.reproductions.runner import Plan, absent, summary
from subquad.tasks import task as make_task
from subquad.training import compare as comparing
from subquad.training import log
from subquad.training.rates import multiples
from subquad.training.run import Run, check_specs, train
from training_runs import one_thread

__all__ = ["one_thread"]  # a fixture of every test here

ALL = list(REPRODUCTIONS.values())
TRAINED = [each for each in ALL if each.kind == "trained"]
DOCS = Path(__file__).parents[1] / "docs"


# ---- what is declared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.key)
def test_declarations_are_consistent(each):
    names, columns = [method.name for method in each.methods], [column.name for column in each.columns]
    assert len(set(names)) == len(names) and len(set(columns)) == len(columns)
    assert set(each.numbers) <= set(names) and set(each.spreads) <= set(each.numbers)
    assert all(len(row) == len(columns) for row in (*each.numbers.values(), *each.spreads.values()))
    for claim in each.claims:
        assert all(not isinstance(side, str) or side in names for side in (claim.better, claim.worse)), claim
        assert set(claim.columns) <= set(columns), claim
    assert each.kind != "same" or each.same_as in REPRODUCTIONS
    assert (each.kind in ("measured", "drawn")) == bool(each.function)
    assert each.kind not in ("trained", "measured") or (each.differs or each.too_big), "it says how it differs"
    assert each.kind != "trained" or each.too_big or len(each.rates) > 1, "one rate for all methods misleads"


@pytest.mark.parametrize("each", [each for each in ALL if each.numbers], ids=lambda each: each.key)
def test_the_paper_agrees_with_its_own_claims(each):
    cells = {
        name: {column.name: measures.counted(x) for column, x in zip(each.columns, row, strict=True) if x is not None}
        for name, row in each.numbers.items()
    }
    found = verdict.judge(each, cells)
    assert found and {judgement.status for judgement in found} <= {"agrees", "missing"}, found
    assert "contradicts" not in verdict.pairs(each, cells)


@cache
def possible(task: str, recipe: str, settings: tuple[str, ...], spec: str) -> bool:
    check_specs(make_task(task, recipe, settings), spec.split("|"))
    return True


@pytest.mark.parametrize("each", TRAINED, ids=lambda each: each.key)
def test_every_method_can_do_its_task(each):
    for scale in ("small", "paper"):
        for column, methods, comparison in Plan(each, Path("nowhere"), scale).comparisons():
            for method in methods:
                spec = method.spec_at(scale)
                if scale == "small" or split_spec(spec)[0] not in ("random", "bigbird"):  # whose sets are drawn
                    assert possible(column.task, comparison.recipe, comparison.settings, spec)


BOOKS = [each for each in TRAINED if each.columns[0].task == "lm-books"]


@pytest.mark.parametrize("each", BOOKS, ids=lambda each: each.key)
def test_models_of_different_lengths_are_scored_by_equally_many_tokens(each):
    recipes = [
        make_task("lm-books", comparison.recipe, comparison.settings).recipe
        for _, _, comparison in Plan(each, Path("nowhere")).comparisons()
    ]
    assert {recipe.eval_size * recipe.stride for recipe in recipes} == {61_440}
    assert {recipe.stride for recipe in recipes} == {recipe.length // 2 for recipe in recipes}


@pytest.mark.parametrize("each", [each for each in TRAINED if not each.too_big], ids=lambda each: each.key)
def test_sparse_methods_are_sparse_at_the_reduced_length(each):
    """A window as long as the sequence is full attention by another name."""
    for column, methods, comparison in Plan(each, Path("nowhere")).comparisons():
        recipe = make_task(column.task, comparison.recipe, comparison.settings).recipe
        for method in methods:
            made = subquad.attention(method.spec.split("|")[0], num_heads=2, head_dim=8, max_length=recipe.length)
            if made.family == "sparse pattern":
                assert made.connections(recipe.length) < 0.75 * recipe.length**2, (column.name, method.spec)


# ---- miniatures -----------------------------------------------------------------------------------------------------

TINY = (
    "width=8",
    "heads=2",
    "layers=1",
    "feedforward=8",
    "steps=2",
    "evaluate=2",
    "batch=2",
    "warmup=0",
    "eval_size=4",
)
SHAPES = {
    "listops": ("length=64", "max_length=60", "min_length=4", "train_size=8"),
    "copying": ("length=16", "train_size=8"),
    "copying-causal": ("length=16", "train_size=8"),
    "repeated-tokens": ("length=16",),
    "lm-words": ("source=file", "length=32", "stride=16"),
    "lm-books": ("source=folder", "length=32", "stride=16", "subwords=300"),
    "mlm": ("length=32", "subwords=300"),
    "image-density": ("valid=2", "train_size=4", "eval_size=2"),
    "translation": ("source=files", "length=24", "subwords=310", "beams=1"),
    "glue-sst2": ("length=16", "subwords=300"), "glue-cola": ("length=16", "subwords=300"),
    "glue-mnli": ("length=16", "subwords=300"), "xnli": ("length=16", "subwords=300", "source=dev"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    """A few examples of every data set, in its own format."""
    data, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    known = ("a", "red", "fox", "ran", "over", "the", "hill", "and", "old", "dog", "saw", "it", "go")
    words = "\n".join(" ".join(line) for line in rng.choice(known, (50, 8)))
    files = {"words.txt": words, "books/one.txt": words, **{f"books/{k}.txt": words for k in range(12)}}
    for part in ("train", "valid", "test"):
        for language in ("en", "cs", "de"):
            files[f"{part}.{language}"] = "a red fox ran\nthe old dog saw it\nit ran over the hill\n" * 4
    rows = "\n".join(f"a red fox ran\t{k % 2}" for k in range(20))
    nli = [f"a fox ran\tit ran\t{('entailment', 'neutral', 'contradiction')[k % 3]}" for k in range(20)]
    mnli = "\n".join(["sentence1\tsentence2\tgold_label", *nli])
    for part in ("train", "dev"):
        files[f"glue/SST-2/{part}.tsv"] = "sentence\tlabel\n" + rows
        files[f"glue/CoLA/{part}.tsv"] = "\n".join(f"x\t{k % 2}\t\ta red fox ran" for k in range(20))
        files[f"glue/MNLI/{part}{'_matched' * (part == 'dev')}.tsv"] = mnli
    files["xnli/dev-en.tsv"] = "\n".join(nli)
    for name, text in files.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(text)
    (data / "cifar10").mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        record = np.concatenate([np.zeros((6, 1), np.uint8), rng.integers(0, 256, (6, 3072), dtype=np.uint8)], 1)
        (data / "cifar10" / name).write_bytes(record.tobytes())
    return data


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One folder for all, so that tables share what they have in common."""
    return tmp_path_factory.mktemp("runs")


def miniature(each: Reproduction, data: Path) -> Reproduction:
    """Its first column that is cheap, the two methods of its first claim, the smallest sizes."""
    column = next(column for column in each.columns if column.task in SHAPES)
    about = {f"path={data / 'words.txt'}": ("lm-words", "mlm"), f"path={data / 'books'}": ("lm-books",)}
    paths = tuple(path for path, tasks in about.items() if column.task in tasks)
    kept = tuple(
        x for x in column.small.settings if x.split("=")[0] in ("layers", "origin", "target", "positions", "density")
    )
    shape = (*TINY, *(x for x in kept if column.task != "image-density"), *SHAPES[column.task], *paths)
    small = column.small._replace(settings=shape)
    claim = next(
        (claim for claim in each.claims if isinstance(claim.worse, str) and isinstance(claim.better, str)), None
    )
    names = [claim.better, claim.worse] if claim else [method.name for method in each.methods[:2]]
    chosen = limited(each, names, [column.name])
    methods = tuple(
        replace(x, small=tuple(s for s in x.small if s.split("=")[0] not in ("length", "stride", "eval_size")))
        for x in chosen.methods
    )
    claims = tuple(
        replace(claim, columns=()) for claim in each.claims
        if {claim.better, claim.worse} <= set(names) and (not claim.columns or column.name in claim.columns)
    )  # fmt: skip
    return replace(chosen, columns=(replace(column, small=small),), methods=methods, claims=claims, rates=())


def in_process(comparison, attention, seed, rate=None):
    """A run in this process: a fresh one takes seconds to start."""
    settings = comparison.settings_of(attention, rate)
    made = make_task(comparison.task, comparison.recipe, settings, comparison.data, seed=seed)
    folder = comparison.folder(attention, seed, rate)
    train(Run(made, [attention], folder, comparison.recipe, seed, ["x"]))
    return 0


@pytest.mark.parametrize("each", [each for each in TRAINED if not each.too_big], ids=lambda each: each.key)
def test_a_miniature_of_every_table(each, tiny_data, runs, monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_CACHE", str(runs / "cache"))
    monkeypatch.setattr(comparing, "run_one", in_process)
    small = miniature(each, tiny_data)
    result = runner.reproduce(Plan(small, runs, data=tiny_data))
    ours = {method.name for method in small.methods if not absent(method)}
    assert set(result["ours"]) == ours and len(result["claims"]) == len(small.claims)
    path = runner.write_result(tmp_path, result)
    assert json.loads(path.read_text())["sentence"] == result["sentence"]
    assert str(runs) not in path.read_text() and str(tiny_data) not in json.dumps(result["ours"])
    monkeypatch.setattr(comparing, "run_one", lambda *given: pytest.fail("everything was finished"))
    assert runner.reproduce(Plan(small, runs, data=tiny_data))["ours"] == result["ours"], "resumed"


def test_an_earlier_result_is_continued_without_its_runs(tiny_data, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(comparing, "run_one", lambda *run: started.append(run[1:]) or in_process(*run))
    table = miniature(find("sparse-table-1"), tiny_data)
    first, second = table.methods
    only = replace(table, methods=(first,), claims=())
    earlier = runner.reproduce(Plan(only, tmp_path / "here", rates=("1e-3", "2e-3")))
    rate = earlier["ours"][first.name][table.columns[0].name]["rate"]
    started.clear()

    plan = Plan(table, tmp_path / "elsewhere", seeds=2, rates=("1e-3", "2e-3"), earlier=earlier)
    monkeypatch.setitem(REPRODUCTIONS, table.key, table)
    grown = runner.reproduce(plan)
    assert started[:2] == [(second.spec, 0, "1e-3"), (second.spec, 0, "2e-3")]
    assert started[2] == (first.spec, 1, rate) and len(started) == 4
    whole = runner.reproduce(replace(plan, out=tmp_path / "afresh", earlier={}))
    for name, row in whole["ours"].items():
        for column, cell in row.items():
            found = {**grown["ours"][name][column], "step_seconds": cell["step_seconds"]}
            assert found == cell and cell["seeds"] == [0, 1]
    started.clear()
    again = runner.reproduce(Plan(only, tmp_path / "nowhere", rates=("1e-3", "2e-3"), earlier=grown))
    assert not started and again["ours"] == grown["ours"] and list(again["methods"]) == [first.name, second.name]
    assert again["claims"] == grown["claims"] and again["seeds"] == 2

    with pytest.raises(ValueError, match=r"not with that of the recipe: continue it with `rates` 1e-3,2e-3, or choose"):
        runner.reproduce(Plan(table, tmp_path / "elsewhere", rates=(), earlier=grown))
    small = table.columns[0].small
    other = replace(table.columns[0], small=small._replace(settings=(*small.settings, "decay=0.5")))
    with pytest.raises(ValueError, match=r"was trained with other settings or another spec \(1 layer, STRIDED UNION"):
        runner.reproduce(replace(plan, reproduction=replace(table, columns=(other,)), earlier=grown))


def test_what_another_command_adds_meanwhile_is_kept(tiny_data, tmp_path, monkeypatch):
    """Two commands with one folder of results: the one that ends last does not undo what the other one has written."""
    table = miniature(find("sparse-table-1"), tiny_data)
    first, second = (replace(table, methods=(method,), claims=()) for method in table.methods)
    monkeypatch.setitem(REPRODUCTIONS, table.key, table)
    monkeypatch.setattr(comparing, "run_one", in_process)
    other = runner.reproduce(Plan(first, tmp_path / "other"))

    def run(*given):
        runner.write_result(tmp_path, other)
        return in_process(*given)

    monkeypatch.setattr(comparing, "run_one", run)
    plan = Plan(second, tmp_path / "own", results=tmp_path)
    both = runner.reproduce(plan)
    assert both["ours"][table.methods[0].name] == other["ours"][table.methods[0].name]
    assert list(both["methods"]) == list(both["ours"]) == [method.name for method in table.methods]
    runner.write_result(tmp_path, both)
    assert runner.so_far(plan)["ours"] == both["ours"], "its own runs are not counted twice"


@pytest.mark.parametrize("better", ["the recipe's", "another"])
def test_learning_rates_are_added_to_an_earlier_result(better, tiny_data, tmp_path, monkeypatch):
    """What was tried is not tried again; the best on validation is kept, with the seeds that it has."""
    started, table = [], miniature(find("sparse-table-1"), tiny_data)
    table = replace(table, methods=table.methods[:1], claims=())
    monkeypatch.setitem(REPRODUCTIONS, table.key, table)
    (method,), (column,) = table.methods, table.columns
    recipe = make_task(column.task, "small", column.small.settings).recipe.rate
    assert recipe == 2e-3  # which the bracket writes otherwise: 2.0e-3
    scores = {None: 0.5, "4e-3": 0.75 if better == "another" else 0.25, "3e-3": 0.125}

    def run(comparison, attention, seed, rate=None):
        started.append((seed, rate))
        in_process(comparison, attention, seed, rate)
        folder = comparison.folder(attention, seed, rate)
        log.write_result(folder, {**log.read_result(folder), "valid": scores[rate], "test": {"accuracy": 0.5 + seed}})
        log.write(folder, [{"step": 2, "valid": {"accuracy": scores[rate]}}])
        return 0

    monkeypatch.setattr(comparing, "run_one", run)
    alone = runner.reproduce(Plan(table, tmp_path / "alone", seeds=2, rates=()))
    assert started == [(0, None), (1, None)] and "tried" not in alone["ours"][method.name][column.name]
    started.clear()
    plan = Plan(table, tmp_path / "more", seeds=2, rates=("2.0e-3", "4e-3"), earlier=alone)
    grown = runner.reproduce(plan)
    cell = grown["ours"][method.name][column.name]
    if better == "another":
        assert started == [(0, "4e-3"), (1, "4e-3")] and cell["rate"] == "4e-3" and cell["seeds"] == [0, 1]
        said = (
            "Learning rates tried: 4e-3 and 2.0e-3. Chosen on validation: 4e-3. The rate chosen is the largest tried in"
        )
        assert any(line.startswith(said) for line in pages.remarks(grown))
    else:
        assert started == [(0, "4e-3")] and cell["rate"] == "2.0e-3"
        assert {**cell, "rate": None, "tried": 0} == {**alone["ours"][method.name][column.name], "tried": 0}
    assert cell["tried"] == {"2.0e-3": 50.0, "4e-3": 100 * scores["4e-3"]}
    started.clear()
    assert runner.reproduce(replace(plan, out=tmp_path / "again", earlier=grown))["ours"] == grown["ours"]
    third = runner.reproduce(replace(plan, out=tmp_path / "third", rates=("3e-3",), earlier=grown))
    assert started == [(0, "3e-3")] and third["rates"] == ["2.0e-3", "4e-3", "3e-3"]
    assert third["ours"][method.name][column.name] == {**cell, "tried": {**cell["tried"], "3e-3": 12.5}}


@pytest.mark.parametrize(
    "each", [each for each in ALL if each.kind == "measured"], ids=lambda each: each.key
)  # fmt: skip
def test_what_is_counted(each, tmp_path, monkeypatch):
    """With a mechanism whose operations are known, instead of fresh processes."""
    asked = []

    def known(request, spec, n):
        asked.append(spec)
        return {"flops": 10 * n, "bytes": 100 * n, "seconds": 1e-6 * n}

    monkeypatch.setattr(measures, "_measured", known)
    result = runner.reproduce(Plan(each, tmp_path))
    assert {name for name, row in result["ours"].items() if row} == {x.name for x in each.methods if not absent(x)}
    once = len(asked)
    runner.reproduce(Plan(each, tmp_path))
    assert len(asked) == once, "what has been measured is not measured again"


def test_operations_of_sbm_are_counted():
    one = measures.answer("sbm:clusters=8", 256, heads=1, head_dim=4, density=0.02)
    n, d, k, edges = 256, 4, 8, 0.02 * 256**2
    # the second layer of the MLP and the clusters are one matrix: 4nd² and not 8nd²
    formula = 4 * n * d * d + 4 * n * k * d + 2 * k * d * d + 2 * k * k * d + 2 * n * k * k + 4 * edges * d
    assert one["flops"] == pytest.approx(formula, rel=0.1)
    full = measures.answer(measures.WRITTEN_OUT, n, heads=1, head_dim=4)
    assert full["flops"] == 4 * n * n * d


@pytest.mark.parametrize("key", [x.key for x in ALL if x.kind == "drawn" and "sbm-table" not in x.differs])
def test_figures_are_drawn(key, tmp_path):
    result = runner.reproduce(Plan(find(key), tmp_path))
    assert Path(result["picture"]).read_bytes()[:4] == b"\x89PNG"


SPARSE = [each.key for each in sparse.FIGURES]


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("key", SPARSE)
def test_patterns_are_compared_at_equal_sparsity(key, scale):
    """As models of the task connect pairs, over their layers and heads: within 3 points of the level."""
    each = find(key)
    levels = {int(method.name.split()[-3]) for method in each.methods[1:]}
    assert len(levels) == 3 and len(each.methods) == 1 + 3 * 8
    for column in each.columns:
        made = make_task(column.task, *column.scale(scale)[:2])
        made = type(made)(replace(made.recipe, layers=2, heads=2))  # layers and heads take turns with two sets
        for method in each.methods[1:]:
            spec, level = method.spec_at(scale), int(method.name.split()[-3])
            assert 100 * curves.sparsity(spec, made) == pytest.approx(level, abs=3), (method.name, spec)


def test_a_full_size_does_not_report_what_the_small_one_leaves_out(tmp_path):
    each = find("sbm-table-4")
    small, full = (summary(Plan(each, tmp_path, scale=scale), {})["differs"] for scale in ("small", "paper"))
    assert "2 layers of 128" in small
    assert "2 layers" not in full and "scratch" not in full


def test_glue_at_full_size_begins_with_the_encoder_that_its_attention_has_trained(tiny_data, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(comparing, "run_one", lambda *run: started.append((run[0].task, *run[1:])) or in_process(*run))
    each = limited(find("sbm-table-4"), ["Full-attention", "SBM-Transformer"], ["SST-2"])
    assert each.columns[0].paper == Scale("paper", begin=Scale("paper")), "small here, as they agree"
    begin = Scale("paper", (*TINY, *SHAPES["mlm"], f"path={tiny_data / 'words.txt'}"))
    column = replace(each.columns[0], paper=Scale("paper", (*TINY, *SHAPES["glue-sst2"]), begin))
    methods = tuple(replace(method, full=method.spec) for method in each.methods)
    plan = Plan(replace(each, columns=(column,), methods=methods), tmp_path, "paper", seeds=2, data=tiny_data)
    result = runner.reproduce(plan)
    full, sbm = (method.spec for method in methods)
    assert started[:2] == [("mlm", full, 0, None), ("mlm", sbm, 0, None)], "one encoder for all seeds"
    assert started[2:] == [("glue-sst2", spec, seed, None) for seed in (0, 1) for spec in (full, sbm)]
    assert {name: row["SST-2"]["seeds"] for name, row in result["ours"].items()} == {x.name: [0, 1] for x in methods}
    [(_, _, comparison)] = plan.comparisons()
    for spec in (full, sbm):
        begun = log.read_json(comparison.folder(spec, 1) / "run.json")["settings"]["init"]
        assert Path(begun) == comparison.begin.folder(spec, 0) and spec.split(":")[0] in begun
        assert (Path(begun) / "model" / "model.safetensors").exists()


def test_arrows_join_the_groups_of_combiner_axial():
    """Token 10 stands at row 2, column 2 of a picture of 3 × 4: columns above it, or rows without its column."""
    specs = (f"combiner-axial:plan={name},cols=4" for name in ("vertical", "horizontal"))
    vertical, horizontal = (drawings.arrows(drawings.one_head(spec, 12, causal=True), 12, 10) for spec in specs)
    assert sorted(vertical) == [(0, 4), (1, 5), (3, 7)]
    assert sorted(horizontal) == [(0, 1), (1, 3), (4, 5), (5, 7)]


def test_the_legend_of_combiner_axial_names_every_colour_of_its_panels(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(drawings, "save", lambda figure, path: drawn.append(figure))
    drawings.combiner_axial(tmp_path / "2.png", None)
    (figure,) = drawn
    panels, legend = figure.axes[:4], figure.axes[4:]
    colours = lambda axes: {tuple(pixel) for pixel in axes.images[0].get_array().reshape(-1, 3)}  # noqa: E731
    shown, named = set().union(*map(colours, panels)), set().union(*map(colours, legend))
    assert shown - named == {(1.0, 1.0, 1.0)}, "white lines between the cells"
    words = [text.get_text() for text in figure.texts]
    assert {"direct", "through a summary", "the query", "later tokens"} <= set(words)
    assert any(word.startswith("above, rows are queries") and "below" in word for word in words)
    edge = figure.get_figwidth() * figure.dpi
    assert max(text.get_window_extent().x1 for text in figure.texts) < edge, "nothing is cut off"


# ---- the verdict ----------------------------------------------------------------------------------------------------

TABLE = Reproduction(
    "made-up", "nobody, table 1", "made up", columns=(Column("score"),),
    methods=(Method("new", "full"), Method("old", "full")), numbers={"new": (2.0,), "old": (1.0,)},
    claims=(Claim("new", "old"),), differs="everything",
)  # fmt: skip


def made_up(new: list[float], old: list[float], **about) -> dict:
    cell = lambda scores: {  # noqa: E731
        "mean": float(np.mean(scores)), "sd": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "scores": scores, **about,
    }  # fmt: skip
    return {"new": {"score": cell(new)}, "old": {"score": cell(old)}}


@pytest.mark.parametrize(
    ("new", "old", "larger", "word"),
    [
        ([5, 5.2, 5.1], [4, 4.1, 4.2], True, "agrees"),
        ([5, 5.2, 5.1], [4, 4.1, 4.2], False, "contradicts"),
        ([4, 4.1, 4.2], [5, 5.2, 5.1], True, "contradicts"),
        ([4, 4.1, 4.2], [5, 5.2, 5.1], False, "agrees"),
        ([4, 6, 5], [5.9, 3.9, 4.7], True, "open"),  # the difference is within the spread
        ([4, 6, 5], [3.9, 5.9, 4.7], True, "agrees"),  # runs of one seed share their data: better with every seed
        ([4, 6, 5], [4.1, 6.1, 5.2], True, "contradicts"),
        ([5], [4], True, "agrees"),
        ([4], [4], True, "open"),
        ([float("nan")], [4], True, "missing"),
    ],
)
def test_the_verdict_goes_both_ways(new, old, larger, word):
    table = replace(TABLE, larger_is_better=larger)
    found = verdict.judge(table, made_up(new, old))
    assert [each.status for each in found] == [word] == [verdict.verdict(found)[0]]
    assert ("a single seed" in verdict.verdict(found)[1]) == (len(new) == 1 and word not in ("open", "missing"))
    pair = verdict.pairs(replace(table, numbers={"new": (1.0 + larger,), "old": (2.0 - larger,)}), made_up(new, old))
    assert dict(pair) == ({} if word == "missing" else {word: 1})


def test_the_verdict_says_how_many_claims_rest_on_one_seed():
    single, several = (
        verdict.judge(TABLE, made_up(*scores)) for scores in (([5], [4]), ([5, 5.2, 5.1], [4, 4.1, 4.2]))
    )
    assert verdict.verdict([*single, *single])[1].endswith(
        "All of this rests on a single seed: no spread is known, and a difference may be luck."
    )
    assert "Of those that were judged, 1 rests on a single seed: no" in verdict.verdict([*single, *several])[1]


def test_the_verdict_counts_in_english():
    agrees, contradicts, undecided = (
        verdict.judge(TABLE, made_up(*scores))[0]
        for scores in (([5, 5.1], [4, 4.2]), ([4, 4.2], [5, 5.1]), ([4, 6, 5], [5.9, 3.9, 4.7]))
    )
    said = lambda *found: verdict.verdict(list(found))[1]  # noqa: E731
    assert said(agrees) == "Agrees with the paper: 1 of 1 claim holds, none fails."
    assert said(agrees, agrees) == "Agrees with the paper: 2 of 2 claims hold, none fails."
    assert said(agrees, contradicts) == "Contradicts the paper in 1 of 2 claims; 1 holds."
    assert said(undecided) == "Open: the only claim is not decided."
    assert said(undecided, undecided) == "Open: neither of the 2 claims is decided."
    assert said(undecided, undecided, undecided) == "Open: none of the 3 claims is decided."
    assert said(agrees, undecided) == "Agrees with the paper: 1 of 2 claims holds, none fails. 1 is undecided."


@pytest.mark.parametrize(
    ("new", "status"), [(100, "open"), (104, "open"), (97, "open"), (106, "contradicts"), (94, "agrees")]
)
def test_what_is_measured_differs_beyond_its_noise(new, status):
    table = replace(TABLE, larger_is_better=False, columns=(replace(TABLE.columns[0], noise=0.05),))
    (found,) = verdict.judge(table, {"new": {"score": measures.counted(new)}, "old": {"score": measures.counted(100)}})
    assert found.status == status and ("the noise of the measurement" in found.detail) == (status == "open")


def test_a_number_that_is_not_reached_is_told():
    table = replace(TABLE, claims=(Claim("new", 99), Claim(99, "old")))
    found = verdict.judge(table, made_up([95.25, 95.25], [99.5, 99.5]))
    assert [(each.status, each.detail) for each in found] == [
        ("contradicts", "no, it is 95.25"), ("contradicts", "no, it is 99.5"),
    ]  # fmt: skip


def test_what_is_on_the_plateau_or_missing_decides_nothing():
    stuck = verdict.judge(TABLE, made_up([5, 5], [4, 4], left_plateau=[100, None]))
    assert stuck[0].status == "open" and "plateau" in stuck[0].detail and not verdict.pairs(TABLE, {})
    low = verdict.judge(
        replace(TABLE, claims=(Claim(9, "new"), Claim("new", 4))), made_up([5], [4], left_plateau=[None])
    )
    assert [(each.status, each.detail) for each in low] == [
        ("agrees", "as the paper says (one seed, on the plateau)"),
        ("open", "new has not left the plateau"),
    ]
    assert verdict.verdict(verdict.judge(TABLE, {}))[0] == "missing"
    both = replace(TABLE, claims=(Claim("new", 4.5), Claim(4.5, "new")))
    assert [each.status for each in verdict.judge(both, made_up([5], [4]))] == ["agrees", "contradicts"]
    assert "Contradicts the paper in 1 of 2 claims" in verdict.verdict(verdict.judge(both, made_up([5], [4])))[1]
    assert verdict.order({"a": 1.0, "b": None, "c": 3.0}, larger=True) == ["c", "a"]


def test_claims_in_words():
    words = lambda claim, larger: pages.stated({"better": claim.better, "worse": claim.worse}, larger=larger)  # noqa: E731
    assert words(Claim("new", "old"), True) == "new better than old"
    assert words(Claim("new", 99), True) == "new above 99" and words(Claim(99, "new"), True) == "new below 99"
    assert words(Claim("new", 1.1), False) == "new below 1.1" and words(Claim(1.1, "new"), False) == "new above 1.1"


# ---- averages, and the rates of the full size ------------------------------------------------------------------------

ARENA = Reproduction(
    "an-arena", "nobody, table 2", "made up", columns=(Column("a"), Column("b"), Column("mean", mean_of=("a", "b"))),
    methods=(Method("new", "full"), Method("old", "full")),
    claims=(Claim("new", "old", ("mean",)), Claim("new", "old")), differs="everything",
)  # fmt: skip


def seeds(*scores: float, first: int = 0) -> dict:
    numbers = range(first, first + len(scores))
    return {"mean": float(np.mean(scores)), "sd": None, "scores": list(scores), "seeds": list(numbers),
            "left_plateau": []}  # fmt: skip


def averaged(**row: dict) -> dict | None:
    cells = {"new": dict(row)}
    add_averages(ARENA, cells)
    return cells["new"].get("mean")


def test_an_average_is_the_mean_of_its_cells():
    found = averaged(a=seeds(1.0, 2.0, 6.0), b=seeds(13.0, 12.0))
    assert found["mean"] == pytest.approx((3 + 12.5) / 2)
    assert found["seeds"] == [0, 1] and found["scores"] == [7.0, 7.0] and found["sd"] == 0, "seed by seed"
    assert averaged(a=seeds(1.0, 2.0), b=seeds(4.0, 9.0, first=1))["sd"] is None, "one seed in common"
    assert averaged(a=seeds(1.0, 2.0)) is None, "a cell is missing"
    assert averaged(a=seeds(1.0), b=seeds(4.0, first=1)) is None, "no seed in common"
    stuck = {**seeds(1.0), "left_plateau": [None]}
    assert averaged(a=stuck, b=seeds(4.0))["left_plateau"] == [None]


def test_claims_about_an_average():
    """Those of all columns are not about it."""
    cells = {"new": {"a": seeds(1.0, 1.5), "b": seeds(9.0, 9.5)}, "old": {"a": seeds(2.0, 2.6), "b": seeds(7.0, 7.5)}}
    add_averages(ARENA, cells)
    found = [(each.column, each.status) for each in verdict.judge(ARENA, cells)]
    assert found == [("mean", "agrees"), ("a", "contradicts"), ("b", "agrees")]
    del cells["old"]["b"], cells["old"]["mean"]
    add_averages(ARENA, cells)
    assert verdict.judge(ARENA, cells)[0].status == "missing" and "mean" not in cells["old"]


@pytest.mark.parametrize("each", [each for each in ALL if AVERAGE in each.columns], ids=lambda each: each.key)
def test_the_paper_averages_as_we_do(each):
    cells = {name: {x.name: measures.counted(y) for x, y in zip(each.columns, row, strict=True)}
             for name, row in each.numbers.items()}  # fmt: skip
    for name, row in cells.items():
        ours = np.mean([row[column]["mean"] for column in AVERAGE.mean_of])
        assert each.number(name, "Average") == pytest.approx(ours, abs=0.0101), name  # the papers round


def test_an_average_goes_with_its_columns():
    whole, five = find("sbm-table-2"), AVERAGE.mean_of
    names = lambda *columns: [each.name for each in limited(whole, (), columns).columns]  # noqa: E731
    assert names("Average") == names(*five) == [*five, "Average"] and names("Text") == ["Text"]
    assert limited(whole, (), ("Average",)).number("λ = 0", "Average") == 59.93
    assert limited(whole, (), ("Average",)).spread("λ = 1e-2", "Average") == 0.42


def test_an_earlier_result_without_averages_gains_them(tmp_path):
    """It has four of the columns; the fifth is run now, alone."""
    result = json.loads((DOCS / pages.RESULTS / "sbm-table-1.json").read_text())
    row = {name: cell for name, cell in result["ours"]["SBM-Transformer"].items() if name != "Average"}
    assert list(row) == ["ListOps", "Text", "Retrieval", "Image", "Pathfinder"]
    earlier = {**result, "ours": {"SBM-Transformer": row}}
    part = limited(find("sbm-table-1"), ("SBM-Transformer",), ("Pathfinder",))
    plan = Plan(part, tmp_path, rates=tuple(result["rates"]), earlier=earlier)
    assert [each.name for each in plan.table.columns] == [*row, "Average"]
    grown = runner.so_far(plan)
    cell = grown["ours"]["SBM-Transformer"]["Average"]
    assert cell["mean"] == pytest.approx(np.mean([each["mean"] for each in row.values()])) and cell["seeds"] == [0]
    assert "Average" in grown["columns"] and len(grown["paper"]["SBM-Transformer"]) == len(grown["columns"])
    assert pages.cell(grown, "SBM-Transformer", "Average").endswith(" (59.93)")
    assert "(Average)" not in pages.rates_in_words(grown), "nothing was tried for it"
    again = runner.so_far(replace(plan, earlier=grown))
    assert again["ours"] == grown["ours"] and [each for each in again["claims"] if each["column"] == "Average"]
    del earlier["ours"]["SBM-Transformer"]["Text"]
    assert "Average" not in runner.so_far(replace(plan, earlier=earlier))["ours"]["SBM-Transformer"]


def test_the_full_size_tries_the_bracket_of_the_paper(tmp_path):
    """[l/2, l, 2l] of the recipe of each column."""
    whole = find("composite-slice-table-1")
    for key in ("composite-slice-table-1", "composite-slice-table-7", "composite-slice-table-8"):
        plan = Plan(find(key), tmp_path, "paper")
        found = {column.name: comparison.rates for column, _, comparison in plan.comparisons()}
        assert found["Image"] == ("2.5e-4", "5e-4", "1e-3") and found["Retrieval"] == ("5e-5", "1e-4", "2e-4")
        assert set(plan.brackets) == {rate for rates in found.values() for rate in rates}
        for name, rates in found.items():
            column = next(each for each in whole.columns if each.name == name)
            assert float(rates[1]) == make_task(column.task, "cst").recipe.rate
    assert Plan(whole, tmp_path).brackets == whole.rates
    for asked in ((), ("3e-3",)):
        plan = Plan(whole, tmp_path, "paper", rates=asked)
        assert plan.brackets == asked and {comparison.rates for _, _, comparison in plan.comparisons()} == {asked}
    assert Plan(find("sbm-table-1"), tmp_path, "paper").brackets == ()
    assert summary(Plan(whole, tmp_path, "paper"), {})["rates"] == list(Plan(whole, tmp_path, "paper").brackets)
    with pytest.raises(ValueError, match=r"with the learning rates 1e-3, not with that of the recipe"):
        runner.reproduce(Plan(whole, tmp_path, "paper", rates=(), earlier={"key": whole.key, "rates": ["1e-3"]}))


def test_rates_are_written_as_one_would():
    assert multiples(3e-5, (0.5, 1, 2)) == ("1.5e-5", "3e-5", "6e-5") and multiples(1 / 3, (1,)) == ("3.33333e-1",)


# ---- the command and the pages ---------------------------------------------------------------------------------------


def test_what_is_not_trained_takes_options_that_exist():
    names = set(inspect.signature(command.reproduce).parameters)
    assert {name for options, _ in command.TAKES.values() for name in options} < names
    assert {each.kind for each in ALL} - set(command.TAKES) == {"trained", "same", "stated"}
    drawn = {each.key for each in ALL if each.function.startswith("subquad.reproductions.sbm_trained:")}
    assert drawn == {"sbm-figure-5", "sbm-figure-7", "sbm-figure-8"}


def test_the_command_lists_everything():
    result = CliRunner().invoke(app, ["reproduce"])
    assert result.exit_code == 0 and all(key in result.stdout for key in REPRODUCTIONS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("combiner-tabel-1", "unknown table or figure 'combiner-tabel-1'; did you mean combiner-table-1"),
        (
            "combiner-table-4",
            "combiner-table-4 cannot be scaled down: it is about the absolute score of a model of 128",
        ),
        ("combiner-table-4", "(30 on ImageNet-64) after 1.2 million steps; --recipe paper runs it at full size\n"),
        ("sbm-table-7", "has nothing to run (hyperparameters): they are the recipes"),
        ("sbm-figure-4 --recipe tiny", "--recipe must be one of small, paper, not 'tiny'"),
        ("sbm-figure-4 --method Mamba", "sbm-figure-4 has no method 'Mamba'; it has Full-attention"),
        ("sbm-figure-4 --column speed", "sbm-figure-4 has no column 'speed'; it has accuracy"),
        ("sbm-figure-4 --rates fast", "--rates must be comma-separated positive numbers, such as 3e-3,1e-3, not 'f"),
        ("sbm-figure-5", "has no finished run of SBM-Transformer: run `subquad reproduce sbm-table-1"),
        ("combiner-table-1 --column CIFAR-10 --data nowhere", "--data: the folder nowhere does not exist"),
        ("--seeds 3", "NAME is missing: the table or figure that --seeds is for"),
        ("--jobs 2", "NAME is missing: the table or figure that --jobs is for"),
        ("--recipe paper", "NAME is missing: the table or figure that --recipe is for"),
        ("--out runs", "NAME is missing: the table or figure that --out is for"),
        ("--rates 1e-3 --data x", "NAME is missing: the table or figure that --rates and --data are for"),
        ("sbm-table-1 --pages empty", "--pages runs nothing: leave out sbm-table-1"),
        ("--pages empty --seeds 3 --out x", "--pages runs nothing: leave out --seeds and --out"),
        ("sbm-table-7 --seeds 3", "has nothing to run (hyperparameters): they are the recipes"),
        ("sbm-table-5 --seeds 3", "sbm-table-5 is counted and measured, not trained: leave out --seeds"),
        ("sbm-table-5 --recipe paper --rates 1e-3", "and measured, not trained: leave out --recipe and --rates"),
        ("sbm-table-5 --data . --jobs 2", "is counted and measured, not trained: leave out --jobs and --data"),
        ("sbm-figure-6 --recipe paper", "sbm-figure-6 is drawn, and nothing is trained for it: leave out --recipe"),
        ("sbm-figure-6 --method x --results y", "is drawn, and nothing is trained for it: leave out --method and --re"),
        ("sbm-figure-5 --rates 1e-3 --jobs 2", "drawn from runs that are finished: leave out --rates and --jobs"),
        ("sbm-figure-7 --seeds 3", "sbm-figure-7 is drawn from runs that are finished: leave out --seeds"),
        ("sbm-figure-7 --recipe paper --data empty --out x", "x has no finished run of SBM-Transformer on Pathfinder"),
        ("sbm-table-5 --method Mamba", "sbm-table-5 has no method 'Mamba'; it has Algorithm 1"),
        ("--pages nowhere", "--pages: the folder nowhere does not exist"),
        ("--pages empty", "--pages: the folder empty has no experiments.md"),
        ("--pages other", "other/experiments.md has no part between"),
        ("sbm-figure-4 --results a-file", "--results must be a folder, and a-file is a file"),
        ("sbm-figure-4 --results other", "other/sbm-figure-4.json is not a result of `subquad reproduce sbm-figure"),
        ("sparse-table-1 --results other", "other/sparse-table-1.json is not a result of `subquad reproduce sparse-ta"),
        ("sbm-table-5 --results other", "other/sbm-table-5.json is not a result of `subquad reproduce sbm-table-5`: "),
        ("sbm-table-6 --results other", "other/sbm-table-6.json is not a result of `subquad reproduce sbm-table-6`: "),
    ],
)
def test_bad_input_is_one_clear_line(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "run_one", lambda *run: pytest.fail("nothing may be trained"))
    monkeypatch.setattr(measures, "_measured", lambda *given: pytest.fail("nothing may be measured"))
    for folder in ("empty", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a-file").touch()
    (tmp_path / "other" / "experiments.md").touch()
    other = {"key": "sbm-table-5", "scale": "small", "rates": [], "ours": {}, "methods": {}}
    alien = {"sbm-figure-4": {"a": 1}, "sparse-table-1": {}, "sbm-table-5": {**other, "ours": 1}, "sbm-table-6": other}
    for key, content in alien.items():
        (tmp_path / "other" / f"{key}.json").write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["reproduce", *line.split()])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and message in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sbm-table-8", "sbm-table-8 is part of sbm-table-1, which is run\n"),
        ("sbm-table-9", "sbm-table-9 is part of sbm-table-2, which is run\n"),
        ("sbm-table-1", ""),
    ],
)
def test_a_table_that_another_one_contains_says_what_is_run(name, said, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(command, "_check_data", lambda *given: None)
    monkeypatch.setattr(command, "_run", lambda plan, results: ran.append(plan.reproduction.key))
    result = CliRunner().invoke(app, ["reproduce", name, "--out", str(tmp_path)])
    assert result.exit_code == 0 and result.stderr == said and ran == [find(name).key]


def test_a_table_that_is_stopped_before_its_first_run_has_finished(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "run_one", lambda *run: 130)
    table = miniature(find("sparse-table-1"), tiny_data)
    monkeypatch.setitem(REPRODUCTIONS, table.key, table)
    result = CliRunner().invoke(app, ["reproduce", table.key, "--out", str(tmp_path), "--rates", "1e-3"])
    assert result.exit_code == 130 and "stopped; run the same command again to resume" in result.stderr
    assert not list(tmp_path.glob("results/*")), "no numbers, no result"
    empty = summary(Plan(table, tmp_path, rates=("1e-3",)), {})
    runner.write_result(tmp_path / "results", empty)
    assert pages.read_results(tmp_path / "results") == {}, "the pages say that it has not been run"


def test_a_part_of_a_table_says_so(tmp_path):
    whole = find("combiner-figure-3")
    part = limited(whole, ("Transformer",), ("time, 1024", "memory, 1024"))
    result = summary(Plan(part, tmp_path), {})
    assert result["notes"][0].startswith("7 of 8 methods were left out: Performer; BigBird")
    assert result["notes"][1].startswith("8 of 10 columns were left out: time, 2048")
    assert pages.standing(whole, {whole.key: result}).startswith("In part: ")
    assert summary(Plan(whole, tmp_path), {})["notes"] == []


def test_committed_results_can_be_continued():
    """Their settings are those of today's recipes."""
    for result in pages.read_results(DOCS / pages.RESULTS).values():
        if REPRODUCTIONS[result["key"]].kind == "trained":
            plan = Plan(
                find(result["key"]), Path("nowhere"), result["scale"], rates=tuple(result["rates"]), earlier=result
            )
            seeds = [known.seeds for _, _, comparison in plan.comparisons() for known in comparison.known.values()]
            assert seeds and all(seeds)


def test_the_pages_are_those_of_the_results(tmp_path):
    for path in (DOCS / pages.PAGE, *(DOCS / pages.RESULTS).glob("*.json")):
        where = tmp_path / path.relative_to(DOCS)
        where.parent.mkdir(exist_ok=True)
        where.write_bytes(path.read_bytes())
    pages.write_pages(tmp_path)
    made = (tmp_path / pages.PAGE).read_text()
    assert made == (DOCS / pages.PAGE).read_text(), "run subquad reproduce --pages docs"
    assert all(f"`subquad reproduce {each.key}`" in made for each in ALL if each.kind not in ("same", "stated"))


def told(result: dict, capsys) -> str:
    """What the terminal shows; each of the page's words about the runs is there too."""
    command.show(result)
    shown = capsys.readouterr().out
    assert all(line in shown for line in pages.about_runs(result)) and all(pages.about_runs(result))
    return shown


def rated(rate: str, *left: int | None, tried: str = "1e-3 2e-3 4e-3") -> dict:
    scores = [float(seed) for seed in range(len(left) or 1)]
    return {**seeds(*scores), "left_plateau": list(left), "rate": rate, "tried": dict.fromkeys(tried.split(), 0.5)}


def test_rates_and_the_plateau_are_shown_as_on_the_page(tmp_path, capsys):
    cells = {"new": {"a": rated("4e-3", 250, 250), "b": rated("2e-3", 500, None, 250)},
             "old": {"a": rated("1e-3", 250, 250), "b": rated("2e-3", None)}}  # fmt: skip
    add_averages(ARENA, cells)
    shown = told(summary(Plan(ARENA, tmp_path, rates=("1e-3",)), cells), capsys)
    assert (
        "Learning rates tried: 4e-3, 2e-3 and 1e-3. Chosen on validation: 2e-3, except 4e-3 for new (a) · 1e-3 for"
        in shown
    )
    edges = "the largest tried in 1 and the smallest tried in 1 of 4 cases: a better one may lie outside."
    assert f"The rate chosen is {edges}" in shown
    assert "Runs had left the plateau by step: a 250 · b 250 to 500 or never (never for old)." in shown


def test_a_choice_between_other_rates_is_not_at_the_edge(tmp_path, capsys):
    cells = {"new": {"score": rated("2e-3", 100)}, "old": {"score": rated("2e-3", 200)}}
    shown = told(summary(Plan(TABLE, tmp_path, rates=("2e-3",)), cells), capsys)
    assert "Chosen on validation: 2e-3.\n" in shown and "outside" not in shown
    assert "Runs had left the plateau by step: 100 (200 for old)." in shown
    for name, rate in (("largest", "4e-3"), ("smallest", "1.0e-3")):
        cells["new"]["score"] = rated(rate, tried="1.0e-3 2e-3 4e-3")
        shown = told(summary(Plan(TABLE, tmp_path, rates=("2e-3",)), cells), capsys)
        assert f"The rate chosen is the {name} tried in 1 of 2 cases: a better one may lie outside.\n" in shown
    cells = {"new": {"score": rated("2e-3", tried="2e-3")}}
    shown = told(summary(Plan(TABLE, tmp_path, rates=("2e-3",)), cells), capsys)
    assert "Learning rates tried: 2e-3." in shown and "outside" not in shown, "there was no choice"
    assert "plateau" not in shown, "of a task whose plateau nobody knows nothing is said"


def test_what_is_measured_has_neither_rates_nor_a_plateau(tmp_path, capsys):
    cells = {"Algorithm 1": {"base": measures.counted(1.2)}}
    shown = told(summary(Plan(find("sbm-table-5"), tmp_path), cells), capsys)
    assert "rate" not in shown and "plateau" not in shown


def run_again(result: dict) -> dict[tuple[str, str], tuple[set[str], int]]:
    """What the commands of a page train: rates and seeds by method and column."""
    found = {}
    for line in pages.commands(result):
        words = shlex.split(line)
        assert words[:3] == ["subquad", "reproduce", result["key"]] and len(words) % 2
        options = list(zip(words[3::2], words[4::2], strict=True))
        those = lambda flag: [value for name, value in options if name == flag]  # noqa: B023, E731
        whole = find(result["key"])
        part = limited(whole, those("--method"), those("--column"))
        rates = those("--rates")[0].split(",") if "--rates" in words else whole.rates
        for method in part.methods:
            for column in part.run_columns:
                assert (method.name, column.name) not in found, "once"
                found[method.name, column.name] = {float(rate) for rate in rates}, int([*those("--seeds"), "1"][0])
    return found


@pytest.mark.parametrize("key", sorted(path.stem for path in (DOCS / pages.RESULTS).glob("*-*-*.json")))
def test_the_commands_of_a_page_train_what_its_table_shows(key):
    result = pages.read_results(DOCS / pages.RESULTS)[key]
    cells = {(name, column): cell for name, row in result["ours"].items() for column, cell in row.items()
             if "mean_of" not in cell}  # fmt: skip
    found = run_again(result)
    assert set(found) == set(cells)
    for place, (rates, seeds) in found.items():
        assert seeds >= len(cells[place]["scores"])
        assert "counted" in cells[place] or rates == {float(x) for x in cells[place].get("tried") or result["rates"]}


def test_commands_are_as_short_as_they_can_be(tmp_path):
    whole, paper = find("sparse-table-1"), find("composite-slice-table-1")
    rates = dict(zip(("rate", "tried"), (whole.rates[0], dict.fromkeys(whole.rates, 1.0)), strict=True))
    full = {each.name: {column.name: {**seeds(1.0, 2.0), **rates} for column in whole.columns}
            for each in whole.methods}  # fmt: skip
    line = "subquad reproduce sparse-table-1"
    made = lambda cells, **about: pages.commands(summary(Plan(whole, tmp_path, **about), cells))  # noqa: E731
    assert made(full) == [f"{line} --seeds 2"]
    assert made({"STAR": full["STAR"]}) == [f"{line} --method STAR --seeds 2"]
    one = {name: {"1 layer": row["1 layer"]} for name, row in full.items()}
    assert made(one) == [f"{line} --column '1 layer' --seeds 2"]
    alone = {name: {column: seeds(1.0) for column in row} for name, row in full.items()}
    assert made(alone, rates=()) == [f"{line} --rates none"]
    more = {**full["STAR"], "2 layers": {**seeds(1.0), "rate": "1e-3", "tried": {"1e-3": 1.0, "5e-3": 0.5}}}
    assert made({"STAR": more}) == [
        f"{line} --method STAR --column '1 layer' --column '3 layers' --column '4 layers' --seeds 2",
        f"{line} --method STAR --column '2 layers' --rates 5e-3,1e-3",
    ]
    bracket = {"rate": "5e-4", "tried": dict.fromkeys(("1e-3", "5e-4", "2.5e-4"))}
    cells = {"Transformer": {"Image": {**seeds(1.0), **bracket}}}
    found = pages.commands(summary(Plan(paper, tmp_path, "paper"), cells))
    assert found == ["subquad reproduce composite-slice-table-1 --method Transformer --column Image --recipe paper"]


# ---- pictures of curves ----------------------------------------------------------------------------------------------


def made_up_figure(key: str, scores: dict[str, list[float]], tmp_path: Path, scale: str = "small") -> dict:
    """A result whose cells have these scores, the same ones in all columns."""
    names = [column.name for column in find(key).columns]
    cells = {name: dict.fromkeys(names, made_up(found, [0.0])["new"]["score"]) for name, found in scores.items()}
    return summary(Plan(find(key), tmp_path, scale, rates=()), cells)


def test_scores_are_drawn_over_the_sparsity(tmp_path):
    """Each pattern is a curve at the sparsity of its specs, the dense score a line, the spread of seeds a bar."""
    key = "sparse-figure-4"
    methods = {method.name: method.spec for method in find(key).methods}
    union = [name for name in methods if name.startswith("STRIDED UNION, ")]
    random = [name for name in methods if name.startswith("RANDOM, ")]
    scores = {"dense": [80.0, 82.0], **{name: [70.0 + k, 72.0 + k] for k, name in enumerate(union)}, random[1]: [60.0]}
    result = made_up_figure(key, scores, tmp_path)
    figure = curves.score_over_sparsity(result)
    assert [axis.get_title() for axis in figure.axes] == ["CoLA", "MRPC"]
    for axis in figure.axes:
        drawn = {container.get_label(): container for container in axis.containers}
        assert set(drawn) == {"STRIDED UNION", "RANDOM"}
        line, _, (bars,) = drawn["STRIDED UNION"]
        away = [100 * (1 - subquad.attention(methods[name], num_heads=1, head_dim=4, causal=False)
                       .support(128).double().mean().item()) for name in union]  # fmt: skip
        assert np.allclose(line.get_xydata(), [(x, 71.0 + k) for k, x in enumerate(away)])
        ends = [segment[:, 1] for segment in bars.get_segments()]
        assert np.allclose(ends, [(71 + k - 2**0.5, 71 + k + 2**0.5) for k in range(3)])
        point, _, none = drawn["RANDOM"]
        assert not none and np.allclose(point.get_xydata(), [(75, 60)], atol=0.5)
        dense = next(line for line in axis.lines if line.get_label() == "dense")
        assert set(dense.get_ydata()) == {81.0}
        assert axis.get_ylabel() == "accuracy, %"


def test_the_sparsity_of_an_encoder_decoder_is_that_of_both_sides():
    made = make_task("translation", "small")
    n = made.recipe.length
    found = [subquad.attention("star:w=6", num_heads=1, head_dim=4, causal=causal).connections(n)
             for causal in (False, True)]  # fmt: skip
    shares = found[0] / n**2, found[1] / (n * (n + 1) / 2)
    assert curves.sparsity("star:w=6", made) == pytest.approx(1 - sum(shares) / 2)
    assert abs(shares[0] - shares[1]) > 0.01, "one side alone would be another number"


def test_costs_and_steps_are_drawn():
    results = pages.read_results(DOCS / pages.RESULTS)
    time, memory = curves.cost_over_length(results["combiner-figure-3"]).axes
    row = results["combiner-figure-3"]["ours"]["Performer"]
    for axis, kind in ((time, "time"), (memory, "memory")):
        line = next(line for line in axis.lines if line.get_label() == "Performer")
        assert np.allclose(line.get_xydata(), [(n, row[f"{kind}, {n}"]["mean"]) for n in (2**k for k in range(10, 15))])
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1k", "2k", "4k", "8k", "16k"]
        assert not len(axis.get_xticks(minor=True))
        for look in ("get_marker", "get_markersize"):
            assert len({getattr(line, look)() for line in axis.lines}) == len(axis.lines) == 8
    dashes = {str(curves.layered(i, 8)["linestyle"]) for i in range(8)}
    assert len(dashes) == 8, "lines on one another have their gaps at other places"
    (axis,) = curves.score_over_steps(results["sbm-figure-4"]).axes
    curve = results["sbm-figure-4"]["ours"]["Reformer"]["accuracy"]["curve"]
    assert np.allclose(next(line for line in axis.lines if line.get_label() == "Reformer").get_xydata(), curve)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_pages_show_the_pictures_of_curves(scale, tmp_path):
    """Each scale has a picture of its own."""
    result = made_up_figure("sparse-figure-1a", {"dense": [20.0], "STAR, 82 % sparse": [21.0]}, tmp_path, scale)
    (tmp_path / pages.PAGE).write_text(f"{pages.BEGIN}\n{pages.END}\n")
    runner.write_result(tmp_path / pages.RESULTS, result)
    page, drawn = pages.write_pages(tmp_path)
    assert drawn == tmp_path / "images" / f"sparse-figure-1a{'-paper' * (scale == 'paper')}.png"
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert f"![language modelling over the level of sparsity](images/{drawn.name})" in page.read_text()
