"""A decode step in a compiled graph: one graph for all steps, and what it gives is what an eager step gives."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import subquad
from subquad.attention.registry import mechanism
from subquad.kernels.edges import EdgeList, rows_of
from subquad.kernels.tables import most_named, named_keys
from subquad.supports.drawn import Random
from subquad.supports.patterns import Logsparse, Strided
from subquad.testing.case import Case, close
from subquad.testing.streaming import make, stream

BEGUN, STEPS, ROOM = 29, 8, 48
CASES = [
    Case(name, True, next(x for x in mechanism(name).examples if x.get("causal", True)))
    for name in subquad.available()
    if mechanism(name).capabilities.streaming and mechanism(name).capabilities.causal
]
OTHERS = [  # kinds of states and keys that the first examples do not have
    Case("strided:w=4,heads=multihead", True),
    Case("logsparse:map=entmax", True),
    Case("combiner-fixed:span=4,abstraction=deepsets-max", True),
    Case("combiner-mixture", True, {"plans": ("fixed", "axial-rowmajor"), "cols": 5}),
    Case("composite-slice:slice_length=4,levels=3,composition=global-local,pool=linear", True),
    Case("hca:window=3,rate=1", True),
    Case("sbm:self_loops=true,window=5", True),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def begun(case, module, xs, mask, **about):
    """After the first tokens, with room for more."""
    some = [x.narrow(case.time, 0, BEGUN) for x in xs]
    return stream(case, module, some, (BEGUN,), mask, seed=torch.tensor(5), **about)[1].reserve(ROOM)


@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=lambda case: case.title)
@torch.no_grad()
def test_a_decode_step_is_one_graph_for_all_steps(case):
    """Rows of different lengths; the steps cross the borders of blocks."""
    module, xs = make(case), case.inputs(BEGUN + STEPS)
    mask = torch.arange(BEGUN) >= torch.tensor([[0], [6]]) if case.able.padding else None
    state = begun(case, module, xs, mask)
    twin, counter = state.clone(), CompileCounter()
    step = torch.compile(module.extend, fullgraph=True, backend=counter)
    for i in range(BEGUN, BEGUN + STEPS):
        new = [x.narrow(case.time, i, 1) for x in xs]
        (y, state), (z, twin) = step(*new, state), module.extend(*new, twin)
        close(y, z, 1e-9, f"step {i}")
    assert state.length.tolist() == twin.length.tolist()
    assert counter.frame_count == 1, f"{counter.frame_count} graphs for {STEPS} steps"


@pytest.mark.parametrize("spec", ["combiner-fixed", "full", "nsa", "sbm", "hca:window=5,rate=8"])
@torch.no_grad()
def test_steps_of_both_kinds_take_turns(spec):
    """A state goes from a graph to an eager step and back, and after a crop too: the graph serves every length."""
    case = Case(spec, True)
    module, xs, counter = make(case), case.inputs(BEGUN + STEPS), CompileCounter()
    state = begun(case, module, xs, None)
    step = torch.compile(module.extend, fullgraph=True, backend=counter)
    whole = stream(case, module, xs, (BEGUN + STEPS,), seed=torch.tensor(5))[0]
    for i in [*range(BEGUN, BEGUN + 4), *range(BEGUN + 2, BEGUN + STEPS)]:
        state = state.crop(i)
        y, state = (step if i % 2 else module.extend)(*(x.narrow(case.time, i, 1) for x in xs), state)
        close(y, whole.narrow(case.time, i, 1), 1e-9, f"step {i}")
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", ["combiner-fixed", "longformer:window=8", "nsa"])
@torch.no_grad()
def test_steps_with_padding(spec):
    """A row that has ended is given padding, which has a position and is no key."""
    case = Case(spec, True)
    module, xs = make(case), case.inputs(BEGUN + 3)
    state = begun(case, module, xs, None)
    twin, step = state.clone(), torch.compile(module.extend, fullgraph=True, backend="eager")
    for i, real in zip(range(BEGUN, BEGUN + 3), ((True, False), (True, False), (True, True)), strict=True):
        new, mask = [x.narrow(case.time, i, 1) for x in xs], torch.tensor(real)[:, None]
        (y, state), (z, twin) = step(*new, state, key_mask=mask), module.extend(*new, twin, key_mask=mask)
        close(case.rows(y, mask), case.rows(z, mask), 1e-9, f"step {i}")


@pytest.mark.parametrize(
    ("spec", "rollback"),
    [("full", 8), ("combiner-fixed:span=4", None), ("composite-slice:slice_length=4", 8), ("hca", 8), ("reformer", 8)],
)
@torch.no_grad()
def test_a_graph_refuses_tokens_that_there_is_no_room_for(spec, rollback):
    case = Case(spec, True)
    module = case.make(max_length=40)
    xs = case.inputs(41)
    state = begun(case, module, xs, None, rollback=rollback)
    step = torch.compile(module.extend, fullgraph=True, backend="eager")
    for i in range(BEGUN, 40):
        _, state = step(*(x.narrow(case.time, i, 1) for x in xs), state)
    with pytest.raises(RuntimeError, match=r"room for 40 positions .* max_length=40"):
        step(*(x.narrow(case.time, 40, 1) for x in xs), state)


@torch.no_grad()
def test_without_a_greatest_length_the_room_is_that_of_the_buffers():
    case = Case("combiner-fixed:span=4", True, {"max_length": None})
    module, xs = case.make(), case.inputs(600)
    state = stream(case, module, [x[:, :, :8] for x in xs], (8,))[1]
    room, whole = state.memory.room(state.buffers), module(*xs)
    step = torch.compile(module.extend, fullgraph=True, backend="eager")
    for i in range(8, room):
        y, state = step(*(x[:, :, i : i + 1] for x in xs), state)
    close(y, whole[:, :, room - 1 : room], 1e-9, "the last token that there is room for")
    before = {name: x.clone() for name, x in state.buffers.items()}
    with pytest.raises(RuntimeError, match=rf"room for {room} positions"):
        step(*(x[:, :, room : room + 1] for x in xs), state)
    assert all(torch.equal(x, state.buffers[name]) for name, x in before.items()), "an error has changed the state"
    y, _ = torch.compile(module.extend, backend="eager")(*(x[:, :, room : room + 1] for x in xs), state.reserve(600))
    close(y, whole[:, :, room : room + 1], 1e-9, "with more room")


@torch.no_grad()
def test_a_state_that_is_to_be_recomputed_needs_an_eager_step():
    case = Case("combiner-fixed:span=4", True)
    module, xs = make(case, longest=200), case.inputs(120)
    state = stream(case, module, xs, (120,), rollback=None)[1].crop(9)
    step = torch.compile(module.extend, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="extend it eagerly once"):
        step(*(x[:, :, 9:10] for x in xs), state)
    _, state = module.extend(*(x[:, :, 9:10] for x in xs), state)
    y, _ = step(*(x[:, :, 10:11] for x in xs), state.reserve(40))
    close(y, module(*(x[:, :, :11] for x in xs))[:, :, 10:], 1e-9, "after that step")


# ---- the operators behind it --------------------------------------------------------------------------------


def test_rows_of_an_edge_list():
    """A few rows of every graph, in any order, one of them behind the last."""
    seen = torch.rand(3, 6, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    row = torch.tensor([[4, 0], [6, 5], [2, 2]])
    found = rows_of(EdgeList.from_mask(seen), row)
    padded = torch.nn.functional.pad(seen, (0, 0, 0, 1))  # row 6 has no edge
    assert torch.equal(found.to_mask(), padded.gather(1, row[..., None].expand(3, 2, 9)))
    edges = EdgeList.from_mask(seen)
    result = torch.library.opcheck(torch.ops.subquad.edge_rows.default, (edges.indptr, edges.indices, row))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("pattern", [Logsparse(causal=True), Strided(causal=True, w=4), Random(causal=True, seed=3)])
def test_named_keys_are_those_of_the_mask(pattern):
    n, families = 40, tuple(range(pattern.families))
    position, width = torch.tensor([[0, 7, 31], [39, 8, 16]]), most_named(pattern.text, families, n)
    named = torch.ops.subquad.named_keys(position, pattern.text, list(families), width)  # (2, families, 3, width)
    assert torch.equal(named[..., : (few := named_keys(position, pattern, families, n)).shape[-1]], few)
    listed = torch.zeros(*named.shape[:3], n + 1, dtype=torch.bool)
    listed = listed.scatter(3, torch.where(named < 0, n, named), True)[..., :n]
    masks = torch.stack([pattern.mask(n, family) for family in families])  # (families, n, n)
    assert torch.equal(listed, masks[:, position].transpose(0, 1))
    arguments = (position, pattern.text, list(families), width)
    assert set(torch.library.opcheck(torch.ops.subquad.named_keys.default, arguments).values()) == {"SUCCESS"}
