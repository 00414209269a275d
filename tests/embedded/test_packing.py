"""Documents into rows: nothing lost, nothing cut that fits, and short documents also at a row's start."""

from __future__ import annotations

from random import Random

import numpy

from scripts.embedded.packing import PADDING_ID, ROW_LENGTH, pack


def documents(*lengths: int) -> list[tuple[list[int], list[int]]]:
    """Return documents told apart by their token, learned but for the first token."""
    return [([10 + index] * length, [0] + [1] * (length - 1)) for index, length in enumerate(lengths)]


def test_every_document_is_whole_in_one_row() -> None:
    random = Random(3)
    lengths = [random.randint(5, 1500) for _ in range(400)]
    tokens, learned = pack(documents(*lengths))
    for index, length in enumerate(lengths):
        rows = numpy.unique(numpy.nonzero(tokens == 10 + index)[0])
        assert len(rows) == 1
        assert (tokens[rows[0]] == 10 + index).sum() == length
        assert learned[rows[0]][tokens[rows[0]] == 10 + index].sum() == length - 1


def test_rows_are_nearly_full_and_padding_is_never_learned() -> None:
    random = Random(4)
    tokens, learned = pack(documents(*(random.randint(5, 300) for _ in range(1000))))
    assert (tokens == PADDING_ID).mean() < 0.02
    assert not learned[tokens == PADDING_ID].any()


def test_a_document_longer_than_a_row_is_cut() -> None:
    tokens, learned = pack(documents(ROW_LENGTH + 100))
    assert tokens.shape == learned.shape == (1, ROW_LENGTH)


def test_a_context_may_start_with_a_short_document() -> None:
    tokens, _ = pack(documents(*([900] * 40), *([10] * 400)))
    longest = sum(int(row[0]) < 50 for row in tokens)
    assert 0 < longest < len(tokens)
