"""Answers to the page's requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_run import SmallRuns
from web_parts import CONFIG, group_of, listed, make_run, prompt_of, standard_run

from assay.runs import Run, rollouts, write_rollouts
from assay.text import char_tokenizer, load_tokenizer
from assay.training.learner.update import Fault, dump_batch
from assay.types import Completion, Finish, Group, Rollout, Turn
from assay.web import data
from assay.web.data import MetricsQuery, RunView, ViewError, curve, shortened
from assay.web.table import PromptsQuery, RolloutsQuery


def test_metrics_with_panels_and_intervals(tmp_path: Path) -> None:
    path = make_run(tmp_path, steps=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6}\n')
    view = RunView("one", path)
    curves = view.metrics(MetricsQuery())
    assert curves["series"]["reward/mean"] == {"x": [1, 2, 3], "y": [0.25, 0.5, 0.75]}
    assert curves["intervals"] == {"eval/accuracy": {"x": [3], "low": [0.4], "high": [0.6]}}
    assert [panel["metric"] for panel in curves["panels"]] == ["reward/mean", "eval/accuracy"]
    assert view.metrics(MetricsQuery(since=curves["cursor"])) == {"cursor": curves["cursor"], "unchanged": True}
    assert view.metrics(MetricsQuery(names=("turns/mean", "missing"), x="time/wall"))["series"] == {
        "turns/mean": {"x": [10, 20, 30], "y": [1, 1, 1]}
    }
    with pytest.raises(ViewError, match="x must be one of step"):
        view.metrics(MetricsQuery(x="loss"))


def test_thinned_curves_keep_all_peaks() -> None:
    xs = np.arange(10_000)
    ys = np.zeros(10_000)
    ys[1234], ys[8765] = 5.0, -3.0
    thinned = curve(xs, ys, 100)
    assert len(thinned["x"]) <= 100
    points = dict(zip(thinned["x"], thinned["y"], strict=True))
    assert points[1234] == 5.0 and points[8765] == -3.0
    assert thinned["x"] == sorted(thinned["x"])
    assert curve(xs[:100], ys[:100], 100)["x"] == list(range(100))


def test_evaluations_are_listed_before_they_are_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "READY_WAIT_S", 0.01)  # the doctor of later tests waits for this one
    view = RunView("one", standard_run(tmp_path), request_index=lambda view: None)  # it never reads a file
    detail = view.detail()
    assert detail["indexed"]["done"] == 0 < detail["indexed"]["total"]
    assert [(one["label"], one["count"]) for one in detail["evals"]] == [("before", None), ("after", None)]


def test_findings_are_those_of_the_doctor_and_the_list_shows_the_first(tmp_path: Path) -> None:
    with Run.create(tmp_path, "one", CONFIG) as run:
        for step in range(1, 9):
            row = {"reward/mean": 0.0, "reward/range": 0.0, "reward/std": 0.0, "groups/zero_variance": 1.0}
            run.log(step, {**row, "advantage/zero": 1.0, "sampling/answers": 64.0 * step, "status/wrong": 1.0})
        run.write_summary({"steps": 8})
    view = RunView("one", tmp_path / "one")
    view.facts()  # asks the doctor
    view._quick_doctor.findings(False, None)  # who reads no answers
    badge = view.facts()["badge"]
    view.detail()
    view.doctor.findings(False, None)
    detail = view.detail()
    first = detail["findings"][0]
    assert not detail["findings_pending"]
    assert first.keys() == {"name", "evidence", "remedy", "severity", "examples"}
    assert badge == view.facts()["badge"] and badge["severity"] == first["severity"] != "note"
    assert badge["evidence"] == first["evidence"] and badge["count"] >= 1


def test_remaining_time_is_the_median_of_recent_steps(tmp_path: Path) -> None:
    with Run.create(tmp_path, "one", CONFIG) as run:
        view = RunView("one", tmp_path / "one")
        assert view.facts()["eta_s"] is None  # before the first step
        run.write_status("running", 50)
        for step, seconds in enumerate([100.0] * 10 + [2.0] * 25, start=1):
            run.log(step, {"reward/mean": 0.0, "time/step": seconds, "time/tokens_per_s": 10.0 * step})
        facts = view.facts()
        assert facts["eta_s"] == pytest.approx((50 - 35) * 2.0) and facts["tokens_per_s"] == pytest.approx(255.0)
    assert view.facts()["eta_s"] is None  # no longer running


# Rollouts


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    return RunView("one", standard_run(tmp_path))


def test_the_detail_of_a_run(view: RunView) -> None:
    detail = view.detail()
    assert detail["train_steps"] == [1, 2, 3] and detail["indexed"] == {"done": 5, "total": 5}
    assert detail["evals"] == [
        {"name": "step-000000-before-test", "step": 0, "label": "before", "split": "test", "count": 2, "correct": 1},
        {"name": "step-000003-after-test", "step": 3, "label": "after", "split": "test", "count": 2, "correct": 1},
    ]
    assert detail["config"]["seed"] == 3 and detail["environment"]["command"] and detail["problems"] == []
    assert detail["metrics"] == ["reward/mean", "time/wall", "turns/mean"]


def test_pages_of_rollouts(view: RunView) -> None:
    page = listed(view, limit=2, offset=4)
    assert (page["total"], page["statuses"]) == (12, {"ok": 7, "wrong": 4, "no_answer": 1})
    assert [(row["step"], row["index"], row["preview"]) for row in page["rows"]] == [
        (2, 0, "Second Try 0"),
        (2, 1, "Second Try 1"),
    ]
    row = page["rows"][0]
    assert (row["prompt_id"], row["prompt_preview"], row["group"], row["sample"]) == ("p1", "what is p1?", 0, 0)
    assert (row["status"], row["reward"], row["advantage"], row["length"]) == ("ok", 1.0, 0.5, 13)
    assert (row["finish"], row["truncated"], row["version"], row["turns"]) == ("stop", False, 3, 1)
    assert row["changed"] == "gained" and row["source"] == "train" and row["passed"] == [1, 2]
    assert listed(view, offset=1000)["rows"] == []
    searched = listed(view, search="second TRY")
    assert searched["total"] == 2 and searched["searched"] == {"done": 5, "total": 5}


def test_one_rollout_with_its_tokens(view: RunView) -> None:
    view.tokens(60.0)
    rollout = view.rollout("train", 2, 1)
    assert (rollout["text"], rollout["status"], rollout["prompt_id"]) == ("Second Try 1", "wrong", "p1")
    tokens = rollout["tokens"]
    assert tokens["text"] is None and "no tokenizer" in rollout["tokens_problem"]
    assert sum(tokens["sampled"]) == sum(tokens["mask"]) == rollout["length"] == 13
    context = len(tokens["ids"]) - 13
    assert tokens["engine_logprobs"][:context] == [None] * context
    assert tokens["engine_logprobs"][context + 1] == -0.25
    assert tokens["trainer_logprobs"][context + 1] == pytest.approx(-0.26)
    assert tokens["advantages"][-1] == 0.5 and tokens["ref_logprobs"] is None
    assert rollout["turns"][0] == {"role": "context", "text": None, "tokens": context}
    assert rollout["turns"][1]["text"] == "Second Try 1"


@pytest.mark.parametrize(
    "query",
    [
        RolloutsQuery(order="desc"),
        RolloutsQuery(search="SECOND", sort="reward"),
        RolloutsQuery(source="eval", sort="length", order="desc"),
        RolloutsQuery(source="step-000003-after-test"),
    ],
)
def test_neighbors_are_those_of_the_list(view: RunView, query: RolloutsQuery) -> None:
    rows = view.rollouts(query)["rows"]
    places = [{name: row[name] for name in ("source", "step", "index")} for row in rows]
    assert len(places) > 1
    for number, place in enumerate(places):
        found = view.neighbors((place["source"], place["step"], place["index"]), query)
        assert (found["position"], found["total"]) == (number, len(places))
        assert found["previous"] == (places[number - 1] if number else None)
        assert found["next"] == (places[number + 1] if number + 1 < len(places) else None)


def test_a_rollout_that_is_not_in_the_list_has_no_neighbors(view: RunView) -> None:
    for place in (("train", 1, 0), ("train", 99, 0), ("train", 1, 99), ("other", 1, 0)):
        found = view.neighbors(place, RolloutsQuery(statuses=("ok",)))
        assert (found["position"], found["previous"], found["next"]) == (None, None, None) and found["total"] == 7
    with pytest.raises(ViewError, match="no evaluation 'other'"):
        view.neighbors(("other", 1, 0), RolloutsQuery(source="other"))


def test_skipped_batches_are_shown_and_told_apart(tmp_path: Path) -> None:
    path = standard_run(tmp_path / "runs")
    before = RunView("one", path)
    prompts, total = before.current_table().prompts(PromptsQuery()), listed(before)["total"]
    dump_batch(path, 2, [group_of("p1", ["ok", "ok"], "skipped")], [Fault(float("nan"), 1.0, [], [])])
    view = RunView("one", path)
    assert view.detail()["skipped"] == [{"step": 2, "reason": "an update was skipped, because the loss is not finite"}]
    assert [place["name"] for place in view.detail()["evals"]] == [place["name"] for place in before.detail()["evals"]]
    assert (
        listed(view)["total"] == total and view.current_table().prompts(PromptsQuery()) == prompts
    )  # training does not count them
    rows = listed(view, source="skipped")["rows"]
    assert [(row["source"], row["step"], row["preview"]) for row in rows] == [
        *(("skipped", 2, "skipped 0"), ("skipped", 2, "skipped 1"))
    ]
    rollout = view.rollout("skipped", 2, 1)
    assert rollout["tokens"]["ids"] and "the loss is not finite" in rollout["skipped"]
    assert view.rollout("train", 2, 1)["skipped"] is None
    assert view.neighbors(("skipped", 2, 0), RolloutsQuery(source="skipped"))["next"]["index"] == 1
    assert len(view.group("skipped", 2, 0)["rollouts"]) == 2


def test_an_episode_with_several_turns(tmp_path: Path) -> None:
    path, prompt = make_run(tmp_path), prompt_of("p", "go")
    char_tokenizer().save(path / "tokenizer")
    encode = char_tokenizer().encode
    turns = []
    for context, action, masked in (("go", "call(3)", True), ("result: 4", "four", False)):
        ids = encode(action)
        completion = Completion(ids, [-1.0] * len(ids), [-1.0] * len(ids), Finish.STOP, 1)
        turns.append(Turn(encode(context), completion, action, 0.25, masked))
    write_rollouts(path, 1, [Group(prompt, [Rollout(prompt, 0, turns, None, float("nan"), float("inf"))])])
    view = RunView("one", path)
    view.tokens(60.0)
    rollout = view.rollout("train", 1, 0)
    assert [(turn["role"], turn["text"]) for turn in rollout["turns"]] == [
        ("context", "go"),
        ("action", "call(3)"),
        ("context", "result: 4"),
        ("action", "four"),
    ]
    assert rollout["reward"] is None and rollout["advantage"] is None and rollout["status"] is None
    assert sum(rollout["tokens"]["sampled"]) == 11 and sum(rollout["tokens"]["mask"]) == 4
    assert listed(view)["rows"][0]["turns"] == 2 and listed(view)["statuses"] == {"none": 1}


def test_a_group(view: RunView) -> None:
    group = view.group("train", 1, 1)
    assert group["prompt"] == {
        "id": "p2",
        "messages": [{"role": "user", "content": "what is p2?"}],
        "answer": "42",
        "solution": "so 42",
        "fields": {"level": 1},
        "task": None,
    }
    assert [(r["index"], r["sample"], r["text"], r["status"]) for r in group["rollouts"]] == [
        (3, 0, "answer 0", "ok"),
        (4, 1, "answer 1", "ok"),
        (5, 2, "answer 2", "no_answer"),
    ]
    assert (group["previous"], group["next"]) == (0, None)
    assert view.group("step-000000-before-test", 0, 1)["rollouts"][0]["text"] == "before 0"


@pytest.mark.parametrize(
    ("source", "step", "index"),
    [
        *(("train", 1, 6), ("train", 9, 0), ("train", 1, 2**40), ("nope", 1, 0), ("step-000003-after-test", 2, 0)),
        *(("step-000003-after-test", 3, 9), ("../rollouts/step-000001", 1, 0), ("a/b", 0, 0), ("\0", 0, 0), ("", 0, 0)),
        *(("x" * 5000, 0, 0), ("train", 10**12, 0)),
    ],
)
def test_rollouts_that_do_not_exist(view: RunView, source: str, step: int, index: int) -> None:
    with pytest.raises(ViewError) as caught:
        view.rollout(source, step, index)
    assert caught.value.status == 404


def test_a_rollout_can_be_shown_before_it_is_indexed(tmp_path: Path) -> None:
    view = RunView("one", standard_run(tmp_path), lambda view: None)  # nothing is indexed
    assert listed(view)["total"] == 0
    assert view.rollout("train", 2, 1)["text"] == "Second Try 1"
    assert view.group("train", 1, 0)["prompt"]["id"] == "p1"


def test_damaged_files_are_shown_as_far_as_possible(view: RunView) -> None:
    root = view.folder.root
    (root / "config.toml").write_text("= broken")
    (root / "rollouts" / "step-000001.npz").unlink()
    (root / "rollouts" / "step-000002.npz").write_bytes(b"garbage")
    third = root / "rollouts" / "step-000003.jsonl"
    third.write_text("\n".join(third.read_text().splitlines()[:-1]) + '\n{"half')
    detail = view.detail()
    assert len(shortened(detail["problems"] * 10)) == 21
    parts = (
        "config.toml is not valid TOML",
        "001.npz is missing",
        "002.npz cannot be read",
        "003.jsonl, line 4: is incomplete",
    )
    for part in parts:
        assert sum(part in problem for problem in detail["problems"]) == 1, part
    assert listed(view)["total"] == 11
    for step, problem in ((1, "is missing"), (2, "cannot be read")):
        rollout = view.rollout("train", step, 0)
        assert rollout["tokens"] is None and problem in rollout["tokens_problem"] and rollout["text"]
    view.tokens(60.0)
    assert view.rollout("train", 3, 1)["tokens"] is not None
    with pytest.raises(ViewError, match="its line cannot be read"):
        view.rollout("train", 3, 3)


def test_changed_bytes_in_arrays_are_noticed(view: RunView) -> None:
    file = view.folder.root / "rollouts" / "step-000001.npz"
    content = bytearray(file.read_bytes())
    content[196 + 200] ^= 1  # in token_ids
    file.write_bytes(content)
    rollout = view.rollout("train", 1, 0)
    assert rollout["tokens"] is None and "Bad CRC" in rollout["tokens_problem"] and rollout["text"] == "answer 0"


def test_a_real_run(small: SmallRuns) -> None:
    assert small.train("--eval.every", "1", "--sampling.temperature", "1.0") == 0
    path = small.runs / "small"
    view = RunView("small", path)
    detail = view.detail()
    assert detail["problems"] == [] and detail["state"] == "finished" and detail["train_steps"] == [1, 2]
    assert [(e["label"], e["step"], e["count"]) for e in detail["evals"]] == [
        *(("before", 0, 5), ("eval", 1, 4), ("eval", 2, 4), ("after", 2, 5))
    ]
    page = listed(view, order="asc")
    groups = rollouts.read_rollouts(path, 1) + rollouts.read_rollouts(path, 2)
    assert page["total"] == len(page["rows"]) == 18
    assert [row["reward"] for row in page["rows"]] == [r.reward for group in groups for r in group.rollouts]
    view.tokens(60.0)
    tokenizer = load_tokenizer(str(path / "checkpoints" / "step-000000" / "model"))
    for step in (1, 2):
        flat = [r for group in rollouts.read_rollouts(path, step) for r in group.rollouts]
        for index, rollout in enumerate(flat):
            shown = view.rollout("train", step, index)
            tokens = shown["tokens"]
            assert shown["tokens_problem"] is None and tokens["ids"] == rollout.token_ids
            assert shown["text"] == rollout.text
            assert "".join(tokens["text"]) == tokenizer.decode(rollout.token_ids, skip_special=False)
            sampled = [value for value in tokens["engine_logprobs"] if value is not None]
            assert sampled == pytest.approx([x for turn in rollout.turns for x in turn.completion.engine_logprobs])
            assert [value for value in tokens["trainer_logprobs"] or [] if value is not None] == pytest.approx(
                list(rollout.trainer_logprobs or [])
            )


def test_evaluations_have_no_tokens(view: RunView) -> None:
    rollout = view.rollout("step-000003-after-test", 3, 1)
    assert rollout["tokens"] is None and rollout["tokens_problem"] == "evaluations are saved without tokens"
    assert (rollout["text"], rollout["changed"]) == ("after 0", "gained")
    assert rollout["turns"] == [{"role": "action", "text": "after 0", "tokens": 8, "finish": "stop"}]
