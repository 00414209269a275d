"""LLM: the engine as a library gives what the service gives, and refuses what it cannot before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import inferengine
from inferengine.config.model_path import EMBEDDED
from inferengine.core.sequence import choice_seed
from inferengine.errors import ConfigError, InferEngineError, InvalidRequest
from inferengine.llm import LLM
from inferengine.sampling_params import SamplingParams
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, load

DOCUMENT = Path(__file__).parents[2] / "docs" / "library.md"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SECTIONS: dict[str, dict[str, Any]] = {
    "engine": {"device": "cpu", "threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 32},
    "model": {"max_model_len": 256},
    "cache": {"num_blocks": 64, "block_size": 16},
    "speculation": {"method": "none"},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SECTIONS) as built:
        yield built


def test_prompts_of_every_shape_come_back_in_their_order(llm: LLM) -> None:
    texts = ["Once upon a time", "What is a KV cache?", "one", "Who are you?", "A queue is"]
    together = llm.generate(texts, GREEDY, progress=False)
    assert [generation.prompt for generation in together] == texts
    assert all(len(generation.choices[0].token_ids) <= 12 for generation in together)
    (alone,) = llm.generate(texts[1], GREEDY, progress=False)
    (by_ids,) = llm.generate(alone.prompt_ids, GREEDY, progress=False)
    assert alone.text == by_ids.text == together[1].text
    assert by_ids.prompt is None
    assert llm.generate([], progress=False) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short, long = llm.generate(
        ["Once", "Once"],
        [SamplingParams(max_tokens=3, temperature=0.0), SamplingParams(max_tokens=30, temperature=0.0, stop=(" a ",))],
        progress=False,
    )
    assert (len(short.choices[0].token_ids), short.choices[0].finish_reason) == (3, "length")
    assert (long.choices[0].finish_reason, long.choices[0].stop) == ("stop", " a ")
    assert " a " not in long.text


def test_a_conversation_is_answered_through_the_template(llm: LLM) -> None:
    question = [{"role": "user", "content": "Who are you?"}]
    (one,) = llm.chat(question, GREEDY, progress=False)
    again, other = llm.chat([question, [{"role": "user", "content": "What is 3 + 4?"}]], GREEDY, progress=False)
    assert one.text == again.text != other.text
    assert llm.chat([], progress=False) == []


def test_a_seeded_request_draws_what_the_service_draws(llm: LLM) -> None:
    """Whose choices have seeds of their own, which do not meet those of its neighbours."""
    params = SamplingParams(max_tokens=10, temperature=1.5, seed=5, n=3)
    (first,) = llm.generate("Once", params, progress=False)
    for place, choice in enumerate(first.choices):
        alone = SamplingParams(max_tokens=10, temperature=1.5, seed=choice_seed(5, place))
        assert llm.generate("Once", alone, progress=False)[0].choices[0].token_ids == choice.token_ids
    assert len({choice.text for choice in first.choices}) > 1


def test_an_output_matches_its_grammar(llm: LLM) -> None:
    (number,) = llm.generate("x", SamplingParams(max_tokens=20), progress=False, guided_regex="[0-9]{3}-[a-f]{2}")
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", number.text)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answers = llm.chat(
        [[{"role": "user", "content": "hi"}]] * 2, SamplingParams(max_tokens=40), progress=False, response_format=form
    )
    assert all(json.loads(answer.text)["a"] in (1, 2) for answer in answers)


def test_outputs_under_grammars_are_the_same_with_steps_behind_each_other() -> None:
    params = [SamplingParams(max_tokens=45, temperature=1.0, seed=seed) for seed in range(4)]
    found = []
    for overlap in ("off", "on"):
        with LLM(engine={"device": "cpu", "overlap": overlap}) as llm:
            choices = [
                (one.choices[0].text, one.choices[0].finish_reason)
                for grammar in ({"guided_regex": "[a-z ]+"}, {"guided_json": {"type": "array", "minItems": 3}})
                for count in (1, 4)
                for one in llm.generate(["x"] * count, params[:count], progress=False, **grammar)
            ]
        found.append(choices)
    assert found[0] == found[1]
    assert {reason for _, reason in found[0]} <= {"length", "stop"}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_that_may_end_goes_on_until_the_least_number_of_tokens(llm: LLM, ignore_eos: bool) -> None:
    (eos,) = llm._eos
    params = SamplingParams(max_tokens=40, min_tokens=20, ignore_eos=ignore_eos, logit_bias=((eos, 100.0),))
    (found,) = llm.generate("x", params, progress=False, guided_regex="[a-z ]+")
    assert len(found.choices[0].token_ids) in (20, 21)  # with the end, or without it


def test_logprobs_of_output_and_prompt_are_the_model_s(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, prompt_logprobs=1)
    (found,) = llm.generate("Once upon a time there was", params, progress=False)
    (choice,) = found.choices
    ids = [*found.prompt_ids, *choice.token_ids]
    with torch.inference_mode():
        expected = load(EMBEDDED)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert choice.logprobs is not None
    assert found.prompt_logprobs is not None
    told = [*found.prompt_logprobs, *choice.logprobs]
    assert len(told) == len(ids) - 1
    for place, item in enumerate(told):
        assert item.logprob == pytest.approx(float(expected[place][ids[place + 1]]), abs=1e-3)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, None, "a text, token ids, or a list of either"),
        ("", None, "must not be empty"),
        ([None], None, "a text or a list of token ids"),
        ([["a"]], None, "a text or a list of token ids"),
        ([[]], None, "at least one token"),
        ([[4096]], None, "outside the vocabulary"),
        ("x " * 300, None, "maximum context length"),
        ("x", {"max_tokens": 5}, r"must be SamplingParams\(max_tokens=16"),
        (["a", "b"], [SamplingParams()], "2 prompts and 1 parameter sets"),
        ("x", SamplingParams(temperature=9.0), "temperature: must lie in"),
        ("x", SamplingParams(max_tokens="5"), "max_tokens: must be a whole number"),  # type: ignore[arg-type]
        ("\ud83d", None, "prompt: has half of a surrogate pair"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    steps = llm.core.scheduler.stats.num_steps
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params, progress=False)
    assert llm.core.scheduler.stats.num_steps == steps


def test_parameters_may_be_written_as_a_client_writes_them(llm: LLM) -> None:
    """One stop string is a text, a bias a dictionary with ids as texts: over the wire and HTTP they mean the same."""
    as_text = SamplingParams(max_tokens=30, temperature=0.0, stop=" a ")  # type: ignore[arg-type]
    as_dictionary = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={"7": 100})  # type: ignore[arg-type]
    stopped, biased = llm.generate(["Once", "Once"], [as_text, as_dictionary], progress=False)
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop) == ("stop", " a ")
    assert biased.choices[0].token_ids == [7, 7, 7]


def test_an_argument_that_there_is_not_is_named(llm: LLM) -> None:
    """One that says what the output must match would be missed only in the output."""
    with pytest.raises(TypeError, match=r"no argument max_tokens: it belongs in params, as SamplingParams\(max_tokens"):
        llm.generate("a", max_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no argument guided_regx; did you mean guided_regex\?"):
        llm.generate("x", GREEDY, progress=False, guided_regx="[0-9]")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "conversations",
    [
        "hi",
        {"role": "user", "content": "hi"},
        [[{"role": "user"}]],
        [["hi"]],
        [{"role": "user", "content": "\ud83d"}],
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, conversations: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat(conversations, progress=False)


def test_a_section_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="max_tokens: must be keys of a section"):
        LLM(max_tokens=5)  # type: ignore[arg-type]


def test_the_page_s_example_runs_and_what_is_closed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)  # the page's own words  # noqa: S102
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch("[0-9]{3}", printed[-2])
    assert printed[-1] == "384"
    closed: LLM = names["llm"]
    with pytest.raises(InferEngineError, match="has been closed"):
        closed.generate("x", progress=False)
    closed.close()
    assert isinstance(closed, inferengine.LLM)


def test_an_adapter_is_chosen_by_name(tmp_path: Path) -> None:
    model = load(EMBEDDED)
    merged = write_adapter(tmp_path / "pirate", model, targets=("q_proj", "up_proj"), alpha=1.0)
    with LLM(**{**SECTIONS, "model": {"max_model_len": 256, "adapters": str(tmp_path)}}) as built:
        prompt = built.tokenizer.encode("A message queue is")
        (adapted,) = built.generate(prompt, GREEDY, adapter="pirate", progress=False)
        output = adapted.choices[0].token_ids
        assert output == greedy_reference(merged, prompt, output)
        (plain,) = built.generate(prompt, GREEDY, progress=False)
        assert plain.choices[0].token_ids == greedy_reference(model, prompt, plain.choices[0].token_ids)
        (one,), (other,) = (built.embed(prompt, adapter=name, progress=False) for name in ("pirate", None))
        assert one.values != other.values
        with pytest.raises(InvalidRequest, match="there is no adapter 'parrot'; loaded: pirate"):
            built.generate(prompt, GREEDY, adapter="parrot")


def test_without_a_folder_there_are_no_adapters(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"loaded: none: set model\.adapters"):
        llm.generate("a", GREEDY, adapter="pirate")
