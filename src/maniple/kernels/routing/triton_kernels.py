"""The routing kernels: Triton's language alone, no torch, so that another framework can launch them.

`reference.py` has the exact semantics and the formulas. A program takes a few tokens; all experts of a token lie in the
lanes of one block. Selection compares integers that are ordered as the fp32 scores are: infinities and NaN need no rule
of their own, an expert that is out of the choice is below all scores, and equal scores are equal integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

_OUT = tl.constexpr(-(2**31))  # below the integer of every score: chosen already, of a dropped group, or no expert
_SIGN = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_SUM_FLOOR = tl.constexpr(1e-20)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_REST = tl.constexpr(1.9259629911266174e-8)  # what fp32 leaves out of it
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x):
    """e^x as 2^(x log2 e), with what rounding that product lost put back: to a few units of the last place."""
    product = x * _LOG2E
    rest = tl.fma(x, _LOG2E_REST, tl.fma(x, _LOG2E, -product))
    power = tl.exp2(product)
    # beyond, the power may be infinite and the rest NaN
    return tl.where(tl.abs(product) < 126, tl.fma(power, rest * _LN2, power), power)


@triton.jit
def sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1 + exp(-x))


@triton.jit
def order_of(x):
    """int32 that are ordered as fp32 x: -0 is 0, and NaN the highest."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & _SIGN
    order = tl.where(bits < 0, bits ^ _SIGN, bits)
    order = tl.where(magnitude == 0, 0, order)
    return tl.where(magnitude > _INFINITY, _SIGN, order)


@triton.jit
def value_of(order):
    """The inverse of `order_of`."""
    return tl.where(order < 0, order ^ _SIGN, order).to(tl.float32, bitcast=True)


@triton.jit
def best_of(order, names):
    """The name, int32 `[ROWS]`, of each row's highest; of equal ones the lowest name. Every row must have one."""
    best = tl.max(order, axis=1)
    return tl.min(tl.where(order == best[:, None], names[None, :], _SIGN), axis=1)


@triton.jit
def keep_groups(
    order,
    GROUP_TOPK: tl.constexpr,
    SUM_TOP2: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`order`, `[ROWS, GROUP_LANES * WIDTH]`, with the experts of all but the best groups out."""
    order = tl.reshape(order, (ROWS, GROUP_LANES, WIDTH))
    best = tl.max(order, axis=2)
    if SUM_TOP2:
        lanes = tl.arange(0, WIDTH)
        first = tl.min(tl.where(order == best[:, :, None], lanes[None, None, :], WIDTH), axis=2)
        second = tl.max(tl.where(lanes[None, None, :] == first[:, :, None], _OUT, order), axis=2)
        best = tl.where(best == _OUT, _OUT, order_of(value_of(best) + value_of(second)))
    groups = tl.arange(0, GROUP_LANES)
    kept = tl.zeros((ROWS, GROUP_LANES), dtype=tl.int32)
    for _ in range(GROUP_TOPK):
        hit = groups[None, :] == best_of(best, groups)[:, None]
        kept = tl.where(hit, 1, kept)
        best = tl.where(hit, _OUT, best)
    order = tl.where(kept[:, :, None] == 1, order, _OUT)
    return tl.reshape(order, (ROWS, GROUP_LANES * WIDTH))


@triton.jit
def lanes_of(EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Where each lane's expert lies in memory, and whether the lane has one."""
    lanes = tl.arange(0, GROUP_LANES * WIDTH)
    if GROUPS == 1:
        return lanes, lanes < EXPERTS
    else:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        groups, places = lanes // WIDTH, lanes % WIDTH
        return groups * SIZE + places, (groups < GROUPS) & (places < SIZE)


@triton.jit
def raw_scores(logits, SOFTMAX: tl.constexpr):
    """Scores before they are divided by their sum, the sum, and the highest logit; a lane of -inf adds nothing."""
    top = tl.max(logits, axis=1)
    if SOFTMAX:
        raw = exp(logits - top[:, None])
        return raw, tl.sum(raw, axis=1), top
    else:
        raw = sigmoid(logits)
        return raw, tl.sum(raw, axis=1) + _SUM_FLOOR, top


@triton.jit
def chosen_scores(logits, top, total, among, SOFTMAX: tl.constexpr, BEFORE: tl.constexpr):
    """Scores of the chosen `[ROWS, CHOSEN]`, zero where not `among`; their logits are -inf there."""
    if SOFTMAX:
        if not BEFORE:
            top = tl.max(logits, axis=1)
        scores = exp(logits - top[:, None])
        if BEFORE:
            scores = tl.div_rn(scores, total[:, None])
        else:
            scores = tl.div_rn(scores, tl.sum(scores, axis=1)[:, None])
    else:
        scores = sigmoid(logits)
    return tl.where(among, scores, 0.0)


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    logits_ptr,
    bias_ptr,
    given_ptr,
    ids_ptr,
    probs_ptr,
    scores_ptr,
    counts_ptr,
    T,
    logits_row,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    SUM_TOP2: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BEFORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """ids int64 and probs fp32 `[T, K]`, scores fp32 `[T, E]`; counts int64 `[E]` are added to.

    logits `[T, E]`, any float, rows `logits_row` apart; bias fp32 `[E]` or None; with given ids, int64 `[T, K]`, those
    are taken and ids are not written. The sum over programs is one of integers: it is the same in any order.
    """
    columns, valid = lanes_of(EXPERTS, GROUPS, GROUP_LANES, WIDTH)
    names = tl.where(valid, columns, _OUT)
    places = tl.arange(0, CHOSEN)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tokens < T
    rows = tl.minimum(tokens, T - 1).to(tl.int64)  # past the last one it is done again, and not stored
    logits_rows = logits_ptr + rows[:, None] * logits_row
    logits = tl.load(logits_rows + columns[None, :], mask=valid[None, :], other=float("-inf")).to(tl.float32)
    raw, total, top = raw_scores(logits, SOFTMAX)
    scores = tl.div_rn(raw, total[:, None])
    mask = inside[:, None] & valid[None, :]
    tl.store(scores_ptr + rows[:, None] * EXPERTS + columns[None, :], scores, mask=mask)

    hits = tl.zeros((ROWS, GROUP_LANES * WIDTH), dtype=tl.int32)
    order = tl.zeros((ROWS, GROUP_LANES * WIDTH), dtype=tl.int32)
    if given_ptr is None:
        if not BEFORE:
            selection = logits
        elif SOFTMAX:
            selection = scores
        else:
            selection = raw
        if bias_ptr is not None:
            selection += tl.load(bias_ptr + columns, mask=valid, other=0.0)[None, :]
        order = tl.where(valid[None, :], order_of(selection), _OUT)
        if GROUPS > 1:
            order = keep_groups(order, GROUP_TOPK, SUM_TOP2, ROWS, GROUP_LANES, WIDTH)
    ids = tl.zeros((ROWS, CHOSEN), dtype=tl.int32)
    for k in range(TOPK):
        if given_ptr is None:
            chosen = best_of(order, names)
        else:
            chosen = tl.load(given_ptr + rows * TOPK + k).to(tl.int32)
        hit = names[None, :] == chosen[:, None]
        order = tl.where(hit, _OUT, order)
        hits += (hit & inside[:, None]).to(tl.int32)
        ids = tl.where(places[None, :] == k, chosen[:, None], ids)

    among = (places < TOPK)[None, :] & (ids >= 0) & (ids < EXPERTS)
    chosen_logits = tl.load(logits_rows + ids, mask=among, other=float("-inf")).to(tl.float32)
    weights = chosen_scores(chosen_logits, top, total, among, SOFTMAX, BEFORE)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.sum(weights, axis=1)[:, None] + _SUM_FLOOR)
    offsets = rows[:, None] * TOPK + places[None, :]
    mask = inside[:, None] & (places < TOPK)[None, :]
    tl.store(probs_ptr + offsets, weights * scale, mask=mask)
    if given_ptr is None:
        tl.store(ids_ptr + offsets, ids.to(tl.int64), mask=mask)
    counts = tl.sum(hits, axis=0)
    tl.atomic_add(counts_ptr + columns, counts.to(tl.int64), mask=valid & (counts > 0), sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    logits_ptr,
    ids_ptr,
    grad_probs_ptr,
    grad_scores_ptr,
    out_ptr,
    T,
    logits_row,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BEFORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """The gradient of logits, `[T, E]` contiguous, from that of probs `[T, K]` and of scores `[T, E]`; each or None.

    Scores are computed again from the logits. With weights w = c / (sum c + floor), dc = (dw - sum(dw w)) / (sum c +
    floor); with s a softmax, dz = s (ds - sum(ds s)); with a a sigmoid, dz = da a (1 - a).
    """
    names = tl.arange(0, WIDTH)
    valid = names < EXPERTS
    places = tl.arange(0, CHOSEN)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(tokens, T - 1).to(tl.int64)
    logits_rows = logits_ptr + rows[:, None] * logits_row
    logits = tl.load(logits_rows + names[None, :], mask=valid[None, :], other=float("-inf")).to(tl.float32)
    raw, total, top = raw_scores(logits, SOFTMAX)
    grad = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    scores = tl.div_rn(raw, total[:, None])
    if grad_scores_ptr is not None:
        ptrs = grad_scores_ptr + rows[:, None] * EXPERTS + names[None, :]
        grad_scores = tl.load(ptrs, mask=valid[None, :], other=0.0)
        if not SOFTMAX:
            dot = tl.sum(grad_scores * scores, axis=1)
            grad = tl.div_rn(grad_scores - dot[:, None], total[:, None])
        elif BEFORE:
            grad = grad_scores
        else:
            grad = scores * (grad_scores - tl.sum(grad_scores * scores, axis=1)[:, None])
    if grad_probs_ptr is not None:
        offsets = rows[:, None] * TOPK + places[None, :]
        ids = tl.load(ids_ptr + offsets, mask=(places < TOPK)[None, :], other=-1).to(tl.int32)
        among = (ids >= 0) & (ids < EXPERTS)
        chosen_logits = tl.load(logits_rows + ids, mask=among, other=float("-inf")).to(tl.float32)
        chosen = chosen_scores(chosen_logits, top, total, among, SOFTMAX, BEFORE)
        grad_chosen = tl.load(grad_probs_ptr + offsets, mask=among, other=0.0) * scale
        if RENORMALIZE:
            whole = tl.sum(chosen, axis=1)[:, None] + _SUM_FLOOR
            dot = tl.sum(grad_chosen * tl.div_rn(chosen, whole), axis=1)
            grad_chosen = tl.div_rn(grad_chosen - dot[:, None], whole)
        if SOFTMAX and not BEFORE:
            grad_chosen = chosen * (grad_chosen - tl.sum(grad_chosen * chosen, axis=1)[:, None])
        for k in range(TOPK):
            expert = tl.load(ids_ptr + rows * TOPK + k).to(tl.int32)
            here = tl.sum(tl.where(places[None, :] == k, grad_chosen, 0.0), axis=1)
            grad += tl.where(names[None, :] == expert[:, None], here[:, None], 0.0)
    if not SOFTMAX:
        grad = grad * raw * (1 - raw)
    elif BEFORE:
        grad = scores * (grad - tl.sum(grad * scores, axis=1)[:, None])
    out = out_ptr + rows[:, None] * EXPERTS + names[None, :]
    tl.store(out, grad.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & valid[None, :])
