"""Names of settings in TRL, verl, OpenRLHF and nanochat, and the keys that correspond to them here.

An unknown key that is one of these names is reported with its equivalent. docs/coming-from.md prints the same tables.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import NamedTuple


class Equivalent(NamedTuple):
    """The key for a setting of another library; empty if there is none. The remark says what differs."""

    key: str
    remark: str = ""


def no_key(remark: str) -> Equivalent:
    return Equivalent("", remark)


COLUMNS = "question_column, answer_column and solution_column name columns"
PROMPTS = "counts prompts over all devices; a step has train.prompts x train.samples answers"
PASSES = "passes over each batch of rollouts"
TOKENS = "in tokens, not sequences; it does not change the result"
DROPS = "longer prompts of the train split are dropped, never truncated"
WARMUP = "a number of steps, not a fraction"
BOTH_CLIPS = "below 1; set algo.clip_high for the range above 1"
KL_ON = "above 0 turns the KL term on"
GIB = "in GiB for the KV cache, not a fraction of the GPU memory"
FOLDER = "folder of all runs; a run is saved in its subfolder NAME"
RESUME = "not a setting: assay train --resume RUN"
LAUNCHER = "not a setting: start the processes with torchrun or assay slurm"
OWN_ENGINE = 'not needed: assay has its own engine; engine.name = "vllm" selects vLLM'
PACKED = "not needed: sequences are always packed without padding"
REWARD_MODEL = 'with judge.kind = "reward_model" and reward.function = "judge"'
SPLITS = "a folder with one file per split, or one file that is split"

TRL = {
    "model_name_or_path": Equivalent("model.source"),
    "dataset_name": Equivalent("task.path", "task.name selects the task; jsonl reads your own rows"),
    "reward_funcs": Equivalent("reward.functions", "file.py:function, in TRL's signature or in assay's own"),
    "reward_weights": Equivalent("reward.weights"),
    "output_dir": Equivalent("runs_dir", FOLDER),
    "run_name": Equivalent("name"),
    "report_to": Equivalent("log.wandb", "the project name; for TensorBoard: log.tensorboard"),
    "seed": Equivalent("seed"),
    "learning_rate": Equivalent("optim.lr"),
    "lr_scheduler_type": Equivalent("optim.schedule", "the default is constant, not linear"),
    "warmup_steps": Equivalent("optim.warmup"),
    "warmup_ratio": Equivalent("optim.warmup", WARMUP),
    "weight_decay": Equivalent("optim.weight_decay"),
    "max_grad_norm": Equivalent("optim.max_grad_norm"),
    "adam_beta1": Equivalent("optim.betas", "a pair; the default is [0.9, 0.95]"),
    "adam_beta2": Equivalent("optim.betas", "a pair; the default is [0.9, 0.95]"),
    "adam_epsilon": Equivalent("optim.eps"),
    "max_steps": Equivalent("train.steps", "counts batches of rollouts, not optimizer steps"),
    "num_train_epochs": Equivalent("train.epochs"),
    "batch_size": Equivalent("train.prompts", PROMPTS),
    "per_device_train_batch_size": Equivalent("train.prompts", PROMPTS),
    "generation_batch_size": Equivalent("train.prompts", PROMPTS),
    "gradient_accumulation_steps": no_key(
        "not needed: train.token_budget limits micro-batches, without changing the loss"
    ),
    "per_device_eval_batch_size": no_key("not needed: the engine forms its batches; engine.max_batch limits them"),
    "steps_per_generation": Equivalent("algo.updates", "counts optimizer steps, not micro-batches"),
    "num_generations": Equivalent("train.samples"),
    "num_generations_eval": Equivalent("eval.samples"),
    "num_iterations": Equivalent("train.passes", PASSES),
    "max_prompt_length": Equivalent("train.max_prompt_tokens", DROPS),
    "max_completion_length": Equivalent("sampling.max_new_tokens"),
    "temperature": Equivalent("sampling.temperature", "evaluations use eval.temperature"),
    "top_p": Equivalent("sampling.top_p"),
    "top_k": Equivalent("sampling.top_k"),
    "min_p": Equivalent("sampling.min_p"),
    "repetition_penalty": no_key("not supported: training needs the probabilities of the policy itself"),
    "beta": Equivalent("algo.kl_coef", KL_ON),
    "epsilon": Equivalent("algo.clip_low", BOTH_CLIPS),
    "epsilon_high": Equivalent("algo.clip_high"),
    "delta": Equivalent("algo.dual_clip"),
    "loss_type": Equivalent(
        "algo.aggregate", "grpo: sequence; dapo, bnpo: token; dr_grpo: constant; cispo: algo.recipe"
    ),
    "scale_rewards": Equivalent("algo.advantage", "group: group_norm; none: group_mean; batch: no exact equivalent"),
    "importance_sampling_level": Equivalent("algo.ratio"),
    "mask_truncated_completions": Equivalent("algo.mask_overlong"),
    "sync_ref_model": Equivalent("algo.refresh_reference", "above 0 turns it on"),
    "ref_model_sync_steps": Equivalent("algo.refresh_reference"),
    "ref_model_mixup_alpha": Equivalent("algo.reference_ema", "1 - alpha, applied after every step"),
    "top_entropy_quantile": no_key("not supported"),
    "use_vllm": no_key(OWN_ENGINE),
    "vllm_mode": no_key(OWN_ENGINE),
    "vllm_gpu_memory_utilization": Equivalent("engine.memory", GIB),
    "vllm_max_model_length": Equivalent("model.max_length"),
    "vllm_enable_sleep_mode": Equivalent("engine.sleep_while_training"),
    "vllm_tensor_parallel_size": Equivalent("parallel.tp", "applies to training and generation"),
    "vllm_importance_sampling_correction": Equivalent("algo.correction", "off by default; its value is the mode"),
    "vllm_importance_sampling_mode": Equivalent("algo.correction", "the values have the same names"),
    "vllm_importance_sampling_cap": Equivalent("algo.correction_high"),
    "gradient_checkpointing": Equivalent("train.recompute"),
    "torch_compile": Equivalent("train.compile"),
    "bf16": Equivalent("dtype", 'dtype = "bfloat16"; the default chooses by device'),
    "fp16": no_key("not supported: dtype is bfloat16, float32 or float64"),
    "torch_dtype": Equivalent("dtype", "of the computation; master weights are float32"),
    "attn_implementation": no_key("not needed: the attention kernel is chosen by device"),
    "use_liger_kernel": no_key("not needed: full logits are never stored"),
    "use_peft": Equivalent("lora.rank", "above 0 turns LoRA on"),
    "lora_r": Equivalent("lora.rank"),
    "lora_alpha": Equivalent("lora.alpha"),
    "lora_target_modules": Equivalent("lora.targets"),
    "lora_dropout": no_key("not supported"),
    "load_in_4bit": Equivalent("lora.quantize", '"nf4"'),
    "bnb_4bit_quant_type": Equivalent("lora.quantize", '"nf4" is supported, "fp4" is not'),
    "use_bnb_nested_quant": no_key("not needed: the scales of bfloat16 weights take 16 bits, without loss"),
    "fsdp": Equivalent("parallel.mode"),
    "deepspeed": Equivalent("parallel.mode", 'sharding of weights, gradients and moments is "fsdp"'),
    "logging_steps": no_key("not needed: every step is logged in metrics.jsonl"),
    "log_completions": no_key("not needed: all rollouts are saved; save.rollouts limits them"),
    "eval_steps": Equivalent("eval.every"),
    "eval_strategy": Equivalent("eval.every", "a number of steps; 0: only before and after training"),
    "save_steps": Equivalent("save.every"),
    "save_strategy": Equivalent("save.every", "a number of steps; 0: only at the end"),
    "save_total_limit": Equivalent("save.keep", "the best and the initial checkpoint are kept in addition"),
    "load_best_model_at_end": no_key("not needed: the best checkpoint is run:NAME@best"),
    "resume_from_checkpoint": no_key(RESUME),
    "push_to_hub": no_key("not supported: assay export writes a Hugging Face folder"),
    "dataloader_num_workers": no_key("not needed: prompts are rendered in the training process"),
}

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
VERL = {
    "data.train_batch_size": Equivalent("train.prompts"),
    "data.max_prompt_length": Equivalent("train.max_prompt_tokens", DROPS),
    "data.max_response_length": Equivalent("sampling.max_new_tokens"),
    "data.train_files": Equivalent("task.path", SPLITS),
    "data.val_files": Equivalent("task.path", SPLITS),
    "data.prompt_key": Equivalent("task.args", COLUMNS),
    "data.shuffle": no_key("not needed: prompts are shuffled with the seed"),
    f"{MODEL}.path": Equivalent("model.source"),
    f"{MODEL}.enable_gradient_checkpointing": Equivalent("train.recompute"),
    f"{MODEL}.use_remove_padding": no_key(PACKED),
    f"{MODEL}.lora_rank": Equivalent("lora.rank"),
    f"{MODEL}.lora_alpha": Equivalent("lora.alpha"),
    f"{MODEL}.target_modules": Equivalent("lora.targets"),
    f"{ACTOR}.strategy": Equivalent("parallel.mode"),
    f"{ACTOR}.optim.lr": Equivalent("optim.lr"),
    f"{ACTOR}.optim.lr_warmup_steps": Equivalent("optim.warmup"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Equivalent("optim.warmup", WARMUP),
    f"{ACTOR}.optim.warmup_style": Equivalent("optim.schedule"),
    f"{ACTOR}.optim.min_lr_ratio": Equivalent("optim.final"),
    f"{ACTOR}.optim.weight_decay": Equivalent("optim.weight_decay", "the default is 0, not 0.01"),
    f"{ACTOR}.grad_clip": Equivalent("optim.max_grad_norm"),
    f"{ACTOR}.ppo_mini_batch_size": Equivalent("algo.minibatch_size", "in prompts, as in verl; or algo.updates"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Equivalent("train.token_budget", TOKENS),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Equivalent("train.token_budget"),
    f"{ACTOR}.use_dynamic_bsz": no_key("not needed: micro-batches are always formed by tokens, train.token_budget"),
    f"{ACTOR}.ppo_epochs": Equivalent("train.passes", PASSES),
    f"{ACTOR}.clip_ratio": Equivalent("algo.clip_low", BOTH_CLIPS),
    f"{ACTOR}.clip_ratio_low": Equivalent("algo.clip_low"),
    f"{ACTOR}.clip_ratio_high": Equivalent("algo.clip_high"),
    f"{ACTOR}.clip_ratio_c": Equivalent("algo.dual_clip", "off by default, not 3"),
    f"{ACTOR}.loss_agg_mode": Equivalent(
        "algo.aggregate", "token-mean: token; seq-mean-token-mean: sequence; seq-mean-token-sum-norm: constant"
    ),
    f"{ACTOR}.policy_loss.loss_mode": Equivalent(
        "algo.policy_loss", "gspo, gpg: algo.recipe; clip_cov, kl_cov: algo.cov"
    ),
    f"{ACTOR}.entropy_coeff": Equivalent("algo.entropy_coef"),
    f"{ACTOR}.use_kl_loss": Equivalent("algo.kl_coef", KL_ON),
    f"{ACTOR}.kl_loss_coef": Equivalent("algo.kl_coef"),
    f"{ACTOR}.kl_loss_type": Equivalent("algo.kl", "kl: k1; mse: k2; low_var_kl: k3"),
    "actor_rollout_ref.ref.fsdp_config.param_offload": Equivalent("train.offload_reference"),
    f"{ROLLOUT}.name": Equivalent("engine.name", "vllm and sglang use servers of vLLM and SGLang"),
    f"{ROLLOUT}.n": Equivalent("train.samples"),
    f"{ROLLOUT}.temperature": Equivalent("sampling.temperature"),
    f"{ROLLOUT}.top_p": Equivalent("sampling.top_p"),
    f"{ROLLOUT}.top_k": Equivalent("sampling.top_k", "0: off, not -1"),
    f"{ROLLOUT}.val_kwargs.n": Equivalent("eval.samples"),
    f"{ROLLOUT}.val_kwargs.temperature": Equivalent("eval.temperature"),
    f"{ROLLOUT}.gpu_memory_utilization": Equivalent("engine.memory", GIB),
    f"{ROLLOUT}.max_num_seqs": Equivalent("engine.max_batch"),
    f"{ROLLOUT}.max_num_batched_tokens": Equivalent("engine.prefill_tokens"),
    f"{ROLLOUT}.tensor_model_parallel_size": Equivalent("parallel.tp", "applies to training and generation"),
    f"{ROLLOUT}.free_cache_engine": Equivalent("engine.sleep_while_training"),
    f"{ROLLOUT}.calculate_log_probs": no_key("not needed: the engine always returns log-probabilities"),
    f"{ROLLOUT}.multi_turn.enable": Equivalent("env.name", "the name of an environment"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": Equivalent("env.max_steps"),
    "algorithm.adv_estimator": Equivalent(
        "algo.recipe", "gae: ppo; reinforce_plus_plus: reinforce_pp; grpo, rloo and remax as here"
    ),
    "algorithm.norm_adv_by_std_in_grpo": Equivalent("algo.advantage", "true: group_norm; false: group_mean"),
    "algorithm.use_kl_in_reward": Equivalent("algo.reward_kl_coef", KL_ON),
    "algorithm.kl_ctrl.kl_coef": Equivalent("algo.reward_kl_coef"),
    "algorithm.gamma": Equivalent("critic.gamma"),
    "algorithm.lam": Equivalent("critic.gae_lambda"),
    "algorithm.filter_groups.enable": Equivalent("algo.drop_zero_variance"),
    "algorithm.filter_groups.max_num_gen_batches": Equivalent("algo.resample", "counts further rounds: one less"),
    "critic.optim.lr": Equivalent("critic.lr"),
    "critic.cliprange_value": Equivalent("critic.clip"),
    "critic.ppo_epochs": Equivalent("critic.passes", "optimizer steps per batch"),
    "critic.grad_clip": Equivalent("critic.max_grad_norm"),
    "custom_reward_function.path": Equivalent("reward.function", "file.py:function"),
    "custom_reward_function.name": Equivalent("reward.function", "file.py:function"),
    "reward_model.enable": Equivalent("judge.kind", 'kind = "reward_model", with reward.function = "judge"'),
    "reward_model.model.path": Equivalent("judge.model", REWARD_MODEL),
    "trainer.total_epochs": Equivalent("train.epochs"),
    "trainer.total_training_steps": Equivalent("train.steps"),
    "trainer.save_freq": Equivalent("save.every", "0: only at the end, not -1"),
    "trainer.test_freq": Equivalent("eval.every", "0: only before and after training, not -1"),
    "trainer.val_before_train": no_key("not needed: the model is always evaluated before and after training"),
    "trainer.max_actor_ckpt_to_keep": Equivalent("save.keep"),
    "trainer.project_name": Equivalent("log.wandb"),
    "trainer.experiment_name": Equivalent("name"),
    "trainer.logger": Equivalent("log.wandb", "the project name; for TensorBoard: log.tensorboard"),
    "trainer.default_local_dir": Equivalent("runs_dir", FOLDER),
    "trainer.resume_mode": no_key(RESUME),
    "trainer.n_gpus_per_node": no_key(LAUNCHER),
    "trainer.nnodes": no_key(LAUNCHER),
}

OPENRLHF = {
    "pretrain": Equivalent("model.source"),
    "prompt_data": Equivalent("task.path", SPLITS),
    "eval_dataset": Equivalent("task.path", SPLITS),
    "input_key": Equivalent("task.args", COLUMNS),
    "label_key": Equivalent("task.args", COLUMNS),
    "apply_chat_template": Equivalent("prompt.style", 'style = "chat"'),
    "remote_rm_url": Equivalent(
        "judge.url", "a server of vLLM, SGLang or assay serve; another server: call it in reward.function"
    ),
    "reward_pretrain": Equivalent("judge.model", REWARD_MODEL),
    "save_path": Equivalent("runs_dir", FOLDER),
    "ckpt_path": Equivalent("runs_dir", FOLDER),
    "max_ckpt_num": Equivalent("save.keep"),
    "load_checkpoint": no_key(RESUME),
    "n_samples_per_prompt": Equivalent("train.samples"),
    "eval_n_samples_per_prompt": Equivalent("eval.samples"),
    "eval_temperature": Equivalent("eval.temperature"),
    "rollout_batch_size": Equivalent("train.prompts"),
    "train_batch_size": Equivalent("algo.minibatch_size", "in prompts with all their answers, not answers"),
    "micro_train_batch_size": Equivalent("train.token_budget", TOKENS),
    "micro_rollout_batch_size": no_key("not needed: the engine forms its batches; engine.max_batch limits them"),
    "train_max_tokens_per_gpu": Equivalent("train.token_budget"),
    "num_episodes": Equivalent("train.epochs"),
    "max_epochs": Equivalent("train.passes", PASSES),
    "prompt_max_len": Equivalent("train.max_prompt_tokens", DROPS),
    "generate_max_len": Equivalent("sampling.max_new_tokens"),
    "max_samples": Equivalent("train.max_train_prompts"),
    "actor_learning_rate": Equivalent("optim.lr"),
    "critic_learning_rate": Equivalent("critic.lr"),
    "lr_scheduler": Equivalent("optim.schedule", "optim.final = 0.1 gives a minimum of 0.1 x optim.lr"),
    "lr_warmup_ratio": Equivalent("optim.warmup", WARMUP),
    "adam_betas": Equivalent("optim.betas"),
    "l2": Equivalent("optim.weight_decay"),
    "max_norm": Equivalent("optim.max_grad_norm"),
    "advantage_estimator": Equivalent(
        "algo.recipe", "gae: ppo; reinforce: reinforce_pp; group_norm: grpo; rloo and dr_grpo as here"
    ),
    "no_advantage_std_norm": Equivalent("algo.advantage", 'advantage = "group_mean"'),
    "policy_loss_type": Equivalent("algo.ratio", "ppo: token; gspo: sequence"),
    "init_kl_coef": Equivalent("algo.reward_kl_coef", "off by default; with use_kl_loss: algo.kl_coef"),
    "use_kl_loss": Equivalent("algo.kl_coef", KL_ON),
    "kl_estimator": Equivalent("algo.kl", "of the KL in the loss; the KL in the reward is k1"),
    "eps_clip": Equivalent("algo.clip_low", BOTH_CLIPS),
    "eps_clip_low_high": Equivalent("algo.clip_low", "the second number is algo.clip_high"),
    "value_clip": Equivalent("critic.clip"),
    "lambd": Equivalent("critic.gae_lambda"),
    "entropy_loss_coef": Equivalent("algo.entropy_coef"),
    "dynamic_filtering": Equivalent("algo.drop_zero_variance"),
    "overlong_buffer_len": Equivalent("algo.soft_overlong_buffer", "a fraction of the length limit, not tokens"),
    "overlong_penalty_factor": Equivalent("algo.soft_overlong_weight"),
    "enable_vllm_is_correction": Equivalent("algo.correction", 'correction = "token_truncate"'),
    "vllm_is_truncated_threshold": Equivalent("algo.correction_high"),
    "vllm_num_engines": no_key(OWN_ENGINE),
    "vllm_enable_sleep": Equivalent("engine.sleep_while_training"),
    "async_train": Equivalent("source.name", 'source = "async"'),
    "ref_reward_offload": Equivalent("train.offload_reference"),
    "packing_samples": no_key(PACKED),
    "zero_stage": Equivalent("parallel.mode", 'sharding of weights, gradients and moments is "fsdp"'),
    "use_wandb": Equivalent("log.wandb", "the project name"),
    "wandb_project": Equivalent("log.wandb"),
    "wandb_run_name": Equivalent("name"),
    "use_tensorboard": Equivalent("log.tensorboard", "true or false; the files are in the run directory"),
}

NANOCHAT = {
    "run": Equivalent("name", "log.wandb = PROJECT turns Weights & Biases on"),
    "source": Equivalent("model.source", "a Hugging Face folder, a hub id, a GGUF file, or run:NAME@STEP"),
    "model_tag": Equivalent("model.source", "run:NAME, where NAME is the name of the run"),
    "model_step": Equivalent("model.source", "run:NAME@STEP; save.keep = 0 keeps all checkpoints"),
    "device_type": Equivalent("device"),
    "examples_per_step": Equivalent("train.prompts"),
    "num_samples": Equivalent("train.samples"),
    "device_batch_size": Equivalent("train.token_budget", TOKENS),
    "total_batch_size": Equivalent("sft.batch", "of supervised fine-tuning, in solutions, not tokens"),
    "num_epochs": Equivalent("train.epochs"),
    "max_new_tokens": Equivalent("sampling.max_new_tokens"),
    "unembedding_lr": Equivalent("optim.head_lr", "of an untied head"),
    "embedding_lr": Equivalent("optim.embedding_lr"),
    "matrix_lr": Equivalent("optim.matrix_lr", 'of Muon: optim.name = "muon"'),
    "init_lr_frac": Equivalent("optim.initial"),
    "save_every": Equivalent("save.every"),
    "eval_every": Equivalent("eval.every"),
    "eval_examples": Equivalent("eval.examples"),
}

LIBRARIES = {"TRL": TRL, "verl": VERL, "OpenRLHF": OPENRLHF, "nanochat": NANOCHAT}
ROWS = [(library, name, row) for library, rows in LIBRARIES.items() for name, row in rows.items()]
PRIMARY = ("optim", "train", "sampling")  # sections that are meant if a key of several sections is given without one


def explain_foreign(key: str, known: Collection[str]) -> str | None:
    """Say what an unknown dotted key is called here, or None if it is no setting of another library.

    Parts in front are ignored: a name of another library may be written into any of our sections. So are parts that
    are missing in front, as in `rollout.n`, unless the rest is also the name of one of our keys. An equivalent that
    is not among the `known` keys of the command does not count.
    """
    own = {name.rpartition(".")[2] for name in known}
    parts = key.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        wanted = ".".join(parts[start:])
        exact = [row for row in ROWS if row[1] == wanted]
        partial = [row for row in ROWS if row[1].endswith(f".{wanted}") and wanted not in own]
        for library, name, equivalent in (exact + partial)[:1]:
            return describe(library, name, equivalent, parts[0] if start else "", known)
    return None


def nearest_foreign(key: str) -> str | None:
    """Return the name in another library that is nearly the last part of `key`."""
    names = [name for _, name, _ in ROWS]
    return next(iter(get_close_matches(key.lower().replace("-", "_").rpartition(".")[2], names, 1, cutoff=0.85)), None)


def describe(library: str, name: str, equivalent: Equivalent, section: str, known: Collection[str]) -> str | None:
    key, remark = equivalent
    if not key:
        return f"{library}'s {name} is {remark}"
    first, _, last = key.rpartition(".")
    # In a section with a key of this name, that key is meant: critic.learning_rate is critic.lr.
    given = f"{section}.{last}" if first in PRIMARY else key
    key = next((candidate for candidate in (given, key, f"eval.{last}", last) if candidate in known), "")
    if not key:
        return None
    text = f"did you mean '{key}'?" if name == last else f"{library}'s {name} is '{key}' here"
    return text + (f" ({remark})" if remark else "")
