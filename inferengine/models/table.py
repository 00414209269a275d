"""FAMILIES, as data: the architectures that this engine serves with layers of its own, and checkpoints that also see or
hear, whose text model it serves. docs/models.md and `inferengine models` print it; it imports nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Family(NamedTuple):
    """One architecture that config.json may name."""

    architecture: str
    module: str  # of inferengine/models
    model_type: str  # of configs that name no architecture
    sizes: tuple[float, ...]  # published, in 10^9 parameters
    models: str  # what people know it by
    formats: tuple[str, ...] = ("bf16", "8 bits", "4 bits")  # of BYTES, in which this engine holds it
    tools: str = ""  # the formats of tool calls of its models: names of text/tool_parsers
    speed: str = ""  # decoded tokens a second, measured; with the size
    checkpoints: str = "all"  # the layouts of weights that are read; docs/models.md says what "all" is
    lora: str = "linear layers"  # what adapters may change


MIXTURE = "attention, shared and dense blocks"  # what adapters of a mixture of experts may change

WITHOUT_EXPERTS = "linear layers but experts"  # of families of which some sizes have experts

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        "llama",
        (1.2, 3.2, 8, 70.6),
        "Llama 2, 3.x; Falcon 3, SmolLM 2, Vicuna, Yi and others built like them",
        tools="llama3_json, hermes",
        speed="8: 256 of 1 row, 12,712 of 64",
    ),
    Family(
        "MistralForCausalLM",
        "families.mistral",
        "mistral",
        (7.2, 12.2, 23.6),
        "Mistral 7B, Nemo, Small 3",
        tools="mistral",
    ),
    Family("MinistralForCausalLM", "families.mistral", "ministral", (8,), "Ministral 8B", tools="mistral"),
    Family(
        "Ministral3ForCausalLM",
        "families.ministral3",
        "ministral3",
        (3.4, 8.4, 13.5),
        "Ministral 3, text",
        tools="mistral_args",
    ),
    Family(
        "Qwen2ForCausalLM",
        "families.qwen2",
        "qwen2",
        (0.5, 1.5, 3.1, 7.6, 14.8, 32.8, 72.7),
        "Qwen 2 and 2.5, dense",
        tools="hermes",
    ),
    Family(
        "Qwen3ForCausalLM",
        "families.qwen3",
        "qwen3",
        (0.6, 1.7, 4, 8.2, 14.8, 32.8),
        "Qwen 3, dense",
        tools="hermes",
        speed="0.6: 1,473 of 1 row, 80,412 of 256",
    ),
    Family(
        "Phi3ForCausalLM", "families.phi3", "phi3", (3.8, 14.7), "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", tools="phi4_mini"
    ),
    Family("GemmaForCausalLM", "families.gemma", "gemma", (2.5, 8.5), "Gemma 1"),
    Family("Gemma2ForCausalLM", "families.gemma2", "gemma2", (2.6, 9.2, 27.2), "Gemma 2"),
    Family("Gemma3ForCausalLM", "families.gemma3", "gemma3_text", (0.27, 1), "Gemma 3 270M and 1B"),
    Family(
        "Gemma4ForCausalLM",
        "families.gemma4",
        "gemma4_text",
        (5.1, 8, 25.2, 30.7),
        "Gemma 4 E2B, E4B, 26B-A4B, 31B, saved as text models",
        tools="gemma4",
        lora=WITHOUT_EXPERTS,
    ),
    Family(
        "Gemma4UnifiedForCausalLM",
        "families.gemma4",
        "gemma4_unified_text",
        (12,),
        "Gemma 4 12B, saved as a text model",
        tools="gemma4",
    ),
    Family("Olmo2ForCausalLM", "families.olmo2", "olmo2", (1.5, 7.3, 13.7, 32.2), "OLMo 2"),
    Family("Olmo3ForCausalLM", "families.olmo3", "olmo3", (7.3, 32.2), "OLMo 3"),
    Family("GraniteForCausalLM", "families.granite", "granite", (2.5, 8.2), "Granite 3, dense", tools="granite"),
    Family(
        "MixtralForCausalLM",
        "families.mixtral",
        "mixtral",
        (46.7, 140.6),
        "Mixtral 8x7B, 8x22B",
        tools="mistral",
        lora=MIXTURE,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "families.qwen3_moe",
        "qwen3_moe",
        (30.5, 235.1),
        "Qwen 3, mixture of experts",
        tools="hermes, qwen3_coder",
        speed="30.5: 435 of 1 row, 4,145 of 64",
        lora=MIXTURE,
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "families.qwen2_moe",
        "qwen2_moe",
        (14.3, 57.4),
        "Qwen 1.5 and 2, mixture of experts",
        lora=MIXTURE,
    ),
    Family("OlmoeForCausalLM", "families.olmoe", "olmoe", (6.9,), "OLMoE", lora=MIXTURE),
    Family(
        "GraniteMoeForCausalLM",
        "families.granitemoe",
        "granitemoe",
        (1.3, 3.3),
        "Granite 3, mixture of experts",
        tools="granite",
        lora=MIXTURE,
    ),
    Family(
        "GptOssForCausalLM",
        "families.gpt_oss",
        "gpt_oss",
        (20.9, 116.8),
        "GPT-OSS",
        ("bf16", "4 bits"),
        "harmony",
        "20.9: 529 of 1 row, 10,682 of 64",
        "floats, MXFP4",
        "attention",
    ),
    Family(
        "DeepseekV2ForCausalLM",
        "families.deepseek_v2",
        "deepseek_v2",
        (15.7, 235.7),
        "DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
        lora=MIXTURE,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "families.deepseek_v3",
        "deepseek_v3",
        (671, 1026),
        "DeepSeek-V3, V3.1, R1; Kimi K2",
        tools="deepseek_v3, deepseek_v31, kimi_k2",
        lora=MIXTURE,
    ),
    Family("SmolLM3ForCausalLM", "families.smollm3", "smollm3", (3.1,), "SmolLM 3", tools="hermes"),
    Family(
        "GlmForCausalLM", "families.glm", "glm", (9.4,), "GLM-4-9B of 2024 in transformers' layout (glm-4-9b-chat-hf)"
    ),
    Family("Glm4ForCausalLM", "families.glm4", "glm4", (9.4, 32.6), "GLM-4-0414, GLM-Z1"),
    Family("SeedOssForCausalLM", "families.seed_oss", "seed_oss", (36.2,), "Seed-OSS", tools="seed_oss"),
    Family("CohereForCausalLM", "families.cohere", "cohere", (35, 104), "Command R, Command R+, Aya"),
    Family("Cohere2ForCausalLM", "families.cohere2", "cohere2", (8, 111), "Command R7B, Command A", tools="cohere"),
    Family("NemotronForCausalLM", "families.nemotron", "nemotron", (4.2, 8.3, 15.6), "Nemotron 3 and 4, Minitron"),
    Family("Starcoder2ForCausalLM", "families.starcoder2", "starcoder2", (3, 7.2, 16), "StarCoder 2"),
    Family("StableLmForCausalLM", "families.stablelm", "stablelm", (1.6, 2.8, 12.1), "StableLM 2, StableLM 3B"),
    Family(
        "GPTNeoXForCausalLM", "families.gpt_neox", "gpt_neox", (0.07, 0.41, 1.4, 2.8, 6.9, 12, 20.6), "GPT-NeoX, Pythia"
    ),
    Family("OPTForCausalLM", "families.opt", "opt", (0.125, 1.3, 2.7, 6.7, 13, 30, 66), "OPT, but for 350M"),
    Family(
        "Gemma3ForConditionalGeneration",
        "families.text_of_multimodal",
        "gemma3",
        (3.9, 11.8, 27),
        "Gemma 3 4B, 12B, 27B: their text model",
    ),
    Family(
        "Mistral3ForConditionalGeneration",
        "families.text_of_multimodal",
        "mistral3",
        (3.4, 8.4, 13.5, 23.6),
        "Mistral Small 3.1 and 3.2, Ministral 3, Magistral: their text model",
        tools="mistral, mistral_args",
    ),
    Family(
        "Qwen2VLForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen2_vl",
        (1.5, 7.6, 72.7),
        "Qwen 2-VL: its text model",
    ),
    Family(
        "Qwen2_5_VLForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen2_5_vl",
        (3.1, 7.6, 32.8, 72.7),
        "Qwen 2.5-VL: its text model",
    ),
    Family(
        "Qwen3VLForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen3_vl",
        (1.7, 4, 8.2, 32.8),
        "Qwen 3-VL, dense: its text model",
        tools="hermes",
    ),
    Family(
        "Qwen3VLMoeForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen3_vl_moe",
        (30.5, 235.1),
        "Qwen 3-VL, mixture of experts: its text model",
        tools="hermes",
        lora=MIXTURE,
    ),
    Family(
        "Gemma4ForConditionalGeneration",
        "families.text_of_multimodal",
        "gemma4",
        (5.1, 8, 25.2, 30.7),
        "Gemma 4 E2B, E4B, 26B-A4B, 31B: their text model",
        tools="gemma4",
        lora=WITHOUT_EXPERTS,
    ),
    Family(
        "Gemma4UnifiedForConditionalGeneration",
        "families.text_of_multimodal",
        "gemma4_unified",
        (12,),
        "Gemma 4 12B: its text model",
        tools="gemma4",
    ),
    Family(
        "Qwen3_5ForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen3_5",
        (0.8, 2, 4, 9, 27),
        "Qwen 3.5, dense: its text model, computed by transformers' modules",
        tools="qwen3_coder",
    ),
    Family(
        "Qwen3_5MoeForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen3_5_moe",
        (35, 122, 397),
        "Qwen 3.5 with experts: its text model, computed by transformers' modules",
        tools="qwen3_coder",
        lora=MIXTURE,
    ),
    Family(
        "Lfm2VlForConditionalGeneration",
        "families.text_of_multimodal",
        "lfm2_vl",
        (0.45, 1.6, 3),
        "LFM2-VL: its text model, computed by transformers' modules",
    ),
    Family(
        "Glm4vMoeForConditionalGeneration",
        "families.text_of_multimodal",
        "glm4v_moe",
        (106,),
        "GLM-4.5V: its text model, computed by transformers' modules",
        tools="glm45",
        lora=MIXTURE,
    ),
    Family(
        "Exaone4_5_ForConditionalGeneration",
        "families.text_of_multimodal",
        "exaone4_5",
        (33,),
        "EXAONE 4.5: its text model, computed by transformers' modules",
        tools="hermes",
    ),
    Family(
        "LlavaNextVideoForConditionalGeneration",
        "families.text_of_multimodal",
        "llava_next_video",
        (7.2, 34),
        "LLaVA-NeXT-Video: its text model",
    ),
    Family(
        "Glm4vForConditionalGeneration",
        "families.text_of_multimodal",
        "glm4v",
        (9.4,),
        "GLM-4.1V: its text model",
    ),
    Family(
        "AyaVisionForConditionalGeneration",
        "families.text_of_multimodal",
        "aya_vision",
        (8, 32.3),
        "Aya Vision: its text model",
    ),
    Family(
        "Cohere2VisionForConditionalGeneration",
        "families.text_of_multimodal",
        "cohere2_vision",
        (111,),
        "Command A Vision: its text model",
    ),
    Family(
        "Qwen2AudioForConditionalGeneration",
        "families.text_of_multimodal",
        "qwen2_audio",
        (7.7,),
        "Qwen 2-Audio: its text model",
    ),
    Family(
        "LlavaForConditionalGeneration",
        "families.text_of_multimodal",
        "llava",
        (6.7, 13),
        "LLaVA 1.5, Pixtral in transformers' layout: their text model",
    ),
    Family(
        "LlavaNextForConditionalGeneration",
        "families.text_of_multimodal",
        "llava_next",
        (7.2, 13, 34),
        "LLaVA-NeXT (1.6): its text model",
    ),
    Family(
        "LlavaOnevisionForConditionalGeneration",
        "families.text_of_multimodal",
        "llava_onevision",
        (0.5, 7.6, 72.7),
        "LLaVA-OneVision: its text model",
    ),
    Family(
        "InternVLForConditionalGeneration",
        "families.text_of_multimodal",
        "internvl",
        (0.5, 1.5, 7.6, 14.8, 32.8),
        "InternVL 3 in transformers' layout (-hf): its text model",
    ),
    Family(
        "Idefics3ForConditionalGeneration",
        "families.text_of_multimodal",
        "idefics3",
        (8,),
        "Idefics 3: its text model",
    ),
    Family(
        "SmolVLMForConditionalGeneration",
        "families.text_of_multimodal",
        "smolvlm",
        (0.14, 0.36, 1.7),
        "SmolVLM 2: its text model",
    ),
    Family(
        "VoxtralForConditionalGeneration",
        "families.text_of_multimodal",
        "voxtral",
        (3, 23.6),
        "Voxtral: its text model",
    ),
    Family(
        "BertForSequenceClassification",
        "families.bert",
        "bert",
        (0.023, 0.11, 0.335),
        "BERT with one label: MS MARCO MiniLM and other rerankers",
        checkpoints="floats",
    ),
    Family(
        "RobertaForSequenceClassification",
        "families.bert",
        "roberta",
        (0.125, 0.355),
        "RoBERTa with one label: rerankers",
        checkpoints="floats",
    ),
    Family(
        "XLMRobertaForSequenceClassification",
        "families.bert",
        "xlm-roberta",
        (0.278, 0.56),
        "XLM-RoBERTa with one label: BGE rerankers",
        checkpoints="floats",
    ),
    Family(
        "BertModel",
        "families.bert",
        "bert",
        (0.023, 0.11, 0.335),
        "BERT, embeddings: BGE, E5, GTE, MiniLM, Arctic Embed",
        checkpoints="floats",
    ),
    Family("RobertaModel", "families.bert", "roberta", (0.125, 0.355), "RoBERTa, embeddings", checkpoints="floats"),
    Family(
        "XLMRobertaModel",
        "families.bert",
        "xlm-roberta",
        (0.278, 0.56),
        "XLM-RoBERTa, embeddings: multilingual E5, Arctic Embed 2",
        checkpoints="floats",
    ),
    Family("GPT2LMHeadModel", "families.gpt2", "gpt2", (0.124, 0.355, 0.774, 1.56), "GPT-2", checkpoints="floats"),
)

LIKE = 4  # letters that the names of two architectures share at least, from the first, to be called near


def nearest(architecture: str) -> str:
    """Say which family's name is nearest to that of an architecture without layers here."""
    shared = [_shared_letters(family.architecture, architecture) for family in FAMILIES]
    family = FAMILIES[shared.index(max(shared))]
    if max(shared) < LIKE:
        return "no family of the list is like it: 'inferengine models' prints it"
    return f"the nearest that has: {family.architecture} ({family.models})"


def _shared_letters(one: str, other: str) -> int:
    """Count the letters of whole words that two names share, from the first: MiniMax is not like Ministral."""
    pairs = zip(one, other, strict=False)
    count = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))
    while count and (one[count : count + 1].islower() or other[count : count + 1].islower()):
        count -= 1
    return count


CARDS_GB = (24, 80, 141)  # of memory
BYTES = {"bf16": 2.0, "8 bits": 1.0, "4 bits": 0.56}  # of a parameter, with its share of scales
ROOM = 0.8  # share of a card that weights may take, so that a cache of some thousand tokens is left


def table() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of families, its head first."""
    cards = (f"largest on {size} GB" for size in CARDS_GB)
    yield "models", "architecture", "sizes, 10⁹", *cards, "checkpoints", "LoRA of", "tool calls", "tokens/s, H200"
    for family in FAMILIES:
        yield (
            family.models,
            family.architecture,
            ", ".join(f"{size:g}" for size in family.sizes),
            *(_largest(family.sizes, family.formats, size) for size in CARDS_GB),
            family.checkpoints,
            family.lora,
            family.tools or "-",
            family.speed or "-",
        )


def _largest(sizes: tuple[float, ...], formats: tuple[str, ...], card_gb: float) -> str:
    """Return the largest size whose weights fit, and in what number format."""
    for size in sorted(sizes, reverse=True):
        for name in formats:
            if size * BYTES[name] <= ROOM * card_gb:
                return f"{size:g} ({name})"
    return "none"
