"""The tokenizer: byte-level BPE of 4,096 tokens, every digit a token of its own, one marker for each role of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus import Document

VOCABULARY_SIZE = 4096
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLES.values())  # their ids are 0, 1, 2, ...
CONTEXT_LENGTH = 2048

# Contractions, words with the space before them, single digits, signs, white space: after GPT-4's pattern.
_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['content'] is string %}
        {%- set content = message['content'] | trim %}
    {%- else %}
        {%- set gathered = namespace(text='') %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'text' %}
                {%- set gathered.text = gathered.text + ('\\n' if gathered.text else '') + part['text'] %}
            {%- endif %}
        {%- endfor %}
        {%- set content = gathered.text | trim %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|assistant|>' + content + eos_token }}
    {%- elif message['role'] in ['system', 'developer'] %}
        {{- '<|system|>' + content + eos_token }}
    {%- elif message['role'] in ['user', 'tool'] %}
        {{- '<|user|>' + content + eos_token }}
    {%- else %}
        {{- raise_exception('the role of a message must be system, developer, user, assistant or tool') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def texts_of(documents: Iterable[Document]) -> Iterable[str]:
    for document in documents:
        if isinstance(document, str):
            yield document
        else:
            yield from (content for _, content in document)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer that writes BOS before a text; deterministic for the same texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]),
        ]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[tuple[list[int], list[int]]]:
    """Return per document its token ids and, per token, 1 where it is to be predicted: answers and their ends in a
    chat, everything in a plain text. A chat reads exactly as the chat template renders it."""
    role_ids = {role: tokenizer.token_to_id(marker) for role, marker in ROLES.items()}
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    contents = [item.strip() if isinstance(item, str) else item for item in texts_of(documents)]
    encoded = iter(tokenizer.encode_batch_fast(contents, add_special_tokens=False))
    result = []
    for document in documents:
        ids, learned = [bos], [0]
        if isinstance(document, str):
            ids += [*next(encoded).ids, eos]
            learned += [1] * (len(ids) - 1)
        else:
            for role, _ in document:
                piece = [*next(encoded).ids, eos]
                ids += [role_ids[role], *piece]
                learned += [0] + [int(role == "assistant")] * len(piece)
        result.append((ids, learned))
    return result
