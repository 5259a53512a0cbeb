"""The process of a reward model, called without a process: batches, templates and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reward_model_parts import TEMPLATE, WORDS, ids_of, save_classifier, save_tokenizer, transformers_logits

from assay.rewards.reward_model_worker import RewardModelProcess, RewardModelWorker
from assay.types import UserError

ANSWERS = ["four", "five", "very very nice four", "bad", "the answer is very very very very good"]


def talk(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "what is two plus two"}, {"role": "assistant", "content": answer}]


def loaded(folder: Path) -> RewardModelWorker:
    worker = RewardModelWorker()
    worker.load(str(folder), "cpu")
    return worker


@pytest.mark.parametrize("labels", [1, 3])
def test_outputs_are_the_logits_of_transformers_in_batches_of_any_size(tmp_path: Path, labels: int) -> None:
    worker, talks = loaded(save_classifier(tmp_path, labels)), [talk(answer) for answer in ANSWERS]
    expected = transformers_logits(tmp_path, talks)
    assert [len(one) for one in expected] == [labels] * len(ANSWERS)
    for batch_tokens in (1, 40, 10_000):
        for got, wanted in zip(worker.outputs(talks, batch_tokens), expected, strict=True):
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
    with pytest.raises(UserError, match=r"'.*' cannot be loaded as a classification model"):
        loaded(tmp_path / "missing")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2, vocab_size=len(WORDS))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    save_tokenizer(tmp_path / "lm")
    with pytest.raises(UserError, match=r"lacks the weights score.weight"):
        loaded(tmp_path / "lm")


def test_texts_and_token_ids_are_classified_like_conversations(tmp_path: Path) -> None:
    worker = loaded(save_classifier(tmp_path))
    ids = ids_of("<user> what is two plus two <end> <assistant> four <end>")
    text = "<user> what is two plus two <end> <assistant> four <end>"
    results = worker.classify([talk("four"), text, ids, [*ids, 18], [*ids, -1], ""], 10_000)
    (first, tokens), *others = results
    assert tokens == len(ids) and [count for _, count in others] == [len(ids), len(ids), len(ids) + 1, len(ids) + 1, 0]
    assert others[0][0] == others[1][0] == pytest.approx(first)
    assert [one for one, _ in others[2:]] == [
        *["a token id is outside the vocabulary of 18"] * 2,
        "the input has no tokens",
    ]
    assert worker.classify([ids], 10_000, max_tokens=5) == [("the input has 10 tokens; the maximum is 5", 10)]


def test_messages_that_the_template_rejects_fail_alone(tmp_path: Path) -> None:
    rejects = "{% if messages|length > 2 %}{{ raise_exception('too many turns') }}{% endif %}"
    worker = loaded(save_classifier(tmp_path, template=rejects + TEMPLATE))
    long = [*talk("four"), *talk("five")]
    problem = "the chat template rejects the messages (too many turns)"
    assert worker.render([long, talk("four")]) == [problem, *worker.render([talk("four")])]
    failed, good = worker.outputs([long, talk("four")], 10_000)
    assert failed == problem and isinstance(good, list)


def test_a_batch_that_does_not_fit_into_memory_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded(save_classifier(tmp_path))
    expected = worker.outputs([talk(answer) for answer in ANSWERS], 10_000)
    forward = worker.model.forward

    def limited(input_ids: Any, **rest: Any) -> Any:
        if input_ids.numel() > 16:
            raise torch.OutOfMemoryError
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(worker.model, "forward", limited)
    outputs = worker.outputs([talk(answer) for answer in ANSWERS], 10_000)
    assert outputs[4] == "there is not enough memory for 17 tokens"
    assert outputs[:4] == [pytest.approx(one, abs=1e-5) for one in expected[:4]]


def test_the_model_is_described(tmp_path: Path) -> None:
    info = loaded(save_classifier(tmp_path, labels=3)).info()
    assert info["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"] and info["activation"] == "softmax"
    assert info["max_length"] == 32 and info["where"] == "float32 on cpu"


@pytest.mark.slow
def test_the_process_loads_with_the_first_call_and_in_the_given_dtype(tmp_path: Path) -> None:
    process = RewardModelProcess(str(save_classifier(tmp_path)), "cpu", dtype="bfloat16", threads=1)
    assert process.worker is None
    assert process.call("info")["where"] == "bfloat16 on cpu" and process.worker is not None
    process.close()
    assert process.worker is None
