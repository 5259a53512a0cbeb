"""Measure `assay view`: time to index a run with 100,000 rollouts, and the latency of every request of the page.

    python bench/view.py --json bench/results/view-cpu.json

The run is written by the functions that training uses: answers of about 180 tokens, with all arrays. The requests go
over HTTP to an `assay view` of its own process, one after the other, with other parameters each time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from assay.bench.results import describe_machine, describe_versions, write
from assay.runs import Run, write_rollouts
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

LIMIT_S = 0.2  # every request must be faster
PROMPTS, SAMPLES = 32, 8  # per step
QUESTIONS = 7473  # in the train split
EVALUATED = 1319
NAME = "large"
THINGS = ("apples", "pens", "books", "coins", "shells", "stamps", "marbles", "tickets", "cards", "eggs", "boxes")
PEOPLE = ("Ann", "Ben", "Eva", "Tom", "Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Albert", "Ken", "Tina")
SENTENCES = (
    "First we find how many {thing} {name} has in total: {a} + {b} = {c}.",
    "Then {name} gives away {a} of them, so there are {b} - {a} = {c} {thing} left.",
    "Each of the {a} boxes costs ${b}, which makes {a} * {b} = ${c}.",
    "Wait, let me check this again: the problem says {a} {thing} per day for {b} days.",
    "That is <<{a}*{b}={c}>>{c} {thing} a week.",
    "Therefore {name} needs {a} more {thing} than before, and {c} altogether.",
)


class Writer:
    """Writes a run with realistic rollouts."""

    def __init__(self, seed: int = 0) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
        self.tokenizer.train_from_iterator([self.text() for _ in range(500)], trainer)

    def sentence(self) -> str:
        a, b, c = (self.rng.randint(2, 400) for _ in range(3))
        chosen = self.rng.choice(SENTENCES)
        return chosen.format(thing=self.rng.choice(THINGS), name=self.rng.choice(PEOPLE), a=a, b=b, c=c)

    def text(self) -> str:
        sentences = [self.sentence() for _ in range(self.rng.randint(4, 16))]
        return " ".join(sentences) + f"\n#### {self.rng.randint(1, 500)}"

    def prompt(self, split: str, number: int) -> Prompt:
        state, self.rng = self.rng, random.Random(f"{split} {number}")  # the same problem each time
        question = " ".join(self.sentence() for _ in range(3)) + " How many are left?"
        self.rng = state
        system = {"role": "system", "content": "Solve the problem step by step. End with #### and the answer."}
        messages = (system, {"role": "user", "content": question})
        return Prompt(f"gsm8k/{split}/{number}", messages, str(number % 500), "worked " * 20)  # type: ignore[arg-type]

    def group(self, prompt: Prompt, samples: int, rate: float, version: int) -> Group:
        texts = [self.text() for _ in range(samples)]
        encoded = self.tokenizer.encode_batch([prompt.question, *texts])
        context = encoded[0].ids
        correct = [self.rng.random() < rate for _ in texts]
        mean = sum(correct) / len(correct)
        rollouts = []
        for sample, (text, ok, tokens) in enumerate(zip(texts, correct, encoded[1:], strict=True)):
            logprobs = (-self.numbers.exponential(0.3, len(tokens.ids))).astype(np.float32)
            finish = Finish.LENGTH if self.rng.random() < 0.03 else Finish.STOP
            completion = Completion(tokens.ids, logprobs.tolist(), logprobs.tolist(), finish, version, 1.0, 0.4)
            wrong = self.rng.choices([Status.WRONG, Status.NO_ANSWER, Status.ERROR], [90, 9, 1])[0]
            verdict = Verdict(float(ok), Status.OK if ok else wrong, text.rpartition(" ")[2], {"accuracy": float(ok)})
            trainer = logprobs + self.numbers.normal(0, 0.01, len(logprobs)).astype(np.float32)
            turn = Turn(context, completion, text)
            rollouts.append(
                Rollout(prompt, sample, [turn], verdict, float(ok), float(ok) - mean, trainer_logprobs=trainer)
            )
        return Group(prompt, rollouts)

    def write(self, runs: Path, rollouts: int) -> Path:
        steps = max(rollouts // (PROMPTS * SAMPLES), 1)
        with Run.create(runs, NAME, f'[model]\nsource = "none"\n[train]\nsteps = {steps}\n') as run:
            self.tokenizer.save(str(make(run.path / "tokenizer") / "tokenizer.json"))
            for step in range(1, steps + 1):
                rate = 0.2 + 0.6 * step / steps
                first = step * PROMPTS
                prompts = [self.prompt("train", (first + n) % QUESTIONS) for n in range(PROMPTS)]
                write_rollouts(run.path, step, [self.group(prompt, SAMPLES, rate, step) for prompt in prompts])
                names = [f"metric/{n}" for n in range(50)]
                row = {name: self.rng.random() for name in names}
                run.log(step, {**row, "reward/mean": rate, "time/wall": 9.0 * step, "length/mean": 180.0})
            for step, label in ((0, "before"), (steps, "after")):
                rate = 0.2 if step == 0 else 0.8
                groups = [self.group(self.prompt("test", n), 1, rate, step) for n in range(EVALUATED)]
                write_rollouts(run.path, step, groups, "eval", split=f"{label}-test")
        return run.path


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def server(runs: Path, cache: Path) -> Iterator[Client]:
    """An `assay view` in another process."""
    command = [sys.executable, "-m", "assay", "view", str(runs), "--port", "0", "--no-open"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"(http://\S+)/\?token=(\S+)", line)
        if match is None:
            raise SystemExit(f"assay view did not start: {line}")
        yield Client(match[1], match[2], process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@dataclass
class Client:
    url: str
    token: str
    process: int  # of the server

    @property
    def cpu_s(self) -> float:
        """Processor time of the server so far, which other programs on the machine do not change much."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(self.url).netloc)

    def get(self, path: str) -> tuple[Any, float, int]:
        """The answer, the seconds until it was received, and its bytes."""
        start = time.perf_counter()
        self.connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
        response = self.connection.getresponse()
        body = response.read()
        seconds = time.perf_counter() - start
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {body[:200]!r}")
        return json.loads(body), seconds, len(body)


def requests(steps: int, rng: random.Random) -> dict[str, Callable[[], str]]:
    """A function for each kind of request, which returns another path each time."""
    base = f"/api/runs/{quote(NAME)}"
    total = steps * PROMPTS * SAMPLES
    before, after = "step-000000-before-test", f"step-{steps:06d}-after-test"

    def listing(**parameters: Any) -> str:
        return f"{base}/rollouts?{urlencode(parameters)}"

    def frequent() -> str:
        words = ["the", "=", "total", "Wait, let me check", "a", "is", "####", "left."]
        return rng.choice(words) + rng.choice(["", " "])

    def rare() -> str:
        return f"{rng.randint(2, 400)} * {rng.randint(2, 400)} = ${rng.randint(2, 400)}"

    def missing() -> str:
        return f"no such text {rng.random()}"

    def order() -> str:
        return rng.choice(["asc", "desc"])

    return {
        "runs": lambda: "/api/runs",
        "run": lambda: base,
        "metrics": lambda: f"{base}/metrics?x={rng.choice(['step', 'time%2Fwall'])}&points={rng.randint(100, 2000)}",
        "metrics, 50 names": lambda: f"{base}/metrics?names={quote(','.join(f'metric/{n}' for n in range(50)))}",
        "prompts": lambda: (
            f"{base}/prompts?sort={rng.choice(['id', 'pass_rate', 'change', 'seen'])}&order={order()}"
            f"&offset={rng.randint(0, QUESTIONS)}"
        ),
        "prompts, search": lambda: f"{base}/prompts?search={quote(rng.choice([*THINGS, *PEOPLE, missing()]))}",
        "rollouts, first page": lambda: listing(order=order()),
        "rollouts, deep page": lambda: listing(offset=rng.randint(0, total), limit=rng.choice([50, 200])),
        "rollouts, sorted": lambda: listing(
            sort=rng.choice(["reward", "length", "advantage"]), order=order(), offset=rng.randint(0, total)
        ),
        "rollouts, filtered": lambda: listing(
            status=rng.choice(["ok", "wrong", "wrong,error"]),
            min_length=rng.randint(0, 200),
            changed=rng.choice(["", "gained", "lost", "any"]),
            **{"from": rng.randint(0, steps)},
        ),
        "rollouts of a prompt": lambda: listing(prompt=f"gsm8k/train/{rng.randint(0, QUESTIONS - 1)}"),
        "rollouts of an evaluation": lambda: listing(
            source=rng.choice([before, after]), offset=rng.randint(0, EVALUATED)
        ),
        "search, frequent text": lambda: listing(search=frequent(), offset=rng.randint(0, 5000)),
        "search, rare text": lambda: listing(search=rare()),
        "search, missing text": lambda: listing(search=missing()),
        "search with filters": lambda: listing(search=rare()[:6], status="ok", sort="length", order="desc"),
        "one rollout": lambda: f"{base}/rollouts/train/{rng.randint(1, steps)}/{rng.randint(0, PROMPTS * SAMPLES - 1)}",
        "group": lambda: f"{base}/groups/{rng.randint(1, steps)}/{rng.randint(0, PROMPTS - 1)}",
        "story of a prompt": lambda: f"{base}/story?prompt=gsm8k/train/{rng.randint(0, QUESTIONS - 1)}",
        "compare": lambda: (
            f"{base}/compare?a={before}&b={after}&offset={rng.randint(0, 500)}&show={rng.choice(['all', 'lost'])}"
        ),
    }


def summary(name: str, seconds: Sequence[float], **facts: Any) -> dict[str, Any]:
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    values = {"p50_ms": p50, "p99_ms": p99, "max_ms": max(seconds)}
    return {
        "request": name,
        "count": len(seconds),
        **{key: round(1000 * float(value), 1) for key, value in values.items()},
        **facts,
    }


def wait_until_indexed(client: Client) -> tuple[float, list[float]]:
    """Seconds until all files are in the index, and the latencies of requests meanwhile."""
    start, latencies = time.perf_counter(), []
    while True:
        answer, seconds, _ = client.get(f"/api/runs/{quote(NAME)}")
        latencies += [seconds, client.get(f"/api/runs/{quote(NAME)}/rollouts?search=total")[1]]
        if answer["indexed"]["done"] == answer["indexed"]["total"] > 0:
            return time.perf_counter() - start, latencies
        time.sleep(0.05)


def measure(client: Client, steps: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = []
    for name, path in requests(steps, random.Random(seed)).items():
        before = client.cpu_s
        results = [client.get(path()) for _ in range(count)]
        facts: dict[str, Any] = {
            "cpu_ms": round(1000 * (client.cpu_s - before) / count, 1),
            "kib": round(sum(size for _, _, size in results) / count / 1024, 1),
        }
        if name.startswith("search"):  # a search that takes long is continued by the next request
            searched = [answer["searched"] for answer, _, _ in results]
            facts["continued"] = sum(part["done"] < part["total"] for part in searched)
        rows.append(summary(name, [seconds for _, seconds, _ in results], **facts))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_together(client: Client, steps: int, count: int, clients: int) -> dict[str, Any]:
    """Several clients at the same time, each with all kinds of requests."""
    latencies: list[float] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        own = Client(client.url, client.token, client.process)
        paths = list(requests(steps, rng).values())
        latencies.extend(own.get(rng.choice(paths)())[1] for _ in range(count))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary(f"all kinds, {clients} clients at the same time", latencies)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--count", type=int, default=100, help="requests of each kind")
    parser.add_argument("--folder", type=Path, help="where the run is written, or was written before [a temporary one]")
    parser.add_argument("--note", default="", help="a remark for the results, for example about other programs")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    words = ["python", "bench/view.py", *(sys.argv[1:] if argv is None else argv)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        path = folder / "runs" / NAME
        if not path.exists():
            start = time.perf_counter()
            Writer().write(folder / "runs", args.rollouts)
            print(f"written in {time.perf_counter() - start:.0f} s", flush=True)
        steps = len(list((path / "rollouts").glob("*.jsonl")))
        cache = Path(temporary) / "cache"
        with server(folder / "runs", cache) as client:
            before = client.cpu_s
            index_s, meanwhile = wait_until_indexed(client)
            index_cpu_s = client.cpu_s - before
            rows = [summary("while the run is indexed", meanwhile), *measure(client, steps, args.count)]
            rows.append(measure_together(client, steps, args.count, clients=4))
        with server(folder / "runs", cache) as client:
            again_s = wait_until_indexed(client)[0]
        files = list((path / "rollouts").iterdir())
        content = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "command": shlex.join(words),
            "note": args.note,
            "run": {
                "rollouts": steps * PROMPTS * SAMPLES,
                "steps": steps,
                "evaluated_answers": 2 * EVALUATED,
                "mib": round(sum(file.stat().st_size for file in files) / 2**20),
            },
            "load_average": round(os.getloadavg()[0], 1),  # of all programs on the machine, at the end
            "index_s": round(index_s, 1),
            "index_cpu_s": round(index_cpu_s, 1),
            "index_mib": round(sum(file.stat().st_size for file in cache.rglob("*.zip")) / 2**20),
            "restart_s": round(again_s, 2),  # with the index of the previous start
            "limit_ms": 1000 * LIMIT_S,
            "rows": rows,
        }
    print(
        json.dumps(
            {key: content[key] for key in ("run", "load_average", "index_s", "index_cpu_s", "index_mib", "restart_s")}
        )
    )
    if args.json:
        write(args.json, content)
    slow = [row["request"] for row in rows if row["max_ms"] > 1000 * LIMIT_S]
    print(f"slower than {1000 * LIMIT_S:.0f} ms: {', '.join(slow)}" if slow else "all requests were fast enough")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
