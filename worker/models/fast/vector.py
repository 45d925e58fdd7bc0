"""Vectors of 16 floats as a numba type, and short words for the LLVM instructions of kernels that numba cannot say.

Kernels see memory as addresses. Vectors are 16 wide on every processor: with AVX2, LLVM makes two of 8 of each.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from tokenmill.worker.models.fast.kernel import intrinsic
from tokenmill.worker.models.fast.layout import LANES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class Emitter:
    """Writes instructions on whole vectors; addresses are 64-bit integers, offsets are in bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def address(self, base: ir.Value, offset: int) -> ir.Value:
        return self.builder.add(base, I64(offset)) if offset else base

    def load(self, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        value = self.builder.load(self.builder.inttoptr(self.address(address, offset), kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        place = self.builder.inttoptr(self.address(address, offset), value.type.as_pointer())
        self.builder.store(value, place).align = 1

    def load_half(self, address: ir.Value, lanes: int = LANES, offset: int = 0) -> ir.Value:
        """Floats from memory that holds float16."""
        return self.builder.fpext(self.load(address, ir.VectorType(F16, lanes), offset), ir.VectorType(F32, lanes))

    def splat(self, value: ir.Value, lanes: int = LANES) -> ir.Value:
        kind = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        order = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), order)

    def constant(self, value: float, kind: ir.Type = F32, lanes: int = LANES) -> ir.Value:
        return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, (a, b, c))

    def call(self, name: str, kind: ir.Type, arguments: Sequence[ir.Value], fastmath: tuple[str, ...] = ()) -> ir.Value:
        function_type = ir.FunctionType(kind, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments, fastmath=fastmath)

    def variables(self, kind: ir.Type, *counts: int) -> Any:
        """Nested lists of variables, which LLVM keeps in registers."""
        if not counts:
            return cgutils.alloca_once(self.builder, kind)
        return [self.variables(kind, *counts[1:]) for _ in range(counts[0])]

    def add_fma(self, a: ir.Value, b: ir.Value, variable: ir.Value) -> None:
        """variable += a · b"""
        self.builder.store(self.fma(a, b, self.builder.load(variable)), variable)

    @contextmanager
    def loop(self, count: ir.Value) -> Iterator[ir.Value]:
        with cgutils.for_range(self.builder, count) as turn:
            yield turn.index

    def prefetch(self, address: ir.Value) -> None:
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), (pointer, I32(0), I32(3), I32(1)))


class Vector(types.Type):
    """The numba type of 16 floats."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


vector = Vector()
F32X16, I32X16, I8X16 = (ir.VectorType(kind, LANES) for kind in (F32, I32, I8))


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, F32X16)


def _define_operator(function: Any, instruction: str) -> None:
    @infer_global(function)
    class Typing(ConcreteTemplate):
        cases = [signature(vector, vector, vector)]  # noqa: RUF012

    @lower_builtin(function, vector, vector)  # type: ignore[untyped-decorator]
    def lower(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return getattr(builder, instruction)(*arguments)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


@intrinsic
def load(context, address):
    """16 floats at an address."""

    def generate(context, builder, signature, arguments):
        return Emitter(builder).load(arguments[0], F32X16)

    return vector(types.intp), generate


@intrinsic
def store(context, address, values):
    """Write 16 floats to an address."""

    def generate(context, builder, signature, arguments):
        Emitter(builder).store(arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic
def splat(context, value):
    """16 times one float."""

    def generate(context, builder, signature, arguments):
        return Emitter(builder).splat(arguments[0])

    return vector(types.float32), generate


@intrinsic
def fma(context, a, b, c):
    """a · b + c, rounded once."""

    def generate(context, builder, signature, arguments):
        return Emitter(builder).fma(*arguments)

    return vector(vector, vector, vector), generate


@intrinsic
def larger(context, a, b):
    """The larger float of each lane."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return vector(vector, vector), generate


@intrinsic
def absolute(context, a):
    """The absolute value of each lane."""

    def generate(context, builder, signature, arguments):
        return Emitter(builder).call("llvm.fabs.v16f32", F32X16, arguments)

    return vector(vector), generate


@intrinsic
def swap_pairs(context, a):
    """Lanes 1, 0, 3, 2, …"""

    def generate(context, builder, signature, arguments):
        order = ir.Constant(I32X16, [lane ^ 1 for lane in range(LANES)])
        return builder.shuffle_vector(arguments[0], ir.Constant(F32X16, ir.Undefined), order)

    return vector(vector), generate


@intrinsic
def sum_of(context, a):
    """The sum over the lanes."""

    def generate(context, builder, signature, arguments):
        arguments = (F32(0.0), *arguments)
        return Emitter(builder).call("llvm.vector.reduce.fadd.v16f32", F32, arguments, ("reassoc",))

    return types.float32(vector), generate


@intrinsic
def largest_of(context, a):
    """The maximum over the lanes."""

    def generate(context, builder, signature, arguments):
        return Emitter(builder).call("llvm.vector.reduce.fmax.v16f32", F32, arguments, ("nnan", "nsz"))

    return types.float32(vector), generate


@intrinsic
def exp(context, a):
    """e to the power of each lane, to 2 units in the last place or so; exactly 0 below -87, infinite nowhere."""

    def generate(context, builder, signature, arguments):
        return emit_exp(Emitter(builder), arguments[0])

    return vector(vector), generate


def emit_exp(emit: Emitter, x: ir.Value) -> ir.Value:
    """2^n · 2^r with whole n and |r| ≤ 1/2: the first by the bits of the exponent, the second by a polynomial."""
    b, constant = emit.builder, emit.constant
    too_small = b.fcmp_ordered("<", x, constant(-87.0))
    x = b.select(too_small, constant(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, constant(88.0)), constant(88.0), x)
    power = b.fmul(x, constant(1.4426950408889634))
    whole = emit.call("llvm.rint.v16f32", F32X16, [power])
    rest = b.fsub(power, whole)
    result = constant(1.8775767e-3)
    for coefficient in (8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1):
        result = emit.fma(result, rest, constant(coefficient))
    exponent = b.shl(b.fptosi(whole, I32X16), emit.constant(23, I32))
    result = b.bitcast(b.add(b.bitcast(result, I32X16), exponent), F32X16)
    return b.select(too_small, constant(0.0), result)


@intrinsic
def store_codes(context, address, values):
    """Round 16 floats to int8, write them to an address, and return their sum."""

    def generate(context, builder, signature, arguments):
        emit = Emitter(builder)
        codes = builder.fptosi(emit.call("llvm.rint.v16f32", F32X16, [arguments[1]]), I32X16)
        emit.store(builder.trunc(codes, I8X16), arguments[0])
        return emit.call("llvm.vector.reduce.add.v16i32", I32, [codes])

    return types.int32(types.intp, vector), generate


def _define_scalar(kind: Any, llvm_kind: ir.Type) -> tuple[Any, Any]:
    """A load and a store for one scalar type."""

    @intrinsic
    def load_scalar(context, address):
        def generate(context, builder, signature, arguments):
            return Emitter(builder).load(arguments[0], llvm_kind)

        return kind(types.intp), generate

    @intrinsic
    def store_scalar(context, address, value):
        def generate(context, builder, signature, arguments):
            value = context.cast(builder, arguments[1], signature.args[1], kind)
            Emitter(builder).store(value, arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, value), generate

    return load_scalar, store_scalar


load_f32, store_f32 = _define_scalar(types.float32, F32)
load_i32, store_i32 = _define_scalar(types.int32, I32)
load_i64, store_i64 = _define_scalar(types.int64, I64)
load_u8, _ = _define_scalar(types.uint8, I8)
load_i8, _ = _define_scalar(types.int8, I8)


@intrinsic
def load_f16(context, address):
    """A float from memory that holds a float16."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(Emitter(builder).load(arguments[0], F16), F32)

    return types.float32(types.intp), generate


@intrinsic
def store_f16(context, address, value):
    """Write a float as float16."""

    def generate(context, builder, signature, arguments):
        Emitter(builder).store(builder.fptrunc(arguments[1], F16), arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@intrinsic
def store_halves(context, address, values):
    """Write 16 floats as float16."""

    def generate(context, builder, signature, arguments):
        Emitter(builder).store(builder.fptrunc(arguments[1], ir.VectorType(F16, LANES)), arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate
