"""Rollouts that the report shows: which ones, and how they are shortened."""

from __future__ import annotations

from pathlib import Path

from web_parts import answer, group_of, make_run, prompt_of, standard_run

from assay.runs import write_rollouts
from assay.types import Finish, Group, Status
from assay.web.data import RunView
from assay.web.report import ReportLimits, cut, paired_facts, select_samples, shortened_tokens


def test_every_kind_of_sample_is_found_with_its_number(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    prompt = prompt_of("p9")
    long = answer(prompt, 0, "and so on", Status.NO_ANSWER, finish=Finish.LENGTH, reward=0.25)
    write_rollouts(path, 4, [Group(prompt, [long, answer(prompt, 1, "right", Status.OK)])])
    found, problems = select_samples(RunView("one", path), ReportLimits())
    kinds = {kind.title: kind for kind in found}
    assert list(kinds) == [
        "Questions gained", "Questions lost", "Best answers", "Worst answers", "Cut off", "Without a readable answer",
    ] and problems == []  # fmt: skip
    assert [one["prompt_id"] for one in kinds["Questions gained"].pairs] == ["q1"]
    assert kinds["Questions lost"].pairs[0]["b"]["text"] == "after 0"
    assert [one["text"] for one in kinds["Best answers"].rollouts] == ["right", "and so on"]
    assert [one["text"] for one in kinds["Worst answers"].rollouts] == ["and so on", "right"]
    assert [one["text"] for one in kinds["Cut off"].rollouts] == ["and so on"] and kinds["Cut off"].total == 1
    assert [one["step"] for one in kinds["Without a readable answer"].rollouts] == [4, 1]
    assert all(kind.rollouts[0]["tokens"]["ids"] for kind in found[2:])
    facts = paired_facts(RunView("one", path))
    assert facts is not None and (facts["gained"], facts["lost"], facts["questions"]) == (["q1"], ["q0"], 2)
    assert paired_facts(RunView("other", make_run(tmp_path, "other"))) is None


def test_of_many_equal_rewards_the_most_unusual_answers_are_chosen(tmp_path: Path) -> None:
    path = make_run(tmp_path, steps=1)
    groups = [
        Group(prompt, [answer(prompt, 0, f"text {n}", Status.OK, advantage=n / 100)])
        for n in range(100)
        for prompt in [prompt_of(f"p{n}")]
    ]
    write_rollouts(path, 1, groups)
    best, worst = select_samples(RunView("one", path), ReportLimits(samples=2))[0]
    assert [one["text"] for one in best.rollouts] == ["text 99", "text 98"]
    assert [one["text"] for one in worst.rollouts] == ["text 0", "text 1"]


def test_a_run_without_rollouts_of_training_shows_its_last_evaluation(tmp_path: Path) -> None:
    path = make_run(tmp_path, steps=1)
    write_rollouts(path, 1, [group_of("q1", ["no_answer"])], "eval", split="after-test")
    found, _ = select_samples(RunView("one", path), ReportLimits())
    assert [kind.title for kind in found] == ["Best answers", "Worst answers", "Without a readable answer"]
    assert "the evaluation step-000001-after-test" in found[0].about and found[0].rollouts[0]["tokens"] is None


def test_long_texts_and_tokens_are_cut_and_say_so() -> None:
    assert (
        cut("0123456789", 4) == "01\n[... 6 characters left out ...]\n89"
        and cut("abc", 3) == "abc"
        and cut(None, 3) == ""
    )
    tokens = {"ids": [1, 2, 3], "text": None, "mask": [0, 1, 1], "engine_logprobs": [None, -0.123456789, -1.0]}
    short = shortened_tokens(tokens, 2)
    assert short["ids"] == [1, 2] and short["engine_logprobs"] == [None, -0.12346] and short["total"] == 3
    assert short["text"] is None
