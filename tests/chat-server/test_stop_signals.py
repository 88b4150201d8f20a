"""Signals as events: counted, and given back."""

import os
import signal

import pytest

from headrace_chat_server.stop_signals import stop_signals


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
async def test_the_first_and_the_second_signal_are_told_apart(numbers):
    """Whichever of the two signals comes, the first one sets `first` alone and the next one `second`."""
    with stop_signals() as signals:
        os.kill(os.getpid(), numbers[0])
        await signals.first.wait()
        assert not signals.second.is_set()
        os.kill(os.getpid(), numbers[1])
        await signals.second.wait()


async def test_handlers_are_given_back():
    """Outside the block the signals mean what they meant before."""
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) == before
