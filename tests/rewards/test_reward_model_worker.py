"""The process of a reward model, called without a process: batches, templates and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reward_model_parts import TEMPLATE, WORDS, ids_of, save_classifier, save_tokenizer, transformers_logits

from assay.rewards.reward_model import RewardModelWorker
from assay.types import UserError

ANSWERS = ["four", "five", "very very nice four", "bad", "the answer is very very very very good"]


def talk(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "what is two plus two"}, {"role": "assistant", "content": answer}]


def loaded(folder: Path) -> RewardModelWorker:
    worker = RewardModelWorker()
    worker.load(str(folder), "cpu")
    return worker


@pytest.mark.parametrize(("labels", "pad_id"), [(1, 0), (3, 0), (1, None)])  # without: one sequence at a time
def test_outputs_are_the_logits_of_transformers_in_batches_of_any_size(
    tmp_path: Path, labels: int, pad_id: int | None
) -> None:
    worker, talks = loaded(save_classifier(tmp_path, labels, pad_id=pad_id)), [talk(answer) for answer in ANSWERS]
    expected = transformers_logits(tmp_path, talks)
    for batch_tokens in (1, 40, 10_000):
        for got, wanted in zip(worker.outputs(talks, batch_tokens), expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5)
    assert len({round(outputs[0], 3) for outputs in expected}) == len(ANSWERS)  # or the order could be wrong
    info = worker.info()
    assert info["labels"] == [f"LABEL_{n}" for n in range(labels)] and info["max_length"] == 32
    assert (info["activation"], info["where"]) == ("softmax" if labels > 1 else "sigmoid", "float32 on cpu")
    worker.load(str(tmp_path), "cpu", dtype="bfloat16")
    assert worker.info()["where"] == "bfloat16 on cpu"


def test_batches_have_similar_lengths_and_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, sizes = loaded(save_classifier(tmp_path)), list[list[int]]()

    def compute(sequences: Any) -> list[list[float]]:
        sizes.append([len(sequence) for sequence in sequences])
        return [[0.0] for _ in sequences]

    monkeypatch.setattr(worker, "_compute", compute)
    worker.outputs([talk(answer) for answer in ANSWERS], batch_tokens=30)
    assert [size for batch in sizes for size in batch] == sorted(size for batch in sizes for size in batch)
    assert all(max(batch) * len(batch) <= 30 for batch in sizes) and len(sizes) < len(ANSWERS)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TEMPLATE, "<user> what is two plus two <end> <assistant> four <end>"),  # no further special tokens
        (None, "what is two plus two four"),  # question and answer as a pair
    ],
)
def test_conversations_are_rendered_by_the_template(tmp_path: Path, template: str | None, text: str) -> None:
    save_tokenizer(tmp_path, template)
    worker = RewardModelWorker()
    worker.load(str(tmp_path), "cpu", with_model=False)
    assert worker.render([talk("four")]) == [ids_of(text)]


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
    assert [problem for problem, _ in others[2:]] == [
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
    assert outputs[:4] == [pytest.approx(values, abs=1e-5) for values in expected[:4]]
