"""The host driver's functions are called as the binding's are, and refuse what comes before cuInit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from cuda.bindings import driver as binding

from ipcsync._drivers import host
from tests.unit.drivers.host_process import HostProcess, own_segment

pytestmark = pytest.mark.process

FUNCTIONS = sorted(name for name in host.__all__ if name.startswith("cu") and name[2].isupper())
BEFORE_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_the_bindings(name: str) -> None:
    # Functions that the installed binding does not have yet, or no more, cannot be compared.
    theirs = getattr(binding, name, None)
    if theirs is None:
        pytest.skip(f"cuda-bindings has no {name}")
    assert parameters(getattr(host, name)) == parameters(theirs)


def test_every_exported_name_exists_and_is_the_bindings_class_or_a_function() -> None:
    for name in host.__all__:
        if name not in FUNCTIONS and name != "wait_event":
            assert getattr(host, name) is getattr(binding, name)


def test_before_cuinit_every_call_is_refused() -> None:
    with own_segment() as segment, HostProcess(segment, initialise=False) as process:
        calls = {name: len(parameters(getattr(host, name))) for name in FUNCTIONS if name not in BEFORE_INIT}
        codes = process.run(f"{{name: code(getattr(d, name)(*[0] * n)) for name, n in {calls!r}.items()}}")
        assert set(codes.values()) == {int(binding.CUresult.CUDA_ERROR_NOT_INITIALIZED)}
        assert process.run("d.cuDriverGetVersion() == (0, 13000)")


def test_in_a_forked_child_every_call_is_refused_and_the_parent_does_not_notice() -> None:
    with own_segment() as segment, HostProcess(segment) as process:
        calls = {name: len(parameters(getattr(host, name))) for name in FUNCTIONS if name[:9] != "cuGetErro"}
        process.run("stream = d.cuStreamCreate(1)[1]; event, data = exported()")
        process.run("read, write = os.pipe()")
        status = process.run(
            f"calls = {calls!r}\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    codes = {code(getattr(d, name)(*[0] * n)) for name, n in calls.items()}\n"
            "    os.write(write, repr(sorted(codes)).encode())\n"
            "    sys.exit(0)  # runs what is registered for the exit\n"
            "os.waitpid(child, 0)[1]"
        )
        assert status == 0
        assert process.run("os.read(read, 1000)") == b"[3]"
        assert process.run("[code(d.cuEventRecord(event, stream)), code(d.cuEventQuery(event))]") == [0, 0]
        with HostProcess(segment) as other:
            assert other.run(f"code(d.cuEventQuery(opened({process.run('data')!r})))") == 0


def test_after_the_exit_handlers_calls_are_refused() -> None:
    with own_segment() as segment, HostProcess(segment) as process:
        process.run("from ipcsync._drivers.host import init\ninit._leave()")
        assert process.run("[code(d.cuDeviceGetCount()), code(d.cuInit(0))]") == [4, 4]
        assert process.finish() == 0
