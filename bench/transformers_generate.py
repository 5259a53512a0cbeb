"""Compare generation with `generate` of transformers: the same weights and requests, in alternating runs.

    python bench/transformers_generate.py --model smollm2-135m --prompts 64 --samples 1 --new 64 --dtype bfloat16

Takes the options of `assay bench engine`.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from assay.bench.engine import EngineBenchmark, Options, settings_of, timed
from assay.bench.results import summarize
from assay.bench.workload import Workload, command_options
from assay.cli.bench import add_engine_arguments, describe_engine, engine_work, print_engine_rows, run_jobs
from assay.cli.main import main, run_command
from assay.engine import Request, SamplingParams
from assay.models.base import HFModel, PolicyModel
from assay.models.decoder import Decoder
from assay.models.spec import spec_to_hf
from assay.types import Progress, UserError

HELP = "Measure generation of assay and of transformers in turns: tokens per second on the same requests."
PROGRAM = "python bench/transformers_generate.py"


class TransformersEngine:
    """transformers with the engine's weights, dtype and device."""

    def __init__(self, model: PolicyModel, device: torch.device, dtype: torch.dtype, batch: int) -> None:
        self.hf, self.device, self.batch = transformers_model(model, device, dtype), device, batch

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> int:
        """Return the number of requested tokens. A batch runs until its longest sequence ends."""
        rows = [(request.prompt_ids, request.params) for request in requests for _ in range(request.params.n)]
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch]
            new = max(params.max_new_tokens for _, params in part)
            ids = torch.tensor([list(prompt) for prompt, _ in part], device=self.device)  # all of one length
            config = generation_config(part[0][1], new)
            out = self.hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert out.shape == (len(part), ids.shape[1] + new), "transformers stopped early"
        return sum(params.max_new_tokens for _, params in rows)


def generation_config(params: SamplingParams, new: int) -> Any:
    from transformers import GenerationConfig

    sampling: dict[str, Any] = {
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
    }
    chosen = sampling if params.temperature > 0 else {"do_sample": False}
    return GenerationConfig(max_new_tokens=new, pad_token_id=0, **chosen)


def transformers_model(model: PolicyModel, device: torch.device, dtype: torch.dtype) -> Any:
    """The model as a class of transformers, with a copy of its weights and without stop tokens."""
    if isinstance(model, HFModel):
        hf: Any = copy.deepcopy(model.hf)
        hf.to(device=device, dtype=dtype)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        assert isinstance(model, Decoder)
        settings = spec_to_hf(model.spec)
        settings |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=dtype)
        missing, unexpected = hf.load_state_dict(dict(model.weights()), strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if model.spec.tied else set())
        hf.tie_weights()
    if hf.generation_config is not None:
        hf.generation_config.eos_token_id = None  # the default where ours names none
    return hf.eval()


def measure_both(work: Workload, options: Options, progress: Progress | None = None) -> list[dict[str, Any]]:
    """A row for assay and a row for transformers."""
    bench, speeds = EngineBenchmark(work, options, progress), []
    other: TransformersEngine | None = None
    for _ in range(1 + options.repeat):
        requests = bench.run()
        other = other or TransformersEngine(bench.model, bench.device, bench.dtype, work.batch)
        tokens, seconds = timed(other.generate, requests, bench.device)
        speeds.append(tokens / seconds)
    del other  # frees its memory
    command = [*PROGRAM.split(), *command_options(work), *command_options(options)]
    ours = bench.row(command)
    theirs = {
        "id": ours["id"],
        "system": "transformers",
        "logprobs": False,
        **summarize("tokens_per_s", "first_run_tokens_per_s", speeds, digits=1),
        **settings_of(work, options),
        "command": shlex.join(command),
    }
    ratio = median(bench.speeds[1:]) / median(speeds[1:])
    return [ours | {"ratio_to_transformers": round(ratio, 3)}, theirs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.table or args.startup or args.first_token or args.peer_rows:
        raise UserError("--table, --startup and --peer-rows are options of assay bench engine: leave them out")
    work, options = engine_work(args), Options(**Options.given(args))
    words = [*PROGRAM.split(), *command_options(work), *command_options(options)]
    jobs = [(describe_engine(work), partial(measure_both, work, options))]
    print_engine_rows(run_jobs(args, jobs, words, "--max-batch, --samples or --new"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(command=partial(run_command, sys.modules[__name__], PROGRAM)))
