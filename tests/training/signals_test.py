"""Signals that end a run between two steps."""

import signal

import pytest

from bpd_jax.training.signals import deferred_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_is_noted_and_the_second_acts(number):
    seen = []
    before = signal.signal(number, lambda *_: seen.append("acted"))
    try:
        with deferred_signals() as received:
            signal.raise_signal(number)
            assert received == [number]
            assert seen == []
            signal.raise_signal(number)
        assert seen == ["acted"]
    finally:
        signal.signal(number, before)


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_signals() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)
