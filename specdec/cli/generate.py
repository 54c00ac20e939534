"""`specdec generate`: one completion in the terminal, each token coloured by where it came from."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from specdec.cli.compose import compose_study
from specdec.engine.detokenizer import IncrementalDetokenizer
from specdec.engine.llm import LLM
from specdec.engine.request import Request, TokenOrigin
from specdec.evaluation.config import StudyConfig

_COLOURS = {
    TokenOrigin.ACCEPTED: "\033[32m",
    TokenOrigin.CORRECTION: "\033[33m",
    TokenOrigin.BONUS: "\033[36m",
}
_RESET = "\033[0m"

USAGE = """usage: specdec generate PROMPT [group=choice ...] [key=value ...]

Streams a completion; PROMPT "-" reads standard input. Overrides are those of `specdec eval`:
  specdec generate "def fib(n):" drafter=ngram sampling.max_tokens=64
On a terminal, tokens are green if they were drafted and accepted, yellow if they correct a rejected draft,
cyan if they follow a fully accepted path."""


def main(arguments: list[str]) -> int:
    """Runs `specdec generate` with these arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    prompt, *overrides = arguments
    if prompt == "-":
        prompt = sys.stdin.read()
    config = compose_study(overrides, defaults=["logger=none"])
    if not sys.stderr.isatty():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    from specdec.evaluation.study import load

    target, tokenizer = load(config)
    llm = LLM(target, tokenizer=tokenizer, speculative=config.speculative, engine=config.engine)
    _stream(llm, prompt, config, sys.stdout)
    return 0


def _stream(llm: LLM, prompt: str, config: StudyConfig, out: TextIO) -> None:
    """Prints the prompt, then the completion as it comes, then the numbers."""
    colour = out.isatty()
    detokenizer = IncrementalDetokenizer(llm.tokenizer)
    request_id = llm.add_request(prompt, config.sampling)
    request = llm.engine.request(request_id)
    out.write(prompt)
    start = time.perf_counter()
    try:
        while not request.is_finished:
            for step in llm.step():
                for token, origin in zip(step.token_ids, step.origins, strict=True):
                    text = detokenizer.add([token])
                    code = _COLOURS.get(origin) if colour else None
                    out.write(f"{code}{text}{_RESET}" if code and text else text)
                out.flush()
        out.write(detokenizer.add([], final=True))
    finally:
        llm.abort(request_id)
        out.write("\n")
        # On standard error: standard output holds the text alone.
        print(_summary(request, time.perf_counter() - start, colour), file=sys.stderr)
    if request.error is not None:
        raise ValueError(request.error)


def _summary(request: Request, seconds: float, colour: bool) -> str:
    stats, count = request.stats, request.num_output_tokens
    parts = [f"{count} tokens", f"{count / seconds:.1f} tok/s"]
    if stats.acceptance_length is not None:
        parts.append(f"τ {stats.acceptance_length:.2f}")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.num_drafted} drafted tokens accepted")
    if request.finish_reason is not None:
        parts.append(f"finished: {request.finish_reason.value}")
    line = ", ".join(parts)
    if not colour:
        return line
    legend = "  ".join(f"{code}{origin.value}{_RESET}" for origin, code in _COLOURS.items())
    return f"{line}\n{legend}"
