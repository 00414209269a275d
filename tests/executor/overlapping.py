"""Requests that overlap at random, in every kind of combination, against the same requests alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from inferengine.core.executor import TokenLogprobs
from inferengine.core.sequence import Request, Sequence
from inferengine.llm import LLM
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec

QUESTIONS = [
    "What is a KV cache?",
    "Tell me a story about a fox.",
    "Hello!",
    "Which port does the HTTP server use?",
    "What is 12 + 30?",
]
REGEXES = ["[a-z ]{5,40}", "(yes|no), because [a-z ]+\\.", '\\{"name": "[a-z]+", "count": [0-9]{1,3}\\}']


class Job(NamedTuple):
    """The prompt and the parameters of one request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    regex: str | None


class JobResult(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprobs]


def make_jobs(llm: LLM, count: int, seed: int) -> list[Job]:
    """Return jobs, half of them greedy and free; the others sampled, under a grammar, or with penalties."""
    draw = random.Random(seed)
    return [_job(llm, draw) for _ in range(count)]


def _job(llm: LLM, draw: random.Random) -> Job:
    text = draw.choice(QUESTIONS)
    if draw.random() < 0.6:
        messages: Any = [{"role": "user", "content": text}]
        assert llm.chat_template is not None
        text = llm.chat_template.render(messages)
    prompt = llm.tokenizer.encode(text)
    if draw.random() < 0.4:
        prompt += [draw.randrange(4, llm.capacity.vocab_size) for _ in range(draw.choice([1, 5, 40, 150]))]
    kind, regex = draw.random(), None
    values: dict[str, Any] = {"temperature": 0.0}
    if kind > 0.85:
        regex = draw.choice(REGEXES)
    elif kind > 0.7:
        values = {"temperature": 0.9, "seed": draw.randrange(100), "top_p": draw.choice([1.0, 0.9])}
    elif kind > 0.6:
        values |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    if draw.random() < 0.5:
        values["logprobs"] = draw.choice([0, 2])
    params = SamplingParams(**values, ignore_eos=draw.random() < 0.5)
    return Job(tuple(prompt), params, draw.choice([3, 12, 24, 40, 64]), regex)


class RequestDriver:
    """Submits requests to one LLM and runs its steps."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.answers: dict[int, JobResult] = {}
        self._uid = 10**6  # above those of the LLM's own calls

    def submit(self, job: Job, fork_of: int | None = None) -> int:
        self._uid += 1
        spec = None if job.regex is None else GrammarSpec("regex", job.regex)
        self.answers[self._uid] = JobResult([], [])
        request = Request(
            self._uid,
            list(job.prompt),
            job.params,
            max_tokens=job.max_tokens,
            eos_token_ids=self.llm._eos,
            seed=job.params.seed or 0,
            grammar=spec,
            fork_of=fork_of,
        )
        self.llm.core.submit(request)
        if spec is not None:
            self.llm.core.grammar_ready(self._uid, self.llm._grammars.compile(spec))
        return self._uid

    def step(self) -> list[int]:
        """Run a step. Returns the uids of the requests that ended; none of them may fail."""
        news = self.llm.core.step()
        if news is None:
            return []
        for uid, token in zip(news.uids, news.token_ids, strict=True):
            self.answers[uid].tokens.append(token)
        for uid, items in (news.logprobs or {}).items():
            self.answers[uid].logprobs.extend(items)
        self.llm.core.scheduler.check()
        assert not [row for row in news.finished if row.reason == "error"]
        return [row.uid for row in news.finished]

    def alone(self, job: Job) -> JobResult:
        uid = self.submit(job)
        while self.llm.core.has_work:
            self.step()
        return self.answers.pop(uid)


def draft_at_random(llm: LLM, seed: int) -> None:
    """Make the planner draft in most steps, any number of tokens for each request, whatever the acceptance."""
    draw, control = random.Random(seed), llm.core.scheduler.speculator.controller

    def choose(offers: Mapping[Sequence, int], num_rows: int, *, on_device: bool) -> dict[Sequence, int]:
        return {sequence: draw.randint(0, most) for sequence, most in offers.items()}

    control.is_active = lambda num_rows: num_rows > 0  # type: ignore[method-assign]
    control.begin = lambda num_rows, num_steps=1: num_rows > 0 and draw.random() < 0.7  # type: ignore[method-assign]
    control.is_due = lambda sequence, num_tokens: True  # type: ignore[method-assign]
    control.length = lambda sequence: control.max_drafts  # type: ignore[method-assign]
    control.choose = choose  # type: ignore[method-assign]


def differs(found: JobResult, expected: JobResult, *, whole: bool = True) -> bool:
    """Return whether a result differs from the expected one. Not `whole`: it may be cut short."""
    count = len(found.tokens)
    if found.tokens != expected.tokens[:count] or (whole and count != len(expected.tokens)):
        return True
    pairs = zip(found.logprobs, expected.logprobs, strict=False)
    return any(abs(ours.logprob - theirs.logprob) > 1e-3 for ours, theirs in pairs) or (
        whole and len(found.logprobs) != len(expected.logprobs)
    )


def num_wrong(llm: LLM, jobs: list[Job], expected: list[JobResult], *, num_requests: int, most: int, seed: int) -> int:
    """Submit jobs at random until `num_requests` have run, at most `most` at a time. Returns how many results
    differ."""
    draw, driver = random.Random(seed), RequestDriver(llm)
    live: dict[int, int] = {}
    submitted = wrong = 0
    while submitted < num_requests or live:
        while submitted < num_requests and len(live) < most and draw.random() < 0.4:
            which = draw.randrange(len(jobs))
            uid = driver.submit(jobs[which])
            live[uid] = which
            submitted += 1
            if draw.random() < 0.1:  # a second choice, which takes over the first one's prompt
                live[driver.submit(jobs[which], fork_of=uid)] = which
        if live and draw.random() < 0.03:
            gone = draw.choice(sorted(live))
            llm.core.cancel(gone)
            wrong += differs(driver.answers.pop(gone), expected[live.pop(gone)], whole=False)
        for uid in driver.step():
            wrong += differs(driver.answers.pop(uid), expected[live.pop(uid)])
    return wrong
