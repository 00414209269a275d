"""What a loaded model asks of its device, and what the device can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.shapes import LLAMA_3_1_8B, QWEN3_30B_A3B
from inferengine.config import load
from inferengine.core.step_time import AttentionGroup, DevicePeaks, Roofline
from inferengine.executor.memory.plan import weight_bytes, weight_sizes
from inferengine.executor.tools import device_peaks
from inferengine.executor.tools.roofline import model_work, sent_bytes_per_token
from inferengine.executor.torch_executor import build_executor
from inferengine.models import registry
from tests.core.test_step_roofline import make_plan
from tests.models.published import PUBLISHED_V3

LLAMA_WEIGHTS = 8_030_261_248
H200 = DevicePeaks(4.8e12, 989e12, "test")


def llama_on_h200(folder: Path, **changes: float) -> Roofline:
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    config, _ = registry.read_model_config(folder)
    num_bytes = weight_bytes(config, LLAMA_3_1_8B, torch.bfloat16)
    sizes = {
        "num_layer_weights": 32 * (4096 * (4096 + 1024 * 2 + 4096) + 3 * 4096 * 14336),
        "kv_item_bytes": 2,
        "head_item_bytes": 2,
    }
    return Roofline(model_work(config, weight_bytes=num_bytes, item_bytes=2, **{**sizes, **changes}), H200)


def test_an_8b_model_reads_all_but_its_input_embedding(tmp_path: Path) -> None:
    work = llama_on_h200(tmp_path).work
    assert work.layer_bytes + work.head_bytes == 2 * (LLAMA_WEIGHTS - 128256 * 4096)
    assert work.groups == (AttentionGroup(2 * 32 * 8 * 128 * 2, 4 * 32 * 32 * 128, None),)


def test_one_decode_of_an_8b_model_takes_an_h200_at_least_as_long_as_reading_its_weights(tmp_path: Path) -> None:
    least_s = llama_on_h200(tmp_path).least_s(make_plan([127]))
    assert least_s == pytest.approx(15.01e9 / 4.8e12 + 128 * 131072 / 4.8e12, rel=1e-3)


def test_sixteen_long_prompts_are_arithmetic(tmp_path: Path) -> None:
    """8,192 tokens: 2 x 6.98 G weights each, and the pairs of two prompts of 4,096."""
    least_s = llama_on_h200(tmp_path).least_s(make_plan([], [(0, 4096), (0, 4096)]))
    operations = 8192 * 2 * 6.98e9 + 2 * 4096 * 4097 / 2 * 4 * 32 * 32 * 128
    assert least_s == pytest.approx(operations / 989e12, rel=2e-3)


def test_deepseek_v3_reads_its_chosen_experts_and_576_numbers_of_a_token(tmp_path: Path) -> None:
    """Of 671 billion weights a token passes 37.6, those of the embedding among them (DeepSeek-V3, 2024)."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_V3))
    config, _ = registry.read_model_config(tmp_path)
    sizes, embedding = weight_sizes(config, PUBLISHED_V3, torch.bfloat16), 129280 * 7168
    passed = sizes.whole / 2 - 2 * embedding - sizes.experts / 2
    assert sizes.whole == pytest.approx(2 * 671e9, rel=1e-3)
    assert passed + sizes.experts / 2 * 8 / 256 + 2 * embedding == pytest.approx(37.6e9, rel=2e-3)
    work = model_work(
        config, weight_bytes=sizes.whole, num_layer_weights=int(passed), item_bytes=2, head_item_bytes=2,
        kv_item_bytes=2, expert_bytes=sizes.experts,
    )  # fmt: skip
    assert work.operations_per_token == pytest.approx(2 * (37.6e9 - 2 * embedding), rel=2e-3)
    pair, made, key = (2 * 61 * 128 * each for each in (512 + 64 + 512, 128 + 64 + 128, 512 * (128 + 128)))
    assert work.groups == (AttentionGroup(61 * 576 * 2, pair, None, made, key),)


def test_products_in_8_bit_count_for_half(tmp_path: Path) -> None:
    plain = llama_on_h200(tmp_path).work
    fast = llama_on_h200(tmp_path, product_speed=2.0).work
    assert fast.operations_per_token == plain.operations_per_token / 2
    assert fast.operations_per_draw == plain.operations_per_draw, "the head stays as it is"


def test_two_ranks_send_each_other_what_they_sum(tmp_path: Path) -> None:
    """An 8B's prompt of 8,192 tokens: 65 sums of 64 MiB, 10 ms at 450 GB/s."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    config, _ = registry.read_model_config(tmp_path)
    assert sent_bytes_per_token(config, 2, torch.bfloat16) == 65 * 8192
    assert sent_bytes_per_token(config, 4, torch.bfloat16) == 65 * 8192 * 1.5
    assert sent_bytes_per_token(config, 1, torch.bfloat16) == 0


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA L40S", 864),
        ("NVIDIA L4", 300),
        ("NVIDIA GeForce RTX 4090", 1008),
    ],
)
def test_devices_are_known_by_torchs_names(name: str, gb_per_s: float) -> None:
    sheet = device_peaks.data_sheet_of(name)
    assert sheet is not None
    assert sheet.gb_per_s == gb_per_s


@pytest.mark.parametrize("name", ["", "NVIDIA H2000", "NVIDIA A10G", "NVIDIA H200 MIG 1g.18gb", "AMD Instinct MI300X"])
def test_what_is_not_on_the_list_has_no_data_sheet(name: str) -> None:
    assert device_peaks.data_sheet_of(name) is None


def test_a_cpu_is_measured() -> None:
    found = device_peaks.device_peaks(torch.device("cpu"), torch.float32, weight_bytes=0)
    assert found is not None
    peaks, faster = found
    assert (peaks.source, faster) == ("measured at start", 1.0)
    assert 1e8 < peaks.bytes_per_s < 1e13, "bytes per second"
    assert 1e8 < peaks.operations_per_s < 1e14, "operations per second"


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return a device that torch calls an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return torch.device("cuda")


@pytest.mark.parametrize(("dtype", "tflops"), [(torch.float32, 67), (torch.bfloat16, 989)])
def test_a_known_device_has_the_peaks_of_its_data_sheet(h200: torch.device, dtype: torch.dtype, tflops: float) -> None:
    expected = DevicePeaks(4800e9, tflops * 1e12, "data sheet of NVIDIA H200", 450e9)
    assert device_peaks.device_peaks(h200, dtype, weight_bytes=0) == (expected, 1979 / 989)


def test_the_configuration_has_the_last_word() -> None:
    found = device_peaks.device_peaks(torch.device("cpu"), torch.float32, weight_bytes=0, gb_per_s=50, tflops=2)
    assert found == (DevicePeaks(50e9, 2e12, "configuration"), 1.0)


def test_what_is_not_configured_of_an_unknown_device_is_measured() -> None:
    found = device_peaks.device_peaks(torch.device("cpu"), torch.float32, weight_bytes=0, gb_per_s=50)
    assert found is not None
    assert (found[0].bytes_per_s, found[0].source) == (50e9, "configuration, measured at start")


@pytest.mark.parametrize(
    ("configured", "bytes_per_s", "operations_per_s", "source"),
    [
        ({"gb_per_s": 50}, 50e9, 989e12, "configuration, data sheet of NVIDIA H200"),
        ({"tflops": 2}, 4800e9, 2e12, "configuration, data sheet of NVIDIA H200"),
        ({"gb_per_s": 50, "tflops": 2}, 50e9, 2e12, "configuration"),
    ],
)
def test_what_is_not_configured_is_of_the_data_sheet(
    h200: torch.device, configured: dict[str, float], bytes_per_s: float, operations_per_s: float, source: str
) -> None:
    found = device_peaks.device_peaks(h200, torch.bfloat16, weight_bytes=0, **configured)
    assert found is not None
    assert found[0] == DevicePeaks(bytes_per_s, operations_per_s, source, 450e9)


def test_a_loaded_executor_tells_its_roofline() -> None:
    config = load(environment={}).with_values(engine={"device": "cpu", "peak_gb_per_s": 20.0, "peak_tflops": 0.2})
    executor = build_executor(config.with_values(cache={"num_blocks": 64}))
    executor.load(lambda phase, share: None)
    roofline = executor.roofline()
    assert roofline is not None
    weights = sum(parameter.numel() for parameter in tensors_of(executor.settings.folder))
    read_bytes = roofline.work.layer_bytes + roofline.work.head_bytes  # tied: the table is the head
    if "fbgemm" in torch.backends.quantized.supported_engines:
        assert 2 * weights <= read_bytes < 2.01 * weights, "a CPU keeps products' weights in half precision, norms not"
    else:
        assert read_bytes == 4 * weights
    assert roofline.peaks.bytes_per_s == 20e9
    executor.close()


def tensors_of(folder: Path) -> list[torch.Tensor]:
    """Return the tensors of a checkpoint."""
    return list(load_file(folder / "model.safetensors").values())


def test_a_mixture_reads_the_experts_that_as_many_tokens_choose(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    config, _ = registry.read_model_config(tmp_path)
    num_bytes = weight_bytes(config, QWEN3_30B_A3B, torch.bfloat16)
    assert num_bytes == pytest.approx(2 * 30.53e9, rel=1e-3)
    experts = 2 * 48 * 128 * 3 * 768 * 2048
    assert 2 * config.num_expert_weights == experts
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    work = model_work(
        config, weight_bytes=num_bytes, num_layer_weights=attention, item_bytes=2, head_item_bytes=2, kv_item_bytes=2,
        expert_bytes=experts,
    )  # fmt: skip
    assert work.operations_per_token == pytest.approx(2 * (attention + experts / 2 / 16))
    roofline = Roofline(work, H200)
    one, many = roofline.least_s(make_plan([0])), roofline.least_s(make_plan([0] * 256))
    assert one == pytest.approx((work.layer_bytes + work.head_bytes + experts / 16) / 4.8e12, rel=1e-3)
    assert many == pytest.approx((work.layer_bytes + work.head_bytes + experts) / 4.8e12, rel=2e-2)
