"""Options, specs and the registry: what is wrong is named, what is right is found."""

from dataclasses import dataclass

import pytest
import torch

import subquad
from subquad.attention.full import drop
from subquad.core.options import split_spec


def make(spec="strided", **options):
    return subquad.attention(spec, **{"num_heads": 2, "head_dim": 4, **options})


def test_a_spec_is_the_same_as_keywords():
    assert make("strided:w=8,heads=union,dropout=0.1").options == make(w=8, heads="union", dropout=0.1).options
    assert make("fixed:close=true,scale=none").options == make("fixed", close=True, scale=None).options
    assert make("full:map=entmax,alpha=learn").options.alpha == "learn"
    assert make("full:map=entmax,alpha=1.3").options.alpha == 1.3
    assert make("strided:w=8", w=8).options.w == 8
    assert split_spec("a:b=x+y, c=1") == ("a", {"b": "x+y", "c": "1"})


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("stridde", {}, "did you mean strided"),
        ("Fixed", {}, r"did you mean fixed\?"),
        ("combiner_fixed", {}, r"did you mean combiner-fixed\?"),
        ("combiner", {}, r"did you mean combiner-fixed or combiner-window or combiner-logsparse\?"),
        ("sparse", {}, r"did you mean logsparse or combiner-logsparse\?"),
        ("nope", {}, r"unknown attention 'nope' \("),
        ("bert", {}, r"unknown attention 'bert' \("),
        ("attention", {}, r"unknown attention 'attention' \("),
        ("strided", {"width": 3}, "no option 'width'.*its options: num_heads"),
        ("strided", {"ww": 3}, "did you mean w"),
        ("strided", {"w": 0}, "w must be an integer ≥ 1 or None, not 0"),
        ("strided", {"w": 2.5}, "w must be an integer"),
        ("strided", {"w": True}, "w must be an integer"),
        ("strided:w=x", {}, "w must be an integer"),
        ("strided:w", {}, "option=value"),
        ("strided:w=3,w=4", {}, "given twice"),
        ("strided:w=3", {"w": 4}, "3 in the spec and 4"),
        ("strided", {"heads": "all"}, "heads must be one of sequential, union, multihead"),
        ("random", {"density": 0.0}, "density must be a number > 0 and ≤ 1"),
        ("random", {"density": 1.5}, "density"),
        ("random", {"density": float("nan")}, "density"),
        ("full", {"scale": float("inf")}, "scale"),
        ("full", {"dropout": 1.0}, "dropout must be a number ≥ 0 and < 1"),
        ("full", {"num_heads": 0}, "num_heads"),
        ("full", {"causal": 1}, "causal must be true or false"),
        ("full", {"map": "entmax", "alpha": 0.5}, "alpha"),
        ("full", {"map": "topk", "topk": 0}, "topk"),
        ("full", {"map": "sparselin-gen", "lam": 1.0}, "lam"),
        ("bigbird", {"window_blocks": 2}, "window_blocks must be odd"),
        ("star", {"relay": "middle"}, "relay must be one of last, first"),
    ],
)
def test_bad_options_are_refused(spec, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make(spec, **options)


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        make().options.w = 3


def test_max_length_holds():
    a = make("star", max_length=5)
    with pytest.raises(ValueError, match="max_length=5"):
        a(*(torch.randn(1, 2, 6, 4) for _ in range(3)))


class Mean(subquad.Attention):
    """Everyone's mean: the smallest mechanism."""

    capabilities = subquad.Capabilities(causal=False, padding=False)

    @dataclass(frozen=True, kw_only=True)
    class Options(subquad.Options):
        power: int = subquad.option(1, "nothing", ge=1)

    def attend(self, q, k, v, call):
        return drop(self.define(q, k, call), call) @ v

    def define(self, q, k, call):
        nothing = q.sum(-1, keepdim=True) * 0  # a query that is not a number gives none
        return nothing + q.new_full((*q.shape[:3], k.shape[2]), 1 / k.shape[2])


def test_a_mechanism_of_ones_own():
    subquad.register("mean")(Mean)
    try:
        assert "mean" in subquad.available()
        a = make("mean:power=2")
        q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
        torch.testing.assert_close(a(q, k, v), a.dense(q, k, v))
        with pytest.raises(ValueError, match="causal=True is not supported"):
            make("mean", causal=True)
        with pytest.raises(ValueError, match="key_mask is not supported"):
            a(q, k, v, key_mask=torch.ones(1, 5, dtype=torch.bool))
        with pytest.raises(ValueError, match="taken"):
            subquad.register("mean")(Mean)
    finally:
        subquad.unregister("mean")
    with pytest.raises(ValueError, match="unknown attention"):
        make("mean")
    with pytest.raises(ValueError, match="word without"):
        subquad.register("a:b")(Mean)
    with pytest.raises(TypeError, match="subclass"):
        subquad.register("other")(int)
