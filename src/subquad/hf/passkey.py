"""`subquad passkey`: does the model find a number that was hidden at some depth of a long text?

The text is filler with one sentence that holds a number of five digits; at the end the number is asked for. A try
counts as found if every token of the number is the likeliest one when the tokens before it are given. The loss of the
number's tokens says more where a model finds nothing: ln 10 = 2.3 is a guess among digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.hf.fitting import body
from subquad.hf.layers import NAME, attention_layers
from subquad.hf.lowrank import original
from subquad.hf.texts import tokens

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is "


class Result(NamedTuple):
    """The tries at one depth."""

    depth: float  # 0 = the beginning, 1 = the end
    found: float  # share of tries
    loss: float  # mean loss of the number's tokens, nats
    distance: int  # tokens between the number and the question
    digits: float  # share of the number's tokens that are the likeliest one


def passkey(
    model: Any,
    tokenizer: Any,
    n: int,
    depths: Sequence[float],
    tries: int = 1,
    *,
    full: bool = False,
    seed: int = 0,
    tell: Callable[[Result], None] | None = None,
) -> list[Result]:
    """The share of numbers found at each depth of a text of n tokens; `full`: by the original inside the model."""
    results = []
    for depth in depths:
        draw = torch.Generator().manual_seed(seed)  # the same numbers at every depth
        found, losses, digits, distance = 0, 0.0, 0.0, 0
        for _ in range(tries):
            key = str(int(torch.randint(10000, 100000, (), generator=draw)))
            ids, answer, distance = hide(tokenizer, key, n, depth)
            share, loss = ask(model, ids, answer, full=full)
            found, digits, losses = found + (share == 1), digits + share, losses + loss
        results.append(Result(depth, found / tries, losses / tries, distance, digits / tries))
        if tell:
            tell(results[-1])
    return results


def hide(tokenizer: Any, key: str, n: int, depth: float) -> tuple[Tensor, int, int]:
    """The tokens (1, n) ending with the number, how many of them the number has, and how far back it was said."""
    needle, question, answer = (tokens(tokenizer, text) for text in (NEEDLE.format(key=key), QUESTION, key))
    room = n - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"--n must be at least {n - room}, the tokens of the question and the number, not {n}")
    once = tokens(tokenizer, FILLER)
    filler = (once * (room // len(once) + 1))[:room]
    before = round(depth * room)
    ids = [*filler[:before], *needle, *filler[before:], *question, *answer]
    return torch.tensor([ids]), len(answer), room - before + len(question)


@torch.no_grad()
def looking_heads(model: Any, tokenizer: Any, n: int, depth: float = 0.1, seed: int = 0) -> Tensor:
    """Who looks the number up, (layers, key/value heads): the attention that the number's tokens get while it is
    answered, of the query head of each key/value head that gives most. `model` must not be converted.
    """
    if getattr(model.config, NAME, None):
        raise ValueError("the model is converted: its heads are those of the original, so pass the original")
    draw = torch.Generator().manual_seed(seed)
    ids, answer, _ = hide(tokenizer, str(int(torch.randint(10000, 100000, (), generator=draw))), n, depth)
    said = torch.isin(ids[0, :-answer], ids[0, -answer:])  # (n - answer,)
    found = []

    def note(module: Any, args: Any, out: Any) -> None:
        looks = out[1][0, :, -answer - 1 : -1, :-answer][..., said]  # (H, answer, tokens of the number)
        found.append(looks.sum(-1).mean(-1))

    layers = attention_layers(model)
    handles = [layer.module.register_forward_hook(note) for layer in layers]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that returns weights
    try:
        body(model.eval())(input_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    return torch.stack(found).unflatten(1, (layers[0].key_heads, -1)).amax(-1)


@torch.no_grad()
def ask(model: Any, ids: Tensor, answer: int, *, full: bool = False) -> tuple[float, float]:
    """The share of the number's tokens that are the likeliest one, and their mean loss."""
    model.eval()
    with original(model) if full else nullcontext():
        hidden = body(model)(input_ids=ids, use_cache=False).last_hidden_state[:, -answer - 1 : -1]
    logits = model.get_output_embeddings()(hidden)[0].float()  # (answer, V)
    wanted = ids[0, -answer:]
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    return (logits.argmax(-1) == wanted).double().mean().item(), loss.item()
