"""Probability maps: how a row of attention scores becomes a row of weights.

Papers: Yun et al. 2020, "O(n) Connections are Expressive Enough", section 3 and appendix B (the maps and
their definitions); Correia et al. 2019, "Adaptively Sparse Transformers" (alpha learned per head); Martins &
Astudillo 2016 (sparsemax); Peters et al. 2019 (alpha-entmax).

For a row v with simplex D = {p >= 0, sum p = 1}:

    softmax         p_j ~ exp(v_j)
    topk            softmax over the k largest entries
    sparselin-gen   argmin_{p in D} |p - v|^2 - lam |p|^2 = sparsemax(v / (1 - lam)),   0 <= lam < 1
    entmax          argmax_{p in D} p.v + H_alpha(p) = (beta v_j - tau)_+^(1/beta),     beta = alpha - 1 >= 0
    hardmax         one-hot of the first maximum (for analysis)

Every map sees rows shifted so that their maximum is 0: none of them depends on a shift, and it makes large
scores harmless. Then tau, with p_max = (-tau)^(1/beta) <= 1, lies between -1 and 0.
"""

from numbers import Integral, Real

import torch
from torch import Tensor, nn

MAPS = ("softmax", "topk", "sparselin-gen", "entmax", "hardmax")

_INF = float("inf")


class ProbabilityMap(nn.Module):
    """Scores (..., S) to weights (..., S) along the last dimension.

    ``mask`` (bool, True = allowed, broadcastable to the scores) and scores of -inf say what is disallowed.
    Weights are non-negative, sum to 1 on rows with an allowed entry, and are exactly 0 on disallowed entries
    and on rows with none. What stands at a disallowed place, NaN included, reaches neither the weights nor a
    gradient. A NaN or +inf at an *allowed* place puts NaN into its row, as in ``torch.softmax``, rather than
    a plausible wrong answer.

    float16 and bfloat16 are computed in float32 and cast back. A subclass implements ``weigh``.
    """

    #: whether the map may put exact zeros on allowed entries (rounding to zero apart)
    sparse: bool = True

    def weigh(self, z: Tensor) -> Tensor:
        """Weights of rows z (..., S) in float32 or float64: maximum 0, disallowed entries -inf."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        _check_inputs(scores, mask)
        if scores.shape[-1] == 0:  # every row is empty, and amax has no value for it
            return scores.clone()
        z = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores  # (..., S)
        disallowed = z == -_INF  # (..., S)
        if mask is not None:
            disallowed = disallowed | ~mask
        z = z.masked_fill(disallowed, -_INF)
        peak = z.detach().amax(-1, keepdim=True)  # (..., 1); a constant: no map depends on a shift
        z = (z - peak).masked_fill(peak == -_INF, 0.0)  # an empty row becomes uniform: -inf + inf is NaN
        return self.weigh(z).masked_fill(disallowed, 0.0).to(scores.dtype)


class Softmax(ProbabilityMap):
    """p_j = exp(v_j) / sum_i exp(v_i)."""

    sparse = False

    def weigh(self, z: Tensor) -> Tensor:
        return z.softmax(-1)


class TopK(ProbabilityMap):
    """Softmax over the k largest allowed entries; all of them if there are no more than k.

    Exactly k are kept: among equal scores the first ones, so that the result does not depend on a sorting
    algorithm and k = 1 is the hardmax. The gradient is that of the softmax on the kept entries.
    """

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def weigh(self, z: Tensor) -> Tensor:
        order = z.detach().sort(dim=-1, descending=True, stable=True).indices  # (..., S)
        dropped = torch.zeros_like(z, dtype=torch.bool).scatter(-1, order[..., self.topk :], True)
        return z.masked_fill(dropped, -_INF).softmax(-1)

    def extra_repr(self) -> str:
        return f"topk={self.topk}"


class SparselinGen(ProbabilityMap):
    """argmin_{p in D} |p - v|^2 - lam |p|^2, which is a sparsemax at temperature 1 - lam.

    Completing the square, |p - v|^2 - lam |p|^2 = (1 - lam) |p - v / (1 - lam)|^2 + terms without p. As
    1 - lam is positive, the minimiser is the Euclidean projection of v / (1 - lam) on the simplex, which is
    sparsemax(v / (1 - lam)).
    """

    def __init__(self, lam: float) -> None:
        super().__init__()
        self.lam = lam

    def weigh(self, z: Tensor) -> Tensor:
        return _entmax(z / (1.0 - self.lam), 1.0)

    def extra_repr(self) -> str:
        return f"lam={self.lam}"


class Entmax(ProbabilityMap):
    """alpha-entmax for a fixed alpha >= 1: 1 is the softmax, 2 the sparsemax, and the larger the sparser.

    The gradient at the edge of the support grows with alpha > 2 (it is p^(2 - alpha)); it saturates at e^40.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    @property
    def sparse(self) -> bool:
        return self.alpha > 1

    def weigh(self, z: Tensor) -> Tensor:
        return z.softmax(-1) if self.alpha == 1 else _entmax(z, self.alpha - 1.0)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class LearnedEntmax(ProbabilityMap):
    """alpha-entmax with alpha = 1 + sigmoid(a) in (1, 2), one a per head; it starts at alpha = 1.5.

    Scores are (B, H, ..., S) with the heads in dimension 1.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(num_heads))  # (H,)

    @property
    def alpha(self) -> Tensor:
        """The present alpha of each head, (H,), detached."""
        return 1.0 + self.logit.detach().sigmoid()

    def weigh(self, z: Tensor) -> Tensor:
        if z.dim() < 3 or z.shape[1] != self.logit.shape[0]:
            raise ValueError(
                f"scores have shape {tuple(z.shape)}: alpha='learn' with num_heads={self.logit.shape[0]} "
                f"needs (B, {self.logit.shape[0]}, ..., S)"
            )
        # sigmoid is alpha - 1 without the rounding of a sum; at eps the map is the softmax to rounding
        beta = self.logit.to(z.dtype).sigmoid().clamp(min=torch.finfo(z.dtype).eps)  # (H,)
        return _entmax(z, beta.view(-1, *[1] * (z.dim() - 2)))  # beta (H, 1, ..., 1)

    def extra_repr(self) -> str:
        return f"alpha=learn, num_heads={self.logit.shape[0]}"


class Hardmax(ProbabilityMap):
    """One-hot of the first maximum. Piecewise constant, so its gradient is zero everywhere: for analysis."""

    def weigh(self, z: Tensor) -> Tensor:
        top = torch.zeros_like(z, dtype=torch.bool).scatter(-1, z.detach().argmax(-1, keepdim=True), True)
        # at the maximum z is 0, or NaN in a bad row; round keeps that and has a zero gradient
        return torch.where(top, 1.0 + z.round(), 0.0)


def probability_map(
    name: str,
    *,
    topk: int | None = None,
    lam: float = 0.0,
    alpha: float | str = 1.5,
    num_heads: int | None = None,
) -> ProbabilityMap:
    """The map called ``name``, one of ``MAPS``.

    ``topk`` (int >= 1) belongs to topk, ``lam`` (0 <= lam < 1) to sparselin-gen, ``alpha`` (>= 1, or "learn",
    which needs ``num_heads``) to entmax. A caller may hold all four: each value is checked whatever the map,
    and the ones that belong to another map are not used.
    """
    _check_values(topk, lam, alpha, num_heads)
    if name == "softmax":
        return Softmax()
    if name == "topk":
        if topk is None:
            raise ValueError("topk is None; the map 'topk' needs an integer >= 1")
        return TopK(int(topk))
    if name == "sparselin-gen":
        return SparselinGen(float(lam))
    if name == "entmax" and alpha == "learn":
        if num_heads is None:
            raise ValueError("num_heads is None; alpha='learn' needs the number of heads, an integer >= 1")
        return LearnedEntmax(int(num_heads))
    if name == "entmax":
        return Entmax(float(alpha))
    if name == "hardmax":
        return Hardmax()
    raise ValueError(f"name is {name!r}; the probability maps are {', '.join(MAPS)}")


def _check_values(topk, lam, alpha, num_heads) -> None:
    for argument, value in (("topk", topk), ("num_heads", num_heads)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1):
            raise ValueError(f"{argument} is {value!r}; it must be an integer >= 1, or None")
    if isinstance(lam, bool) or not isinstance(lam, Real) or not 0 <= float(lam) < 1:
        raise ValueError(f"lam is {lam!r}; it must be a number with 0 <= lam < 1")
    real_alpha = isinstance(alpha, Real) and not isinstance(alpha, bool)
    if alpha != "learn" and not (real_alpha and 1 <= float(alpha) < _INF):
        raise ValueError(f"alpha is {alpha!r}; it must be a finite number >= 1, or 'learn'")


def _check_inputs(scores: Tensor, mask: Tensor | None) -> None:
    if scores.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"scores are {scores.dtype}; they must be float16, bfloat16, float32 or float64")
    if scores.dim() == 0:
        raise ValueError("scores have no dimension; they must be (..., S)")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}; it must be bool, True where attention is allowed")
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or any(m != 1 and m != s for m, s in sizes):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must broadcast to the scores' {tuple(scores.shape)}")


def _entmax(z: Tensor, beta: float | Tensor) -> Tensor:
    """(1 + beta)-entmax of rows z (..., S) with maximum 0; beta > 0: a number or a tensor broadcast to z."""
    if isinstance(beta, Tensor):
        return _solve(z, beta, "bisect")
    return _solve(z, z.new_full((), beta), {0.5: "entmax15", 1.0: "sparsemax"}.get(beta, "bisect"))


@torch.library.custom_op("subquad::entmax", mutates_args=())
def _solve(z: Tensor, beta: Tensor, method: str) -> Tensor:
    """The weights, with a gradient from their optimality conditions rather than from the way they were found.

    One operator for autograd and for ``torch.compile``, which would otherwise unroll the bisection.
    """
    if method == "bisect":
        weights = _bisect(z, beta)  # (..., S)
    else:
        weights = {"entmax15": _entmax15, "sparsemax": _sparsemax}[method](z)
    return (weights / weights.sum(-1, keepdim=True)).contiguous()


@_solve.register_fake
def _(z: Tensor, beta: Tensor, method: str) -> Tensor:
    return z.new_empty(z.shape)


def _sparsemax(z: Tensor) -> Tensor:
    """(z - tau)_+ : the support is the longest prefix of the sorted row with 1 + k z_k > z_1 + ... + z_k."""
    ordered = z.sort(-1, descending=True).values  # (..., S)
    sums = ordered.cumsum(-1)
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)  # (S,)
    size = (1.0 + k * ordered > sums).sum(-1, keepdim=True).clamp(min=1)  # (..., 1); a NaN row counts 0
    tau = (sums.gather(-1, size - 1) - 1.0) / size  # (..., 1)
    return (z - tau).clamp(min=0.0)


def _entmax15(z: Tensor) -> Tensor:
    """(z/2 - tau)_+^2 : on a support of size k, tau = mean - sqrt((1 - k variance) / k), a root of sum p = 1.

    The support is the longest prefix of the sorted row whose tau lies at or below its last entry.
    """
    z = z / 2.0  # (..., S)
    ordered = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)  # (S,)
    mean = ordered.cumsum(-1) / k
    variance = ordered.square().cumsum(-1) / k - mean.square()
    taus = mean - (1.0 / k - variance).clamp(min=0.0).sqrt()  # (..., S)
    size = (taus <= ordered).sum(-1, keepdim=True).clamp(min=1)  # (..., 1); a NaN row counts 0
    tau = taus.gather(-1, size - 1)  # (..., 1)
    rest = (z - tau).clamp(min=0.0)
    # one Newton step: on long rows the variance and the root of a small difference cost half of the digits
    tau = tau + (rest.square().sum(-1, keepdim=True) - 1.0) / (2.0 * rest.sum(-1, keepdim=True))
    return (z - tau).clamp(min=0.0).square()


def _bisect(z: Tensor, beta: Tensor) -> Tensor:
    """(beta z - tau)_+^(1/beta) by bisection of u = log p_max, which lies between -log S and 0.

    With tau = -p_max^beta the weights are p = exp(u + log1p(-r) / beta), r = min(1, -beta z exp(-beta u)),
    and their sum grows with u. Unlike the power of a difference this keeps its digits as beta goes to 0,
    where it becomes exp(u + z), and neither overflows nor underflows for a large beta.
    """
    log_cost = (z * -beta).log()  # (..., S), -inf at the maximum

    def weights(u: Tensor) -> Tensor:
        ratio = (log_cost - beta * u).exp().clamp(max=1.0)  # (..., S)
        return (u + (-ratio).log1p() / beta).exp()

    high = torch.zeros_like(z[..., :1])  # (..., 1)
    low = torch.full_like(high, z.shape[-1]).log().neg()
    for _ in range(60 if z.dtype == torch.float64 else 30):  # log(S) 2^-iterations is below the rounding of u
        middle = (low + high) / 2.0
        above = weights(middle).sum(-1, keepdim=True) > 1.0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return weights(high)


def _save_weights(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _implicit_gradient(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    """Gradients in z and beta from the weights p alone.

    Differentiating p^beta = beta z - tau and sum p = 1 on the support, with s = p^(1-beta) and q = s / sum s:

        dp_i / dz_j   = s_i ([i = j] - q_j)
        dp_i / dbeta  = (p_i - q_i) / beta^2 - (p_i L_i + q_i H) / beta,        L = log p,  H = -sum p L
                      = p_i / Z (E (1 - beta L_i) - e_i (1 + beta H)),          e = (exp(x) - 1 - x) / beta^2,
                                                          x = -beta L,  E = sum p e,  Z = sum p exp(x) = sum s

    The second form of the latter (the first is that of Correia et al.) has no cancellation as beta goes to 0.
    Both are written in differentiable operations on the output, so second derivatives are right as well.
    """
    p, beta = ctx.saved_tensors
    outside = p == 0
    log_p = p.masked_fill(outside, 1.0).log()  # (..., S)
    # the clamp acts for alpha > 2 only, where the slope is unbounded: it keeps the gradient finite
    s = ((1.0 - beta) * log_p).clamp(max=40.0).exp().masked_fill(outside, 0.0)  # (..., S)
    grad_z = s * (grad - (s * grad).sum(-1, keepdim=True) / s.sum(-1, keepdim=True))
    if not ctx.needs_input_grad[1]:
        return grad_z, None, None
    e = _exp_remainder(log_p, beta)  # (..., S)
    mean_e = (p * e).sum(-1, keepdim=True)  # (..., 1)
    entropy = -(p * log_p).sum(-1, keepdim=True)
    slope = p / s.sum(-1, keepdim=True) * (mean_e * (1.0 - beta * log_p) - e * (1.0 + beta * entropy))
    return grad_z, (grad * slope).sum_to_size(beta.shape), None


_solve.register_autograd(_implicit_gradient, setup_context=_save_weights)


def _exp_remainder(log_p: Tensor, beta: Tensor) -> Tensor:
    """(exp(x) - 1 - x) / beta^2 at x = -beta log_p >= 0; a Taylor sum where the difference would cancel."""
    x = -beta * log_p
    series = log_p.square() / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0))))
    return torch.where(x < 0.03, series, (x.expm1() - x) / beta.square())
