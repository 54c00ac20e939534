"""What is read from the coins of a run."""

from __future__ import annotations

import torch

from specdec.core import CounterRng, Stream
from specdec.losslessness.coins import CoinLog, RecordingRng
from specdec.losslessness.streams import stream_check

DECISIONS = frozenset({Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL, Stream.TARGET})
ROWS = torch.arange(200)


def ask(log: CoinLog, position: int, node: int, stream: Stream, rng: type[CounterRng] = CounterRng) -> None:
    recording = RecordingRng(rng(ROWS), log)
    recording.uniform(ROWS, torch.full_like(ROWS, position), torch.full_like(ROWS, node), stream)


class IgnoresStreams(CounterRng):
    def uniform(self, requests, positions, nodes, stream):
        return super().uniform(requests, positions, nodes, Stream.TARGET)


def test_recording_changes_nothing():
    log = CoinLog()
    key = ROWS, torch.full_like(ROWS, 3), torch.zeros_like(ROWS), Stream.ACCEPT
    assert torch.equal(RecordingRng(CounterRng(ROWS), log).uniform(*key), CounterRng(ROWS).uniform(*key))
    assert log.num_coins == 200


def test_a_coin_that_is_asked_for_twice():
    log = CoinLog()
    ask(log, 3, 1, Stream.ACCEPT)
    ask(log, 4, 1, Stream.ACCEPT)
    assert log.repeated(DECISIONS) == []
    ask(log, 3, 1, Stream.ACCEPT)
    assert (0, 3, 1, Stream.ACCEPT) in log.repeated(DECISIONS)
    assert len(log.repeated(DECISIONS)) == 200
    assert log.repeated(frozenset({Stream.TARGET})) == []


def test_streams_that_share_their_coins():
    for rng, independent in ((CounterRng, True), (IgnoresStreams, False)):
        log = CoinLog()
        recording = RecordingRng(rng(ROWS), log)
        for stream in (Stream.DRAFT, Stream.ACCEPT):
            recording.uniform(ROWS, torch.full_like(ROWS, 5), torch.ones_like(ROWS), stream)
        (test,) = log.dependence().values()
        assert (test.p_value > 1e-3) == independent
        assert (log.colliding() == 0) == independent


def test_a_rule_that_is_right(subject):
    result = stream_check(subject("early_exit", "chain", "token", sample=True), 32, 6, threshold=1e-5)
    assert result.status.value == "pass"
    assert result.data["num_coins"] > 100
    assert "DRAFT-ACCEPT" in result.data["p_values"]


def test_the_callers_global_generators_are_left_alone(subject):
    own = subject("early_exit", "chain", "specdec_tests.broken:GlobalCoins", sample=True)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = stream_check(own, 16, 6, threshold=1e-5)
    assert torch.equal(torch.rand(3), expected)
    assert "global random generator" in result.detail
    assert "other tokens" in result.detail
