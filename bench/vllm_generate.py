"""Generation with vLLM on workloads of `assay bench engine`; all answers run to the length limit.

    python bench/vllm_generate.py SHAPE WORKLOAD... [--runs N] [--quantization fp8] [--kv-cache-dtype fp8]

A workload is PROMPTSxSAMPLESxTOKENS, as in ids of rows, e.g. 16x64x256 or 16x16x4096-prompt_tokens256. Needs an
environment with vLLM and a GPU. Prints a row for each workload without and with log-probabilities, for `--peer-rows`.
Start one at a time: vLLM fails if the GPU's free memory changes while it starts.
"""

import argparse
import json
import os
import random
import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")

COMMON = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "use_sliding_window": False},
    **{"bos_token_id": 151643, "eos_token_id": 151645},
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {  # Qwen2.5: the sizes, the vocabulary, and whether the embedding is tied
    "0.5b": ((896, 4864, 24, 14, 2), 151936, True),
    "1.5b": ((1536, 8960, 28, 12, 2), 151936, True),
    "7b": ((3584, 18944, 28, 28, 4), 152064, False),
}
SETTINGS = (
    "{dtype}, random weights, max_num_seqs 1024, CUDA graphs up to 1,024 sequences, asynchronous scheduling, "
    "prompts of {prompt_tokens} tokens, all run to the length limit; vLLM {version}"
)


def write_config(shape: str, folder: Path) -> None:
    sizes, vocabulary, tied = SHAPES[shape]
    config = {**COMMON, **dict(zip(SIZES, sizes, strict=True)), "vocab_size": vocabulary, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quantization", choices=("fp8",))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--only-logprobs", action="store_true", help="do not measure without log-probabilities")
    args = parser.parse_args()
    from vllm import LLM

    workloads = [parse(text) for text in args.workloads]
    with tempfile.TemporaryDirectory() as folder:
        write_config(args.shape, Path(folder))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=max(2048, *(new + prompt for _, _, new, prompt in workloads)),
            max_num_seqs=1024,
            gpu_memory_utilization=args.gpu_memory_utilization,
            disable_log_stats=True,
            async_scheduling=True,
            compilation_config={"max_cudagraph_capture_size": 1024},  # the default, 512, costs half of the speed here
        )
        for text, workload in zip(args.workloads, workloads, strict=True):
            for logprobs in (0,) if args.only_logprobs else (None, 0):
                print(json.dumps(measure(llm, text, *workload, logprobs, args)), flush=True)


def parse(text: str) -> tuple[int, int, int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:-prompt_tokens(\d+))?", text)
    if found is None:
        raise SystemExit(f"{text} is no workload: write PROMPTSxSAMPLESxTOKENS, or ...-prompt_tokensN")
    prompts, samples, new, prompt_tokens = found.groups()
    return int(prompts), int(samples), int(new), int(prompt_tokens or 128)


def measure(
    llm: Any, text: str, prompts: int, samples: int, new: int, prompt_tokens: int, logprobs: int | None, args: Any
) -> dict[str, Any]:
    import vllm

    draw = random.Random(0)
    inputs = [{"prompt_token_ids": [draw.randrange(100, 150000) for _ in range(prompt_tokens)]} for _ in range(prompts)]
    speeds = []
    for length in (8, *[new] * args.runs):  # the first is a warm-up
        params = vllm.SamplingParams(
            n=samples, temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(answer.token_ids) == length for output in outputs for answer in output.outputs)
        speeds.append(prompts * samples * length / seconds)
    runs = [round(speed) for speed in speeds[1:]]
    in_8_bits = f"-{args.quantization}" * bool(args.quantization) + "-fp8kv" * (args.kv_cache_dtype == "fp8")
    dtype = ", ".join(
        ["bfloat16", *["weights and activations in fp8"] * bool(args.quantization)]
        + ["KV cache in fp8"] * (args.kv_cache_dtype == "fp8")
    )
    return {
        "id": f"gen-{args.shape}-{text}{in_8_bits}",
        "system": "vllm",
        "logprobs": logprobs is not None,
        "tokens_per_s": round(median(runs)),
        "runs": runs,
        "settings": SETTINGS.format(dtype=dtype, prompt_tokens=prompt_tokens, version=vllm.__version__),
    }


if __name__ == "__main__":
    main()
