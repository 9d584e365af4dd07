"""The adviser: curves through measured points, the ranking, what it knows of reach and quality, and its commands."""

import json
import math
import time
import weakref

import numpy as np
import pytest
from typer.testing import CliRunner

from subquad.advice import measuring, points, quality, ranking, reach
from subquad.advice.costs import Costs, Projected, Size, crossover, memory_curve, share
from subquad.advice.curves import Curve, Scaled, along, fitted
from subquad.advice.measuring import fresh_seconds
from subquad.advice.peaks import Peaks, kept, measure_memory, memory_tasks
from subquad.advice.points import ALONE, BASE, Points, Shape, Subject
from subquad.advice.ranking import Advice, Wish
from subquad.attention.registry import available
from subquad.cli import app
from subquad.core.memory import parse_bytes, show_bytes
from subquad.studies import advice as study

HERE = {"machine": {"processor": "none", "machine": "none", "threads": 1}, "versions": {"torch": "0"}}
WORK = {"full": 2.0, "linear": 1.0, "strided": 1.5}


def made_up(specs=WORK) -> Points:
    """A machine on which everything costs what the formula says: projections n·E², attention heads·width·n^e."""
    result = Points(HERE)
    for shape in points.shapes(ALONE):
        for quantity, times in (("forward", 1), ("train", 3)):
            result.add(ALONE, quantity, shape, times * 1e-11 * shape.batch * shape.n * shape.width**2)
    for spec, exponent in specs.items():
        for causal in (True, False):
            subject = Subject(spec, causal)
            for shape in points.shapes(subject):
                for quantity, times in (("forward", 1), ("train", 3)):
                    own = 1e-9 * shape.width * shape.n**exponent
                    row = times * (1e-11 * shape.n * shape.width**2 + own)
                    result.add(subject, quantity, shape, shape.batch * row)
                tensor = 4.0 * shape.batch * shape.n * shape.width
                result.add(subject, "forward bytes", shape, 5 * tensor)
                grads = Size(shape.n, shape.width, shape.heads).weights
                result.add(subject, "train bytes", shape, 20 * tensor + grads)
                result.add(subject, "kept bytes", shape, 7 * tensor)
            for n in points.DECODED:
                result.add(subject, "decode", Shape(n, *BASE), 1e-5)
                result.add(subject, "state bytes", Shape(n, *BASE), 8.0 * n * 256)
    return result


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_grows_as_declared():
    law = lambda n: 0.001 + 2e-6 * n + 3e-9 * n**2  # noqa: E731
    measured = {Shape(n, *BASE): law(n) * (1.3 if n == 512 else 1) for n in (64, 512, 2048, 8192)}
    curve = Curve(measured, [lambda n: n, lambda n: n**2])
    for shape, value in measured.items():
        assert curve.at(shape.n) == pytest.approx(value)
    assert curve.at(65536) == pytest.approx(law(65536), rel=0.1)
    assert (curve.coefficients >= 0).all()


def test_what_the_terms_miss_follows_the_size_of_the_tensors():
    """Fresh memory beyond 4,096 tokens at the base width costs double; twice as wide, beyond 2,048."""
    measured = {Shape(n, *BASE): 1e-6 * n * (2 if n > 4096 else 1) for n in (64, 512, 2048, 8192)}
    curve = Curve(measured, [lambda n: n])
    assert curve.at(4096, 8192) / curve.at(4096) == pytest.approx(math.sqrt(2), rel=0.01)


def test_fresh_memory_of_the_projections_does_not_grow_with_the_square_of_the_width():
    """1 µs of products per token, as the square of the width, and 2 µs per token of the base width beyond 8,192."""
    law = lambda n, width: 1e-6 * n * (width / 256) ** 2 + 2e-6 * max(0, n * width / 256 - 8192)  # noqa: E731
    sizes = [*((n, *BASE) for n in (64, 512, 2048, 8192, 32768)), (2048, 4, 32), (2048, 8, 64), (2048, 16, 64)]
    projected = Projected({Shape(n, heads, dim): law(n, heads * dim) for n, heads, dim in sizes})
    for n, width in ((1000, 512), (32768, 256), (16384, 512), (2048, 1024), (8192, 1024)):
        assert projected(n, width) == pytest.approx(law(n, width), rel=1e-6), (n, width)


def test_a_layer_is_timed_in_a_process_that_does_nothing_else():
    subject, shape = Subject("linear", True), Shape(64, 2, 16)
    begun = time.perf_counter()
    seconds = fresh_seconds(subject, shape, backward=True, least_seconds=0.0)
    assert 0 < seconds < time.perf_counter() - begun, "the start of the process is not counted"


def test_factors_are_those_measured_and_bounded_against_noise():
    base = {Shape(n, *BASE): 1e-6 * n for n in (64, 512, 2048, 8192)}
    other = {Shape(2048, 8, 64): 4e-3, Shape(2048, 4, 32): 2e-9, Shape(2048, 4, 128): 3 * 2048e-6}
    scaled = Scaled(Curve(base, [lambda n: n]), {**base, **other}, tensors=False)
    assert scaled(2048, 8, 64) == pytest.approx(4e-3, rel=1e-3)
    assert scaled(2048, 4, 128) == pytest.approx(3 * 2048e-6)
    assert scaled(2048, 4, 32) == pytest.approx(2048e-6 / 4), "less than the square of the width is noise"
    assert scaled(2048, 4, 64, 3) == pytest.approx(3 * 2048e-6)


def test_a_row_in_a_batch_may_cost_more_than_a_row_alone():
    """One row is often taken as it is where several are copied first: that is so from two rows on."""
    base = {Shape(n, *BASE): 1e-6 * n for n in (64, 512, 2048, 8192)}
    batched = {Shape(512, *BASE, 4): 1.5 * 4 * 512e-6}
    scaled = Scaled(Curve(base, [lambda n: n]), {**base, **batched}, tensors=False)
    assert scaled(2048, 4, 64, 1) == pytest.approx(2048e-6), "a single row"
    assert scaled(2048, 4, 64, 2) == pytest.approx(1.5 * 2 * 2048e-6)
    assert scaled(2048, 4, 64, 16) == pytest.approx(1.5 * 16 * 2048e-6)
    costs = Costs(made_up())
    once, many = (costs.seconds(Subject("linear", True), Size(3000, 256, 4, batch), "train") for batch in (1, 4))
    assert many == pytest.approx(4 * once, rel=0.05), "and where it does not, it is proportional"


def test_memory_is_linear_unless_the_points_say_otherwise():
    work = [lambda n: n, lambda n: n**1.5]
    nearly = {Shape(n, *BASE): value for n, value in ((512, 6.6e6), (2048, 28.6e6), (8192, 117.2e6))}
    assert memory_curve(nearly, work).at(65536) == pytest.approx(8 * 117.2e6, rel=0.02)
    steep = {Shape(n, *BASE): 1e4 * n + 500 * n**1.5 for n in (512, 2048, 8192)}
    assert memory_curve(steep, work).at(65536) == pytest.approx(1e4 * 65536 + 500 * 65536**1.5, rel=1e-3)


def test_the_fit_has_no_negative_coefficients():
    columns = [[1.0, n, n**2] for n in (1.0, 2.0, 4.0)]
    found = fitted(columns, np.array([1.0, 1.4, 1.9]))  # concave: the square has no place
    assert (found >= 0).all() and found[2] == 0 and found[1] > 0
    assert along(8.0, [(math.log(4), 0.0)]) == pytest.approx(2), "what was not measured is linear"


# ---- points ----------------------------------------------------------------------------------------------------------


def test_points_survive_their_file(tmp_path):
    path = tmp_path / "deep" / "points.json"
    made_up().write(path)
    again = Points.read(path)
    assert again.about == HERE and list(again) == sorted(again.values.keys() - {ALONE})
    subject = Subject("strided", True)
    for shape in (Shape(2048, 8, 64), Shape(512, 4, 64, 4)):
        assert again.of(subject, "train")[shape] == pytest.approx(made_up().of(subject, "train")[shape], rel=1e-3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 7}', '{"format": 1, "machine": {}, "versions": {}}'])
def test_a_file_that_is_no_calibration_is_refused_by_name(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"calibration\.json is not a calibration .* run `subquad calibrate`"):
        Points.read(path)


def test_subjects_come_from_the_registry():
    found = points.subjects()
    assert {subject.spec for subject in found} <= set(available()) and Subject("full", True) in found
    assert not any(subject.spec == "pattern" for subject in found), "it needs sets of the user's"
    assert points.subjects(["fnet"]) == [Subject("fnet", False)], "it has one direction"
    with pytest.raises(ValueError, match="span"):
        points.subjects(["combiner-fixed:span=0"])


def test_the_shipped_points_give_a_cost_for_every_mechanism_they_name():
    shipped = points.shipped()
    costs = Costs(shipped)
    assert {Subject("full", True), Subject("full", False)} <= set(costs.subjects)
    for subject in costs.subjects:
        if subject.spec not in available():
            continue
        for quantity in ("forward", "train"):
            small, large = (
                (costs.seconds(subject, size, quantity), costs.bytes(subject, size, quantity))
                for size in (Size(1024, 256, 4), Size(20000, 768, 12, 2))
            )
            assert 0 < small[0] < large[0] < math.inf and 0 < small[1] < large[1] < math.inf, subject


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity, times", [("forward", 1), ("train", 3)])
@pytest.mark.parametrize("spec", WORK)
def test_the_model_finds_the_law_behind_the_points(spec, quantity, times):
    costs = Costs(made_up())
    for size in (Size(1000, 512, 8), Size(65536, 256, 4), Size(4096, 1024, 16), Size(3000, 256, 2, 4)):
        wanted = 1e-11 * size.n * size.width**2 + 1e-9 * size.width * size.n ** WORK[spec]
        assert costs.seconds(Subject(spec, True), size, quantity) == pytest.approx(
            times * size.batch * wanted, rel=0.06
        ), size


def test_memory_counts_weights_tokens_and_what_every_layer_keeps():
    costs, subject, size = Costs(made_up()), Subject("linear", False), Size(4096, 512, 8)
    tensor, weights = 4 * 4096 * 512, 4 * (4 * 512**2 + 4 * 512)
    assert costs.peak(subject, size, "forward") == pytest.approx(5 * tensor, rel=0.01)
    assert costs.peak(subject, size, "train") == pytest.approx(20 * tensor + weights, rel=0.01)
    assert costs.bytes(subject, size, "forward", 3) == pytest.approx(3 * weights + 6 * tensor, rel=0.01)
    three = 22 * tensor + 2 * 7 * tensor + 3 * weights + 3 * weights
    assert costs.bytes(subject, size, "train", 3) == pytest.approx(three, rel=0.01)


def test_a_mechanism_is_faster_from_where_the_laws_cross():
    costs = Costs(made_up({"full": 2.0, "strided": 1.5}))
    cheap = made_up({"full": 2.0})
    for shape in points.shapes(Subject("linear", True)):  # linear with a large constant: n² = 1000·n at 1,000
        value = 1e-11 * shape.n * shape.width**2 + 1e-6 * shape.width * shape.n
        cheap.add(Subject("linear", True), "forward", shape, value)
    lengths = ranking.SHOWN
    found = crossover(Costs(cheap), Subject("linear", True), Size(1, 256, 4), "forward", lengths)
    assert found is not None and 900 < found < 1100
    assert crossover(costs, Subject("strided", True), Size(1, 256, 4), "forward", lengths) == lengths[0]
    assert crossover(costs, Subject("full", True), Size(1, 256, 4), "forward", lengths) is None


def test_own_projections_are_counted_where_a_mechanism_projects_tokens():
    assert share("linear") == 1
    assert 0.9 < share("composite-slice") < 1.2


def test_what_is_not_measured_says_so():
    with pytest.raises(ValueError, match=r"star causal has not been measured .* run `subquad calibrate`"):
        Costs(made_up()).seconds(Subject("star", True), Size(64, 256, 4), "forward")


# ---- reach and quality -----------------------------------------------------------------------------------------------


def test_reach_is_the_theory_at_short_lengths_and_continues_it():
    assert reach.reach(Subject("full", True), 4096) == reach.Reach(1)
    assert reach.reach(Subject("axial", True), 100) == reach.Reach(None), "causal, rows and columns do not meet"
    short, long = (reach.reach(Subject("longformer", True), n) for n in (1024, 16384))
    assert short.exact and not long.exact and long.layers == 16 * short.layers, "a window grows with the length"
    assert reach.continued(1024, 8, 10, 16384) == 14, "a logarithm grows by as much with every step"
    assert reach.reach(Subject("routing", True), 256).by_content and reach.reach(Subject("full", True), 1) is None
    assert reach.Reach(None).words() == "never" and reach.Reach(256, False).words() == "≈ 256"


def test_committed_results_are_read_and_the_nearest_task_chosen(tmp_path):
    rows = [{"attention": "sbm:clusters=16", "metric": "accuracy", "mean": 0.5}, {"attention": "full", "mean": None}]
    (tmp_path / "a.json").write_text(json.dumps({"task": "needle", "rows": rows}))
    (tmp_path / "b.json").write_text(json.dumps({
        "columns": {"copy": {"task": "copying-causal", "recipe": "small", "settings": ["length=32"],
                             "larger_is_better": True}, "cost": {"task": "", "recipe": "small", "settings": []}},
        "methods": {"ours": {"spec": "linear"}, "theirs": {"spec": "star"}},
        "ours": {"ours": {"copy": {"mean": 0.25}, "cost": {"mean": 7}}},
    }))  # fmt: skip
    (tmp_path / "speed.json").write_text(json.dumps({"rows": [{"spec": "star"}]}))
    scores = quality.read_scores(tmp_path)
    assert [(score.task, score.length, score.causal, score.spec, score.mean) for score in scores] == [
        ("needle", 2048, False, "sbm:clusters=16", 0.5),
        ("copying-causal", 32, True, "linear", 0.25),
    ]
    near = quality.nearest(scores, 128, True)
    assert near.task == "copying-causal" and near.of("linear").mean == 0.25 and near.of("star") is None
    near = quality.nearest(scores, 1000, False)
    assert near.task == "needle" and near.of("sbm").mean == 0.5, "the same mechanism with other options"
    assert quality.nearest(scores, 16384, True).task == "needle", "so much nearer that the direction counts less"
    assert quality.nearest([], 64, True) is None


def test_scores_of_a_table_are_shares_of_its_deepest_models(tmp_path):
    """Yun's table 2 has per cent, and one column per depth: its first rows, of one layer, were read as the quality."""
    columns = {f"{k}": {"task": "copying-causal", "recipe": "small", "settings": [f"layers={k}"],
                        "larger_is_better": True} for k in (1, 3)}  # fmt: skip
    methods = {"a": {"spec": "strided:w=7"}, "b": {"spec": "strided:w=9"}}
    ours = {"a": {"1": {"mean": 6.4}, "3": {"mean": 97.0}}, "b": {"1": {"mean": 0.5}, "3": {"mean": 99.0}}}
    (tmp_path / "t.json").write_text(json.dumps({"columns": columns, "methods": methods, "ours": ours}))
    near = quality.nearest(quality.read_scores(tmp_path), 64, True)
    assert near.layers == 3 and [score.mean for score in near.scores] == [0.97, 0.99]
    assert near.of("strided").mean == 0.99 and near.of("strided:w=7").mean == 0.97


def test_the_committed_scores_are_comparable():
    folder = quality.results_folder()
    shares = [score for score in quality.read_scores(folder) if score.metric in quality.SHARES]
    assert shares and all(0 <= score.mean <= 1 for score in shares)


@pytest.mark.parametrize(
    "n, causal, specs, task, settings",
    [
        (65, True, ["fixed"], "copying-causal", ("length=64",)),
        (16384, True, ["fixed"], "needle", ("length=16384",)),
        (16384, True, ["nsa"], "copying-causal", ()),  # has no bidirectional form
        (100, False, ["fixed"], "listops", ()),
        (700, False, ["fixed"], "needle", ("length=1024",)),
        (5000, False, ["fixed"], "needle", ("length=4992",)),
        (10**6, False, ["fixed"], "needle", ("length=16384",)),
    ],
)
def test_mechanisms_are_compared_at_about_the_length_of_the_wish(n, causal, specs, task, settings):
    trial = quality.trial_for(n, causal, specs)
    assert (trial.task, trial.settings) == (task, settings)
    quality.tasks.check_settings(trial.task, trial.settings, "small")
    assert (trial.remark is not None) == (n > 16384 or (causal and n > 256)), "what differs from the wish is said"


def test_what_differs_from_the_wish_is_said_in_sentences():
    assert quality.trial_for(16384, True, ["linear"]).remark == (
        "No generated causal task is this long, so the command below uses needle, which is bidirectional. "
        "lm-bytes --set length=16384 is causal, but needs data."
    )
    assert quality.trial_for(65536, True, ["nsa"]).remark == (
        "No generated causal task is longer than copying-causal. lm-bytes --set length=16384 is causal, but needs data."
    )
    shorter = "The command below has 16,384 tokens, as 65,536 would not be trained in minutes."
    assert quality.trial_for(65536, False).remark == shorter
    assert (quality.trial_for(65536, True).remark or "").startswith(f"{shorter} No generated causal task")


def test_the_results_of_this_package_are_found():
    folder = quality.results_folder()
    assert folder is not None and any(score.spec == "full" for score in quality.read_scores(folder))


# ---- the ranking -----------------------------------------------------------------------------------------------------


def asked(**changes) -> Advice:
    wish = Wish(**{"n": 8192, "width": 512, "heads": 8, "memory": 2**33, "causal": True, **changes})
    return ranking.advise(wish, Costs(made_up()), made_up())


def test_fast_mechanisms_come_first_and_the_command_compares_them():
    found = asked()
    assert [row.spec for row in found.rows] == ["linear", "strided", "full"]
    assert found.command() == "subquad compare needle --set length=8192 --attention full,linear,strided"
    assert found.rows[-1].faster_from is None and found.rows[0].state_bytes == pytest.approx(8 * 8192 * 512, rel=0.01)
    assert "longformer" in found.unmeasured


def test_what_does_not_reach_everyone_in_so_many_layers_comes_later():
    assert [row.spec for row in asked(layers=2).rows] == ["linear", "full", "strided"], "strided needs three"


def test_hundreds_of_layers_are_no_reach():
    """Causal star passes a token on from neighbour to neighbour: fast, and of no use to a model of usual depth."""
    row = ranking.make_row(asked().wish, Costs(points.shipped()), "star", None)
    assert row.reach is not None and row.reach.layers > 12 and not row.reaches(1) and row.reaches(10**6)


def test_an_impossible_wish_gets_the_nearest_possible_ones():
    found = asked(n=10**9, memory=2**30)
    assert not found.fitting and found.command() is None
    for row in found.rows:
        assert 0 < row.longest < 10**9 and not row.fits
        possible = asked(n=row.longest, memory=2**30)
        assert next(each for each in possible.rows if each.spec == row.spec).fits
    assert not asked(n=1, memory=1000).fitting and asked(n=1, memory=1000).rows[0].longest == 0


def test_a_decode_step_is_ranked_by_its_own_cost():
    found = asked(decode=True)
    assert all(row.seconds == row.decode_seconds for row in found.rows)
    assert all(row.bytes > row.state_bytes for row in found.rows)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n": 0}, "n must be an integer ≥ 1, not 0"),
        ({"n": 2**60}, r"n must be at most 2\^50"),
        ({"width": 100}, "width must be a multiple of heads=8, not 100"),
        ({"decode": True, "train": True}, "choose one"),
        ({"decode": True, "causal": False}, "decode needs causal"),
    ],
)
def test_a_wrong_wish_names_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        asked(**changes)


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_a_calibration_is_resumed_and_leaves_out_what_would_take_too_long(tmp_path, monkeypatch):
    calls = []

    def fake(subject, shape, quantity):
        calls.append((subject, shape, quantity))
        return 1e-9 * shape.n**2

    monkeypatch.setattr(measuring, "step_seconds", fake)
    monkeypatch.setattr(measuring, "decode", lambda subject, shape: (1e-3, 100))
    path, found, told = tmp_path / "c.json", Points(HERE), []
    subjects = points.subjects(["linear"], (True,))
    assert not measuring.calibrate(found, subjects, path, minutes=-1) and not calls, "no time, nothing measured"
    assert measuring.calibrate(found, subjects, path, tell=told.append)
    first = len(calls)
    assert ALONE in {call[0] for call in calls} and len(told) == measuring.steps(Points(HERE), subjects)
    assert not any(shape.n == 32768 for _, shape, _ in calls), "that would take a second, by the shorter ones"
    assert Points.read(path).of(subjects[0], "state bytes")
    assert measuring.calibrate(Points.read(path), subjects, path) and len(calls) == first, "nothing is measured twice"


def test_of_several_rounds_the_best_time_is_kept(tmp_path, monkeypatch):
    calls = []

    def fake(subject, shape, quantity):
        calls.append((subject, shape, quantity))
        rounds = calls.count(calls[-1])
        return 1e-6 * shape.n * {1: 3, 2: 2}.get(rounds, 5)

    monkeypatch.setattr(measuring, "step_seconds", fake)
    monkeypatch.setattr(measuring, "decode", lambda subject, shape: (1e-3, 100))
    path, found, told = tmp_path / "c.json", Points(HERE), []
    (subject,) = points.subjects(["linear"], (True,))
    assert measuring.calibrate(found, [subject], path)
    once = len(calls)
    assert not measuring.calibrate(Points.read(path), [subject], path, rounds=3, minutes=-1) and len(calls) == once
    left = measuring.steps(Points.read(path), [subject], 3)
    assert measuring.calibrate(Points.read(path), [subject], path, rounds=3, tell=told.append)
    assert len(told) == left and len(calls) == 3 * once
    found = Points.read(path)
    assert found.rounds == {ALONE: 3, subject: 3}
    assert found.of(subject, "train")[Shape(512, *BASE)] == pytest.approx(2e-6 * 512), "the second round was the best"
    assert measuring.calibrate(found, [subject], path, rounds=2) and len(calls) == 3 * once, "it has more already"


def test_a_mechanism_that_fails_is_named(monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(measuring, "step_seconds", fail)
    with pytest.raises(ValueError, match=r"linear causal cannot be measured at n = 64 \(forward\): no"):
        measuring.measure(Points(HERE), Subject("linear", True), "forward", Shape(64, *BASE))


def test_steps_of_layers_are_really_run():
    shape = Shape(32, 2, 8)
    assert measuring.step_seconds(ALONE, shape, "train") > 0
    assert measuring.step_seconds(Subject("fnet", False), shape, "forward") > 0
    seconds, size = measuring.decode(Subject("linear", True), shape)
    assert seconds > 0 and size > 0 and measuring.streams(Subject("linear", True))


def test_memory_is_measured_in_a_process_of_its_own(tmp_path):
    subject, shape = Subject("linear", False), Shape(4096, 4, 64)
    with Peaks() as peaks:
        forward = peaks.measure(subject, shape, backward=False)
        train = peaks.measure(subject, shape, backward=True)
        with pytest.raises(ValueError, match="memory of linear bidirectional at n = 0 could not be measured"):
            peaks.measure(subject, Shape(0, 4, 64), backward=False)
    tensor = 4 * 4096 * 256
    assert train["peak"] > forward["peak"] > 3 * tensor and train["kept"] > 3 * tensor and forward["kept"] == 0
    assert not memory_tasks(subject, Points(HERE), made_up()), "known already"
    assert memory_tasks(subject, Points(HERE), Points(HERE))
    assert measure_memory(Points(HERE), [subject], tmp_path / "m.json", made_up()) and not list(tmp_path.iterdir())


def test_counting_what_is_kept_frees_it_again(monkeypatch):
    """An output that is saved for the backward pass, and handed to a hook as it is, is part of a cycle for ever."""
    step, outputs = measuring.make(Subject("full", False), Shape(64, 4, 16), backward=True), []
    forward = step.forward

    def watched():
        out = forward().sigmoid()  # saves its own output
        outputs.append(weakref.ref(out))
        return out

    monkeypatch.setattr(step, "forward", watched)
    assert kept(step) >= 64 * 64 * 4
    assert [ref() for ref in outputs] == [None]


def test_memory_is_that_of_a_step_whose_kernels_are_loaded():
    """What a process does once is not counted, whichever request is the first; plans are made anew every time."""
    subject, shape = Subject("bigbird", False), Shape(512, 4, 64, 2)
    with Peaks() as peaks:
        found = [peaks.measure(subject, shape, backward=False)["peak"] for _ in range(3)]
    assert max(found) - min(found) < 2**20, found


def test_measured_memory_is_proportional_to_the_length():
    """Holes that freed tensors leave do not count: else what is measured at short lengths says little of long ones."""
    with Peaks() as peaks:
        long, short = (
            peaks.measure(Subject("longformer", False), Shape(n, 4, 64), backward=True) for n in (8192, 2048)
        )
    tensors = [found["peak"] / (4 * n * 256) for found, n in ((long, 8192), (short, 2048))]
    assert tensors[0] == pytest.approx(tensors[1], rel=0.15)
    assert tensors[0] < 11, "q, k, v, what they come from, the output, and their gradients"


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    monkeypatch.setattr(ranking, "shipped", made_up)
    monkeypatch.setattr(points, "shipped", made_up)

    def start(*words, columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        return CliRunner().invoke(app, [str(word) for word in words])

    return start


@pytest.mark.parametrize("columns", [80, 120])
def test_advise_prints_tables_that_fit_the_window(run, columns):
    result = run("advise", "--n", 16384, "--causal", "--memory", "4GiB", "--train", columns=columns)
    assert result.exit_code == 0, result.stderr
    *lines, command = result.stdout.rstrip().splitlines()
    assert max(map(len, lines)) <= columns
    assert "measurements on another machine" in " ".join(lines) and "--attention full,linear,strided" in command
    first = [line.split()[0] for line in lines if line.split()]
    assert first.index("linear") < first.index("strided") < first.index("full")
    for title in ("time", "memory", "faster from", "reaches all", "decode", "state"):
        assert title in result.stdout


def test_advise_names_every_row_in_a_narrow_window(run):
    result = run("advise", "--n", 16384, "--causal", "--memory", "4GiB", columns=40)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert {"linear", "strided", "full"} <= set(lines) and any(line.startswith("  time: ") for line in lines)


def test_advise_of_an_impossible_wish(run):
    result = run("advise", "--n", 10**9, "--memory", "1GiB", columns=80)
    assert result.exit_code == 0 and "nothing fits into 1 GiB; what would fit:" in result.stdout
    assert "longest with 1 GiB" in result.stdout and "compare" not in result.stdout


def test_advise_as_json(run):
    result = run("advise", "--n", 2048, "--causal", "--memory", "1GiB", "--json", "--attention", "strided")
    found = json.loads(result.stdout)
    assert [row["spec"] for row in found["rows"]] == ["strided"] and found["measured_here"] is False
    assert found["wish"]["memory"] == 2**30 and found["rows"][0]["reach"]["layers"] == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["--n", "0"], "--n"),
        (["--n", "64", "--width", "100"], "--width must be a multiple of --heads 8, not 100"),
        (["--n", "64", "--memory", "much"], "--memory must be a size such as 4GiB or 512MiB, not 'much'"),
        (["--n", "64", "--memory", "0"], "--memory must be a size"),
        (["--n", "64", "--decode"], "--decode needs --causal"),
        (["--n", "64", "--train", "--decode", "--causal"], "choose one"),
        (["--n", "64", "--attention", "linaer"], "unknown attention 'linaer'"),
        (["--n", "64", "--attention", "star"], "has not been measured on this machine: run `subquad calibrate star`"),
        (["--n", "64", "--attention", "hca"], "hca is causal only: add --causal"),
        (["--n", "64", "--attention", "star:wide=3"], "star has no option 'wide'"),
        (["--n", "64", "--attention", "pattern"], "pattern: sets is needed"),
        (["--n", str(2**51)], "n must be at most 2^50"),
        ([], "--n"),
    ],
)
def test_wrong_requests_get_one_line_that_names_the_argument(run, words, message):
    result = run("advise", *words, columns=400)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_calibration_of_this_machine_is_used_and_an_old_one_is_not(run, tmp_path, monkeypatch):
    here = made_up({"full": 2.0, "linear": 1.0})
    here.about = measuring.about_here()
    here.write(tmp_path / "calibration.json")
    result = run("advise", "--n", 4096, "--causal", "--memory", "1GiB")
    assert "predicted from the calibration of this machine" in result.stdout and "strided" in result.stdout
    assert "not measured yet (`subquad calibrate`): strided" in " ".join(result.stdout.split())
    here.about = {**here.about, "versions": {"torch": "0.1"}}
    here.write(tmp_path / "calibration.json")
    result = run("advise", "--n", 4096, "--causal", "--memory", "1GiB")
    assert "was measured with other versions" in " ".join(result.stdout.split())


def test_calibrate_keeps_its_points_in_the_cache(run, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "step_seconds", lambda subject, shape, quantity: 1e-8 * shape.n)
    monkeypatch.setattr(measuring, "decode", lambda subject, shape: (1e-3, 100))
    result = run("calibrate", "linear", "--causal", "--minutes", 0)
    assert result.exit_code == 0 and "nothing was measured: --minutes 0 is too short" in result.stdout, result.stderr
    assert not list(tmp_path.iterdir()), "no file without measurements"
    result = run("calibrate", "linear", "--causal")
    assert result.exit_code == 0 and f"calibrated: {tmp_path / 'calibration.json'}" in result.stdout, result.stderr
    assert list(Points.read(tmp_path / "calibration.json")) == [Subject("full", True), Subject("linear", True)]
    assert run("calibrate", "nothing").exit_code == 2
    assert "hca is causal only" in run("calibrate", "hca", "--bidirectional").stderr


def test_calibrate_without_times_says_when_nothing_is_left_to_measure(run, tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.advice.peaks.memory_steps", lambda *_: 0)
    result = run("calibrate", "linear", "--no-time", "--out", tmp_path / "points.json")
    assert result.exit_code == 2 and "--no-time leaves nothing to measure" in result.stderr


@pytest.mark.parametrize("quantity", [None, "forward", "train bytes"])
def test_without_times_a_file_is_a_calibration_if_it_has_memory(run, tmp_path, quantity):
    path, found = tmp_path / "points.json", Points(measuring.about_here())
    found.write(path)
    assert not path.exists(), "nothing has been measured"
    path.write_text(json.dumps({"format": 1, **found.about, "rounds": {}, "points": {}}))  # an older version wrote it
    if quantity is not None:
        found.add(Subject("linear", True), quantity, Shape(512, *BASE), 1.0)
        found.write(path)
    result = run("calibrate", "linear", "--no-time", "--out", path)
    if quantity == "train bytes":
        assert result.exit_code == 0 and f"calibrated: {path}" in result.stdout, result.stderr
    else:
        assert result.exit_code == 2 and "--no-time leaves nothing to measure" in result.stderr and not result.stdout


def test_calibrate_measures_memory_without_times(run, tmp_path, monkeypatch):
    """Memory does not need an idle machine: it can be measured beforehand, and the times added later."""
    found = {"peak": 7, "kept": 5, "parameters": 0}
    monkeypatch.setattr(Peaks, "measure", lambda *_, **__: found)
    path = tmp_path / "points.json"
    result = run("calibrate", "linear", "--causal", "--memory", "--no-time", "--out", path)
    assert result.exit_code == 0 and "calibrated" in result.stdout, result.stderr
    assert "times may be too long" not in result.stdout, "there are none"
    written = Points.read(path).values[Subject("linear", True)]
    assert set(written) == {"forward bytes", "train bytes", "kept bytes", "parameter bytes"}
    assert Shape(*points.BATCHED) in written["train bytes"]


def test_the_layers_of_the_study_are_drawn():
    """By chance alone, and always the same: nobody has chosen them, and no calibration has measured them."""
    held = study.drawn()
    assert held == study.drawn() and held != study.drawn(1)
    assert len({each.spec for each in held}) == 10 and {each.train for each in held} == {True, False}
    assert [held[0].n, held[-1].n] == [512, 65536] and all(each.n % 64 == 0 for each in held)
    for each in (layer for seed in range(20) for layer in study.drawn(seed)):
        assert each.subject in points.subjects([each.spec]) and each.width % each.heads == 0
        assert each.batch * each.n * each.width <= study.LARGEST and each.shape not in points.shapes(each.subject)


def test_the_study_holds_predictions_against_measurements(tmp_path, monkeypatch):
    held = (study.Held("linear", True, True, 3000, 512, 8), study.Held("full", True, False, 1000, 256, 4))
    costs = Costs(made_up())
    exact = {each.key: study.predict(costs, each) for each in held}
    slower = iter([9, 9, 1, 1, 4, 4])  # a busy machine in the first round and in the last
    monkeypatch.setattr(
        study, "measure_seconds", lambda each: next(slower) * exact[each.key][0] * (1 if each.train else 2)
    )
    monkeypatch.setattr(study, "measure_bytes", lambda each: int(exact[each.key][1]))
    path = tmp_path / "advice.json"
    assert not study.run(held, path, minutes=-1) and study.run(held, path, quantities=["bytes"])
    rows = study.compare(held, path, lambda causal: costs)
    assert [row.time_error for row in rows] == [None, None], "no times yet"
    assert (
        study.tally(rows)
        == "Time within 25 %: 0 of 0 (10 not measured yet). Memory within 20 %: 2 of 2 (8 not measured yet)."
    )
    assert study.run(held, path)
    rows = study.compare(held, path, lambda causal: costs)
    assert [round(row.time_error, 3) for row in rows] == [0, -0.5]
    shown = study.table(json.loads(path.read_text()))
    assert shown.splitlines()[2].startswith("| `linear`, causal, training | 3,000 | 512 / 8 | ")
    assert "Time within 25 %: 1 of 2" in shown and "Memory within 20 %: 2 of 2" in shown
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "versions": {"torch": "0"}}))
    with pytest.raises(ValueError, match="was measured with other versions"):
        study.run(held, path)


def test_sizes_are_read_and_written():
    assert parse_bytes("4GiB", "--memory") == parse_bytes("4 g", "--memory") == 2**32
    assert parse_bytes("2.5MB", "x") == 2_500_000 and parse_bytes("7", "x") == 7
    assert [show_bytes(size) for size in (7, 2**20, 1.5 * 2**30, 1023 * 2**20)] == [
        "7 B",
        "1 MiB",
        "1.5 GiB",
        "1,023 MiB",
    ]
