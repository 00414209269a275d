"""One example of every message of the wire; `golden/NAME.hex` holds its bytes, one frame a line."""

from __future__ import annotations

from array import array
from pathlib import Path

from inferengine.wire.messages import (
    Accept,
    Admin,
    AdminReply,
    Attach,
    Bye,
    Cancel,
    Credit,
    Done,
    Goodbye,
    Hello,
    Message,
    Model,
    ModelFiles,
    ModelInfo,
    Ping,
    Pong,
    Reject,
    Status,
    Step,
    StopFound,
    Submit,
    Welcome,
)

GOLDEN = Path(__file__).parent / "golden"
ID = bytes(range(16))
EPOCH = bytes(range(8, 0, -1))
PROMPT = array("I", [1, 2, 70_000, 2**32 - 1])

EXAMPLES: dict[str, Message] = {
    "hello": Hello((1, 0), role="http", name="front-1", features=("text",), window=32),
    "hello_1_1": Hello((1, 1), role="http"),
    "hello_1_2": Hello((1, 2), role="http"),
    "hello_1_3": Hello((1, 3), role="http"),
    "hello_1_4": Hello((1, 4), role="http"),
    "hello_1_5": Hello(role="http"),
    "hello_resume": Hello((1, 0), role="http", name="front-1", epoch=EPOCH, last_seq=41),
    "submit_tokens": Submit(
        ID, 7, PROMPT.tobytes(), params={"max_tokens": 16, "temperature": 0.5, "seed": 11}, label="job 1"
    ),
    "submit_text": Submit(
        ID,
        8,
        text="Größe 🎉",
        params={"stop": ["\n"]},
        reply="text",
        priority=-2,
        tenant="acme",
        salt=b"\x00\xff",
        deadline_ms=1500,
        detached=True,
    ),
    "submit_messages": Submit(ID, 9, messages=[{"role": "user", "content": "Hi"}], reply="both"),
    "submit_grammar": Submit(ID, 9, PROMPT.tobytes(), grammar=("regex", "[a-z]+", None)),
    "submit_note": Submit(ID, 9, PROMPT.tobytes(), detached=True, note=b"\x00note"),
    "submit_adapter": Submit(ID, 9, PROMPT.tobytes(), adapter="pirate"),
    "submit_trace": Submit(
        ID, 9, PROMPT.tobytes(), traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    ),
    "submit_embedding": Submit(ID, 9, PROMPT.tobytes(), reply="embedding", pooling="mean"),
    "submit_resume": Submit(
        ID, 9, PROMPT.tobytes(), params={"n": 3, "seed": 5}, resume=(PROMPT[:2].tobytes(), None, b""), stalls=1
    ),
    "submit_prediction": Submit(ID, 9, PROMPT.tobytes(), prediction=PROMPT[1:].tobytes()),
    "submit_placement": Submit(ID, 9, PROMPT.tobytes(), beginnings=EPOCH + ID[:8], session=ID[8:]),
    "submit_share": Submit(ID, 9, PROMPT.tobytes(), share=("10.1.2.3", "user")),
    "cancel": Cancel((7, 8), (ID,)),
    "cancel_leave": Cancel((7, 8), leave=True),
    "cancel_stopped": Cancel((7,), stopped=(StopFound(7, 12, "###"),)),
    "attach": Attach(ID, 20, (5, 0), "both"),
    "credit": Credit(300),
    "model": Model(),
    "model_named": Model(("tokenizer.json",)),
    "ping": Ping(12345),
    "admin": Admin("drain", 4, {"exit": False}),
    "bye": Bye(),
    "welcome_starting": Welcome("engine-0", EPOCH, "STARTING", ("weights", 0.25), protocol=(1, 0)),
    "welcome_ready": Welcome(
        "engine-0",
        EPOCH,
        "READY",
        ("ready", 1.0),
        ModelInfo("tiny", "ab" * 32, 32_000, 4096, (2, 7), 16, 65_536, "bfloat16"),
        {"max_n": 16},
        32,
        2.0,
        6.0,
        ("text", "resume"),
        (1, 0),
        resumed=True,
    ),
    "welcome_embeddings": Welcome(
        "engine-0",
        EPOCH,
        "READY",
        model=ModelInfo("tiny", "ab" * 32, 32_000, 4096, (2,), 16, 65_536, "bfloat16", (), 1024, "last"),
        features=("embeddings",),
        protocol=(1, 1),
    ),
    "accept": Accept(ID, 7, 4, 2, True),
    "accept_note": Accept(ID, 7, 4, 2, True, b"\x00note"),
    "accept_seed": Accept(ID, 7, 4, seed=2**62 + 1),
    "reject": Reject(ID, 7, "overloaded", "The queue is full.", None, True, 1500),
    "reject_unknown": Reject(None, None, "protocol_error", "unknown message kind 77"),
    "step": Step(3, 90, array("I", [7, 8, 9]), array("I", [11, 12, 70_000])),
    "step_draft_tokens": Step(
        5, 92, array("I", [7]), array("I", [3]), None, [Done(7, "length", None, 4, 0, 10, 0.5, 12.25, 80.0, 6, 2)]
    ),
    "step_full": Step(
        4,
        91,
        array("I", [7, 9]),
        array("I", [1, 2, 3]),
        array("I", [2, 1]),
        [
            Done(7, "stop", "\n", 4, 0, 10, 0.5, 12.25, 80.0),
            Done(8, "stop", 2, 4, 0, 10, 0.5, 12.25, 80.0),
            Done(9, "error", ["engine_error", "It failed."], 4, 0, 1, 0.5, 12.25, 80.0),
        ],
        [(7, "Größe")],
        [(9, [[-0.5, 1, [3, 4], [-0.5, -1.5]]])],
    ),
    "step_prompt_logprobs": Step(
        5, 92, array("I", [7]), array("I", [1]), array("I", [1]), prompt_logprobs=[(7, [[-0.25, 2, [6], [-0.125]]])]
    ),
    "step_embedding": Step(
        6,
        93,
        array("I"),
        array("I"),
        array("I"),
        [Done(7, "stop", None, 4, 3, 0, 0.5, 0.0, 12.25)],
        embeddings=[(7, array("f", [0.6, -0.8]).tobytes())],
    ),
    "model_files": ModelFiles("cd" * 32, {"tokenizer.json": b"{}", "chat_template.jinja": "{{ 'ü' }}".encode()}),
    "pong": Pong(12345, 1.5, "READY", EPOCH),
    "status": Status({"state": "READY", "running_requests": 3, "kv_usage": 0.25}),
    "admin_reply": AdminReply("flush", 4, True, {"blocks": 12}),
    "admin_refused": AdminReply("what", 5, False, None, "invalid_request", "op: must be one of stats"),
    "goodbye": Goodbye("The engine is shutting down."),
}
