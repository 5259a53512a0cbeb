"""The code of notebooks/quickstart.ipynb as a script. Takes about a minute: python examples/quickstart.py"""

import random
from itertools import permutations

import assay

words = random.Random(0).sample(sorted(permutations("abcdefgh", 3)), 300)
rows = [
    {"question": "".join(word), "answer": "".join(sorted(word)), "solution": "".join(sorted(word, reverse=i % 2 == 0))}
    for i, word in enumerate(words)
]


def reward(completion, answer):
    return float(completion == answer)


run = assay.train(
    model={"source": "preset:nano", "tokenizer": "characters"},
    data=rows,
    reward=reward,
    recipe="dr_grpo",
    steps=60,
    prompts=16,
    samples=16,
    lr=5e-4,
    max_new_tokens=6,
    sft={"steps": 100, "batch": 48, "optimizer": "muon", "lr": 4e-3, "matrix_lr": 0.02},
    name="sort",
)
print(run)
print(run.plot())
before, after = assay.evaluate([run.model(0), run.model("last")], samples=8, temperature=1.0)
print(after)
rollouts = run.rollouts(step=1)
print(rollouts)
print(rollouts.tokens(group=0, sample=0))
print(run.generate(["hca", "bed"], temperature=0))
run.save_pretrained("sort-model")  # a Hugging Face folder
