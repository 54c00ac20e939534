"""Arguments of `specdec eval` for a folder with `target/` and `prompts.jsonl`."""

STUDY = (
    "target=target",
    "target.dtype=float32",
    "data=jsonl",
    "data.path=prompts.jsonl",
    "data.limit=2",
    "logger=none",
    "sampling.max_tokens=6",
    "engine.num_kv_tokens=1024",
    "eval.warmup_tokens=0",
    "eval.resamples=100",
)
