"""Signals that end a run between two steps."""

import signal

import pytest

from bpd_jax.training.signals import deferred_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_first_signal_is_deferred_and_second_is_handled(number):
    calls = []
    handler = signal.signal(number, lambda *_: calls.append("acted"))
    try:
        with deferred_signals() as received:
            signal.raise_signal(number)
            assert received == [number]
            assert calls == []
            signal.raise_signal(number)
        assert calls == ["acted"]
    finally:
        signal.signal(number, handler)


def test_ignored_hangup_stays_ignored():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_signals() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, handler)
