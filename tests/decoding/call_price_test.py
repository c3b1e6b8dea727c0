"""The price of a call with drafts: measured once, kept, given to the method."""

import pytest

from bpd_jax.base import compiled
from bpd_jax.decoding import call_price
from bpd_jax.decoding.call_price import with_measured_price
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from tests.decoding.random_models import make_model, make_prompts

OPTIONS = DecodeOptions(max_new_tokens=24, batch_size=2)
PROMPTS = make_prompts([5, 3, 9])
METHOD = parse_method("heads/tree:6:price=1.75")


@pytest.fixture
def decoder():
    return Decoder(make_model(0), width=4)


@pytest.fixture
def seconds(monkeypatch):
    """Calls with drafts take 3 s, others 2; the kinds of calls are recorded."""
    made, original = [], call_price._seconds

    def recorded(task, prompts):
        assert original(task, prompts) > 0
        made.append(task.drafter.price)
        return 3.0 if task.drafter.price == 1 else 2.03

    monkeypatch.setattr(call_price, "_seconds", recorded)
    monkeypatch.setattr(call_price, "_prices", {})
    return made


def test_a_price_is_measured_once_and_kept(
    decoder, seconds, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        compiled, "_kept_file", lambda kind, key: tmp_path / f"{kind}-{key[0].hex()}"
    )
    priced = with_measured_price(decoder, METHOD, PROMPTS, OPTIONS)
    assert priced.name == "heads/tree:6:price=1.5"
    assert set(seconds) == {1.0, call_price._NEVER}
    assert "takes 1.50 times as long" in capsys.readouterr().err
    # Neither another call nor another process measures it again.
    seconds.clear()
    for _ in range(2):
        assert with_measured_price(decoder, METHOD, PROMPTS, OPTIONS) == priced
        call_price._prices.clear()
    assert not seconds
    assert not capsys.readouterr().err
    # More rows have another price.
    with_measured_price(decoder, METHOD, PROMPTS[:1], OPTIONS)
    assert seconds


def test_a_method_without_a_price_is_unchanged(decoder, seconds):
    for text in ("heads/tree:6", "bpd", "greedy"):
        method = parse_method(text)
        assert with_measured_price(decoder, method, PROMPTS, OPTIONS) == method
    assert not seconds


def test_texts_that_end_at_once_measure_nothing(decoder, monkeypatch):
    monkeypatch.setattr(call_price, "_prices", {})
    options = DecodeOptions(max_new_tokens=1, batch_size=2)
    assert with_measured_price(decoder, METHOD, PROMPTS, options) == METHOD


def test_programs_do_not_depend_on_the_price(decoder):
    one, other = (
        decoder.drafter(parse_method(f"heads/tree:6:price={price}"))
        for price in (1.5, 2)
    )
    assert one == other
    assert one.price != other.price
