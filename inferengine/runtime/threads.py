"""How many CPU threads a step is worth.

A step is a hundred parallel regions, and each ends when its slowest thread does. In a short step waking the second
thread costs as much as it brings; on a busy machine, where another process holds the second core, every region waits
for that core's next time slice and a step of 5 ms takes a second. So short steps run on one thread, long ones on all.
"""

from __future__ import annotations

import torch

from inferengine.layers.decoder_config import DecoderConfig

BYTES_PER_S = 10e9  # what one core reads
FLOPS = 50e9  # what one core computes in fp32
WORTH_IT_S = 5e-3  # a step that takes one thread longer than this runs on all


class Threads:
    """Sets torch's number of threads before a step. `fixed` > 0: the configuration's, for every step."""

    def __init__(self, config: DecoderConfig, fixed: int) -> None:
        num_weights = _num_weights(config)
        self._all = fixed or torch.get_num_threads()
        self._fixed = fixed > 0
        self._step_s = 2 * num_weights / BYTES_PER_S
        self._token_s = 2 * num_weights / FLOPS

    def number(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens."""
        if self._fixed or max(self._step_s, num_tokens * self._token_s) > WORTH_IT_S:
            return self._all
        return 1

    def prepare(self, num_tokens: int) -> None:
        """For the calling thread: OpenMP keeps this number for each thread by itself."""
        number = self.number(num_tokens)
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)


def _num_weights(config: DecoderConfig) -> int:
    """Weights that a step reads: the projections of every layer, and the head."""
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size
