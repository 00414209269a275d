"""Headers of GGUF files: what they say is read, and what is broken or hostile is refused at once, by name."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inferengine.config import Config
from inferengine.config.model_path import model_folder, served_name, to_fetch, weight_paths
from inferengine.errors import ConfigError
from inferengine.gguf.checkpoint import config_values, tensor_sources
from inferengine.gguf.reader import LazyList, read_gguf

MUCH = 1 << 62


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(*parts: bytes, tensors: int = 0, values: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)


def with_data(content: bytes, num_bytes: int) -> bytes:
    return content + bytes(-len(content) % 32 + num_bytes)


WHOLE = with_data(header(tensor("a", 8, 2), tensor("b", 8, offset=64), tensors=2), 96)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\x03\x04" + bytes(100), "it is no GGUF file"),
    "cut in the header": (header()[:12], "it ends before the"),
    "cut in the data": (WHOLE[:-1], "the tensor b lies outside of the"),
    "first version": (header(version=1), "version 1 of the format is not read; 2 and 3 are"),
    "other byte order": (header(version=3 << 24), "written for machines of the other byte order"),
    "very many tensors": (header(tensors=MUCH), "it ends before the 4611686018427387904 tensors that it announces"),
    "very many values": (header(values=MUCH), "it ends before the 4611686018427387904 metadata values"),
    "a very long key": (header(struct.pack("<Q", MUCH), bytes(20), values=1), "a name of 4611686018427387904 bytes"),
    "a very long text": (header(pair("k", 8, struct.pack("<Q", MUCH)), values=1), "it ends before the"),
    "a very long list": (header(pair("k", 9, struct.pack("<IQ", 4, MUCH)), values=1), "it ends before the"),
    "a very long list of texts": (header(pair("k", 9, struct.pack("<IQ", 8, MUCH)), values=1), "it ends before the"),
    "very many texts": (
        with_data(header(pair("k", 9, struct.pack("<IQ", 8, 5 << 20)), values=1), 40 << 20),
        "a list of 5242880 texts is too long",
    ),
    "lists in lists": (header(pair("k", 9, struct.pack("<IQ", 9, 1)), values=1), "a list has items of type 9"),
    "a type of values": (header(pair("k", 77, b""), bytes(9), values=1), "a value is of type 77"),
    "text that is none": (header(pair("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"), values=1), "is not UTF-8"),
    "a key twice": (header(pair("k", 4, bytes(4)), pair("k", 4, bytes(4)), values=2), "the key k stands in it twice"),
    "a tensor twice": (with_data(header(tensor("a", 8), tensor("a", 8), tensors=2), 64), "the tensor a stands in it"),
    "overlapping": (with_data(header(tensor("a", 16), tensor("b", 16, offset=32), tensors=2), 96), "lies over another"),
    "far away": (with_data(header(tensor("a", 8, offset=MUCH), tensors=1), 32), "the tensor a lies outside of"),
    "not aligned": (with_data(header(tensor("a", 8, offset=4), tensors=1), 64), "or is not aligned"),
    "no dimensions": (header(tensor("a"), bytes(16), tensors=1), "the tensor a has 0 dimensions"),
    "huge dimensions": (header(tensor("a", MUCH, MUCH), tensors=1), "cannot be F32"),
    "rows of no whole block": (header(tensor("a", 33, kind=8), tensors=1), "the tensor a of shape [33] cannot be Q8_0"),
    "a type of tensors": (header(tensor("a", 32, kind=99), tensors=1), "the tensor a is of type 99"),
    "alignment": (header(pair("general.alignment", 4, struct.pack("<I", 3)), values=1), "is no power of two"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_broken_is_refused_without_much_memory(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as error:
            read_gguf(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message in error.value.message
    assert error.value.message.startswith("bad.gguf: ")
    assert most < 1 << 20


def test_every_cut_and_every_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = model(path).read_bytes()
    end = min(info.begin for info in read_gguf(path).tensors.values())
    messages = []
    for place in range(0, end, 7):
        for content in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
            broken = tmp_path / f"bad-{place}-{len(content)}.gguf"
            broken.write_bytes(content)
            try:
                config_values(broken)
            except ConfigError as error:
                messages.append(error.message)
            broken.unlink()
    assert len(messages) > end // 7  # of each cut one, and of many changes
    assert all(message.startswith("bad-") for message in messages)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "phi3"])
@pytest.mark.parametrize("changed", [{"heads": 0}, {"embedding": 0}])
def test_heads_of_no_size_are_refused_by_name(architecture: str, changed: dict[str, int], tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf", architecture=architecture, blocks=46, **changed)
    with pytest.raises(ConfigError, match="attention heads of"):
        config_values(path)


def test_a_tensor_for_each_byte_is_refused_before_the_memory_is_full(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kind = pair("general.architecture", 8, text("qwen3moe"))
    experts = tensor("blk.0.ffn_up_exps.weight", 1, 1, 2 << 20, kind=24)
    path.write_bytes(with_data(header(kind, experts, tensors=1, values=1), 2 << 20))
    with pytest.raises(ConfigError, match=r"ffn_up_exps\.weight makes more than 1048576 of one model"):
        tensor_sources(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("k", 8, 16, 2)], "the tensor blk.0.attn_v_b.weight is missing"),
        (
            [("k", 8, 16, 2), ("v", 16, 12, 3)],
            "the shapes of blk.0.attn_k_b.weight and blk.0.attn_v_b.weight do not fit",
        ),
        ([("k", 8, 16, 2), ("v", 12, 12, 2)], "do not fit each other"),
        ([("k", 16, 16), ("v", 16, 24)], "do not fit each other"),
    ],
)
def test_matrices_of_latents_that_are_not_one_are_refused(
    tensors: list[tuple[Any, ...]], message: str, tmp_path: Path
) -> None:
    path, places = tmp_path / "m.gguf", range(0, 1 << 20, 1 << 14)
    kind = pair("general.architecture", 8, text("deepseek2"))
    made = [
        tensor(f"blk.0.attn_{name}_b.weight", *shape, offset=place)
        for (name, *shape), place in zip(tensors, places, strict=False)
    ]
    path.write_bytes(with_data(header(kind, *made, tensors=len(made), values=1), 1 << 16))
    with pytest.raises(ConfigError, match=message):
        tensor_sources(path)


def test_the_matrices_of_latents_are_one(tmp_path: Path) -> None:
    """Of 2 heads: keys of 8 numbers and values of 12, of latents of 16."""
    path = tmp_path / "m.gguf"
    kind = pair("general.architecture", 8, text("deepseek2"))
    both = tensor("blk.3.attn_v_b.weight", 16, 12, 2, offset=1 << 14), tensor("blk.3.attn_k_b.weight", 8, 16, 2)
    path.write_bytes(with_data(header(kind, *both, tensors=2, values=1), 1 << 16))
    found = tensor_sources(path)
    assert {name: source.shape for name, source in found.items()} == {
        "model.layers.3.self_attn.kv_b_proj.weight": (2 * (8 + 12), 16)
    }


def model(path: Path, **values: Any) -> Path:
    """Return a tiny file of one layer without all its tensors."""
    writer = gguf.GGUFWriter(path, values.get("architecture", "llama"))
    writer.add_context_length(64)
    writer.add_embedding_length(values.get("embedding", 32))
    writer.add_block_count(values.get("blocks", 1))
    writer.add_feed_forward_length(64)
    writer.add_head_count(values.get("heads", 2))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "b", "c"] * 200)
    for name, kind in {"token_embd.weight": "F32", **values.get("tensors", {})}.items():
        number = gguf.GGMLQuantizationType[kind]
        raw = (
            np.zeros((4, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
            if kind != "F32"
            else np.zeros((4, 32), np.float32)
        )
        writer.add_tensor(name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_places_are_the_packages(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf", tensors={"output.weight": "Q8_0"})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {info.name: (info.type, info.begin, info.num_bytes) for info in ours.tensors.values()} == {
        each.name: (each.tensor_type.name, each.data_offset, each.n_bytes) for each in theirs.tensors
    }
    assert ours.integer("llama.block_count") == 1
    assert isinstance(ours.metadata["tokenizer.ggml.tokens"], LazyList)
    assert ours.value("tokenizer.ggml.tokens", list) == ["a", "b", "c"] * 200
    assert config_values(path)["rms_norm_eps"] == 1e-6
    with pytest.raises(ConfigError, match=r"llama\.block_count is a int"):
        ours.value("llama.block_count", str)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architecture": "mamba"}, "the architecture mamba is not read from GGUF files"),
        ({"architecture": "qwen3next"}, "the nearest that is: qwen3"),
        ({"tensors": {"blk.0.ssm_in.weight": "F32"}}, "the tensor blk.0.ssm_in.weight is unexpected"),
        ({"tensors": {"blk.0.ffn_up.weight": "IQ4_XS"}}, "is stored as IQ4_XS, which is not read: the nearest"),
        ({"tensors": {"blk.0.ffn_up.weight": "Q2_K"}}, "the nearest that is: Q4_K_M"),
    ],
)
def test_what_has_no_family_or_kernel_is_refused_with_what_is_near(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = model(tmp_path / "m.gguf", **values)
    with pytest.raises(ConfigError) as error:
        config_values(path)
    assert message in error.value.message


def test_a_file_a_folder_of_one_and_a_split_model_are_found(tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    path = model(single / "tiny.gguf")
    for name in (path, single):
        config = Config().with_values(model={"path": str(name)})
        assert model_folder(config) == path
        assert to_fetch(str(name)) == ""
        assert weight_paths(model_folder(config)) == [path]
    assert served_name(Config().with_values(model={"path": str(path)})) == "tiny"
    model(single / "other.gguf")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF models \(other.gguf, tiny.gguf\): name one of the files"):
        model_folder(Config().with_values(model={"path": str(single)}))
    parts = [tmp_path / f"big-0000{index}-of-00002.gguf" for index in (1, 2)]
    model(parts[0])
    with pytest.raises(ConfigError, match=r"big-00002-of-00002\.gguf is missing beside"):
        read_gguf(parts[0])
    parts[1].write_bytes(with_data(header(tensor("output.weight", 32, 4), tensors=1), 512))
    assert set(read_gguf(parts[1]).tensors) == {"token_embd.weight", "output.weight"}
    assert weight_paths(parts[0]) == parts
    parts[1].write_bytes(with_data(header(tensor("token_embd.weight", 32, 4), tensors=1), 512))
    with pytest.raises(ConfigError, match=r"token_embd\.weight stands in big-00001-of-00002\.gguf too"):
        read_gguf(parts[0])
