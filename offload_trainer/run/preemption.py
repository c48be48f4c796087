"""Stop a run when a warning says that its machine will be taken away (spot and preemptible instances).

    train.stop_on=[/run/evicted, aws, gcp] ── a thread in each node's first rank ── warning ──> SIGTERM to the run

SIGTERM then does what it always does (signals.py), within `train.stop_within`. It goes to the launcher of the ranks, or
to this process (`launcher.stop_target`). A file warns by existing. `aws` and `gcp` ask the machine's metadata service,
whose address can be changed with the variables that botocore and google-auth read: AWS_EC2_METADATA_SERVICE_ENDPOINT
and GCE_METADATA_HOST.
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from offload_trainer.run.launcher import stop_target

_EVERY = 2.0  # seconds between polls; AWS recommends 5 and warns 120 s ahead, GCP warns 30 s ahead
_TIMEOUT = 1.0  # seconds for an answer of a service on the same host
_MOST = 4096  # bytes of an answer that are read
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata never goes through a proxy


@contextmanager
def stopping_on_warnings(sources: Sequence[str], *, say: Callable[[str], None]) -> Iterator[None]:
    """Within this context, send SIGTERM to this run at the first warning of one of `sources`.

    Each source is `aws`, `gcp` or the path of a file. `say` is called in a thread: with the warning, and once for each
    service that does not answer, since its warnings cannot be seen.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(sources, over, say), name="warnings", daemon=True)
    if sources:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if sources:
            thread.join(len(sources) * 3 * _TIMEOUT)


def _watch(sources: Sequence[str], over: threading.Event, say: Callable[[str], None]) -> None:
    silent = set[str]()
    while True:
        for source in sources:
            try:
                warning = _SERVICES[source]() if source in _SERVICES else _file(Path(source))
            except (OSError, HTTPException, ValueError) as error:  # also of a malformed answer or address
                if source not in silent:
                    say(f"note: train.stop_on: {source} does not answer ({error}), so its warnings cannot be seen")
                silent.add(source)
                continue
            silent.discard(source)
            if warning is not None:
                say(f"warning of {source}: {warning}")
                with suppress(ProcessLookupError):  # a launcher that is gone; the ranks then end too
                    os.kill(stop_target(), signal.SIGTERM)
                return
        if over.wait(_EVERY):
            return


def _file(path: Path) -> str | None:
    return "the file exists" if os.path.lexists(path) else None


def _aws() -> str | None:
    """Return the instance action that EC2 has announced, such as `terminate` with its time, or None."""
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = _answer(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    headers = {"X-aws-ec2-metadata-token": token}
    try:
        return _answer(f"{base}/latest/meta-data/spot/instance-action", headers)
    except urllib.error.HTTPError as error:
        if error.code == 404:  # nothing is announced
            return None
        raise


def _gcp() -> str | None:
    """Return that Compute Engine preempts this instance, or None."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/preempted"
    preempted = _answer(url, {"Metadata-Flavor": "Google"}) == "TRUE"
    return "this instance is being preempted" if preempted else None


_SERVICES = {"aws": _aws, "gcp": _gcp}


def _answer(url: str, headers: dict[str, str], *, method: str = "GET") -> str:
    """Return a short answer of a metadata service as one line.

    Raises OSError without one, HTTPException if it is malformed, and ValueError for a URL that is none.
    """
    request = urllib.request.Request(url, headers=headers, method=method)
    with _opener.open(request, timeout=_TIMEOUT) as response:
        return " ".join(response.read(_MOST).decode("utf-8", errors="replace").split())
