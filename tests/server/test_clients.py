"""Programs from the package index that use the OpenAI API, against a served model. Each is skipped if not installed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_parts import NAME, RunningServer, byte_tokenizer, save_folder, serving, tiny_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.peer
PLACES = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
TASK = """task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
"""
OF_KIND = {
    "multiple_choice": 'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n',
    "generate_until": 'doc_to_target: "{{text}}"\nmetric_list: [{metric: exact_match}]\n'
    'generation_kwargs: {until: ["~~"], max_gen_toks: 12, do_sample: false}\n',
    "loglikelihood_rolling": 'doc_to_target: "{{text}}"\nmetric_list: [{metric: word_perplexity}]\n',
}


def run(folder: Path, program: str, *words: str, **variables: str) -> str:
    found = shutil.which(program, path=PLACES)
    if found is None:
        pytest.skip(f"the program {program} is not installed")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    environment |= variables
    done = subprocess.run([found, *words], cwd=folder, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return done.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_model(0, 1024), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def long_server() -> Iterator[RunningServer]:
    with serving(tiny_model(0, 1024)) as server:
        yield server


def loglikelihood(reference: Any, before: list[int], scored: list[int]) -> tuple[float, bool]:
    """By transformers; and whether all tokens are the most likely ones."""
    ids = torch.tensor([*before, *scored])
    with torch.no_grad():
        rows = reference(ids[None]).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
    targets = torch.tensor(scored)
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())


def greedy_text(reference: Any, prompt: str) -> str:
    ids = torch.tensor([byte_tokenizer().encode(prompt)])
    tokens = reference.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    return byte_tokenizer().decode(tokens).partition("~~")[0]


def write_tasks(folder: Path) -> None:
    draw, words = random.Random(0), ["red", "né", "木", "seven", '"a"', "tree\n", "b c"]

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(low, high)))

    rows = [
        {"question": text(2, 20), "choices": [text(1, 4) for _ in range(4)], "answer": 0, "text": text(5, 90)}
        for _ in range(12)
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for kind, fields in OF_KIND.items():
        start = "" if kind == "loglikelihood_rolling" else "{{question}} ="
        head = TASK.format(kind=kind, data=folder / "data.jsonl", text=start)
        (folder / f"{kind}.yaml").write_text(head + fields)


@pytest.mark.slow
@pytest.mark.parametrize("as_text", [False, True])
def test_results_of_lm_evaluation_harness_are_those_of_transformers(
    tmp_path: Path, long_server: RunningServer, model: Path, reference: Any, as_text: bool
) -> None:
    write_tasks(tmp_path)
    where = f"model={NAME},base_url={long_server.api}/completions,max_length=1024"
    # By default it sends token ids, encoded by the tokenizer of the server.
    own = f"tokenized_requests=False,tokenizer_backend=huggingface,tokenizer={model}"
    more = own if as_text else "num_concurrent=8"
    words = ["run", "--model", "local-completions", "--model_args", f"{where},{more}", "--include_path", str(tmp_path)]
    words += ["--tasks", ",".join(f"local_{kind}" for kind in OF_KIND), "--log_samples", "--output_path", "out"]
    run(tmp_path, "lm_eval", *words, "--batch_size", "8" if as_text else "1")
    encode = byte_tokenizer().encode
    for kind in OF_KIND:
        (file,) = tmp_path.glob(f"out/*/samples_local_{kind}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == 12
        for sample in samples:
            for arguments, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
                first = arguments["arg_0"]
                if kind == "generate_until":
                    assert answer == greedy_text(reference, first)
                elif kind == "multiple_choice":
                    expected, greedy = loglikelihood(reference, encode(first), encode(arguments["arg_1"]))
                    assert float(answer[0]) == pytest.approx(expected, abs=1e-4)
                    assert str(answer[1]) == str(greedy)
                else:
                    expected, _ = loglikelihood(reference, [*byte_tokenizer().eos_ids[:1]], encode(first))
                    assert float(answer) == pytest.approx(expected, rel=1e-5)


def test_llm_streams_an_answer(tmp_path: Path, long_server: RunningServer, reference: Any) -> None:
    entry = {"model_id": "local", "model_name": NAME, "api_base": long_server.api}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    options = ["-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    answer = run(tmp_path, "llm", *options, "How many?", LLM_USER_PATH=str(tmp_path))
    chat = byte_tokenizer().chat_text([{"role": "user", "content": "How many?"}], open_reply=True)
    assert answer.rstrip("\n") == greedy_text(reference, chat).rstrip("\n")
    (logged,) = json.loads(run(tmp_path, "llm", "logs", "--json", LLM_USER_PATH=str(tmp_path)))
    assert logged["input_tokens"] == len(byte_tokenizer().encode(chat)) and 0 < logged["output_tokens"] <= 12


@pytest.mark.slow
def test_guidellm_measures_the_server(tmp_path: Path, long_server: RunningServer, model: Path) -> None:
    options = {
        "backend": f"kind=openai_http,target={long_server.url},model={NAME}",
        "tokenizer": f"kind=huggingface_auto,model={model}",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=8",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "output": "kind=json,path=out.json",
    }
    run(
        tmp_path,
        "guidellm",
        "run",
        "--disable-console",
        *(word for o in options.items() for word in (f"--{o[0]}", o[1])),
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 8 and totals["errored"] == 0
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == 16
