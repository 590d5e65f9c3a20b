"""The flags of `dhelix train`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.train import step_flags
from dhelix.launch.train.options import SCHEDULES, Options

_TYPES = ["float32", "bfloat16"]

USAGE = """\
usage: dhelix train [flags]

Trains a Llama, GPT or mixture-of-experts model on text. Micro-batches are interleaved as two strands unless --plain is
given. Ctrl-C or SIGTERM saves a checkpoint and ends.

  dhelix train --cpu_devices 8 --mesh dp=2,tp=4              # try it without a GPU
  dhelix train --cpu_devices 8 --mesh dp=2,cp=2,tp=2         # devices share sequences (context parallelism)
  dhelix train --cpu_devices 8 --pp 2 --mesh dp=2,tp=2       # folded pipeline of two stages
  dhelix train --preset llama-8b --data corpus.jsonl --tokenizer tokenizer.json --microbatches 16 --eval_every 100
      --checkpoint_dir run1 --save_every 100 --tensorboard run1/board
  dhelix train ... --checkpoint_dir run1 --resume            # continue run1
  dhelix train --init_from Llama-3.1-8B --data mine.jsonl --export mine      # from and to Hugging Face's format"""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix train` on `values`."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values)
    real = functools.partial(flags.DEFINE_float, lower_bound=0.0, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    switch = functools.partial(flags.DEFINE_bool, default=False, flag_values=values)
    default = Options()
    step_flags.define(values, default.preset, "all devices, as many as possible on tp, or on ep with experts")
    text("init_from", None, "folder with a Llama, GPT-2, Mixtral or Phi-MoE of Hugging Face, in place of --preset")
    number(
        "steps",
        default.steps,
        "number of the last step, where the learning-rate schedule ends; keep it when you resume",
        1,
    )
    real("lr", default.lr, "peak learning rate")
    choice("lr_schedule", default.lr_schedule, SCHEDULES, "how the learning rate falls; wsd decays over --decay_steps")
    real("lr_end", default.lr_end, "learning rate of the last step, as a fraction of --lr")
    number("warmup", None, "warm-up steps (default: a tenth of the steps, at most 100)", 0)
    number("decay_steps", None, "with --lr_schedule wsd: steps of the decay (default: a fifth of the steps)", 1)
    text("optimizer", default.optimizer, "optimizer of Optax by name: adamw, lion, adafactor, ...")
    text("optimizer_options", None, "its values: b2=0.99,weight_decay=0.2 (default: usual for language models)")
    real("clip", default.clip, "largest global norm of the gradients; 0: any")
    real("z_loss", default.z_loss, "weight of the z-loss, such as 1e-4")
    choice("param_dtype", None, _TYPES, "data type of parameters (default: the preset's)")
    choice("on_nan", default.on_nan, ["stop", "skip"], "if a loss is not finite: stop, or skip the step's update")
    number("seed", default.seed, "seed of the initial parameters and of the batches", 0)
    switch("plain", help="train without dhelix's passes")
    switch("interleave", help="train with interleaved strands (the default)")
    step_flags.define_options(values)
    _define_data(values)
    text("trace", None, "folder for a profiler trace, without CUDA graphs (see `dhelix plan --trace`)")
    text("trace_steps", None, "steps to record, such as 10-12 (default: the last one)")
    text("tensorboard", None, "folder for TensorBoard files (default: none)")
    switch("compare_plain", help="run steps 12 to 21 without passes, and say what the passes gain")
    text("checkpoint_dir", None, "folder for checkpoints (default: none)")
    number("save_every", None, "steps between checkpoints (default: one checkpoint at the end)", 1)
    number("keep", default.keep, "number of checkpoints to keep, the newest", 1)
    switch("resume", help="continue from the newest checkpoint")
    number("resume_step", None, "with --resume: the step to continue from; newer checkpoints are set aside", 1)
    switch("auto_resume", help="the same if there is one, else start: for jobs that a scheduler starts again")
    text("export", None, "new folder for the trained model, as transformers reads it")
    text("generate", None, "text to which the trained model adds some tokens, to look at")
    number("generate_tokens", default.generate_tokens, "with --generate: the most tokens to add", 1)
    real("temperature", default.temperature, "with --generate: 0 takes the likeliest token, 1 draws tokens")
    real("peak_tflops", None, "peak TFLOP/s of one device, for MFU (default: known for common GPUs)")
    switch("json", help="print the results as JSON; progress goes to stderr")
    number("cpu_devices", None, "run on this many CPU devices", 1)
    switch("distributed", help="run as one of several processes; Slurm and Kubernetes need no further flags")
    text("coordinator", None, "with --distributed: host:port of process 0")
    number("num_processes", None, "with --distributed: number of processes", 1)
    number("process_id", None, "with --distributed: number of this process, from 0", 0)


def _define_data(values: flags.FlagValues) -> None:
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    default = Options()
    text("data", None, "text, JSON Lines, tokens (.npy, .bin), or a folder (default: the Python standard library)")
    text("text_field", default.text_field, "field of JSON Lines that holds the text")
    text("tokenizer", None, "tokenizer.json of the library tokenizers, or its folder (default: bytes)")
    text("end_token", None, "token behind each document (default: the tokenizer's end of text)")
    text("token_cache", None, "folder for the tokens of a text (default: ~/.cache/dhelix/tokens)")
    flags.DEFINE_bool(
        "mask_documents",
        None,
        "whether a token attends to its own document alone (default: yes if there are several documents)",
        flag_values=values,
    )
    number("eval_every", None, "steps between evaluations (default: none)")
    text("eval_data", None, "documents to evaluate on, as --data (default: some of --data, --eval_fraction)")
    flags.DEFINE_float(
        "eval_fraction", default.eval_fraction, "part of the documents that is kept for evaluation", flag_values=values
    )
    number("eval_batches", default.eval_batches, "batches of an evaluation")
