"""The shipped contract finds what is wrong, in any mechanism, and is strict about exceptions."""

import re

import pytest
import torch

import subquad
from subquad.attention.full import drop, masked_map
from subquad.probability import probability_map
from subquad.testing import ContractError, check_attention
from test_options import Mean


@pytest.fixture
def registered():
    names = []

    def add(cls):
        name = f"trial-{cls.__name__.lower()}"
        subquad.register(name)(cls)
        names.append(name)
        return name

    yield add
    for name in names:
        subquad.unregister(name)


class Leaky(subquad.Attention):
    """Claims to be causal and is the mean of everything."""

    capabilities = subquad.Capabilities(bidirectional=False, padding=False)

    def attend(self, q, k, v, call):
        return v.mean(2, keepdim=True).expand_as(q)

    def define(self, q, k, call):
        weights = torch.ones(*q.shape[:3], k.shape[2], dtype=q.dtype).tril()
        return weights / weights.sum(-1, keepdim=True)


class Excused(Leaky):
    exceptions = {"causal_by_value_and_gradient": "known to leak", "copies_and_seeds": "no reason at all"}


class PaddingLeak(subquad.Attention):
    """Forgets the key mask in its normaliser."""

    def forgetful(self, q, k):
        scores = q @ k.mT * self.options.softmax_scale  # (B, H, n, n)
        return scores + torch.full(scores.shape[-2:], -torch.inf).triu(1) if self.options.causal else scores

    def attend(self, q, k, v, call):
        return self.forgetful(q, k).softmax(-1) @ v

    def define(self, q, k, call):
        scores = self.forgetful(q, k)
        if call.key_mask is None:
            return scores.softmax(-1)
        return scores.masked_fill(~call.key_mask[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)


def test_a_leak_is_found(registered):
    with pytest.raises(ContractError) as error:
        check_attention(registered(Leaky), only=["fast_equals_dense", "causal_by_value_and_gradient"])
    assert "fast_equals_dense: AssertionError: value at n=2" in str(error.value)
    assert "token 1 changes an earlier output" in str(error.value)


class BothForget(PaddingLeak):
    """Forgets the key mask in its fast path and in its definition."""

    def define(self, q, k, call):
        return self.forgetful(q, k).softmax(-1)


class Counts(PaddingLeak):
    """Remembers how often it was called."""

    calls = 0

    def attend(self, q, k, v, call):
        self.calls += 1
        return super().attend(q, k, v, call)


class MeanOfPast(torch.nn.Module):
    """Not registered: the mean of what is there so far, or of everything."""

    def __init__(self, causal, wrong=False):
        super().__init__()
        self.causal, self.wrong = causal, wrong

    def forward(self, q, k, v, key_mask=None):
        real = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        real = real[:, None, :, None].to(v)
        v = v.masked_fill(real == 0, 0)
        total = v.cumsum(2) if self.causal else v.sum(2, keepdim=True).expand_as(v)
        count = real.cumsum(2) if self.causal else real.sum(2, keepdim=True)
        count = count + q.sum() * 0 if self.wrong else count
        return total / count.clamp(min=1) + (q.sum(-1, keepdim=True) * 0).masked_fill(real == 0, 0)


def mean_of_past(q, k, v, key_mask, causal):
    """Its definition, with loops."""
    rows = []
    for b in range(len(v)):
        for h in range(v.shape[1]):
            row = []
            for i in range(v.shape[2]):
                seen = range(i + 1 if causal else v.shape[2])
                real = [v[b, h, j] for j in seen if key_mask is None or key_mask[b, j]]
                row.append(torch.stack(real).mean(0) if real else v[b, h, i].detach() * 0)
            rows.append(torch.stack(row).nan_to_num(0))
    return torch.stack(rows).view_as(v)


def test_a_module_that_is_not_registered():
    checks = ["fast_equals_dense", "causal_by_value_and_gradient", "padding_is_invisible", "nan_stays_where_it_is"]
    check_attention(MeanOfPast, definition=mean_of_past, only=checks)
    with pytest.raises(ContractError, match="NaN in another batch element"):
        check_attention(lambda causal: MeanOfPast(causal, True), definition=mean_of_past, only=checks[3:])
    with pytest.raises(ValueError, match="definition is needed"):
        check_attention(MeanOfPast)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", [PaddingLeak, BothForget])
def test_padding_forgotten_is_found_by_the_check_of_padding_itself(registered, mechanism, causal):
    """In the fast path alone and in both paths. A causal query sees no padding but that inside its row."""
    with pytest.raises(ContractError, match=r"padding_is_invisible: .*fast path: padded slots have weights"):
        check_attention(registered(mechanism), only=["padding_is_invisible"], causal=causal)


class Remembers(PaddingLeak):
    """Keeps what it has seen in a dictionary, where no attribute changes."""

    def __init__(self, options):
        super().__init__(options)
        self.lengths = {}

    def attend(self, q, k, v, call):
        self.lengths[q.shape[2]] = True
        return super().attend(q, k, v, call)


class Averages(PaddingLeak):
    """Moves a buffer that the state dict does not have, in place."""

    def __init__(self, options):
        super().__init__(options)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def attend(self, q, k, v, call):
        self.mean.lerp_(v.detach().mean(), 0.1)
        return super().attend(q, k, v, call)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (Counts, "a call writes attributes: calls"),
        (Remembers, "a call writes attributes: lengths"),
        (Averages, "a call changes mean"),
    ],
)
def test_what_a_call_writes_is_found(registered, mechanism, message):
    with pytest.raises(ContractError, match=message):
        check_attention(registered(mechanism), only=["leaves_no_trace"], causal=False)


class Noisy(PaddingLeak):
    """Adds noise from torch's generator."""

    def attend(self, q, k, v, call):
        return super().attend(q, k, v, call) * (1 + 1e-4 * torch.rand(()))


def test_a_result_that_follows_from_chance_is_found(registered):
    with pytest.raises(ContractError, match="two calls with the same inputs differ: a call draws from torch's"):
        check_attention(registered(Noisy), only=["copies_and_seeds"], causal=False)


def test_progress_is_printed(capsys):
    check_attention("full", only=["no_state_between_calls"], causal=True, progress=True)
    assert "full causal, no_state_between_calls" in capsys.readouterr().err


def test_a_padding_leak_is_found(registered):
    with pytest.raises(ContractError, match="fast_equals_dense"):
        check_attention(registered(PaddingLeak), only=["fast_equals_dense"], causal=False)


def test_exceptions_are_strict(registered):
    name = registered(Excused)
    check_attention(name, only=["causal_by_value_and_gradient"])
    with pytest.raises(ContractError, match="no reason at all"):
        check_attention(name, only=["copies_and_seeds"])


def test_an_honest_mechanism_passes(registered):
    check_attention(registered(Mean))


class Odd(Mean):
    """Right with its first example, wrong with its second: it gives twice the mean."""

    examples = ({"scale": 1.0}, {"scale": 2.0})

    def attend(self, q, k, v, call):
        return super().attend(q, k, v, call) * self.options.scale


def test_the_examples_of_the_class_are_checked_unless_options_are_given(registered, capsys):
    name = registered(Odd)
    with pytest.raises(ContractError, match=f"{name}:scale=2.0, fast_equals_dense: .*off by"):
        check_attention(name, only=["fast_equals_dense"], progress=True)
    assert f"{name}:scale=1.0, fast_equals_dense" in capsys.readouterr().err
    check_attention(name, only=["fast_equals_dense"], scale=1.0)
    check_attention(f"{name}:scale=1.0", only=["fast_equals_dense"])
    with pytest.raises(ContractError, match=r"scale=2\.0"):
        check_attention(name, only=["fast_equals_dense"], causal=False)


def test_what_options_cannot_break_is_checked_once(registered, capsys):
    checks = ["weights_are_probabilities", "bad_input_is_refused"]
    check_attention(registered(Odd), only=checks, progress=True)
    said = capsys.readouterr().err
    assert said.count("weights_are_probabilities") == 2 and said.count("bad_input_is_refused") == 1


def test_only_takes_the_name_of_one_check(capsys):
    check_attention("full", only="no_state_between_calls", causal=True, progress=True)
    assert capsys.readouterr().err.count("ok ") == 1


def test_a_mechanism_that_cannot_be_created_is_told_once():
    with pytest.raises(ContractError) as failed:
        check_attention("longformer", windw=3)
    lines = str(failed.value).splitlines()
    assert len(lines) <= 2 and "more checks: TypeError: longformer has no option 'windw'" in lines[0]


class Undropped(subquad.Attention):
    """Mean of all values, by products and sums of single numbers; dropout is forgotten."""

    capabilities = subquad.Capabilities(causal=False, padding=False)

    def attend(self, q, k, v, call):
        return v.mean(2, keepdim=True).expand_as(q)

    def define(self, q, k, call):
        return torch.full((*q.shape[:3], k.shape[2]), 1 / k.shape[2], dtype=q.dtype)


def test_forgotten_dropout_and_work_that_is_not_counted_are_explained(registered):
    name = registered(Undropped)
    with pytest.raises(ContractError, match=r"dropout=0\.3 changes nothing in training"):
        check_attention(name, only="dropout_is_fair")
    with pytest.raises(ContractError, match=r"no matrix product was counted.* matmul, einsum"):
        check_attention(name, only="grows_as_declared")


def test_unknown_checks_are_refused():
    with pytest.raises(ValueError, match="no check is called nonsense"):
        check_attention("full", only=["nonsense"])


class LongLeak(PaddingLeak):
    """Forgets that it is causal, or its scale, in long sequences only; in the definition too where `both` says so."""

    capabilities = subquad.Capabilities(padding=False)
    wrong_in, wrong_value, both = 300, False, False

    def forgetful(self, q, k, wrong=True):
        scores = super().forgetful(q, k)
        if not wrong or q.shape[2] <= self.wrong_in:
            return scores
        return scores * 1.01 if self.wrong_value else q @ k.mT * self.options.softmax_scale

    def define(self, q, k, call):
        return self.forgetful(q, k, wrong=self.both).softmax(-1)


class LongLeakInBoth(LongLeak):
    both = True


class LeakInWholeBlocks(LongLeak):
    """Forgets that it is causal where the length is a multiple of 64."""

    def forgetful(self, q, k, wrong=True):
        if not wrong or q.shape[2] % 64:
            return PaddingLeak.forgetful(self, q, k)
        return q @ k.mT * self.options.softmax_scale


class LeakInWholeBlocksOfBoth(LeakInWholeBlocks):
    both = True


class WrongAbove100(LongLeak):
    wrong_in, wrong_value = 100, True


def test_what_goes_wrong_in_long_sequences_only_is_found(registered):
    """A leak in both paths is found by causality, another value by the definition, and neither by a short check."""
    for mechanism, message in (
        (LongLeak, "causal, long_equals_dense: .*value at n=401"),
        (LongLeakInBoth, "causal, long_is_causal: .*n=1000: tokens from 1 on change output 0"),
        (LeakInWholeBlocks, "causal, long_equals_dense: .*value at n=256"),
        (LeakInWholeBlocksOfBoth, "causal, long_is_causal: .*n=256: tokens from 1 on change output 0"),
        (WrongAbove100, "long_equals_dense: .*value at n=256"),
    ):
        name = registered(mechanism)
        check_attention(name, only=["fast_equals_dense", "causal_by_value_and_gradient"])
        with pytest.raises(ContractError, match=message):
            check_attention(name, only=["long_equals_dense", "long_is_causal"])


def test_long_checks_make_room_in_max_length(registered):
    checks = ["long_equals_dense", "long_is_causal", "long_padding_is_invisible"]
    check_attention("synthesizer:variant=random", max_length=80, only=checks)


class PaddingLeakAbove300(PaddingLeak):
    """Forgets the key mask in long sequences only."""

    def attend(self, q, k, v, call):
        return super().attend(q, k, v, call) if q.shape[2] > 300 else self.define(q, k, call) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_padding_forgotten_in_long_sequences_only_is_found(registered, causal):
    name = registered(PaddingLeakAbove300)
    check_attention(name, only=["padding_is_invisible"], causal=causal)
    with pytest.raises(ContractError, match=r"long_padding_is_invisible: .*n=1000: padded slots have weights"):
        check_attention(name, only=["long_padding_is_invisible"], causal=causal)


def test_a_spec_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="spec must be a text such as 'strided:w=8', or a function causal → module"):
        check_attention(3)


class IgnoresScale(PaddingLeak):
    """Its fast path has a scale of its own."""

    capabilities = subquad.Capabilities(causal=False, padding=False)

    def attend(self, q, k, v, call):
        return (q @ k.mT * q.shape[3] ** -0.5).softmax(-1) @ v


def test_an_ignored_scale_is_found(registered):
    name = registered(IgnoresScale)
    check_attention(name, only=["fast_equals_dense"])
    with pytest.raises(ContractError, match=r"scale_is_used: .*value with scale=0\.9"):
        check_attention(name, only=["scale_is_used"])


class Draws(PaddingLeak):
    """Draws a number that it does not need, always or in training."""

    always = True

    def attend(self, q, k, v, call):
        if self.always or call.training:
            torch.rand(1)
        return super().attend(q, k, v, call)


class DrawsInTraining(Draws):
    always = False


class DrawingModule(MeanOfPast):
    def forward(self, q, k, v, key_mask=None):
        torch.rand(1)
        return super().forward(q, k, v, key_mask)


def test_a_draw_from_the_generator_is_found(registered):
    for mechanism, when in ((Draws, "in evaluation"), (DrawsInTraining, "with a seed")):
        with pytest.raises(ContractError, match=f"a call {when} draws from torch's generator"):
            check_attention(registered(mechanism), only="copies_and_seeds", causal=False)
    with pytest.raises(ContractError, match="a call in evaluation draws from torch's generator"):
        check_attention(DrawingModule, definition=mean_of_past, only="copies_and_seeds")
    check_attention(registered(PaddingLeak), only="copies_and_seeds")


class Unwritten(subquad.Attention):
    """Nothing."""


class Undefined(subquad.Attention):
    """No definition."""

    def attend(self, q, k, v, call):
        return v


def test_what_a_class_must_define_is_said(registered):
    for mechanism, method in ((Unwritten, "attend"), (Undefined, "define")):
        with pytest.raises(ContractError, match=f"the class {mechanism.__name__} must define `{method}"):
            check_attention(registered(mechanism), only="fast_equals_dense")


def test_checks_that_do_not_apply_are_not_called_ok(capsys):
    check_attention("full:scale=0.5", only="causal_by_value_and_gradient", progress=True)
    first, second = capsys.readouterr().err.splitlines()
    assert first.split() == ["–", "full:scale=0.5,", "causal_by_value_and_gradient"]
    assert second.startswith("ok ") and "full:scale=0.5 causal" in second


class Planted(subquad.Attention):
    """An honest mechanism with room for a mistake, which the check that names its cause must find."""

    positional = False

    def define(self, q, k, call):
        softmax = probability_map("softmax")
        return masked_map(softmax, q, k, self.support(q.shape[2]), call.key_mask, self.options.softmax_scale)

    def attend(self, q, k, v, call):
        weights = drop(self.define(q, k, call), call).to(v.dtype)
        return type(self).mistake(weights @ v, v, call)

    @staticmethod
    def mistake(out, v, call):
        return out


MISTAKES = {
    "every `seed` drops the same weights": ("dropout_is_fair", None),
    "inputs that are expanded": ("any_layout_and_dtype", lambda out, v, call: out * (0.5 if 0 in v.stride() else 1)),
    "value of a batch in two parts": ("batch_is_its_parts", lambda out, v, call: torch.cat([out[:8], out[8:] * 0.9])),
    "value in training, without dropout": ("modes_agree", lambda out, v, call: out * (1.01 if call.training else 1)),
    "value without gradients": ("modes_agree", lambda out, v, call: out * (1 if torch.is_grad_enabled() else 1.01)),
    "value with 4 heads of width 5": ("other_sizes", lambda out, v, call: out * (0.9 if v.shape[3] % 8 else 1)),
    "real tokens are right; `attend` must give 0": (
        "fast_equals_dense",
        lambda out, v, call: out if call.key_mask is None else out + (~call.key_mask)[:, None, :, None],
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_found_by_the_check_that_names_it(registered, message):
    check, mistake = MISTAKES[message]
    body = {"mistake": staticmethod(mistake)} if mistake else {}
    if mistake is None:

        def attend(self, q, k, v, call):
            return drop(self.define(q, k, call), call._replace(seed=torch.tensor(3))).to(v.dtype) @ v

        body = {"attend": attend}
    name = registered(type("Mistaken", (Planted,), body))
    with pytest.raises(ContractError, match=re.escape(message)):
        check_attention(name, only=check, causal=False)
    check_attention(registered(Planted), only=check, causal=False)
