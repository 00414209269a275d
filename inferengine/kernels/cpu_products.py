"""Batched matrix products of few queries with many keys or values on a CPU.

Decode attention is one small product for each row and KV head: a few queries, [M, D], by some hundred keys, [N, D].
MKL, which torch calls, copies both sides into blocks first and takes up to four times as long as numpy's OpenBLAS does
(docs/experiments.md). numpy has no bf16 and its products are computed on one thread: other types and more threads take
torch.
"""

from __future__ import annotations

import numpy as np
import torch

MOST_QUERIES = 16  # M up to which OpenBLAS was faster
MOST_SCORES = 1200  # M * N of one product with keys: beyond, OpenBLAS copies both sides, as MKL does
MOST_NUMBERS = 1 << 15  # N * D of one product of one query: beyond, OpenBLAS takes more threads
MOST_PRODUCTS = 1 << 18  # M * N * D of any other: likewise
MOST_THREADS = 2  # of torch, up to which one thread of numpy is faster


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's numbers in fp32: itself where it has that type."""
    return (tensor if tensor.dtype == torch.float32 else tensor.float()).numpy()


def products_with_keys(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return queries [B, M, D] times keys [B, N, D], as [B, M, N], in fp32."""
    num_queries, num_keys, width = queries.shape[1], keys.shape[1], keys.shape[2]
    if not _suits_numpy(num_queries):
        by_torch: np.ndarray = torch.bmm(torch.from_numpy(queries), torch.from_numpy(keys).transpose(1, 2)).numpy()
        return by_torch
    most = MOST_NUMBERS // width
    if num_queries > 1:
        most = min(MOST_PRODUCTS // (num_queries * width), MOST_SCORES // num_queries)
    scores: np.ndarray = np.empty((len(queries), num_queries, num_keys), dtype=np.float32)
    for first in range(0, num_keys, most):
        some = slice(first, first + most)
        np.matmul(queries, keys[:, some].transpose(0, 2, 1), out=scores[:, :, some])
    return scores


def products_with_values(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return weights [B, M, N] times values [B, N, D], as [B, M, D], in fp32."""
    num_queries, num_keys, width = weights.shape[1], values.shape[1], values.shape[2]
    if not _suits_numpy(num_queries):
        by_torch: np.ndarray = torch.bmm(torch.from_numpy(weights), torch.from_numpy(values)).numpy()
        return by_torch
    most = MOST_NUMBERS // width if num_queries == 1 else MOST_PRODUCTS // (num_queries * width)
    mixed: np.ndarray = np.matmul(weights[:, :, :most], values[:, :most])
    for first in range(most, num_keys, most):
        some = slice(first, first + most)
        mixed += np.matmul(weights[:, :, some], values[:, some])
    return mixed


def scores_of(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Do `products_with_keys` for tensors of any type."""
    if queries.dtype != torch.float32:
        return torch.bmm(queries, keys.transpose(1, 2))
    return torch.from_numpy(products_with_keys(queries.numpy(), keys.numpy()))


def mixed_of(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Do `products_with_values` for tensors of any type."""
    if weights.dtype != torch.float32:
        return torch.bmm(weights, values)
    return torch.from_numpy(products_with_values(weights.numpy(), values.numpy()))


def _suits_numpy(num_queries: int) -> bool:
    return num_queries <= MOST_QUERIES and torch.get_num_threads() <= MOST_THREADS
