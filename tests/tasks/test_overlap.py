from __future__ import annotations

from assay.tasks import Abacus, overlap
from assay.tasks.base import LazyPrompts
from assay.types import Prompt


def ask(name: str, text: str) -> Prompt:
    return Prompt(name, ({"role": "user", "content": text},))


def test_shared_prompts_are_found_despite_case_and_whitespace():
    train = [ask("t0", "How many  apples?"), ask("t1", "Two"), ask("t2", "three")]
    evaluation = [ask("e0", "how many\napples? "), ask("e1", "four"), ask("e2", "THREE")]
    report = overlap(train, evaluation)
    assert (report.n_train_checked, report.n_eval, report.n_shared) == (3, 3, 2)
    assert report.examples == (("e0", "t0"), ("e2", "t2"))
    assert not report.sampled and str(report).startswith("2 of 3 evaluation prompts")


def test_long_splits_are_sampled_and_the_report_says_so():
    endless = LazyPrompts(lambda index: ask(f"t{index}", str(index)), 2**31)
    report = overlap(endless, [ask("e0", "17"), ask("e1", "-1")])
    assert report.n_shared == 1 and report.sampled and "sample" in str(report)
    assert report.n_train_checked < 10_000
    assert overlap(endless, [ask("e0", "17")], limit=100).n_train_checked == 100


def test_generated_splits_share_nothing():
    task = Abacus()
    report = overlap(task.prompts("train"), task.prompts("test")[:500])
    assert (report.n_eval, report.n_shared) == (500, 0)
