"""The hot path's calls by `cuda.bindings._v2`: when a process has them, and that they do what the others do."""

from __future__ import annotations

import importlib.util

import pytest

import ipcsync
from tests.kit.scripts import run

pytestmark = pytest.mark.process

NUMPY, V2 = (bool(importlib.util.find_spec(name)) for name in ("numpy", "cuda.bindings._v2"))
needs_v2 = pytest.mark.skipif(not (NUMPY and V2), reason="needs NumPy, and cuda-bindings 13.5 or later")
needs_cuda = pytest.mark.skipif(ipcsync.driver_name() != "cuda", reason="only the cuda driver has a binding")

# --- when a process has them ------------------------------------------------------------------------------------------

_CHOICE = """
from ipcsync._drivers import cuda
from cuda.bindings import driver
chosen = {call: getattr(cuda, call) is not getattr(driver, call) for call in (
    "cuEventRecord", "cuStreamWaitEvent", "cuStreamWriteValue64", "cuStreamWaitValue64", "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode", "cuEventCreate", "CUstream", "CUevent",
)}
assert cuda.cuEventQuery is driver.cuEventQuery  # an exception for "not ready" would cost more
"""


@needs_v2
def test_a_process_that_has_numpy_has_them() -> None:
    run(f"import numpy\n{_CHOICE}\nassert all(chosen.values()), chosen")


def test_a_process_that_has_no_numpy_does_not_get_it_for_them() -> None:
    run(f"import sys\n{_CHOICE}\nassert not any(chosen.values()), chosen\nassert 'numpy' not in sys.modules")


@pytest.mark.skipif(not NUMPY, reason="needs NumPy")
def test_an_older_binding_has_all_the_old_calls() -> None:
    hidden = "import sys, numpy\nsys.modules['cuda.bindings._v2'] = None"
    run(f"{hidden}\n{_CHOICE}\nassert not any(chosen.values()), chosen")


@needs_v2
@pytest.mark.parametrize("name", ["DriverError", "event_record", "stream_wait_value64_v2"])
def test_a_binding_that_lacks_one_of_them_has_all_the_old_calls(name: str) -> None:
    lacking = f"import numpy\nfrom cuda.bindings._v2 import driver as v2\ndel v2.{name}"
    run(f"{lacking}\n{_CHOICE}\nassert not any(chosen.values()), chosen")


# --- what they do -----------------------------------------------------------------------------------------------------

_EACH = """
import numpy
from cuda.bindings import driver as old
from ipcsync._drivers import cuda as new, cuda_v2, unwrap
from ipcsync.errors import DriverError
assert new.cuEventRecord is cuda_v2.cuEventRecord
NOBODYS = 4096, 2**64 - 1  # a GPU's driver reads what lies there
new.probe()
context = new.cuDevicePrimaryCtxRetain(new.cuDeviceGet(0)[1])[1]
is_software = b"softcuda" in new.cuDeviceGetName(256, new.cuDeviceGet(0)[1])[1]

def result(driver, call, *args):
    code = getattr(driver, call)(*args)
    try:
        unwrap(code, call)
    except DriverError as error:
        return code, error.code, error.name, error.call, str(error)
    return code

def results(driver):
    driver.cuCtxSetCurrent(context)
    stream, event = driver.cuStreamCreate(0)[1], driver.cuEventCreate(2)[1]
    cell = driver.cuMemHostGetDevicePointer(driver.cuMemHostAlloc(8, 2)[1], 0)[1]
    calls = [
        ("cuEventRecord", event, stream),
        ("cuEventRecord", int(event), int(stream)),
        ("cuEventRecord", old.CUevent(int(event)), old.CUstream(int(stream))),
        ("cuEventRecord", event, None),
        ("cuEventRecord", None, stream),
        ("cuEventRecord", NOBODYS[0], stream),
        ("cuEventRecord", event, NOBODYS[1]),
        ("cuStreamWaitEvent", stream, event, 0),
        ("cuStreamWaitEvent", stream, event, 7),
        ("cuStreamWaitEvent", stream, old.CUevent(int(event)), 0),
        ("cuStreamWaitEvent", stream, None, 0),
        ("cuStreamWriteValue64", stream, int(cell), 2**63 + 5, 0),
        ("cuStreamWriteValue64", stream, cell, old.cuuint64_t(6), 0),
        ("cuStreamWriteValue64", stream, 8, 1, 0),
        ("cuStreamWaitValue64", stream, int(cell), 6, 0),
        ("cuStreamWaitValue64", stream, cell, 6, old.CUstreamWaitValue_flags(0)),
        ("cuStreamWaitValue64", stream, 8, 1, 0),
        ("cuStreamSynchronize", stream),
        ("cuStreamIsCapturing", stream),
        ("cuStreamIsCapturing", old.CUstream(int(stream))),
        ("cuStreamIsCapturing", None),
        ("cuStreamIsCapturing", NOBODYS[0]),
        ("cuStreamBeginCapture", stream, old.CUstreamCaptureMode(0)),
        ("cuStreamIsCapturing", stream),
        ("cuStreamIsCapturing", 1),  # the legacy stream: the answer is an error meanwhile
        ("cuStreamQuery", 1),  # invalidates the capture
        ("cuStreamIsCapturing", stream),
        ("cuStreamEndCapture", stream),
        ("cuThreadExchangeStreamCaptureMode", old.CUstreamCaptureMode(2)),
        ("cuThreadExchangeStreamCaptureMode", old.CUstreamCaptureMode(1)),
        ("cuThreadExchangeStreamCaptureMode", old.CUstreamCaptureMode(0)),
        ("cuEventCreate", 4),
        ("cuStreamCreateWithPriority", 77, 0),
        ("cuIpcOpenEventHandle", old.CUipcEventHandle()),
        ("cuCtxSetCurrent", None),
        ("cuStreamIsCapturing", 0),
        ("cuEventRecord", event, 0),
        ("cuEventCreate", 2),
    ]
    if not is_software:
        calls = [call for call in calls if not any(arg in NOBODYS for arg in call[1:])]
    return [(call[0], result(driver, *call)) for call in calls]

theirs, ours = results(old), results(new)
for one, other in zip(theirs, ours, strict=True):
    assert one == other, (one, other)
    assert [type(value) for value in one[1]] == [type(value) for value in other[1]], (one, other)
assert len({str(each) for each in ours}) > 15  # they do not all say the same
"""


@pytest.mark.driver
@needs_v2
@needs_cuda
def test_they_return_what_the_old_calls_return() -> None:
    run(_EACH)


_USED = """
import sys
numpy = {numpy} and __import__("numpy")
import ipcsync
from ipcsync import _drivers
from ipcsync.testing import StreamGate

made = []
driver = _drivers.load()
assert (driver.cuEventRecord.__module__ == "ipcsync._drivers.cuda_v2") == bool(numpy)
if numpy:
    from ipcsync._drivers import cuda_v2
    class NoOldCalls:
        def __getattr__(self, name):
            raise AssertionError(f"{{name}}: a handle of another class came")
    made_by = cuda_v2._bindings
    cuda_v2._bindings = NoOldCalls()
    for name in ("cuEventCreate", "cuIpcOpenEventHandle", "cuStreamCreate", "cuStreamCreateWithPriority", "CUresult"):
        setattr(cuda_v2._bindings, name, getattr(made_by, name))

class Foreign:
    def __init__(self, stream):
        self.address = stream.cuda_stream
    def __cuda_stream__(self):
        return 0, self.address

stream, other, held = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream()
streams = [stream, Foreign(other), other.cuda_stream, ipcsync.ExternalStream(other.cuda_stream), None]
event = ipcsync.Event(interprocess=True)
with ipcsync.launch() as coordinator, ipcsync.connect(coordinator.endpoint) as client:
    for engine in ("event", "timeline"):
        with StreamGate(held) as gate:
            shared = client.event(engine, recorder=True, engine=engine, depth=16)
            first = shared.record(held)
            for each in streams:
                first.wait(each)
                assert not first.query()
            gate.open()
            first.synchronize(30)
        for each in streams:
            event.record(each)
            event.wait(each)
            shared.record(each).synchronize(30)
    is_software = "softcuda" in ipcsync.get_device_properties(0).name  # a GPU's driver reads what lies at an address
    for bad in [ipcsync.ExternalStream(4096, device=0), 2**63 - 4096] if is_software else []:
        for use, call in ((event.record, "cuEventRecord"), (event.wait, "cuStreamWaitEvent")):
            try:
                use(bad)
            except ipcsync.DriverError as error:
                if bad.__class__ is int:  # its device is asked for first
                    call = "cuStreamIsCapturing"
                assert (error.code, error.name, error.call) == (400, "CUDA_ERROR_INVALID_HANDLE", call), error
            else:
                raise AssertionError(call)
        try:
            shared.record(bad)
        except ipcsync.DriverError as error:
            assert (error.code, error.call) == (400, "cuStreamIsCapturing"), error
        else:
            raise AssertionError("record")
"""


@pytest.mark.driver
@needs_cuda
@pytest.mark.parametrize("core", ["0", "auto"])
@pytest.mark.parametrize("numpy", [pytest.param(True, marks=needs_v2), False], ids=["_v2", "old"])
def test_records_and_waits_of_any_stream_take_none_of_the_old_calls(numpy: bool, core: str) -> None:
    run(_USED.format(numpy=numpy), IPCSYNC_COMPILED=core)


_AGAIN = """
import numpy, ipcsync
from ipcsync._drivers import load
driver = load()
# A stream may have the address of one that is gone: an address that a user kept must be asked for anew.
assert driver.CUstream(2**40) is not driver.CUstream(driver.CUstream(2**40))
address = 2**40
assert driver.CUstream(address) is not address
"""


@pytest.mark.driver
@needs_v2
@needs_cuda
def test_each_handle_is_an_object_of_its_own() -> None:
    run(_AGAIN)
