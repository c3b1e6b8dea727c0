import jax
import jax.numpy as jnp

from bpd_jax.compilation.hlo import ArrayShape, parse

PROGRAM = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[]{:T(128)}, /*index=1*/bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %one = s32[]{:T(128)} constant(2)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=1
  %next = s32[]{:T(128)} add(%i, %one), metadata={op_name="jit(f)/while/add"}
  ROOT %out = (s32[]{:T(128)}, bf16[4,8]{1,0}) tuple(%next, %x)
}

%test (q: (s32[], bf16[4,8])) -> pred[] {
  %q = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(7)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (a: bf16[4,8]) -> (s32[], bf16[4,8]) {
  %a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %kernel = bf16[4,8]{1,0} custom-call(%a), frontend_attributes={metadata={
"sizes": "8"
}}, backend_config={"body":"TUzv"}
  %carried = (s32[]{:T(128)}, bf16[4,8]{1,0}) tuple(%start, %kernel)
  ROOT %loop = (s32[], bf16[4,8]{1,0}) while(%carried), condition=%test, body=%body
}
"""


def test_program_is_parsed():
    module = parse(PROGRAM)
    assert module.entry == "main"
    assert list(module.computations) == ["body", "test", "main"]
    main, body = module.computations["main"], module.computations["body"]
    assert main.root.name == "loop"
    assert main.root.called == ("body",)
    assert [x.name for x in main.operands(main.root)] == ["carried"]
    in_fast_memory = body.instructions["x"].shapes
    assert in_fast_memory == (ArrayShape("bf16", (4, 8), 1),)
    assert in_fast_memory[0].nbytes == 64
    assert body.instructions["x"].nbytes == 0
    assert body.instructions["i"].nbytes == 4
    assert [x.name for x in body.users["p"]] == ["i", "x"]
    assert 'body":"TUzv' in main.instructions["kernel"].attributes


def test_trip_count_follows_from_the_loop_condition():
    """0, 2, 4 and 6 are below 7."""
    module = parse(PROGRAM)
    main = module.computations["main"]
    assert module.trips(main, main.root) == 4
    open_ended = parse(PROGRAM.replace("s32[]{:T(128)} copy(%zero)", "s32[] call()"))
    main = open_ended.computations["main"]
    assert open_ended.trips(main, main.root) is None


def test_annotated_trip_counts_are_read():
    def f(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)[0]

    module = parse(jax.jit(f).lower(jnp.ones(3)).compile().as_text())
    loops = [
        module.trips(computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
    ]
    assert loops == [5]
