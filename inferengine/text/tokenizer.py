"""Tokenizer: text to token ids and back, from the files of a checkpoint that are sent over the wire. Needs only the
`tokenizers` package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from inferengine.errors import InferEngineError
from inferengine.text.token_bounds import BYTE_CHARACTERS, PIECE_CHARACTERS, TokenBounds

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
SHORT_TEXT_CHARACTERS = 1000  # tokenized in a millisecond or two


def fingerprint(files: Mapping[str, bytes]) -> str:
    """Hash names and contents in the order of the names (SHA-256, hex): equal for engines with the same files."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Read the named file as a map; empty when it is absent. Raises InferEngineError when it holds anything else."""
    content = files.get(name)
    if content is None:
        return {}
    try:
        document = json.loads(content)
    except ValueError:
        raise InferEngineError("engine_error", f"{name} of the model is not valid JSON") from None
    if not isinstance(document, dict):
        raise InferEngineError("engine_error", f"{name} of the model does not hold a JSON object")
    return document


def special_token_strings(files: Mapping[str, bytes]) -> dict[str, str]:
    """Read `bos_token`, `eos_token`, ... as strings, as chat templates use them."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(files, name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
    return named


class Tokenizer:
    """A vocabulary and its rules. Thread-safe: only caches change after construction."""

    def __init__(self, fast: FastTokenizer, special_tokens: Mapping[str, str], files_fingerprint: str) -> None:
        fast.no_truncation()  # some tokenizer.json carry the training run's settings
        fast.no_padding()
        self._fast = fast
        self.special_tokens = dict(special_tokens)
        self.fingerprint = files_fingerprint
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        document = json.loads(fast.to_str())
        self.is_byte_level = _decoder_types(document.get("decoder")) == {"ByteLevel"}
        self._bounds = TokenBounds(document, fast.get_vocab(with_added_tokens=True))
        self._frame = self._find_frame()
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}  # of tokens that are whole characters, filled in by detokenizers

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Make a tokenizer of `files`, by name; `tokenizer.json` must be among them. Raises InferEngineError."""
        content = files.get("tokenizer.json")
        if content is None:
            raise InferEngineError("engine_error", "the model has no tokenizer.json")
        try:
            fast = FastTokenizer.from_buffer(content)
        except Exception:  # the library raises plain Exception
            raise InferEngineError("engine_error", "tokenizer.json of the model cannot be read") from None
        return cls(fast, special_token_strings(files), fingerprint(files))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize `text`. A long text is tokenized without the GIL, so that a thread can do it."""
        if len(text) <= SHORT_TEXT_CHARACTERS:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return [token_id for part in self.parts(text, add_special_tokens) for token_id in part]

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without tokenizing it; 0 where none is known."""
        return self._bounds.least_tokens(text)

    def parts(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Tokenize `text` piece by piece, on demand: the caller may stop early, and memory is that of a piece. A text
        that cannot be cut exactly is one part."""
        if self._frame is None or len(text) <= PIECE_CHARACTERS:
            yield self._encode(text, add_special_tokens)
            return
        prefix, suffix = self._frame if add_special_tokens else ([], [])
        yield prefix
        for piece in self._bounds.pieces(text):
            yield self._encode(piece, False)
        yield suffix

    def last_parts(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Tokenize `text` as `parts` does, but from its end: the last part comes first."""
        if self._frame is None or len(text) <= PIECE_CHARACTERS:
            yield self._encode(text, add_special_tokens)
            return
        prefix, suffix = self._frame if add_special_tokens else ([], [])
        yield suffix
        for piece in self._bounds.last_pieces(text):
            yield self._encode(piece, False)
        yield prefix

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL, seconds for a megabyte; this call gives the same ids without offsets
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def _find_frame(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after every text. None where they cannot be distinguished from the text's
        own."""
        probe = "a b"
        plain = self._fast.encode(probe, add_special_tokens=False).ids
        whole = self._fast.encode(probe, add_special_tokens=True).ids
        places = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
        if len(places) != 1 or not plain:
            return None
        return whole[: places[0]], whole[places[0] + len(plain) :]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids beyond the vocabulary (padding rows of the model's head) have none."""
        if len(token_ids) <= SHORT_TEXT_CHARACTERS:
            text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:  # for the interpreter's lock, as above
            (text,) = self._fast.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token, which is left out of texts by default."""
        return token_id in self._special_ids

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its text; None where there is none."""
        found: int | None = self._fast.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for inside a text; empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def _token_bytes(self, token_id: int) -> bytes:
        token: str | None = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(map(BYTE_CHARACTERS.__getitem__, token))
            except KeyError:  # the decoder takes such a token literally too
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    nested = (_decoder_types(item) for item in decoder.get("decoders", ()))
    own = set() if "decoders" in decoder else {str(decoder.get("type"))}
    return own.union(*nested)
