"""Decode attention and experts' products by measurement: what is tried, what is chosen, kept, and taken by launches."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest

from inferengine.executor.warm_up import kernel_class_plans
from inferengine.kernels.cuda import dispatch
from inferengine.kernels.cuda.attention.decode import row_classes
from inferengine.kernels.cuda.dispatch import (
    AttentionKey,
    DecodeConfig,
    attention_choices,
    decode_config,
    decode_rule,
)
from inferengine.kernels.cuda.moe.configurations import (
    RULES,
    ExpertsChoice,
    ExpertsKey,
    FragmentConfig,
    GroupedConfig,
    PairConfig,
    choose,
    rule_choice,
    token_classes,
)
from inferengine.kernels.cuda.tuning import measured_table as table
from inferengine.kernels.cuda.tuning.choices import CaseTimes, ChoiceEntry, SearchBudget, search_choices
from inferengine.kernels.cuda.tuning.measured_table import ROWS, Environment, MeasuredTable
from inferengine.kernels.cuda.tuning.search import take_turns
from inferengine.kernels.cuda.tuning.tuned_attention import CONTEXTS, TunedAttention, row_blocks
from inferengine.kernels.cuda.tuning.tuned_experts import MOST_PAIRS_APART, TunedExperts

HERE = Environment("NVIDIA H200", "2.11.0", "3.6.0", "abc")
LLAMA_8B = AttentionKey(32, 8, 128, 64, 16, 0)
QWEN_30B = ExpertsKey("16-bit", 128, 128, 8, 1536, 2048)
GPT_OSS_20B = ExpertsKey("mxfp4", 32, 32, 4, 5760, 2880)
OTHER_CONFIG = DecodeConfig(128, 4, 8, 2, 4, False)
OTHER_EXPERTS = ExpertsChoice(True, GroupedConfig(64, 64, 64, 4, 6), GroupedConfig(32, 64, 128, 4, 4, True, True))


@pytest.fixture(autouse=True)
def only_rules() -> Iterator[None]:
    yield
    MeasuredTable().decide()


def attention(key: AttentionKey = LLAMA_8B, *, longest: int = 131072, room: int = 900_000) -> TunedAttention:
    return TunedAttention(key, 32, 512, longest, room)


def experts(last_row: int = 8192) -> TunedExperts:
    return TunedExperts(QWEN_30B, "numbers", 48, last_row)


class Toy(NamedTuple):
    """A subject of numbers: the rule says 10, and each number's neighbours are its variations."""

    key: str = "toy"

    def stages(self) -> Sequence[Sequence[int]]:
        return ((64,), (16,))

    def others(self) -> Sequence[int]:
        return (32,)

    def cases(self, rows: int) -> Sequence[str]:
        return ("short", "long")

    def rule(self, rows: int) -> int:
        return 10

    def variations(self, rows: int, choice: int) -> Sequence[int]:
        return (choice - 1, choice + 1)


class FakeCard:
    """Takes `seconds(rows, case, choice)` for a call, and `cost_s` on its clock for each measurement."""

    def __init__(self, seconds: Callable[[int, str, Any], float], cost_s: float = 0.0) -> None:
        self.seconds, self.cost_s, self.now = seconds, cost_s, 0.0
        self.compiled: set[tuple[Any, int, Any]] = set()
        self.launched: list[tuple[Any, int, Any]] = []

    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        self.compiled |= set(work)

    def prepare(self, subject: Any, rows: int, case: str, choice: Any) -> Callable[[], float]:
        self.launched.append((subject, rows, choice))
        self.seconds(rows, case, choice)  # raises where it cannot be launched

        def sample() -> float:
            self.now += self.cost_s
            return self.seconds(rows, case, choice)

        return sample

    def search(self, *subjects: Any, budget_s: float = 1e9) -> dict[tuple[Any, int], ChoiceEntry]:
        found: dict[tuple[Any, int], ChoiceEntry] = {}
        budget = SearchBudget(lambda: self.now, budget_s)
        for _ in search_choices(
            subjects, self, budget, lambda each, rows, entry: found.update({(each.key, rows): entry})
        ):
            pass
        return found


def towards(best: int) -> Callable[[int, str, int], float]:
    """Return times that grow with the distance from a number."""
    return lambda rows, case, choice: 1.0 + 0.1 * abs(choice - best)


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_variations_of_the_best_are_tried_until_nothing_is_better() -> None:
    found = FakeCard(towards(12)).search(Toy())
    assert found["toy", 64].best == 12
    assert found["toy", 64].times["long"].best_us < found["toy", 64].times["long"].rules_us


def test_other_rows_try_what_was_best_at_their_neighbours() -> None:
    card = FakeCard(towards(12))
    assert card.search(Toy())["toy", 32].best == 12
    assert {choice for _, rows, choice in card.launched if rows == 32} == {10, 11, 12}


def test_what_gains_on_average_and_loses_in_a_case_is_not_chosen() -> None:
    def uneven(rows: int, case: str, choice: int) -> float:
        return 1.0 if choice == 10 else 1.1 if case == "long" else 0.5

    entry = FakeCard(uneven).search(Toy())["toy", 64]
    assert entry.best == 10
    assert entry.second in (9, 11)


def test_what_is_faster_within_the_noise_does_not_replace_the_rule() -> None:
    found = FakeCard(lambda rows, case, choice: 1.0 if choice == 10 else 0.99).search(Toy())
    assert {entry.best for entry in found.values()} == {10}


def test_a_candidate_that_fails_is_dropped_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def refused(rows: int, case: str, choice: int) -> float:
        if choice == 11 and case == "long":
            raise RuntimeError("out of resource: shared memory")
        return towards(12)(rows, case, choice)

    with caplog.at_level(logging.INFO):
        found = FakeCard(refused).search(Toy())
    assert found["toy", 64].best == 10
    assert "toy of 64 rows, long, as 11: out of resource: shared memory" in caplog.text


def test_where_the_rules_own_choice_fails_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    def broken(rows: int, case: str, choice: int) -> float:
        if choice == 10:
            raise ArithmeticError("the result is off by 0.9 of its size")
        return 1.0

    assert FakeCard(broken).search(Toy()) == {}
    assert "toy of 64 rows could not be measured; the rule decides" in caplog.text


def test_hopeless_candidates_are_not_measured_in_further_cases() -> None:
    card = FakeCard(lambda rows, case, choice: 1.0 if choice == 10 else 3.0)
    card.search(Toy())
    assert [choice for _, rows, choice in card.launched if rows == 64] == [10, 9, 11, 10]


def test_whatever_is_launched_was_compiled_before() -> None:
    card = FakeCard(lambda rows, case, choice: 1.0 + crc32(f"{rows} {case} {choice}".encode()) % 97 / 100)
    card.search(attention(), experts())
    assert set(card.launched) <= card.compiled


def test_nothing_that_is_chosen_is_slower_than_the_rule() -> None:
    card = FakeCard(lambda rows, case, choice: 1.0 + crc32(f"{rows} {choice}".encode()) % 97 / 100)
    found = card.search(attention(), experts())
    assert {rows for key, rows in found if key == LLAMA_8B} == {rows for rows in ROWS if rows <= 512}
    assert {rows for key, rows in found if key == QWEN_30B} == set(ROWS)
    times = [each for entry in found.values() for each in entry.times.values()]
    assert all(each.best_us <= each.rules_us for each in times)
    assert any(each.best_us < each.rules_us for each in times)


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [0.3, 2.0, 5.0])
def test_the_budget_is_kept(budget_s: float) -> None:
    card = FakeCard(lambda rows, case, choice: 1.0 + crc32(f"{rows} {case} {choice}".encode()) % 97 / 100, cost_s=0.002)
    card.search(attention(), budget_s=budget_s)
    longest = 0.002 * 5 * 30  # one number of rows in five contexts, and the finalists of the others
    assert card.now <= budget_s + longest


def test_the_most_important_rows_are_measured_first() -> None:
    found = FakeCard(lambda rows, case, choice: 1.0, cost_s=0.01).search(attention(), budget_s=3.0)
    assert {64, 1} <= {rows for _, rows in found}
    assert len(found) < len([rows for rows in ROWS if rows <= 512])


def test_a_search_does_not_begin_when_as_long_a_stage_as_anothers_first_would_not_end_in_time() -> None:
    card = FakeCard(towards(12), cost_s=0.1)
    budget = SearchBudget(lambda: card.now, 10.0)

    def long_stage() -> Iterator[None]:
        card.now += 6.0
        yield

    entries: list[int] = []
    choices = search_choices([Toy()], card, budget, lambda subject, rows, entry: entries.append(rows))
    finished = take_turns([long_stage(), choices], budget, lambda share: None)
    assert finished == [True, False]  # and the next start tries it again
    assert entries == []
    assert card.now == 6.0


def test_searches_take_turns_and_one_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []

    def stages(name: str, count: int, *, fails: bool = False) -> Iterator[None]:
        for stage in range(count):
            log.append(f"{name}{stage}")
            yield
        if fails:
            raise RuntimeError("no memory")

    shares: list[float] = []
    clock = itertools.count()
    searches = [stages("a", 3), stages("b", 1, fails=True)]
    assert take_turns(searches, SearchBudget(lambda: next(clock), 50), shares.append) == [True, False]
    assert log == ["a0", "b0", "a1", "a2"]
    assert "no memory" in caplog.text
    assert shares == sorted(shares)


# -- what is tried -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        LLAMA_8B,
        AttentionKey(32, 32, 96, 64, 16, 2047),
        AttentionKey(32, 32, 80, 64, 16, 0),
        AttentionKey(16, 8, 256, 64, 16, 4096),
        AttentionKey(64, 8, 64, 16, 8, 128),
    ],
    ids=str,
)
def test_attention_varies_tiles_splits_warps_stages_and_fusion(key: AttentionKey) -> None:
    subject = attention(key)
    for rows in (1, 16, 64, 256):
        rule = subject.rule(rows)
        tried = list(subject.variations(rows, rule))
        assert rule not in tried
        assert len(set(tried)) == len(tried)
        for field in ("block_tokens", "num_splits", "num_warps", "num_stages", "fused"):
            assert any(getattr(each, field) != getattr(rule, field) for each in tried), field
        for each in tried:
            assert each.block_tokens % key.block_size == 0 or key.block_size % each.block_tokens == 0
            assert each.num_splits * rows * key.num_heads * (key.head_dim + 1) <= 8 << 20 or each.num_splits == 1


def test_contexts_are_those_that_the_model_and_the_card_hold() -> None:
    assert set(attention().cases(1)) == {str(each) for each in CONTEXTS}
    assert set(attention(longest=8192).cases(1)) == {"256", "1024", "4096"}
    assert attention(room=100_000).cases(512) == ("256",)


def test_of_contexts_beyond_a_window_one_is_measured() -> None:
    assert attention(AttentionKey(64, 8, 64, 64, 16, 128)).cases(8) == ("256",)
    assert set(attention(AttentionKey(16, 8, 256, 64, 16, 4096)).cases(8)) == {"256", "1024", "4096"}


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 64, 512])
def test_several_rows_have_contexts_of_different_lengths(rows: int) -> None:
    blocks = row_blocks(rows, 4096, 64, 131072)
    assert sum(blocks) / rows == pytest.approx(64, rel=0.01)
    assert rows == 1 or (min(blocks), max(blocks)) == (16, 112)
    assert rows <= 2 or blocks not in (sorted(blocks), sorted(blocks, reverse=True))
    assert max(row_blocks(rows, 4096, 64, 1024)) <= 16


@pytest.mark.parametrize("operands", sorted(set(RULES) - {"fp32"}))
def test_experts_vary_either_product_with_kernels_that_share_an_order_of_pairs(operands: str) -> None:
    subject = TunedExperts(QWEN_30B, operands, 48, 8192)
    for rows in (1, 4, 64, 1024):
        rule = subject.rule(rows)
        for each in subject.variations(rows, rule):
            assert each != rule
            if each.is_grouped:
                assert PairConfig not in {type(each.gate_up), type(each.down)}
            else:
                assert rows * QWEN_30B.num_chosen <= MOST_PAIRS_APART


def test_few_tokens_try_both_orders_of_pairs() -> None:
    subject = experts()
    assert {each.is_grouped for each in subject.variations(1, subject.rule(1))} == {True, False}
    assert {each.is_grouped for each in subject.variations(16, subject.rule(16))} == {True, False}


def test_experts_of_4_bit_codes_try_registers_where_an_expert_has_few_pairs() -> None:
    subject = TunedExperts(GPT_OSS_20B, "mxfp4", 24, 8192)
    tried = {
        rows: {type(config) for each in subject.variations(rows, subject.rule(rows)) for config in each[1:]}
        for rows in (1, 16, 128, 1024)
    }
    assert {rows for rows, kinds in tried.items() if FragmentConfig in kinds} == {1, 16, 128}


# -- the table decides -------------------------------------------------------------------------------------------------


def entry(best: Any, second: Any) -> ChoiceEntry:
    return ChoiceEntry(best, second, {"256": CaseTimes(10.0, 12.0, 12.5), "1024": CaseTimes(20.0, 22.0, 23.5)})


def measured() -> MeasuredTable:
    by_rule = rule_choice("numbers", 64 * 8, 128)
    return MeasuredTable(
        choices={
            LLAMA_8B: {64: entry(OTHER_CONFIG, decode_rule(64, 8, 128))},
            QWEN_30B: {64: entry(OTHER_EXPERTS, by_rule), 1: entry(rule_choice("numbers", 8, 128), OTHER_EXPERTS)},
        }
    )


def test_measured_attention_stands_for_the_rows_below_and_for_its_own_heads() -> None:
    measured().decide()
    for rows in (49, 64):
        assert decode_config(LLAMA_8B, rows) == OTHER_CONFIG
    for rows in (1, 48, 65):
        assert decode_config(LLAMA_8B, rows) == decode_rule(rows, 8, 128)
    assert decode_config(LLAMA_8B._replace(window=4096), 64) == decode_rule(64, 8, 128)


def test_measured_experts_stand_for_the_tokens_below_and_for_their_own_shape() -> None:
    measured().decide()
    for tokens in (49, 64):
        assert choose("numbers", QWEN_30B, tokens) == OTHER_EXPERTS
    assert choose("numbers", QWEN_30B, 65) == rule_choice("numbers", 65 * 8, 128)
    assert choose("numbers", QWEN_30B._replace(rows=1024), 64) == rule_choice("numbers", 64 * 8, 128)


def test_fp32_and_deterministic_experts_keep_their_rules() -> None:
    measured().decide()
    assert choose("fp32", QWEN_30B, 64) == rule_choice("fp32", 64 * 8, 128)
    exact = rule_choice("numbers", 64 * 8, 128, deterministic=True)
    assert choose("numbers", QWEN_30B, 64, deterministic=True) == exact


def test_warm_up_meets_every_measured_kernel() -> None:
    measured().decide()
    classes = row_classes([LLAMA_8B], 512)
    assert {decode_config(LLAMA_8B, rows) for rows in classes} == {decode_config(LLAMA_8B, r) for r in range(1, 513)}
    assert OTHER_CONFIG not in {decode_rule(rows, 8, 128) for rows in row_classes([LLAMA_8B], 512, is_fp32=True)}
    met = {choose("numbers", QWEN_30B, tokens) for tokens in (1, *token_classes(128, 8))}
    assert {choose("numbers", QWEN_30B, tokens) for tokens in range(1, 8193)} <= met


def test_warm_up_runs_each_decode_kernel_with_and_without_prompts_beside_it() -> None:
    plans = list(kernel_class_plans(8, 1, max_rows=8, max_tokens=64, row_tokens=64, decode_rows=[1, 8]))
    steps = [(plan.num_decodes, len(plan.slots) - plan.num_decodes) for plan in plans if plan.num_decodes]
    assert steps == [(1, 0), (1, 1), (8, 0)]


def test_warm_up_has_steps_of_more_tokens_than_a_row_may_have() -> None:
    options: dict[str, Any] = {"max_rows": 8, "decode_rows": [], "more_chunks": (89, 90)}
    steps = [plan.counts for plan in kernel_class_plans(8, 1, max_tokens=100, row_tokens=30, **options)]
    assert [counts for counts in steps if sum(counts) > 80] == [[27] * 3, [29] * 3, [30] * 3, [30] * 3, [25] * 4]
    steps = [plan.counts for plan in kernel_class_plans(8, 1, max_tokens=100, row_tokens=10, **options)]
    assert max(map(len, steps)) == 8, "no more rows than a step may have"


def test_a_forced_choice_ends_with_its_block() -> None:
    with attention_choices.forcing(LLAMA_8B, OTHER_CONFIG):
        assert decode_config(LLAMA_8B, 7) == OTHER_CONFIG
    assert decode_config(LLAMA_8B, 7) == decode_rule(7, 8, 128)


# -- on disk -----------------------------------------------------------------------------------------------------------


def fragments(key: ExpertsKey, registers: int | None = 96) -> MeasuredTable:
    config = FragmentConfig(1, 2, 2, 2, 1, registers)
    choice = ExpertsChoice(True, config, config._replace(registers=None))
    return MeasuredTable(choices={key: {16: entry(choice, rule_choice("mxfp4", 512, 32))}})


def test_codes_straight_from_registers_are_read_as_they_were_written(tmp_path: Path) -> None:
    table.save(fragments(GPT_OSS_20B), tmp_path, HERE)
    assert table.load(tmp_path, HERE).choices == fragments(GPT_OSS_20B).choices


@pytest.mark.parametrize("wrong", [fragments(QWEN_30B), fragments(GPT_OSS_20B, 97), fragments(GPT_OSS_20B, 8)])
def test_registers_that_no_kernel_takes_are_refused(wrong: MeasuredTable) -> None:
    with pytest.raises(ValueError, match=r"codes in|registers"):
        table.from_json(table.to_json(wrong, HERE))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table.save(measured(), tmp_path, HERE)
    assert table.load(tmp_path, HERE).choices == measured().choices


def test_attention_is_added_to_a_file_that_has_experts(tmp_path: Path) -> None:
    both = measured()
    for key in (LLAMA_8B, QWEN_30B):
        table.save(MeasuredTable(choices={key: both.choices[key]}), tmp_path, HERE)
    assert table.load(tmp_path, HERE).choices == both.choices


def test_a_file_of_the_format_before_is_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = table.save(measured(), tmp_path, HERE)
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "format": 1}))
    assert table.load(tmp_path, HERE).choices == {}
    assert "format 1" in caplog.text


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("[128, 4, 8, 2, 4, false]", "[128, 4, 8, 2, 4, false, 1]"),
        ("[128, 4, 8, 2, 4, false]", "[0, 4, 8, 2, 4, false]"),
        ("[128, 4, 8, 2, 4, false]", "[96, 4, 8, 2, 4, false]"),
        ("[128, 4, 8, 2, 4, false]", "[8, 4, 8, 2, 4, false]"),
        ("[128, 4, 8, 2, 4, false]", "[128, 4096, 8, 2, 4, false]"),
        ("[128, 4, 8, 2, 4, false]", "[128, 4, 8, 8, 4, false]"),  # more than shared memory holds
        ("[128, 4, 8, 2, 4, false]", "[128, 4, 8, 2, 4, 2]"),
        ('"32 8 128 64 16 0": [[64,', '"32 8 128 64 16 x": [[64,'),
        ('"32 8 128 64 16 0": [[64,', '"32 8 128 64 16 0": [[65,'),
        ('["GROUPED", 64, 64,', '["GROUPED", 64, 65,'),
        ('["GROUPED", 64, 64,', '["GROUPED", 65536, 64,'),
        ('["GROUPED", 64,', '["LIBRARY", 64,'),
        ("[true, [", "[true, ["),
    ],
)
def test_a_configuration_that_no_kernel_has_is_not_used(tmp_path: Path, there: str, instead: str) -> None:
    file = table.save(measured(), tmp_path, HERE)
    text = file.read_text()
    assert there in text
    if there == instead:  # pairs by themselves cannot be grouped
        text = text.replace("[false, [", "[true, [")
    file.write_text(text.replace(there, instead))
    assert table.load(tmp_path, HERE).choices == {}


def test_the_kernels_hash_covers_attention_and_experts() -> None:
    folder = Path(dispatch.__file__).parent
    hashed = {file for pattern in table.KERNEL_SOURCES for file in folder.glob(pattern)}
    assert {folder / "attention/decode.py", folder / "moe/grouped.py", folder / "rope_kv_write.py"} <= hashed
