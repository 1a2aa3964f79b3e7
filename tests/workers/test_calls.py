from __future__ import annotations

import pickle

from workbench.workers.calls import Failure


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
    assert "in work" in sent.traceback
    assert kept.error.__traceback__ is None  # the frames, and the tensors in them, are let go where it was sent from


def test_an_exception_that_does_not_pickle_arrives_as_text() -> None:
    class Local(Exception):
        pass

    kept = failure_of(Local("y"))
    assert isinstance(kept.error, Local)
    sent = pickle.loads(pickle.dumps(kept))
    assert (sent.kind, sent.message, sent.error) == ("Local", "y", None)
