"""Text to token ids and back: the tokenizer of a checkpoint, bounds on a text's tokens, and the text of an output as
its tokens arrive, with stop strings.

Tokenizer reads the files of a checkpoint that are sent over the wire. It needs only the `tokenizers` package.

TokenBounds: bounds on a text's tokens without tokenizing it: the least possible number, and places where it can be cut.
Both follow from the tokenizer's own description, and only from parts whose meaning is known exactly. For anything else
nothing is claimed: a text that would be served is never refused, and the pieces give exactly the tokens of the whole.

TextStream makes the text of an output. Front ends and the engine's own text path both use it, so they give the same
text for the same tokens. It has two parts:

Detokenizers return text that never changes afterwards; joined it equals the decode of all ids. Byte-level vocabularies
(GPT-2, Llama 3, Qwen) are decoded by a table of bytes and an incremental UTF-8 decoder. In all others (SentencePiece
with byte fallback, WordPiece, ...) the text of a token depends on its neighbours, so a window of ids is decoded.

StopStringFinder finds stop strings wherever tokens cut them, and never shows a part of one. One automaton (Aho and
Corasick, 1975) holds all strings of a request: a state is the longest end of the text so far that begins a stop string,
so its depth is the number of characters to hold back.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer as FastTokenizer

from inferengine.errors import InferEngineError

# -- bounds ------------------------------------------------------------------------------------------------------------

PIECE_CHARACTERS = 64 * 1024  # 60 ms of tokenizing, and 10 MB
CONTEXT_TOKENS = 4  # of the prompt, for decoders whose text depends on the tokens before

# The expressions that byte-level vocabularies split a text by (GPT-2's is in the library). In all of them a letter
# belongs to a run of letters, perhaps with an apostrophe's ending, which ends before every character of _CUT, and the
# next match does not depend on what is before it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s+(?!\S)|\s+"
_KNOWN_SPLITS = frozenset(
    {
        # Llama 3, cl100k; Qwen 2 and 3
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|\s*[\r\n]+|{_TAIL}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_TAIL}",
        # this repository's own
        rf"{_CONTRACTIONS}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_TAIL}",
        # GPT-2, written out
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_TAIL}",
        # o200k
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# A letter of scripts that are in every version of Unicode, then a character that ends a run of letters in all of them.
_CUT = re.compile(r"[A-Za-zа-яА-Я぀-ゖァ-ヺ一-龥가-힣](?=[ \n.,;:!?。，、！？；：])")
# Normalizers, with the factor by which they may shrink a text in bytes: an ASCII text, and any text. Canonical
# composition shrinks at most four bytes to one (U+1FBE, U+0308, U+0301: seven to two).
_SHRINKS = {"NFC": (1, 4), "NFD": (1, 4), "Prepend": (1, 1)}


class TokenBounds:
    """The bounds of one tokenizer, from its `tokenizer.json`."""

    def __init__(self, document: dict[str, Any], vocabulary: dict[str, int]) -> None:
        """`vocabulary`: token to id, added tokens included."""
        added = [token for token in document.get("added_tokens") or () if isinstance(token, dict)]
        self._strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
        self._shrinks = _shrinks(document.get("normalizer"))
        self._longest = 0  # bytes of text that one token may stand for; 0: unknown
        if self._shrinks and _keeps_all(document.get("pre_tokenizer")):
            self._longest = _longest_token(document, vocabulary, added)
        self._can_cut = (
            _splits_at_cuts(document.get("pre_tokenizer"))
            and (document.get("normalizer") or {}).get("type") in (None, "NFC")
            and (document.get("model") or {}).get("type") == "BPE"
            and not self._strips
            and not any(token.get("single_word") or _CUT.search(str(token.get("content"))) for token in added)
        )

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that no tokenization of `text` can be below; 0 where nothing is known."""
        if not self._longest:
            return 0
        if self._strips:  # such a token includes any amount of white space around it
            text = "".join(text.split())
        ascii_factor, factor = self._shrinks or (1, 1)
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-num_bytes // (self._longest * (ascii_factor if text.isascii() else factor)))

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text into pieces whose tokens, joined, are those of the whole. A piece is longer than PIECE_CHARACTERS
        only where there is no known place to cut it."""
        start = 0
        while self._can_cut and len(text) - start > PIECE_CHARACTERS:
            end = self._cut_before(text, start, start + PIECE_CHARACTERS)
            if not end:
                found = _CUT.search(text, start + PIECE_CHARACTERS - 1)
                end = found.end() if found else 0
            if not end:
                break
            yield text[start:end]
            start = end
        yield text[start:]

    def last_pieces(self, text: str) -> Iterator[str]:
        """Cut a text as `pieces` does, but from its end: the last piece comes first."""
        end = len(text)
        while self._can_cut and end > PIECE_CHARACTERS:
            start = self._cut_before(text, 0, end - PIECE_CHARACTERS)
            if not start:
                break
            yield text[start:end]
            end = start
        yield text[:end]

    @staticmethod
    def _cut_before(text: str, start: int, end: int) -> int:
        """Return the last place to cut in text[start:end], searched in growing windows; 0 where there is none."""
        window = 256
        while True:
            first = max(start, end - window)
            places = [found.end() for found in _CUT.finditer(text, first, end + 1) if found.end() <= end]
            if places and places[-1] > start:
                return places[-1]
            if first == start:
                return 0
            window *= 8


def _shrinks(normalizer: Any) -> tuple[int, int] | None:
    """Return how many bytes of text may become one byte by normalizing: of an ASCII text, and of any. None: unknown."""
    if normalizer is None:
        return (1, 1)
    kind = normalizer.get("type")
    if kind == "Sequence":
        ascii_factor = factor = 1
        for item in normalizer.get("normalizers") or ():
            found = _shrinks(item)
            if found is None:
                return None
            ascii_factor, factor = ascii_factor * found[0], factor * found[1]
        return (ascii_factor, factor)
    if kind == "Replace":
        old, new = (normalizer.get("pattern") or {}).get("String"), normalizer.get("content")
        longer = isinstance(old, str) and isinstance(new, str) and 0 < len(old.encode()) <= len(new.encode())
        return (1, 1) if longer else None
    return _SHRINKS.get(kind)


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Return whether it splits the text and drops none of it."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_keeps_all(item) for item in pre_tokenizer.get("pretokenizers") or ())
    if kind == "Split":
        return pre_tokenizer.get("behavior") in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    return kind in ("ByteLevel", "Digits", "Metaspace")


def _longest_token(document: dict[str, Any], vocabulary: dict[str, int], added: list[dict[str, Any]]) -> int:
    """Return the most bytes of normalized text that one token stands for; 0 where characters may be dropped, or many of
    them become one unknown token."""
    model = document.get("model") or {}
    if model.get("type") not in ("BPE", "Unigram"):
        return 0
    if _is_byte_level(document.get("pre_tokenizer")) and model.get("type") == "BPE":
        if not all(character in vocabulary for character in BYTE_CHARACTERS):
            return 0
        lengths = [len(token) for token in vocabulary]  # a character for each byte
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        lengths = [len(token.encode()) for token in vocabulary]
    else:
        return 0
    contents = (len(str(token.get("content")).encode()) for token in added)
    return max(max(lengths, default=0), max(contents, default=0))


def _is_byte_level(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    items = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return any(item.get("type") == "ByteLevel" for item in items)


def _splits_at_cuts(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _KNOWN_SPLITS
    return False


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character that stands for one in GPT-2's vocabulary (Radford et al. 2019,
    encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return table


BYTE_CHARACTERS = byte_alphabet()


# -- the tokenizer -----------------------------------------------------------------------------------------------------

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
    except (ValueError, RecursionError) as error:
        raise InferEngineError("engine_error", f"{name} of the model is not valid JSON ({error})") from None
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
        except BaseException as error:  # the library raises plain Exception, and PanicException where Rust panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InferEngineError("engine_error", "tokenizer.json of the model cannot be read") from None
        return cls(fast, special_token_strings(files), fingerprint(files))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize `text`. A long text is tokenized without the GIL, so that a thread can do it."""
        if len(text) <= SHORT_TEXT_CHARACTERS:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return [token_id for part in self.parts(text, add_special_tokens) for token_id in part]

    def pair_frame(self) -> tuple[list[int], list[int], list[int]] | None:
        """Return the special tokens before, between and after the texts of a pair. None where they cannot be
        distinguished from the texts' own."""
        probe = "a b"
        plain: list[int] = self._fast.encode(probe, add_special_tokens=False).ids
        whole: list[int] = self._fast.encode(probe, probe, add_special_tokens=True).ids
        size = len(plain)
        places = [at for at in range(len(whole) - size + 1) if whole[at : at + size] == plain]
        if len(places) != 2 or not plain:
            return None
        first, second = places
        return whole[:first], whole[first + size : second], whole[second + size :]

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
        """Return the special tokens before and after every text. None where they cannot be distinguished from the
        text's own."""
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
        """Return whether it is a special token, which is left out of texts by default."""
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


REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens. Longer runs of held tokens are bytes that are not text; the
# limit bounds the window, and so the cost of a token.
MAX_HELD_TOKENS = 64
_UTF8 = codecs.getincrementaldecoder("utf-8")


# -- the text of an output ---------------------------------------------------------------------------------------------


class Detokenizer(Protocol):
    """Decodes the tokens of one output."""

    def push(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes; empty in the middle of a character."""
        ...

    def flush(self) -> str:
        """End the output. Returns what is still held; bytes that are no character become U+FFFD."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
) -> Detokenizer:
    """Make the detokenizer for a vocabulary. `context_ids` are the last tokens before the output: some decoders strip a
    space at the start of a text, which an output that continues a prompt is not. Their own text is not returned."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens, context_ids)


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings. Most tokens are whole characters: between characters their text
    is the same in every output, and is looked up."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _UTF8("replace")
        self._decode = self._decoder.decode
        self._within = False  # in the middle of a character
        self._whole = tokenizer.whole_texts

    def push(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes."""
        if not self._within and (text := self._whole.get(token_id)) is not None:
            return text
        is_special = self._tokenizer.is_special(token_id)
        if is_special and self._skip_special_tokens:
            return ""
        began_within, text = self._within, self._decode(self._tokenizer.token_bytes(token_id))
        self._within = bool(self._decoder.getstate()[0])
        if not began_within and not self._within and not is_special:
            self._whole[token_id] = text
        return text

    def flush(self) -> str:
        """End the output. Returns U+FFFD for a character that is incomplete."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary. Two windows of ids are kept, as in vLLM's first detokenizer: the text of
    `ids[:known]` was returned already and serves as context; the rest is new, and its end may still become a
    character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(context_ids)
        self._known = len(self._ids)
        self._known_text = self._text() if context_ids else ""

    def push(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes."""
        self._ids.append(token_id)
        text = self._text()
        settled = len(text) > len(self._known_text) and not text.endswith(REPLACEMENT)
        if not settled and len(self._ids) - self._known < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """End the output. Returns what is still held."""
        return self._give_out(self._text()) if len(self._ids) > self._known else ""

    def _give_out(self, text: str) -> str:
        new = text[len(self._known_text) :]
        if new:
            del self._ids[: self._known]
            self._known = len(self._ids)
            self._known_text = self._text()
        else:  # tokens without text of their own (skipped specials): keep what precedes them as context
            del self._ids[self._known :]
        return new

    def _text(self) -> str:
        return self._decode(self._ids, self._skip_special_tokens)


class StopMatch(NamedTuple):
    """`text` may be shown now; `stop` is the string that ended the output, or None."""

    text: str
    stop: str | None


class StopStringFinder:
    """Finds the stop strings of one output. The match that completes first wins; of several that end together, the
    longest. So the result does not depend on how the text was cut."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._links()
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take more text. After a match nothing more may be pushed."""
        state = self._state
        for position, character in enumerate(text):
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            stop = self._match[state]
            if stop is not None:
                seen, self._held = self._held + text[: position + 1], ""
                return StopMatch(seen if self._include else seen[: len(seen) - len(stop)], stop)
        self._state = state
        seen = self._held + text
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return StopMatch(seen[:cut], None)

    def flush(self) -> str:
        """End the output without a match. Returns the text held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = stop

    def _links(self) -> list[int]:
        """Return, for each state, its longest proper suffix that is a state too, breadth first."""
        fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
            for character, child in self._next[state].items():
                link = fail[state]
                while link and character not in self._next[link]:
                    link = fail[link]
                fail[child] = self._next[link].get(character, 0)
                queue.append(child)
        return fail


class TextDelta(NamedTuple):
    """`text` is new; `stop` is the stop string that ended the output here, or None; `num_tokens` counts the tokens of
    the output so far, up to and including the one that completed the stop string."""

    text: str
    stop: str | None
    num_tokens: int


class TextStream:
    """Decodes one output. `context_ids` are the last prompt tokens, for decoders that strip a leading space. Stop
    strings in the first `min_tokens` tokens do not count."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        context_ids: Sequence[int] = (),
    ) -> None:
        detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids)
        self._push_token, self._flush = detokenizer.push, detokenizer.flush
        self._stops = StopStringFinder(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there are no stop strings."""
        return self._stops is None

    def push_plain(self, token_id: int) -> str:
        """Do what `push` does for one token that does not end the output, where there are no stop strings."""
        self.num_tokens += 1
        return self._push_token(token_id)

    def push(self, token_ids: Sequence[int], final: bool = False, stop_token: bool = False) -> TextDelta:
        """Take the next tokens. `final`: these are the last, so nothing stays held back. `stop_token`: the last of them
        ended the output by its id, and has no text unless stops are included. Tokens after a stop string are ignored
        and not counted."""
        hidden = 1 if stop_token and token_ids and not self._include_stop else 0
        shown = token_ids[:-1] if hidden else token_ids
        if self._stops is None:
            text = "".join(map(self._push_token, shown))
            self.num_tokens += len(token_ids)
            return TextDelta(text + self._flush() if final else text, None, self.num_tokens)
        parts: list[str] = []
        for token_id in shown:
            if self.stopped is None:
                self.num_tokens += 1
                self._match(self._push_token(token_id), parts)
        if self.stopped is None:
            self.num_tokens += hidden
            if final:
                self._match(self._flush(), parts)
                parts.append(self._stops.flush())
        return TextDelta("".join(parts), self.stopped, self.num_tokens)

    def _match(self, text: str, parts: list[str]) -> None:
        """Append the part of `text` that may be shown, and note the stop string that it completes."""
        if self._stops is None or self.num_tokens < self._min_tokens:
            parts.append(text)
            return
        shown, self.stopped = self._stops.push(text)
        parts.append(shown)
