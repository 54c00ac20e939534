"""C24: rows of one batch accept different numbers of tokens; none leaks into another."""

from __future__ import annotations

from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, drain, make_engine, scripted, speculate

from specdec.core import SamplingParams

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12, 13]]


def test_commits_of_one_step() -> None:
    """Drafts 5 right, 5 wrong, 2 with one right, none, and 5 right in the request's last step."""
    lm = tiny_lm()
    truth = {tuple(prompt): lm.greedy(prompt, 40) for prompt in PROMPTS}

    def script(request_id: int, committed: list[int]) -> list[int]:
        prompt = PROMPTS[request_id]
        done = len(committed) - len(prompt)
        right = truth[tuple(prompt)][done : done + 5]
        wrong = [(token + 1) % lm.target.vocab_size for token in right]
        return [right, wrong, [*right[:1], *wrong[1:2]], [], right][request_id]

    engine = make_engine(lm.target, scripted(script, max_nodes=5))
    lengths = [40, 40, 40, 40, 4]
    numbers = [
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=length))
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    engine.step()
    commits = {output.request_id: len(output.token_ids) for output in engine.step()}
    assert [commits[number] for number in numbers] == [6, 1, 2, 1, 3]
    drain(engine)
    for number, prompt, length in zip(numbers, PROMPTS, lengths, strict=True):
        request = engine.pop_finished(number)
        assert request.output_token_ids == truth[tuple(prompt)][:length]
        drafted_per_step = [5, 5, 2, 0, 2][number]
        assert request.stats.num_drafted <= drafted_per_step * request.stats.num_steps


def test_rows_join_and_leave() -> None:
    lm = tiny_lm()
    prompts = [[(7 * i + j) % 90 for j in range(1 + i % 6)] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=2 + 3 * (i % 9)) for i in range(20)]
    for drafter in ("ngram", "self"):
        engine = make_engine(lm.target, speculate(drafter), max_num_seqs=5)
        requests = complete(engine, prompts, params)
        for prompt, param, request in zip(prompts, params, requests, strict=True):
            assert request.output_token_ids == lm.greedy(prompt, param.max_tokens)
