"""This engine: how it is started, asked, configured, watched and stopped. Marks: see `knowledge`."""

# ruff: noqa: E501  (one answer, one line)
from __future__ import annotations

_HOW = "[How do I|How can I|How to|Tell me how to|What do I do to|How does one|Show me how to|What must I do to|I want to|How would I|Explain how to]"
_WHICH = "[Which|What|On which|On what|At which]"
_IT = "[InferEngine|the engine|this engine|this server|the service|inferengine]"

# (questions, answer): a question pattern may be spun in many ways, each counts as one phrasing
ENGINE: tuple[tuple[str, str], ...] = (
    ("[What is|What's|Explain|Describe|Tell me about|Can you explain|What do you know about|Define|What exactly is] [InferEngine|this engine|inferengine|this project|this software|InferEngine, in short|the InferEngine project][?|]", "InferEngine is a «message-queue» engine for LLM inference: one engine process runs the model, and front ends talk to it over ZeroMQ."),
    (f"{_HOW} [start|run|launch|bring up|start up|boot] [InferEngine|the engine|this engine|this server|the server|the service|inferengine|this|it|everything|the model server|the whole thing|the program][?|]", "Run `«./scripts/serve»` in the repository; it starts the engine, the HTTP front end and the chat page."),
    ("[Give me|Show me|I need|Do you have|Can you give me|Can you show me|Please give me|Write] [a curl example|an example with curl|a curl command|an example request|a curl line|a sample request][?|.|]", 'For example: curl http://127.0.0.1:8000«/v1/completions» -H "Content-Type: application/json" -d \'{"prompt": "Once upon a time", "max_tokens": 64}\''),
    ("[How does|Explain how|Tell me how|Can you explain how|Do you know how] [this engine|InferEngine|the engine|this server|the service|this|it all] [work|works|work inside|operate|function][?|]", "Front ends turn text into tokens and send them over ZeroMQ; the engine «batches» all requests step by step and sends the new tokens back."),
    ("[What does|Tell me what|Explain what|What happens when I run|What is the purpose of|What is|Why run] [./scripts/serve|scripts/serve|the serve script|the script serve] [do|does|for|]?", "It installs what is missing and runs `«inferengine up»`: the engine, the HTTP front end and the chat page in one terminal."),
    (f"{_HOW} [run the tests|test it|test the engine|start the tests|run the test suite|run all tests][?|]", "Run `«./scripts/test»`; it installs what the tests need and runs them."),
    (f"{_HOW} [check the code|lint the code|run the linter|check formatting and types|run ruff and mypy][?|]", "Run `«./scripts/check»`; it checks format, lint and types."),
    (f"{_WHICH} [port|ports] [does the HTTP server use|is the HTTP API on|does the HTTP front end listen on|is the API on|does HTTP use|is HTTP on|is for HTTP|does the http api use|is the OpenAI API on][?|]", "The HTTP front end listens on port «8000»."),
    (f"{_WHICH} [port|ports] [does the websocket use|is the websocket on|does the websocket server listen on|is for the websocket|is the chat page on|does the chat page use|is the chat on|does the chat page have][?|]", "The websocket and the chat page are on port «8001»."),
    (f"{_WHICH} ports [does {_IT} use|are used|does it listen on|are open|do the front ends use|does the service have][?|]".replace(_IT, "InferEngine"), "The HTTP front end uses port «8000», and the websocket with the chat page uses port «8001»."),
    ("[Where is|How do I open|Where can I find|How do I get to|Where do I find|What is the address of|What is the URL of|How can I open|Show me] the chat [page|window|site|UI|interface][?|]", "Open http://127.0.0.1:«8001» in a browser; that is the chat page."),
    (f"{_HOW} [change|set|choose|configure|pick] the [HTTP port|port|http port|port of the HTTP server|API port][?|]", "Start it with `«--http.port» 9000`, or set `port` under `[http]` in the configuration file."),
    (f"{_HOW} [change|set|choose|configure|pick] the [websocket port|chat port|port of the chat page|ws port|port of the websocket][?|]", "Start it with `«--ws.port» 9001`, or set `port` under `[ws]` in the configuration file."),
    (f"{_HOW} [serve|load|use|run|start with] [another model|a different model|my own model|a Llama model|another checkpoint|my model|a model from a folder|a larger model|Qwen][?|]", "Give the folder or the hub id of the model: `./scripts/serve «MODEL»`."),
    ("[Which|What] [model is this|model are you|model is served by default|is the default model|is the embedded model|model do you run|model am I talking to|model is running][?|]", "This is the «embedded» model of InferEngine: a Llama-style model with 11 million parameters, trained for this engine."),
    ("[Who|Which people|What] [trained|made|created|built|wrote] [you|this model|the embedded model|the default model][?|]", "I was trained by the «InferEngine» project, on text that its own generator wrote."),
    ("[How big|How large|How many parameters|What size] [are you|is the embedded model|is this model|is the default model|do you have|does this model have|does the embedded model have][?|]", "I have about «11» million parameters, which is very small for a language model."),
    ("[Where do the weights come from|Where does your training data come from|What were you trained on|What data were you trained on|What is your training data|What text did you learn from|What did you learn from][?|]", "I was trained on text from a «generator»: stories, questions and answers, small sums, and JSON examples."),
    (f"{_HOW} [train the embedded model|train the default model|make the embedded model|train you again|retrain the embedded model|build the embedded model][?|]", "Run `«scripts/train_embedded»` on a machine with a GPU; it takes less than ten minutes."),
    (f"{_HOW} [see a curl example|get an example with curl|send a request with curl|use curl|call the API with curl|send a request|make a request|ask for a completion|test the API with curl|try the API][?|]", 'For example: curl http://127.0.0.1:8000«/v1/completions» -H "Content-Type: application/json" -d \'{"prompt": "Once upon a time", "max_tokens": 64}\''),
    (f"{_HOW} [send a chat request with curl|use the chat API with curl|call chat completions|send a chat message with curl|ask a chat question with curl|use chat completions][?|]", 'For example: curl http://127.0.0.1:8000«/v1/chat/completions» -H "Content-Type: application/json" -d \'{"messages": [{"role": "user", "content": "Hello!"}]}\''),
    (f"[Which|What] [endpoints|routes|HTTP endpoints|HTTP routes|API endpoints|URLs|paths] [are there|exist|does {_IT} have|can I call|are supported|does the HTTP front end offer|does the API have][?|]".replace(_IT, "the server"), "The main ones are «/v1/completions», /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, /ready, /stats and /metrics."),
    ("[Which|What] [endpoint|route|URL|path] [is for chat|does chat|do I use for chat|answers chat messages|is used for chat requests|should I call for a chat][?|]", "Use `POST «/v1/chat/completions»` with a list of messages."),
    ("[Which|What] [endpoint|route|URL|path] [is for plain completions|continues a text|do I use for text completion|is for completions|completes a prompt|should I call for a completion][?|]", "Use `POST «/v1/completions»` with a prompt."),
    ("[Which|What] [endpoint|route|URL|path] [lists the models|shows the models|tells which models there are|gives the model name|do I call for the list of models][?|]", "`GET «/v1/models»` lists the models."),
    ("[Which|What] [endpoint|route|URL|path] [is the health check|tells if the server is alive|checks the health|is for health|shows that the service lives][?|]", "`GET «/health»` tells whether the service is alive, and `GET /ready` whether it can take requests."),
    ("[Which|What] [endpoint|route|URL|path] [has the metrics|shows metrics|gives Prometheus metrics|do I scrape|is for Prometheus][?|]", "`GET «/metrics»` gives the metrics in the format of Prometheus."),
    ("[Which|What] [endpoint|route|URL|path] [has statistics|shows the statistics|shows live figures|tells how many requests run|shows the state of the cache][?|]", "`GET «/stats»` shows live figures: running and waiting requests, batch sizes and cache pages."),
    ("[What does|What is|Tell me about|Explain|What's|What is the purpose of] [the endpoint|the route|] /health[?|]", "It tells whether the service is «alive»; it answers in milliseconds even under load."),
    ("[What does|What is|Tell me about|Explain|What's|What is the purpose of] [the endpoint|the route|] /ready[?|]", "It tells whether the model is loaded and the engine can take «requests»."),
    ("[What does|What is|Tell me about|Explain|What's|What is the purpose of] [the endpoint|the route|] /tokenize[?|]", "It turns a text into «token ids»."),
    ("[What does|What is|Tell me about|Explain|What's|What is the purpose of] [the endpoint|the route|] /detokenize[?|]", "It turns token ids back into «text»."),
    (f"{_HOW} [stream|stream the answer|get tokens as they come|receive a stream|turn on streaming|get a streamed answer|stream over HTTP][?|]", 'Add `"«stream»": true` to the request; the tokens then arrive as Server-Sent Events.'),
    (f"{_HOW} [limit the length|limit the answer|set the number of tokens|stop after 50 tokens|make answers shorter|set the maximum length|bound the output][?|]", 'Set `"«max_tokens»"` in the request.'),
    (f"{_HOW} [set the temperature|change the temperature|lower the temperature|choose a temperature|make sampling greedy][?|]", 'Set `"«temperature»"` in the request; 0 means greedy.'),
    (f"{_HOW} [set a stop string|stop at a newline|stop at a word|use stop strings|end the output at a word][?|]", 'Set `"«stop»"` in the request to a string or a list of strings.'),
    (f"{_HOW} [set a seed|make a sampled answer reproducible|fix the seed|use a seed|repeat a sampled answer][?|]", 'Set `"«seed»"` in the request to any whole number.'),
    (f"{_HOW} [get JSON output|force JSON|get structured output|make the model answer in JSON|use a JSON schema][?|]", 'Set `"«response_format»"` in the request; the grammar then allows only valid JSON.'),
    (f"{_HOW} [cancel a request|stop a generation|abort a request|cancel a running generation|stop an answer][?|]", "Close the connection or send CANCEL; the engine then frees its «blocks» within two steps."),
    (f"{_HOW} [talk to {_IT} from Python|use it from Python|write a Python client|call it in Python|send a request from Python|use the Python client][?|]".replace(_IT, "the engine"), "Use `«inferengine.client»`: Client is blocking, AsyncClient is for asyncio; both speak the ZeroMQ wire."),
    (f"{_HOW} [use the OpenAI client|use the OpenAI library|use OpenAI's Python package|connect the OpenAI SDK|call it with the openai package][?|]", "Set its base URL to http://127.0.0.1:«8000»/v1; the routes speak the same dialect."),
    (f"{_HOW} [chat in the terminal|chat from the command line|talk to the model in a terminal|chat without a browser|use the terminal chat][?|]", "Run `«inferengine chat»`; it is a terminal client over ZeroMQ."),
    (f"{_HOW} [check my setup|find out what is wrong|diagnose a problem|see why it does not start|check the installation][?|]", "Run `«inferengine check»`; it looks for what would keep the service from working and names the remedy."),
    (f"{_HOW} [see the configuration|print the configuration|see all keys|list the settings|see the resolved configuration][?|]", "Run `«inferengine config»`; it prints every key with its value and its help."),
    (f"{_HOW} [configure {_IT}|set options|change settings|set a configuration key|configure it|change the configuration][?|]".replace(_IT, "the engine"), "Every key can stand in a TOML file given by `«--config»`, in a flag such as `--http.port`, or in an environment variable."),
    ("[What|Which] [format does the configuration file have|is the format of the config file|format is the configuration file|kind of file is the configuration|language is the config file][?|]", "The configuration is one «TOML» file, given by `--config FILE`."),
    ("[What|Which] [wins, a flag or the file|takes precedence, flags or environment|has priority, flag or environment variable|is stronger, the file or a flag|is the order of precedence of settings][?|]", "«Flags» win over environment variables, and those win over the file."),
    (f"{_HOW} [set a key by environment variable|use environment variables|configure it through the environment|name the environment variables][?|]", "Write `«INFERENGINE_SECTION_KEY»`, for example INFERENGINE_HTTP_PORT=9000."),
    (f"{_HOW} [stop the service|stop {_IT}|shut it down|shut down the engine|end the service|stop the server][?|]".replace(_IT, "the engine"), "Press Ctrl-C or send «SIGTERM»; the running requests are finished first, then it stops."),
    ("[What happens on|What does the engine do on|What does the engine do at|What happens after] [SIGTERM|a SIGTERM|the signal SIGTERM|Ctrl-C][?|]", "The engine «drains»: it takes no new requests and finishes the running ones; a second signal aborts."),
    ("[What happens|What happens to my answer|What does the client see] when [a front end crashes|the HTTP server crashes|the http process dies|a front end is killed|the front end restarts][?|]", "The engine «keeps running» and the answer goes on; the client can resume its stream."),
    ("[What happens when|What happens if|What does the engine do when] [a client disconnects|the client goes away|I close the connection|the connection is lost|a client is gone][?|]", "Its requests are «cancelled» and their blocks freed, unless they were submitted as detached."),
    (f"{_HOW} [resume a stream|continue a broken stream|get the rest of a stream|resume after a disconnect|pick up a lost stream][?|]", "Connect again and «ATTACH» with the cursor of the last token you have; finished outputs are kept for 60 seconds."),
    (f"{_HOW} [run the engine with systemd|run it as a service|install the systemd units|start it at boot|use systemd][?|]", "The folder `«systemd»` holds units for the engine, the HTTP front end and the websocket front end."),
    (f"{_HOW} [run the parts separately|start only the engine|run the engine alone|start the engine without front ends][?|]", "Run `«inferengine engine»` alone, and `inferengine http` or `inferengine ws` beside it."),
    (f"{_HOW} [start only the HTTP server|run the HTTP front end alone|start only the http front end|start another http front end][?|]", "Run `«inferengine http»`; it connects to the engine's socket."),
    ("[Which|What] [commands are there|commands does inferengine have|is the command line like|subcommands exist|can the command inferengine do][?|]", "The commands are «up», engine, http, ws, chat, profile, check, simulate, plan-memory, keygen and config."),
    ("[What does|Explain|What is|Tell me about|What's the purpose of] inferengine up[ do|][?|]", "It runs the engine and the front ends «together» in one terminal."),
    ("[Which|What] [language is InferEngine written in|programming language do you use|is InferEngine written in|language is this engine made with][?|]", "InferEngine is written in «Python», with PyTorch for the model and Triton for GPU kernels."),
    ("[Does|Can|Will] [it|InferEngine|the engine|this] [run|work] [on a CPU|without a GPU|on a laptop|on my CPU|on a machine without GPU][?|]", "Yes, it runs on a «CPU» too; with `--engine.device auto` it takes the GPU when there is one."),
    ("[Which|What] [models are supported|models can it serve|model families does it support|architectures are supported|models does InferEngine support|kinds of models can I load][?|]", "It serves «Llama», Qwen 2, Qwen 3, Gemma 3, Mistral and GPT-2 checkpoints in the Hugging Face layout."),
    ("[Is|Does] [InferEngine|it|the API|the HTTP API|this server] [OpenAI compatible|compatible with OpenAI|speak the OpenAI API|support the OpenAI API|have an OpenAI API][?|]", "Yes, the HTTP front end speaks the «OpenAI» dialect on port 8000."),
    ("[Why is|What is the advantage of|Why have|What is good about|Why use] [the engine a separate process|an engine of its own process|separate front ends|an engine apart from its front ends|engine and front ends being separate][?|]", "A front end can crash or be upgraded without «losing» a generation, because the engine outlives it."),
    ("[What|Which] [protocol does the wire use|is the wire format|does the wire look like|is the wire|format do messages have|transport do the front ends use][?|]", "The wire is «ZeroMQ» with msgpack bodies: one ROUTER in the engine, one DEALER in each client."),
    ("[Where|In which file] is the [wire|protocol] [documented|described|written down|specified|explained][?|]", "The wire is described in `inferengine/wire/«PROTOCOL.md»`."),
    ("[What|Which] [kinds|messages|message kinds|kinds of messages] [does a client send|can a client send|go from client to engine|are sent by clients][?|]", "A client sends «HELLO», SUBMIT, CANCEL, ATTACH, CREDIT, MODEL, PING, ADMIN and BYE."),
    ("[What|Which] [kinds|messages|message kinds|kinds of messages] [does the engine send|can the engine send|go from engine to client|are sent by the engine][?|]", "The engine sends «WELCOME», ACCEPT, REJECT, STEP, MODEL, PONG, STATUS, ADMIN_REPLY and GOODBYE."),
    ("[What is the first message|Which message comes first|What do I send first|What must a client send first|What is the first message of a client][?|]", "The first message of a client is «HELLO», and the engine answers with WELCOME."),
    ("[What socket does the engine bind|Which socket type does the engine use|What kind of socket has the engine|Which ZeroMQ socket does the engine bind][?|]", "The engine binds one «ROUTER» socket, and a PUB socket beside it for status."),
    ("[What socket does a client use|Which socket type does a client use|What kind of ZeroMQ socket does a client open|Which socket does a producer need][?|]", "A client connects one «DEALER» socket per engine."),
    ("[What are the header bytes|What does the header look like|What is in the header|How long is the header|What is the frame header] [of a message|of a wire message|on the wire|][?|]", "The header has «four» bytes: 0x49, 0x45, the major version and the kind."),
    ("[What states does the engine have|Which states are there|What are the states of the engine|Which states can the engine be in|What are the engine's states][?|]", "The states are «STARTING», READY, DRAINING and STOPPING."),
    ("[How does flow control work|What is CREDIT for|How does the engine handle slow readers|What happens with a slow reader|Explain flow control|What is the credit window][?|]", "A client acknowledges STEP messages with CREDIT; without «credit» its tokens wait and come in a later STEP."),
    ("[How does|How do] [the request path work|a request travel|a request go through the system|requests get to the model][?|]", "A front end turns the text into tokens, sends SUBMIT over ZeroMQ, the scheduler puts the request into a «step», and the tokens come back in STEP messages."),
    ("[How long are|How long does the engine keep|For how long are|How long will the engine keep] finished [outputs kept|outputs|requests|requests kept|answers][?|]", "Finished outputs are kept for «60» seconds, as `wire.resume_ttl_s` says, so that a client can attach again."),
    ("[What is used_pages|What does used_pages mean|Explain used_pages|What are used pages][?|]", "It counts the pages of the KV cache held by «live» requests; it is 0 when the engine is idle."),
    ("[What happens when|What happens if|What do I get when|What do I get if] [the queue is full|too many requests come|the server is overloaded|there are too many requests][?|]", "The request is refused at once with «503» and a Retry-After header."),
    ("[What happens when|What happens if|What do I get when|What do I get if] [my prompt is too long|the prompt is too long|a prompt exceeds the context|I send a very long prompt][?|]", "It is refused with the error «context_length_exceeded»; shorten the prompt or lower max_tokens."),
    ("[What license|Which license|Under which license|What licence] [does InferEngine have|is InferEngine under|is it under|is it|does the project use][?|]", "InferEngine is under the «MIT» license."),
    ("[How does the engine use the GPU|What makes it fast|Why is InferEngine fast|What makes the engine fast|How is InferEngine so fast][?|]", "It batches «continuously», reuses prefixes, runs fused Triton kernels and replays CUDA graphs."),
    ("[How many requests can run at once|How many requests fit in one batch|What is the largest batch|How many sequences run in one step][?|]", "`«engine.max_num_seqs»` says it: by default 64 on a CPU and 256 on a GPU."),
    ("[Can I|Could I|Is it possible to] [serve several models|run two engines|use several engines|run more than one engine|use many engines][?|]", "Yes, several engines can run «behind» one front end, each with a socket of its own."),
)  # fmt: skip

WIRE_KINDS: tuple[tuple[str, int, str, str], ...] = (
    ("HELLO", 1, "client", "It opens the conversation: protocol, role and features of the client."),
    ("SUBMIT", 2, "client", "It hands a request to the engine: id, stream, prompt and parameters."),
    ("CANCEL", 3, "client", "It ends requests that are no longer wanted."),
    ("ATTACH", 4, "client", "It continues a stream from a cursor, for example after a lost connection."),
    ("CREDIT", 5, "client", "It acknowledges STEP messages, so that the engine sends more."),
    ("MODEL", 6, "client", "It asks for the tokenizer files of the model."),
    ("PING", 7, "client", "It is the sign of life of a silent client."),
    ("ADMIN", 8, "client", "It carries operator commands such as stats, flush and drain."),
    ("BYE", 9, "client", "It ends the connection; requests that are not detached are cancelled."),
    ("WELCOME", 65, "engine", "It answers HELLO with the engine's state, model and limits."),
    ("ACCEPT", 66, "engine", "It says that a request was taken."),
    ("REJECT", 67, "engine", "It says that a request was refused, with code, message and field."),
    ("STEP", 68, "engine", "It carries the new tokens of all streams of a client, one message per step."),
    ("PONG", 70, "engine", "It answers PING with the age of the last turn of the loop."),
    ("STATUS", 71, "engine", "It is published for everyone: queue depth, running requests and free memory."),
    ("ADMIN_REPLY", 72, "engine", "It answers an ADMIN command."),
    ("GOODBYE", 73, "engine", "It says that the engine will not speak to this client again."),
)  # fmt: skip
ASK_KIND = (
    "[What is|What's|What does|Explain|Tell me about|Describe|What is the purpose of|What do you know about|What is the meaning of] "
    "[the {kind} message|{kind}|a {kind} message|the message {kind}|{kind} on the wire|the wire kind {kind}|the kind {kind}][?|]"
)
ASK_KIND_NUMBER = (
    "[What is the number of|Which number has|What number is|What is the kind number of|Which kind number does|Tell me the number of] "
    "[the {kind} message|{kind}|the message {kind}|the kind {kind}|the wire kind {kind}][?|]"
)
ASK_NUMBER_KIND = (
    "[What is|Which message is|Which message has|What message is|What is the message of|Tell me about] "
    "[kind {number}|wire kind {number}|the kind {number}|message kind {number}|kind number {number}][?|]"
)
ASK_KEY = (
    "[What is|What does|Explain|Tell me about|What's|Describe|What is the meaning of|Can you explain|What do you know about] "
    "[{key}|the key {key}|the setting {key}|the option {key}|the flag --{key}|--{key}|the config key {key}][?|]"
)
ASK_KEY_DEFAULT = (
    "[What is the default of|What is the default value of|Which default has|What's the default for|Tell me the default of|"
    "What value has by default|Default of] [{key}|the key {key}|--{key}|the setting {key}|the option {key}][?|]"
)
ASK_ERROR = (
    "[What does the error|What does|What is|Explain|What should I do about|I get|I got the error|How do I fix|What is the remedy for|"
    "Tell me about the error|What do I do with] {code}[?| mean?|.]"
)
