"""Documents into rows of equal length for training, in processes beside the training loop. Knows nothing of torch."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator

import numpy
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import corpus
from .example import Split
from .vocabulary import CONTEXT_LENGTH, encode

ROW_LENGTH = CONTEXT_LENGTH + 1  # inputs and, shifted by one, targets
PADDING_ID = 2
Rows = tuple[
    NDArray[numpy.uint16], NDArray[numpy.uint8]
]  # token ids and 1 where a token is to be learned, [rows, ROW_LENGTH]

_tokenizer: Tokenizer | None = None


def pack(documents: list[tuple[list[int], list[int]]]) -> Rows:
    """Pack whole documents into rows, the longest first, each into the first row with room for it. A document longer
    than a row is cut at the row's end."""
    rows: list[list[tuple[list[int], list[int]]]] = []
    filled: list[int] = []
    first_open = 0
    for ids, learned in sorted(documents, key=lambda item: -len(item[0])):
        length = min(len(ids), ROW_LENGTH)
        for index in range(first_open, len(rows)):
            if filled[index] + length <= ROW_LENGTH:
                break
        else:
            rows.append([])
            filled.append(0)
            index = len(rows) - 1
        rows[index].append((ids[:length], learned[:length]))
        filled[index] += length
        while first_open < len(rows) and filled[first_open] > ROW_LENGTH - 12:
            first_open += 1
    tokens = numpy.full((len(rows), ROW_LENGTH), PADDING_ID, numpy.uint16)
    learned_mask = numpy.zeros((len(rows), ROW_LENGTH), numpy.uint8)
    shuffle = random.Random(len(documents))
    for index, row in enumerate(rows):
        shuffle.shuffle(row)  # a long document first in every row would teach that what starts a context is long
        tokens[index, : filled[index]] = [token for ids, _ in row for token in ids]
        learned_mask[index, : filled[index]] = [mark for _, learned in row for mark in learned]
    return tokens, learned_mask


def packed_chunk(
    tokenizer: Tokenizer, number: int, split: Split = Split.TRAIN, count: int = corpus.DOCUMENTS_PER_CHUNK
) -> Rows:
    return pack(encode(tokenizer, list(corpus.chunk(number, split, count))))


def _start_worker(tokenizer_json: str) -> None:
    global _tokenizer  # one per worker process: a Pool gives its workers no other place for it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_str(tokenizer_json)


def _work(number: int) -> Rows:
    assert _tokenizer is not None
    return packed_chunk(_tokenizer, number)


class Batches:
    """Batches of rows in the order of the chunks, made by worker processes. The same for any number of workers."""

    def __init__(self, tokenizer: Tokenizer, *, rows: int, workers: int, last_chunk: int) -> None:
        self._rows = rows
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads of tokenizers and CUDA
        self._pool = context.Pool(workers, _start_worker, (tokenizer.to_str(),))
        self._chunks = self._pool.imap(_work, range(last_chunk))
        self._shuffle = numpy.random.default_rng(0)

    def __iter__(self) -> Iterator[Rows]:
        tokens, learned = None, None
        for chunk_tokens, chunk_learned in self._chunks:
            order = self._shuffle.permutation(len(chunk_tokens))
            chunk_tokens, chunk_learned = chunk_tokens[order], chunk_learned[order]
            tokens = chunk_tokens if tokens is None else numpy.concatenate((tokens, chunk_tokens))
            learned = chunk_learned if learned is None else numpy.concatenate((learned, chunk_learned))
            while len(tokens) >= self._rows:
                yield tokens[: self._rows], learned[: self._rows]
                tokens, learned = tokens[self._rows :], learned[self._rows :]

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()
