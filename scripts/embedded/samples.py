"""What a visitor of the chat page might type: written by hand, not drawn from the generator, and reported unedited."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    *((("user", text),) for text in (
        "Hello!", "hi", "who are you", "what can you do?", "What is a KV cache and why do I need it?", "whats continuous batching",
        "explain paged attention please", "how does speculative decoding work", "What port does the http server listen on?",
        "how do i start the server", "how can I use curl to get a completion?", "what is SUBMIT", "what does STEP carry",
        "what's cache.block_size", "what is 2+2", "what is 17 + 25?", "12 * 11", "100 - 37", "whats 348 plus 275",
        "Tell me a story about a robot.", "Write a short story about a fox and an owl.", "tell me a joke",
        'Extract name and city as JSON: "Maria Lopez lives in Lisbon."',
        "Extract the name, age and job from: Tom Baker is 42 years old and works as a pilot.",
        "What is the capital of France?", "What is the opposite of hot?", "List three fruits.", "Say hello three times.",
        "Who is the president of the United States?", "Write a Python function that adds two numbers.",
        "What is the difference between latency and throughput?", "Anna has 5 apples and buys 7 more. How many apples does she have?",
        "How many legs does a spider have?", "Why is the sky blue?", "What is love?", "thanks", "asdf", "Explain quantum physics.",
        "Write a poem about the sea.", "Can you help me with my homework?", "how do I stream", "how do I stop a request",
        "what is the default port", "how do i use lora", "where are the docs", "what is an llm", "what is 15% of 200", "7 squared",
        'extract city and date from "Ana flies to Rome on 3 May 2024"', "bye",
    )),
    (("user", "My name is Robin."), ("assistant", "Nice to meet you, Robin!"), ("user", "What's my name?")),
    (("user", "What is 5 + 6?"), ("assistant", "5 + 6 = 11."), ("user", "times 2?")),
    (("system", "You are Ada, a helpful assistant."), ("user", "Who are you?")),
    (("system", "You are a helpful assistant."), ("user", "Tell me about prefix caching."),
     ("assistant", "Prefix caching reuses the KV blocks of a prompt's beginning when another request starts with the same tokens."),
     ("user", "why is that useful?")),
)  # fmt: skip

COMPLETIONS: tuple[str, ...] = (
    "Once upon a time", "Once upon a time there was a little robot", "The KV cache", "What is continuous batching?", "Hello",
    "Q: What is the capital of Italy?\nA:", "12 + 30 =", "Long ago, in a valley", "Continuous batching is", "The engine",
    "Hello, my name is", "The capital of France is",
)  # fmt: skip
