import pytest

from bpd_jax.compilation.collectives import device_groups
from bpd_jax.compilation.hlo import parse


@pytest.mark.parametrize(
    "written, groups",
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            ((0, 2), (1, 3)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}",
            ((3, 2), (1, 0)),
        ),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", ((0, 2), (1, 3))),
    ],
)
def test_groups_of_devices(written, groups):
    text = f"""\
ENTRY %main (a: f32[1]) -> f32[2] {{
  %a = f32[1]{{0}} parameter(0)
  ROOT %g = f32[2]{{0}} all-gather(%a), {written}, dimensions={{0}}
}}
"""
    assert device_groups(parse(text).computations["main"].root, 4) == groups
