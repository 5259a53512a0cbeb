"""Measures GSM8K accuracy with plain transformers, without assay, as an independent check.

    python examples/plain_transformers.py FOLDER data/gsm8k/test.jsonl --questions 200

Greedy decoding, zero-shot chat, strict: the last \\boxed{} must contain the number.
"""

from __future__ import annotations

import argparse
import json
from decimal import Decimal, InvalidOperation
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{}, up to the matching brace."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def number(text: str | None) -> Decimal | None:
    plain = (text or "").strip().replace("\\$", "").replace("$", "").replace(",", "").replace("\\!", "").rstrip(".")
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None


def is_right(completion: str, answer: str) -> bool:
    """`answer` is the worked solution of the dataset, with the number after ####."""
    value = number(boxed(completion))
    return value is not None and value == number(answer.rpartition("####")[2])


@torch.inference_mode()
def answers(folder: str, questions: list[str], new_tokens: int, batch: int, device: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model = model.to(device).eval()
    written: list[str] = []
    for start in range(0, len(questions), batch):
        chats = [[{"role": "user", "content": f"{q}\n{INSTRUCTION}"}] for q in questions[start : start + batch]]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        out = model.generate(
            **given, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=new_tokens
        )
        written += tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{len(written)} of {len(questions)}", flush=True)
    return written


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Hugging Face folder, e.g. from assay export")
    parser.add_argument("data", help="test.jsonl with question and answer")
    parser.add_argument("--questions", type=int, default=200, help="number of questions, from the start of the file")
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    rows = [json.loads(line) for line in Path(args.data).read_text("utf-8").splitlines()[: args.questions]]
    written = answers(args.folder, [row["question"] for row in rows], args.new_tokens, args.batch, args.device)
    right = sum(is_right(text, row["answer"]) for text, row in zip(written, rows, strict=True))
    print(f"{right} of {len(rows)} correct: {100 * right / len(rows):.1f} %")
    return right / len(rows)


if __name__ == "__main__":
    main()
