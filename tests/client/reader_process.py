"""A client as a process of its own, which a test can pause.

`python -m tests.client.reader_process ADDRESS NUM_STREAMS MAX_TOKENS` reads so many streams through an EnginePool. It
prints a line when all have begun, and at the end a JSON object: for each stream its tokens and how it ended.
"""

from __future__ import annotations

import asyncio
import json
import sys

from inferengine.client import EnginePool, Submission
from inferengine.sampling_params import SamplingParams


async def read(submission: Submission) -> dict[str, object]:
    """Read one stream to its end."""
    tokens, ends = [], []
    async for delta in submission.streams[0]:
        tokens += delta.token_ids
        if delta.finish is not None:
            ends.append([delta.finish.reason, delta.finish.detail])
    return {"tokens": tokens, "ends": ends}


async def main(address: str, num_streams: int, max_tokens: int) -> None:
    pool = EnginePool([address])
    await pool.wait_ready(60.0)
    submissions = [
        pool.submit([seed + 1] * 8, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))
        for seed in range(num_streams)
    ]
    readers = [asyncio.create_task(read(submission)) for submission in submissions]
    while not all(submission.streams[0].num_tokens for submission in submissions):
        await asyncio.sleep(0.01)
    print("begun", flush=True)
    print(json.dumps(await asyncio.gather(*readers)), flush=True)
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
