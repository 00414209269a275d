"""Ollama's API: lines, options, thinking, tools and formats, in front of an engine that says what a test chooses."""

from __future__ import annotations

import json
from array import array
from typing import Any

import jsonschema
import pytest

from frontends.http.ollama import OLLAMA_VERSION
from frontends.http.openapi import ANSWERS, LINES
from inferengine.sampling_params import SamplingParams, from_map
from inferengine.wire.messages import Submit
from tests.frontends.http.builders import TOKENIZER, House, ids, says
from tests.frontends.http.test_openapi import answer_validator
from tests.frontends.http.test_tools import THOUGHT, TOOLS, TWO_CALLS, writes
from tests.frontends.scripted_engine import MAX_MODEL_LEN, Script

HELLO = [{"role": "user", "content": "hi"}]


def ask(house: House, path: str = "/api/chat", **body: Any) -> dict[str, Any]:
    """Ask for a whole answer."""
    body = {"model": "tiny", "stream": False, **({"messages": HELLO} if path == "/api/chat" else {}), **body}
    response = house.post(path, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def lines(house: House, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    """Ask for a streamed answer, which is the default."""
    body = {"model": "tiny", **({"messages": HELLO} if path == "/api/chat" else {}), **body}
    response = house.post(path, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def refused(house: House, path: str = "/api/chat", status: int = 400, **body: Any) -> str:
    response = house.post(path, **{"model": "tiny", "messages": HELLO, **body})
    assert response.status_code == status, response.text
    return str(response.json()["error"])


def submitted(house: House) -> Submit:
    return house.engine.submits[-1]


def params_of(house: House) -> SamplingParams:
    return from_map(submitted(house).params)


def prompt_of(house: House) -> str:
    return TOKENIZER.decode(list(array("I", submitted(house).prompt or b"")), skip_special_tokens=False)


def test_a_chat_is_one_line_for_each_token_and_one_that_ends_it(served: House) -> None:
    found = lines(served)
    assert "".join(line["message"]["content"] for line in found) == "the quick brown fox"
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    last = found[-1]
    assert last["done_reason"] == "length"
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(ids("<user>hi<assistant>")), len(found) - 1)
    # the scripted engine's times: 1 ms in the queue, 2 ms to the first token, 30 ms in all
    assert [last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")] == [1e6, 1e6, 28e6]
    assert last["total_duration"] > 0


def test_a_whole_chat_is_the_sum_of_its_lines(served: House) -> None:
    whole = ask(served)
    assert whole["message"] == {"role": "assistant", "content": "the quick brown fox"}
    assert whole.keys() == lines(served)[-1].keys()


def test_generate_goes_through_the_template_unless_it_is_raw(served: House) -> None:
    assert ask(served, "/api/generate", prompt="say", system="be brief")["response"] == "the quick brown fox"
    assert prompt_of(served) == "<system>be brief<user>say<assistant>"
    assert "context" not in ask(served, "/api/generate", prompt="say", raw=True)
    assert prompt_of(served) == "say"


def test_generate_goes_on_from_an_earlier_context(served: House) -> None:
    first = lines(served, "/api/generate", prompt="say")
    assert "".join(line["response"] for line in first) == "the quick brown fox"
    context = first[-1]["context"]
    assert context == ids("<user>say<assistant>") + ids("the quick brown fox")
    ask(served, "/api/generate", prompt="more", context=context)
    assert prompt_of(served) == "<user>say<assistant>the quick brown fox<user>more<assistant>"
    assert "context" in refused(served, "/api/generate", prompt="more", context=[5] * MAX_MODEL_LEN)


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_a_request_without_a_prompt_asks_whether_the_model_is_loaded(served: House, path: str, field: str) -> None:
    answer = ask(served, path, **({"messages": []} if path == "/api/chat" else {}), keep_alive="10m")
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert field in answer
    assert not served.engine.submits


def test_options_become_sampling_parameters(served: House) -> None:
    options = {
        "num_predict": 7.0,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["zz"],
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_gpu": 1,
        "num_thread": 4,
    }
    ask(served, options=options)
    found = params_of(served)
    assert (found.max_tokens, found.temperature, found.top_k, found.top_p, found.min_p) == (7, 0.5, 4, 0.9, 0.1)
    assert (found.seed, found.repetition_penalty, found.presence_penalty) == (3, 1.25, 0.5)
    assert found.frequency_penalty == 0.25
    ask(served, options={"num_predict": -1, "seed": -1, "repeat_penalty": 1.25, "repeat_last_n": 0})
    found = params_of(served)
    assert (found.max_tokens, found.seed, found.repetition_penalty) == (None, None, 1.0)


def test_num_ctx_bounds_prompt_and_output_together(served: House) -> None:
    prompt = len(ids("<user>hi<assistant>"))
    ask(served, options={"num_ctx": prompt + 5, "num_predict": 100})
    assert params_of(served).max_tokens == 5
    ask(served, options={"num_ctx": 131072})  # as Ollama does: the model's own length
    assert params_of(served).max_tokens is None
    message = refused(served, options={"num_ctx": prompt})
    assert message.startswith("options.num_ctx: the prompt has ")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"stop": ["a" * 300]}}, "options.stop"),
        ({"format": "yaml"}, "format"),
        ({"think": True}, "does not support thinking"),
        ({"messages": [{"role": "user", "content": "hi", "images": ["AAAA"]}]}, "messages[0].images"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"keep_alive": []}, "keep_alive"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served: House, body: dict[str, Any], named: str) -> None:
    assert named in refused(served, **body)


def test_a_template_or_a_suffix_of_the_request_is_refused(served: House) -> None:
    for name in ("template", "suffix"):
        assert name in refused(served, "/api/generate", prompt="say", **{name: "x"})


def test_a_format_is_kept_by_a_grammar(served: House) -> None:
    ask(served, format="json")
    assert submitted(served).grammar is not None
    ask(served, format={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert "properties" in str(submitted(served).grammar)
    ask(served, format="")
    assert submitted(served).grammar is None


def test_calls_are_shown_whole_with_their_arguments_as_objects(served: House) -> None:
    served.script = writes(TWO_CALLS)
    whole = ask(served, tools=TOOLS)["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["tool_calls"]]
    assert calls == [("weather", {"city": "Paris 🎉", "days": 3}), ("now", {})]
    streamed = lines(served, tools=TOOLS)
    shown = [call for line in streamed for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in shown] == [call["function"] for call in whole["tool_calls"]]
    assert "".join(line["message"]["content"] for line in streamed).strip() == whole["content"].strip() == "Let me see."
    assert streamed[-1]["done_reason"] == "stop"


def test_results_of_tools_find_their_calls(served: House) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 1}}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    ask(served, messages=turns, tools=TOOLS)
    assert "sunny" in prompt_of(served)


def test_thoughts_are_told_apart(thinker: House) -> None:
    thinker.script = writes(THOUGHT)
    whole = ask(thinker, think=True)["message"]
    assert whole["thinking"]
    assert "<think>" not in whole["content"]
    streamed = lines(thinker)
    assert "".join(line["message"].get("thinking", "") for line in streamed) == whole["thinking"]
    assert "".join(line["message"]["content"] for line in streamed) == whole["content"]
    generated = ask(thinker, "/api/generate", prompt="hi", think="high")
    assert (generated["thinking"], generated["response"]) == (whole["thinking"], whole["content"])
    assert prompt_of(thinker).startswith("<effort>high")


def test_log_probabilities_come_with_their_tokens(served: House) -> None:
    rows = [[-0.25, 1, [token, 7], [-0.25, -1.5]] for token in ids("fox")]
    served.script = lambda submit, choice: Script(ids("fox"), logprobs=rows)
    whole = ask(served, logprobs=True, top_logprobs=1)
    assert [row["token"] for row in whole["logprobs"]] == [TOKENIZER.decode([token]) for token in ids("fox")]
    assert {row["logprob"] for row in whole["logprobs"]} == {-0.25}
    assert all(len(row["top_logprobs"]) == 1 for row in whole["logprobs"])
    streamed = lines(served, logprobs=True, top_logprobs=1)
    assert [row for line in streamed for row in line.get("logprobs", ())] == whole["logprobs"]


def test_a_stream_that_fails_ends_with_an_error_and_no_end(served: House) -> None:
    served.script = says("the fox", reason="error", detail=["engine_error", "the step failed"])
    *_, last = lines(served)
    assert last == {"error": last["error"]}
    assert "failed" in last["error"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "says"),
    [
        ("GET", "/api/nothing", {}, 404, "no such path"),
        ("GET", "/api/chat", {}, 405, "use POST"),
        ("GET", "/api/tags", {"x-long": "x" * 70_000}, 431, "headers"),
        ("GET", "/api/tags", {"host": "elsewhere.example"}, 403, "elsewhere.example"),
    ],
)
def test_errors_from_outside_ollamas_routes_have_ollamas_shape(
    served: House, method: str, path: str, headers: dict[str, str], status: int, says: str
) -> None:
    response = served.http.request(method, path, headers=headers)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert says in response.json()["error"]


def test_names_may_carry_the_tag_that_the_list_shows(served: House) -> None:
    (model,) = served.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "tiny:latest"
    assert ask(served, model=model["name"])["model"] == "tiny:latest"
    assert "tiny" in refused(served, model="llama3", status=404)
    assert "not found" in refused(served, "/api/show", model="llama3", status=404)


def test_many_embeddings_are_written_a_few_at_a_time(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.http.openai.embeddings.PART_BYTES", 200)
    texts = [f"say {number}" for number in range(12)]
    whole = ask(served, "/api/embed", input=texts)["embeddings"]
    assert len(whole) == 12
    with served.http.stream("POST", "/api/embed", json={"model": "tiny", "input": texts}) as answer:
        parts = list(answer.iter_raw())
    assert len(parts) > 3
    assert json.loads(b"".join(parts))["embeddings"] == whole


def test_embeddings_in_both_shapes(served: House) -> None:
    many = ask(served, "/api/embed", input=["say", "the fox"], dimensions=4)
    assert [len(vector) for vector in many["embeddings"]] == [4, 4]
    assert many["prompt_eval_count"] == len(ids("say")) + len(ids("the fox"))
    one = ask(served, "/api/embeddings", prompt="say")["embedding"]
    assert one == ask(served, "/api/embed", input="say")["embeddings"][0]
    long = "fox " * MAX_MODEL_LEN
    assert ask(served, "/api/embed", input=long)["prompt_eval_count"] == MAX_MODEL_LEN
    assert "maximum context length" in refused(served, "/api/embed", input=long, truncate=False)
    assert ask(served, "/api/embed", input="")["embeddings"] == []


def test_what_a_program_reads_of_the_model_before_it_asks(served: House, thinker: House) -> None:
    shown = served.post("/api/show", model="tiny").json()
    assert shown["model_info"]["transformer.context_length"] == MAX_MODEL_LEN
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert "thinking" in thinker.post("/api/show", model="tiny").json()["capabilities"]
    (loaded,) = served.http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == MAX_MODEL_LEN
    assert served.http.get("/api/version").json()["version"] == OLLAMA_VERSION


def test_the_served_model_is_pulled_already_and_no_other_one_can_be(served: House) -> None:
    for name in ("tiny", "tiny:latest"):
        lines = served.post("/api/pull", model=name).text.splitlines()
        assert [json.loads(line) for line in lines] == [{"status": "pulling manifest"}, {"status": "success"}]
        assert served.post("/api/pull", name=name, stream=False).json() == {"status": "success"}
    assert "inferengine fetch llama3" in refused(served, "/api/pull", model="llama3")
    assert served.post("/api/pull").json() == {"error": "model: is required"}


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/api/create", "load_lora_adapter"),
        ("POST", "/api/copy", "model.served_name"),
        ("DELETE", "/api/delete", "unload_lora_adapter"),
        ("POST", "/api/push", "hf upload"),
        ("POST", "/api/blobs/sha256:00", "inferengine up"),
    ],
)
def test_models_are_not_changed_over_http(served: House, method: str, path: str, remedy: str) -> None:
    response = served.http.request(method, path, content=json.dumps({"model": "tiny"}))
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    assert remedy in response.json()["error"]


def test_there_are_no_blobs(served: House) -> None:
    assert served.http.head("/api/blobs/sha256:00").status_code == 404


def test_answers_and_lines_are_what_the_document_says(thinker: House) -> None:
    document = thinker.http.get("/openapi.json").json()
    for path in [path for method, path in ANSWERS if method == "GET" and path.startswith("/api/")]:
        answer_validator(document, "GET", path, "application/json").validate(thinker.http.get(path).json())
    streams = [
        (says("the fox", reason="length"), {}),
        (writes(THOUGHT), {"logprobs": True}),
        (writes(TWO_CALLS), {"tools": TOOLS}),
        (says("the fox", reason="error", detail=["engine_error", "the step failed"]), {}),
    ]
    for _, path in LINES:
        schema = answer_validator(document, "POST", path, "application/x-ndjson")
        for script, body in streams:
            thinker.script = script
            for line in lines(thinker, path, **({"prompt": "hi"} if path == "/api/generate" else {}), **body):
                schema.validate(line)
        with pytest.raises(jsonschema.ValidationError):
            schema.validate({"done": True})
