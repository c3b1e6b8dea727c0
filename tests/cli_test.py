import pytest

from bpd_jax.cli import rewrite_gin_arguments
from bpd_jax.errors import UserError


def test_gin_arguments_become_bindings():
    assert rewrite_gin_arguments(["p", "--gin.A.b='x=y'", "--workdir=w"]) == [
        "p",
        "--gin_bindings=A.b = 'x=y'",
        "--workdir=w",
    ]


@pytest.mark.parametrize("argument", ["--gin.A", "--gin.A=", "--gin.=3"])
def test_gin_arguments_without_a_value_are_refused(argument):
    with pytest.raises(UserError, match="has no value"):
        rewrite_gin_arguments(["p", argument])
