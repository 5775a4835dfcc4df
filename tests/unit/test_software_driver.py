"""How the software driver gets under cuda.bindings: never over another libcuda, and unseen by others under `auto`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ipcsync
from ipcsync import _drivers
from tests.kit.scripts import run

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        ipcsync.driver_name() == "cuda", reason="this machine has a GPU, whose driver the scripts would get"
    ),
]

NO_DEVICE = 100

_OTHERS_USE = """
import ctypes
import ipcsync
from cuda.bindings import driver
assert ipcsync.driver_name() == "host", ipcsync.driver_name()
event = ipcsync.Stream().record_event()
event.synchronize()
theirs = ctypes.CDLL("libcuda.so.1")  # as CUDA's runtime, cupy and Triton open it
find, address = theirs.cuGetProcAddress_v2, ctypes.c_void_p()
assert find(b"cuInit", ctypes.byref(address), 12000, ctypes.c_uint64(0), None) == 0
init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(address.value)
assert [theirs.cuInit(0), init(0), int(driver.cuInit(0)[0])] == [{code}] * 3
ipcsync.Stream().record_event().synchronize()
"""


def test_a_process_that_names_it_shows_it_to_others_too() -> None:
    run(_OTHERS_USE.format(code=0), IPCSYNC_DRIVER="host")


def test_under_auto_no_other_library_finds_a_device() -> None:
    run(_OTHERS_USE.format(code=NO_DEVICE), IPCSYNC_DRIVER="auto", IPCSYNC_WARNED_OF_NO_DRIVER="1")


def test_a_checkout_that_was_not_installed_in_place_says_where_to_run(tmp_path: Path) -> None:
    package = Path(ipcsync.__file__).parent
    shutil.copytree(package, tmp_path / "ipcsync", ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run(
        [sys.executable, "-c", "import ipcsync; ipcsync.Stream()"],
        env={**os.environ, "IPCSYNC_DRIVER": "host"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "start programs outside of the checkout, or install it with pip install -e ." in done.stderr.splitlines()[-1]


_AT_SECOND_TRY = """
import os
import ipcsync
try:
    ipcsync.device_count()
except ipcsync.DriverError as error:
    assert "maybe" in str(error), error
    del os.environ["IPCSYNC_HOST_DEATH"]
""" + _OTHERS_USE.format(code=NO_DEVICE)


def test_under_auto_it_stays_hidden_when_a_second_try_succeeds() -> None:
    run(_AT_SECOND_TRY, IPCSYNC_DRIVER="auto", IPCSYNC_WARNED_OF_NO_DRIVER="1", IPCSYNC_HOST_DEATH="maybe")


_IN_A_RELATIVE_DIRECTORY = """
import os
os.chdir({parent!r})
import ipcsync
from ipcsync.testing import Memory
ipcsync.Stream()
os.chdir("/")
with Memory(64), ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
    assert os.listdir({parent!r} + "/shm")
    with client.event("e", recorder=True, engine="event") as event:
        event.record(ipcsync.Stream()).synchronize(30)
"""


def test_a_relative_directory_is_the_same_after_chdir_here_and_in_children(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    run(_IN_A_RELATIVE_DIRECTORY.format(parent=str(tmp_path)), IPCSYNC_DRIVER="host", IPCSYNC_HOST_DIR="shm")


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    script = f"""
        import ipcsync
        try:
            ipcsync.Stream()
        except ipcsync.DriverError as error:
            assert "{tmp_path}/none, the directory of the shared memory: No such file" in str(error), error
        else:
            raise AssertionError("it is there")
    """
    run(script, IPCSYNC_DRIVER="host", IPCSYNC_HOST_DIR=f"{tmp_path}/none")


_STUB = r"""
int cuInit(unsigned flags) { (void)flags; return 34; }
int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags, int *status) {
  (void)version; (void)flags;
  if (status) *status = 0;
  *out = name[2] == 'I' ? (void *)cuInit : (void *)0;
  return 0;
}
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda without a GPU, as CUDA's toolkit has one to link with."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build a stub with")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "stub.c").write_text(_STUB)
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(folder / "stub.c")]
    subprocess.run(command, check=True)
    return library


_REFUSED = """
import ctypes, sys
if len(sys.argv) > 1:
    ctypes.CDLL(sys.argv[1])
import ipcsync
assert not ipcsync.is_available()
try:
    ipcsync.driver_name()
except ipcsync.NoDriver as error:
    text = str(error)
else:
    raise AssertionError(ipcsync.driver_name())
assert "another libcuda.so.1" in text and {path!r} in text, text
assert ("STUB_LIBRARY" in text) == {probed}, text
"""


@pytest.mark.parametrize(("wanted", "probed"), [("host", False), ("auto", True)])
@pytest.mark.parametrize("how", ["opened", "preloaded"])
def test_it_is_never_loaded_over_another_libcuda(stub: Path, wanted: str, probed: bool, how: str) -> None:
    script = _REFUSED.format(path=str(stub), probed=probed)
    if how == "opened":
        run(f"import sys; sys.argv = ['-c', {str(stub)!r}]\n{script}", IPCSYNC_DRIVER=wanted)
    else:
        run(script, IPCSYNC_DRIVER=wanted, LD_PRELOAD=str(stub))


def test_another_libcuda_that_was_not_loaded_does_not_matter(stub: Path) -> None:
    run(_OTHERS_USE.format(code=0), IPCSYNC_DRIVER="host", LD_LIBRARY_PATH=str(stub.parent))


_PRELOADED = """
import ipcsync
if {wanted!r} != "cuda":
    assert ipcsync.driver_name() == "host"
    ipcsync.Stream().record_event().synchronize()
else:
    try:
        ipcsync.driver_name()
    except ipcsync.NoDriver as error:
        assert "IPCSYNC_DRIVER=host" in str(error), error
    else:
        raise AssertionError
"""


@pytest.mark.parametrize("wanted", ["host", "auto", "cuda"])
def test_where_it_was_preloaded_it_is_the_driver_host_and_no_other(wanted: str) -> None:
    run(_PRELOADED.format(wanted=wanted), IPCSYNC_DRIVER=wanted, LD_PRELOAD=str(_drivers.LIBRARY))


_BAD = """
import ipcsync
try:
    ipcsync.device_count()
except ipcsync.DriverError as error:
    assert {name!r} in str(error) and {value!r} in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("IPCSYNC_HOST_DEVICES", "many"),
        ("IPCSYNC_HOST_DEVICES", "17"),
        ("IPCSYNC_HOST_MEMORY_MB", "-1"),
        ("IPCSYNC_HOST_SEGMENT", "a/b"),
        ("IPCSYNC_HOST_SEGMENT", "a" * 130),
        ("IPCSYNC_HOST_DEATH", "maybe"),
        ("IPCSYNC_HOST_TEARDOWN_MS", "long"),
        ("IPCSYNC_HOST_DRIVER_VERSION", "new"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_its_name(name: str, value: str) -> None:
    run(_BAD.format(name=name, value=value), IPCSYNC_DRIVER="host", **{name: value})


def test_without_a_visible_device_there_is_none() -> None:
    run("import ipcsync\nassert ipcsync.device_count() == 0", IPCSYNC_DRIVER="host", IPCSYNC_HOST_DEVICES="0")


_ASKS_OTHERS = """
import importlib, sys, warnings
import ipcsync
other = importlib.import_module({module!r})
available = lambda: other.is_available()
if {before}:
    assert not available()
assert ipcsync.driver_name() == "host"
ipcsync.Stream().record_event().synchronize()
assert not available()
"""


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("module", ["torch.cuda", "cupy.cuda", "numba.cuda"])
def test_other_libraries_say_that_there_is_no_gpu(module: str, before: bool) -> None:
    pytest.importorskip(module.partition(".")[0], reason=f"{module} is not installed")
    run(_ASKS_OTHERS.format(module=module, before=before), IPCSYNC_DRIVER="auto", IPCSYNC_WARNED_OF_NO_DRIVER="1")
