"""When the host driver cannot begin, or has no more of what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.drivers.host_process import PREFIX, HostProcess, own_segment, segment_files

pytestmark = pytest.mark.process

_INVALID_VALUE, _OUT_OF_MEMORY, _NO_DEVICE, _OPERATING_SYSTEM = 1, 2, 100, 304

_FILL = """
def fill(create, destroy, most):
    made = []
    while (result := create())[0] == 0 and len(made) <= most:
        made.append(result[1])
    last = code(result)
    destroy(made.pop(len(made) // 2))
    return last, code(create())
"""


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("IPCSYNC_HOST_DEVICES", "many", _INVALID_VALUE),
        ("IPCSYNC_HOST_DEVICES", "1000000", _INVALID_VALUE),
        ("IPCSYNC_HOST_DEVICES", "0", _NO_DEVICE),
        ("IPCSYNC_HOST_MEMORY_MB", "-1", _INVALID_VALUE),
        ("IPCSYNC_HOST_SEGMENT", "../elsewhere", _INVALID_VALUE),
    ],
)
def test_a_setting_that_means_nothing_is_an_invalid_value(variable: str, value: str, code: int) -> None:
    with own_segment() as segment:
        settings = {"IPCSYNC_HOST_SEGMENT": segment, variable: value}
        with HostProcess(settings.pop("IPCSYNC_HOST_SEGMENT"), initialise=False, **settings) as one:
            assert one.run("code(d.cuInit(0))") == code
            assert one.run("code(d.cuDeviceGetCount())") == 3, "nothing is initialized"
        assert segment_files(segment) == []


def test_flags_of_the_beginning_are_refused_and_a_second_one_changes_nothing() -> None:
    with own_segment() as segment, HostProcess(segment, initialise=False) as one:
        assert one.run("code(d.cuInit(1))") == _INVALID_VALUE
        assert one.run("[code(d.cuInit(0)), code(d.cuInit(0)), d.cuDeviceGetCount()[1]]") == [0, 0, 1]


def test_a_segment_that_is_no_file_of_its_own_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "another's"
    elsewhere.write_text("kept")
    with own_segment() as segment:
        Path(f"/dev/shm/{PREFIX}{segment}").symlink_to(elsewhere)
        with HostProcess(segment, initialise=False) as one:
            assert one.run("code(d.cuInit(0))") == _OPERATING_SYSTEM
    assert elsewhere.read_text() == "kept"


def test_beyond_all_events_and_streams_there_are_no_more_until_one_is_destroyed() -> None:
    with own_segment() as segment, HostProcess(segment) as one:
        one.run(_FILL)
        assert one.run("fill(lambda: d.cuEventCreate(6), d.cuEventDestroy, layout.MAX_EVENTS)") == (_OUT_OF_MEMORY, 0)
        assert one.run("fill(lambda: d.cuStreamCreate(1), d.cuStreamDestroy, layout.MAX_STREAMS)") == (
            _OUT_OF_MEMORY,
            0,
        )


def test_memory_that_the_machine_does_not_have_is_given_back() -> None:
    with own_segment() as segment, HostProcess(segment, IPCSYNC_HOST_MEMORY_MB=str(1 << 40)) as one:
        free = one.run("d.cuMemGetInfo()[1]")
        assert one.run("code(d.cuMemAlloc(1 << 50))") == _OUT_OF_MEMORY
        assert one.run("code(d.cuMemAllocHost(1 << 62))") == _OUT_OF_MEMORY
        assert one.run("d.cuMemGetInfo()[1]") == free
        assert not [name for name in segment_files(segment) if "-mem-" in name]


def test_error_codes_have_names_before_anything_begins() -> None:
    with own_segment() as segment, HostProcess(segment, initialise=False) as one:
        assert one.run("d.cuGetErrorName(d.CUresult.CUDA_ERROR_NOT_READY)[1]") == b"CUDA_ERROR_NOT_READY"
        assert one.run("d.cuGetErrorString(d.CUresult.CUDA_ERROR_NOT_READY)[1]") == b"error not ready"
        assert one.run("[code(ask(123456)) for ask in (d.cuGetErrorName, d.cuGetErrorString)]") == [_INVALID_VALUE] * 2
