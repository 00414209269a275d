"""The operations in plain torch, written for few calls: what CPUs run, and the definition that every kernel is tested
against. Attention is kernels/cpu.py, mixtures of experts are reference/moe.py.

Fused operations are written as what they are made of.

Sampling, in this order: penalties, bias, masks (allowed ids, stop ids below min_tokens); then, for rows with a
temperature, logits / T, top-k, top-p over what top-k left, min-p; then the Gumbel draw. Filters are thresholds: tokens
that tie with the last one kept are kept too, so that the outcome does not depend on the order of a sort. Random
numbers: docs/executor.md. Grammars' bit masks of allowed tokens and the log-probabilities of drawn tokens are here,
too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root mean square norm of the last dimension, in fp32 (Zhang and Sennrich 2019). x [..., E], weight
    [E]."""
    if x.dtype == weight.dtype == torch.float32 and x.is_cpu and x.numel() <= FEW_ROWS * x.shape[-1]:
        with np.errstate(all="ignore"):
            return torch.from_numpy(rms_norm_of_few(x.numpy(), weight.numpy(), eps))
    wide = x if x.dtype == torch.float32 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps, wide.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    normed = torch.mul(wide, scale)  # few operations: their number is what costs at batch 1
    return (normed if x.dtype == torch.float32 else normed.to(x.dtype)).mul_(weight)


FEW_ROWS = 16  # up to which numpy, whose calls cost less, is faster


def rms_norm_of_few(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Do `rms_norm` by numpy, which warns of what is no number: callers say whether it may."""
    if x.size == x.shape[-1] and eps > 0:  # a single row: its scale is a Python number
        row = x.reshape(-1)
        alone: np.ndarray = x * np.float32((float(row.dot(row)) / len(row) + eps) ** -0.5)
        alone *= weight
        return alone
    scale = np.vecdot(x, x)
    scale *= np.float32(1.0 / x.shape[-1])
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    normed: np.ndarray = x / scale[..., None]
    normed *= weight
    return normed


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual in place, and return (norm of the sum, residual). Both [T, E]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rms_norm_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    following: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """Add the norm of x to residual in place, both [T, E]; return the norm of the sum by the weight and eps of the norm
    that follows, or None where none does."""
    residual.add_(rms_norm(x, weight, eps))
    return None if following is None else rms_norm(residual, *following)


def norm_queries_keys(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
    """Norm the queries of packed qkv [T, Q + K + ...] in place, all of a token together, by q_weight [Q]; and likewise
    its keys by k_weight [K]."""
    queries, keys, _ = qkv.split([len(q_weight), len(k_weight), qkv.shape[1] - len(q_weight) - len(k_weight)], dim=1)
    queries.copy_(rms_norm(queries.contiguous(), q_weight, eps))
    keys.copy_(rms_norm(keys.contiguous(), k_weight, eps))


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return LayerNorm of x [T, E]."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of x [T, 2I], gate in the first half (Shazeer 2020)."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return gelu_tanh(x[:, :I]) * x[:, I:] of x [T, 2I]."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap) of x [N, V], in place (Gemma 2)."""
    return x.div_(cap).tanh_().mul_(cap)


def pack_linear(weight: torch.Tensor) -> Any:
    """Put a weight into the layout that the CPU reads fastest; `linear` takes what comes back.

    At small batches a matrix product is as fast as its weight is read. A weight that half precision holds exactly (any
    checkpoint stored as bf16 or fp16) is kept so and widened in registers, products and sums staying fp32: twice as
    fast as fp32 weights. Others are reordered for oneDNN. Neither takes one without values (a block of width 0).
    """
    if weight.dtype != torch.float32 or not weight.numel():
        return weight
    if "fbgemm" in torch.backends.quantized.supported_engines and _half_is_exact(weight):
        return torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)
    if torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
    return weight


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, in] @ weight[out, in].T + bias, for a weight as `pack_linear` left it."""
    if is_half(weight):
        with _PLAIN_CALL():
            out = half_linear(x, weight)
        return out if bias is None else out.add_(bias)
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return functional.linear(x, weight, bias)


# The operator without the detour through torch.ops, nor asking the packed weight, at the price of a C++ exception,
# whether it overrides torch functions: 4 us a call in place of 38, 25 times a step of the embedded model.
half_linear: Callable[..., torch.Tensor] = torch.ops.quantized.linear_dynamic_fp16.default._op
_PLAIN_CALL = torch._C.DisableTorchFunctionSubclass


def is_half(packed: Any) -> bool:
    """Return whether a weight that `pack_linear` left is FBGEMM's, for `half_linear`."""
    return not isinstance(packed, torch.Tensor)


HALF_MAX = 65504.0
LOST_BITS = 0x1FFF  # of fp32's fraction: those that fp16 has not
PIECE = 1 << 15  # values looked at together: few enough for the cache, and for torch to stay in this thread


def _half_is_exact(weight: torch.Tensor) -> bool:
    """Return whether fp16 holds every value; below its normal range the nearest multiple of 2^-24 will do."""
    pieces = weight.contiguous().view(-1).split(PIECE)
    return all(_is_short(piece) or _is_near_half(piece) for piece in pieces)


def _is_short(values: torch.Tensor) -> bool:
    """Return whether all values may have been stored as bf16 or fp16 in fp16's range: a quick test that reads them
    twice."""
    least, most = values.aminmax()
    if not -HALF_MAX <= float(least) <= float(most) <= HALF_MAX:
        return False
    return not bool(values.view(torch.int32).bitwise_and(LOST_BITS).any())


def _is_near_half(values: torch.Tensor) -> bool:
    return float((values.half().float() - values).abs().max()) <= 2.0**-25


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return linear(rms_norm(x)): x [T, E], gain [E], weight [out, E] -> [T, out]."""
    return linear(rms_norm(x, gain, eps), weight, bias)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """Add linear(x) to residual [T, out] in place, and return it."""
    return residual.add_(linear(x, weight, bias))


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add linear(x) to residual in place, and return both it and rms_norm(residual). A table may leave it out, or give
    None for the norm."""
    residual = linear_add(x, weight, bias, residual)
    return residual, rms_norm(residual, gain, eps)


def norm_gated_linear(
    x: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Return act(gate) * up of rms_norm(x), weight [2I, E] with the gate's rows first -> [T, I]; no gain: x is
    normed."""
    act = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}[activation]
    return act(linear(x, weight, bias) if gain is None else norm_linear(x, gain, eps, weight, bias))


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]: by byte of a mask, of each of its tokens


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a mask forbids to -inf, in place: `masks` [M, 1 + ceil(V / 32)] int32 are a row of logits [N, V] each,
    then its bits, of which bit t % 32 of word t // 32 stands for token t.

    By the smaller of each logit and its bound, looked up by the byte: torch's masked_fill takes 20 times as long as a
    minimum on a CPU, and unpacking bits twice as long as the look-up.
    """
    num_masks, vocab_size = len(masks), logits.shape[1]
    packed = np.ascontiguousarray(masks[:, 1:].numpy()).view(np.uint8)
    bounds = torch.from_numpy(_BOUNDS.take(packed, axis=0).reshape(num_masks, -1)[:, :vocab_size]).to(logits.dtype)
    rows = masks[:, 0]
    if num_masks == len(logits) and torch.equal(rows, torch.arange(num_masks, dtype=rows.dtype)):
        torch.minimum(logits, bounds, out=logits)
        return
    logits.index_copy_(0, rows.long(), torch.minimum(logits.index_select(0, rows), bounds))


# -- sampling ----------------------------------------------------------------------------------------------------------

# what a step needs
RANDOM, FILTER, PENALTY, BIAS, ALLOWED, MIN_TOKENS, LOGPROBS, BAD_WORDS, MASKED = (1 << bit for bit in range(9))


PROCESSED = PENALTY | BIAS | ALLOWED | MIN_TOKENS
FIRST_CANDIDATES = 256  # tried before longer lists, and those before a whole vocabulary is sorted
LONGER = 4  # times as long as the list before
NO_NUMBER = -1  # in place of an id: the winning score is NaN or infinite
NO_TOKEN = -2  # in place of an id: every token is forbidden
FEW = 16  # noise is made for what masks have left where that is less than a FEW-th of the vocabulary
LARGEST_UNIFORM = 1 - 2.0**-24  # words that round to 1 would give noise of -inf, as if their tokens were forbidden
LEAST_SAVED = 1 << 15  # numbers that are not needed, from which on a second, smaller draw pays for itself
_MASK = 0xFFFFFFFF
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def sample(logits: torch.Tensor, slots: Any, rows: torch.Tensor, positions: torch.Tensor, needs: int) -> torch.Tensor:
    """Draw ids [N] int32 from logits [N, V] of the slots `rows` [N], and write them to slots.tokens[row, position].

    `positions` [N] are those of the tokens drawn; `needs` are the feature bits that some row uses. A row without a
    finite winner gives NO_TOKEN where every score is -inf, else NO_NUMBER (and 0 in slots.tokens), and no row's numbers
    concern another. `logits` may be overwritten.
    """
    scores = logits if logits.dtype == torch.float32 else logits.float()
    if scores.is_cpu and not needs & (PROCESSED | RANDOM):
        return _sample_greedily(scores, slots, rows, positions)
    rows, positions = rows.long(), positions.long()
    if needs & PROCESSED:
        process(scores, slots, rows, positions, needs)
    if needs & RANDOM:
        best, ids = draw(scores, slots, rows, positions, needs)
    else:
        best, ids = _largest(scores)
    ids = ids.int()
    is_drawn = best.isfinite()
    if not bool(is_drawn.all()):
        slots.tokens[rows, positions] = ids.masked_fill(~is_drawn, 0)
        return torch.where(is_drawn, ids, torch.where(best == float("-inf"), NO_TOKEN, NO_NUMBER).int())
    slots.tokens[rows, positions] = ids
    return ids


def _sample_greedily(scores: torch.Tensor, slots: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw as `sample` does, for rows of temperature 0 on the CPU, in few operations."""
    best, drawn = (found.numpy() for found in _largest(scores))
    ids = drawn.astype(np.int32)
    is_drawn = np.isfinite(best)
    if not is_drawn.all():
        slots.tokens.numpy()[rows.numpy(), positions.numpy()] = np.where(is_drawn, ids, 0)
        return torch.from_numpy(
            np.where(is_drawn, ids, np.where(best == -np.inf, NO_TOKEN, NO_NUMBER).astype(np.int32))
        )
    slots.tokens.numpy()[rows.numpy(), positions.numpy()] = ids
    return torch.from_numpy(ids)


def _largest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (value, id) of each row's largest: the first of equal ones, or a NaN. numpy is ten times as fast as
    torch."""
    if not scores.is_cpu:
        best, ids = scores.max(-1)
        return best, ids
    values = scores.numpy()
    places = values.argmax(1)
    return torch.from_numpy(values[np.arange(len(places)), places]), torch.from_numpy(places)


def process(scores: torch.Tensor, slots: Any, rows: torch.Tensor, positions: torch.Tensor, needs: int) -> None:
    """Apply penalties, bias and masks in place to scores [N, V]."""
    if needs & PENALTY:
        _penalize(scores, slots, rows, positions)
    if needs & BIAS:
        ids = slots.bias_ids[rows].long()
        scores.scatter_add_(1, ids.clamp_min(0), slots.bias_values[rows].masked_fill(ids < 0, 0.0))
    if needs & ALLOWED:
        bits = slots.allowed[rows].unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=scores.device)
        scores.masked_fill_((bits & 1).flatten(1)[:, : scores.shape[1]] == 0, float("-inf"))
    if needs & MIN_TOKENS:
        early = positions < slots.num_prompt[rows] + slots.min_tokens[rows]
        ids = slots.stop_ids[rows].long().masked_fill(~early.unsqueeze(1), -1)
        hidden = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
        hidden.scatter_(1, torch.where(ids < 0, scores.shape[1], ids), True)
        scores.masked_fill_(hidden[:, :-1], float("-inf"))


def draw(
    scores: torch.Tensor, slots: Any, rows: torch.Tensor, positions: torch.Tensor, needs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (winning score, id) of each row: the argmax for rows of temperature 0, else the Gumbel draw."""
    temperature = slots.temperature[rows].unsqueeze(1)
    is_random = temperature > 0
    scaled = scores / torch.where(is_random, temperature, 1.0)
    if needs & FILTER:
        top_k = torch.where(is_random.squeeze(1), slots.top_k[rows], 1)  # a greedy row needs no long list
        values, ids = candidates(scaled, top_k, slots.top_p[rows], slots.min_p[rows])
        best, place = _largest(values + _noise_of(slots.seed[rows], positions, ids, scores.shape[1]))
        drawn = ids.gather(1, place.unsqueeze(1)).squeeze(1)
    elif needs & (ALLOWED | MASKED) and scores.is_cpu:
        best, drawn = _draw_what_is_left(scaled, slots.seed[rows], positions)
    else:
        best, drawn = _largest(scaled + gumbel(slots.seed[rows], positions, scores.shape[1]))
    is_random = is_random.squeeze(1)
    if scores.is_cpu and is_random.all():
        return best, drawn
    top, top_id = _largest(scores)
    return torch.where(is_random, best, top), torch.where(is_random, drawn, top_id)


def _noise_of(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel noise [N, C] for the ids. A block of Philox is of four neighbours: for many ids the noise is made
    for the whole vocabulary, which gives the same numbers."""
    if ids.shape[1] * 4 < vocab_size:
        return gumbel(seeds, positions, ids)
    return gumbel(seeds, positions, vocab_size).gather(1, ids)


def _draw_what_is_left(
    scaled: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Gumbel draw of rows that masks have been applied to. The noise is most of the work: rows of few tokens
    get no more than they need, which is the same as for the whole vocabulary."""
    left = scaled.numpy() != -np.inf  # true for what is no number too
    num_left = np.array([np.count_nonzero(row) for row in left])
    is_few = num_left * FEW <= scaled.shape[1]
    if np.count_nonzero(is_few) * scaled.shape[1] < LEAST_SAVED:
        return _largest(scaled + gumbel(seeds, positions, scaled.shape[1]))
    few, many = np.flatnonzero(is_few), np.flatnonzero(~is_few)
    best, drawn = torch.empty(len(left)), torch.empty(len(left), dtype=torch.int64)
    if len(many):
        rows = torch.from_numpy(many)
        noise = gumbel(seeds[rows], positions[rows], scaled.shape[1])
        best[rows], drawn[rows] = _largest(noise.add_(scaled.index_select(0, rows)))
    row, token = np.nonzero(left[few])
    column = np.arange(len(row)) - np.searchsorted(row, row)
    ids = np.zeros((len(few), max(1, num_left[few].max())), dtype=np.int64)
    ids[row, column] = token
    values = np.full(ids.shape, -np.inf, dtype=np.float32)
    values[row, column] = scaled.numpy()[few[row], token]
    rows = torch.from_numpy(few)
    noise = gumbel(seeds[rows], positions[rows], torch.from_numpy(ids))
    best[rows], place = _largest(noise.add_(torch.from_numpy(values)))
    drawn[rows] = torch.from_numpy(ids[np.arange(len(few)), place.numpy()])
    return best, drawn


def candidates(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best tokens of every row, [N, C] values (-inf where filtered out) and ids: at least all that pass.

    Tries a short list first: it suffices when every row's filters end within it. Ids are ascending among equal values.
    """
    vocab_size = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp_max(vocab_size).unsqueeze(1).long()
    share = torch.where(top_p < 1.0, top_p, torch.inf)  # the mass of all may round to more than 1
    count = min(FIRST_CANDIDATES, vocab_size)
    while True:
        if count < vocab_size:
            values, ids = scaled.topk(count, dim=-1)
        else:
            values, ids = scaled.sort(dim=-1, descending=True, stable=True)
        count = values.shape[1]
        at_k = values.gather(1, limit.clamp_max(count) - 1)
        within_k = (limit > count) | (values >= at_k)
        by_k = values.masked_fill(~within_k, float("-inf"))
        # mass of what top-k leaves: of the whole vocabulary where top-k is off
        total = torch.where(limit > count, scaled.logsumexp(-1, keepdim=True), by_k.logsumexp(-1, keepdim=True))
        mass = (by_k - total).exp()
        before = mass.cumsum(-1) - mass
        kept = before.gather(1, _first_of_ties(values)) < share.unsqueeze(1)  # ties stand or fall together
        kept &= within_k & (values - values[:, :1] >= min_p.unsqueeze(1).log())
        kept[:, 0] = True
        # where top-k ends behind this list, the mass that top-p is a share of is not known yet
        goes_on = kept[:, -1] | (((limit > count) & (limit < vocab_size)).squeeze(1) & (top_p < 1.0))
        if count == vocab_size or not bool(goes_on.any()):
            return values.masked_fill(~kept, float("-inf")), ids
        if count * LONGER * LONGER > vocab_size:
            count = vocab_size  # sorting it all is hardly dearer than a longer list
            continue
        # What top-k says, or the least that can reach top-p's mass: no later token weighs more than the list's last.
        needed = torch.where(limit < vocab_size, limit, count + (top_p.unsqueeze(1) - before[:, -1:]) / mass[:, -1:])
        count = _next_count(count, float(needed.squeeze(1)[goes_on].max()), vocab_size)


def _next_count(count: int, needed: float, vocab_size: int) -> int:
    """Return the length of the list to try after one of `count`, at least `needed`: a longer list, or the whole
    vocabulary."""
    while count * LONGER * LONGER <= vocab_size:
        count *= LONGER
        if count >= needed:
            return count
    return vocab_size


def _first_of_ties(values: torch.Tensor) -> torch.Tensor:
    """Return the place of the first of the values equal to each, in rows that descend [N, C]."""
    if not values.is_cpu:
        return torch.searchsorted(-values, -values).clamp_(
            max=values.shape[1] - 1
        )  # NaN's place may be behind the last
    row = values.numpy()
    places = np.zeros(row.shape, dtype=np.int64)
    np.multiply(row[:, 1:] != row[:, :-1], np.arange(1, row.shape[1]), out=places[:, 1:])
    return torch.from_numpy(np.maximum.accumulate(places, axis=1, out=places))


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise [N, V] for the whole vocabulary (`tokens` = V), or [N, C] for the given ids."""
    if isinstance(tokens, int):
        blocks = torch.arange(-(-tokens // 4), device=seeds.device).unsqueeze(0)
    else:
        blocks = tokens // 4
    if seeds.is_cuda:
        four = torch.stack(philox(seeds, positions, blocks), -1).float()
    else:
        four = torch.from_numpy(philox_by_numpy(seeds, positions.long(), blocks))
    if isinstance(tokens, int):
        words = four.flatten(1)[:, :tokens]
    else:
        words = four.gather(-1, (tokens % 4).long().unsqueeze(-1)).squeeze(-1)
    uniform = words.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def philox(
    seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute Philox-4x32-10 (Salmon et al. 2011) with key `seeds` [N] and counter (block, position, 0, 0): four words
    in [0, 2^32) as int64, each [N, B]. Products wrap in int64, which leaves both halves right."""
    key0, key1 = (seeds & _MASK).unsqueeze(1), ((seeds >> 32) & _MASK).unsqueeze(1)
    c0, c1 = blocks, positions.unsqueeze(1)
    c2 = c3 = torch.zeros_like(c1)
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ key0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ key1
        c1, c3 = product1 & _MASK, product0 & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)  # not broadcast_shapes: it imports sympy, for seconds
    return c0, c1, c2, c3


def philox_by_numpy(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> np.ndarray:
    """Return the words of `philox` for tensors on the CPU: [N, B, 4] float32, each rounded from [0, 2^32).

    `seeds`, `positions` [N] int64, `blocks` [1 or N, B] int64. Torch takes eighty operations on a few kilobytes for
    them, a fifth of the time of a step of one sampled row. numpy's calls cost a third of that, in place, and its
    unsigned words need no masks after shifts.
    """
    num_rows, num_blocks = max(len(seeds), len(blocks)), blocks.shape[1]
    words = np.empty((num_rows, num_blocks, 4), dtype=np.float32)
    columns = max(1, min(num_blocks, BLOCKS_AT_ONCE))
    rows = BLOCKS_AT_ONCE // columns
    for row in range(0, num_rows, rows):
        some = slice(row, row + rows)
        of_rows = blocks if len(blocks) == 1 else blocks[some]
        for column in range(0, num_blocks, columns):
            part = slice(column, column + columns)
            _philox_words(seeds[some], positions[some], of_rows[:, part], words[some, part])
    return words


BLOCKS_AT_ONCE = 1 << 13  # of Philox: as many as a core's second cache holds with what is computed of them


def _philox_words(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, words: np.ndarray) -> None:
    """Do `philox_by_numpy` for a part of the words."""
    seed = seeds.numpy().view(np.uint64)
    key0, key1 = (seed & _LOW)[:, None], (seed >> _HALF)[:, None]
    c0, c1 = blocks.numpy().astype(np.uint64), positions.numpy().astype(np.uint64)[:, None]
    c2, c3 = np.zeros_like(c1), np.zeros_like(c1)
    full = np.broadcast_shapes(c0.shape, c1.shape)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        if all(word.shape == full for word in (product0, product1, c1, c3)):
            np.right_shift(product1, _HALF, out=c0)
            c0 ^= c1
            c0 ^= key0
            np.right_shift(product0, _HALF, out=c2)
            c2 ^= c3
            c2 ^= key1
            c1, c3 = product1, product0
            c1 &= _LOW
            c3 &= _LOW
        else:  # the first rounds: words that are the same for all blocks or all rows
            c0, c2 = (product1 >> _HALF) ^ c1 ^ key0, (product0 >> _HALF) ^ c3 ^ key1
            c1, c3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    for index, word in enumerate((c0, c1, c2, c3)):
        words[..., index] = word


def _penalize(scores: torch.Tensor, slots: Any, rows: torch.Tensor, positions: torch.Tensor) -> None:
    longest = int(positions.max())
    known = slots.tokens[rows, :longest].long()
    place = torch.arange(longest, device=scores.device)
    exists = place < positions.unsqueeze(1)
    is_output = exists & (place >= slots.num_prompt[rows].unsqueeze(1))
    seen = torch.zeros_like(scores).scatter_add_(1, known, exists.to(scores.dtype)) > 0
    repetition = slots.repetition_penalty[rows].unsqueeze(1)
    scores.copy_(torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores))
    counts = torch.zeros_like(scores).scatter_add_(1, known, is_output.to(scores.dtype))
    scores.sub_(counts * slots.frequency_penalty[rows].unsqueeze(1))
    scores.sub_((counts > 0) * slots.presence_penalty[rows].unsqueeze(1))


def token_logprobs(
    logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, most: int
) -> torch.Tensor:
    """Pack log-probabilities [N, 2 + 2 * most] int32 from logits [N, V] of the slots `rows` [N] and the drawn `ids`
    [N].

    In columns: the drawn token's log-probability, its rank (1 + the number of likelier tokens), the ids of the `most`
    likeliest tokens and their log-probabilities, equal ones by lower id. Log-probabilities are float32 bit patterns. A
    slot with a negative count did not ask: its rows hold anything. An id of -1 counts as 0.
    """
    out = torch.zeros(len(logits), 2 + 2 * most, dtype=torch.int32, device=logits.device)
    asked = counts[rows.long()] >= 0
    scores = logits[asked].float()
    top, top_ids = _likeliest(scores, most)
    drawn = scores.gather(1, ids[asked].long().clamp_min(0).unsqueeze(1))
    ranks = (scores > drawn).sum(-1, keepdim=True) + 1
    peak = scores.amax(-1, keepdim=True)
    log_mass = (scores - peak).exp_().sum(-1, keepdim=True).log_()
    logprobs = torch.cat([drawn, top], 1).sub_(peak).sub_(log_mass).view(torch.int32)
    out[asked] = torch.cat([logprobs[:, :1], ranks.int(), top_ids.int(), logprobs[:, 1:]], 1)
    return out


def _likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores, ids) [N, count] in falling order, equal ones by lower id."""
    top, ids = scores.topk(count, dim=-1)
    if count == 0:
        return top, ids
    if bool(((scores >= top[:, -1:]).sum(-1) > count).any()):  # which of the last equal ones topk takes is not defined
        top, ids = scores.sort(dim=-1, descending=True, stable=True)
        return top[:, :count], ids[:, :count]
    ids, order = ids.sort(dim=-1)
    top, places = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return top, ids.gather(1, places)
