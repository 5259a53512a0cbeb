"""What speculative decoding by prompt lookup would gain: answers of a model, decoded again on paper.

    python bench/prompt_lookup.py --model MODEL --data FILE.jsonl --problems 16 --samples 2 --json FILE

A draft is what followed the last occurrence of the newest N tokens in prompt and answer. Rejection sampling accepts a
token of such a draft with the probability that the model gives it, so a sampled answer shows how many would have been
accepted: those that equal it. Prints the mean number of tokens per decoding step; 1 is decoding without drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import assay
from assay.api.models import as_question
from assay.bench.results import describe_machine, describe_versions

NGRAMS = (1, 2, 3, 4)
DRAFTS = (1, 2, 4, 8)
INSTRUCTION = "\nReason step by step, and put the final answer in \\boxed{}."


def step_sizes(tokens: Sequence[int], prompt: int, ngram: int, draft: int) -> Iterator[tuple[int, int]]:
    """Of each decoding step the number of tokens that it adds, and of those that were drafted."""
    last: dict[tuple[int, ...], int] = {}  # where the newest occurrence of an n-gram ends
    known = at = prompt
    for end in range(ngram, known):
        last[tuple(tokens[end - ngram : end])] = end
    while at < len(tokens):
        found = last.get(tuple(tokens[at - ngram : at]))
        proposed = tokens[found : min(found + draft, at)] if found is not None else []
        accepted = 0
        while accepted < len(proposed) and at + accepted < len(tokens) and proposed[accepted] == tokens[at + accepted]:
            accepted += 1
        step = min(accepted + 1, len(tokens) - at)
        for end in range(at, at + step):
            if end >= ngram:
                last[tuple(tokens[end - ngram : end])] = end
        yield step, len(proposed)
        at += step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with `question`")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = [json.loads(line)["question"] + INSTRUCTION for line in args.data.read_text().splitlines()]
    with assay.load(args.model) as model:
        answers = model.generate(
            questions[: args.problems], samples=args.samples, temperature=1.0, max_new_tokens=args.new
        )
        renderer, _ = model._opened()
        prompts = renderer.all_prompt_ids([as_question(group[0].prompt) for group in answers])
    sequences = [
        ([*prompt, *answer.token_ids], len(prompt))
        for prompt, group in zip(prompts, answers, strict=True)
        for answer in group
    ]
    length = sum(len(tokens) - prompt for tokens, prompt in sequences) / len(sequences)
    print(f"{len(sequences)} answers with {length:.0f} tokens on average")
    rows = []
    for ngram in NGRAMS:
        for draft in DRAFTS:
            steps = [step for tokens, prompt in sequences for step in step_sizes(tokens, prompt, ngram, draft)]
            gained = sum(size for size, _ in steps) / len(steps)
            drafted = sum(count for _, count in steps) / len(steps)
            rows.append({"ngram": ngram, "draft": draft, "tokens_per_step": gained, "drafted_per_step": drafted})
            print(f"n-gram {ngram}, draft {draft}: {gained:.3f} tokens per step, {drafted:.2f} drafted")
    if args.json:
        facts = {"machine": describe_machine(), "versions": describe_versions(), "model": Path(args.model).name}
        facts |= {"answers": len(sequences), "mean_tokens": length, "temperature": 1.0, "max_new_tokens": args.new}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
