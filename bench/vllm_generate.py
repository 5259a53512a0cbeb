"""Generation with vLLM on the workload of `assay bench engine`: 16 prompts, all answers run to the length limit.

    python bench/vllm_generate.py SHAPE [SAMPLES] [NEW_TOKENS]

Needs an environment with vLLM and a GPU. Prints the best of three runs, without and with log-probabilities.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
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
PROMPTS, PROMPT_TOKENS = 16, 128


def write_config(shape: str, folder: Path) -> None:
    sizes, vocabulary, tied = SHAPES[shape]
    config = {**COMMON, **dict(zip(SIZES, sizes, strict=True)), "vocab_size": vocabulary, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))


def main(shape: str, samples: int = 64, new: int = 256) -> None:
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(2048, new + 256),
            max_num_seqs=1024,
            gpu_memory_utilization=0.6,
            disable_log_stats=True,
            async_scheduling=True,
            compilation_config={"max_cudagraph_capture_size": 1024},  # the default, 512, costs half of the speed here
        )
        measure(llm, shape, samples, new)


def measure(llm: Any, shape: str, samples: int, new: int) -> None:
    import vllm

    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(100, 150000) for _ in range(PROMPT_TOKENS)]} for _ in range(PROMPTS)
    ]
    for logprobs in (None, 0):
        best = 0.0
        for length in (8, new, new, new):  # the first is a warm-up
            params = vllm.SamplingParams(
                n=samples, temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=logprobs
            )
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
            best = max(best, tokens / seconds) if length == new else best
        facts = {"engine": f"vllm {vllm.__version__}", "shape": shape, "logprobs": logprobs is not None}
        print(json.dumps({**facts, "tokens_per_s": round(best)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
