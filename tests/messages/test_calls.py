from __future__ import annotations

import pickle

import numpy as np

from workbench.batches.location import Pull, ShardId
from workbench.messages.calls import Call, Failure


def failure_of(error: Exception) -> Failure:
    def work() -> None:
        raise error

    try:
        work()
    except Exception as caught:
        return Failure.of(caught)
    raise AssertionError


def test_a_failure_keeps_the_live_exception_and_sends_one_without_frames() -> None:
    kept = failure_of(LookupError("x"))
    assert kept.error is not None
    assert kept.error.__traceback__ is not None
    sent = pickle.loads(pickle.dumps(kept))
    assert (sent.kind, sent.message, repr(sent.error)) == ("LookupError", "x", "LookupError('x')")
    assert "in work" in "\n".join(sent.chain[0].lines({}))
    assert kept.error.__traceback__ is None  # the frames, and the tensors in them, are let go where it was sent from


def test_an_exception_that_does_not_pickle_arrives_as_text() -> None:
    class Local(Exception):
        pass

    kept = failure_of(Local("y"))
    assert isinstance(kept.error, Local)
    sent = pickle.loads(pickle.dumps(kept))
    assert (sent.kind, sent.message, sent.error) == ("Local", "y", None)


def test_a_call_arrives_as_it_was_sent() -> None:
    shard, rows = ShardId("pool-0", "k"), np.array([4, 5, 6, 1])
    pulls = ((("rewards",), (Pull(shard, rows, np.arange(4), "scores"),)), (("values",), (Pull(shard, rows, rows),)))
    call = Call(run=1, stage="s", role="actor", method="m", pulls=pulls, rows=rows, sample=rows - 1)
    sent: Call = pickle.loads(pickle.dumps(call))
    for (names, mine), (others, theirs) in zip(call.pulls, sent.pulls, strict=True):
        assert names == others
        for one, two in zip(mine, theirs, strict=True):
            assert (one.shard, one.name) == (two.shard, two.name)
            assert np.array_equal(one.positions, two.positions)
            assert np.array_equal(one.destinations, two.destinations)
    assert sent.rows is not None
    assert sent.sample is not None
    assert np.array_equal(sent.rows, rows)
    assert np.array_equal(sent.sample, rows - 1)
