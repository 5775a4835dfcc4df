"""A worker and its consumer survive the restart of the coordinator, by connecting again.

Without ipcsync, the process that exported the events may be restarted itself. What its peers had opened is
undefined from then on, and a wait on it may pass or hang. Here everything of the old coordinator raises
CoordinatorLost, within a second, also in calls that block; nothing of it is ever taken for something of the new one,
since each start has its own epoch. So the rule is: get the client, open, and work in one function; when SessionLost
(CoordinatorLost or SessionExpired) comes out of it, do the step that was not confirmed once more, with a new client. So
too for StalePoint: the peer has not noticed the restart yet.

    python services/recipes/survive_restart.py        (always with a coordinator of its own, which it kills)
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from processes import DEADLINE_S, SPAWN, start

import ipcsync

STEPS = 6
RESTART_AFTER = 3


def survive(step: Callable[[ipcsync.Client], bytes]) -> bytes:
    """What `step(client)` returns; done again with a new client as often as the coordinator is lost, for 60 s."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return step(ipcsync.default_client())  # a new one once its session is lost
        except (ipcsync.SessionLost, ipcsync.StalePoint, ipcsync.ConnectError) as error:  # noqa: PERF203 - once a restart
            if time.monotonic() > deadline:
                raise
            print(f"pid {os.getpid()}: {type(error).__name__}, connecting again", flush=True)


def worker(consumer: Connection) -> None:
    """Do each step that it is asked for, and answer with its point. Doing one twice does no harm."""
    stream = ipcsync.Stream()
    while consumer.recv() is not None:
        consumer.send(survive(lambda client: bytes(client.record(stream))))


def main() -> None:
    """Consume the worker's steps; kill the coordinator amid them, and start another in its place."""
    ours, theirs = SPAWN.Pipe()
    epochs: list[bytes] = []

    def consume(client: ipcsync.Client) -> bytes:
        ours.send("step")
        client.point(ours.recv()).synchronize(30)
        return client.epoch

    with tempfile.TemporaryDirectory() as folder:
        coordinator = ipcsync.launch(runtime_dir=folder, log_level="error")
        os.environ["IPCSYNC_ENDPOINT"] = coordinator.endpoint
        process = start(worker, theirs)
        try:
            while len(epochs) < STEPS:
                epochs.append(survive(consume))
                if len(epochs) == RESTART_AFTER:
                    os.kill(coordinator.pid, signal.SIGKILL)
                    coordinator.stop()
                    coordinator = ipcsync.launch(runtime_dir=folder, log_level="error")
            ours.send(None)
            process.join(DEADLINE_S)
        finally:
            process.kill()
            coordinator.stop()
    print(f"{len(epochs)} steps done in {len(set(epochs))} epochs")
    if len(set(epochs)) != 2:
        raise SystemExit("the coordinator was not restarted")


if __name__ == "__main__":
    main()
