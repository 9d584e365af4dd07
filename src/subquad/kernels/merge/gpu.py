"""The merge operators on a GPU: tables of tiles for the Triton kernels of `triton_tiles`, and their launches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed
from subquad.kernels import devices
from subquad.kernels.merge import rectangles, schedule
from subquad.kernels.merge.reference import SOURCE
from subquad.kernels.parallel import ready
from subquad.supports.support import GivenSupport, check_tensors, parse, plan_of


class Shape(NamedTuple):
    """Sizes of one kernel's tiles."""

    queries: int
    keys: int
    warps: int
    stages: int


def shapes(
    width: int, dtype: torch.dtype, precision: str = "ieee", amd: bool = torch.version.hip is not None
) -> dict[str, Shape]:
    """Tiles for heads of this width, chosen so that no kernel spills registers (`subquad study gpu-build`).

    precision, of float32: ieee (on NVIDIA multiply-adds, which take more registers than matrix instructions) or tf32.
    """
    if amd:
        return _amd_shapes(width, dtype)
    if dtype == torch.float32 and precision == "ieee":
        shape = Shape(32, 32, 8, 2) if width <= 64 else Shape(32, 16, 8, 1)
        return dict.fromkeys(("forward", "query_gradient", "key_gradient"), shape)
    if dtype == torch.float32:
        size = 64 if width <= 64 else 32
        small = 32 if width <= 128 else 16
        return {
            "forward": Shape(size, 32, 4, 2),
            "query_gradient": Shape(small, 32, 4, 2),
            "key_gradient": Shape(32, small, 4, 2),
        }
    if width <= 64:
        return {
            "forward": Shape(128, 64, 8, 2),
            "query_gradient": Shape(64, 32, 4, 2),
            "key_gradient": Shape(32, 32, 4, 2),
        }
    keys = 32 if width <= 128 else 16
    return {
        "forward": Shape(64, 32, 4 if width <= 128 else 8, 2),
        "query_gradient": Shape(64, 2 * keys, 8, 2),
        "key_gradient": Shape(32, keys, 8, 1),
    }


def _amd_shapes(width: int, dtype: torch.dtype) -> dict[str, Shape]:
    """Four warps of 64 lanes have 512 registers per lane. One stage: Triton 3.9 does not compile a loop with a key mask
    in more of them for AMD.
    """
    small = 32 if dtype != torch.float32 or width <= 64 else 16
    less = 1 if width <= 128 else 2
    return {
        "forward": Shape(64 if dtype != torch.float32 else 32, 32 // less, 4, 1),
        "query_gradient": Shape(2 * small // less, 32 // less, 4, 1),
        "key_gradient": Shape(max(16, small // less), 32 // less, 4, 1),
    }


class Tables(NamedTuple):
    """One pass on a device; see `triton_tiles`."""

    spans: Tensor
    tiles: Tensor
    starts: Tensor
    rectangles: Tensor
    largest: int  # tiles of the batch element that has most


def forward(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout) -> tuple[Tensor, Tensor]:
    from subquad.kernels.merge import triton_tiles as tiles

    work, shape = ready(q), shapes(q.shape[3], q.dtype, devices.precision(q))["forward"]
    passes = _query_tables(q, keys, values, support, which, n, lengths, shape)
    kind = torch.float32 if len(passes) > 1 else q.dtype  # between passes nothing is rounded
    out = torch.zeros(q.shape, dtype=kind, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    sources = _sources(keys, values, valid, q)
    common = _common(q, seed, dropout, support, which, n, valid)
    for number, tables in enumerate(passes):
        _launch(
            tiles.forward_tiles,
            (tables.largest, q.shape[1], q.shape[0]),
            shape,
            (work, out, lse, sources, *tables[:4], common.seed, *work.stride()[:3], q.shape[1], q.shape[2]),
            (common.step(tables), scale, dropout, common.up),
            {"SOURCES": len(keys), "BM": shape.queries, "BN": shape.keys, "ADD": number > 0, **common.constants},
        )
    return out.to(q.dtype), lse


def backward(grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout) -> list[Tensor]:
    from subquad.kernels.merge import triton_tiles as tiles

    work, grad = ready(q), ready(grad.to(q.dtype))
    delta = (grad.float() * out.float()).sum(-1)  # (B, H, r)
    lse, sizes = lse.float().contiguous(), shapes(q.shape[3], q.dtype, devices.precision(q))
    sources, common = _sources(keys, values, valid, q), _common(q, seed, dropout, support, which, n, valid)
    shape = sizes["query_gradient"]
    passes = _query_tables(q, keys, values, support, which, n, lengths, shape)
    dq = torch.zeros(q.shape, dtype=torch.float32 if len(passes) > 1 else q.dtype, device=q.device)
    given = (*work.stride()[:3], *grad.stride()[:3], q.shape[1], q.shape[2])
    for number, tables in enumerate(passes):
        _launch(
            tiles.query_gradient_tiles,
            (tables.largest, q.shape[1], q.shape[0]),
            shape,
            (work, grad, lse, delta, dq, sources, *tables[:4], common.seed, *given),
            (common.step(tables), scale, dropout, common.up),
            {"SOURCES": len(keys), "BM": shape.queries, "BN": shape.keys, "ADD": number > 0, **common.constants},
        )
    shape, dk, dv = sizes["key_gradient"], [], []
    for source, (k, v) in enumerate(zip(keys, values, strict=True)):
        size = (shape.keys, shape.queries)
        passes = _key_tables(support, which, n, lengths, source, k.shape[2], *size, q.device)
        kind = torch.float32 if len(passes) > 1 else k.dtype
        totals = [torch.zeros(x.shape, dtype=kind, device=q.device) for x in (k, v)]
        for number, tables in enumerate(passes):
            _launch(
                tiles.key_gradient_tiles,
                (tables.largest, k.shape[1], q.shape[0]),
                shape,
                (work, grad, lse, delta, *totals, sources[source], *tables[:4], common.seed, *given, k.shape[2]),
                (common.step(tables), scale, dropout, common.up, source * SOURCE),
                {"BM": shape.queries, "BN": shape.keys, "ADD": number > 0, **common.constants},
            )
        dk.append(totals[0].to(k.dtype))
        dv.append(totals[1].to(v.dtype))
    return [dq.to(q.dtype), *dk, *dv]


def _launch(kernel, grid, shape: Shape, tensors, numbers, constants: dict[str, Any]) -> None:
    if grid[0]:
        options = {"num_warps": shape.warps, "num_stages": shape.stages, **devices.launch_options(tensors[0].dtype)}
        kernel[grid](*tensors, *numbers, **constants, **options)


def _sources(keys, values, valid, q: Tensor) -> tuple[tuple[Any, ...], ...]:
    """The sources as the kernels take them. Keys and values of a source have the same number of heads."""
    found = []
    for number, (k, v) in enumerate(zip(keys, values, strict=True)):
        k, v = ready(k.to(q.dtype)), ready(v.to(q.dtype))
        real = valid[number].view(torch.uint8) if valid else q  # (B or 1, 1, m); q stands for "none"
        step = real.stride(0) if valid and len(real) > 1 else 0
        group = q.shape[1] // k.shape[1]
        found.append((k, *k.stride()[:3], v, *v.stride()[:3], real, step, group))
    return tuple(found)


class _Common(NamedTuple):
    """What all kernels of a call are given."""

    seed: Tensor
    up: float
    batch: int
    constants: dict[str, Any]

    def step(self, tables: Tables) -> int:
        """From one batch element's span to the next one's."""
        return 2 if len(tables.spans) > 1 else 0


def _common(q: Tensor, seed: Tensor | None, dropout: float, support: str, which: str, n: int, valid) -> _Common:
    width = q.shape[3]
    constants = {
        "D": width,
        "DP": max(16, 1 << (width - 1).bit_length()),
        "RULES": schedule.rules_of(plan_of(support, n, which)) if n else 0,
        "VALID": bool(valid),
        "DROP": dropout > 0,
        "PRECISION": devices.precision(q),
    }
    hashed = q if not dropout or seed is None else dropout_seed(seed.to(q.device, non_blocking=True)).view(1)
    return _Common(hashed, 1 / (1 - dropout), len(q), constants)


# ---- tables ---------------------------------------------------------------------------------------------------


def _query_tables(q, keys, values, support, which, n, lengths, shape: Shape) -> list[Tables]:
    """Every call comes through here, so this is where its tensors are checked."""
    sizes, sources = _sizes(lengths, n), len(keys)
    for length in {size for size in sizes if size > 0}:
        about = f"the plan {which} of {support} for {length} tokens"
        check_tensors(q, keys, values, plan_of(support, length, which), about)
    made = [_made(support, which, length, -1, sources, shape.queries, shape.keys) for length in sizes]
    return _on_device(made, q.device)


def _key_tables(support, which, n, lengths, source, count, size, width, device) -> list[Tables]:
    made = [_made(support, which, length, source, count, size, width) for length in _sizes(lengths, n)]
    return _on_device(made, device)


def _sizes(lengths: Tensor | None, n: int) -> list[int]:
    """The lengths of the batch elements, or one for all. Reading them is the only time that a call waits for the
    device."""
    return [n] if lengths is None else lengths.tolist()


class _Made(NamedTuple):
    """One pass for one length, as arrays."""

    tiles: np.ndarray
    starts: np.ndarray
    rectangles: np.ndarray


def _made(support: str, which: str, n: int, source: int, count: int, size: int, width: int) -> dict[int, _Made]:
    if n < 1:
        return {}
    found = parse(support)
    key = found if isinstance(found, GivenSupport) else support
    return _cached(key, which, n, source, count, size, width)


@lru_cache(maxsize=256)
def _cached(support: Any, which: str, n: int, source: int, count: int, size: int, width: int) -> dict[int, _Made]:
    """The passes of a plan by the unit of their tiles; source = -1: over queries, and `count` is that of sources."""
    text = support if isinstance(support, str) else support.text
    plan = plan_of(text, n, which)
    if source < 0:
        passes = schedule.by_queries(plan, count, size, width)
    else:
        passes = schedule.by_keys(plan, source, count, size, width)
    return {one.tiles[0].unit: _arrays(one) for one in passes}


def _arrays(one: schedule.Pass) -> _Made:
    tiles = np.array([(*tile, 0) for tile in one.tiles], np.int32)
    rows = [r for tile in one.rectangles for source in tile for r in source]
    counts = [len(source) for tile in one.rectangles for source in tile]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return _Made(tiles, starts, np.array(rows, np.int32).reshape(-1, rectangles.FIELDS))


def _on_device(made: list[dict[int, _Made]], device: torch.device) -> list[Tables]:
    """The passes of a batch, one table each: those of batch element after batch element."""
    found = []
    for unit in sorted({unit for one in made for unit in one}):
        kinds: dict[int, tuple[int, int]] = {}  # equal lengths share their tiles
        spans, tiles, starts, rectangles, t, r = [], [], [np.zeros(1, np.int32)], [], 0, 0
        for one in made:
            if unit not in one:
                spans.append((0, 0))
                continue
            mine = one[unit]
            if id(mine) not in kinds:
                kinds[id(mine)] = (t, len(mine.tiles))
                tiles.append(mine.tiles)
                starts.append(mine.starts[1:] + r)
                rectangles.append(mine.rectangles)
                t, r = t + len(mine.tiles), r + len(mine.rectangles)
            spans.append(kinds[id(mine)])
        arrays = (np.array(spans, np.int32), *map(np.concatenate, (tiles, starts, rectangles)))
        largest = max(count for _, count in spans)
        tables: list[Any] = [torch.from_numpy(x).to(device, non_blocking=True) for x in arrays]
        found.append(Tables(*tables, largest))  # type: ignore[call-arg]
    return found
