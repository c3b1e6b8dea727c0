"""Private names of jax, in the versions with which they have been tested."""

import jax
import jax.numpy as jnp

from bpd_jax.base.jax_private import (
    process_count,
    process_id,
    strip_source_lines,
    trace_context,
)

TESTED = ("0.10", "0.11")


def test_this_version_of_jax_has_been_tested():
    """In a new one, run the tests of hosts and programs, and then add it here."""
    assert jax.__version__.startswith(tuple(f"{version}." for version in TESTED))


def test_one_process_is_the_first():
    assert (process_id(), process_count()) == (0, 1)


def test_what_a_trace_depends_on_is_in_its_context():
    before = trace_context()
    assert before == trace_context()
    with jax.default_matmul_precision("float32"):
        assert trace_context() != before


def test_programs_have_no_source_lines():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    assert __file__ in lowered.as_text(debug_info=True)
    strip_source_lines(lowered)
    assert __file__ not in lowered.as_text(debug_info=True)
