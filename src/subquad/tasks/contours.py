"""Pictures of dashed contours with two dots, for Pathfinder: joined or not, right by construction.

A picture holds two long contours of `contour` dashes and some short ones. A contour is a smooth curve: from dash to
dash its heading turns by an angle that itself drifts slowly. Two dots lie at ends of long contours: at both ends
of one (joined), or at one end of each (apart). Both classes are drawn alike in everything but that:

- the same number of contours, dashes and dots, and room for a dot is kept at all four long ends, dotted or not;
- the distance between the dots has one distribution. A picture of two dots apart takes its distance from the ends
  of a contour in a picture made for the purpose, and is drawn again until one of its four pairs has it.

Pixels decide what is joined. A pixel is lit from half intensity up. The next dash of a contour has a lit pixel
within `reach` of the one before (largest of |Δx|, |Δy|), and no two lit pixels of different contours, nor of
parts of one contour that are not neighbours, are that close. So a flood that jumps up to `reach` pixels from lit
pixel to lit pixel finds all of a contour and nothing else, and the label can be checked on the finished picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np

from subquad.core.hashing import GAMMA, mix

TURN = 0.6  # largest turn between two dashes, in radians
DRIFT = 0.22  # largest change of the turn
# How often we try: a dash, before its contour loses its last dashes; such losses, before the contour is begun again;
# beginnings, before the picture is begun again; pictures, before the distance of the dots is drawn again; distances,
# before we say that it cannot be done. And first contours that found no place in an empty picture, before we say so.
TRIES, RETREATS, BEGINNINGS, PICTURES, DISTANCES, ALONE = 12, 8, 100, 2000, 5, 20

_fast = numba.njit(cache=True, error_model="numpy")


@dataclass(frozen=True)
class Style:
    """The measures of a picture, in pixels: they grow with its size, from 32 up."""

    size: int

    @property
    def unit(self) -> float:
        return max(1.0, self.size / 32) ** 0.75

    @property
    def step(self) -> float:
        """From the start of a dash to the start of the next."""
        return 3 * self.unit

    @property
    def width(self) -> float:
        """Of a dash."""
        return 1 + (self.unit - 1) / 3

    @property
    def dash(self) -> float:
        """Length of the middle line of a dash; its round ends add half a width each, the gap is one unit."""
        return self.step - self.unit - self.width

    @property
    def radius(self) -> float:
        """Of a dot."""
        return 1.5 * self.unit

    @property
    def reach(self) -> int:
        """How far apart lit pixels of neighbouring dashes are at most, and those of strangers are not."""
        return math.ceil(self.unit) + 1

    def measures(self) -> tuple[float, float, float, float, int]:
        return self.step, self.dash, self.width, self.radius, self.reach


def picture(rng: np.random.Generator, size: int, contour: int, distractors: int, joined: bool) -> np.ndarray:
    """A picture (size, size), uint8, of two long contours, `distractors` short ones, and two dots, joined or not."""
    counts = np.array([contour, contour] + [max(2, contour // 3)] * distractors)
    style, state = Style(size), rng.integers(1 << 63, size=1, dtype=np.uint64)
    for _ in range(DISTANCES):
        strokes, dots, complete = contours(state, size, counts, True, -1.0, *style.measures())
        if complete and not joined:
            strokes, dots, complete = contours(state, size, counts, False, math.dist(*dots), *style.measures())
        if complete:
            return np.rint(255 * paint(strokes, dots, size, style.width, style.radius)).astype(np.uint8)
    raise ValueError(
        f"two contours of {contour} dashes and {distractors} distractors do not fit in a picture of size {size}: "
        f"take a smaller contour, fewer distractors or a larger size"
    )


@_fast
def _uniform(state):
    """The next random number in [0, 1): SplitMix64 (Steele et al. 2014), which compiles in no time."""
    state[0] += GAMMA
    return (mix(state[0]) >> np.uint64(11)) * (1.0 / (1 << 53))


@_fast
def _copy(values, row):
    """row[:] = values, which Numba compiles ten times as long."""
    for i in range(len(values)):
        row[i] = values[i]


@_fast
def contours(state, size, counts, joined, distance, step, dash, width, radius, reach):
    """Contours of counts[0], counts[1] … dashes that keep clear of each other; the first two with room for dots.

    Returns the dashes (sum of counts, 4) as x, y, x, y of their middle lines, the dots (2, 2), `distance` apart
    (within half a step) unless that is negative, and whether all contours found a place.
    """
    strokes = np.zeros((counts.sum(), 4))
    dots = np.zeros((2, 2))
    owner = np.empty((size, size), np.int32)  # which dash lights a pixel; the dashes are numbered through
    long, alone = counts[0], 0
    for _ in range(PICTURES):
        owner[:] = -1
        if not _place(state, owner, strokes, 0, long, step, dash, width, radius, reach):
            alone += 1
            if alone == ALONE:
                break
            continue
        if not _place(state, owner, strokes, long, long, step, dash, width, radius, reach):
            continue
        if not _dot(state, strokes, long, joined, distance, step / 2, dots):
            continue
        base, placed = 2 * long, True
        for count in counts[2:]:
            placed = placed and _place(state, owner, strokes, base, count, step, dash, width, 0.0, reach)
            base += count
        if placed:
            return strokes, dots, True
    return strokes, dots, False


@_fast
def _dot(state, strokes, contour, joined, distance, tolerance, dots):
    """Choose the ends where the dots are; False if no choice has the distance."""
    ends = (strokes[0, :2], strokes[contour - 1, 2:], strokes[contour, :2], strokes[2 * contour - 1, 2:])
    pairs = ((0, 1), (2, 3), (0, 1), (2, 3)) if joined else ((0, 2), (0, 3), (1, 2), (1, 3))
    first = int(4 * _uniform(state))
    for index in range(4):
        a, b = pairs[(first + index) % 4]
        _copy(ends[a], dots[0])
        _copy(ends[b], dots[1])
        between = math.hypot(dots[0, 0] - dots[1, 0], dots[0, 1] - dots[1, 1])
        if distance < 0 or abs(between - distance) < tolerance:
            return True
    return False


@_fast
def _place(state, owner, strokes, base, count, step, dash, width, room, reach):
    """Begin a contour until one grows to its full length."""
    for _ in range(BEGINNINGS):
        if _contour(state, owner, strokes, base, count, step, dash, width, room, reach):
            return True
        _forget(owner, base)
    return False


@_fast
def _contour(state, owner, strokes, base, count, step, dash, width, room, reach):
    """Grow one contour dash by dash; one that cannot go on loses its last dashes, a few times before it is given up."""
    edge = max(room, width)
    span = owner.shape[0] - 1 - 2 * edge
    poses = np.empty((count + 1, 4))  # before each dash: x and y of the end of the last one, heading, turn
    start = (edge + span * _uniform(state), edge + span * _uniform(state), 2 * math.pi * _uniform(state), 0.0)
    _copy(start, poses[0])
    number, retreats = 0, 0
    while number < count:
        ends = number == 0 or number == count - 1
        if _grow(state, owner, strokes, poses, base, number, step, dash, width, room if ends else 0.0, reach):
            number += 1
            continue
        retreats += 1
        number = max(number - 3, 0)
        _forget(owner, base + number)
        if number == 0 or retreats > RETREATS:
            return False
    return True


@_fast
def _grow(state, owner, strokes, poses, base, number, step, dash, width, room, reach):
    """Add dash `number` to a contour, and a dot of radius `room` if there is one; False if it finds no place."""
    x, y, heading, turn = poses[number, 0], poses[number, 1], poses[number, 2], poses[number, 3]
    for attempt in range(TRIES):
        drift = DRIFT * (1 + attempt / 4)  # a contour that runs into something turns harder
        bend = min(max(turn + drift * (2 * _uniform(state) - 1), -TURN), TURN)
        gap = (step - dash) * (0.85 + 0.3 * _uniform(state)) if number else 0.0
        angle = heading + bend
        left, top = x + gap * math.cos(heading + bend / 2), y + gap * math.sin(heading + bend / 2)
        stroke = (left, top, left + dash * math.cos(angle), top + dash * math.sin(angle))
        dot = (
            (stroke[0], stroke[1], stroke[0], stroke[1])
            if number == 0
            else (stroke[2], stroke[3], stroke[2], stroke[3])
        )
        if not _free(owner, stroke, width / 2, base, base + number, reach, True):
            continue
        if room and not _free(owner, dot, room, base, base + number, reach, False):
            continue
        _light(owner, stroke, width / 2, base + number)
        if room:
            _light(owner, dot, room, base + number)
        _copy(stroke, strokes[base + number])
        _copy((stroke[2], stroke[3], angle, bend), poses[number + 1])
        return True
    return False


@_fast
def _box(size, stroke, half):
    """The pixels that a stroke can light: rows and columns from, to."""
    top = max(math.floor(min(stroke[1], stroke[3]) - half), 0)
    bottom = min(math.ceil(max(stroke[1], stroke[3]) + half) + 1, size)
    left = max(math.floor(min(stroke[0], stroke[2]) - half), 0)
    right = min(math.ceil(max(stroke[0], stroke[2]) + half) + 1, size)
    return top, bottom, left, right


@_fast
def _distance(x, y, stroke):
    """From a point to the middle line of a stroke."""
    dx, dy = stroke[2] - stroke[0], stroke[3] - stroke[1]
    length = dx * dx + dy * dy
    share = ((x - stroke[0]) * dx + (y - stroke[1]) * dy) / length if length > 0 else 0.0
    share = min(max(share, 0.0), 1.0)
    return math.hypot(x - stroke[0] - share * dx, y - stroke[1] - share * dy)


@_fast
def _free(owner, stroke, half, base, number, reach, is_dash):
    """May dash `number` (of the contour whose first is `base`), or the dot at it, be here?

    It lies inside the picture; lit pixels within reach belong to it or to the dash before; and a dash is joined
    to the one before, with a dark pixel between them.
    """
    size = owner.shape[0]
    if min(stroke[0], stroke[1], stroke[2], stroke[3]) < half:
        return False
    if max(stroke[0], stroke[1], stroke[2], stroke[3]) > size - 1 - half:
        return False
    top, bottom, left, right = _box(size, stroke, half)
    nearest = reach + 1
    for row in range(top, bottom):
        for column in range(left, right):
            if _distance(column, row, stroke) > half:
                continue
            for r in range(max(row - reach, 0), min(row + reach + 1, size)):
                for c in range(max(column - reach, 0), min(column + reach + 1, size)):
                    other = owner[r, c]
                    if other < 0 or other == number:
                        continue
                    if other < base or other < number - 1:
                        return False
                    nearest = min(nearest, max(abs(r - row), abs(c - column)))
    return not is_dash or number == base or 1 < nearest <= reach


@_fast
def _light(owner, stroke, half, number):
    top, bottom, left, right = _box(owner.shape[0], stroke, half)
    for row in range(top, bottom):
        for column in range(left, right):
            if _distance(column, row, stroke) <= half:
                owner[row, column] = number


@_fast
def _forget(owner, base):
    """Darken the contour that begins at `base`, and nothing before it."""
    for row in range(owner.shape[0]):
        for column in range(owner.shape[1]):
            if owner[row, column] >= base:
                owner[row, column] = -1


@_fast
def paint(strokes, dots, size, width, radius):
    """Dashes (k, 4) and dots (m, 2) as a picture (size, size) of intensities 0 … 1; edges fade over one pixel."""
    image = np.zeros((size, size))
    for index in range(len(strokes) + len(dots)):
        if index < len(strokes):
            stroke, half = (strokes[index, 0], strokes[index, 1], strokes[index, 2], strokes[index, 3]), width / 2
        else:
            x, y = dots[index - len(strokes), 0], dots[index - len(strokes), 1]
            stroke, half = (x, y, x, y), radius
        top, bottom, left, right = _box(size, stroke, half + 1)
        for row in range(top, bottom):
            for column in range(left, right):
                shade = half + 0.5 - _distance(column, row, stroke)
                image[row, column] = max(image[row, column], min(max(shade, 0.0), 1.0))
    return image
