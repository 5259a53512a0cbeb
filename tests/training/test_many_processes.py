"""One truth: whole runs on many processes, under torchrun, are the run on one process."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from serve_parts import command, metric_of
from small_run import SmallRuns
from waiting import until

from assay.runs import checkpoints
from assay.runs.rollouts import read_rollouts
from assay.training.sources import version_of

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 5
EXACT = ("--dtype", "float64", "--engine.dtype", "float64")
WORDS = (*EXACT, "--train.steps", STEPS, "--save.every", 3, "--save.keep", 9, "--eval.every", 2)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "2 ddp": (2, ("--parallel.mode", "ddp")),
    "2 separate": (2, ("--train.process", "separate")),
    "2 fsdp": (2, ("--parallel.mode", "fsdp")),
    "2 tp": (2, ("--parallel.tp", 2)),
    "4 fsdp x tp": (4, ("--parallel.tp", 2, "--parallel.mode", "fsdp")),
}
RICH = (  # everything that has a place of its own in a run: warm start, reference, several updates, dropped groups
    *("--sft.steps", 2, "--sft.batch", 5, "--algo.recipe", "dapo", "--algo.entropy_coef", 0.01, "--algo.updates", 2),
    *("--algo.kl", "k3", "--algo.kl_coef", 0.1, "--optim.schedule", "cosine", "--optim.warmup", 2),
    *("--optim.weight_decay", 0.1, "--train.samples", 2, "--algo.reference_ema", 0.8),
    *("--algo.reward_kl_coef", 0.05, "--replay.groups", 2),
)
LORA = ("--lora.rank", 2, "--algo.kl_coef", 0.1, "--algo.refresh_reference", 2)
SEQUENCES = (  # ratios and corrections of whole answers, scores before the first update, tokens held back
    *("--algo.recipe", "gspo", "--algo.correction", "sequence_truncate", "--algo.updates", 2, "--algo.clip_low", 0.1),
    *("--algo.cov", "kl_cov", "--algo.cov_fraction", 0.1, "--train.token_budget", 40),
    *("--optim.name", "muon", "--optim.matrix_lr", 0.01),
)
CRITIC = (
    *("--algo.recipe", "ppo", "--critic.lr", 1e-3, "--algo.reward_kl_coef", 0.05, "--train.samples", 2),
    *("--train.token_budget", 40, "--sft.steps", 1),
)
KINDS = {  # settings of whole runs, and a layout that computes them in another way than one process
    "rich": (RICH, "2 separate"),
    "rich, tp": (RICH, "2 tp"),
    "lora": (LORA, "2 fsdp"),
    "quantized": (("--lora.rank", 2, "--lora.quantize", "nf4", "--algo.kl_coef", 0.1), "2 ddp"),
    "sequences": (SEQUENCES, "4 fsdp x tp"),
    "critic": (CRITIC, "2 ddp"),
    "shared-lora": ((*CRITIC, "--critic.trunk", "shared", "--lora.rank", 2), "2 fsdp"),
}


def ended(process: Any, code: int = 0, within: float = 900) -> str:
    said = process.communicate(timeout=within)[0]
    assert process.returncode == code, said
    return said


def same_truth(small: SmallRuns, one: str, other: str) -> None:
    """Tokens are the same; metrics, weights and moments of both runs differ by less than 1e-9."""
    rows, others = (without_servers(small.timeless(name)) for name in (one, other))
    assert sum(row.get("optim/grad_norm", 0) > 0 for row in rows) > 1  # or there was nothing to compare
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for row, own in zip(rows, others, strict=True):
        assert row == pytest.approx(own, rel=0, abs=1e-9)
    for step in range(1, STEPS + 1):
        assert tokens(small.runs / one, step) == tokens(small.runs / other, step)
    for file in ("model/model.safetensors", "critic.safetensors"):
        places = [small.checkpoint(STEPS, name) / file for name in (one, other)]
        first, second = (load_file(place) if place.exists() else {} for place in places)
        assert first.keys() == second.keys()
        assert all((first[key] - second[key]).abs().max() < 1e-9 for key in first)
    summaries = [small.timeless_summary(name) for name in (one, other)]
    assert summaries[0] == summaries[1]
    assert checkpoints.steps(small.runs / one) == checkpoints.steps(small.runs / other)


def without_servers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that do not depend on the number of engine servers, of which none may have failed."""
    assert not any(row.get(f"servers/{name}") for row in rows for name in ("failures", "retries"))
    return [{key: value for key, value in row.items() if not key.startswith("servers/")} for row in rows]


def tokens(run: Path, step: int) -> list[Any]:
    """And verdicts; rewards after a price on divergence are as close as all other numbers, no closer."""
    found = read_rollouts(run, step)
    return [
        (g.prompt.id, [(r.token_ids, r.verdict and (r.verdict.reward, r.verdict.status)) for r in g.rollouts])
        for g in found
    ]


@pytest.mark.slow
def test_processes_with_servers_equal_one_process_with_its_own_engine(small: SmallRuns) -> None:
    """`assay serve` processes that rank 0 starts, and others that run already."""
    assert small.train(*WORDS) == 0
    words = ("train", small.config, *WORDS, "--engine.name", "assay", "--name")
    count, layout = LAYOUTS["4 fsdp x tp"]
    ended(small.launch(count, *words, "started", "--server.servers", 2, *layout))
    same_truth(small, "small", "started")
    model = str(small.checkpoint(0) / "model")
    options = ("--allow-updates", "--engine.dtype", "float64")
    with command(model, *options) as (_, first), command(model, *options) as (_, second):
        ended(small.launch(2, *words, "running", "--server.urls", json.dumps([first, second])))
        sampled = [metric_of(url, "assay_generated_tokens_total") for url in (first, second)]
    same_truth(small, "small", "running")
    assert min(sampled) > 0


@pytest.mark.slow
def test_several_processes_train_asynchronously(small: SmallRuns) -> None:
    """Without staleness as one process; with staleness, every prompt of the epoch is trained once, also if killed."""
    count, spread = LAYOUTS["2 fsdp"]
    assert small.train(*WORDS) == 0
    words = (*spread, "--engine.name", "assay", "--source", "async", "--source.max_staleness")
    ended(small.launch(count, "train", small.config, *WORDS, *words, 0, "--name", "zero"))
    for step in range(1, STEPS + 1):
        assert tokens(small.runs / "small", step) == tokens(small.runs / "zero", step)
    first, second = (load_file(small.checkpoint(STEPS, name) / "model/model.safetensors") for name in ("small", "zero"))
    assert all((first[key] - second[key]).abs().max() < 1e-9 for key in first)
    more = ("--train.steps", 8, "--save.every", 1, "--save.keep", 9, "--name", "two")
    process = small.launch(count, "train", small.config, *WORDS, *more, *words, 2)
    wait_for_step(small, "two", 3, process)
    os.kill(ranks(process.pid)[1], signal.SIGKILL)
    assert process.wait(120) != 0
    ended(small.launch(count, "train", "--resume", "two", *spread))
    found = {step: read_rollouts(small.runs / "two", step) for step in range(1, 9)}
    ids = [group.prompt.id for groups in found.values() for group in groups]
    assert len(ids) == len(set(ids)) == 24
    assert all(0 <= step - 1 - version_of(group) <= 2 for step, groups in found.items() for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whole_runs_on_many_processes_equal_one_process(small: SmallRuns, kind: str) -> None:
    words, layout = KINDS[kind]
    count, spread = LAYOUTS[layout]
    assert small.train(*WORDS, *words) == 0
    said = ended(small.launch(count, "train", small.config, *WORDS, *words, *spread, "--name", "many"))
    same_truth(small, "small", "many")
    assert said.count("accuracy before") == 1  # one rank prints


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rich", "critic"])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(small: SmallRuns, kind: str) -> None:
    """Saved on 4, the newest checkpoint damaged: the one before it goes on as 1, and as 2."""
    words, (count, spread) = KINDS[kind][0], LAYOUTS["4 fsdp x tp"]
    assert small.train(*WORDS, *words) == 0
    ended(small.launch(count, "train", small.config, *WORDS, *words, *spread, "--name", "many"))
    same_truth(small, "small", "many")
    # A checkpoint in parts is exported as one.
    assert len(list((small.checkpoint(STEPS, "many") / "optimizer").iterdir())) == count
    assert small("export", "run:many@last", small.folder / "exported") == 0
    saved = load_file(small.checkpoint(STEPS, "many") / "model/model.safetensors")
    exported = load_file(small.folder / "exported" / "model.safetensors")
    assert all(value.equal(saved[key].float()) for key, value in exported.items())
    for layout in ("1", "2 ddp"):
        *_, before, last = checkpoints.steps(small.runs / "many")  # 3, or 4 where the best accuracy was measured there
        assert last == STEPS
        spoil(small.checkpoint(last, "many"))
        count, spread = LAYOUTS.get(layout, (1, ()))
        resumed = ("train", "--resume", "many", "--parallel.tp", 1, *spread)
        said = ended(small.launch(count, *resumed) if count > 1 else small.process(*resumed))
        assert "is damaged: resuming from an earlier checkpoint" in said and f"from step {before}" in said
        same_truth(small, "small", "many")


def spoil(checkpoint: Path) -> None:
    """A file of the same size with other content: a part of the optimizer's state where there are parts."""
    file = next(iter([*(checkpoint / "optimizer").glob("*"), checkpoint / "optimizer.safetensors"]))
    file.write_bytes(file.read_bytes()[:-4] + b"oops")


def ranks(launcher: int) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(line[5:]): int(pid) for line in lines if line.startswith(b"RANK=")}
    return found


def wait_for_step(small: SmallRuns, name: str, step: int, process: Any) -> None:
    metrics = small.runs / name / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)


SLOWLY = ("--train.steps", 8, "--save.every", 2, "--sampling.max_new_tokens", 40)


@pytest.mark.slow
def test_a_rank_that_is_killed_or_hangs_takes_the_run_down_and_it_goes_on(small: SmallRuns) -> None:
    ended(small.launch(2, "train", small.config, *SLOWLY))
    words = (*SLOWLY, "--name", "struck", "--parallel.heartbeat_timeout_s", 6)
    process = small.launch(2, "train", small.config, *words)
    wait_for_step(small, "struck", 3, process)
    os.kill(ranks(process.pid)[1], signal.SIGKILL)
    struck = time.monotonic()
    said = ended(process, code=1)
    assert time.monotonic() - struck < 60
    assert "Signal 9 (SIGKILL)" in said and said.count("assay: rank 0 lost another process") <= 1
    assert "resume with: assay train --resume" in said
    assert not (small.runs / "struck" / "summary.json").exists()
    process = small.launch(2, "train", "--resume", "struck")
    wait_for_step(small, "struck", 6, process)
    found = ranks(process.pid)
    os.kill(found[1], signal.SIGSTOP)
    said = ended(process, code=1)
    assert f"assay: rank 1 on {socket.gethostname()} has not responded for" in said and "exitcode  : 2" in said
    assert gone(found.values())
    ended(small.launch(2, "train", "--resume", "struck"))
    small.same_run("small", "struck", 8)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["a rank by SIGTERM", "the launcher by SIGTERM", "the launcher by SIGKILL"])
def test_all_ranks_save_and_end_if_one_rank_or_the_launcher_is_stopped(small: SmallRuns, stopped: str) -> None:
    signum = signal.Signals[stopped.split()[-1]]
    process = small.launch(2, "train", small.config, *SLOWLY, "--parallel.mode", "fsdp", "--train.steps", 500)
    wait_for_step(small, "small", 3, process)
    pids = ranks(process.pid)
    os.kill(pids[1] if "rank" in stopped else process.pid, signum)
    until(lambda: gone(pids.values()), 100)
    said = process.communicate(timeout=100)[0]
    assert f"to resume from there: assay train --resume {small.runs / 'small'}" in said
    if "rank" in stopped:
        assert process.returncode == 1 and f"exitcode  : {128 + signum}" in said and "assay: stopped" in said
    assert ("the launcher of rank 0 has ended" in said) == (signum == signal.SIGKILL)
    assert checkpoints.last_intact(small.runs / "small") == (small.metrics()[-1]["step"], [])  # of the step under way


def gone(pids: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_mistakes_are_told_once(small: SmallRuns, tmp_path: Path) -> None:
    for words, line in (
        (("--optim.lrr", 1), "optim.lrr"),  # before the processes know of each other
        (("--reward.function", f"{tmp_path}/reward.py:raises"), "the judge failed on all"),
    ):
        said = ended(small.launch(2, "train", small.config, *words), code=1)
        assert len([text for text in said.splitlines() if text.startswith("assay: ")]) == 1 and line in said
        assert "assay/training" not in said  # no traceback of ours
    assert not small.runs.exists()


@pytest.mark.slow
def test_a_rank_that_fails_alone_says_so(small: SmallRuns, tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text(
        "import os\n"
        "def fail(*_):\n"
        "    raise RuntimeError('the second rank has had enough')\n"
        "def reward(completion, answer):\n"
        "    if os.environ['RANK'] == '1' and os.path.exists('now'):\n"
        "        from assay.training.learner.update import Updater\n"
        "        Updater.update = fail\n"
        "    return sum(map(ord, completion)) % 4 / 3\n"
    )
    words = ("--reward.function", f"{failing}:reward", "--train.steps", 300)
    process = small.launch(2, "train", small.config, *words)
    wait_for_step(small, "small", 2, process)
    (tmp_path / "now").touch()
    struck = time.monotonic()
    said = ended(process, code=1)
    assert time.monotonic() - struck < 60
    assert "the second rank has had enough" in said
    assert json.loads((small.checkpoint(0) / "complete.json").read_text())["step"] == 0
