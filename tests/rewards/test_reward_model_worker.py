"""The process of a reward model, called without a process: batches, templates and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reward_model_parts import WORDS, ids_of, save_classifier, save_tokenizer, transformers_logits

from assay.rewards.reward_model_worker import RewardModelWorker, padded
from assay.types import UserError

ANSWERS = ["four", "five", "very very nice four", "bad", "the answer is very very very very good"]


def talk(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "what is two plus two"}, {"role": "assistant", "content": answer}]


def loaded(folder: Path) -> RewardModelWorker:
    worker = RewardModelWorker()
    worker.load(str(folder), "cpu")
    return worker


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_outputs_are_the_logits_of_transformers_in_batches_of_any_size(
    tmp_path: Path, labels: int, batch_tokens: int
) -> None:
    save_classifier(tmp_path, labels)
    expected = transformers_logits(tmp_path, [talk(answer) for answer in ANSWERS])
    outputs = loaded(tmp_path).outputs([talk(answer) for answer in ANSWERS], batch_tokens)
    assert [len(one) for one in outputs] == [labels] * len(ANSWERS)
    for got, wanted in zip(outputs, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)
    assert len({round(one[0], 3) for one in expected}) == len(ANSWERS)  # or the order could be wrong


def test_batches_have_similar_lengths_and_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, sizes = loaded(save_classifier(tmp_path)), list[list[int]]()

    def compute(sequences: Any) -> list[list[float]]:
        sizes.append([len(one) for one in sequences])
        return [[0.0] for _ in sequences]

    monkeypatch.setattr(worker, "_compute", compute)
    worker.outputs([talk(answer) for answer in ANSWERS], batch_tokens=30)
    assert [one for batch in sizes for one in batch] == sorted(one for batch in sizes for one in batch)
    assert all(max(batch) * len(batch) <= 30 for batch in sizes) and len(sizes) < len(ANSWERS)


def test_a_model_without_a_padding_token_computes_one_sequence_at_a_time(tmp_path: Path) -> None:
    save_classifier(tmp_path, pad_id=None)
    outputs = loaded(tmp_path).outputs([talk(answer) for answer in ANSWERS], 10_000)
    for got, wanted in zip(outputs, transformers_logits(tmp_path, [talk(one) for one in ANSWERS]), strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)


def test_a_conversation_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    worker = loaded(save_classifier(tmp_path))
    outputs = worker.outputs([talk("very " * 40), talk("four")], 10_000)
    assert outputs[0] == "question and answer have 49 tokens, and the model reads 1 to 32"
    assert isinstance(outputs[1], list)


def test_tokenizers_without_a_template_read_question_and_answer_as_a_pair(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    worker = RewardModelWorker()
    worker.load(str(tmp_path), "cpu", with_model=False)
    assert worker.render([talk("four")]) == [ids_of("what is two plus two four")]


def test_the_template_adds_no_further_special_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    worker = RewardModelWorker()
    worker.load(str(tmp_path), "cpu", with_model=False)
    words = ["<user>", "what", "is", "two", "plus", "two", "<end>", "<assistant>", "four", "<end>"]
    assert worker.render([talk("four")]) == [[WORDS.index(word) for word in words]]


def test_a_folder_without_a_classification_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"judge.model: '.*' cannot be loaded as a classification model"):
        loaded(tmp_path / "missing")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2, vocab_size=len(WORDS))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    save_tokenizer(tmp_path / "lm")
    with pytest.raises(UserError, match=r"lacks the weights score.weight"):
        loaded(tmp_path / "lm")


def test_sequences_are_filled_up_on_the_right() -> None:
    ids, mask = padded([[5, 6], [7]], 0)
    assert ids.tolist() == [[5, 6], [7, 0]] and mask.tolist() == [[1, 1], [1, 0]]
