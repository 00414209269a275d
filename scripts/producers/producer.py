"""Text in, text out, with pyzmq and msgpack alone: python producer.py ipc:///path/engine.sock "Once upon a time" """

import secrets
import sys

import msgpack
import zmq

HELLO, SUBMIT, CREDIT, PING, BYE, REJECT, STEP, GOODBYE = 1, 2, 5, 7, 9, 67, 68, 73
address, text = sys.argv[1:3]
engine = zmq.Context.instance().socket(zmq.DEALER)
engine.connect(address)


def send(kind: int, body: object) -> None:
    engine.send_multipart([b"IE\x01" + bytes([kind]), msgpack.packb(body)])


send(HELLO, {"protocol": [1, 0], "role": "producer"})
params = {"max_tokens": 60, "temperature": 0.0}
send(SUBMIT, {"id": secrets.token_bytes(16), "stream": 1, "text": text, "reply": "text", "params": params})
while True:
    if not engine.poll(2000):  # keeps the lease while nothing arrives
        send(PING, [0])
        continue
    (_, _, _, kind), body, *_ = engine.recv_multipart()
    message = msgpack.unpackb(body)
    if kind in (REJECT, GOODBYE):
        sys.exit(f"refused: {message}")
    if kind == STEP:
        seq, _step, _streams, _counts, done, extras = message[:6]
        for _stream, piece in (extras or {}).get("text", []):
            print(piece, end="", flush=True)
        send(CREDIT, [seq])
        if done:  # [stream, reason, detail, ...]
            print()
            send(BYE, {})
            sys.exit(done[0][1] not in ("stop", "length"))
