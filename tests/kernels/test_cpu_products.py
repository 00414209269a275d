"""Products of few queries by numpy are what torch's batched products are, whatever their sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferengine.kernels import cpu_products

SIZES = [(1, 1, 64), (1, 700, 64), (3, 110, 64), (3, 900, 64), (5, 2500, 32), (16, 400, 256), (17, 90, 64)]


@pytest.mark.parametrize("threads", [1, 64], ids=["few threads", "many threads"])
@pytest.mark.parametrize(("num_queries", "num_keys", "width"), SIZES)
def test_products_equal_those_of_torch(num_queries, num_keys, width, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(4, num_queries, width, generator=generator)
    both = torch.randn(2, 4, num_keys + 9, width, generator=generator)[:, :, :num_keys]  # with room behind, as copies
    scores = cpu_products.products_with_keys(queries.numpy(), both[0].numpy())
    weights = torch.softmax(torch.from_numpy(scores), -1)
    mixed = cpu_products.products_with_values(weights.numpy(), both[1].numpy())
    expected = torch.bmm(queries, both[0].transpose(1, 2))
    torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(mixed), torch.bmm(weights, both[1]), rtol=1e-4, atol=1e-5)


def test_no_product_is_so_large_that_openblas_takes_more_threads(monkeypatch):
    """It does from 2^18 multiplications on, and from 9,216 * 4 of a product with a single row."""
    sizes = []

    def recorded(left, right, out=None, matmul=np.matmul):
        sizes.append((left.shape[1], left.shape[1] * left.shape[2] * right.shape[2]))
        return matmul(left, right, out=out) if out is not None else matmul(left, right)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cpu_products.np, "matmul", recorded)
    for num_queries in (1, 2, 16):
        for width in (8, 64, 256):
            queries, keys = np.ones((1, num_queries, width), np.float32), np.ones((1, 5000, width), np.float32)
            scores = cpu_products.products_with_keys(queries, keys)
            assert cpu_products.products_with_values(scores, keys).shape == queries.shape
    assert all(size <= (9216 * 4 if rows == 1 else 1 << 18) for rows, size in sizes)
